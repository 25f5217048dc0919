"""Unroll a Loop whose number of iterations is known and small.

    y, s = Loop (1, "", x) <body (i, c, v) => (c1, f(i, v), g(i, v))>
    ->  y = f(0, x)    s = Unsqueeze (g(0, x), 0)

A Loop without an iteration results in its initial values.
"""

from __future__ import annotations

import numpy as np
from onnx import NodeProto, TensorProto, helper

from passes.analysis.operands import unsqueeze
from passes.simplify.control_flow.inline_subgraph import (
    insert_copy,
    known_flag,
    known_integer,
    replace_results,
)
from passes.simplify.control_flow.loops import CARRIED, origin
from toolkit.ir.clone import Names
from toolkit.ir.graph import Graph
from toolkit.ir.node import is_op
from toolkit.ir.op_traits import is_random

_MOST_NODES = 64
"""Most nodes to write for more than one iteration."""


def unroll(graph: Graph, node: NodeProto) -> list[NodeProto] | None:
    """Unroll a Loop if its iterations are known and few; return the new nodes, or None."""
    if not is_op(node, "Loop"):
        return None
    (subgraph,) = graph.subgraphs(node)
    count = _iterations(graph, node, subgraph)
    # The graph cannot hold sparse initializers: leave such a Loop alone.
    if count is None or subgraph.has_sparse or len(subgraph.inputs) != len(node.input):
        return None
    inner = [each for scope in subgraph.walk() for each in scope.nodes]
    if count > 1 and (count * len(inner) > _MOST_NODES or any(map(is_random, inner))):
        return None  # each copy of a node with a seed would draw the same numbers
    stacked = subgraph.outputs[len(node.input) - CARRIED + 1 :]
    if count == 0:
        empty = [_empty(subgraph, value) for value in stacked]
        if any(array is None for array in empty) or not graph.begin("unroll-loop", node):
            return None
        stores = [graph.constant(array) for array in empty if array is not None]
        replace_results(graph, node, [*node.input[CARRIED:], *stores][: len(node.output)])
        return []
    if not graph.begin("unroll-loop", node):
        return None
    return _unroll(graph, node, subgraph, count)


def _iterations(graph: Graph, node: NodeProto, subgraph: Graph) -> int | None:
    """Return the number of iterations, or None if it is unknown."""
    limit, condition = node.input[:CARRIED]
    most = known_integer(graph, limit) if limit else None
    starts = known_flag(graph, condition) if condition else True
    if starts is False or (most is not None and most <= 0):
        return 0
    if starts is None:
        return None
    again = known_flag(subgraph, subgraph.outputs[0])
    if origin(subgraph, subgraph.outputs[0]) == subgraph.inputs[1]:
        again = True
    if most == 1:
        return 1
    if again is False:
        # Without a first condition, the standard ignores the next ones, but onnxruntime does not.
        return 1 if condition and (most is not None or not limit) else None
    return most if again else None


def _unroll(graph: Graph, node: NodeProto, subgraph: Graph, count: int) -> list[NodeProto]:
    counter, condition, *carried = subgraph.inputs
    initializers: Names = {}
    current = list(node.input[CARRIED:])
    collected: list[list[str]] = [[] for _ in subgraph.outputs[len(current) + 1 :]]
    inserted: list[NodeProto] = []
    going = graph.constant(np.full((1,) * (subgraph.rank(condition) or 0), True))
    for iteration in range(count):
        # Old exporters declare the counter with shape [1], and runtimes feed it like that.
        index = np.full((1,) * (subgraph.rank(counter) or 0), iteration, np.int64)
        names = {**initializers, counter: graph.constant(index), condition: going}
        names.update(zip(carried, current, strict=True))
        inserted += insert_copy(graph, node, subgraph, names)
        initializers = {name: names[name] for name in subgraph.initializers}
        results = [names.get(value, value) for value in subgraph.outputs[1:]]
        current = results[: len(current)]
        for values, value in zip(collected, results[len(current) :], strict=True):
            values.append(value)
    stacked: list[str] = []
    for values, result in zip(collected, node.output[len(current) :], strict=False):
        rows = [unsqueeze(graph, value, (0,), node) for value in values] if result else values
        several = bool(result) and len(rows) > 1
        stacked.append(graph.op("Concat", *rows, axis=0, at=node) if several else rows[0])
    replace_results(graph, node, [*current, *stacked][: len(node.output)])
    return [each for each in inserted if each in graph]


def _empty(subgraph: Graph, value: str) -> np.ndarray | None:
    """Return an empty array for a scan output of this value, if its shape is known."""
    known = subgraph.type(value)
    if known is None or known.static is None or known.dtype in (0, TensorProto.STRING):
        return None
    return np.empty((0, *known.static), helper.tensor_dtype_to_np_dtype(known.dtype))
