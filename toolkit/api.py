"""`toolkit.load` and `toolkit.optimize`: the same functions that the command line uses."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

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
    opset: OpsetLimit = None,
    samples: Sequence[Sample] = (),
    seed: int = 0,
    custom_ops: Sequence[str] = (),
    calib: Calib | str | os.PathLike[str] | Iterable[Feed] | None = None,
    max_drop: float | str | None = None,
    metric: str | Function | None = None,
    prefer: Prefer = "speed",
    measure: bool = True,
    progress: Callable[[Progress], None] | None = None,
) -> Result:
    """Run passes over a model and prove the result against the original.

    `passes` is a string as on the command line (`"fold,cleanup"`), a pass, or a list of passes,
    rewrite rules and such strings. `opset` is the newest opset that they may lift the model to
    where they would take a newer one than it has; `"keep"` means none at all. `samples` are real
    inputs to validate with, as dicts of arrays by input name or as .npz files; besides them, inputs
    are made up inside each input's domain. `calib` is the data that quantization measures ranges
    with: what `--calib` takes, an iterable of feeds, or a `Calib` with options besides. The source
    is never modified. Raises `NotProven` when the result differs from the original beyond the
    tolerance of its passes.

    What quantizing may cost is in the budgets of `toolkit.accuracy.budgets`, or `max_drop` says it,
    as 0.01, by the `metric` sqnr, cosine, top1 or error, or by a function of the outputs that knows
    the labels; `max_drop="off"` lets everything pass. With `prefer="size"` layers may come out
    slower than they were; `measure=False` times nothing.
    """
    listed = passes if isinstance(passes, Sequence) and not isinstance(passes, str) else [passes]
    settings = Settings(
        target=target,
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
    )
    parsed = [
        p for item in listed for p in (parse_passes(item) if isinstance(item, str) else [item])
    ]
    pipeline = Pipeline(parsed, settings, progress=progress or (lambda _: None))
    model = Model.of(source)
    return pipeline.run(model.copy() if model is source else model)
