"""Decomposed Attention with a softcap: the formula, grouped heads, masks, and near misses."""

from __future__ import annotations

from collections import Counter

import pytest

from passes.lower import softcap_attention
from tests.checks import check
from tests.passes.lower.tables import choice, stays, typed
from toolkit.rewriting.rule import Rules

LOWEST = "-3.4028234663852886e38"
MASK = "float[N, 1, S, T] m"


def signature(query: int = 8, key: int = 8, value: int = 8, mask: str = MASK) -> str:
    return f"""g (float[N, S, {query}] q, float[N, T, {key}] k, float[N, T, {value}] v,
        bool[N, 1, S, T] seen, {mask}) => (float[N, S, {query // key * value}] y)"""


def attention(heads: int = 2, groups: int = 2, rest: str = "", mask: str = ", mask") -> str:
    counts = f"q_num_heads = {heads}, kv_num_heads = {groups}"
    return f"y = Attention <{counts}, scale = 0.5, softcap = 3.0{rest}> (q, k, v{mask})"


def masked(low: str) -> str:
    numbers = (f"Constant <value = float {{{number}}}> ()" for number in ("0.0", low))
    return "zero = {} low = {} mask = Where (seen, zero, low) ".format(*numbers)


FINITE = masked("-1e30")
LIMITED = "floor = Constant <value = float {-1e30}> () limited = Max (mask, floor) "


@pytest.mark.parametrize(
    ("sizes", "nodes"),
    [
        ((8, 8, 8), FINITE + attention()),
        ((8, 8, 8), attention(mask="")),
        ((8, 8, 6), FINITE + attention()),
        ((8, 4, 4), FINITE + attention(4, 2)),
        ((8, 2, 6), FINITE + attention(4, 1)),
        ((8, 8, 8), masked("-inf") + LIMITED + attention(mask=", limited")),
    ],
)
def test_capped_attention_is_decomposed(sizes: tuple[int, int, int], nodes: str) -> None:
    before = typed(f"{signature(*sizes)} {{ {nodes} }}")
    found = check(Rules("test", softcap_attention.rules(choice("decomposed"))), before)
    count = Counter(node.op_type for node in found.graph.nodes)
    assert count["Tanh"] == count["Softmax"] == 1
    assert not count["Attention"]
    check(
        Rules("test", softcap_attention.rules(choice("decomposed", cost=1.2))),
        before,
        near_miss=True,
    )


@pytest.mark.parametrize(
    "nodes",
    [
        FINITE + attention().replace(", softcap = 3.0", ""),
        attention(mask="").replace("softcap = 3.0", "softcap = -3.0"),
        FINITE + attention().replace("softcap = 3.0", "softcap = 0.0"),
        FINITE + attention().replace("scale = 0.5, ", ""),
        attention(rest=", is_causal = 1", mask=""),
        attention(mask=", seen"),
        attention(mask=", m"),  # the caller may pass minus infinity
        masked("-inf") + attention(),
        masked(LOWEST) + attention(),
    ],
)
def test_other_attention_stays(nodes: str) -> None:
    stays(softcap_attention.rules, "decomposed", signature(), nodes)


def test_heads_of_one_group_with_masks_of_their_own_stay() -> None:
    nodes = FINITE + "four = Constant <value_ints = [1, 4, 1, 1]> () all = Expand (mask, four) "
    stays(
        softcap_attention.rules,
        "decomposed",
        signature(8, 4, 4),
        nodes + attention(4, 2, mask=", all"),
    )
    same = nodes.replace("[1, 4, 1, 1]", "[1, 2, 1, 1]") + attention(mask=", all")
    before = typed(f"{signature()} {{ {same} }}")
    found = check(Rules("test", softcap_attention.rules(choice("decomposed"))), before)
    assert "Tanh" in {node.op_type for node in found.graph.nodes}


def test_half_precision_stays() -> None:
    text = signature(mask="float16[N, 1, S, T] m").replace("float[", "float16[")
    stays(softcap_attention.rules, "decomposed", text, attention(mask=""), run=False)


@pytest.mark.parametrize("heads", ["", "q_num_heads = 2, kv_num_heads = 0, "])
def test_heads_without_a_number_stay(heads: str) -> None:
    nodes = attention(mask="").replace("q_num_heads = 2, kv_num_heads = 2, ", heads)
    rules = Rules("test", softcap_attention.rules(choice("decomposed")))
    check(rules, typed(f"{signature()} {{ {nodes} }}"), near_miss=True, run=False)
