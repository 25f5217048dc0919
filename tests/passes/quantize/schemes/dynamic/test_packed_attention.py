"""com.microsoft's Attention in int8: what it computes, what it keeps, and what stays."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from passes.quantize.layers.int8_weights import quantize
from passes.quantize.layers.saturation import saturating
from passes.quantize.quantize import Quantize
from passes.quantize.schemes.dynamic.quantize_dynamic import QuantizeDynamic
from passes.quantize.schemes.weight_only.quantize_weights import QuantizeWeights
from tests import ort
from tests.checks import assert_rollback, knowledge, parse, written
from tests.passes.fuse.constants import floats, stored
from toolkit.ir.model import Model
from toolkit.pass_manager.pipeline import Pipeline
from toolkit.pass_manager.protocol import Context

HEADER = '<ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1]>'
RANDOM = np.random.default_rng(0)
W = (RANDOM.standard_normal((16, 48)) / 4).astype(np.float32)
ITEM = QuantizeDynamic(min_elements=1)
X = RANDOM.standard_normal((2, 5, 16)).astype(np.float32)

MASKS: dict[str, tuple[str, Any]] = {
    "none": ("", None),
    "tokens": ("int32[B, S] m", np.array([[1] * 5, [1, 1, 1, 0, 0]], np.int32)),
    "lengths": ("int32[B] m", np.array([5, 3], np.int32)),
}


def attention(
    mask: str = "", attributes: str = "", bias: bool = True, rest: str = "", more: str = ""
) -> str:
    inputs = ", ".join(filter(None, ["float[B, S, 16] x", mask, more]))
    listed = f"x, w, {'b' if bias else ''}, {'m' if mask else ''}{rest}"
    return f"""{HEADER} g ({inputs}) => (float[B, S, 16] y)
        <{stored("w", W)}, {floats("b", 48)}>
        {{ y = com.microsoft.Attention <num_heads = 4{attributes}> ({listed}) }}"""


def made(text: str, item: QuantizeDynamic = ITEM) -> tuple[Model, list[str]]:
    subject, ctx = Model.from_proto(parse(text)), Context()
    item.run(subject, ctx)
    return subject, ctx.notes


def rounded(x: Any) -> Any:
    """What DynamicQuantizeLinear makes of x, as floats."""
    low, high = min(float(x.min()), 0.0), max(float(x.max()), 0.0)
    step = np.float32((np.float32(high) - np.float32(low)) / 255)
    zero = np.rint(np.clip(-low / step, 0, 255))
    codes = np.clip(np.rint(x / step) + zero, 0, 255)
    return ((codes - zero) * step).astype(np.float32)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    "attributes", ["", ", unidirectional = 1", ", scale = 0.3", ", mask_filter_value = -50.0"]
)
@pytest.mark.parametrize("per_channel", [True, False])
def test_int8_equals_float_with_rounded_weights(
    mask: str, attributes: str, per_channel: bool
) -> None:
    """The projections are of integers, all the rest is the float operator's."""
    shape, given = MASKS[mask]
    text = attention(shape, attributes)
    subject, _ = made(text, QuantizeDynamic(per_channel=per_channel, min_elements=1))
    kinds = [node.op_type for node in subject.graph.nodes]
    assert kinds == ["DynamicQuantizeLinear", "QAttention"]
    assert "w" not in subject.graph.initializers
    found = quantize(W, 1 if per_channel else None, 127)
    exact = (found.codes * found.params.scale).astype(np.float32)
    reference = parse(text)
    (weight,) = (t for t in reference.graph.initializer if t.name == "w")
    weight.CopyFrom(onnx.numpy_helper.from_array(exact, "w"))
    feed = {"x": X} if given is None else {"x": X, "m": given}
    (wanted,) = ort.run(reference, {**feed, "x": rounded(X)})
    (got,) = ort.run(subject.inlined_proto(), feed)
    np.testing.assert_allclose(got, wanted, atol=2e-5)


def test_without_a_bias() -> None:
    """onnxruntime's float kernel does not survive that, the int8 one asks for one."""
    subject, _ = made(attention(bias=False))
    zeros = attention().replace(floats("b", 48), stored("b", np.zeros(48)))
    wanted, got = (
        ort.run(m, {"x": X})[0] for m in (made(zeros)[0].inlined_proto(), subject.inlined_proto())
    )
    np.testing.assert_array_equal(got, wanted)


def test_the_past_and_the_present() -> None:
    text = f"""{HEADER} g (float[B, S, 16] x, float[2, B, 4, P, 4] past)
        => (float[B, S, 16] y, float[2, B, 4, T, 4] present)
        <{stored("w", W)}, {floats("b", 48)}>
        {{ y, present = com.microsoft.Attention <num_heads = 4, unidirectional = 1>
                        (x, w, b, , past) }}"""
    subject, _ = made(text)
    past = RANDOM.standard_normal((2, 2, 4, 3, 4)).astype(np.float32)
    feed = {"x": X, "past": past}
    wanted, got = (ort.run(m, feed) for m in (parse(text), subject.inlined_proto()))
    assert got[1].shape == (2, 2, 4, 8, 4)
    for a, b in zip(wanted, got, strict=True):
        np.testing.assert_allclose(a, b, atol=0.05)


def test_layers_that_share_share() -> None:
    """One quantizer of what several read, and one copy of a weight."""
    constants = ", ".join([stored("w", W), floats("b", 48), floats("v", 16, 16)])
    nodes = """z = com.microsoft.Attention <num_heads = 4> (x, w, b)
               u = com.microsoft.Attention <num_heads = 2> (x, w, b)
               k = MatMul (x, v) y = Sum (z, u, k)"""
    signature = "g (float[B, S, 16] x) => (float[B, S, 16] y)"
    subject, _ = made(f"{HEADER} {signature} <{constants}> {{ {nodes} }}")
    kinds = [node.op_type for node in subject.graph.nodes]
    assert kinds.count("QAttention") == 2
    assert kinds.count("DynamicQuantizeLinear") == 1
    assert sum(t.dims == [16, 48] for t in subject.graph.initializers.values()) == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (attention(attributes=", qkv_hidden_sizes = [16, 16, 16]"), "qkv_hidden_sizes"),
        (attention(attributes=", do_rotary = 1"), "do_rotary"),
        (
            attention(rest=", , a", more="float[B, 4, S, S] a"),
            "an attention bias",
        ),
    ],
)
def test_inputs_and_attributes_without_a_kernel_stay_float(text: str, said: str) -> None:
    subject, notes = made(text)
    assert [node.op_type for node in subject.graph.nodes] == ["Attention"]
    assert any(said in note for note in notes)


def test_computed_weights_stay() -> None:
    text = attention(more="float[16, 48] v").replace("(x, w,", "(x, v,")
    subject, notes = made(text)
    assert [node.op_type for node in subject.graph.nodes] == ["Attention"]
    assert not any("Attention" in note for note in notes)


def test_the_standard_operator_is_another_one() -> None:
    text = """<ir_version: 10, opset_import: ["" : 23]>
        g (float[B, 4, S, 8] q, float[B, 4, S, 8] k, float[B, 4, S, 8] v) => (float[B, 4, S, 8] y)
        { y = Attention (q, k, v) }"""
    assert not made(text)[1]


def test_other_passes_and_targets_note_the_reason() -> None:
    for item, target, said in (
        (ITEM, "onnx", "packed attention, with an int8 kernel in onnxruntime only"),
        (QuantizeWeights(min_elements=1), "ort-cpu", "packed attention"),
    ):
        result = Pipeline([item], target=target).run(Model.from_proto(parse(attention())))
        assert any(said in note for note in result.passes[0].notes)


def test_in_a_pipeline() -> None:
    subject = Model.from_proto(parse(attention()))
    result = Pipeline([ITEM], max_drop="off").run(subject)
    assert result.passes[0].rules == {"quantize-attention": 1}
    subject = Model.from_proto(parse(attention()))
    stored_, known = written(subject), knowledge(subject)
    ITEM.run(subject, Context())
    assert_rollback(subject, stored_, known)


def test_a_model_that_onnxruntime_has_optimized() -> None:
    """A quarter of the bytes; `quantize` chooses it too."""
    wide = (RANDOM.standard_normal((128, 384)) / 12).astype(np.float32)
    text = attention().replace(stored("w", W), stored("w", wide)).replace("16]", "128]")
    text = text.replace(floats("b", 48), floats("b", 384))
    result = Pipeline([Quantize()], measure=False, max_drop="off").run(
        Model.from_proto(parse(text))
    )
    assert result.passes[0].rules == {"quantize-attention": 1}
    assert result.after.bytes < 0.3 * result.before.bytes


def test_infinite_weights_stay() -> None:
    weights = W.copy()
    weights[0, 0] = np.inf
    subject, notes = made(attention().replace(stored("w", W), stored("w", weights)))
    assert [node.op_type for node in subject.graph.nodes] == ["Attention"]
    assert any("it has infinite weights" in note for note in notes)


def test_its_sums_may_overflow_too() -> None:
    weights = np.full((16, 48), 1.0, np.float32)
    text = attention().replace(stored("w", W), stored("w", weights))
    assert len(saturating(made(text)[0])) == 1
    reduced = QuantizeDynamic(reduce_range=True, min_elements=1)
    assert not saturating(made(text, reduced)[0])
