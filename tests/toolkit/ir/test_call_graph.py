"""Functions that call functions, in subgraphs as well."""

from __future__ import annotations

from tests.checks import parse
from toolkit.ir.call_graph import Key, calls_among, find_cycle, key_of, reached

TEXT = """<ir_version: 10, opset_import: ["" : 21, "f" : 1]>
g (float[N] x) => (float[N] y) { y = f.A (x) }
<domain: "f", opset_import: ["" : 21, "f" : 1]> A (x) => (y) {
    on = Constant <value_int = 1> () c = Cast <to = 9> (on)
    y = If (c) <then_branch = t () => (a) { a = f.B (x) },
                else_branch = e () => (b) { b = Neg (x) }>
}
<domain: "f", opset_import: ["" : 21]> B (x) => (y) { y = Relu (x) }
<domain: "f", opset_import: ["" : 21, "f" : 1]> Unused (x) => (y) { y = f.B (x) }
"""


def key(name: str) -> Key:
    return "f", name, ""


def test_calls_in_subgraphs_count() -> None:
    functions = parse(TEXT).functions
    calls = calls_among(functions)
    assert [key_of(f) for f in functions] == [key("A"), key("B"), key("Unused")]
    assert calls == {key("A"): {key("B")}, key("B"): set(), key("Unused"): {key("B")}}
    assert reached(calls, [key("A")]) == {key("A"), key("B")}
    assert reached(calls, [("", "Relu", "")]) == set()
    assert find_cycle(calls) == []


def test_a_cycle_is_found() -> None:
    calls = {key("A"): {key("B")}, key("B"): {key("C")}, key("C"): {key("B")}}
    assert set(find_cycle(calls)) == {key("B"), key("C")}
    assert reached(calls, [key("A")]) == {key("A"), key("B"), key("C")}
