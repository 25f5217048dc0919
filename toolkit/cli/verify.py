"""`toolkit verify`: compare two models output by output."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toolkit.cli import arguments as args
from toolkit.cli.inputs import read_model, require_apart
from toolkit.cli.outputs import JsonReport
from toolkit.cli.timing import TimeBoth, speed_of
from toolkit.errors import RuntimeRefused, UsageError

if TYPE_CHECKING:
    from toolkit.ir.model import Model


def verify(
    reference: Annotated[Path, typer.Argument(metavar="A", help="The reference model.")],
    other: Annotated[Path, typer.Argument(metavar="B", help="The model to compare with it.")],
    tolerance: Annotated[
        float,
        typer.Option(
            metavar="X", help="Largest difference allowed, relative to an output's scale."
        ),
    ] = 1e-4,
    samples: args.Samples = None,
    seed: args.Seed = 0,
    time: TimeBoth = False,
    custom_ops: args.CustomOps = None,
    json_file: args.JsonFile = None,
) -> int:
    """Run two models on the same inputs and compare their outputs; exit 1 if they differ."""
    if not 0 <= tolerance < math.inf:
        raise UsageError(f"--tolerance {tolerance} is not valid: write a number, 0 or more")
    report = JsonReport(json_file)
    report.side_file.require()

    from toolkit.report.comparison import print_comparison
    from toolkit.report.console import console, line
    from toolkit.verification.models import verify as compare

    libraries = args.libraries(custom_ops)
    models = [read_model(path) for path in (reference, other)]
    require_apart(report.files, models, samples, custom_ops)
    try:
        comparison = compare(
            *models,
            tolerance=tolerance,
            samples=samples or (),
            seed=seed,
            custom_ops=libraries,
        )
        shown = not report.on_stdout
        first, second = models
        speed = speed_of(second, first, samples, seed, libraries, shown) if time else None
    except RuntimeRefused as refusal:
        raise _with_causes(refusal, models, libraries) from refusal
    timed = {} if speed is None else {"speed": speed.to_json()}
    report.write({**comparison.to_json(), **timed})
    if shown:
        print_comparison(console(), comparison, tolerance)
        if speed is not None:
            line(console(), "speed of B", str(speed))
    return 0 if comparison.ok else 1


def _with_causes(
    refusal: RuntimeRefused, models: list[Model], libraries: tuple[str, ...]
) -> RuntimeRefused:
    """Return the refusal with the model's name and every cause, if a whole model is refused."""
    from toolkit.runtime.diagnose import why_refused

    for model in models:
        causes = why_refused(model, libraries)
        if causes:
            return RuntimeRefused(f"'{model.path}' does not run here: {'; '.join(causes)}")
    return refusal
