"""Equalization: which factors are chosen, where they go, and what stays as it is."""

from __future__ import annotations

import numpy as np
import pytest

from passes.quantize.rescale.equalize import Equalize
from tests.checks import check, model, random_feeds
from tests.passes.fuse.constants import floats, stored, typed
from tests.passes.quantize.accuracy_checks import in_int8, sqnr
from toolkit.errors import UsageError
from toolkit.ir.graph import Array
from toolkit.ir.model import Model
from toolkit.pass_manager.protocol import Context

ALL = Equalize(slack=1)
IMAGE = "g (float[N, 4, 6, 6] x) => (float[N, 5, H, W] y)"
ROWS = "g (float[N, 8] x) => (float[N, 5] y)"
TWO = f"{floats('v', 8, 6)}, {floats('w', 6, 5)}"
CONVS = f"{floats('v', 6, 4, 3, 3)}, {floats('b', 6)}, {floats('w', 5, 6, 1, 1)}"


def weights(changed: Model) -> list[Array]:
    """The stored matrices and kernels in the order of the layers that read them."""
    g = changed.graph
    kinds = ("Conv", "ConvTranspose", "MatMul", "Gemm")
    found = [g.const(node.input[1]) for node in g.nodes if node.op_type in kinds]
    assert all(array is not None for array in found)
    return [array for array in found if array is not None]


def equalized(signature: str, constants: str, nodes: str, item: Equalize = ALL) -> Model:
    return check(item, typed(signature, constants, nodes))


def stays(signature: str, constants: str, nodes: str, item: Equalize = ALL) -> None:
    check(item, typed(signature, constants, nodes), near_miss=True)


@pytest.mark.parametrize("between", ["r = Relu (a)", "r = LeakyRelu (a)", "r = Identity (a)"])
def test_both_sides_have_weights_of_one_size(between: str) -> None:
    changed = equalized(ROWS, TWO, f"a = MatMul (x, v) {between} y = MatMul (r, w)")
    first, second = weights(changed)
    np.testing.assert_allclose(np.abs(first).max(0), np.abs(second).max(1), rtol=0.03)


def test_convolutions() -> None:
    changed = equalized(IMAGE, CONVS, "a = Conv (x, v, b) r = Relu (a) y = Conv (r, w)")
    assert len(changed.graph.initializers) == 3


@pytest.mark.parametrize(
    ("shape", "group", "kind"),
    [
        ((6, 1, 3, 3), 6, "Conv"),
        ((12, 2, 3, 3), 3, "Conv"),
        ((6, 2, 3, 3), 3, "ConvTranspose"),
        ((6, 7, 2, 2), 1, "ConvTranspose"),
    ],
)
def test_groups_on_both_sides(shape: tuple[int, ...], group: int, kind: str) -> None:
    outputs = shape[1] * group if kind == "ConvTranspose" else shape[0]
    constants = [floats("v", 6, 4, 1, 1), floats("d", *shape), floats("c", outputs)]
    constants += [floats("w", 5, outputs, 1, 1)]
    nodes = f"""a = Conv (x, v) r = Relu (a) d1 = {kind} <group = {group}> (r, d, c)
        e = Relu (d1) y = Conv (e, w)"""
    equalized(IMAGE, ", ".join(constants), nodes)


def test_a_bias_behind_the_product_gets_the_factor_too() -> None:
    for bias in ("6", "1, 6", "1", "1, 1"):
        constants = f"{TWO}, {floats('b', *map(int, bias.split(', ')))}"
        nodes = "a = MatMul (x, v) c = Add (b, a) r = Relu (c) y = MatMul (r, w)"
        equalized(ROWS, constants, nodes)


@pytest.mark.parametrize("shape", ["6", "1, 6", "1", "3, 6"])
def test_gemms(shape: str) -> None:
    sizes = [int(size) for size in shape.split(", ")]
    constants = f"{floats('v', 6, 8)}, {floats('b', *sizes)}, {floats('w', 5, 6)}, {floats('c', 5)}"
    nodes = """a = Gemm <transB = 1, alpha = 0.5, beta = 2.0> (x, v, b) r = Relu (a)
        y = Gemm <transB = 1> (r, w, c)"""
    equalized("g (float[3, 8] x) => (float[3, 5] y)", constants, nodes)


def test_from_an_image_to_a_classifier() -> None:
    signature = "g (float[N, 4, 6, 6] x) => (float[N, 5] y)"
    pooled = f"{floats('v', 6, 4, 3, 3)}, {floats('w', 6, 5)}"
    for nodes in (
        "p = GlobalAveragePool (r) f = Flatten (p) y = MatMul (f, w)",
        "p = ReduceMean <keepdims = 0> (r, axes) y = MatMul (p, w)",
        "p = GlobalMaxPool (r) f = Reshape (p, shape) y = MatMul (f, w)",
    ):
        constants = f"{pooled}, int64[2] axes = {{2, 3}}, int64[2] shape = {{0, 6}}"
        equalized(signature, constants, f"a = Conv (x, v) r = Relu (a) {nodes}")
    constants = f"{floats('v', 6, 4, 3, 3)}, {floats('w', 96, 5, high=4)}"
    equalized(signature, constants, "a = Conv (x, v) f = Flatten (a) y = MatMul (f, w)")


def test_through_pools_pads_and_concatenations() -> None:
    constants = [floats("u", 3, 4, 1, 1), floats("v", 6, 4, 1, 1), floats("w", 5, 9, 1, 1)]
    constants += ["int64[8] pads = {0, 0, 1, 1, 0, 0, 1, 1}", floats("slope", 6, 1, 1)]
    nodes = """a = Conv (x, u) b = Conv (x, v) s = PRelu (b, slope) c = Concat <axis = 1> (a, s)
        p = Pad (c, pads) m = MaxPool <kernel_shape = [2, 2]> (p) y = Conv (m, w)"""
    changed = equalized(IMAGE, ", ".join(constants), nodes)
    first, second, last = weights(changed)
    made = np.concatenate([np.abs(first).max((1, 2, 3)), np.abs(second).max((1, 2, 3))])
    np.testing.assert_allclose(made, np.abs(last).max((0, 2, 3)), rtol=0.05)


def test_pools_that_join_channels_do_not_let_a_factor_pass() -> None:
    """What a MatMul makes lies along the last axis, which is one of pixels to a pool."""
    signature = "g (float[N, 4, 8] x) => (float[N, 4, 5] y)"
    constants = f"{floats('v', 8, 6)}, {floats('w', 6, 5)}"
    pool = "MaxPool <kernel_shape = [3], pads = [1, 1]> (r)"
    stays(signature, constants, f"a = MatMul (x, v) r = Relu (a) p = {pool} y = MatMul (p, w)")
    flat = f"{floats('v', 8, 6)}, {floats('w', 4, 5)}, int64[2] shape = {{0, 4}}"
    nodes = "a = MatMul (x, v) p = GlobalAveragePool (a) f = Reshape (p, shape) y = MatMul (f, w)"
    stays(signature.replace("4, 5]", "5]"), flat, nodes)


def test_value_with_several_layers_as_users() -> None:
    signature = "g (float[N, 8] x) => (float[N, 5] y, float[N, 4] z)"
    nodes = "a = MatMul (x, v) r = Relu (a) y = MatMul (r, w) z = MatMul (r, u)"
    changed = equalized(signature, f"{TWO}, {floats('u', 6, 4)}", nodes)
    first, second, third = weights(changed)
    read = np.maximum(np.abs(second).max(1), np.abs(third).max(1))
    np.testing.assert_allclose(np.abs(first).max(0), read, rtol=0.03)


def test_channels_without_weights_keep_their_factor() -> None:
    v, w = np.ones((8, 6)), np.ones((6, 5)) * 0.1
    v[:, 0] = 0
    w[1] = 0
    constants = f"{stored('v', v)}, {stored('w', w)}"
    changed = equalized(ROWS, constants, "a = MatMul (x, v) r = Relu (a) y = MatMul (r, w)")
    first, second = weights(changed)
    np.testing.assert_allclose(first[0], [0, 1, *[0.1**0.5] * 4], rtol=1e-3)
    np.testing.assert_allclose(second[:, 0], [0.1, 0, *[0.1**0.5] * 4], rtol=1e-3)


def test_a_dead_channel_with_a_bias_does_not_take_the_range() -> None:
    v, b = np.ones((8, 6)), np.full(6, 0.5)
    v[:, 2] = 1e-7
    constants = f"{stored('v', v)}, {stored('b', b)}, {stored('w', np.ones((6, 5)))}"
    nodes = "a = Gemm (x, v, b) r = Relu (a) y = MatMul (r, w)"
    check(Equalize(), typed(ROWS, constants, nodes), near_miss=True)


def test_with_slack_only_channels_that_are_far_off_change() -> None:
    v, w = np.ones((8, 6)), np.ones((6, 5))
    v[:, 1] *= 3
    v[:, 4] *= 10_000
    constants = f"{stored('v', v)}, {stored('w', w)}"
    nodes = "a = MatMul (x, v) r = Relu (a) y = MatMul (r, w)"
    changed = check(Equalize(), typed(ROWS, constants, nodes), atol=1e-4)
    first, second = weights(changed)
    np.testing.assert_allclose(first[0], [1, 3, 1, 1, 400, 1], rtol=0.01)
    np.testing.assert_allclose(second[:, 0], [1, 1, 1, 1, 25, 1], rtol=0.01)


def test_int8_gains_by_it() -> None:
    random = np.random.default_rng(0)
    far = np.exp(random.uniform(-3, 3, 32))
    v = random.standard_normal((8, 32)) * far
    w = random.standard_normal((32, 5)) / far[:, None]
    constants = f"{stored('v', v)}, {stored('w', w)}"
    nodes = "a = MatMul (x, v) r = Relu (a) y = MatMul (r, w)"
    before = model(typed(ROWS, constants, nodes))
    after = before.copy()
    Equalize().run(after, Context())
    feeds = [random_feeds(before, seed) for seed in range(8)]
    assert sqnr(before, in_int8(after), feeds) > sqnr(before, in_int8(before), feeds) + 15


# -- what stays


RELU = "a = MatMul (x, v) r = Relu (a) y = MatMul (r, w)"


@pytest.mark.parametrize(
    "between",
    ["r = Sigmoid (a)", "r = Gelu (a)", "r = Clip (a, low, high)", "r = Add (a, a)",
     "s = Sigmoid (a) r = Mul (a, s)", "r = Pow (a, high)", "r = Exp (a)"],
)  # fmt: skip
def test_operators_that_block_a_factor(between: str) -> None:
    constants = f"{TWO}, float low = {{0}}, float high = {{6}}"
    stays(ROWS, constants, f"a = MatMul (x, v) {between} y = MatMul (r, w)")


def test_a_clip_without_an_upper_bound_passes() -> None:
    constants = f"{TWO}, float low = {{0}}"
    equalized(ROWS, constants, "a = MatMul (x, v) r = Clip (a, low) y = MatMul (r, w)")
    low = f"{TWO}, float low = {{-1}}"
    stays(ROWS, low, "a = MatMul (x, v) r = Clip (a, low) y = MatMul (r, w)")


def test_output_or_value_with_other_users_is_frozen() -> None:
    outputs = "g (float[N, 8] x) => (float[N, 5] y, float[N, 6] r)"
    stays(outputs, TWO, RELU)
    stays(outputs.replace(" r)", " z)"), TWO, f"{RELU} z = Softmax (a)")
    stays(outputs.replace(" r)", " z)"), TWO, f"{RELU} z = Add (x2, r) x2 = Sigmoid (r)")


def test_captured_value_freezes_its_channels() -> None:
    signature = "g (float[N, 8] x, bool c) => (float[N, 5] y, float[N, 6] z)"
    branches = """z = If (c) <then_branch = t () => (float[N, 6] p) { p = Neg (r) },
        else_branch = e () => (float[N, 6] q) { q = Identity (r) }>"""
    stays(signature, TWO, f"{RELU} {branches}")


def test_inside_of_a_subgraph() -> None:
    signature = "g (float[N, 8] x, bool c) => (float[N, 5] y)"
    branches = """y = If (c) <then_branch = t () => (float[N, 5] p) {
            a = MatMul (x, v) r = Relu (a) p = MatMul (r, w) },
        else_branch = e () => (float[N, 5] q) { q = MatMul (x, u) }>"""
    equalized(signature, f"{TWO}, {floats('u', 8, 5)}", branches)


def test_shared_weights_are_copied_only_while_small() -> None:
    signature = "g (float[N, 8] x) => (float[N, 5] y, float[N, 6] z)"
    changed = equalized(signature, TWO, f"{RELU} s = Neg (x) z = MatMul (s, v)")
    assert len([n for n in changed.graph.initializers if n.startswith("v")]) == 2


def test_weights_that_are_inputs_or_computed() -> None:
    signature = "g (float[N, 8] x, float[6, 5] w) => (float[N, 5] y)"
    stays(signature, floats("v", 8, 6), RELU)


def test_a_residual_stays() -> None:
    signature = "g (float[N, 6] x) => (float[N, 5] y)"
    constants = f"{floats('v', 6, 6)}, {floats('w', 6, 5)}"
    stays(signature, constants, "a = MatMul (x, v) r = Add (x, a) y = MatMul (r, w)")


def test_weights_that_are_not_finite_stay_and_are_named() -> None:
    subject = model(typed(ROWS, TWO, RELU))
    broken = np.array(subject.graph.const("v"))
    broken[0, 0] = np.inf
    subject.graph.put_initializer(subject.weights.put("v", broken))
    subject.commit()
    ctx = Context()
    ALL.run(subject, ctx)
    assert not len(subject.journal)
    assert "weights that are not finite" in ctx.notes[0]


def test_half_precision() -> None:
    random = np.random.default_rng(1)
    constants = [stored("v", random.uniform(-1, 1, (8, 6)), "float16")]
    constants += [stored("w", random.uniform(-1, 1, (6, 5)), "float16")]
    signature = "g (float16[N, 8] x) => (float16[N, 5] y)"
    check(ALL, typed(signature, ", ".join(constants), RELU), atol=5e-2)


def test_layers_can_be_left_out() -> None:
    stays(ROWS, TWO, RELU, Equalize(slack=1, exclude=("MatMul",)))


@pytest.mark.parametrize("options", [{"rounds": 0}, {"slack": 0.5}, {"slack": float("nan")}])
def test_options_that_make_no_sense(options: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="must be at least 1"):
        Equalize(**options)  # pyright: ignore[reportArgumentType]
