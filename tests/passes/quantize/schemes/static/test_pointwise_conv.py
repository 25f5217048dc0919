"""Convolutions of single pixels in int8 with results in floats, and the layout around them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from passes.quantize.schemes.static.pointwise_conv import apply_pointwise, is_pointwise
from passes.quantize.schemes.static.quantize_static import QuantizeStatic
from passes.quantize.search.costs import Kernels
from passes.quantize.search.problem import pointwise_problem
from passes.quantize.search.value_shapes import sizes_on
from tests.checks import check, parse, random_feeds
from tests.passes.fuse.constants import floats, typed
from tests.passes.quantize.schemes.static.checks import context, normal, operators, outputs
from toolkit.errors import UsageError
from toolkit.ir.model import Model
from toolkit.pass_manager.protocol import Context
from toolkit.quantization.plan import Entry, Plan

IMAGE = "g (float[N, 8, 6, 4] x) => (float[N, 8, 6, 4] y)"
CONSTANTS = f"{floats('w', 8, 8, 1, 1)}, {floats('b', 8)}, {floats('d', 8, 1, 3, 3)}"
DEPTHWISE = "Conv <group = 8, pads = [1, 1, 1, 1]>"
COARSE = 0.25


def plan_of(model: Model, outputs_: Sequence[str]) -> Plan:
    """These layers with a result in floats, and nothing else."""
    made = QuantizeStatic(ops=("Conv",)).make_plan(model, context(model))
    entries = tuple(replace(e, float_result=True) for e in made.entries if e.output in outputs_)
    return replace(made, entries=entries)


class Write:
    """The rewrite as a pass, for these outputs."""

    name, tolerance = "write", None

    def __init__(self, *outputs_: str, target: str = "ort-cpu") -> None:
        self.outputs, self.target = outputs_, target

    def run(self, model: Model, ctx: Context) -> None:
        ctx.settings = replace(ctx.settings, target=self.target)
        there = [o for o in self.outputs if any(o in n.output for n in _convolutions(model))]
        apply_pointwise(model, plan_of(model, there), ctx, {})


def _convolutions(model: Model) -> list[Any]:
    return [node for node in model.graph.nodes if node.op_type == "Conv"]


def written(nodes: str, which: str, signature: str = IMAGE, constants: str = CONSTANTS) -> Model:
    """The model with these layers in int8, which computes about the same."""
    return check(Write(*which.split()), typed(signature, constants, nodes, 21), atol=COARSE)


def sequence(model: Model) -> str:
    return " ".join(node.op_type for node in model.graph.nodes)


# -- one layer


def test_a_product_between_two_turns() -> None:
    changed = written("y = Conv (x, w, b)", "y")
    assert sequence(changed) == "Transpose QuantizeLinear MatMulIntegerToFloat Transpose"
    assert not {"w", "b"} & set(changed.graph.initializers)


def test_the_arithmetic() -> None:
    """Products of codes, then scales, and a bias that is rounded as it is for a convolution."""
    text = typed(IMAGE, CONSTANTS, "y = Conv (x, w, b)", 21)
    subject = Model.from_proto(parse(text))
    plan = plan_of(subject, ["y"])
    tensor = plan.tensor("x")
    assert tensor is not None
    assert tensor.low is not None
    assert tensor.high is not None
    weights, bias = subject.graph.const("w"), subject.graph.const("b")
    assert weights is not None
    assert bias is not None
    apply_pointwise(subject, plan, Context(), {})
    x = normal(2, 8, 6, 4)
    step = np.float32((tensor.high - tensor.low) / 255)
    zero = np.rint(-tensor.low / float(step))
    codes = np.clip(np.rint(x / step) + zero, 0, 255) - zero
    scale = np.abs(weights[:, :, 0, 0]).max(axis=1) / np.float32(127)
    rounded = np.rint(weights[:, :, 0, 0] / scale[:, None])
    sums = np.einsum("oi,nihw->nohw", rounded, codes)
    steps = (step * scale).reshape(1, -1, 1, 1)
    expected = (sums + np.rint(bias.reshape(1, -1, 1, 1) / steps)) * steps
    np.testing.assert_allclose(outputs(subject, {"x": x})[0], expected, atol=1e-5)


@pytest.mark.parametrize("rank", [3, 5])
def test_images_of_other_ranks(rank: int) -> None:
    sizes = ", ".join(["6", "4", "3"][: rank - 2])
    signature = f"g (float[N, 8, {sizes}] x) => (float[N, 8, {sizes}] y)"
    changed = written(
        "y = Conv (x, w, b)",
        "y",
        signature,
        f"{floats('w', *[8, 8, *[1] * (rank - 2)])}, {floats('b', 8)}",
    )
    assert operators(changed)["MatMulIntegerToFloat"] == 1


def test_without_a_bias() -> None:
    changed = written("y = Conv (x, w)", "y")
    (made,) = [node for node in changed.graph.nodes if node.op_type == "MatMulIntegerToFloat"]
    assert len(made.input) == 5


def test_means_move_the_bias() -> None:
    subject = Model.from_proto(parse(typed(IMAGE, CONSTANTS, "y = Conv (x, w, b)", 21)))
    plan = plan_of(subject, ["y"])
    plain, moved = subject.copy(), subject.copy()
    apply_pointwise(plain, plan, Context(), {})
    apply_pointwise(moved, plan, Context(), {"x": np.full(8, 100.0)})
    one, other = (outputs(made, random_feeds(subject))[0] for made in (plain, moved))
    assert np.abs(one - other).max() > 0.01


# -- what is between layers


def test_layout_agnostic_operators_need_no_transpose() -> None:
    nodes = """a = Conv (x, w, b) s = Sigmoid (a) t = Add (s, a)
               y = Conv (t, w, b)"""
    changed = written(nodes, "a y")
    assert operators(changed)["Transpose"] == 2
    assert operators(changed)["MatMulIntegerToFloat"] == 2


def test_shapes_without_annotations() -> None:
    text = f"{IMAGE} <{CONSTANTS}> {{ a = Conv (x, w, b) s = Sigmoid (a) y = Conv (s, w, b) }}"
    assert operators(check(Write("a", "y"), text, atol=COARSE))["Transpose"] == 2


def test_the_turn_is_right_behind_a_convolution() -> None:
    nodes = f"a = {DEPTHWISE} (x, d, b) s = Tanh (a) y = Conv (s, w, b)"
    expected = "Conv Transpose Tanh QuantizeLinear MatMulIntegerToFloat Transpose"
    assert sequence(written(nodes, "y")) == expected


def test_users_of_a_value_share_one_quantizer() -> None:
    changed = written("a = Conv (x, w, b) c = Conv (x, w) y = Sub (a, c)", "a c")
    assert operators(changed)["QuantizeLinear"] == operators(changed)["Transpose"] - 1 == 1


def test_parts_are_joined_as_bytes_for_products_alone() -> None:
    signature = "g (float[N, 8, 6, 4] x) => (float[N, 8, 6, 4] y)"
    constants = f"{CONSTANTS}, {floats('v', 8, 16, 1, 1)}"
    nodes = "a = Conv (x, w, b) c = Conv (x, w) j = Concat <axis = 1> (a, c) y = Conv (j, v)"
    changed = written(nodes, "a c y", signature, constants)
    joined = next(node for node in changed.graph.nodes if node.op_type == "Concat")
    makers = [changed.graph.producer(name) for name in joined.input]
    assert [maker.op_type for maker in makers if maker is not None] == ["QuantizeLinear"] * 2


def test_parts_with_other_users_are_concatenated_in_float() -> None:
    constants = f"{CONSTANTS}, {floats('v', 8, 16, 1, 1)}"
    nodes = """a = Conv (x, w, b) c = Conv (x, w) j = Concat <axis = -3> (a, c) k = Conv (j, v)
               r = ReduceMax <keepdims = 1> (j) y = Add (k, r)"""
    changed = written(nodes, "a c k", IMAGE, constants)
    joined = next(node for node in changed.graph.nodes if node.op_type == "Concat")
    assert changed.graph.producer(joined.input[0]) is not None
    assert joined.attribute[0].i == 3
    assert operators(changed)["QuantizeLinear"] == 2


HEAD = """p = Conv (x, w, b) f = Reshape (p, shape) q = Conv (z, w) e = Reshape (q, shape)
          j = Concat <axis = 2> (f, e) y = Transpose <perm = [0, 2, 1]> (j)"""
TWO = "g (float[N, 8, 6, 4] x, float[N, 8, 3, 2] z) => (float[N, 30, 8] y)"
SHAPE = "int64[3] shape = {0, 8, -1}"


def test_a_head_that_puts_the_channels_last_itself() -> None:
    changed = written(HEAD, "p q", TWO, f"{CONSTANTS}, {SHAPE}")
    assert operators(changed)["Transpose"] == 2  # of the inputs
    assert operators(changed)["Concat"] == 1


@pytest.mark.parametrize(
    "nodes",
    [
        "a = Conv (x, w, b) y = ReduceMean <keepdims = 1> (a) ",
        "a = Conv (x, w, b) y = Mul (a, by_channel)",
        "a = Conv (x, w, b) y = PRelu (a, by_channel)",
        "a = Conv (x, w, b) y = Softmax <axis = 1> (a)",
        f"a = Conv (x, w, b) y = {DEPTHWISE} (a, d)",
        "a = Conv (x, w, b) m = Mul (a, by_channel) y = MaxPool <kernel_shape = [1, 1]> (m)",
    ],
)
def test_operators_with_axes_keep_channels_first(nodes: str) -> None:
    signature = IMAGE.replace("=> (float[N, 8, 6, 4] y)", "=> (float[N, 8, S, T] y)")
    if "ReduceMean" in nodes:
        signature = IMAGE.replace("=> (float[N, 8, 6, 4] y)", "=> (float[1, 1, 1, 1] y)")
    changed = written(nodes, "a", signature, f"{CONSTANTS}, {floats('by_channel', 8, 1, 1)}")
    assert operators(changed)["Transpose"] == 2


def test_results_that_are_outputs_keep_their_names() -> None:
    signature = "g (float[N, 8, 6, 4] x) => (float[N, 8, 6, 4] a, float[N, 8, 6, 4] y)"
    changed = written("a = Conv (x, w, b) s = Sigmoid (a) y = Conv (s, w, b)", "a y", signature)
    assert changed.graph.outputs == ["a", "y"]
    assert operators(changed)["Transpose"] == 3


def test_every_rewrite_leaves_a_model_that_runs() -> None:
    """A pass that does not hold is bisected over its rewrites."""
    nodes = f"""a = Conv (x, w, b) s = Sigmoid (a) m = Mul (a, s) c = {DEPTHWISE} (m, d)
                t = Tanh (c) u = Concat <axis = 1> (t, m) k = Conv (u, v) y = Conv (k, w)"""
    constants = f"{CONSTANTS}, {floats('v', 8, 16, 1, 1)}"
    subject = Model.from_proto(parse(typed(IMAGE, constants, nodes, 21)))
    fed = random_feeds(subject)
    expected = outputs(subject, fed)[0]
    apply_pointwise(subject, plan_of(subject, ["a", "k", "y"]), Context(), {})
    starts = [rewrite.start for rewrite in subject.journal.rewrites]
    assert len(starts) > 5
    for start in reversed(starts):
        np.testing.assert_allclose(outputs(subject, fed)[0], expected, atol=COARSE)
        subject.journal.undo_to(start)
        subject.graph.verify()


def test_a_rewrite_that_was_vetoed_is_left_out() -> None:
    text = typed(IMAGE, CONSTANTS, "a = Conv (x, w, b) s = Tanh (a) y = Conv (s, w)", 21)
    subject = Model.from_proto(parse(text))
    fed = random_feeds(subject)
    expected = outputs(subject, fed)[0]
    plan = plan_of(subject, ["a", "y"])
    apply_pointwise(subject, plan, Context(), {})
    first, second = subject.journal.rewrites[:2]
    subject.rollback()
    subject.journal.veto(first)
    subject.journal.veto(second)
    apply_pointwise(subject, plan, Context(), {})
    assert operators(subject)["MatMulIntegerToFloat"] == operators(subject)["Conv"] == 1
    np.testing.assert_allclose(outputs(subject, fed)[0], expected, atol=COARSE)


# -- what is not so


@pytest.mark.parametrize(
    ("attributes", "weights", "is_one"),
    [
        ("", "w", True),
        ("<strides = [1, 1], pads = [0, 0, 0, 0], dilations = [2, 2]>", "w", True),
        ("<strides = [2, 2]>", "w", False),
        ("<pads = [1, 1, 1, 1]>", "w", False),
        ('<auto_pad = "SAME_UPPER", strides = [2, 1]>', "w", False),
        ("<group = 8>", "d", False),
        ("<pads = [1, 1, 1, 1]>", "k", False),
    ],
)
def test_pointwise_convolutions(attributes: str, weights: str, is_one: bool) -> None:
    constants = f"{CONSTANTS}, {floats('k', 8, 8, 3, 3)}"
    signature = IMAGE.replace("[N, 8, 6, 4] y", "[N, 8, S, T] y")
    text = typed(signature, constants, f"y = Conv {attributes} (x, {weights})", 21)
    model = Model.from_proto(parse(text))
    assert is_pointwise(model.graph, model.graph.nodes[0]) is is_one
    if not is_one:
        with pytest.raises(UsageError, match="cannot have a float result"):
            apply_pointwise(model, plan_of(model, ["y"]), Context(), {})


def test_only_for_a_runtime_with_that_kernel() -> None:
    model = Model.from_proto(parse(typed(IMAGE, CONSTANTS, "y = Conv (x, w, b)", 21)))
    with pytest.raises(UsageError, match="target ort-cpu"):
        Write("y", target="onnx").run(model, Context())


def test_a_plan_without_the_range() -> None:
    model = Model.from_proto(parse(typed(IMAGE, CONSTANTS, "y = Conv (x, w, b)", 21)))
    entry = Entry(output="y", op="Conv", scheme="static", axis=0, float_result=True)
    with pytest.raises(UsageError, match="no tensor 'x'"):
        apply_pointwise(model, Plan((entry,)), Context(), {})


def test_unsupported_layers_stay_float_and_are_noted() -> None:
    nothing = floats("w", 8, 8, 1, 1).replace("{", "{inf, ", 1).rsplit(",", 1)[0] + "}"
    text = typed(IMAGE, f"{nothing}, {floats('b', 8)}", "y = Conv (x, w, b)", 21)
    model = Model.from_proto(parse(text))
    entry = Entry(output="y", op="Conv", scheme="static", axis=0, float_result=True)
    finite = Model.from_proto(parse(typed(IMAGE, CONSTANTS, "y = Conv (x, w, b)", 21)))
    ctx = Context()
    apply_pointwise(model, replace(plan_of(finite, ["y"]), entries=(entry,)), ctx, {})
    assert sequence(model) == "Conv"
    assert ctx.notes == ["Conv 'y' stays float: it has infinite weights"]


# -- where they pay


def surveyed(nodes: str, width: int, side: int) -> Any:
    """What the table of costs takes of a model with 1x1 convolutions of so many channels."""
    signature = f"g (float[1, {width}, {side}, {side}] x) => (float[1, {width}, {side}, {side}] y)"
    constants = f"{floats('w', width, width, 1, 1)}, {floats('d', width, 1, 3, 3)}"
    model = Model.from_proto(
        parse(typed(signature, constants, nodes.replace("8,", f"{width},"), 21))
    )
    plan = QuantizeStatic().make_plan(model, context(model))
    sizes = sizes_on(model, random_feeds(model))
    return pointwise_problem(model, plan, sizes, Kernels.in_use())


CHAIN = f"""a = Conv (x, w) s = Sigmoid (a) m = Mul (a, s) c = {DEPTHWISE} (m, d)
            t = Sigmoid (c) n = Mul (c, t) y = Conv (n, w)"""


def test_wide_layers_pay_and_nothing_else_is_static() -> None:
    found = surveyed(CHAIN, 128, 26)
    assert [e.output for e in found.best().quantized()] == ["a", "y"]
    assert all(e.float_result for e in found.best().quantized())
    assert found.saving(found.best()) > 0


def test_narrow_layers_do_not() -> None:
    found = surveyed(CHAIN, 8, 26)
    assert not found.best().quantized()
    assert found.saving(found.plan) < 0


def test_there_may_be_none() -> None:
    assert surveyed(f"y = {DEPTHWISE} (x, d)", 16, 8) is None
