"""Nodes cloned under new names, with their subgraphs and the attributes of a call."""

from __future__ import annotations

from collections.abc import Callable

from onnx import AttributeProto, NodeProto, helper, parser

from toolkit.ir.clone import clone


def nodes_of(text: str) -> list[NodeProto]:
    return list(parser.parse_graph(f"g (float[N] x) => (float[N] y) {{ {text} }}").node)


def numbered() -> Callable[[str], str]:
    """Return a source of names that were never there: a1, b2, ..."""
    count = iter(range(1, 100))
    return lambda name: f"{name}{next(count)}"


def written(node: NodeProto) -> str:
    return f"{', '.join(node.output)} = {node.op_type} ({', '.join(node.input)})"


def test_results_get_fresh_names_and_captures_stay() -> None:
    names = {"x": "outer_x"}
    original = nodes_of("a = Add (x, w) b, = Relu (a) y = Concat <axis = 0> (a, , b)")
    copies = clone(original, names, numbered())
    assert [written(copy) for copy in copies] == [
        "a1 = Add (outer_x, w)",
        "b2 = Relu (a1)",
        "y3 = Concat (a1, , b2)",
    ]
    assert names == {"x": "outer_x", "a": "a1", "b": "b2", "y": "y3"}
    assert written(original[0]) == "a = Add (x, w)", "the original stays as it is"


def test_a_result_with_an_entry_gets_its_name() -> None:
    [copy] = clone(nodes_of("y = Neg (x)"), {"y": "result"}, numbered())
    assert written(copy) == "result = Neg (x)"


def test_nodes_with_names_get_others() -> None:
    named, bare = clone(nodes_of("[first] a = Neg (x) y = Neg (a)"), {}, numbered())
    assert (named.name.startswith("first"), named.name != "first", bare.name) == (True, True, "")


IF = """y = If (on) <
    then_branch = t () => (float[N] r) <float[1] k = {1}> { s = Add (x, k) r = Mul (s, outer) },
    else_branch = e () => (float[N] r) <float[1] k = {2}> { r = Add (outer, k) }
>"""


def test_values_of_subgraphs_get_fresh_names_of_their_own() -> None:
    names = {"x": "new_x"}
    [copy] = clone(nodes_of(IF), names, numbered())
    assert names.keys() == {"x", "y"}, "names of a subgraph stay inside"
    graphs = {a.name: a.g for a in copy.attribute}
    first, second = graphs["then_branch"], graphs["else_branch"]
    own = [
        name
        for graph in (first, second)
        for name in (*(t.name for t in graph.initializer), *(n.output[0] for n in graph.node))
    ]
    assert len(set(own)) == 5
    assert not set(own) & {"k", "s", "r"}
    for graph in (first, second):
        assert graph.output[0].name == graph.node[-1].output[0]
        assert graph.initializer[0].name in {name for node in graph.node for name in node.input}
    assert first.node[0].input[0] == "new_x"
    assert (first.node[1].input[1], second.node[0].input[0]) == ("outer", "outer")


def test_inputs_of_a_loop_are_renamed_with_their_users() -> None:
    body = """y = Loop (trips, on, x) <body = b (int64 i, bool c, float[N] v) =>
        (bool c2, float[N] w) { c2 = Identity (c) w = Add (v, x) }>"""
    [copy] = clone(nodes_of(body), {"x": "new_x"}, numbered())
    [graph] = [a.g for a in copy.attribute]
    inputs = [value.name for value in graph.input]
    assert not set(inputs) & {"i", "c", "v"}
    identity, add = graph.node
    assert list(identity.input) == [inputs[1]]
    assert list(add.input) == [inputs[2], "new_x"]
    assert [value.name for value in graph.output] == [identity.output[0], add.output[0]]


def reference(name: str, to: str) -> AttributeProto:
    return AttributeProto(name=name, ref_attr_name=to, type=AttributeProto.INT)


def test_references_to_attributes_of_a_call_get_its_values() -> None:
    [given, omitted, branch] = nodes_of(f"a = Softmax (x) b = Softmax (x) {IF}")
    given.attribute.append(reference("axis", "my_axis"))
    omitted.attribute.append(reference("axis", "no_axis"))
    inner = branch.attribute[0].g.node[0]
    inner.attribute.append(reference("inner", "my_axis"))
    call = {"my_axis": helper.make_attribute("my_axis", 2)}
    copies = clone([given, omitted, branch], {}, numbered(), call)
    assert list(copies[0].attribute) == [helper.make_attribute("axis", 2)]
    assert not copies[1].attribute, "the default of the operator applies"
    assert list(copies[2].attribute[0].g.node[0].attribute) == [helper.make_attribute("inner", 2)]
    assert given.attribute[0].ref_attr_name == "my_axis"


def test_references_stay_where_no_call_is_inlined() -> None:
    [node] = nodes_of("a = Softmax (x)")
    node.attribute.append(reference("axis", "my_axis"))
    [copy] = clone([node], {}, numbered())
    assert copy.attribute[0].ref_attr_name == "my_axis"
