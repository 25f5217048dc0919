"""`toolkit.load` and `toolkit.optimize`: the same functions that the command line uses."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from toolkit.calibrate.data import Calib
from toolkit.ir.model import Model, Source
from toolkit.pass_manager.pipeline import Pipeline
from toolkit.pass_manager.protocol import AnyPass, Progress
from toolkit.pass_manager.registry import parse_passes
from toolkit.pass_manager.result import Result
from toolkit.settings import OpsetLimit, Prefer, Settings, Validate
from toolkit.targets import DEFAULT_TARGET

if TYPE_CHECKING:
    from toolkit.accuracy.requirement import Function
    from toolkit.feeds import Feed, Sample


def load(path: str | os.PathLike[str]) -> Model:
    """Load a model without reading its weights into memory."""
    return Model.load(path)


def optimize(
    source: Source,
    passes: str | AnyPass | Sequence[AnyPass | str] = "simplify",
    target: str = DEFAULT_TARGET,
    validate: Validate = "each",
    *,
    runtime: str | None = None,
    opset: OpsetLimit = None,
    samples: Sequence[Sample] = (),
    seed: int = 0,
    custom_ops: Sequence[str] = (),
    calib: Calib | str | os.PathLike[str] | Iterable[Feed] | None = None,
    max_drop: float | str | None = None,
    metric: str | Function | None = None,
    prefer: Prefer = "speed",
    measure: bool = True,
    fix: Mapping[str, int] | None = None,
    freeze: Mapping[str, Any] | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Result:
    """Run passes over a model and prove the result against the original.

    `passes` is a string as on the command line (`"fold,cleanup"`), a pass, or a list of passes,
    rewrite rules and such strings. `runtime` is the oldest onnxruntime that must load and run the
    result, such as `"1.18"`; by default the installed one. `opset` is the newest opset that the
    result may need: a newer model is lowered to it, and passes lift no further; `"keep"` leaves the
    opset as it is. `samples` are real inputs to verify with, as dicts of arrays by input name or as
    .npz files, in addition to synthetic inputs. `calib` is the calibration data
    for quantization: a source as for `--calib`, an iterable of feeds, or a `Calib` with options.
    The source is not modified. Raises `NotProven` if the result differs from the original by more
    than the tolerance of its passes.

    `max_drop` is the largest loss of accuracy allowed, such as 0.01, by the `metric`: sqnr,
    cosine, top1, error, or a function of the outputs. By default, the error budgets of
    `toolkit.accuracy.budgets` apply; `max_drop="off"` sets no limit. With `prefer="size"`, layers
    may be slower quantized than in float; `measure=False` disables timing on this machine.

    `fix` gives dimensions a size, by name (`{"batch": 1}`) or as `{"image:2": 320}`; `freeze` turns
    inputs into constants (`{"sr": 16000}`). The result is proven against the original with these.
    """
    listed = passes if isinstance(passes, Sequence) and not isinstance(passes, str) else [passes]
    settings = Settings(
        target=target,
        runtime=runtime,
        validate=validate,
        opset=opset,
        samples=samples,
        seed=seed,
        custom_ops=tuple(custom_ops),
        calib=calib if calib is None or isinstance(calib, Calib) else Calib(calib),
        max_drop=max_drop,
        metric=metric,
        prefer=prefer,
        measure=measure,
        fix=fix or {},
        freeze=freeze or {},
    )
    parsed = [
        p for item in listed for p in (parse_passes(item) if isinstance(item, str) else [item])
    ]
    pipeline = Pipeline(parsed, settings, progress=progress or (lambda _: None))
    model = Model.of(source)
    return pipeline.run(model.copy() if model is source else model)
