"""The index stays true under any edits, and the journal takes every one of them back."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from onnx import NodeProto, parser

from toolkit.ir.graph import CycleError, Graph
from toolkit.ir.model import Model
from toolkit.ir.tensor_type import TensorType

NESTED = """
    <ir_version: 8, opset_import: ["" : 17]>
    main (float[N, 4] x, bool c) => (float[N, 4] y, float[N, 4] w)
    <float[4] b = {1, 2, 3, 4}, float[4] k = {2, 2, 2, 2}>
    {
      a = Add(x, b)
      r = Relu(a)
      d = Mul(r, k)
      w = Neg(d)
      i = If (c) <
        then_branch = yes () => (float[N, 4] t) {
          p = Add(r, d)
          t = If (c) <
            then_branch = yes2 () => (float[N, 4] u) { u = Mul(p, a) },
            else_branch = no2 () => (float[N, 4] v) { q = Identity(a)
                                                      v = Abs(q) }
          >
        },
        else_branch = no () => (float[N, 4] e) { e = Sub(a, k) }
      >
      y = Add(i, d)
    }
"""


def load(text: str) -> Model:
    return Model.from_proto(parser.parse_model(text))


def by_output(graph: Graph, name: str) -> NodeProto:
    node = graph.producer(name)
    assert node is not None
    return node


def test_captures_count_as_uses() -> None:
    graph = load(NESTED).graph
    graph.verify()
    assert [n.op_type for n in graph.users("r")] == ["Mul", "If"]
    assert graph.is_captured("a")
    assert graph.use_count("a") == 4  # Relu; two reads two levels down; one in the else branch
    assert graph.use_count("d") == 3
    assert graph.is_output("w")
    assert not graph.is_captured("x")


def test_replace_reaches_into_subgraphs() -> None:
    model = load(NESTED)
    graph = model.graph
    new = graph.op("Sigmoid", "x")
    graph.replace("a", new)
    graph.verify()
    assert graph.is_unused("a")
    inner = next(g for g in graph.walk() if g.name == "yes2")
    assert list(inner.nodes[0].input)[1] == new


def test_an_output_keeps_its_name() -> None:
    model = load(NESTED)
    graph = model.graph
    old = by_output(graph, "y")
    new = graph.op("Max", "i", "d")
    graph.replace("y", new)
    graph.prune(old)
    graph.verify()
    assert by_output(graph, "y").op_type == "Max"
    assert graph.outputs == ["y", "w"]


def test_an_output_that_becomes_an_input_gets_an_identity() -> None:
    model = load(NESTED)
    graph = model.graph
    old = by_output(graph, "w")
    graph.replace("w", "x")
    graph.prune(old)
    graph.verify()
    assert by_output(graph, "w").op_type == "Identity"


def test_two_outputs_of_the_same_value() -> None:
    model = load(NESTED)
    graph = model.graph
    graph.replace("y", "w")
    graph.verify()
    assert by_output(graph, "y").op_type == "Identity"
    assert list(by_output(graph, "y").input) == ["w"]


def test_remove_refuses_a_used_node() -> None:
    graph = load(NESTED).graph
    with pytest.raises(ValueError, match="still used"):
        graph.remove(by_output(graph, "r"))


def test_prune_takes_what_only_it_read() -> None:
    model = load(NESTED)
    graph = model.graph
    graph.replace("i", "x")
    graph.prune(next(n for n in graph.nodes if n.op_type == "If"))
    graph.verify()
    assert [n.op_type for n in graph.nodes] == ["Add", "Relu", "Mul", "Neg", "Add"]


def test_order_is_stable_and_topological() -> None:
    model = load(NESTED)
    graph = model.graph
    late = graph.op("Exp", "x", at=by_output(graph, "y"))
    graph.set_input(by_output(graph, "r"), 0, late)
    names = [n.output[0] for n in graph.nodes]
    assert names == ["a", late, "r", "d", "w", "i", "y"]


def test_cycles_are_found() -> None:
    graph = load(NESTED).graph
    graph.set_input(by_output(graph, "a"), 0, "d")
    with pytest.raises(CycleError):
        _ = graph.nodes


def test_old_models_gain_the_right_to_new_initializers() -> None:
    model = load("""
        <ir_version: 3, opset_import: ["" : 7]>
        main (float[4] x, float[4] b) => (float[4] y) <float[4] b = {1, 2, 3, 4}>
        { y = Add(x, b) }
    """)
    graph = model.graph
    assert graph.feeds == ["x"]
    assert graph.is_const("b")
    graph.constant(np.ones(4, np.float32))
    assert model.ir_version == 4
    assert graph.inputs == ["x"]
    model.rollback()
    assert model.ir_version == 3
    assert graph.inputs == ["x", "b"]


def test_an_initializer_that_callers_may_override_is_no_constant() -> None:
    graph = load("""
        <ir_version: 8, opset_import: ["" : 13]>
        main (float[4] x, float[4] b) => (float[4] y) <float[4] b = {1, 2, 3, 4}>
        { y = Add(x, b) }
    """).graph
    assert graph.const("b") is None
    assert graph.feeds == ["x"]


@pytest.mark.parametrize(
    ("attribute", "expected"),
    [
        ("value_int: int = 3", np.int64(3)),
        ("value_ints: ints = [3, 4]", np.array([3, 4], np.int64)),
        ("value_float: float = 0.5", np.float32(0.5)),
        ("value_floats: floats = [0.5]", np.array([0.5], np.float32)),
        ('value_string: string = "a"', np.array(b"a", object)),
        ("value = float[2] {1, 2}", np.array([1, 2], np.float32)),
    ],
)
def test_constants_of_every_form(attribute: str, expected: np.ndarray) -> None:
    graph = load(f"""
        <ir_version: 8, opset_import: ["" : 13]> main () => (float[N] y)
        {{ c = Constant <{attribute}> ()  y = Identity(c) }}
    """).graph
    found = graph.const("c")
    assert found is not None
    np.testing.assert_array_equal(
        found.astype(str), np.asarray(expected).astype(str)
    ) if found.dtype.kind in "OSU" else np.testing.assert_array_equal(found, expected)
    assert found.shape == np.asarray(expected).shape


def test_fresh_names_are_unused_everywhere() -> None:
    model = load(NESTED)
    names = {model.fresh("p") for _ in range(50)}
    taken = {v for g in model.graphs() for n in g.nodes for v in (n.name, *n.output)}
    assert len(names) == 50
    assert not names & taken


def test_a_rolled_back_pass_gets_the_same_names_again() -> None:
    model = load(NESTED)
    first = model.graph.op("Relu", "x")
    model.rollback()
    assert model.graph.op("Relu", "x") == first


# -- random edits


def _values(graph: Graph) -> list[str]:
    return [*graph.inputs[:1], *(v for n in graph.nodes for v in n.output)]


def _before(graph: Graph, node: NodeProto) -> list[str]:
    """Float values that can be read at `node` without closing a circle."""
    place = [id(n) for n in graph.nodes].index(id(node))
    return ["x", *(v for n in graph.nodes[:place] for v in n.output)]


def _edit(model: Model, draw: Any) -> None:
    graph = draw(st.sampled_from(list(model.graphs())))
    nodes = graph.nodes
    node = draw(st.sampled_from(nodes)) if nodes else None
    kind = draw(st.sampled_from(["op", "rewire", "replace", "prune", "attr", "constant", "type"]))
    if kind == "op":
        source = draw(st.sampled_from(_values(graph) or ["x"]))
        graph.op(draw(st.sampled_from(["Relu", "Neg"])), source)
    elif kind == "constant":
        graph.constant(np.ones(4, np.float32))
    elif node is None:
        return
    elif kind == "rewire" and node.op_type != "If":
        graph.set_input(node, 0, draw(st.sampled_from(_before(graph, node))))
    elif kind == "replace" and node.output[0]:
        graph.replace(node.output[0], draw(st.sampled_from(_before(graph, node))))
    elif kind == "prune":
        graph.prune(node)
    elif kind == "attr" and node.op_type != "If":
        graph.set_attr(node, "alpha", draw(st.sampled_from([None, 1.0, 2.0])))
    elif kind == "type":
        graph.set_type(node.output[0], TensorType(1, (draw(st.integers(0, 9)), 4)))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_random_edits_keep_the_index_true_and_roll_back(data: st.DataObject) -> None:
    model = load(NESTED)
    before = model.to_proto()
    marks = [(0, before)]
    for _ in range(data.draw(st.integers(1, 12))):
        _edit(model, data.draw)
        model.graph.verify()
        marks.append((len(model.journal), model.to_proto()))
    position, expected = data.draw(st.sampled_from(marks))
    model.journal.seek(position)
    model.graph.verify()
    assert model.to_proto() == expected
    model.journal.seek(marks[-1][0])
    model.graph.verify()
    assert model.to_proto() == marks[-1][1]
    model.rollback()
    model.graph.verify()
    assert model.to_proto() == before


def test_what_a_replacement_teaches_is_undone_with_it() -> None:
    model = load("""
        <ir_version: 8, opset_import: ["" : 17]>
        main (float[N, 4] x) => (float[N, 4] y)
        { a = Relu(x)  b = Neg(x)  y = Add(a, b) }
    """)
    graph = model.graph
    graph.learn_type("a", TensorType(1, (7, 4)))
    graph.learn_data("a", np.array([1, 2], object))
    graph.replace("a", "b")
    assert graph.shape("b") == (7, 4)
    model.rollback()
    assert graph.type("b") is None
    assert graph.data("b") is None


def test_new_contents_of_an_initializer_are_seen() -> None:
    model = load("""
        <ir_version: 8, opset_import: ["" : 17]>
        main (float[N, 4] x) => (float[M, K] y) <int64[2] s = {2, 2}> { y = Reshape(x, s) }
    """)
    graph = model.graph
    assert graph.data("s").tolist() == [2, 2]
    graph.put_initializer(model.weights.put("s", np.array([4, 1])))
    assert graph.data("s").tolist() == [4, 1]
    model.rollback()
    assert graph.data("s").tolist() == [2, 2]


def test_names_and_nodes_come_in_once() -> None:
    model = load(NESTED)
    graph = model.graph
    with pytest.raises(ValueError, match="'d' is defined"):
        graph.add("Sigmoid", ["x"], ["d"])
    node = graph.add("Sigmoid", ["x"])
    with pytest.raises(ValueError, match="already"):
        graph.insert(node)
    with pytest.raises(ValueError, match="'d' is defined"):
        graph.set_outputs(node, ["d"])
    graph.remove(node)
    with pytest.raises(ValueError, match="not in the graph"):
        graph.set_outputs(node, ["new"])
    graph.verify()


def test_replacing_the_operands_of_a_wide_node_is_cheap() -> None:
    count = 3000
    body = " ".join(f"a{i} = Identity(x)" for i in range(count))
    names = ", ".join(f"a{i}" for i in range(count))
    model = load(f"""
        <ir_version: 8, opset_import: ["" : 17]>
        main (float[1] x) => (float[M] y) {{ {body} y = Concat<axis = 0>({names}) }}
    """)
    before = model.to_proto()
    for index in range(count):
        model.graph.replace(f"a{index}", "x")
    model.graph.verify()
    assert model.graph.use_count("x") == 2 * count
    model.rollback()
    assert model.to_proto() == before
