"""`toolkit optimize`: run passes on a model, prove the result, write it."""

from __future__ import annotations

import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolkit.cli import arguments as args, calibration, specialization
from toolkit.cli.inputs import read_model, require_apart
from toolkit.cli.interrupts import Interrupted
from toolkit.cli.outputs import Destinations, JsonReport, SideFile, model_path
from toolkit.cli.timing import TimeBoth, speed_of
from toolkit.errors import NotProven, UsageError
from toolkit.settings import Prefer, Settings, Validate
from toolkit.targets import DEFAULT_TARGET

if TYPE_CHECKING:
    from toolkit.pass_manager.protocol import Pass

_QUANTIZATION = "Quantization"
_NO_PLAN = "not written: nothing was quantized"


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
    target: args.TargetName = DEFAULT_TARGET,
    runtime: args.Runtime = None,
    opset: args.Opset = None,
    validate: Annotated[
        Validate,
        typer.Option(
            metavar="each|final|off", help="Verify after each pass, once at the end, or never."
        ),
    ] = "each",
    fix: specialization.Fix = None,
    freeze: specialization.Freeze = None,
    samples: args.Samples = None,
    calib: calibration.Source = None,
    calib_samples: calibration.MaxSamples = None,
    tokenizer: calibration.Tokenizer = None,
    calib_options: calibration.ReadingOptions = None,
    calib_cache: calibration.Cache = None,
    max_drop: calibration.MaxDrop = None,
    metric: calibration.MetricName = None,
    prefer: Annotated[
        Prefer,
        typer.Option(
            metavar="speed|size",
            rich_help_panel=_QUANTIZATION,
            help="Quantize for speed, or for size even where that is slower.",
        ),
    ] = "speed",
    no_measure: Annotated[
        bool,
        typer.Option(
            "--no-measure",
            metavar=args.NO_VALUE,
            rich_help_panel=_QUANTIZATION,
            help="Decide by the cost model alone, without timing on this machine.",
        ),
    ] = False,
    plan: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            rich_help_panel=_QUANTIZATION,
            help="Write the quantization plan as JSON; quantize:plan=FILE applies it.",
        ),
    ] = None,
    seed: args.Seed = 0,
    time: TimeBoth = False,
    custom_ops: args.CustomOps = None,
    external_data: args.ExternalData = False,
    json_file: args.JsonFile = None,
    html: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write the report as an HTML page."),
    ] = None,
    quiet: args.Quiet = False,
) -> None:
    """Run passes on a model, prove the result against the original, and write it."""
    report = JsonReport(json_file)
    plan_file, page_file = SideFile("--plan", plan), SideFile("--html", html)
    into = Destinations(model_path(output, model), external_data, report, plan_file, page_file)
    into.require()
    if samples and validate == "off":
        raise UsageError("--sample has no effect with --validate off")
    calibrating = calibration.CalibrationOptions(
        calib, calib_samples, tokenizer, calib_options or (), calib_cache
    )

    from toolkit.pass_manager.pipeline import Pipeline
    from toolkit.pass_manager.registry import parse_passes
    from toolkit.report.console import console, line, print_passes, print_result, progress_bar

    shown = not quiet and not report.on_stdout
    libraries = args.libraries(custom_ops)
    try:
        # the output of a user's pass goes to standard error: standard output is for reports
        with progress_bar(shown) as progress, redirect_stdout(sys.stderr):
            chosen = parse_passes(passes)
            given = {"--max-drop": max_drop, "--metric": metric, "--plan": plan}
            given |= {"--prefer": prefer == "size" or None, "--no-measure": no_measure or None}
            _require_quantizing(chosen, [option for option in given if given[option] is not None])
            settings = Settings(
                target=target,
                runtime=runtime,
                validate=validate,
                opset=args.opset_limit(opset),
                samples=samples or (),
                seed=seed,
                custom_ops=libraries,
                calib=calibrating.calib(seed),
                max_drop=max_drop,
                metric=metric,
                prefer=prefer,
                measure=not no_measure,
                fix=specialization.sizes(fix),
                freeze=specialization.values(freeze),
            )
            pipeline = Pipeline(chosen, settings, progress=progress)
            loaded = read_model(model)
            read = [*(samples or ()), *calibrating.files(), *specialization.files(freeze)]
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
        from toolkit.pass_manager.specialize import specialized

        original = read_model(model)
        fed = specialized(original, settings.fix, settings.freeze)
        speed = speed_of(result.model, original, samples, seed, libraries, shown, fed)
    with _reporting_state(into.model) as done:
        data = {**result.to_json(), "output": result.after.to_json(into.model)}
        if speed is not None:
            data["speed"] = speed.to_json()
        into.write(result, data, (opset_before, result.model.opsets.get("")))
        done.append(into.model)
        if shown:
            out = console()
            print_result(out, result, opset_before)
            planned = plan if plan is None or result.plans else _NO_PLAN
            lines = {"speed": speed, "written": into.model, "plan": planned, "report": html}
            for label, value in lines.items():
                if value is not None:
                    line(out, label, str(value))


def _require_quantizing(passes: Sequence[Pass], options: Sequence[str]) -> None:
    """Raise if options of quantization are given and no pass quantizes."""
    from toolkit.verification.tolerance import QUANT

    if options and not any(item.tolerance is QUANT for item in passes):
        raise UsageError(
            f"{options[0]} has no effect, none of the passes quantizes: add quantize to --passes"
        )


def _failed(model: Path, error: NotProven) -> dict[str, Any]:
    """Return the report of a failed run; reloads the input, which the passes edited in place."""
    from toolkit.pass_manager.result import ModelStats

    return {
        "input": ModelStats.of(read_model(model)).to_json(model),
        "output": None,
        "passes": [done.to_json() for done in error.passes],
        "proof": f"not proven: {error}",
        "seconds": round(sum(done.seconds for done in error.passes), 6),
    }


@contextmanager
def _reporting_state(destination: Path) -> Generator[list[Path]]:
    """Make errors while the model is written or shown say whether it is written."""
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
        # the model is valid even if the report cannot be printed
        print(f"standard output: {error.strerror}; '{destination}' is written", file=sys.stderr)
