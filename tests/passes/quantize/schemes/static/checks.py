"""Shared by the tests of static int8: calibrated passes, and models as the runtime has them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from passes.quantize.schemes.static.quantize_static import QuantizeStatic
from tests.checks import check, parse, random_feeds
from tests.passes.fuse.constants import typed
from toolkit.calibrate.data import Calib
from toolkit.ir.model import Model
from toolkit.pass_manager.protocol import Context
from toolkit.quantization.plan import Plan
from toolkit.runtime.session import optimize_offline

ALL = QuantizeStatic()
IMAGE = "g (float[N, 4, 8, 8] x) => (float[N, 8, 8, 8] y)"
ROWS = "g (float[N, 16] x) => (float[N, 8] y)"
COARSE = 0.25


@dataclass(frozen=True)
class Calibrated:
    """A pass that finds calibration data: these feeds, or random ones."""

    item: QuantizeStatic = ALL
    feeds: Sequence[Mapping[str, Any]] = field(default=())
    opset: Any = None

    def run(self, model: Model, ctx: Context) -> None:
        ctx.calibration = context(model, self.feeds).calibration
        ctx.settings = replace(ctx.settings, opset=self.opset)
        self.item.run(model, ctx)


def context(model: Model, feeds: Sequence[Mapping[str, Any]] = ()) -> Context:
    """A context with calibration data: the random feeds that `check` compares by, and more."""
    chosen = list(feeds) or [random_feeds(model, seed) for seed in range(4)]
    return Context(calibration=Calib(chosen).open(model))


def quantized(
    signature: str, constants: str, nodes: str, kernels: str, item: Any = ALL, **options: Any
) -> Model:
    """Check that the model computes about the same, and runs by these kernels in the runtime."""
    pass_ = Calibrated(item, options.pop("feeds", ()), options.pop("limit", None))
    text = typed(signature, constants, nodes, options.pop("opset", 21))
    changed = check(pass_, text, atol=options.pop("atol", COARSE), **options)
    assert " ".join(sorted(deployed(changed))) == " ".join(sorted(kernels.split()))
    return changed


def stays(signature: str, constants: str, nodes: str, item: Any = ALL, **options: Any) -> list[str]:
    """Check that nothing changes; what the pass has to say about it."""
    text = typed(signature, constants, nodes, options.pop("opset", 21))
    pass_ = Calibrated(item, options.pop("feeds", ()))
    check(pass_, text, near_miss=True, **options)
    ctx = Context()
    pass_.run(Model.from_proto(parse(text)), ctx)
    return ctx.notes


def planned(text: str, item: QuantizeStatic = ALL, **options: Any) -> tuple[Model, Plan]:
    model = Model.from_proto(parse(text))
    return model, item.make_plan(model, context(model, options.pop("feeds", ())))


def deployed(model: Model) -> list[str]:
    """The operators that onnxruntime runs once it has loaded the model, without layout moves."""
    loaded = optimize_offline(model.inlined_proto(), "extended")
    return [n.op_type for n in loaded.graph.node if n.op_type not in _MOVES]


_MOVES = ("QuantizeLinear", "DequantizeLinear")


def operators(model: Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.nodes)


def outputs(model: Model, feeds: Mapping[str, Any]) -> list[Any]:
    from tests import ort

    return ort.run(model.inlined_proto(), feeds)


def normal(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
