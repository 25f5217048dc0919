"""`toolkit demo`: optimize a small built-in model, and catch a planted mistake."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toolkit.cli.interrupts import Interrupted
from toolkit.errors import NotProven
from toolkit.storage.atomic_write import require_writable

if TYPE_CHECKING:
    from rich.console import Console

    from toolkit.ir.model import Model


def demo(
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FOLDER", help="Keep the models here; by default they are deleted."
        ),
    ] = None,
) -> None:
    """Optimize a small built-in model and watch a planted mistake being caught."""
    from toolkit.report.console import console

    screen = console()
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        for name in ("demo.onnx", "demo.opt.onnx"):
            require_writable(out / name)
        try:
            _run(screen, out)
        except KeyboardInterrupt as interrupt:
            raise Interrupted(f"some models may be in '{out}'") from interrupt
        return
    with tempfile.TemporaryDirectory(prefix="toolkit-demo-") as folder:
        _run(screen, Path(folder))
    screen.print(
        "\nThe models are deleted; --out FOLDER keeps them. To optimize your own:\n"
        "toolkit optimize model.onnx --passes fuse --time"
    )


def _run(screen: Console, folder: Path) -> None:
    from toolkit.api import load
    from toolkit.cli.demo_model import build
    from toolkit.ir.model import Model

    original = folder / "demo.onnx"
    Model.from_proto(build()).save(original)
    _optimize(screen, original)
    screen.print()
    _catch(screen, load(original))


def _optimize(screen: Console, original: Path) -> None:
    from toolkit.api import load, optimize
    from toolkit.cli.timing import speed_of
    from toolkit.report.console import line, print_result, progress_bar

    screen.rule("1. a vision transformer as exporters write it", align="left", characters="-")
    screen.print("$ toolkit optimize demo.onnx --passes fuse --time\n", style="bold")
    with progress_bar(wanted=True) as progress:
        result = optimize(original, "fuse", progress=progress)
    result.save(original.with_suffix(".opt.onnx"))
    print_result(screen, result, load(original).opsets[""])
    line(screen, "speed", str(speed_of(result.model, load(original), (), 0, (), shown=True)))


def _catch(screen: Console, model: Model) -> None:
    from toolkit.api import optimize
    from toolkit.cli.demo_model import planted_mistake
    from toolkit.report.console import line, print_result

    screen.rule("2. a mistake, planted", align="left", characters="-")
    screen.print(
        "The rule `halve` replaces x * 0.5 by x / 2, but in one place, by mistake, by x * 0.6.\n"
    )
    result = optimize(model, ["constants", planted_mistake()])
    print_result(screen, result)
    outcome = result.passes[-1]
    if len(outcome.undone) != 1 or not outcome.rewrites:
        raise NotProven("the planted mistake was not caught and undone alone")
    undone = outcome.undone[0]
    line(
        screen,
        "caught",
        f"1 of {outcome.rewrites + 1} rewrites, at '{undone.site}': only that one is undone, "
        f"the other {outcome.rewrites} stay",
        "green",
    )
