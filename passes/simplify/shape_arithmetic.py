"""Replace shape arithmetic, using the symbolic contents that `shapes` infers.

    known-contents    a computed integer that is the same number in every run becomes a constant
    reshape-target    [batch, length, 12, 64] for a [batch, length, 768] becomes [0, 0, 12, 64]
    expand-target     [batch, 12, length, 64] for a [batch, 1, length, 64] becomes [1, 12, 1, 1]
    same-contents     integers with equal symbolic contents are computed once
    size-of-input     [batch, 4] is taken from the shape of an input, not of a computed value

`passes.analysis.operands.reshape_target` decides which targets of a Reshape can be constant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from onnx import NodeProto, TensorProto, helper

from passes.analysis.operands import reshape_target
from toolkit.ir import Graph, Model, Shape, TensorType, node as nd
from toolkit.ir.op_traits import VIEWS
from toolkit.symbolic import Dim, Expr
from toolkit.verification.tolerance import EXACT, Tolerance

if TYPE_CHECKING:
    from toolkit.pass_manager.protocol import Context

_SELECTING = ("Gather", "Slice", "Squeeze", "Unsqueeze", "Reshape", "Cast")
"""Operators that select sizes from a Shape, or only reshape or convert them."""

_CONTENT_TYPES = (TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL)

_Run = tuple[str, list[int]]
"""A graph input and consecutive axes of it, or "" and numbers."""

Contents = tuple[int, tuple[int, ...], tuple[Dim, ...]]
"""Element type, shape and elements of an integer value."""


@dataclass(frozen=True, slots=True)
class Reshape:
    """Replace computed shapes by constants, and compute the rest once."""

    name: ClassVar[str] = "reshape"
    tolerance: ClassVar[Tolerance] = EXACT

    def run(self, model: Model, ctx: Context) -> None:
        for graph in list(model.graphs()):
            if _is_live(graph):
                _Sweep(graph).run()


def _is_live(graph: Graph) -> bool:
    """Return whether the nodes that own the graph and its enclosing graphs still exist."""
    while graph.parent is not None and graph.owner is not None:
        if graph.owner not in graph.parent:
            return False
        graph = graph.parent
    return True


@dataclass(slots=True)
class _Sweep:
    """One walk over the nodes of a graph, in order."""

    graph: Graph
    constants: dict[Contents, str] = field(default_factory=dict[Contents, str])
    seen: dict[Contents, str] = field(default_factory=dict[Contents, str])
    sizes: dict[Dim, tuple[str, int]] = field(default_factory=dict[Dim, tuple[str, int]])
    """Symbolic size -> graph input and axis."""

    def run(self) -> None:
        for value in self.graph.inputs:
            contents = _contents(self.graph, value)
            if contents is not None:
                self.seen.setdefault(contents, value)
            for axis, size in enumerate(self.graph.shape(value) or ()):
                self.sizes.setdefault(size, (value, axis))
        for node in self.graph.nodes:
            if node not in self.graph:
                continue
            if nd.is_op(node, "Reshape"):
                self._reshape(node)
            elif nd.is_op(node, "Expand"):
                self._expand(node)
            for value in nd.outputs_of(node):
                self._integers(node, value)

    # -- integers

    def _integers(self, node: NodeProto, value: str) -> None:
        graph = self.graph
        contents = _contents(graph, value)
        if contents is None or graph.is_unused(value):
            return
        if all(isinstance(item, int) for item in contents[2]):
            settled = nd.is_op(node, "Constant") or (
                nd.is_op(node, "Identity") and graph.is_const(node.input[0])
            )
            if not settled and graph.begin("known-contents", node):
                graph.replace(value, self._constant(contents))
                graph.prune(node)
            return
        first = self.seen.get(contents)
        if first is None or not graph.is_defined(first):
            self.seen[contents] = self._from_inputs(node, value, contents) or value
        elif not graph.is_output(value) and graph.begin("same-contents", node):
            graph.replace(value, first)
            graph.prune(node)

    def _from_inputs(self, node: NodeProto, value: str, contents: Contents) -> str | None:
        """Take sizes of a computed value from the shapes of graph inputs; return the new value.

        Then nothing is computed or kept in memory for its shape alone.
        """
        graph, (dtype, shape, sizes) = self.graph, contents
        measured = self._source_of_sizes(node)
        if measured is None or len(shape) != 1 or graph.opset() < 15 or graph.is_output(value):
            return None
        runs = self._runs(sizes)
        if not runs or (len(runs) > 1 and not self._has_other_users(measured)):
            return None
        if not graph.begin("size-of-input", node):
            return None
        parts = [self._run(run, node) for run in runs]
        found = parts[0] if len(parts) == 1 else graph.op("Concat", *parts, at=node, axis=0)
        graph.learn_type(found, TensorType(TensorProto.INT64, shape))
        if dtype != TensorProto.INT64:
            found = graph.op("Cast", found, at=node, to=dtype)
            graph.learn_type(found, TensorType(dtype, shape))
        graph.replace(value, found)
        graph.prune(node)
        return found

    def _source_of_sizes(self, node: NodeProto) -> str | None:
        """Return the computed value whose sizes `node` selects from a Shape, or None.

        None also if all users select sizes in turn: each of them is visited later.
        """
        if all(nd.is_op(user, *_SELECTING) for user in self.graph.users(node.output[0])):
            return None
        producer: NodeProto | None = node
        while producer is not None and nd.is_op(producer, *_SELECTING):
            producer = self.graph.producer(producer.input[0])
        if producer is None or not nd.is_op(producer, "Shape"):
            return None
        return producer.input[0] if self.graph.producer(producer.input[0]) is not None else None

    def _has_other_users(self, value: str) -> bool:
        """Return whether a value, or one that it is a view of, has other users than its Shape.

        Removing the Shape then leaves a chain without side users, which other rules match.
        """
        producer = self.graph.producer(value)
        while self.graph.use_count(value) == 1 and producer and nd.is_op(producer, *VIEWS):
            value = producer.input[0]
            producer = self.graph.producer(value)
        return self.graph.use_count(value) > 1

    def _runs(self, sizes: Sequence[Dim]) -> list[_Run]:
        """Group sizes into numbers and consecutive axes of graph inputs; [] if one is neither."""
        runs: list[_Run] = []
        for size in sizes:
            source, axis = ("", size) if isinstance(size, int) else self.sizes.get(size, ("", None))
            if not isinstance(axis, int):
                return []
            last, axes = runs[-1] if runs else ("", [])
            if axes and last == source and (not source or axes[-1] + 1 == axis):
                axes.append(axis)
            else:
                runs.append((source, [axis]))
        return runs

    def _run(self, run: _Run, node: NodeProto) -> str:
        source, axes = run
        if not source:
            return self._constant((TensorProto.INT64, (len(axes),), tuple(axes)))
        return self.graph.op("Shape", source, at=node, start=axes[0], end=axes[-1] + 1)

    def _constant(self, contents: Contents) -> str:
        """Return an initializer with these numbers, one per graph."""
        name = self.constants.get(contents)
        if name is None:
            dtype, shape, numbers = contents
            array = np.array(numbers, dtype=helper.tensor_dtype_to_np_dtype(dtype))
            name = self.constants[contents] = self.graph.constant(array.reshape(shape), "shape")
        return name

    def _set_target(self, node: NodeProto, numbers: Sequence[int]) -> None:
        """Set the second input of the node to these numbers, and prune the old producer."""
        graph = self.graph
        producer = graph.producer(node.input[1])
        target = self._constant((TensorProto.INT64, (len(numbers),), tuple(numbers)))
        graph.set_input(node, 1, target)
        if producer is not None:
            graph.prune(producer)

    # -- Reshape

    def _reshape(self, node: NodeProto) -> None:
        graph = self.graph
        wanted = self._wanted(node)
        if wanted is None:
            return
        source, result = graph.shape(node.input[0]), graph.shape(node.output[0])
        strict = nd.attr(node, "allowzero", 0) != 0
        numbers = symbolic_target(wanted, source, result, strict)
        if numbers is None or not graph.begin("reshape-target", node):
            return
        if strict:
            graph.del_attr(node, "allowzero")
        self._set_target(node, numbers)

    def _wanted(self, node: NodeProto) -> list[Dim] | None:
        """Return the contents of the second input if some of them are symbolic, or None."""
        if len(node.input) < 2 or self.graph.is_const(node.input[1]):
            return None
        data = self.graph.data(node.input[1])
        if data is None or data.ndim != 1:
            return None
        wanted: list[Dim] = data.tolist()
        return wanted if any(isinstance(item, Expr) for item in wanted) else None

    # -- Expand

    def _expand(self, node: NodeProto) -> None:
        graph = self.graph
        wanted, shape = self._wanted(node), graph.shape(node.input[0])
        if wanted is None or shape is None:
            return
        numbers = expand_target(wanted, shape)
        if numbers is not None and graph.begin("expand-target", node):
            self._set_target(node, numbers)


def symbolic_target(
    wanted: Sequence[Dim], source: Shape | None, result: Shape | None, strict: bool = False
) -> list[int] | None:
    """Return the constant target equivalent to the symbolic one for this source, or None.

    With `strict`, a 0 in `wanted` is a size (allowzero); in the result it always copies.
    """
    sizes, had = list(wanted), source or ()
    inferred = sizes.index(-1) if -1 in sizes else None
    if inferred is not None and result is not None and len(result) == len(sizes):
        sizes[inferred] = result[inferred]  # the inferred size is often a number
    if not strict:
        for place, size in enumerate(had[: len(sizes)]):
            if sizes[place] == 0:
                sizes[place] = size
    return reshape_target(had, tuple(sizes), None if strict else inferred)


def expand_target(wanted: Sequence[Dim], shape: Shape) -> list[int] | None:
    """Return the target with 1 for each size that the input has; None if a symbol remains."""
    extra = len(wanted) - len(shape)
    numbers = [
        1 if place >= extra and shape[place - extra] == size else size
        for place, size in enumerate(wanted)
    ]
    found = [size for size in numbers if isinstance(size, int)]
    return found if len(found) == len(numbers) else None


def _contents(graph: Graph, value: str) -> Contents | None:
    data = graph.data(value)
    dtype = graph.dtype(value)
    if data is None or dtype not in _CONTENT_TYPES:
        return None
    return dtype, data.shape, tuple(data.reshape(-1).tolist())
