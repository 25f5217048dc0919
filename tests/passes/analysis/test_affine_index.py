"""The affine forms of index tensors, compared with their values at run time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from passes.analysis.affine_index import count, truth
from passes.analysis.shapes import Shapes
from tests import ort
from tests.checks import model, parse
from toolkit.ir.graph import Array, Graph
from toolkit.pass_manager.protocol import Context
from toolkit.symbolic import evaluate

SIZES = {"B": 3, "L": 4}
HEAD = """agraph (int64[B, L] x) => (int64[P] y) <
    int64 zero = {0}, int64 one = {1}, int64 two = {2}, int64[1] axis0 = {0}, int64[1] axis1 = {1},
    int64[1] l3 = {3}, int64[2] table = {5, 7}, int64[2, 3] grid = {1, 2, 3, 11, 12, 13},
    int64[2] uneven = {5, 8}, int64[3] bent = {0, 1, 3}>"""


def known(body: str) -> Graph:
    """Return a graph with sizes `b` and `l`, their ranges, and nodes `body` that compute y."""
    text = f"""{HEAD} {{
        s = Shape (x)
        b = Gather (s, zero)  l = Gather (s, one)
        rows = Range (zero, b, one)  cols = Range (zero, l, one)
        {body}
    }}"""
    subject = model(text)
    Shapes(annotate=False).run(subject, Context())
    subject.graph.verify()
    return subject.graph


COUNTS = [
    "y = Identity (cols)",
    "y = Unsqueeze (cols, axis1)",
    "u = Unsqueeze (rows, axis1) m = Mul (u, l) y = Add (m, cols)",
    "a = Add (cols, two) y = Sub (a, one)",
    "u = Unsqueeze (rows, axis1) y = Sub (cols, u)",
    "y = Slice (cols, axis1, l3)",
    "u = Unsqueeze (cols, axis0) y = Expand (u, s)",
    "u = Unsqueeze (rows, axis1) e = Expand (u, s) y = Transpose <perm = [1, 0]> (e)",
    "y = Mul (grid, two)",
    "c = Expand (two, s) y = Identity (c)",
    "c = Expand (zero, s) y = Gather (table, c)",
]


@pytest.mark.parametrize("body", COUNTS)
def test_counts_agree_with_the_runtime(body: str) -> None:
    graph = known(body)
    found = count(graph, "y")
    if "table" in body:
        assert found is None, "a table of different numbers is not one number everywhere"
        return
    assert found is not None
    text = f"{HEAD} {{ s = Shape (x) b = Gather (s, zero) l = Gather (s, one) "
    text += f"rows = Range (zero, b, one) cols = Range (zero, l, one) {body} }}"
    feeds = {"x": np.zeros((SIZES["B"], SIZES["L"]), np.int64)}
    proto = parse(text)
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    outputs: Any = ort.session(proto).run(None, feeds)
    wanted: Array = outputs[0]
    rebuilt: Array = np.full(wanted.shape, evaluate(found.offset, SIZES))
    for axis, stride in found.strides.items():
        rebuilt = rebuilt + evaluate(stride, SIZES) * np.indices(wanted.shape)[axis]
    np.testing.assert_array_equal(wanted, rebuilt)
    low, high = found.lowest, found.highest
    assert low is None or evaluate(low, SIZES) <= wanted.min()
    assert high is None or evaluate(high, SIZES) >= wanted.max()


@pytest.mark.parametrize(
    "body",
    [
        "y = Mul (cols, cols)",
        "y = Identity (bent)",
        "y = Gather (uneven, cols)",
        "y = Reshape (x, s)",
        "u = Unsqueeze (rows, axis1) e = Expand (u, s) f = Flatten (e) y = Add (f, x)",
    ],
)
def test_other_integers_do_not_count(body: str) -> None:
    assert count(known(body), "y") is None


@pytest.mark.parametrize(
    ("condition", "wanted"),
    [
        ("y = GreaterOrEqual (cols, zero)", True),
        ("y = Less (cols, zero)", False),
        ("y = Less (cols, l)", True),
        ("y = Greater (zero, cols)", False),
        ("y = LessOrEqual (cols, l)", True),
        ("y = Greater (cols, zero)", None),
        ("y = LessOrEqual (cols, two)", None),
        ("u = Unsqueeze (cols, axis1) y = LessOrEqual (cols, u)", None),
        ("a = GreaterOrEqual (cols, zero) b1 = Greater (cols, two) y = Or (a, b1)", True),
        ("a = GreaterOrEqual (cols, zero) b1 = Greater (cols, two) y = And (a, b1)", None),
        ("a = GreaterOrEqual (cols, zero) n = Not (a) y = Unsqueeze (n, axis0)", False),
        ("y = GreaterOrEqual (x, zero)", None),
    ],
)
def test_truth(condition: str, wanted: bool | None) -> None:
    assert truth(known(condition), "y") is wanted
