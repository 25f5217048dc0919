"""Shape arithmetic written away, by what `shapes` knows of its results.

    known-contents    a computed integer that is the same number in every run becomes a constant
    reshape-target    [batch, length, 12, 64] of a [batch, length, 768] becomes [0, 0, 12, 64]
    expand-target     [batch, 12, length, 64] of a [batch, 1, length, 64] becomes [1, 12, 1, 1]
    same-contents     integers with equal symbolic contents are computed once

What a Reshape can be told in numbers is up to `passes.operands.reshape_target`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from onnx import NodeProto, TensorProto, helper

from passes.operands import reshape_target
from toolkit import nodes as nd
from toolkit.graph import Graph
from toolkit.model import Model
from toolkit.symbolic import Dim, Expr
from toolkit.tolerance import EXACT, Tolerance
from toolkit.types import Shape

if TYPE_CHECKING:
    from toolkit.context import Context

_CONTENT_TYPES = (TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL)

Contents = tuple[int, tuple[int, ...], tuple[Dim, ...]]
"""Element type, shape and elements of an integer value: what makes two of them equal."""


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
    """Whether the node that holds the graph, and those around it, have not been removed."""
    while graph.parent is not None and graph.owner is not None:
        if graph.owner not in graph.parent:
            return False
        graph = graph.parent
    return True


@dataclass(slots=True)
class _Sweep:
    """One walk over a graph, in order."""

    graph: Graph
    constants: dict[Contents, str] = field(default_factory=dict[Contents, str])
    seen: dict[Contents, str] = field(default_factory=dict[Contents, str])

    def run(self) -> None:
        for value in self.graph.inputs:
            contents = _contents(self.graph, value)
            if contents is not None:
                self.seen.setdefault(contents, value)
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
            self.seen[contents] = value
        elif not graph.is_output(value) and graph.begin("same-contents", node):
            graph.replace(value, first)
            graph.prune(node)

    def _constant(self, contents: Contents) -> str:
        """An initializer with these numbers, made once for each graph."""
        name = self.constants.get(contents)
        if name is None:
            dtype, shape, numbers = contents
            array = np.array(numbers, dtype=helper.tensor_dtype_to_np_dtype(dtype))
            name = self.constants[contents] = self.graph.constant(array.reshape(shape), "shape")
        return name

    def _set_target(self, node: NodeProto, numbers: Sequence[int]) -> None:
        """Give the node these numbers as its second input, and drop what computed the old ones."""
        graph = self.graph
        maker = graph.producer(node.input[1])
        target = self._constant((TensorProto.INT64, (len(numbers),), tuple(numbers)))
        graph.set_input(node, 1, target)
        if maker is not None:
            graph.prune(maker)

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
        """The contents of the second input, where some of them are symbolic."""
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
    """Numbers that reshape `source` to `result` as the symbolic target `wanted` does, or None.

    `strict`: in `wanted`, 0 is a size (allowzero); in the answer it always copies.
    """
    sizes, had = list(wanted), source or ()
    inferred = sizes.index(-1) if -1 in sizes else None
    if inferred is not None and result is not None and len(result) == len(sizes):
        sizes[inferred] = result[inferred]  # what is left to the runtime is often a plain number
    if not strict:
        for place, size in enumerate(had[: len(sizes)]):
            if sizes[place] == 0:
                sizes[place] = size
    return reshape_target(had, tuple(sizes), None if strict else inferred)


def expand_target(wanted: Sequence[Dim], shape: Shape) -> list[int] | None:
    """The target with 1 for each size that the input has already; None if a symbol is left."""
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
