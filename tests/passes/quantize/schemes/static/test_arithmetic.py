"""Kernels on integers against numpy: the same bytes, but for halves that a float product moved."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from onnx import NodeProto, ValueInfoProto

from passes.quantize.schemes.static.apply import Format
from passes.quantize.schemes.static.quantize_static import DEFAULT_OPS, QuantizeStatic
from tests import ort
from tests.checks import model, random_feeds
from tests.passes.fuse.constants import floats, typed
from tests.passes.quantize.schemes.static.checks import Calibrated, operators
from toolkit.ir.model import Model
from toolkit.ir.node import attr
from toolkit.pass_manager.protocol import Context
from toolkit.settings import Settings

CONV = f"{floats('w', 8, 4, 3, 3)}, {floats('b', 8)}, {floats('v', 8, 8, 1, 1)}"
IMAGE = "g (float[N, 4, 8, 8] x) => (float[N, C, H, W] y)"
FIRST = "a = Conv <pads = [1, 1, 1, 1]> (x, w, b)"


def written(text: str, form: Format = "qop", target: str = "ort-cpu", **options: Any) -> Model:
    subject = model(text)
    Calibrated(QuantizeStatic(format=form, **options)).run(
        subject, Context(Settings(target=target))
    )
    return subject


def values_of(subject: Model, names: list[str]) -> dict[str, Any]:
    """What the values hold on a feed; constants too."""
    stored = {name: subject.graph.const(name) for name in names}
    made = [name for name in names if stored[name] is None]
    proto = subject.inlined_proto()
    del proto.graph.output[:]
    proto.graph.output.extend(ValueInfoProto(name=name) for name in made)
    found = ort.run(proto, random_feeds(subject))
    return stored | dict(zip(made, found, strict=True))


def the(subject: Model, op: str, count: int = 0) -> tuple[NodeProto, list[Any], list[Any]]:
    """A node of this operator, what it reads and what it makes."""
    node = [n for n in subject.graph.nodes if n.op_type == op][count]
    values = values_of(subject, [name for name in (*node.input, *node.output) if name])
    reads = [values[name] if name else None for name in node.input]
    return node, reads, [values[name] for name in node.output]


def requantized(reals: Any, scale: Any, zero: Any) -> Any:
    limits = np.iinfo(zero.dtype)
    return np.clip(np.rint(reals / np.float64(scale)) + int(zero), limits.min, limits.max)


def assert_bytes(found: Any, wanted: Any) -> None:
    """Equal, but for a step where a float product has crossed a half."""
    apart = np.abs(found.astype(int) - wanted)
    assert apart.max() <= 1
    assert np.mean(apart > 0) < 0.01


def reals(values: Any, scale: Any, zero: Any) -> Any:
    return (values.astype(np.float64) - int(np.asarray(zero).reshape(-1)[0])) * np.float64(scale)


def convolved(x: Any, w: Any, node: NodeProto) -> Any:
    """The sum of products of a convolution, in doubles: exact for integers."""
    spatial = x.ndim - 2
    group = attr(node, "group", 1)
    strides = attr(node, "strides", [1] * spatial)
    dilations = attr(node, "dilations", [1] * spatial)
    pads = attr(node, "pads", [0] * 2 * spatial)
    width = list(zip(pads[:spatial], pads[spatial:], strict=True))
    x = np.pad(x, [(0, 0), (0, 0), *width])
    sizes = [
        (x.shape[2 + i] - dilations[i] * (w.shape[2 + i] - 1) - 1) // strides[i] + 1
        for i in range(spatial)
    ]
    out = np.zeros((x.shape[0], w.shape[0], *sizes))
    ins, outs = w.shape[1], w.shape[0] // group
    for at in itertools.product(*(range(n) for n in w.shape[2:])):
        window = tuple(
            slice(at[i] * dilations[i], at[i] * dilations[i] + strides[i] * sizes[i], strides[i])
            for i in range(spatial)
        )
        for k in range(group):
            part = x[(slice(None), slice(k * ins, (k + 1) * ins), *window)]
            taps = w[(slice(k * outs, (k + 1) * outs), slice(None), *at)]
            out[:, k * outs : (k + 1) * outs] += np.einsum("nc...,oc->no...", part, taps)
    return out


@pytest.mark.parametrize("options", [{}, {"activations": "int8"}, {"weights": "uint8"},
                                     {"per_channel": False}, {"reduce_range": True}])  # fmt: skip
@pytest.mark.parametrize(
    ("x", "w", "attributes"),
    [
        ("N, 4, 9", (8, 4, 3), "strides = [2]"),
        ("N, 4, 8, 8", (8, 4, 3, 3), "strides = [2, 1], dilations = [1, 2], pads = [1, 0, 2, 1]"),
        ("N, 8, 8, 8", (8, 1, 3, 3), "group = 8, pads = [1, 1, 1, 1]"),
        ("N, 4, 6, 6", (6, 2, 2, 2), "group = 2"),
        ("N, 2, 4, 4, 4", (4, 2, 2, 2, 2), "pads = [0, 1, 0, 0, 0, 0]"),
    ],
)
def test_convolutions(x: str, w: tuple[int, ...], attributes: str, options: dict[str, Any]) -> None:
    signature = f"g (float[{x}] x) => (float[{', '.join(f'D{i}' for i in range(len(w)))}] y)"
    constants = f"{floats('w', *w)}, {floats('b', w[0])}"
    text = typed(signature, constants, f"c = Conv <{attributes}> (x, w, b) y = Relu (c)", 21)
    node, reads, (found,) = the(written(text, **options), "QLinearConv")
    xs, scale, zero, weights, w_scale, w_zero, y_scale, y_zero, bias = reads
    sums = convolved(
        xs.astype(np.float64) - int(zero),
        weights.astype(np.float64) - int(w_zero.reshape(-1)[0]),
        node,
    )
    sums += bias.reshape(-1, *[1] * (len(w) - 2))
    factor = np.float64(scale) * w_scale.reshape(-1, *[1] * (len(w) - 2)).astype(np.float64)
    assert_bytes(found, requantized(sums * factor, y_scale, y_zero))
    assert w_scale.size == (1 if options.get("per_channel") is False else w[0])


@pytest.mark.parametrize("turned", [0, 1])
def test_gemm(turned: int) -> None:
    shape = (8, 16) if turned else (16, 8)
    constants = f"{floats('m', *shape)}, {floats('b', 8)}, {floats('n', 8, 8)}"
    first = f"h = Gemm <transB = {turned}, alpha = 1.0, beta = 1.0> (x, m, b)"
    nodes = f"{first} r = Relu (h) y = Gemm (r, n)"
    subject = written(typed("g (float[N, 16] x) => (float[N, 8] y)", constants, nodes, 21))
    _, reads, (found,) = the(subject, "QGemm")
    a, a_scale, a_zero, b, b_scale, b_zero, bias, y_scale, y_zero = reads
    assert not b_zero.any()
    weights = b.astype(np.int64).T if turned else b.astype(np.int64)
    sums = (a.astype(np.int64) - int(a_zero)) @ weights + bias
    wanted = sums * (np.float64(a_scale) * b_scale.astype(np.float64))
    assert_bytes(found, requantized(wanted, y_scale, y_zero))
    _, reads, (found,) = the(subject, "QGemm", 1)
    a, a_scale, a_zero, b, b_scale, b_zero = reads
    sums = (a.astype(np.int64) - int(a_zero)) @ b.astype(np.int64)
    np.testing.assert_allclose(found, sums * (float(a_scale) * b_scale), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("target", "last"), [("ort-cpu", "MatMulIntegerToFloat"),
                                              ("onnx", "MatMulInteger")])  # fmt: skip
def test_matmul(target: str, last: str) -> None:
    constants = f"{floats('m', 16, 8)}, {floats('n', 8, 8)}"
    nodes = "h = MatMul (x, m) y = MatMul (h, n)"
    text = typed("g (float[N, S, 16] x) => (float[N, S, 8] y)", constants, nodes, 21)
    subject = written(text, target=target)
    _, (a, a_scale, a_zero, b, b_scale, _, y_scale, y_zero), (found,) = the(
        subject, "QLinearMatMul"
    )
    sums = (a.astype(np.int64) - int(a_zero)) @ b.astype(np.int64)
    assert_bytes(found, requantized(sums * (np.float64(a_scale) * b_scale), y_scale, y_zero))
    assert operators(subject)[last] == 1
    assert operators(subject)["DequantizeLinear"] == 0


@pytest.mark.parametrize(
    ("op", "node", "formula"),
    [
        ("QLinearSigmoid", "s = Sigmoid (a)", lambda x: 1 / (1 + np.exp(-x))),
        ("QLinearLeakyRelu", "s = LeakyRelu <alpha = 0.1> (a)",
         lambda x: np.where(x > 0, x, 0.1 * x)),
        ("QLinearGlobalAveragePool", "s = GlobalAveragePool (a)",
         lambda x: x.mean((2, 3), keepdims=True)),
        ("QLinearSoftmax", "s = Softmax <axis = 1> (a)",
         lambda x: np.exp(x) / np.exp(x).sum(1, keepdims=True)),
        ("QLinearAveragePool", "s = AveragePool <kernel_shape = [8, 8]> (a)",
         lambda x: x.mean((2, 3), keepdims=True)),
    ],
)  # fmt: skip
def test_functions(op: str, node: str, formula: Any) -> None:
    text = typed(IMAGE, CONV, f"{FIRST} {node} y = Conv (s, v)", 21)
    ops = (*DEFAULT_OPS, "AveragePool", "Softmax")
    _, (x, scale, zero, y_scale, y_zero), (found,) = the(written(text, ops=ops), op)
    assert_bytes(found, requantized(formula(reals(x, scale, zero)), y_scale, y_zero))


@pytest.mark.parametrize(("op", "formula"), [("Add", np.add), ("Mul", np.multiply)])
def test_sums_and_products(op: str, formula: Any) -> None:
    text = typed(IMAGE, CONV, f"{FIRST} c = Conv (a, v) s = {op} (a, c) y = Conv (s, v)", 21)
    _, reads, (found,) = the(written(text), f"QLinear{op}")
    a, b = reals(*reads[:3]), reals(*reads[3:6])
    assert_bytes(found, requantized(formula(a, b), *reads[6:]))


def test_concat_that_is_the_sole_user_copies_codes() -> None:
    nodes = f"{FIRST} c = Conv <pads = [1, 1, 1, 1]> (x, w) s = Concat <axis = 1> (a, c)"
    constants = f"{CONV}, {floats('u', 2, 16, 1, 1)}"
    subject = written(typed(IMAGE, constants, f"{nodes} y = Conv (s, u)", 21))
    _, (a, c), (found,) = the(subject, "Concat")
    np.testing.assert_array_equal(found, np.concatenate([a, c], axis=1))
    assert found.dtype == np.uint8


def test_concat_of_different_ranges_computes() -> None:
    """What others read as well would lose most of its levels to the range of its neighbour."""
    nodes = """a = Conv <pads = [1, 1, 1, 1]> (x, w, b) r = Relu (a) z = Conv (r, v)
                d = Conv (z, k) s = Concat <axis = 1> (r, d) t = Conv (r, v) c = Concat <axis = 1>
                (t, s) y = Conv (c, u)"""
    constants = f"{CONV}, {floats('k', 8, 8, 1, 1, low=-40, high=40)}, {floats('u', 2, 24, 1, 1)}"
    subject = written(typed(IMAGE, constants, nodes, 21))
    _, reads, (found,) = the(subject, "QLinearConcat")
    y_scale, y_zero, *parts = reads
    wanted = [reals(*parts[i : i + 3]) for i in range(0, len(parts), 3)]
    assert_bytes(found, requantized(np.concatenate(wanted, axis=1), y_scale, y_zero))


@pytest.mark.parametrize(
    "node",
    [
        "s = MaxPool <kernel_shape = [2, 2]> (a)",
        "s = Transpose <perm = [0, 1, 3, 2]> (a)",
        "s = Pad (a, pads)",
        'p = Pad <mode = "reflect"> (a, pads) s = Identity (p)',
        "s = Gather <axis = 2> (a, index)",
        's = Resize <mode = "nearest"> (a, , scales)',
        "s = Expand (a, shape)",
    ],
)
@pytest.mark.parametrize("kind", ["uint8", "int8"])
def test_data_movement_moves_codes(node: str, kind: Any) -> None:
    more = """int64[8] pads = {0, 0, 1, 1, 0, 0, 1, 1}, int64[2] index = {3, 1},
              float[4] scales = {1, 1, 2, 2}, int64[1] shape = {1}"""
    text = typed(IMAGE, f"{CONV}, {more}", f"{FIRST} {node} y = Conv (s, v)", 21)
    ops = (*DEFAULT_OPS, "Pad")
    qop = written(text, ops=ops, activations=kind)
    qdq = written(text, "qdq", ops=ops, activations=kind)
    assert operators(qop)["DequantizeLinear"] == 1  # of the output
    assert operators(qop)["QuantizeLinear"] == 1
    fed = random_feeds(qop)
    (one,), (other,) = ort.run(qop.inlined_proto(), fed), ort.run(qdq.inlined_proto(), fed)
    step = (np.abs(other).max() * 2) / 255
    assert np.abs(one - other).max() <= 2 * step


def test_only_standard_operators_for_other_runtimes() -> None:
    nodes = f"""{FIRST} r = Relu (a) s = Sigmoid (r) m = Mul (r, s)
                p = MaxPool <kernel_shape = [2, 2]> (m) y = Conv (p, v)"""
    subject = written(typed(IMAGE, CONV, nodes, 21), target="onnx")
    assert all(not node.domain for node in subject.graph.nodes)
    assert operators(subject)["QLinearConv"] == 2
    assert operators(subject)["Sum"] == 0


def test_clip_inside_the_int8_range_stays() -> None:
    """Around zero, bytes hold what the Relu takes away: it is computed, between pairs."""
    text = typed(IMAGE, CONV, f"{FIRST} r = Relu (a) y = Conv (r, v)", 21)
    subject = written(text, symmetric=True, activations="int8")
    assert operators(subject)["Relu"] == 1
    assert operators(subject)["QLinearConv"] == 2
    assert operators(written(text))["Relu"] == 0


def test_no_unused_constants_are_stored() -> None:
    text = typed(IMAGE, CONV, f"{FIRST} r = Relu (a) y = Conv (r, v)", 21)
    subject = written(text)
    unread = [name for name in subject.graph.initializers if subject.graph.is_unused(name)]
    assert unread == []
