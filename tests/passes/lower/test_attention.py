"""Attention by the runtime's own operator, and finite masks on demand."""

from __future__ import annotations

import numpy as np
import pytest

from passes.lower import Lower, attention, masks
from tests.checks import check
from tests.passes.lower.tables import HEADER, lowered, stays, typed
from toolkit.rules import Rules

QKV = "float[N, 4, 8] q, float[N, 4, 8] k, float[N, 4, 8] v"
SIGNATURE = f"g ({QKV}) => (float[N, 4, 8] y)"
HEADS = "q_num_heads = 2, kv_num_heads = 2"


@pytest.mark.parametrize("scale", ["", ", scale = 0.25"])
def test_plain_attention(scale: str) -> None:
    lowered(
        attention.rules,
        "multi-head",
        SIGNATURE,
        f"y = Attention <{HEADS}{scale}> (q, k, v)",
        f"y = com.microsoft.MultiHeadAttention <num_heads = 2{scale}> (q, k, v)",
    )


@pytest.mark.parametrize(
    "nodes",
    [
        f"y = Attention <{HEADS}, is_causal = 1> (q, k, v)",
        f"y = Attention <{HEADS}, softcap = 5.0> (q, k, v)",
        "m = Constant <value = float[4, 4] {0,0,0,0, 0,0,0,0, 0,0,0,0, 0,0,0,0}> ()"
        f" y = Attention <{HEADS}> (q, k, v, m)",
    ],
)
def test_what_only_the_standard_operator_has_stays(nodes: str) -> None:
    stays(attention.rules, "multi-head", SIGNATURE, nodes)


@pytest.mark.parametrize(
    "signature",
    [
        SIGNATURE.replace("4, 8", "S, 8"),  # any length
        SIGNATURE.replace("[N, 4, 8] k", "[N, 5, 8] k").replace("[N, 4, 8] v", "[N, 5, 8] v"),
        SIGNATURE.replace("[N, 4, 8] v", "[N, 4, 6] v").replace("[N, 4, 8] y", "[N, 4, 6] y"),
    ],
)
def test_other_shapes_stay(signature: str) -> None:
    stays(attention.rules, "multi-head", signature, f"y = Attention <{HEADS}> (q, k, v)")


def test_grouped_heads_stay() -> None:
    signature = SIGNATURE.replace("[N, 4, 8] k", "[N, 4, 4] k").replace(
        "[N, 4, 8] v", "[N, 4, 4] v"
    )
    nodes = "y = Attention <q_num_heads = 2, kv_num_heads = 1> (q, k, v)"
    stays(attention.rules, "multi-head", signature, nodes)


def test_four_dimensions_stay() -> None:
    signature = SIGNATURE.replace("N, 4, 8", "N, 2, 4, 8")
    stays(attention.rules, "multi-head", signature, "y = Attention (q, k, v)")


def test_keys_and_values_that_are_read_stay() -> None:
    signature = SIGNATURE.replace("y)", "y, float[N, 2, 4, 4] pk, float[N, 2, 4, 4] pv)")
    nodes = f"y, pk, pv = Attention <{HEADS}> (q, k, v)"
    stays(attention.rules, "multi-head", signature, nodes, run=False)


def test_half_precision_stays() -> None:
    signature = SIGNATURE.replace("float", "float16")
    nodes = f"y = Attention <{HEADS}> (q, k, v)"
    stays(attention.rules, "multi-head", signature, nodes, run=False)


# -- masks

MASKED = f"g ({QKV}, float[4, 4] m) => (float[N, 4, 8] y, float[N, 4, 8] z)"
LIMIT = "low = Constant <value = float {-50.0}> ()"
FINITE = Rules("test", masks.rules())


def feeds(low: float) -> dict[str, object]:
    random = np.random.default_rng(0)
    made: dict[str, object] = {
        name: random.standard_normal((2, 4, 8)).astype(np.float32) for name in "qkv"
    }
    return {**made, "m": np.where(np.tril(np.ones((4, 4))) > 0, 0, low).astype(np.float32)}


@pytest.mark.parametrize("low", [-1e4, -3.4e38, -np.inf])
def test_one_mask_is_clipped_once(low: float) -> None:
    nodes = f"y = Attention <{HEADS}> (q, k, v, m) z = Attention <{HEADS}> (k, q, v, m)"
    after = f"{LIMIT} f = Max (m, low) {nodes.replace(', m)', ', f)')}"
    check(FINITE, typed(f"{MASKED} {{ {nodes} }}"), after, inputs=feeds(low), atol=1e-6)


def test_a_stored_mask_is_stored_anew() -> None:
    signature = SIGNATURE + " <float[2, 4] m = {0, 0, -10000, -10000, 0, 0, 0, -10000}>"
    signature = signature.replace("[N, 4, 8] q", "[N, 2, 8] q").replace(
        "[N, 4, 8] y", "[N, 2, 8] y"
    )
    nodes = f"y = Attention <{HEADS}> (q, k, v, m)"
    after = signature.replace("-10000", "-50")
    check(FINITE, typed(f"{signature} {{ {nodes} }}"), f"{HEADER}{after} {{ {nodes} }}")


@pytest.mark.parametrize(
    ("signature", "nodes"),
    [
        (MASKED.replace("float[4, 4] m", "bool[4, 4] m"), "(q, k, v, m)"),
        (MASKED, "(q, k, v)"),
    ],
)
def test_other_masks_stay(signature: str, nodes: str) -> None:
    text = f"{signature} {{ y = Attention <{HEADS}> {nodes} z = Neg (y) }}"
    check(FINITE, typed(text), near_miss=True, run=False)


def test_only_when_asked_for() -> None:
    text = typed(f"{MASKED} {{ y = Attention <{HEADS}> (q, k, v, m) z = Neg (y) }}")
    check(Lower(), text, near_miss=True, inputs=feeds(-1e4))
    check(Lower(mask="fast"), text, inputs=feeds(-1e4))
