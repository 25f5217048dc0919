"""Anchor paths, and the anchors that they find."""

from __future__ import annotations

from typing import ClassVar

import pytest

from tests.checks import model
from toolkit.ir.model import Model
from toolkit.rewriting.anchors import Anchors, anchors_of, downstream, find_anchors, is_about

NORM = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[2, 4] x) => (float[2, 4] y, float[2, 1] z)
<float e = {0.001}, float half = {0.5}>
{
    mean = ReduceMean <axes = [1]> (x)  centred = Sub(x, mean)  squares = Mul(centred, centred)
    variance = ReduceMean <axes = [1]> (squares)  safe = Add(variance, e)  root = Sqrt(safe)
    y = Div(centred, root)
    z = Mul(mean, half)
}
"""


def found(text: str, *paths: str) -> list[str]:
    """Return the names of the first outputs of the anchors."""
    anchors = find_anchors(model(text), [{"rule": paths}])
    return [anchor.node.output[0] for anchor in anchors]


@pytest.mark.parametrize(
    ("path", "outputs"),
    [
        ("ReduceMean", ["mean", "variance"]),
        ("ReduceMean > Sqrt", ["variance"]),
        ("ReduceMean > Sqrt > Div", ["variance"]),
        ("ReduceMean > Reciprocal", []),
        ("Div > Sqrt", []),
        ("Sub > Sqrt", ["centred"]),
        ("0.001 > Sqrt", ["root"]),
        ("0.002 > Sqrt", []),
        ("0.5 > Mul", ["z"]),
        ("0.5 > Sqrt", []),
    ],
)
def test_paths(path: str, outputs: list[str]) -> None:
    assert found(NORM, path) == outputs


@pytest.mark.parametrize("path", ["", "0.5", "Sqrt > ", " > Sqrt"])
def test_paths_without_an_operator(path: str) -> None:
    with pytest.raises(ValueError, match="names no operator"):
        found(NORM, path)


def test_an_anchor_of_several_rules_is_one() -> None:
    declared: list[Anchors] = [{"norm": ("ReduceMean > Sqrt",)}, {"other": ("ReduceMean",)}]
    anchors = find_anchors(model(NORM), declared)
    assert [anchor.rules for anchor in anchors] == [("other",), ("norm", "other")]


def chain(count: int) -> str:
    """Return a Softmax, this many nodes, and a MatMul."""
    nodes = " ".join(f"a{i + 1} = Neg (a{i})" for i in range(count))
    return f"""g (float[4, 4] x) => (float[4, 4] y)
        {{ a0 = Softmax (x) {nodes} y = MatMul (a{count}, x) }}"""


@pytest.mark.parametrize(("count", "outputs"), [(0, ["a0"]), (3, ["a0"]), (4, [])])
def test_at_most_three_nodes_lie_between_two_operators(count: int, outputs: list[str]) -> None:
    assert found(chain(count), "Softmax > MatMul") == outputs


def test_a_search_ends_at_the_next_node_of_its_operator() -> None:
    """The MatMul belongs to the second Softmax."""
    text = """g (float[4, 4] x) => (float[4, 4] y)
        { first = Softmax (x) second = Softmax (first) y = MatMul (second, x) }"""
    assert found(text, "Softmax > MatMul") == ["second"]


def test_subgraphs_have_anchors_and_other_domains_have_none() -> None:
    text = """g (float[4] x, bool c) => (float[4] y) {
        y = If (c) <
            then_branch = t () => (a) { a = com.microsoft.Gelu (x) },
            else_branch = e () => (b) { b = Gelu <approximate = "none"> (x) }
        >
    }"""
    assert found(text, "Gelu") == ["b"]


@pytest.mark.parametrize(
    ("constant", "outputs"),
    [
        ("float k = {0.044715}", ["y"]),
        ("float[1, 1] k = {0.044707}", ["y"]),  # in half precision
        ("double k = {0.044715}", ["y"]),
        ("float k = {0.0453}", []),
        ("float[4] k = {0.044715, 0.044715, 0.044715, 0.044715}", []),  # one number per column
    ],
)
def test_constants_are_compared_up_to_their_rounding(constant: str, outputs: list[str]) -> None:
    kind = "double" if "double" in constant else "float"
    text = f"""g ({kind}[4] x) => ({kind}[4] y) <{constant}> {{ a = Mul (x, k) y = Tanh (a) }}"""
    assert found(text, "0.044715 > Tanh") == outputs


def test_a_constant_without_a_number_matches_nothing() -> None:
    text = """g (string[4] x) => (bool[4] y) <string k = {"0.5"}> { y = Equal (x, k) }"""
    assert found(text, "0.5 > Equal") == []


def test_nodes_downstream_come_nearest_first_and_once() -> None:
    subject = model("""g (float[4] x) => (float[4] y)
        { a = Neg (x) b = Abs (a) c = Exp (a) d = Add (b, c) y = Relu (d) }""")

    def walk(most: int, *stop: str) -> list[tuple[int, str]]:
        nodes = {node.output[0]: node for node in subject.graph.nodes}
        steps = downstream(subject.graph, nodes["a"], most, [nodes[name] for name in stop])
        return [(distance, node.output[0]) for distance, node in steps]

    assert walk(9) == [(1, "b"), (1, "c"), (2, "d"), (3, "y")]
    assert walk(1) == [(1, "b"), (1, "c")]
    assert walk(9, "d") == [(1, "b"), (1, "c"), (2, "d")]
    assert walk(9, "b", "c") == [(1, "b"), (1, "c")]
    assert walk(9, "a") == walk(9), "the start itself is no obstacle"


@pytest.mark.parametrize(
    ("rule", "name", "about"),
    [
        ("attention", "attention", True),
        ("attention-with-past", "attention", True),
        ("packed-attention", "attention", True),
        ("attention", "attention-with-past", False),
        ("self-attentions", "attention", False),
    ],
)
def test_variants_of_a_rule(rule: str, name: str, about: bool) -> None:
    assert is_about(rule, name) is about


def test_passes_declare_anchors() -> None:
    class Fuse:
        anchors: ClassVar[Anchors] = {"gelu": ("Erf",)}

    assert anchors_of(Fuse()) == {"gelu": ("Erf",)}
    assert anchors_of(Model) == {}
