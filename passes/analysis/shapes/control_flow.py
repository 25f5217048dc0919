"""Inference of If, Loop and Scan, and of their subgraphs.

A loop-carried value may change its shape between iterations. Its subgraph is inferred under the
assumption that the value keeps its initial shape; sizes that the subgraph does not preserve are
dropped from the assumption until it holds. By induction, it then holds for every iteration.

Anonymous sizes of a loop's subgraph may differ between iterations, so they do not leave it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from onnx import AttributeProto, NodeProto

from passes.analysis.axes import positive_axis
from passes.analysis.shapes.dims import best
from passes.analysis.shapes.facts import (
    BOOL,
    INT64,
    Answer,
    Array,
    Fact,
    Op,
    Size,
    Sizes,
    blank,
    scalar,
)
from passes.analysis.shapes.scope import Scope
from toolkit.ir import Graph, TensorType, from_proto, node as nd
from toolkit.symbolic import Expr, is_positive, maximum, unknown

if TYPE_CHECKING:
    from passes.analysis.shapes.engine import Engine

_MOST_ATTEMPTS = 4
"""Assumptions tried about carried shapes before all of them are dropped."""


def infer(engine: Engine, scope: Scope, node: NodeProto) -> Answer:
    """Infer the subgraphs of a node and return the facts about its outputs."""
    if nd.is_op(node, "If"):
        return _if(engine, scope, node)
    if nd.is_op(node, "Loop"):
        return _loop(engine, scope, node)
    if nd.is_op(node, "Scan") and scope.graph.opset() >= 9:
        return _scan(engine, scope, node)
    for graph in scope.graph.subgraphs(node):
        inner = Scope(graph, scope, fill=False)
        for value in graph.inputs:
            inner.types[value] = TensorType(_declared_dtype(graph, value), None)
        engine.walk(inner)
    return () if nd.is_op(node, "Scan") else None


def _declared_dtype(graph: Graph, value: str) -> int:
    declared = graph.declared_type(value)
    type_ = None if declared is None else from_proto(declared)
    return 0 if type_ is None else type_.dtype


# -- If


def _if(engine: Engine, scope: Scope, node: NodeProto) -> Answer:
    branches: dict[str, list[Fact]] = {}
    names = [a.name for a in node.attribute if a.type == AttributeProto.GRAPH]
    for name, graph in zip(names, scope.graph.subgraphs(node), strict=True):
        inner = Scope(graph, scope, scope.fill)
        engine.walk(inner)
        branches[name] = [
            Fact((type_ := inner.type(value)).dtype, type_.shape, inner.data(value))
            for value in graph.outputs
        ]
    condition = Op(node, scope).data(0)
    if condition is not None and isinstance(condition.item(), int):
        return branches["then_branch" if condition.item() else "else_branch"]
    then, otherwise = branches["then_branch"], branches["else_branch"]
    return [_either(a, b) for a, b in zip(then, otherwise, strict=True)]


def _either(a: Fact, b: Fact) -> Fact:
    """Return the facts common to both."""
    dtype = a.dtype if a.dtype == b.dtype else 0
    shape = None if a.shape is None or b.shape is None else _common(a.shape, b.shape)
    data: Array | None = None
    if a.data is not None and b.data is not None and a.data.shape == b.data.shape:
        data = np.where(a.data == b.data, a.data, scalar(None))
    return Fact(dtype, shape, data)


def _common(a: Sizes, b: Sizes) -> Sizes | None:
    if len(a) != len(b):
        return None
    return [x if x == y else None for x, y in zip(a, b, strict=True)]


# -- loops


class _CarriedShape:
    """The assumed loop-invariant part of the shape of a carried value."""

    def __init__(self, type_: TensorType) -> None:
        self.dtype = type_.dtype
        self.shape: list[Size] | None = None if type_.shape is None else list(type_.shape)

    def enter(self, inner: Scope, value: str) -> None:
        """Enter the assumed type of an input of the subgraph."""
        dtype = self.dtype or _declared_dtype(inner.graph, value)
        if self.shape is None:
            inner.types[value] = TensorType(dtype, None)
            return
        old = inner.graph.shape(value)
        names = old if old is not None and len(old) == len(self.shape) else [0] * len(self.shape)
        sizes = [
            (name if isinstance(name, Expr) and name.anonymous else unknown(True))
            if size is None
            else size
            for size, name in zip(self.shape, names, strict=True)
        ]
        inner.types[value] = TensorType(dtype, tuple(sizes))

    def weaken(self, result: TensorType) -> bool:
        """Drop the sizes that the subgraph changes; return whether it preserves all of them."""
        if self.shape is None:
            return True
        if result.shape is None or len(result.shape) != len(self.shape):
            self.shape = None
            return False
        kept = [a if a == b else None for a, b in zip(self.shape, result.shape, strict=True)]
        unchanged = kept == self.shape
        self.shape = kept
        return unchanged

    @property
    def fact(self) -> Fact:
        return Fact(self.dtype, self.shape)


def _carry(
    engine: Engine,
    scope: Scope,
    subgraph: Graph,
    carried: list[_CarriedShape],
    fixed: dict[str, TensorType],
    first: tuple[int, int],
    true_inputs: tuple[str, ...] = (),
) -> Scope:
    """Infer the subgraph until the assumptions hold.

    `first` has the indices of the first carried input and output, `true_inputs` those known to be
    true.
    """
    for attempt in range(_MOST_ATTEMPTS + 1):
        inner = Scope(subgraph, scope, fill=False)
        inner.types.update(fixed)
        for value in true_inputs:
            inner.learn(value, np.full((inner.types[value].static or ()), 1, dtype=object))
        if attempt == _MOST_ATTEMPTS:
            for value_shape in carried:
                value_shape.shape = None
        for value_shape, value in zip(carried, subgraph.inputs[first[0] :], strict=False):
            value_shape.enter(inner, value)
        engine.walk(inner)
        results = [inner.type(v) for v in subgraph.outputs[first[1] : first[1] + len(carried)]]
        held = [value_shape.weaken(r) for value_shape, r in zip(carried, results, strict=True)]
        if all(held):
            return inner
    raise ValueError("the subgraph has another number of carried outputs than inputs")


def _outside(sizes: Sizes | None) -> Sizes | None:
    """Return the sizes without anonymous ones, which may differ between iterations."""
    if sizes is None:
        return None
    return [None if isinstance(size, Expr) and size.anonymous else size for size in sizes]


def _loop(engine: Engine, scope: Scope, node: NodeProto) -> Answer:
    op = Op(node, scope)
    [subgraph] = scope.graph.subgraphs(node)
    counter, condition = subgraph.inputs[:2]
    carried = [_CarriedShape(op.type(i)) for i in range(2, len(op.inputs))]
    # Old exporters declare the counter with shape [1], and runtimes feed it like that.
    fixed = {
        value: TensorType(dtype, (1,) if subgraph.rank(value) == 1 else ())
        for value, dtype in ((counter, INT64), (condition, BOOL))
    }
    # The subgraph runs only while the condition is true.
    inner = _carry(engine, scope, subgraph, carried, fixed, (2, 1), (condition,))
    again = inner.data(subgraph.outputs[0])
    starts = op.data(1) if op.given(1) else scalar(1)
    trips, count = op.data(0), None
    always = all(flag is not None and flag.item() == 1 for flag in (again, starts))
    if always and trips is not None:
        count = maximum(trips.item(), 0)
    collected: list[Fact] = []
    for value in subgraph.outputs[1 + len(carried) :]:
        type_ = inner.type(value)
        sizes = _outside(type_.shape)
        if sizes is not None and (count is None or not is_positive(count)):
            sizes = blank(len(sizes))  # without any iteration, runtimes return sizes of 0
        collected.append(Fact(type_.dtype, None if sizes is None else (count, *sizes)))
    return [*(value_shape.fact for value_shape in carried), *collected]


def _scan(engine: Engine, scope: Scope, node: NodeProto) -> Answer:
    op = Op(node, scope)
    [subgraph] = scope.graph.subgraphs(node)
    scanned = op.int("num_scan_inputs")
    states = len(op.inputs) - scanned
    axes = op.ints("scan_input_axes") or [0] * scanned
    fixed: dict[str, TensorType] = {}
    lengths: list[Size] = []
    for place, axis in enumerate(axes):
        known, value = op.type(states + place), subgraph.inputs[states + place]
        if known.shape is None:
            fixed[value] = TensorType(known.dtype, None)
            continue
        at = positive_axis(axis, len(known.shape))
        lengths.append(known.shape[at])
        fixed[value] = TensorType(known.dtype, (*known.shape[:at], *known.shape[at + 1 :]))
    carried = [_CarriedShape(op.type(i)) for i in range(states)]
    inner = _carry(engine, scope, subgraph, carried, fixed, (0, 0))
    length = best(lengths)
    collected: list[Fact] = []
    stacked = subgraph.outputs[states:]
    for value, axis in zip(stacked, op.ints("scan_output_axes") or [0] * len(stacked), strict=True):
        type_ = inner.type(value)
        sizes = _outside(type_.shape)
        if sizes is None:
            collected.append(Fact(type_.dtype, None))
            continue
        at = positive_axis(axis, len(sizes) + 1)
        collected.append(Fact(type_.dtype, (*sizes[:at], length, *sizes[at:])))
    return [*(value_shape.fact for value_shape in carried), *collected]
