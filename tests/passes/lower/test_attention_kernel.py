"""Attention by the runtime's own operator."""

from __future__ import annotations

import pytest

from passes.lower import attention_kernel as attention
from tests.passes.lower.tables import lowered, stays

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
