"""`toolkit optimize`: run passes over a model, prove the result, write it."""

from __future__ import annotations

import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolkit.cli import arguments as args
from toolkit.cli import calibration
from toolkit.cli.inputs import read_model, require_apart
from toolkit.cli.interrupts import Interrupted
from toolkit.cli.output_file import JsonReport, SideFile, output_file
from toolkit.cli.outputs import Destinations
from toolkit.cli.timing import TimeBoth, speed_of
from toolkit.errors import NotProven, UsageError
from toolkit.settings import Prefer, Target, Validate

if TYPE_CHECKING:
    from toolkit.pass_manager.protocol import Pass

_QUANTIZING = "Quantizing"
_NO_PLAN = "nothing was quantized: it is not written"


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
    html: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write the report as a page for a browser."),
    ] = None,
    quiet: args.Quiet = False,
) -> None:
    """Run passes over a model, prove the result against the original, and write it."""
    report = JsonReport(json_file)
    plan_file, page_file = SideFile.of("--plan", plan), SideFile.of("--html", html)
    into = Destinations(output_file(output, model), external_data, report, plan_file, page_file)
    into.require()
    if samples and validate == "off":
        raise UsageError("--sample is of no use with --validate off")
    given = calibration.Given(calib, calib_samples, tokenizer, calib_options or (), calib_cache)

    from toolkit.pass_manager.pipeline import Pipeline
    from toolkit.pass_manager.registry import parse_passes
    from toolkit.report.console import console, line, print_passes, print_result, progress_bar

    shown = not quiet and not report.on_stdout
    libraries = args.libraries(custom_ops)
    try:
        # what a user's pass prints goes to standard error: standard output is the report's
        with progress_bar(shown) as progress, redirect_stdout(sys.stderr):
            chosen = parse_passes(passes)
            _require_quantizing(
                chosen,
                max_drop=max_drop,
                metric=metric,
                plan=plan,
                prefer=prefer if prefer == "size" else None,
                no_measure=no_measure or None,
            )
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
            read = [*(samples or ()), *given.files()]
            require_apart(into.files(loaded), [loaded], read, custom_ops)
            opset_before = loaded.opsets.get("")
            result = pipeline.run(loaded)
    except NotProven as error:
        if shown:
            print_passes(console(), error.passes)
        hint = "; --validate each finds the pass and undoes it" if validate == "final" else ""
        failure = NotProven(f"{error}{hint}", error.passes)
        into.write_failure(_failed(model, failure))
        raise failure from error
    speed = None
    if time:
        speed = speed_of(result.model, read_model(model), samples, seed, libraries, shown)
    with _told(into.model) as done:
        told = {**result.to_json(), "output": result.after.to_json(into.model)}
        if speed is not None:
            told["speed"] = speed.to_json()
        into.write(result, told, (opset_before, result.model.opsets.get("")))
        done.append(into.model)
        if shown:
            out = console()
            print_result(out, result, opset_before)
            planned = plan if plan is None or result.plans else _NO_PLAN
            ends = {"speed": speed, "written": into.model, "plan": planned, "report": html}
            for what, end in ends.items():
                if end is not None:
                    line(out, what, str(end))


def _require_quantizing(passes: Sequence[Pass], **asked: object) -> None:
    """What is asked of quantizing is a mistake where nothing quantizes."""
    from toolkit.verification.tolerance import QUANT

    if any(item.tolerance is QUANT for item in passes):
        return
    idle = next((name for name, value in asked.items() if value is not None), None)
    if idle is not None:
        option = idle.replace("_", "-")
        raise UsageError(f"--{option} is of no use: none of the passes quantizes, add quantize")


def _failed(model: Path, error: NotProven) -> dict[str, Any]:
    """The report of a run that wrote nothing; the model in memory is no longer the input."""
    from toolkit.pass_manager.result import ModelStats

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
