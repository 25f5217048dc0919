"""Weights viewed by inputs and outputs, compared with the results of scaled layers."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import numpy_helper

from passes.quantize.layers.channel_weights import Kernel, kernel_of, put_scaled
from tests import ort
from tests.checks import model, random_feeds
from tests.passes.fuse.constants import floats
from toolkit.ir.graph import Array
from toolkit.ir.model import Model
from toolkit.rewriting.match_failure import MatchFailure

IMAGE = "g (float[2, 4, 5, 5] x) => (float[2, O, H, W] y)"
ROWS = "g (float[3, 4] x) => (float[3, 6] y)"
FUSED = "com.microsoft.FusedMatMul"

LAYERS = {
    "y = MatMul (x, w)": (ROWS, (4, 6)),
    "y = MatMul (z, w)": ("g (float[2, 3, 4] z) => (float[2, 3, 6] y)", (2, 4, 6)),
    "y = Gemm (x, w)": (ROWS, (4, 6)),
    "y = Gemm <transB = 1, alpha = 0.5> (x, w)": (ROWS, (6, 4)),
    f"y = {FUSED} <transB = 1> (x, w)": (ROWS, (6, 4)),
    "y = Conv (x, w)": (IMAGE, (6, 4, 3, 3)),
    "y = Conv <group = 2> (x, w)": (IMAGE, (6, 2, 3, 3)),
    "y = Conv <group = 4> (x, w)": (IMAGE, (8, 1, 3, 3)),
    "y = ConvTranspose (x, w)": (IMAGE, (4, 6, 2, 2)),
    "y = ConvTranspose <group = 2> (x, w)": (IMAGE, (4, 3, 2, 2)),
    "y = ConvTranspose <group = 4> (x, w)": (IMAGE, (4, 2, 2, 2)),
}


def layer(nodes: str) -> tuple[Model, Kernel]:
    signature, shape = LAYERS[nodes]
    subject = model(f"{signature} <{floats('w', *shape)}> {{ {nodes} }}")
    kernel = kernel_of(subject.graph, subject.graph.nodes[0])
    assert kernel is not None
    return subject, kernel


def run(subject: Model, kernel: Kernel, weights: Array, scaled: Array | None = None) -> Array:
    """Return the result for these weights, with the inputs scaled channel by channel."""
    proto = subject.to_proto()
    shape = proto.graph.initializer[0].dims
    stored = numpy_helper.from_array(weights.reshape(shape).astype(np.float32), "w")
    proto.graph.initializer[0].CopyFrom(stored)
    feeds = random_feeds(subject)
    [name] = feeds
    if scaled is not None:
        feeds[name] = feeds[name] * (scaled if kernel.is_matrix else scaled.reshape(-1, 1, 1))
    result: Array = ort.run(proto, {name: feeds[name].astype(np.float32)})[0]
    return result


@pytest.mark.parametrize("nodes", LAYERS)
def test_factors_of_inputs_scale_the_inputs(nodes: str) -> None:
    subject, kernel = layer(nodes)
    assert kernel.inputs == 4
    weights, factor = kernel.floats(subject.graph), np.arange(1.0, 5)
    by_weights = run(subject, kernel, weights * kernel.spread(factor, kernel.in_axes))
    by_inputs = run(subject, kernel, weights, factor)
    np.testing.assert_allclose(by_weights, by_inputs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("nodes", LAYERS)
def test_factors_of_outputs_scale_the_outputs(nodes: str) -> None:
    subject, kernel = layer(nodes)
    weights, factor = kernel.floats(subject.graph), np.arange(1.0, kernel.outputs + 1)
    plain = run(subject, kernel, weights)
    scaled = run(subject, kernel, weights * kernel.spread(factor, kernel.out_axes))
    by_channel = factor if kernel.is_matrix else factor.reshape(-1, 1, 1)
    np.testing.assert_allclose(scaled, plain * by_channel, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("nodes", LAYERS)
def test_the_stored_axis_of_the_outputs(nodes: str) -> None:
    _, kernel = layer(nodes)
    _, shape = LAYERS[nodes]
    assert shape[kernel.axis] * kernel.groups == kernel.outputs
    assert kernel.rank == len(shape)


@pytest.mark.parametrize(
    ("signature", "constants", "nodes"),
    [
        ("g (float[3, 4] x, float[4, 6] w) => (float[3, 6] y)", "", "y = MatMul (x, w)"),
        (
            "g (int32[3, 4] x) => (int32[3, 1] y)",
            "int32[4, 1] w = {1, 2, 3, 4}",
            "y = MatMul (x, w)",
        ),
        ("g (float[3, 4] x) => (float[3] y)", floats("w", 4), "y = MatMul (x, w)"),
        ("g (float[3, 0] x) => (float[3, 6] y)", "float[0, 6] w = {}", "y = MatMul (x, w)"),
        ("g () => (float[4, 4] y)", floats("w", 4, 4), "y = MatMul (w, w)"),
        ("g (float[4, 4] x) => (float[4, 4] y)", floats("w", 4, 4), "y = Add (x, w)"),
    ],
)
def test_products_without_constant_float_weights(
    signature: str, constants: str, nodes: str
) -> None:
    stored = f"<{constants}>" if constants else ""
    subject = model(f"{signature} {stored} {{ {nodes} }}")
    assert kernel_of(subject.graph, subject.graph.nodes[0]) is None


@pytest.mark.parametrize(
    ("nodes", "reads"),
    [
        ("y = MatMul (x, w)", True),
        ("y = Gemm <transB = 1> (x, w)", True),
        ("y = Gemm <transA = 1> (x, w)", False),
        (f"y = {FUSED} <transA = 1> (x, w)", False),
    ],
)
def test_a_transposed_input_has_its_channels_elsewhere(nodes: str, reads: bool) -> None:
    text = f"g (float[4, 4] x) => (float[4, 4] y) <{floats('w', 4, 4)}> {{ {nodes} }}"
    subject = model(text)
    kernel = kernel_of(subject.graph, subject.graph.nodes[0])
    assert kernel is not None
    assert kernel.reads_channels is reads


@pytest.mark.parametrize("nodes", LAYERS)
def test_the_largest_weight_of_each_channel(nodes: str) -> None:
    subject, kernel = layer(nodes)
    weights = np.abs(kernel.floats(subject.graph))
    others = tuple(axis for axis in range(weights.ndim) if axis not in kernel.out_axes)
    largest = kernel.largest(subject.graph, kernel.out_axes)
    np.testing.assert_array_equal(largest, weights.max(others).reshape(-1))
    factor = kernel.spread(np.arange(1.0, 5), kernel.in_axes)
    scaled = kernel.largest(subject.graph, kernel.out_axes, factor)
    np.testing.assert_allclose(scaled, (weights * factor).max(others).reshape(-1), rtol=1e-6)


def test_weights_that_are_not_finite_have_no_largest() -> None:
    text = """g (float[3, 2] x) => (float[3, 1] y)
        {{ w = Constant <value = float[2, 1] {{1.0, {0}}}> () y = MatMul (x, w) }}"""
    for number in ("inf", "nan"):
        subject = model(text.format(number))
        kernel = kernel_of(subject.graph, subject.graph.nodes[-1])
        assert kernel is not None
        with pytest.raises(MatchFailure, match="not finite"):
            kernel.largest(subject.graph, kernel.out_axes)


# -- scaled constants


def added(constant: str, shape: str = "4") -> Model:
    return model(f"g (float[{shape}] x) => (float[{shape}] y) <{constant}> {{ y = Add (x, c) }}")


def test_a_scaled_constant_replaces_the_old_one() -> None:
    subject = added("float[4] c = {1, 2, 3, 4}")
    [node] = subject.graph.nodes
    put_scaled(subject.graph, node, 1, (4,), np.array([1.0, 10, 100, 0.5]))
    np.testing.assert_array_equal(subject.graph.const(node.input[1]), [1, 20, 300, 2])
    assert list(subject.graph.initializers) == [node.input[1]]


def test_a_scaled_number_gets_the_shape_of_its_factors() -> None:
    subject = added("float c = {3}")
    [node] = subject.graph.nodes
    put_scaled(subject.graph, node, 1, (4,), np.array([1.0, 10, 100, 0.5]))
    np.testing.assert_array_equal(subject.graph.const(node.input[1]), [3, 30, 300, 1.5])


def test_other_users_keep_their_constant() -> None:
    subject = model("""g (float[2] x) => (float[2] y) <float[2] c = {1, 2}>
        { a = Add (x, c) y = Mul (a, c) }""")
    node = subject.graph.nodes[0]
    put_scaled(subject.graph, node, 1, (2,), np.array([2.0, 3]))
    assert [subject.graph.const(n.input[1]).tolist() for n in subject.graph.nodes] == [
        [2, 6],
        [1, 2],
    ]


@pytest.mark.parametrize("factor", [1e39, 1e-46])
def test_factors_that_the_type_cannot_hold_change_nothing(factor: float) -> None:
    subject = added("float[4] c = {1, 2, 3, 4}")
    [node] = subject.graph.nodes
    with pytest.raises(MatchFailure, match="float32 cannot hold the scaled 'c'"):
        put_scaled(subject.graph, node, 1, (4,), np.array([1, 1, 1, factor]))
    assert node.input[1] == "c"


def test_numbers_that_hardly_matter_may_vanish() -> None:
    subject = added("float[2] c = {1, 1e-30}", "2")
    [node] = subject.graph.nodes
    put_scaled(subject.graph, node, 1, (2,), np.array([1, 1e-30]))
    assert subject.graph.const(node.input[1]).tolist() == [1, 0]
