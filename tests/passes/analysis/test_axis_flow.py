"""The axes that an operator carries, compared with its results for perturbed operands."""

from __future__ import annotations

import numpy as np
import pytest

from passes.analysis.axis_flow import BROADCAST, MIXED, axis_flow
from passes.analysis.shapes import Shapes
from tests import ort
from tests.checks import model, parse
from toolkit.ir.graph import Array
from toolkit.pass_manager.protocol import Context

HEAD = """agraph (float[2, 3, 4, 5] x, float[1, 4, 5] z) => (float[P] y) <
    int64[1] one = {1}, int64[1] two = {2}, int64[1] minus = {-1}, int64[2] ends = {2, 3},
    int64[3] joined = {2, 3, 20}, int64[4] split = {2, 3, 2, 10}, int64[5] wide = {2, 2, 3, 4, 5},
    int64[8] pads = {0, 0, 1, 0, 0, 0, 0, 2}, int64[4] repeats = {1, 2, 1, 1},
    int64[2, 2] picked = {0, 2, 1, 1}, float scale = {2.0}>"""

CASES = {
    "y = Relu (x)": [(0, 1, 2, 3)],
    "y = Transpose <perm = [0, 3, 1, 2]> (x)": [(0, 3, 1, 2)],
    "y = Unsqueeze (x, one)": [(0, BROADCAST, 1, 2, 3)],
    "u = Unsqueeze (x, one) y = Squeeze (u, one)": [(0, 2, 3, 4)],
    "y = Reshape (x, joined)": [(0, 1, MIXED)],
    "y = Reshape (x, split)": [(0, 1, MIXED, MIXED)],
    "y = Expand (x, wide)": [(BROADCAST, 0, 1, 2, 3)],
    "y = Slice (x, one, two, minus)": [(0, 1, 2, MIXED)],
    "y = Pad (x, pads)": [(0, 1, MIXED, MIXED)],
    "y = Tile (x, repeats)": [(0, MIXED, 2, 3)],
    "y = Gather <axis = 1> (x, picked)": [
        (0, BROADCAST, BROADCAST, 2, 3),
        (BROADCAST, 0, 1, BROADCAST, BROADCAST),
    ],
    "y = Concat <axis = 2> (x, x)": [(0, 1, MIXED, 3), (0, 1, MIXED, 3)],
    "y, s = Split <axis = 3, num_outputs = 2> (x)": [(0, 1, 2, MIXED)],
    "y = ReduceMean <keepdims = 0> (x, ends)": [(0, 1)],
    "y = ReduceMax (x, one)": [(0, MIXED, 2, 3)],
    "y = Softmax <axis = 1> (x)": [(0, MIXED, 2, 3)],
    "y = Add (x, z)": [(0, 1, 2, 3), (BROADCAST, BROADCAST, 1, 2)],
    "t = Transpose <perm = [0, 1, 3, 2]> (x) y = MatMul (x, t)": [
        (0, 1, 2, BROADCAST),
        (0, 1, BROADCAST, 3),
    ],
    "y = GlobalAveragePool (x)": [(0, 1, MIXED, MIXED)],
    "y = MaxPool <kernel_shape = [2, 2]> (x)": [(0, 1, MIXED, MIXED)],
    "y = DepthToSpace <blocksize = 1> (x)": [(0, MIXED, MIXED, MIXED)],
    "q = QuantizeLinear (x, scale) y = DequantizeLinear (q, scale)": [(0, 1, 2, 3)],
}


@pytest.mark.parametrize("body", CASES)
def test_axes_are_carried_as_expected(body: str) -> None:
    subject = model(f"{HEAD} {{ {body} }}")
    Shapes(annotate=False).run(subject, Context())
    node = subject.graph.producer("y")
    assert node is not None
    flow = axis_flow(subject.graph, node)
    assert flow is not None
    assert [flow.operands[slot].sources for slot in sorted(flow.operands)] == CASES[body]


@pytest.mark.parametrize("body", [body for body, flows in CASES.items() if len(flows) == 1])
def test_an_entry_of_a_carried_axis_affects_the_same_entry_alone(body: str) -> None:
    rng = np.random.default_rng(0)
    feed = {name: rng.normal(size=size).astype(np.float32) for name, size in _SHAPES.items()}
    plain = _run(body, feed)
    [sources] = CASES[body]
    first = body.startswith("u = Unsqueeze")
    for axis, source in enumerate(sources):
        if source < 0:
            continue
        own = source - 1 if first and source else source  # of x, in front of the Unsqueeze
        for entry in range(_SHAPES["x"][own]):
            other = {**feed, "x": feed["x"].copy()}
            other["x"][(slice(None),) * own + (entry,)] += 10
            changed = np.moveaxis(_run(body, other) != plain, axis, 0)
            assert not np.delete(changed, entry, 0).any()
            assert changed[entry].any()


_SHAPES = {"x": (2, 3, 4, 5), "z": (1, 4, 5)}


def _run(body: str, feed: dict[str, Array]) -> Array:
    return ort.run(parse(f"{HEAD} {{ {body} }}"), feed)[0]


UNKNOWN = {
    "a Reshape with an unknown shape": "agraph (float[2, 3] x, int64[2] s) => (float[P, Q] y)"
    "{ y = Reshape (x, s) }",
    "a Squeeze with unknown axes": "agraph (float[1, 3] x, int64[1] s) => (float[P] y)"
    "{ y = Squeeze (x, s) }",
    "an operator without a row": "agraph (float[2, 3] x) => (int64[2, N] y) { y = NonZero (x) }",
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_runtime_axes_have_no_flow(case: str) -> None:
    subject = model(UNKNOWN[case])
    Shapes(annotate=False).run(subject, Context())
    node = subject.graph.producer("y")
    assert node is not None
    flow = axis_flow(subject.graph, node)
    assert flow is None or set(flow.operands[0].sources) <= {MIXED}
