"""Which ranges activations get: the whole of what was seen, or less where less makes less noise."""

from __future__ import annotations

import numpy as np

from passes.quantize.quantize import AnyObserver, Quantize
from tests.checks import parse
from tests.passes.fuse.constants import stored, typed
from tests.passes.quantize.test_quantize import run_quantize
from toolkit.feeds import Feed
from toolkit.ir.model import Model

RANDOM = np.random.default_rng(0)


def network() -> Model:
    """A convolution that hardly looks at its first channel."""
    weights = RANDOM.uniform(-1, 1, (8, 3, 1, 1))
    weights[:, 0] *= 1e-4
    signature = "g (float[1, 3, 64, 64] x) => (float[1, 8, 64, 64] y)"
    return Model.from_proto(parse(typed(signature, stored("w", weights), "y = Conv (x, w)", 21)))


def samples(largest: float) -> list[Feed]:
    """Images between -1 and 1; of every other one the first number is as large as that."""
    x = RANDOM.uniform(-1, 1, (16, 1, 3, 64, 64)).astype(np.float32)
    x[::2, 0, 0, 0, 0] = largest
    return [{"x": each} for each in x]


def notes(largest: float, observer: AnyObserver = "auto") -> str:
    item = Quantize(observer=observer, correct_bias=False, mode="static")
    _, done = run_quantize(network(), item, samples(largest), max_drop="off", target="onnx")
    assert done.status == "applied"
    return " ".join(done.notes)


def test_rare_large_value_is_clipped() -> None:
    assert "ranges of activations by observer=" in notes(60.0)


def test_range_without_outliers_is_kept() -> None:
    assert "ranges of activations" not in notes(1.0)


def test_given_observer_is_used() -> None:
    assert "ranges of activations" not in notes(60.0, "minmax")
