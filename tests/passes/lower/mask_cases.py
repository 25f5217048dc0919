"""Attention with masks, as the tests of floors have it."""

from __future__ import annotations

from typing import Any

import numpy as np

QKV = "float[N, 4, 8] q, float[N, 4, 8] k, float[N, 4, 8] v"
PLAIN = f"g ({QKV}) => (float[N, 4, 8] y)"
SIGNATURE = f"g ({QKV}, float[4, 4] m) => (float[N, 4, 8] y, float[N, 4, 8] z)"
HEADS = "q_num_heads = 2, kv_num_heads = 2"
TWO = f"y = Attention <{HEADS}> (q, k, v, m) z = Attention <{HEADS}> (k, q, v, m)"
CAUSAL = np.tril(np.ones((4, 4), bool))
STORED = "float[4, 4] m = {0,-1e4,-1e4,-1e4, 3,0,-1e4,-1e4, 0,0,0,-1e4, -1e4,-1e4,-1e4,-1e4}"


def feeds(mask: Any, **more: Any) -> dict[str, Any]:
    random = np.random.default_rng(0)
    made = {name: random.standard_normal((2, 4, 8)).astype(np.float32) for name in "qkv"}
    return {**made, "m": mask, **more}


def low_at(allowed: Any, low: float) -> Any:
    return np.where(allowed, 0, low).astype(np.float32)
