"""LSTM in int8: against the float one, in all its variants, and what stays."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto

from passes.quantize.schemes.dynamic.quantize_dynamic import QuantizeDynamic
from passes.quantize.schemes.weight_only.quantize_weights import QuantizeWeights
from tests import ort as plain
from tests.checks import check, parse
from tests.passes.fuse.constants import floats, typed
from tests.passes.quantize.schemes.dynamic.checks import ALL, stays
from toolkit.ir.model import Model
from toolkit.pass_manager.protocol import Context
from toolkit.settings import Settings

NEAR = 0.06
IN, H = 6, 5


def lstm(
    attributes: str = "", directions: int = 1, tail: str = "", extra: str = "", outs: str = "y"
) -> str:
    """An LSTM in text; `tail` are its further inputs, `extra` their constants."""
    ends = {"y": f"float[S, {directions}, 3, {H}]"}
    outputs = ", ".join(f"{ends.get(o, f'float[{directions}, 3, {H}]')} {o}" for o in outs.split())
    constants = ", ".join(
        filter(None, [floats("w", directions, 4 * H, IN), floats("r", directions, 4 * H, H), extra])
    )
    signature = f"g (float[S, 3, {IN}] x) => ({outputs})"
    names = ", ".join(outs.split())
    options = ", ".join(filter(None, [f"hidden_size = {H}", attributes]))
    return typed(signature, constants, f"{names} = LSTM <{options}> (x, w, r{tail})", 21)


FULL_TAIL = ", b, l, h0, c0, p"


def full_extra(directions: int) -> str:
    d = directions
    return ", ".join(
        [floats("b", d, 8 * H), "int32[3] l = {3, 2, 1}", floats("h0", d, 3, H),
         floats("c0", d, 3, H), floats("p", d, 3 * H)]
    )  # fmt: skip


@pytest.mark.parametrize("item", [ALL, QuantizeDynamic(min_elements=1, per_channel=False)])
@pytest.mark.parametrize(
    "text",
    [
        lstm(),
        lstm(outs="y h c"),
        lstm(tail=", b", extra=floats("b", 1, 8 * H)),
        lstm('direction = "reverse"'),
        lstm('direction = "bidirectional"', 2),
        lstm(tail=FULL_TAIL, extra=full_extra(1), outs="y h c"),
        lstm('direction = "bidirectional"', 2, FULL_TAIL, full_extra(2), outs="y h c"),
        lstm("clip = 0.5"),
        lstm("input_forget = 1"),
        lstm('activations = ["Sigmoid", "Tanh", "Relu"]'),
        lstm("layout = 0"),
    ],
)
def test_variants(text: str, item: QuantizeDynamic) -> None:
    x = np.random.default_rng(0).uniform(-1, 1, (3, 3, IN)).astype(np.float32)
    changed = check(item, text, atol=NEAR, inputs={"x": x})
    (node,) = changed.graph.nodes
    assert (node.op_type, node.domain) == ("DynamicQuantizeLSTM", "com.microsoft")
    kinds = [t.data_type for t in changed.graph.initializers.values() if len(t.dims) == 3]
    assert kinds.count(TensorProto.INT8) == 2
    assert not {"w", "r"} & set(changed.graph.initializers)


def test_attributes_matter_to_the_kernel() -> None:
    """That they are near the float LSTM's says something only if the plain one is not."""
    x = {"x": np.random.default_rng(0).uniform(-1, 1, (3, 3, IN)).astype(np.float32)}
    (usual,) = plain.run(parse(lstm()), x)
    for attributes in ("clip = 0.5", "input_forget = 1",
                       'activations = ["Sigmoid", "Tanh", "Relu"]'):  # fmt: skip
        (other,) = plain.run(parse(lstm(attributes)), x)
        assert np.abs(usual - other).max() > 2 * NEAR


def test_the_weights_against_numpy() -> None:
    subject = Model.from_proto(parse(lstm('direction = "bidirectional"', 2)))
    w = subject.graph.const("w")
    assert w is not None
    ALL.run(subject, Context())
    (node,) = subject.graph.nodes
    codes, scale, zero = (subject.graph.const(node.input[place]) for place in (1, 8, 9))
    assert codes is not None
    assert scale is not None
    assert zero is not None
    assert scale.shape == zero.shape == (2, 4 * H)
    wanted = np.abs(w).max(axis=2) / np.float32(127)
    np.testing.assert_array_equal(scale, wanted)
    rounded = np.clip(np.rint(w / wanted[..., None]), -127, 127)
    np.testing.assert_array_equal(codes, rounded.transpose(0, 2, 1))


def test_final_states_without_the_sequence() -> None:
    text = lstm(outs="y h c")
    before = parse(text)
    before.graph.node[0].output[0] = ""
    del before.graph.output[0]
    subject = Model.from_proto(before)
    ALL.run(subject, Context())
    subject.graph.verify()
    x = {"x": np.random.default_rng(1).uniform(-1, 1, (4, 3, IN)).astype(np.float32)}
    for new, old in zip(plain.run(subject.inlined_proto(), x), plain.run(before, x), strict=True):
        np.testing.assert_allclose(new, old, atol=NEAR)


def test_two_layers_share_their_weights() -> None:
    signature = f"g (float[S, 3, {IN}] x) => (float[S, 1, 3, {H}] y, float[S, 1, 3, {H}] z)"
    constants = f"{floats('w', 1, 4 * H, IN)}, {floats('r', 1, 4 * H, H)}"
    one = f"LSTM <hidden_size = {H}>"
    nodes = f"y = {one} (x, w, r) n = Neg (x) z = {one} (n, w, r)"
    changed = check(ALL, typed(signature, constants, nodes, 21), atol=NEAR)
    assert sum(len(t.dims) == 3 for t in changed.graph.initializers.values()) == 2


def test_unsupported_patterns_stay() -> None:
    signature = f"g (float[S, 3, {IN}] x) => (float[S, 1, 3, {H}] y)"
    constants = f"{floats('w', 1, 3 * H, IN)}, {floats('r', 1, 3 * H, H)}"
    notes = stays(signature, constants, f"y = GRU <hidden_size = {H}> (x, w, r)")
    assert "without an int8 kernel" in notes[0]
    first = f"g (float[3, S, {IN}] x) => (float[3, S, 1, {H}] y)"
    constants = f"{floats('w', 1, 4 * H, IN)}, {floats('r', 1, 4 * H, H)}"
    node = f"y = LSTM <hidden_size = {H}, layout = 1> (x, w, r)"
    assert "batch first" in stays(first, constants, node, run=False)[0]
    fed = signature.replace("x)", f"x, float[1, {4 * H}, {IN}] w)")
    node = f"y = LSTM <hidden_size = {H}> (x, w, r)"
    assert stays(fed, floats("r", 1, 4 * H, H), node) == []
    few = QuantizeDynamic()
    assert "fewer than 4096" in stays(signature, constants, node, few)[0]
    assert "recurrent" in stays(signature, constants, node, QuantizeWeights(min_elements=1))[0]


def test_other_targets_keep_the_float_layer() -> None:
    subject, ctx = Model.from_proto(parse(lstm())), Context(Settings(target="onnx"))
    ALL.run(subject, ctx)
    assert not len(subject.journal)
    assert "with an int8 kernel in onnxruntime only" in ctx.notes[0]
