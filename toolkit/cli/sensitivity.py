"""`toolkit sensitivity`: measure the sensitivity of each layer to quantization."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from toolkit.cli import arguments as args, calibration
from toolkit.cli.inputs import read_model, require_apart
from toolkit.cli.outputs import JsonReport
from toolkit.errors import UsageError
from toolkit.settings import Settings

if TYPE_CHECKING:
    from toolkit.accuracy.ablation import Quantized
    from toolkit.ir.model import Model
    from toolkit.pass_manager.protocol import Context, Pass

_DEFAULT, _WITH_DATA = "fuse,quantize-dynamic", "fuse,quantize-static"
"""Linear layers need no calibration data; convolutions do."""


def sensitivity(
    model: args.ModelPath,
    passes: Annotated[
        str | None,
        typer.Option(
            metavar="PASSES",
            help=f"Passes in order, the last one quantizing; by default {_DEFAULT}, or "
            f"{_WITH_DATA} if that quantizes nothing and --calib is given.",
        ),
    ] = None,
    calib: calibration.Source = None,
    calib_samples: calibration.MaxSamples = None,
    tokenizer: calibration.Tokenizer = None,
    calib_options: calibration.ReadingOptions = None,
    calib_cache: calibration.Cache = None,
    compared: Annotated[
        int,
        typer.Option("--compare", metavar="N", min=1, help="Number of samples to compare on."),
    ] = 8,
    most: Annotated[
        int, typer.Option("--top", metavar="N", min=1, help="Number of rows to print per table.")
    ] = 20,
    seed: args.Seed = 0,
    custom_ops: args.CustomOps = None,
    json_file: args.JsonFile = None,
) -> None:
    """Quantize one layer at a time to find sensitive ones; show how errors accumulate."""
    report = JsonReport(json_file)
    report.side_file.require()

    from toolkit.accuracy.ablation import quantize_by
    from toolkit.accuracy.evaluator import evaluator_for
    from toolkit.accuracy.sensitivity import layer_noise, value_noise
    from toolkit.pass_manager.pipeline import Pipeline
    from toolkit.pass_manager.protocol import Context
    from toolkit.pass_manager.registry import parse_passes
    from toolkit.report.console import console, steps_bar
    from toolkit.report.sensitivity import print_sensitivity
    from toolkit.verification.validator import Validator

    before, quantizer = _split(parse_passes(passes or _DEFAULT), passes or _DEFAULT)
    calibrating = calibration.CalibrationOptions(
        calib, calib_samples, tokenizer, calib_options or (), calib_cache
    )
    source = calibrating.calib(seed)
    libraries = args.libraries(custom_ops)
    loaded = read_model(model)
    require_apart(report.files, [loaded], calibrating.files(), custom_ops)
    with steps_bar(not report.on_stdout, "loading") as progress:
        settings = Settings(validate="off", custom_ops=libraries, calib=source, measure=False)
        floats = Pipeline(before, settings).run(loaded).model
        data = source.open(floats, libraries, progress) if source is not None else None
        validator = Validator(floats, seed=seed, custom_ops=libraries) if data is None else None
        evaluator = evaluator_for(floats, data, validator, custom_ops=libraries, most=compared)
        if evaluator is None:
            raise UsageError(f"'{model}' does not run here: there is nothing to compare")

        def context() -> Context:
            return Context(settings, calibration=data, reference=floats, evaluator=evaluator)

        if passes is not None:
            found = quantize_by(quantizer, floats, context)
        else:
            found = _quantized_by_default(quantizer, floats, context)
        layers = layer_noise(evaluator, found.variants, compared, progress)
        values = value_noise(
            floats, found.whole, evaluator.feeds, samples=compared, custom_ops=libraries
        )
    report.write(
        {"layers": [row.to_json() for row in layers], "values": [row.to_json() for row in values]}
    )
    if not report.on_stdout:
        print_sensitivity(console(), layers, values, most)


def _quantized_by_default(
    quantizer: Pass, floats: Model, context: Callable[[], Context]
) -> Quantized:
    """Quantize without calibration data, or statically if that quantizes nothing."""
    from toolkit.accuracy.ablation import quantize_by
    from toolkit.pass_manager.registry import parse_passes

    try:
        return quantize_by(quantizer, floats, context)
    except UsageError as error:
        if context().calibration is None:
            raise UsageError(f"{error}; convolutions need samples: --calib SOURCE") from error
        _, static = _split(parse_passes(_WITH_DATA), _WITH_DATA)
        return quantize_by(static, floats, context)


def _split(passes: Sequence[Pass], text: str) -> tuple[list[Pass], Pass]:
    """Return the passes before the first quantizing one, and that one."""
    from toolkit.verification.tolerance import QUANT

    at = next((i for i, item in enumerate(passes) if item.tolerance is QUANT), None)
    if at is None:
        raise UsageError(f"none of the passes {text} quantizes: add quantize-dynamic")
    return list(passes[:at]), passes[at]
