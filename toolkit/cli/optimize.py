"""`toolkit optimize`: run passes over a model, prove the result, write it."""

from __future__ import annotations

import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolkit.choices import Prefer, Target, Validate
from toolkit.cli import arguments as args
from toolkit.cli import calibration
from toolkit.cli.interrupts import Interrupted
from toolkit.cli.output import JsonReport, PlanFile, Written, output_file
from toolkit.cli.reading import read_model, require_apart
from toolkit.cli.timing import TimeBoth, speed_of
from toolkit.errors import NotProven, UsageError
from toolkit.files import require_writable, sidecar_of

if TYPE_CHECKING:
    from toolkit.context import Pass
    from toolkit.model import Model

_QUANTIZING = "Quantizing"
_MAY_NEED_A_SIDECAR = 1 << 30
"""Bytes of weights from which on a model may come to exceed what fits into one file (2 GiB)."""


def optimize(
    model: args.ModelPath,
    output: Annotated[
        str | None,
        typer.Option(
            "-o", "--output", metavar="FILE", help="Where to write; by default MODEL.opt.onnx."
        ),
    ] = None,
    passes: Annotated[
        str,
        typer.Option(
            metavar="PASSES",
            help="Passes in order, as in fuse,quantize or fold,./my.py:MyRule; "
            "`toolkit passes` lists them.",
        ),
    ] = "simplify",
    target: Annotated[
        Target,
        typer.Option(
            metavar="ort-cpu|onnx", help="What the model is for; onnx keeps to standard operators."
        ),
    ] = "ort-cpu",
    opset: args.Opset = None,
    validate: Annotated[
        Validate,
        typer.Option(
            metavar="each|final|off", help="Prove the model after each pass, at the end, or not."
        ),
    ] = "each",
    samples: args.Samples = None,
    calib: calibration.Source = None,
    calib_samples: calibration.MostSamples = None,
    tokenizer: calibration.Tokenizer = None,
    calib_options: calibration.Details = None,
    calib_cache: calibration.Cache = None,
    max_drop: calibration.MaxDrop = None,
    metric: calibration.MetricName = None,
    prefer: Annotated[
        Prefer,
        typer.Option(
            metavar="speed|size",
            rich_help_panel=_QUANTIZING,
            help="Whether what is quantized may be slower than it was.",
        ),
    ] = "speed",
    no_measure: Annotated[
        bool,
        typer.Option(
            "--no-measure",
            metavar=args.NO_VALUE,
            rich_help_panel=_QUANTIZING,
            help="Choose by known costs alone, and time nothing on this machine.",
        ),
    ] = False,
    plan: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            rich_help_panel=_QUANTIZING,
            help="Write what was quantized and how, as JSON; quantize:plan=FILE follows it.",
        ),
    ] = None,
    seed: args.Seed = 0,
    time: TimeBoth = False,
    custom_ops: args.CustomOps = None,
    external_data: args.ExternalData = False,
    json_file: args.JsonFile = None,
    quiet: args.Quiet = False,
) -> None:
    """Run passes over a model, prove the result against the original, and write it."""
    destination = output_file(output, model)
    for path in [destination, sidecar_of(destination)] if external_data else [destination]:
        require_writable(path)
    report = JsonReport(json_file)
    report.require(destination)
    if samples and validate == "off":
        raise UsageError("--sample is of no use with --validate off")
    given = calibration.Given(calib, calib_samples, tokenizer, calib_options or (), calib_cache)
    plan_file = PlanFile.of(plan)
    plan_file.require_apart([Written("the output", destination), *report.files])

    from toolkit.pipeline import Pipeline
    from toolkit.registry import parse_passes
    from toolkit.report.console import console, line, print_passes, print_result, progress_bar

    shown = not quiet and not report.on_stdout
    libraries = args.libraries(custom_ops)
    try:
        # what a user's pass prints goes to standard error: standard output is the report's
        with progress_bar(shown) as progress, redirect_stdout(sys.stderr):
            chosen = parse_passes(passes)
            _require_quantizing(chosen, max_drop=max_drop, metric=metric, plan=plan)
            if validate == "off" and (max_drop not in (None, "off") or metric):
                raise UsageError("--max-drop and --metric are of no use with --validate off")
            pipeline = Pipeline(
                chosen,
                validate=validate,
                target=target,
                opset=args.opset_limit(opset),
                samples=samples or (),
                seed=seed,
                custom_ops=libraries,
                calib=given.calib(seed),
                max_drop=max_drop,
                metric=metric,
                prefer=prefer,
                measure=not no_measure,
                progress=progress,
            )
            loaded = read_model(model)
            written = [
                *_files_of(destination, loaded, external_data),
                *report.files,
                *plan_file.files,
            ]
            require_apart(written, [loaded], [*(samples or ()), *given.files()], custom_ops)
            opset_before = loaded.opsets.get("")
            result = pipeline.run(loaded)
    except NotProven as error:
        if shown:
            print_passes(console(), error.passes)
        hint = "; --validate each finds the pass and undoes it" if validate == "final" else ""
        failure = NotProven(f"{error}{hint}", error.passes)
        report.write(_failed(model, failure))
        raise failure from error
    speed = None
    if time:
        speed = speed_of(result.model, read_model(model), samples, seed, libraries, shown)
    with _told(destination) as done:
        # the report first, so that it cannot fail once the model is there
        shown_as = {**result.to_json(), "output": result.after.to_json(destination)}
        if speed is not None:
            shown_as["speed"] = speed.to_json()
        with plan_file.staged(result.plans), report.staged(shown_as):
            result.save(destination, external_data)
        done.append(destination)
        if shown:
            out = console()
            print_result(out, result, opset_before)
            if speed is not None:
                line(out, "speed", str(speed))
            line(out, "written", str(destination))
            if plan is not None:
                line(out, "plan", plan_file.told(result.plans))


def _require_quantizing(passes: Sequence[Pass], **asked: object) -> None:
    """What is asked of quantizing is a mistake where nothing quantizes."""
    from toolkit.tolerance import QUANT

    if any(item.tolerance is QUANT for item in passes):
        return
    idle = next((name for name, value in asked.items() if value is not None), None)
    if idle is not None:
        option = idle.replace("_", "-")
        raise UsageError(f"--{option} is of no use: none of the passes quantizes, add quantize")


def _files_of(destination: Path, model: Model, external_data: bool) -> list[Written]:
    files = [Written("the output", destination)]
    if external_data or model.nbytes() >= _MAY_NEED_A_SIDECAR:
        files.append(Written("the output's data file", sidecar_of(destination)))
    return files


def _failed(model: Path, error: NotProven) -> dict[str, Any]:
    """The report of a run that wrote nothing; the model in memory is no longer the input."""
    from toolkit.result import ModelStats

    return {
        "input": ModelStats.of(read_model(model)).to_json(model),
        "output": None,
        "passes": [done.to_json() for done in error.passes],
        "proof": f"not proven: {error}",
        "seconds": round(sum(done.seconds for done in error.passes), 6),
    }


@contextmanager
def _told(destination: Path) -> Generator[list[Path]]:
    """While the model is written and then shown: what goes wrong says whether it is there."""
    done: list[Path] = []
    try:
        yield done
        sys.stdout.flush()
    except KeyboardInterrupt as interrupt:
        what = "is written" if done else "is complete or as it was before"
        raise Interrupted(f"'{destination}' {what}") from interrupt
    except BrokenPipeError:
        raise
    except OSError as error:
        if not done:
            raise
        # that nobody sees the table does not make the model wrong
        print(f"standard output: {error.strerror}; '{destination}' is written", file=sys.stderr)
