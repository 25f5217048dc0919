"""A model with large tensors in every place that can hold one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from toolkit.ir import node as nd

SIDE = 40
"""A square of this side has 6,400 bytes in float32; a vector of it stays in the protobuf."""


def large(name: str, start: float = 0) -> TensorProto:
    numbers = np.arange(SIDE * SIDE, dtype=np.float32).reshape(SIDE, SIDE) + np.float32(start)
    return numpy_helper.from_array(numbers, name)


def everywhere() -> ModelProto:
    """Return a model with large initializers and Constants, in subgraphs and a function as well."""

    def branch(name: str, result: str) -> GraphProto:
        outputs = [helper.make_tensor_value_info(result, TensorProto.FLOAT, [SIDE, SIDE])]
        node = helper.make_node("Add", ["x", name], [result])
        return helper.make_graph([node], result, [], outputs, [large(name, len(result))])

    small = numpy_helper.from_array(np.ones(SIDE, np.float32), "small")
    strings = [b"a long word"] * 900
    words = TensorProto(name="words", data_type=TensorProto.STRING, dims=[900], string_data=strings)
    nodes = [
        helper.make_node("Constant", [], ["c"], value=large("c", 3)),
        helper.make_node(
            "If", ["on"], ["branched"], then_branch=branch("p", "a"), else_branch=branch("q", "bb")
        ),
        helper.make_node("Sum", ["x", "w", "c", "branched", "small"], ["s"]),
        helper.make_node("F", ["s"], ["y"], domain="f"),
        helper.make_node("Identity", ["words"], ["t"]),
    ]
    inside = [
        helper.make_node("Constant", [], ["k"], value=large("k", 4)),
        helper.make_node("Mul", ["u", "k"], ["v"]),
    ]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("f", 1)]
    function = helper.make_function("f", "F", ["u"], ["v"], inside, opsets[:1])
    graph = helper.make_graph(
        nodes,
        "g",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, [SIDE, SIDE]),
            helper.make_tensor_value_info("on", TensorProto.BOOL, []),
        ],
        [
            helper.make_tensor_value_info("y", TensorProto.FLOAT, [SIDE, SIDE]),
            helper.make_tensor_value_info("t", TensorProto.STRING, [900]),
        ],
        [large("w", 1), small, words],
    )
    return helper.make_model(graph, opset_imports=opsets, ir_version=10, functions=[function])


def tensors_of(proto: ModelProto) -> Iterator[TensorProto]:
    """Yield all tensors: initializers and values of Constants, wherever they are."""
    yield from _tensors(proto.graph.node, proto.graph)
    for function in proto.functions:
        yield from _tensors(function.node)


def _tensors(nodes: Iterable[NodeProto], graph: GraphProto | None = None) -> Iterator[TensorProto]:
    if graph is not None:
        yield from graph.initializer
    for node in nodes:
        yield from (a.t for a in node.attribute if a.HasField("t"))
        for inner in nd.graphs_of(node):
            yield from _tensors(inner.node, inner)
