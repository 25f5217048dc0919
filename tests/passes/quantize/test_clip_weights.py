"""Clipping of weights: what is clipped, what it brings, and what stays as it is."""

from __future__ import annotations

import numpy as np
import pytest

from passes.quantize import clip_weights as clipping
from passes.quantize.clip_weights import ClipWeights, clip
from tests import ort
from tests.checks import (
    assert_rollback,
    check,
    knowledge,
    model,
    random_feeds,
    written,
)
from tests.passes.fuse.constants import floats, stored, typed
from tests.passes.quantize.accuracy_checks import notes_of
from toolkit.errors import UsageError
from toolkit.ir.graph import Array
from toolkit.ir.model import Model
from toolkit.pass_manager.protocol import Context

ROWS = "g (float[N, 256] x) => (float[N, 4] y)"
LAYER = "y = MatMul (x, w)"


def heavy(*shape: int) -> Array:
    """Weights of which a few are far larger than the others."""
    return np.random.default_rng(0).standard_t(3, shape).astype(np.float32)


def clipped(text: str) -> Model:
    """The model with clipped weights; undone, it is what it was."""
    subject = model(text)
    before, known = written(subject), knowledge(subject)
    item = ClipWeights(bits=4)
    item.run(subject, Context())
    assert len(subject.journal)
    assert_rollback(subject, before, known, restated=True)
    item.run(subject, Context())
    subject.commit()
    subject.graph.verify()
    (output, *_) = ort.run(subject.inlined_proto(), random_feeds(subject))
    assert np.isfinite(output).all()
    return subject


def error(weights: Array, reference: Array, axis: int | None, limit: int) -> float:
    """The squared error of quantization by max |w|, against other weights."""
    others = tuple(a for a in range(weights.ndim) if a != axis)
    scale = np.abs(weights).max(axis=others, keepdims=True) / limit
    rounded = np.rint(weights / scale) * scale
    return float(((rounded - reference) ** 2).sum())


@pytest.mark.parametrize("axis", [0, 1, None])
@pytest.mark.parametrize("limit", [31, 7])
def test_the_error_is_about_the_least_there_is(axis: int | None, limit: int) -> None:
    weights = heavy(48, 64)
    found = clip(weights, axis, limit)
    assert found is not None
    found_error = error(found, weights, axis, limit)
    assert found_error < error(weights, weights, axis, limit)
    best = 0.0
    for channel in range(1 if axis is None else weights.shape[axis]):
        part = weights if axis is None else np.take(weights, channel, axis)
        most = float(np.abs(part).max())
        best += min(
            error(np.clip(part, -t, t), part, None, limit)
            for t in np.linspace(most / 64, most, 400)
        )
    assert found_error < 1.06 * best


def test_in_blocks_as_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = heavy(64, 8, 3, 3)
    whole = [clip(weights, axis, 7) for axis in (0, 1, None)]
    monkeypatch.setattr("passes.quantize.layers.row_blocks._BLOCK_BYTES", 1 << 10)
    for axis, wanted in zip((0, 1, None), whole, strict=True):
        found = clip(weights, axis, 7)
        assert found is not None
        assert wanted is not None
        np.testing.assert_allclose(found, wanted)
    monkeypatch.setattr(clipping, "_MOST_COUNTS", 1)
    assert clip(weights, 0, 7) is not None


@pytest.mark.parametrize(
    "weights",
    [np.zeros((8, 4)), np.ones((8, 4)), np.full((8, 4), 1e-42), np.full((8, 4), np.inf)],
)
def test_weights_that_there_is_nothing_to_clip_of(weights: Array) -> None:
    assert clip(weights.astype(np.float32), 1, 127) is None


def test_a_layer() -> None:
    text = typed(ROWS, stored("w", heavy(256, 4)), LAYER)
    changed = clipped(text)
    before, after = heavy(256, 4), changed.graph.const(changed.graph.nodes[0].input[1])
    assert after is not None
    assert (np.abs(after).max(0) < np.abs(before).max(0)).any()
    kept = np.abs(before) < np.abs(after).max(0)
    np.testing.assert_allclose(after[kept], before[kept], rtol=1e-6)
    assert list(changed.graph.initializers) == [changed.graph.nodes[0].input[1]]


def test_a_convolution() -> None:
    signature = "g (float[N, 8, 6, 6] x) => (float[N, 32, H, W] y)"
    clipped(typed(signature, stored("w", heavy(32, 8, 3, 3)), "y = Conv (x, w)"))


def test_a_weight_that_two_layers_read_is_clipped_once() -> None:
    signature = "g (float[N, 256] x) => (float[N, 4] y, float[N, 4] z)"
    nodes = f"{LAYER} n = Neg (x) z = MatMul (n, w)"
    changed = clipped(typed(signature, stored("w", heavy(256, 4)), nodes))
    assert len(changed.graph.initializers) == 1


def test_weights_that_others_read_stay() -> None:
    more = "g (float[N, 256] x, float[N, 4] u) => (float[N, 4] y, float[N, 256] z)"
    for other in ("t = Transpose (w) z = MatMul (u, t)", "z = Gemm <transB = 1> (u, w)"):
        text = typed(more, stored("w", heavy(256, 4)), f"{LAYER} {other}")
        check(ClipWeights(bits=4), text, near_miss=True, run=False)
        assert "it has other users" in notes_of(ClipWeights(bits=4), text)[-1]


def test_light_tails_stay_in_8_bits() -> None:
    signature = "g (float[N, 64] x) => (float[N, 512] y)"
    item = ClipWeights(per_channel=False)
    check(item, typed(signature, floats("w", 64, 512), LAYER), near_miss=True)


def test_half_precision() -> None:
    signature = "g (float16[N, 256] x) => (float16[N, 4] y)"
    text = typed(signature, stored("w", heavy(256, 4), "float16"), LAYER)
    changed = clipped(text)
    assert next(iter(changed.graph.initializers.values())).data_type == 10


def test_a_layer_with_an_outlier_is_named() -> None:
    weights = np.random.default_rng(0).standard_normal((20_000, 2)).astype(np.float32)
    weights[3, 1] = 5000
    subject = model("g (float[N, 20000] x) => (float[N, 2] y) { y = MatMul (x, w) }".replace(
        "{ y", "<float[1] w = {0}> { y"))  # fmt: skip
    subject.graph.put_initializer(subject.weights.put("w", weights))
    subject.commit()
    ctx = Context()
    ClipWeights(exclude=("*",)).run(subject, ctx)
    assert ctx.notes[0].startswith("'w': in 1 of 2 outputs the largest weight")


def test_bits_that_make_no_sense() -> None:
    with pytest.raises(UsageError, match="from 2 to 8"):
        ClipWeights(bits=1)
