"""Small models with given weights, and samples for them."""

from __future__ import annotations

import numpy as np

from tests.checks import model
from toolkit.ir.model import Model

RANDOM = np.random.default_rng(0)
W = RANDOM.standard_normal((16, 8)).astype(np.float32)
FEEDS = [{"x": RANDOM.standard_normal((1, 16)).astype(np.float32)} for _ in range(64)]


def net(nodes: str, **weights: np.ndarray) -> Model:
    """A model from x[N, 16] to y, with the named weights."""
    listed = ", ".join(
        f"float[{', '.join(map(str, w.shape))}] {n} = {{{', '.join(map(str, w.reshape(-1)))}}}"
        for n, w in weights.items()
    )
    return model(f"g (float[N, 16] x) => (float[N, M] y) <{listed}> {{ {nodes} }}")


def linear(w: np.ndarray, nodes: str = "y = MatMul (x, w)", **weights: np.ndarray) -> Model:
    return net(nodes, w=w, **weights)


def coarse(w: np.ndarray, levels: float) -> np.ndarray:
    """Round weights to this many levels on either side of zero."""
    step = np.abs(w).max() / levels
    return (np.rint(w / step) * step).astype(np.float32)
