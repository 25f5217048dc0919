"""`mask-outputs`: zeros at padding, their verification, and outputs that stay."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import toolkit
from passes.motion.remove_padding import region
from passes.motion.remove_padding.mask_outputs import MaskOutputs
from tests import ort
from tests.checks import model, parse
from toolkit.errors import UsageError
from toolkit.ir.model import Model
from toolkit.pass_manager.protocol import Context

TAGGER = """<ir_version: 10, opset_import: ["" : 23]>
agraph (float[N, L, 4] x, int64[N, L] attention_mask) => (float[N, L, 4] y)
    <float[4, 4] w = {1, 2, 3, 4, -1, 0, 2, 1, 0, 1, 0, -2, 3, 1, 1, 0}, float[4] b = {1, 2, 3, 4}>
    { h = MatMul (x, w) y = Add (h, b) }"""

MASK = np.array([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0], [0, 3, 1, -1, 0]])


def _masked(text: str, ctx: Context | None = None, **options: Any) -> Model:
    subject = model(text)
    MaskOutputs(**options).run(subject, ctx or Context())
    subject.graph.verify()
    return subject


def _feed(length: int = 5) -> dict[str, Any]:
    draw = np.random.default_rng(0)
    x = draw.standard_normal((len(MASK), length, 4)).astype(np.float32)
    return {"x": x, "attention_mask": MASK[:, :length]}


def test_rows_of_padding_are_zero_and_others_are_what_they_were() -> None:
    feed = _feed()
    (before,) = ort.run(parse(TAGGER), feed)
    (after,) = ort.run(_masked(TAGGER).to_proto(), feed)
    np.testing.assert_array_equal(after[MASK == 0], 0)
    np.testing.assert_array_equal(after[MASK != 0], before[MASK != 0])
    assert np.all(before[MASK == 0].any(axis=-1))


def test_nan_at_padding_becomes_zero() -> None:
    feed = _feed()
    feed["x"][1, 3] = np.nan
    feed["x"][1, 4] = np.inf
    (after,) = ort.run(_masked(TAGGER).to_proto(), feed)
    np.testing.assert_array_equal(after[MASK == 0], 0)


@pytest.mark.parametrize(
    "dtype", ["int32", "bool", "float", "uint8"], ids=["int32", "bool", "float", "uint8"]
)
def test_masks_of_any_type(dtype: str) -> None:
    text = TAGGER.replace("int64[N, L] attention_mask", f"{dtype}[N, L] attention_mask")
    feed = _feed()
    kind = {"float": np.float32, "bool": np.bool_}.get(dtype, np.dtype(dtype))
    feed["attention_mask"] = np.abs(MASK).astype(kind)
    (after,) = ort.run(_masked(text).to_proto(), feed)
    np.testing.assert_array_equal(after.any(axis=-1), MASK != 0)


@pytest.mark.parametrize("opset", [9, 12, 13, 17])
def test_opsets(opset: int) -> None:
    text = TAGGER.replace('"" : 23', f'"" : {opset}')
    (after,) = ort.run(_masked(text).to_proto(), _feed())
    np.testing.assert_array_equal(after.any(axis=-1), MASK != 0)


def test_no_tokens_at_all() -> None:
    feed = {"x": np.zeros((2, 0, 4), np.float32), "attention_mask": np.zeros((2, 0), np.int64)}
    (after,) = ort.run(_masked(TAGGER).to_proto(), feed)
    assert after.shape == (2, 0, 4)


def test_users_within_the_model_keep_the_original_output() -> None:
    text = TAGGER.replace("(float[N, L, 4] y)", "(float[N, L, 4] y, float[N, 4] last)").replace(
        "y = Add (h, b)", "y = Add (h, b) last = ReduceMax <axes = [1], keepdims = 0> (y)"
    )
    text = text.replace('"" : 23', '"" : 17')
    feed = _feed()
    before = ort.run(parse(text), feed)
    ctx = Context()
    after = ort.run(_masked(text, ctx).to_proto(), feed)
    np.testing.assert_array_equal(after[1], before[1])
    np.testing.assert_array_equal(after[0][MASK == 0], 0)
    assert list(ctx.redefined) == ["y"]


@pytest.mark.parametrize("sizes", ["N, L", "1, L", "3, 5", "1, 5"])
def test_a_second_run_changes_nothing(sizes: str) -> None:
    subject = _masked(TAGGER.replace("N, L", sizes))
    assert len(subject.journal)
    subject.commit()
    ctx = Context()
    MaskOutputs().run(subject, ctx)
    assert not len(subject.journal)
    assert not ctx.redefined


MASKS_ITSELF = """<ir_version: 10, opset_import: ["" : 23]>
agraph (float[N, L, 4] x, int64[N, L] attention_mask) => (float[N, L, 4] y)
    <int64[1] last = {2}, float one = {1}>
    { f = Cast <to = 1> (attention_mask) u = Unsqueeze (f, last) y = Mul (x, u) }"""


def test_an_output_that_the_model_masks_stays() -> None:
    ctx = Context()
    assert not len(_masked(MASKS_ITSELF, ctx).journal)
    assert not ctx.notes
    reverse = MASKS_ITSELF.replace("y = Mul (x, u)", "v = Sub (one, u) y = Mul (x, v)")
    assert len(_masked(reverse).journal)


@pytest.mark.parametrize(
    "text",
    [
        TAGGER.replace("float[N, L, 4] y", "float[N, M, 4] y").replace(
            "y = Add (h, b)",
            "r = Add (h, b) two = Constant <value_ints = [1, 2, 1]> () y = Tile (r, two)",
        ),
        TAGGER.replace("float[N, L, 4] y", "float[N, L] y").replace(
            "y = Add (h, b)",
            "r = Add (h, b) last = Constant <value_ints = [2]> () "
            "y = ReduceSum <keepdims = 0> (r, last)",
        ),
        TAGGER.replace("float[N, L, 4] y", "int64[N, L, 4] y").replace(
            "y = Add (h, b)", "r = Add (h, b) y = Cast <to = 7> (r)"
        ),
        TAGGER.replace("float[N, L, 4] y", "float[L, N, 4] y").replace(
            "y = Add (h, b)", "r = Add (h, b) y = Transpose <perm = [1, 0, 2]> (r)"
        ),
    ],
    ids=["twice as many rows", "a number for each token", "integers", "texts along another axis"],
)
def test_other_outputs_stay(text: str) -> None:
    ctx = Context()
    subject = _masked(text, ctx)
    assert not len(subject.journal)
    assert not ctx.redefined
    assert ctx.notes == ["no output has a vector for each token of 'attention_mask'"]


def test_an_input_that_is_an_output_stays() -> None:
    text = """agraph (float[N, L, 4] x, int64[N, L] mask) => (float[N, L, 4] x) { y = Abs (x) }"""
    ctx = Context()
    subject = _masked(text, ctx)
    assert not len(subject.journal)
    assert ctx.notes == ["'x' stays as it is: it is an input or used by a subgraph"]


@pytest.mark.parametrize(
    ("inputs", "options", "message"),
    [
        ("int64[N, L] ids", {}, r"exactly one .* called a mask.*mask=NAME \(inputs: x, ids\)"),
        ("int64[N, L] mask, int64[N, L] other_mask", {}, r"candidates: mask, other_mask"),
        ("bool[N, L] src_key_padding_mask", {}, r"exactly one input .* called a mask"),
        ("int64[N, L] mask", {"mask": "maks"}, "'maks' is not an input: did you mean 'mask'"),
        ("int64[N] mask", {"mask": "mask"}, r"'mask' is not of shape \[batch, length\]"),
        ("int64[N] mask", {}, "exactly one input"),
    ],
)
def test_masks_that_cannot_be_meant(inputs: str, options: Any, message: str) -> None:
    text = f"agraph (float[N, L, 4] x, {inputs}) => (float[N, L, 4] y) {{ y = Abs (x) }}"
    with pytest.raises(UsageError, match=message):
        _masked(text, **options)


@pytest.mark.parametrize("validate", ["each", "final"])
def test_proven_with_zeros_at_padding(validate: Any) -> None:
    result = toolkit.optimize(parse(TAGGER), "mask-outputs,simplify", validate=validate)
    assert result.passes[0].status == "applied"
    assert result.passes[0].notes == ["'y' is 0 wherever 'attention_mask' is, and compared as such"]
    assert "redefined by a pass: 'y'" in result.proof
    (after,) = ort.run(result.model.to_proto(), _feed())
    np.testing.assert_array_equal(after[MASK == 0], 0)


def test_an_opset_without_where() -> None:
    ctx = Context()
    subject = _masked(TAGGER.replace('"" : 23', '"" : 8'), ctx)
    assert not len(subject.journal)
    assert ctx.notes == ["opset 8 has no Where: lift the model first, with the pass opset"]


def _is_packed(subject: Model) -> bool:
    """Whether the last product is one of real rows alone."""
    (node,) = [n for n in subject.graph.nodes if n.op_type == "Attention"]
    (reader,) = subject.graph.users(node.output[0])
    return reader.op_type == "GatherND"


def test_rows_of_padding_are_then_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region, "WORK_OF_A_COPY", 0.1)
    text = """<ir_version: 10, opset_import: ["" : 23]>
    agraph (float[N, L, 4] x, int64[N, L] mask) => (float[N, L, 4] y)
    <float[4, 4] w = {1, 2, 3, 4, -1, 0, 2, 1, 0, 1, 0, -2, 3, 1, 1, 0}, float zero = {0},
     int64[2] heads = {1, 2}, int64[1] rows = {1}, float low = {-10000}>
    {
        real = Cast <to = 9> (mask) seen = Unsqueeze (real, heads)
        narrow = Where (seen, zero, low) length = Shape <start = 1, end = 2> (mask)
        square = Concat <axis = 0> (rows, rows, length, rows) bias = Expand (narrow, square)
        k = MatMul (x, w) v = MatMul (x, w)
        a = Attention <q_num_heads = 2, kv_num_heads = 2> (x, k, v, bias)
        m = MatMul (a, w) y = Add (m, x)
    }"""
    plain = toolkit.optimize(parse(text), "simplify,unpad")
    masked = toolkit.optimize(parse(text), "mask-outputs,simplify,unpad")
    assert [_is_packed(found.model) for found in (plain, masked)] == [False, True]
    feed = {"x": _feed()["x"], "mask": np.abs(MASK)}
    (before,) = ort.run(parse(text), feed)
    (after,) = ort.run(masked.model.to_proto(), feed)
    np.testing.assert_allclose(after[MASK != 0], before[MASK != 0], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(after[MASK == 0], 0)
