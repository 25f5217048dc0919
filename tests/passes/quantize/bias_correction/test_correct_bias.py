"""Bias correction: what is taken back, in which forms of layers, and what is left alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from passes.quantize.bias_correction.correct_bias import CorrectBias, Shift, lasting
from passes.quantize.schemes.dynamic.quantize_dynamic import QuantizeDynamic
from tests import ort
from tests.checks import model, written
from tests.passes.fuse.constants import floats, stored, typed
from tests.passes.quantize.accuracy_checks import Fed, sqnr
from toolkit.calibrate.data import Calib
from toolkit.errors import UsageError
from toolkit.ir.graph import Array
from toolkit.ir.model import Model
from toolkit.pass_manager.pipeline import Pipeline
from toolkit.pass_manager.protocol import Context

IMAGE = "g (float[N, 4, 5, 5] x) => (float[N, 3, H, W] y)"
CONSTANTS = ", ".join(
    [floats("v", 6, 4, 3, 3), floats("b", 6), floats("w", 3, 6, 1, 1), floats("c", 3)]
)
NODES = "a = Conv (x, v, b) r = Relu (a) y = Conv (r, w, c)"
GRID = np.float32(0.25)
"""A coarse step, so that rounding shifts the outputs."""


def feeds(count: int = 12, width: int = 4, seed: int = 1) -> list[dict[str, Any]]:
    random = np.random.default_rng(seed)
    shape = (2, width, 5, 5)
    return [{"x": random.uniform(0, 2, shape).astype(np.float32)} for _ in range(count)]


def qdq(bias: str = "int32", relu: str = "r = Relu (a)") -> str:
    """The model in QDQ form, with all weights cut off at a coarse grid."""
    original = model(typed(IMAGE, CONSTANTS, NODES)).graph
    parts = ["float step = {0.01}, uint8 zero = {0}", "float wide = {0.05}"]
    for name, scale in (("v", GRID), ("w", GRID)):
        values = original.const(name)
        assert values is not None
        parts.append(stored(f"{name}q", np.floor(values / scale), "int8"))
    parts.append(f"float coarse = {{{GRID}}}")
    dequantized = "vd = DequantizeLinear (vq, coarse) wd = DequantizeLinear (wq, coarse)"
    for name, scale in (("b", 0.01 * GRID), ("c", 0.05 * GRID)):
        values = original.const(name)
        assert values is not None
        if bias == "int32":
            parts += [stored(f"{name}q", np.rint(values / scale), "int32")]
            parts += [f"float {name}s = {{{scale}}}"]
            dequantized += f" {name}d = DequantizeLinear ({name}q, {name}s)"
        elif bias == "float":
            parts.append(stored(f"{name}d", values))
    inputs = [", bd", ", cd"] if bias else ["", ""]
    nodes = f"""xq = QuantizeLinear (x, step, zero) xd = DequantizeLinear (xq, step, zero)
        {dequantized} a = Conv (xd, vd{inputs[0]}) {relu}
        rq = QuantizeLinear (r, wide, zero) rd = DequantizeLinear (rq, wide, zero)
        y = Conv (rd, wd{inputs[1]})"""
    return typed(IMAGE, ", ".join(parts), nodes)


def float_model(bias: bool = True) -> Model:
    nodes = NODES if bias else NODES.replace(", b)", ")").replace(", c)", ")")
    return model(typed(IMAGE, CONSTANTS, nodes))


def corrected(text: str, floats_: Model, notes: list[str] | None = None) -> Model:
    """The corrected model; undone, it is what it was."""
    subject = model(text)
    before = written(subject)
    ctx = Context()
    Fed(CorrectBias(), feeds(), floats_).run(subject, ctx)
    subject.graph.verify()
    if notes is not None:
        notes.extend(ctx.notes)
    after = subject.copy()
    subject.rollback()
    assert written(subject) == before
    return after


@pytest.mark.parametrize("bias", ["int32", "float", ""])
def test_shifts_are_taken_back(bias: str) -> None:
    text, reference = qdq(bias), float_model(bool(bias))
    after = corrected(text, reference)
    fresh = feeds(8, seed=7)
    assert sqnr(reference, after, fresh) > sqnr(reference, model(text), fresh) + 10
    kinds = {str(a.dtype) for a in biases(after)}
    assert kinds == ({"float32"} if bias == "float" else {"int32"})


def biases(subject: Model) -> list[Array]:
    """What the convolutions have as a bias, as it is stored."""
    g = subject.graph
    found: list[Array] = []
    for node in g.nodes:
        if node.op_type == "Conv":
            maker = g.producer(node.input[2])
            array = g.const(maker.input[0] if maker is not None else node.input[2])
            assert array is not None
            found.append(array)
    return found


def test_the_means_agree_afterwards() -> None:
    reference = float_model()
    after = corrected(qdq(), reference)
    fed = feeds()
    pairs = [
        [ort.run(m.inlined_proto(), feed)[0].mean((0, 2, 3)) for m in (reference, after)]
        for feed in fed
    ]
    gap = np.mean([found - wanted for wanted, found in pairs], axis=0)
    np.testing.assert_allclose(gap, 0, atol=0.01)


def test_a_quantizer_that_left_out_the_relu() -> None:
    """Its output has the name of the Relu's, and the zero point does the Relu's work."""
    text = qdq(relu="").replace("a = Conv", "r = Conv")
    reference = float_model()
    after = corrected(text, reference)
    fresh = feeds(8, seed=7)
    assert sqnr(reference, after, fresh) > sqnr(reference, model(text), fresh) + 5


def test_layers_right_behind_a_pass_that_quantizes() -> None:
    random = np.random.default_rng(2)
    constants = [stored("w", random.uniform(0, 1, (64, 8))), floats("b", 8)]
    text = typed("g (float[N, 64] x) => (float[N, 8] y)", ", ".join(constants),
                 "a = MatMul (x, w) y = Add (a, b)")  # fmt: skip
    data = [{"x": random.uniform(0, 1, (4, 64)).astype(np.float32)} for _ in range(8)]
    subject = model(text)
    passes = [QuantizeDynamic(min_elements=1, per_channel=False), CorrectBias()]
    result = Pipeline(passes, calib=Calib(data)).run(subject)
    assert result.passes[0].status == "applied"
    before = model(text)
    QuantizeDynamic(min_elements=1, per_channel=False).run(before, Context())
    assert sqnr(model(text), subject, data) >= sqnr(model(text), before, data)


def test_a_layer_without_a_counterpart_is_named() -> None:
    notes: list[str] = []
    other = model(typed(IMAGE, CONSTANTS, NODES.replace("a)", "z)").replace("a =", "z =")))
    corrected(qdq(), other, notes)
    assert "not corrected: Conv" in notes[0]


def test_a_bias_that_two_layers_share_becomes_two() -> None:
    signature = "g (float[N, 4, 5, 5] x) => (float[N, 6, H, W] y, float[N, 6, H, W] z)"
    constants = f"{floats('v', 6, 4, 3, 3)}, {floats('u', 6, 4, 3, 3)}, {floats('b', 6)}"
    reference = model(typed(signature, constants, "y = Conv (x, v, b) z = Conv (x, u, b)"))
    parts = [f"float coarse = {{{GRID}}}", floats("b", 6)]
    for name, part in (("v", np.floor), ("u", np.ceil)):
        values = reference.graph.const(name)
        assert values is not None
        parts.append(stored(f"{name}q", part(values / GRID), "int8"))
    nodes = """vd = DequantizeLinear (vq, coarse) ud = DequantizeLinear (uq, coarse)
        y = Conv (x, vd, b) z = Conv (x, ud, b)"""
    after = corrected(typed(signature, ", ".join(parts), nodes), reference)
    first, second = biases(after)
    assert (first > second).all()
    assert "b" not in after.graph.initializers


def test_model_that_is_its_own_reference_is_unchanged() -> None:
    subject = model(qdq("float"))
    Fed(CorrectBias(), feeds(), subject.copy()).run(subject, Context())
    assert not len(subject.journal)


def test_shifts_of_single_samples_are_not_learned() -> None:
    """Of two channels, one is shifted in one half of the samples only."""
    means = np.array([[1.0, 2.0], [1.2, 0.0], [0.9, 2.0], [1.1, 0.0]])
    found = lasting(Shift(means, np.ones(4)))
    np.testing.assert_allclose(found, [1.05, 0.0])
    np.testing.assert_allclose(lasting(Shift(means[:1], np.ones(1))), [1.0, 2.0])


def test_a_correction_that_does_not_help_the_outputs_is_undone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = iter([1.0, 3.0, 2.0])
    noise = "passes.quantize.bias_correction.correct_bias.output_noise"
    monkeypatch.setattr(noise, lambda *_: next(answers))
    subject = model(qdq())
    start = written(subject)
    ctx = Context()
    Fed(CorrectBias(), feeds(), float_model()).run(subject, ctx)
    assert "biases unchanged: more corrections would not lower the error" in ctx.notes[0]
    subject.graph.verify()
    assert written(subject) == start


def test_with_little_memory_fewer_samples_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("passes.quantize.bias_correction.correct_bias._MEMORY", 1)
    reference = float_model()
    after = corrected(qdq(), reference)
    assert sqnr(reference, after, feeds(8, seed=7)) > 15


def test_a_subgraph_on_the_way() -> None:
    signature = "g (float[N, 4, 5, 5] x, bool k) => (float[N, 6, H, W] y)"
    values = model(typed(IMAGE, CONSTANTS, NODES)).graph.const("v")
    assert values is not None
    constants = f"{stored('vq', np.floor(values / GRID), 'int8')}, float coarse = {{{GRID}}}"
    branch = """t = If (k) <then_branch = p () => (float[N, 4, 5, 5] u) { u = Identity (x) },
        else_branch = q () => (float[N, 4, 5, 5] o) { o = Neg (x) }>"""
    nodes = f"{branch} vd = DequantizeLinear (vq, coarse) y = Conv (t, vd, b)"
    quantized = typed(signature, f"{constants}, {floats('b', 6)}", nodes)
    reference = model(typed(signature, CONSTANTS, f"{branch} y = Conv (t, v, b)"))
    data = [{**feed, "k": np.array(True)} for feed in feeds()]
    subject = model(quantized)
    Fed(CorrectBias(), data, reference).run(subject, Context())
    assert len(subject.journal)


def test_without_data_or_a_float_model() -> None:
    subject = model(qdq())
    with pytest.raises(UsageError, match="needs calibration data"):
        CorrectBias().run(subject, Context())
    with pytest.raises(UsageError, match="at least 1"):
        CorrectBias(samples=0)
    ctx = Context()
    Fed(CorrectBias(), feeds()).run(subject, ctx)
    assert "no float model" in ctx.notes[0]


def test_a_float_model_has_nothing_to_correct() -> None:
    subject = float_model()
    Fed(CorrectBias(), feeds(), float_model()).run(subject, Context())
    assert not len(subject.journal)
