"""Weights alone in 4 and 8 bits: what is written, what it computes, and what stays as it is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from passes.quantize.schemes.weight_only.nbits import Form
from passes.quantize.schemes.weight_only.quantize_weights import QuantizeWeights, apply_weight_only
from tests import ort as plain
from tests.checks import check, parse, random_feeds
from tests.passes.fuse.constants import floats, stored, typed
from tests.passes.quantize.schemes.dynamic.checks import ROWS, X_Y, matrices, quantized, stays
from toolkit.calibrate.data import CalibrationData
from toolkit.errors import UsageError
from toolkit.feeds import Feed
from toolkit.ir.model import Model
from toolkit.pass_manager.pipeline import Pipeline
from toolkit.pass_manager.protocol import Context
from toolkit.pass_manager.registry import parse_passes
from toolkit.quantization.plan import Entry, Plan
from toolkit.quantization.plan_json import parse_plan
from toolkit.runtime import session
from toolkit.settings import Settings

ANY: dict[str, Any] = {"min_elements": 1, "block_size": 16}
NBITS = QuantizeWeights(**ANY, accuracy_level=0)
QDQ = QuantizeWeights(**ANY, form="qdq")
EXACT8 = QuantizeWeights(**ANY, weights="int8", accuracy_level=0)
WEIGHT = "DequantizeLinear MatMul"
COARSE = 0.4


def unpacked(array: Any, bits: int) -> Any:
    if bits == 8:
        return array.astype(np.float32)
    return np.stack([array & 15, array >> 4], -1).reshape(*array.shape[:-1], -1).astype(np.float32)


def nbits_weight(model: Model) -> Any:
    """The weight [inputs, outputs] of the only MatMulNBits, from its constants, by numpy."""
    (node,) = (n for n in model.graph.nodes if n.op_type == "MatMulNBits")
    attributes = {a.name: a.i for a in node.attribute}
    bits = attributes["bits"]
    codes, scale = (model.graph.const(name) for name in node.input[1:3])
    assert codes is not None
    assert scale is not None
    zero: Any = np.float32(1 << (bits - 1))
    if len(node.input) > 3 and node.input[3]:
        packed = model.graph.const(node.input[3])
        zero = unpacked(packed, bits)[:, : scale.shape[1], None]
    values = (unpacked(codes, bits) - zero) * scale[..., None]
    return values.reshape(len(codes), -1)[:, : attributes["K"]].T


# -- MatMulNBits


@pytest.mark.parametrize("weights", ["int4", "int8"])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("block", [16, 32])
@pytest.mark.parametrize("inputs", [32, 37, 5, 1])
def test_the_same_numbers_as_in_numpy(
    weights: Any, symmetric: bool, block: int, inputs: int
) -> None:
    item = QuantizeWeights(weights, block, symmetric, min_elements=1, accuracy_level=0)
    signature = f"g (float[N, {inputs}] x) => (float[N, 5] y)"
    constants = f"{floats('w', inputs, 5)}, {floats('b', 5)}"
    nodes = "a = MatMul (x, w) y = Add (a, b)"
    changed = check(item, typed(signature, constants, nodes, 21), atol=0.8)
    assert [n.op_type for n in changed.graph.nodes] == ["MatMulNBits"]
    feeds = random_feeds(changed)
    weight = nbits_weight(changed)
    before = parse(f"{signature} <{constants}> {{ {nodes} }}")
    w, b = (onnx.numpy_helper.to_array(t) for t in before.graph.initializer)
    (found,) = plain.run(changed.inlined_proto(), feeds)
    np.testing.assert_allclose(found, feeds["x"] @ weight + b, atol=2e-6, rtol=2e-6)
    step = 2.0 / (15 if weights == "int4" else 255)
    assert np.abs(weight - w).max() <= 1.2 * step


@pytest.mark.parametrize("weights", ["int4", "int8"])
@pytest.mark.parametrize("level", [0, 4])
def test_outputs_without_weights_are_zero(weights: Any, level: int) -> None:
    """As those of a vocabulary that is filled up: nothing is left of them by rounding."""
    item = QuantizeWeights(weights, 16, True, min_elements=1, accuracy_level=level)
    text = typed(X_Y, stored("w", np.zeros((16, 8))), "y = MatMul (x, w)")
    changed = check(item, text)
    large = {"x": 1000 + np.arange(48, dtype=np.float32).reshape(1, 3, 16) / 7}
    (found,) = plain.run(changed.inlined_proto(), large)
    assert np.abs(found).max() < 1e-30


def test_level_four_computes_in_int8() -> None:
    item = QuantizeWeights(**ANY)
    changed = check(item, typed(X_Y, floats("w", 16, 8), "y = MatMul (x, w)"), atol=COARSE)
    feeds = random_feeds(changed)
    (found,) = plain.run(changed.inlined_proto(), feeds)
    wanted = feeds["x"] @ nbits_weight(changed)
    error = np.abs(found - wanted).max() / np.abs(wanted).max()
    assert 1e-5 < error < 0.02


@pytest.mark.parametrize("optimize", [False, True])
def test_plan_and_application_compute_the_same(
    optimize: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without packed weights the runtime computes level 4 in floats; a large model is told so."""
    item = QuantizeWeights(**ANY)
    made = check(item, typed(X_Y, floats("w", 16, 8), "y = MatMul (x, w)"), atol=COARSE)
    feeds = random_feeds(made)
    (wanted,) = plain.run(made.inlined_proto(), feeds)
    (proven,) = session.Session(made, optimize).run(feeds)
    np.testing.assert_array_equal(proven, wanted)
    assert not session.packing_note(made)
    monkeypatch.setattr(session, "MOST_PACKED", 100)
    monkeypatch.setattr(session, "_LIGHT", 100)
    (in_floats,) = session.Session(made, optimize).run(feeds)
    assert np.abs(in_floats - wanted).max() > 1e-3
    assert "accuracy_level 4" in session.packing_note(made)


@pytest.mark.parametrize(
    ("attributes", "shape"),
    [("", (16, 8)), ("<transB = 1>", (8, 16)), ("<alpha = -2.5, transB = 1>", (8, 16))],
)
@pytest.mark.parametrize("bias", [None, (8,), (1, 8), (1,)])
def test_gemm(attributes: str, shape: tuple[int, int], bias: tuple[int, ...] | None) -> None:
    constants = floats("w", *shape) + (f", {floats('b', *bias)}" if bias else "")
    node = f"y = Gemm {attributes} (x, w{', b' if bias else ''})"
    quantized(ROWS, constants, node, "MatMulNBits", EXACT8)


def test_a_gemm_whose_bias_is_no_vector() -> None:
    signature = "g (float[3, 16] x, float[3, 8] c) => (float[3, 8] y)"
    quantized(signature, floats("w", 16, 8), "y = Gemm (x, w, c)", "MatMulNBits Add", EXACT8)
    constants = f"{floats('w', 16, 8)}, {floats('b', 3, 1)}"
    nodes = "y = Gemm <beta = 2.0> (x, w, b)"
    quantized(signature, constants, nodes, "MatMulNBits Add", EXACT8)


@pytest.mark.parametrize("item", [EXACT8, QuantizeWeights("int8", **ANY, form="qdq")])
def test_a_fused_matmul(item: QuantizeWeights) -> None:
    header = '<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>\n'
    node = "y = com.microsoft.FusedMatMul <transB = 1, alpha = 0.5> (x, w)"
    check(item, f"{header}{X_Y} <{floats('w', 8, 16)}> {{ {node} }}", atol=0.1)


def test_add_that_is_not_a_bias_stays() -> None:
    signature = "g (float[N, S, 16] x, float[N, S, 8] r) => (float[N, S, 8] y)"
    nodes = "a = MatMul (x, w) y = Add (a, r)"
    quantized(signature, floats("w", 16, 8), nodes, "MatMulNBits Add", EXACT8)
    seen = "g (float[N, S, 16] x) => (float[N, S, 8] y, float[N, S, 8] a)"
    constants = f"{floats('w', 16, 8)}, {floats('r', 8)}"
    quantized(seen, constants, nodes, "MatMulNBits Add", EXACT8)
    raised = "g (float[N, 16] x) => (float[1, N, 8] y)"
    constants = f"{floats('w', 16, 8)}, {floats('r', 1, 1, 8)}"
    quantized(raised, constants, nodes, "MatMulNBits Add", EXACT8)


@pytest.mark.parametrize("shape", [(2, 0, 16), (2, 1, 16)])
def test_inputs_without_rows_and_of_one_dimension(shape: tuple[int, ...]) -> None:
    rows = {"x": np.ones(shape, np.float32)}
    text = typed(X_Y, floats("w", 16, 8), "y = MatMul (x, w)")
    check(EXACT8, text, inputs=rows, atol=0.1)
    check(QDQ, text, inputs=rows, atol=COARSE)
    vector = "g (float[16] x) => (float[8] y)"
    quantized(vector, floats("w", 16, 8), "y = MatMul (x, w)", "MatMulNBits", EXACT8)


def test_weight_with_two_users_is_stored_once() -> None:
    signature = "g (float[N, 16] x) => (float[N, 16] y)"
    nodes = "a = MatMul (x, w) t = Tanh (a) y = MatMul (t, w)"
    wanted = "MatMulNBits Tanh MatMulNBits"
    changed = quantized(signature, floats("w", 16, 16), nodes, wanted, EXACT8)
    assert sorted(matrices(changed).values()) == [TensorProto.FLOAT, TensorProto.UINT8]
    item = QuantizeWeights("int8", **ANY, form="qdq")
    wanted = "DequantizeLinear MatMul Tanh MatMul"
    changed = quantized(signature, floats("w", 16, 16), nodes, wanted, item)
    assert sorted(matrices(changed).values()) == [TensorProto.FLOAT, TensorProto.INT8]


# -- DequantizeLinear


@pytest.mark.parametrize("weights", ["int4", "int8"])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("inputs", [32, 37, 5])
@pytest.mark.parametrize("turned", [False, True])
def test_the_standard_form(weights: Any, symmetric: bool, inputs: int, turned: bool) -> None:
    item = QuantizeWeights(weights, 16, symmetric, form="qdq", min_elements=1)
    signature = f"g (float[N, {inputs}] x) => (float[N, 5] y)"
    shape = (5, inputs) if turned else (inputs, 5)
    node = f"y = Gemm <transB = {int(turned)}> (x, w)"
    text = typed(signature, floats("w", *shape), node, 21)
    changed = check(item, text, atol=COARSE if weights == "int4" else 0.05)
    assert [n.op_type for n in changed.graph.nodes] == ["DequantizeLinear", "Gemm"]
    assert all(not n.domain for n in changed.graph.nodes)
    kinds = {t.data_type for t in changed.graph.initializers.values()} - {TensorProto.FLOAT}
    assert kinds == {TensorProto.INT4 if weights == "int4" else TensorProto.INT8}
    onnx.checker.check_model(changed.inlined_proto(), full_check=True)


def test_both_forms_hold_the_same_numbers() -> None:
    text = typed(X_Y, floats("w", 16, 8), "y = MatMul (x, w)", 21)
    outputs: list[Any] = []
    for item in (NBITS, QDQ):
        subject = Model.from_proto(parse(text))
        item.run(subject, Context())
        outputs += plain.run(subject.inlined_proto(), random_feeds(subject))
    np.testing.assert_allclose(outputs[0], outputs[1], atol=1e-5)


def test_a_weight_behind_a_transpose() -> None:
    signature = "g (float[N, 16] x) => (float[N, 20] y)"
    nodes = "u = Transpose (t) y = MatMul (x, u)"
    quantized(signature, floats("t", 20, 16), nodes, "MatMulNBits", EXACT8)
    item = QuantizeWeights("int8", **ANY, form="qdq")
    wanted = "DequantizeLinear Transpose MatMul"
    changed = quantized(signature, floats("t", 20, 16), nodes, wanted, item)
    assert "t" not in changed.graph.initializers


def test_an_older_opset_is_lifted() -> None:
    text = typed(X_Y, floats("w", 16, 8), "y = MatMul (x, w)", 17)
    changed = check(QDQ, text, atol=COARSE)
    assert changed.opsets[""] == 21
    for limit in ("keep", 18):
        subject, ctx = Model.from_proto(parse(text)), Context(Settings(opset=limit))  # pyright: ignore[reportArgumentType]
        QDQ.run(subject, ctx)
        assert not len(subject.journal)
        assert ctx.notes == ["a weight in blocks needs opset 21, but the model must stay at 17"]


def test_the_form_follows_the_target() -> None:
    text = typed(X_Y, floats("w", 16, 8), "y = MatMul (x, w)", 21)
    for target, wanted in (("ort-cpu", ["MatMulNBits"]), ("onnx", WEIGHT.split())):
        subject = Model.from_proto(parse(text))
        QuantizeWeights(**ANY).run(subject, Context(Settings(target=target)))
        assert [n.op_type for n in subject.graph.nodes] == wanted
    with pytest.raises(UsageError, match=r"form=nbits is com.*MatMulNBits"):
        QuantizeWeights(form="nbits").run(
            Model.from_proto(parse(text)), Context(Settings(target="onnx"))
        )


# -- tables

IDS = "g (int64[N, S] i) => (float[N, S, 20] y)"
INT8_ROWS = "Gather Gather Cast Mul"
INT4_ROWS = (
    "Gather Gather BitShift BitShift BitShift Unsqueeze Unsqueeze Concat Cast Sub Unsqueeze Mul "
    "Shape Concat Reshape"
)


def test_tables() -> None:
    quantized(IDS, floats("t", 9, 20), "y = Gather (t, i)", INT8_ROWS, NBITS)
    text = typed(IDS, floats("t", 9, 20), "y = Gather (t, i)", 21)
    for target in ("ort-cpu", "onnx"):
        item = QuantizeWeights(**ANY, embeddings="int4")
        subject = Model.from_proto(parse(text))
        item.run(subject, Context(Settings(target=target)))
        found = sorted(n.op_type for n in subject.graph.nodes)
        assert found == sorted([*INT4_ROWS.split(), "Slice"])
        assert all(not n.domain for n in subject.graph.nodes)
    check(QuantizeWeights(**ANY, embeddings="int4"), text, atol=0.15)
    ids = {"i": np.zeros((0, 3), np.int64)}
    check(QuantizeWeights(**ANY, embeddings="int4"), text, inputs=ids)
    off = QuantizeWeights(**ANY, embeddings="float")
    assert "a table" in stays(IDS, floats("t", 9, 20), "y = Gather (t, i)", off)[0]


@pytest.mark.parametrize("embeddings", ["int8", "int4"])
@pytest.mark.parametrize("form", ["nbits", "qdq"])
@pytest.mark.parametrize(
    "project",
    ["u = Transpose <perm = [1, 0]> (t) y = MatMul (h, u)", "y = Gemm <transB = 1> (h, t)"],
)
def test_a_table_that_is_tied_to_a_projection_is_stored_once(
    embeddings: Any, form: Any, project: str
) -> None:
    signature = "g (int64[N] i) => (float[N, 20] y)"
    text = typed(signature, floats("t", 20, 32), f"x = Gather (t, i) h = Tanh (x) {project}", 21)
    item = QuantizeWeights(**ANY, embeddings=embeddings, form=form, accuracy_level=0)
    coarse = embeddings == "int4" and form == "nbits"
    changed = check(item, text, atol=1.5 if coarse else 0.1)
    bytes_ = [t for t in changed.graph.initializers.values() if t.data_type != TensorProto.FLOAT]
    matrix = [t for t in bytes_ if len(t.dims) > 1]
    assert len(matrix) == 1
    assert np.prod(matrix[0].dims) == 20 * 32 // (2 if coarse else 1)
    assert "t" not in changed.graph.initializers


def test_a_projection_stays_with_the_table_it_is_tied_to() -> None:
    signature = "g (int64[N] i) => (float[N, 20] y)"
    nodes = "x = Gather (t, i) h = Tanh (x) y = Gemm <transB = 1> (h, t)"
    notes = stays(signature, floats("t", 20, 32), nodes, QuantizeWeights(**ANY, embeddings="float"))
    assert any("Gemm 'y' (tied to a table)" in note for note in notes)


def test_table_with_float_users_stays_float() -> None:
    signature = "g (int64[N, S] i) => (float[N, S, 8] y, float[20, 8] z)"
    notes = stays(signature, floats("t", 20, 8), "y = Gather (t, i) z = Neg (t)", NBITS)
    assert "float users" in notes[0]


# -- calibrated


class Samples:
    """Feeds in a list."""

    def __init__(self, feeds: list[Feed]) -> None:
        self._feeds = feeds
        self.reads = 0

    def __iter__(self) -> Iterator[Feed]:
        self.reads += 1
        return iter(self._feeds)

    def count(self) -> int:
        return len(self._feeds)

    def digest(self) -> str:
        return "samples"


def correlated(rows: int, seed: int) -> Any:
    mixed = np.random.default_rng(7).standard_normal((64, 64)) * np.geomspace(1, 0.02, 64)
    return (np.random.default_rng(seed).standard_normal((rows, 64)) @ mixed.T).astype(np.float32)


TWO = "g (float[N, 64] x) => (float[N, 24] y, float[N, 24] z)"
TWO_WEIGHTS = f"{floats('v', 64, 24)}, {floats('w', 24, 64)}"
TWO_NODES = "y = MatMul (x, v) z = Gemm <transB = 1> (x, w)"


@pytest.mark.parametrize("form", ["nbits", "qdq"])
def test_calibrated_weights_are_closer_on_new_data(form: Any) -> None:
    text = typed(TWO, TWO_WEIGHTS, TWO_NODES, 21)
    data = Samples([{"x": correlated(50, seed)} for seed in range(8)])
    feeds = {"x": correlated(100, 99)}
    wanted = plain.run(parse(text), feeds)
    errors: dict[str, list[float]] = {}
    for method in ("rtn", "hqq", "gptq"):
        item = QuantizeWeights("int4", 32, method=method, form=form, min_elements=1)
        subject = Model.from_proto(parse(text))
        item.run(subject, Context(calibration=CalibrationData(data)))
        found = plain.run(subject.inlined_proto(), feeds)
        errors[method] = [float(((a - b) ** 2).sum()) for a, b in zip(found, wanted, strict=True)]
    assert all(g < 0.6 * r for g, r in zip(errors["gptq"], errors["rtn"], strict=True))
    assert sum(errors["hqq"]) < 1.3 * sum(errors["rtn"])


def test_inputs_that_do_not_fit_into_memory_take_more_sweeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    signature = "g (float[N, 64] x) => (float[N, 64] y)"
    constants = f"{floats('v', 64, 64)}, {floats('w', 64, 64)}"
    text = typed(signature, constants, "a = MatMul (x, v) b = Tanh (a) y = MatMul (b, w)", 21)
    feeds: list[Feed] = [{"x": correlated(20, seed)} for seed in range(3)]
    results: list[Any] = []
    for room in (1 << 28, 64 * 64 * 4):
        monkeypatch.setattr("passes.quantize.schemes.weight_only.methods._GRAM_BYTES", room)
        subject, data = Model.from_proto(parse(text)), Samples(feeds)
        item = QuantizeWeights(min_elements=1, method="gptq")
        item.run(subject, Context(calibration=CalibrationData(data)))
        results.append((plain.run(subject.inlined_proto(), feeds[0])[0], data.reads))
    np.testing.assert_array_equal(results[0][0], results[1][0])
    assert results[1][1] > results[0][1]


def test_calibration_needs_data() -> None:
    text = typed(X_Y, floats("w", 16, 8), "y = MatMul (x, w)", 21)
    subject = Model.from_proto(parse(text))
    with pytest.raises(UsageError, match="method=gptq needs calibration data"):
        QuantizeWeights(**ANY, method="gptq").run(subject, Context())
    assert not len(subject.journal)


def test_a_layer_that_cannot_be_observed_is_rounded() -> None:
    signature = "g (bool c, float[N, 16] x) => (float[N, 8] y)"
    then = "then_branch = t () => (float[N, 8] p) { h = Tanh (x) p = MatMul (h, w) }"
    other = "else_branch = e () => (float[N, 8] q) { n = Neg (x) q = MatMul (n, w) }"
    text = f"{signature} <{floats('w', 16, 8)}> {{ y = If (c) <{then}, {other}> }}"
    data = Samples([{"c": np.array(True), "x": np.ones((2, 16), np.float32)}])
    subject, ctx = Model.from_proto(parse(text)), Context(calibration=CalibrationData(data))
    QuantizeWeights(**ANY, method="gptq").run(subject, ctx)
    assert any("rounded to nearest: its input is in a subgraph" in note for note in ctx.notes)
    assert list(matrices(subject)) == [n for n in subject.graph.initializers if n != "w"][:3]
    for chosen in (True, False):
        feeds = {"c": np.array(chosen), "x": np.random.default_rng(0).random((3, 16), np.float32)}
        check(NBITS, text, atol=COARSE, inputs=feeds)


# -- what stays, plans, options


def test_unsupported_patterns_stay() -> None:
    matmul = "y = MatMul (x, w)"
    notes = stays(X_Y, floats("w", 16, 8), matmul, QuantizeWeights())
    assert notes == ["left float: MatMul 'y' (fewer than 4096 weights)"]
    assert "excluded" in stays(X_Y, floats("w", 16, 8), matmul,
                               QuantizeWeights(**ANY, exclude=("y",)))[0]  # fmt: skip
    half = X_Y.replace("float[", "float16[")
    numbers = np.random.default_rng(0).uniform(-1, 1, (16, 8))
    assert "float16" in stays(half, stored("w", numbers, "float16"), matmul, NBITS)[0]
    given = "g (float[N, 16] x, float[16, 8] w) => (float[N, 8] y)"
    assert stays(given, floats("w", 16, 8), matmul, NBITS) == []
    assert "rank 3" in stays("g (float[2, 4, 16] x) => (float[2, 4, 8] y)",
                                floats("w", 2, 16, 8), matmul, NBITS)[0]  # fmt: skip


def test_quantized_model_is_unchanged() -> None:
    text = typed(ROWS, floats("w", 16, 8), "y = MatMul (x, w)", 21)
    for item in (NBITS, QDQ):
        subject = Model.from_proto(parse(text))
        item.run(subject, Context())
        subject.commit()
        ctx = Context()
        QuantizeWeights(**ANY, weights="int8").run(subject, ctx)
        assert not len(subject.journal)
        assert "quantized already" in ctx.notes[0]


@pytest.mark.parametrize(("bad", "said"), [("nan", "NaN among"), ("inf", "infinite weights")])
@pytest.mark.parametrize("item", [NBITS, QDQ])
def test_weights_with_nan_or_infinity_stay_float(
    bad: str, said: str, item: QuantizeWeights
) -> None:
    before = parse(typed(X_Y, floats("w", 16, 8), "y = MatMul (x, w)", 21))
    numbers = onnx.numpy_helper.to_array(before.graph.initializer[0]).copy()
    numbers[2, 2] = float(bad)
    before.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(numbers, "w"))
    subject, ctx = Model.from_proto(before), Context()
    item.run(subject, ctx)
    assert [n.op_type for n in subject.graph.nodes] == ["MatMul"]
    assert f"stays float: it has {said}" in ctx.notes[0]


def test_a_plan_there_and_back(tmp_path: Path) -> None:
    text = typed(TWO, TWO_WEIGHTS, TWO_NODES, 21)
    plan = QuantizeWeights("int4", 64, min_elements=1, exclude=("z",)).make_plan(
        Model.from_proto(parse(text))
    )
    assert parse_plan(plan.to_json()) == plan
    first, second = plan.entries
    assert (first.scheme, first.weight, first.block_size, first.symmetric) == (
        "weight-only", "int4", 64, False)  # fmt: skip
    assert second.reason == "excluded"
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json())
    subject = Model.from_proto(parse(text))
    QuantizeWeights(plan=path).run(subject, Context())
    assert [n.op_type for n in subject.graph.nodes] == ["MatMulNBits", "Gemm"]


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (Entry(output="y", op="MatMul", weight="uint4", block_size=16), "in uint4: int4 or int8"),
        (Entry(output="y", op="MatMul", weight="int4"), "whole rows are symmetric int8"),
        (Entry(output="y", op="MatMul"), "its weight is not stored by rows"),
        (Entry(output="y", op="MatMul", block_size=16, method="gptq"), "needs calibration data"),
    ],
)
@pytest.mark.parametrize("form", ["nbits", "qdq"])
def test_unsupported_plan_entries_are_errors(entry: Entry, said: str, form: Form) -> None:
    subject = Model.from_proto(parse(typed(X_Y, floats("w", 16, 8), "y = MatMul (x, w)", 21)))
    asked = Entry(entry.node, entry.output, entry.op, "weight-only", entry.weight,
                  block_size=entry.block_size, method=entry.method)  # fmt: skip
    with pytest.raises(UsageError, match=said):
        apply_weight_only(subject, Plan((asked,)), Context(), form)
    assert not len(subject.journal)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("block_size=48", "block_size=48 is none of 16, 32, 64, 128, 256"),
        ("block_size=512", "block_size=512 is none of"),
        ("accuracy_level=5", "accuracy_level=5 is not valid: 0 to 4"),
        ("weights=int3", "weights=int3 is not valid"),
        ("method=awq", "method=awq is not valid"),
        ("form=onnx", "form=onnx is not valid"),
    ],
)
def test_bad_options(option: str, said: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_passes(f"quantize-weights:{option}")
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


# -- in a pipeline


@pytest.mark.parametrize("target", ["ort-cpu", "onnx"])
def test_behind_fusion(target: str) -> None:
    signature = "g (float[N, S, 64] x) => (float[N, S, 64] y)"
    constants = (
        f"{floats('w', 64, 64)}, {floats('b', 64)}, {floats('v', 64, 64)}, float half = {{0.5}}, "
        "float one = {1}, float root = {1.4142135}"
    )
    nodes = """a = MatMul (x, w) l = Add (a, b) d = Div (l, root) e = Erf (d) s = Add (e, one)
               m = Mul (l, s) h = Mul (m, half) y = MatMul (h, v)"""
    text = typed(signature, constants, nodes, 17)
    options = "weights=int8:min_elements=1"
    passes = parse_passes(f"fuse,quantize-weights:{options}")
    subject = Model.from_proto(parse(text))
    result = Pipeline(passes, target=target).run(subject)
    assert result.passes[-1].status == "applied"
    found = [n.op_type for n in subject.graph.nodes]
    assert found.count("MatMulNBits" if target == "ort-cpu" else "DequantizeLinear") == 2
    assert "Gelu" in found
