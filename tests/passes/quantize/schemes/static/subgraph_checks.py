"""Shared by the tests of static int8 in bodies: models, samples, and what to expect of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
from onnx import GraphProto

from passes.quantize.schemes.static.quantize_static import QuantizeStatic
from tests import ort
from tests.checks import check, model
from tests.passes.fuse.constants import floats
from tests.passes.quantize.schemes.static.checks import ALL, Calibrated, context, normal
from toolkit.ir.graph import Graph
from toolkit.ir.model import Model
from toolkit.ir.node import graphs_of
from toolkit.pass_manager.protocol import Context
from toolkit.quantization.number_format import FORMATS
from toolkit.quantization.plan import Plan
from toolkit.quantization.qparams import QParams
from toolkit.runtime.session import optimize_offline

CONV = f"{floats('w', 8, 4, 3, 3)}, {floats('b', 8)}, {floats('v', 8, 8, 1, 1)}"
WIDE = f"{floats('w', 32, 32, 3, 3)}, {floats('b', 32)}, {floats('v', 32, 32, 1, 1)}"
LINEAR = f"{floats('m', 16, 16, low=-0.3, high=0.3)}, bool on = {{1}}"
YES, NO = np.array(True), np.array(False)

BRANCHES = f"""g (bool c, float[N, 4, 8, 8] x) => (float[N, 8, 8, 8] y) <{CONV}> {{
    y = If (c) <
        then_branch = t () => (float[N, 8, 8, 8] p) {{
            a = Conv <pads = [1, 1, 1, 1]> (x, w, b) r = Relu (a) p = Conv (r, v) }},
        else_branch = e () => (float[N, 8, 8, 8] q) {{
            q = Conv <pads = [1, 1, 1, 1]> (x, w) }}> }}"""

GROWING = f"""g (int64 n, float[N, 16] x) => (float[M, 16] y) <{LINEAR}, {floats("row", 1, 16)}> {{
    y = Loop (n, on, x) <body = l (int64 i, bool go, float[P, 16] s) => (bool d, float[Q, 16] u)
        {{ d = Identity (go) k = MatMul (s, m) u = Concat <axis = 0> (k, row) }}> }}"""

SHARED = f"""g (bool c, float[N, 16] x) => (float[N, 16] y, float[N, 16] z) <{LINEAR}> {{
    z = MatMul (x, m)
    y = If (c) <then_branch = t () => (float[N, 16] p) {{ h = Tanh (x) p = MatMul (h, m) }},
                else_branch = e () => (float[N, 16] q) {{ q = Neg (x) }}> }}"""

OUTER = f"""g (bool c, float[N, 4, 8, 8] x) => (float[N, 8, 8, 8] y) <{CONV}> {{
    a = Conv <pads = [1, 1, 1, 1]> (x, w, b) r = Relu (a)
    y = If (c) <then_branch = t () => (float[N, 8, 8, 8] p) {{ p = Conv (r, v) }},
                else_branch = e () => (float[N, 8, 8, 8] q) {{ q = Neg (r) }}> }}"""
INNER = "{ a = Conv <pads = [1, 1, 1, 1]> (x, w, b) r = Relu (a) y = Conv (r, v) }"


def branch_feeds(*taken: Any) -> list[dict[str, Any]]:
    return [{"c": c, "x": normal(2, 4, 8, 8, seed=seed)} for seed, c in enumerate(taken)]


def wide(text: str) -> tuple[str, list[dict[str, Any]]]:
    """The same with layers that pay, and samples."""
    for size in ("4, 8, 8", "8, 8, 8"):
        text = text.replace(size, "32, 16, 16")
    feeds = [{**feed, "x": normal(1, 32, 16, 16)} for feed in branch_feeds(*[YES, NO] * 4)]
    return text.replace(CONV, WIDE), feeds


def loop_feeds(*steps: int) -> list[dict[str, Any]]:
    return [{"n": np.array(n), "x": normal(2, 16, seed=seed)} for seed, n in enumerate(steps)]


def quantized(text: str, feeds: list[Any], item: QuantizeStatic = ALL) -> Model:
    """The model in int8; everything that holds of every rewrite holds."""
    return check(Calibrated(item, feeds), text, atol=0.5, inputs=feeds[0])


def notes(text: str, feeds: list[Any], item: QuantizeStatic = ALL) -> str:
    ctx = Context()
    Calibrated(item, feeds).run(model(text), ctx)
    return "; ".join(ctx.notes)


def run(subject: Model, feed: Any) -> Any:
    return ort.run(subject.inlined_proto(), feed)[0]


def kernels(subject: Model) -> Counter[str]:
    """The operators that onnxruntime runs in bodies, without those that only convert or hand on."""
    loaded = optimize_offline(subject.inlined_proto(), "extended")
    left = ("QuantizeLinear", "DequantizeLinear", "Identity")
    found = (node for node in inside(loaded.graph) if node.op_type not in left)
    return Counter(node.op_type for node in found)


def inside(graph: GraphProto) -> Iterator[Any]:
    for node in graph.node:
        for body in graphs_of(node):
            yield from body.node
            yield from inside(body)


def bodies(subject: Model) -> list[Graph]:
    return list(subject.graphs())[1:]


def ops(graph: Graph) -> Counter[str]:
    return Counter(node.op_type for node in graph.nodes)


def plan_of(text: str, feeds: list[Any], item: QuantizeStatic = ALL) -> tuple[Model, Plan]:
    subject = model(text)
    return subject, item.make_plan(subject, context(subject, feeds))


def params_of(plan: Plan, tensor: str) -> QParams:
    entry = plan.tensor(tensor)
    assert entry is not None
    assert entry.low is not None
    assert entry.high is not None
    return QParams.from_range(entry.low, entry.high, FORMATS[entry.dtype])


def product(x: Any, weights: Any, by: QParams, channels: bool = True) -> Any:
    """x W in integers, for weights [inputs, outputs]."""
    scale = np.abs(weights).max(0 if channels else None) / np.float32(127)
    codes = np.rint(weights / scale).astype(int)
    exact = (by.quantize(x).astype(int) - by.zero_point) @ codes
    return exact * (np.float64(by.scale) * scale)


def large(graph: Graph) -> list[Any]:
    """The weights that a graph stores."""
    arrays = [graph.const(name) for name in graph.initializers]
    return [array for array in arrays if array is not None and array.ndim > 1]


def stored_floats(text: str, name: str) -> Any:
    subject = model(text)
    found = [g.const(name) for g in subject.graphs() if name in g.initializers]
    assert len(found) == 1
    return found[0]
