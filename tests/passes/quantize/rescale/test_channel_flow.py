"""Channel factors through operators, compared with the results for scaled operands."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import pytest
from onnx import NodeProto, helper, numpy_helper

from passes.analysis.shapes import Shapes
from passes.quantize.rescale.channel_flow import PASSERS, Flow, Index, along
from tests import ort
from tests.checks import model, random_feeds
from toolkit.ir import node as nd
from toolkit.ir.graph import Array
from toolkit.ir.model import Model
from toolkit.pass_manager.protocol import Context

HEAD = """<ir_version: 10, opset_import: ["" : 23, "com.microsoft" : 1]> agraph (
    float[2, 6, 4, 4] image, float[2, 5, 6] rows, float[2, 1, 5, 6] thin,
    float[2, 5, 5] weights, float[2, 5, 4] others, float[5] vector, float[7] seven,
    float[2, 6, 4, 4] second,
    float[2, 5, 12] queries, float[2, 7, 6] keys, float[2, 7, 6] values,
    float[2, 2, 5, 3] q, float[2, 2, 7, 3] k, float[2, 2, 7, 3] v, float[2, 4, 5, 3] q4,
    float[2, 2, 4, 7] scores, float[2, 5, 32] gq, float[2, 5, 16] gk, float[2, 5, 16] gv
) => (float[P] y) <
    float zero = {0}, float top = {6}, float huge = {3.4e38}, float lowest = {-3.4e38},
    float[6, 1, 1] slope = {0.1, 0.2, 0.3, 0.4, 0.5, 0.6},
    float[6] bias = {1, 2, 3, 4, 5, 6}, float[6, 1, 1] tall = {1, 2, 3, 4, 5, 6},
    float[5, 1] column = {1, 2, 3, 4, 5}, float one_number = {3},
    int64[2] spatial = {2, 3}, int64[1] last = {-1}, int64[1] one = {1},
    int64[8] border = {0, 0, 1, 1, 0, 0, 1, 1}, int64[8] deeper = {0, 1, 0, 0, 0, 0, 0, 0},
    int64[2] flat = {2, 96}, int64[4] apart = {0, 0, 2, 3}, int64[2] tokens = {-1, 6},
    int64[2] fifteen = {-1, 15},
    int32[2] lengths = {4, 4}, int32 total = {5}
>"""

ROW = np.arange(6)
"""A channel per entry of the last axis."""
COLUMN = ROW.reshape(6, 1, 1)
"""A channel per entry of axis 1 of an image."""
HEADS = np.arange(2).reshape(2, 1, 1)
"""A channel per head."""
PARTLY = np.array([0, -1, 1, -1, 2, 2])
"""Entries of the last axis without a channel, and two of one channel."""

ATTENTION = "Attention <q_num_heads = 4, kv_num_heads = 2>"
GROUPED = "com.microsoft.GroupQueryAttention <num_heads = 4, kv_num_heads = 2>"
MULTI_HEAD = "com.microsoft.MultiHeadAttention <num_heads = 2>"

PASSING: list[tuple[str, str, Index]] = [
    ("y = Identity (image)", "image", COLUMN),
    ("y = Relu (image)", "image", COLUMN),
    ("y = LeakyRelu (image)", "image", COLUMN),
    ("y = Abs (image)", "image", COLUMN),
    ("y = Neg (rows)", "rows", PARTLY),
    ("y = Dropout (rows)", "rows", ROW),
    ("y = PRelu (image, slope)", "image", COLUMN),
    ("y = Clip (image, zero)", "image", COLUMN),
    ("y = Clip (image, zero, huge)", "image", COLUMN),
    ("y = Clip (image, lowest)", "image", COLUMN),
    ("y = MaxPool <kernel_shape = [2, 2], pads = [1, 1, 0, 0]> (image)", "image", COLUMN),
    ("y = AveragePool <kernel_shape = [2, 2]> (image)", "image", COLUMN),
    ("y = GlobalAveragePool (image)", "image", COLUMN),
    ("y = GlobalMaxPool (image)", "image", COLUMN),
    ("y = Add (image, tall)", "image", COLUMN),
    ("y = Add (rows, bias)", "rows", np.zeros(1, np.int64)),
    ("y = Add (rows, one_number)", "rows", ROW),
    ("y = Sub (bias, rows)", "rows", ROW),
    ("y = Sum (bias, rows, bias)", "rows", PARTLY),
    ("y = Mul (bias, rows)", "rows", ROW),
    ("y = Mul (image, second)", "second", COLUMN),
    ("y = Div (rows, bias)", "rows", ROW),
    ("y = Transpose <perm = [0, 2, 3, 1]> (image)", "image", COLUMN),
    ("y = Transpose <perm = [2, 0, 1]> (rows)", "rows", ROW),
    ("y = Flatten (image)", "image", COLUMN),
    ("y = Reshape (image, flat)", "image", COLUMN),
    ("y = Reshape (rows, apart)", "rows", PARTLY),
    ("y = Reshape (rows, tokens)", "rows", ROW),
    ("y = Reshape (rows, fifteen)", "rows", np.zeros(1, np.int64)),
    ("y = Unsqueeze (rows, one)", "rows", ROW),
    ("y = Unsqueeze (rows, last)", "rows", ROW),
    ("y = Squeeze (thin, one)", "thin", ROW),
    ("y = Concat <axis = 1> (image, second)", "image", COLUMN),
    ("y = Concat <axis = 2> (others, rows)", "rows", PARTLY),
    ("y = Concat <axis = 0> (rows)", "rows", ROW),
    ("y, s = Split <axis = 1, num_outputs = 2> (image)", "image", COLUMN),
    ("y, s = Split <axis = -1, num_outputs = 2> (image)", "image", COLUMN),
    ("y = ReduceMean <keepdims = 0> (image, spatial)", "image", COLUMN),
    ("y = ReduceSum (image, spatial)", "image", COLUMN),
    ("y = ReduceMax (rows, one)", "rows", ROW),
    ("y = ReduceMin <keepdims = 0> (rows, one)", "rows", PARTLY),
    ("y = Pad (image, border)", "image", COLUMN),
    ('y = Pad <mode = "edge"> (image, border)', "image", COLUMN),
    ("y = MatMul (weights, rows)", "rows", ROW),
    ("y = MatMul (vector, rows)", "rows", ROW),
    ("y = MatMul (scores, v)", "v", HEADS),
    (f"y = {ATTENTION} (queries, keys, values)", "values", ROW),
    ("y = Attention (q, k, v)", "v", HEADS),
    ("y = Attention (q, k, v)", "v", np.arange(3)),
    (f"y = {MULTI_HEAD} (keys, keys, values)", "values", ROW),
    (f"y, pk, pv = {GROUPED} (gq, gk, gv, , , lengths, total)", "gv", np.arange(16)),
]

FROZEN: dict[str, tuple[str, str, Index]] = {
    "an upper bound": ("y = Clip (image, zero, top)", "image", COLUMN),
    "a lower bound other than 0": ("y = Clip (image, one_number)", "image", COLUMN),
    "a slope": ("y = PRelu (second, image)", "image", COLUMN),
    "an input with a computed slope": ("y = PRelu (image, second)", "image", COLUMN),
    "a sum of activations": ("y = Add (image, second)", "image", COLUMN),
    "a constant that would grow": ("y = Add (rows, column)", "rows", ROW),
    "a divisor": ("y = Div (bias, rows)", "rows", ROW),
    "a mean over channels": ("y = ReduceMean (rows, last)", "rows", ROW),
    "a pool over channels": ("y = MaxPool <kernel_shape = [3]> (rows)", "rows", ROW),
    "padding other than 0": ("y = Pad (image, border, top)", "image", COLUMN),
    "padding of channels": ("y = Pad (image, deeper)", "image", COLUMN),
    "indices of a pool": (
        "i, y = MaxPool <kernel_shape = [2, 2]> (image) z = Identity (y)",
        "image",
        COLUMN,
    ),
    "a mask of a Dropout": ("i, y = Dropout (rows) z = Identity (y)", "rows", ROW),
    "the left operand of a product": ("y = MatMul (rows, bias)", "rows", ROW),
    "a vector in front of heads": ("y = MatMul (seven, v)", "v", HEADS),
    "rows of the right operand": ("y = MatMul (weights, rows)", "rows", np.arange(5)[:, None]),
    "a vector on the right": ("y = MatMul (weights, vector)", "vector", np.arange(5)),
    "a join with rows that lack the factor": ("y = Concat <axis = 1> (rows, rows)", "rows", ROW),
    "queries": (f"y = {ATTENTION} (queries, keys, values)", "queries", np.arange(12)),
    "keys": (f"y = {ATTENTION} (queries, keys, values)", "keys", ROW),
    "factors per position": (
        f"y = {ATTENTION} (queries, keys, values)",
        "values",
        np.arange(7)[:, None],
    ),
    "heads shared by queries, on an axis": ("y = Attention (q4, k, v)", "v", HEADS),
    "values that are cached": (
        f"y, pk, pv = {GROUPED} (gq, gk, gv, , , lengths, total) z = Identity (pv)",
        "gv",
        np.arange(16),
    ),
    "values with a bias": (f"y = {MULTI_HEAD} (keys, keys, values, bias)", "values", ROW),
}
"""Operators that a factor does not pass, by what prevents it."""


@pytest.mark.parametrize(("body", "value", "index"), PASSING)
def test_scaling_the_operand_scales_the_results(body: str, value: str, index: Index) -> None:
    subject, node, flows = _flows(body, value, index)
    assert flows is not None
    feeds = random_feeds(subject)
    scaled = {**feeds, value: feeds[value] * _factors(index)}
    names = [name for name, _ in flows]
    added = set(node.input) - {value} if nd.is_op(node, "Add", "Sub", "Sum") else set[str]()
    before, after = _results(subject, feeds, names), _results(subject, scaled, names, added, index)
    for (name, channels), old, new in zip(flows, before, after, strict=True):
        np.testing.assert_allclose(new, old * _factors(channels), rtol=1e-4, err_msg=name)


@pytest.mark.parametrize("case", FROZEN)
def test_factors_do_not_pass(case: str) -> None:
    _, _, flows = _flows(*FROZEN[case])
    assert flows is None


def test_every_passer_has_a_case() -> None:
    nodes = [model(f"{HEAD} {{ {body} }}").graph.producer("y") for body, _, _ in PASSING]
    assert {nd.qualified(node) for node in nodes if node is not None} == PASSERS.keys()


@pytest.mark.parametrize(
    ("index", "axis", "channels"),
    [
        (ROW, -1, [0, 1, 2, 3, 4, 5]),
        (ROW, -2, None),
        (COLUMN, -3, [0, 1, 2, 3, 4, 5]),
        (COLUMN, -1, None),
        (ROW.reshape(2, 3), -1, None),
        (np.zeros((1, 1), np.int64), -2, [0]),
    ],
)
def test_channels_along_one_axis(index: Index, axis: int, channels: list[int] | None) -> None:
    found = along(index, axis)
    assert (None if found is None else found.tolist()) == channels


def _flows(body: str, value: str, index: Index) -> tuple[Model, NodeProto, list[Flow] | None]:
    """Return the model, the user of `value`, and how it passes a factor on."""
    subject = model(f"{HEAD} {{ {body} }}")
    Shapes(annotate=False).run(subject, Context())
    node = subject.graph.producer("y")
    assert node is not None
    passer = PASSERS[nd.qualified(node)]
    return subject, node, passer(subject.graph, node, list(node.input).index(value), index)


def _factors(index: Index) -> Array:
    """Return another power of two for each channel, and 1 for none."""
    return np.where(index < 0, 1, np.ldexp(np.float32(1), index + 1)).astype(np.float32)


def _results(
    subject: Model,
    feeds: dict[str, Array],
    names: list[str],
    scaled: Collection[str] = (),
    index: Index = ROW,
) -> list[Array]:
    """Compute values; the constants `scaled` get the factor, too."""
    proto = subject.to_proto()
    del proto.graph.output[:]
    proto.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in names)
    for tensor in proto.graph.initializer:
        if tensor.name in scaled:
            array = numpy_helper.to_array(tensor) * _factors(index)
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    return ort.run(proto, feeds)
