"""Plans: to JSON and back, and what is said about one that cannot be."""

from __future__ import annotations

import json

import pytest

from tests.checks import model
from toolkit.errors import UsageError
from toolkit.quantization.plan import Entry, Plan
from toolkit.quantization.plan_json import parse_plan

TEXT = """
g (float[N, 4] x, float[4, 4] w) => (float[N, 4] y) {
  [first] a = MatMul (x, w)
  [second] y = Gemm (a, w)
}
"""
PLAN = Plan(
    (
        Entry(node="first", output="a", op="MatMul", scheme="dynamic", axis=1),
        Entry(node="second", output="y", op="Gemm", reason="too small"),
    )
)


def test_there_and_back() -> None:
    assert parse_plan(PLAN.to_json()) == PLAN
    assert parse_plan(Plan().to_json()) == Plan()


def test_what_is_as_usual_is_not_written() -> None:
    assert json.loads(PLAN.to_json())["nodes"][1] == {
        "node": "second",
        "output": "y",
        "op": "Gemm",
        "scheme": "float",
        "reason": "too small",
    }


def test_a_node_is_found_by_its_output_or_its_name() -> None:
    first, second = model(TEXT).graph.nodes
    assert PLAN.find(first) == PLAN.entries[0]
    by_name = Plan((Entry(node="second", scheme="dynamic"),))
    assert by_name.find(first) is None
    assert by_name.find(second) == by_name.entries[0]
    assert by_name.quantized() == by_name.entries


def test_every_node_must_be_in_the_model() -> None:
    PLAN.require_known(model(TEXT))
    unknown = Plan((Entry(output="z", op="MatMul"), Entry(node="third")))
    with pytest.raises(UsageError, match=r"^p\.json: the model has no node MatMul 'z' and 1 more$"):
        unknown.require_known(model(TEXT), "p.json")


def ranges(tensor: str, count: int = 1) -> str:
    return f'{{"version": 1, "nodes": [], "tensors": [{", ".join([tensor] * count)}]}}'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "plan is not JSON"),
        ("[]", "expected an object"),
        ('{"nodes": []}', "version None is not 1"),
        ('{"version": 1}', "'nodes' is not a list"),
        ('{"version": 1, "nodes": [3]}', "node 0 is not an object"),
        ('{"version": 1, "nodes": [{"scheme": "float"}]}', "give its 'output' or 'node'"),
        ('{"version": 1, "nodes": [{"node": "a", "color": 1}]}', "'color' is none of node"),
        ('{"version": 1, "nodes": [{"node": "a", "scheme": "int8"}]}', "'int8' is none of float"),
        ('{"version": 1, "nodes": [{"node": "a", "weight": "int9"}]}', "'int9' is none of int8"),
        ('{"version": 1, "nodes": [{"node": "a", "symmetric": 1}]}', "1 is none of true"),
        ('{"version": 1, "nodes": [{"node": "a", "axis": "1"}]}', "axis '1' is not an integer"),
        ('{"version": 1, "nodes": [{"node": 7}]}', "node 7 is not a string"),
        ('{"version": true, "nodes": []}', "version True is not 1"),
        ('{"version": 1, "nodes": [{"node": "a"}, {"node": "a"}]}', "node 'a' occurs twice"),
        (ranges('{"tensor": "x", "low": 0, "high": 1}', 2), "tensor 'x' occurs twice"),
        (ranges('{"tensor": "x", "low": 0, "high": 1%s}' % ("0" * 400)), "is not a number"),
        ("[" * 100_000, "plan is not JSON"),
    ],
)
def test_what_is_no_plan(text: str, said: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_plan(text)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)
