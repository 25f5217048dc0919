"""The facts about the values of one graph during a walk of the engine."""

from __future__ import annotations

from math import prod

from passes.analysis.shapes.facts import (
    CONTENT_TYPES,
    INT32,
    INT64,
    MOST_CONTENTS,
    NOTHING,
    Array,
    vector,
)
from toolkit.ir import Graph, TensorType
from toolkit.symbolic import Dim, Expr, unknown

_MOST_NAMED = 8
"""Largest length of an integer vector whose unknown elements get anonymous symbols."""


class Scope:
    """The facts about the values of one graph, and through `parent` of the enclosing ones."""

    def __init__(self, graph: Graph, parent: Scope | None = None, fill: bool = True) -> None:
        self.graph = graph
        self.parent = parent
        self.fill = fill
        self.types: dict[str, TensorType] = {}
        self._data: dict[str, Array | None] = {}

    def type(self, value: str) -> TensorType:
        found = self.types.get(value)
        if found is not None:
            return found
        if self.parent is not None and not self.graph.is_defined(value):
            return self.parent.type(value)
        found = self.graph.type(value) or NOTHING
        self.types[value] = found
        return found

    def data(self, value: str) -> Array | None:
        """Return the symbolic contents of a constant or of a value inferred so far, or None."""
        if value in self._data:
            return self._data[value]
        if self.parent is not None and not self.graph.is_defined(value):
            return self.parent.data(value)
        found = self._data[value] = _constant_contents(self.graph, value)
        return found

    def contents(self, value: str) -> Array | None:
        """Return `data`; unknown integers of a short vector get anonymous symbols first."""
        found = self.data(value)
        if found is not None:
            return found
        if self.parent is not None and not self.graph.is_defined(value):
            return self.parent.contents(value)
        dtype, shape = (known := self.type(value)).dtype, known.shape
        if dtype not in (INT64, INT32) or shape is None or len(shape) > 1:
            return None
        count = shape[0] if shape else 1
        if not isinstance(count, int) or count > _MOST_NAMED or self.graph.is_const(value):
            return None
        names = vector([None] * count)
        self.learn(value, names if shape else names.reshape(()), named=True)
        return self._data[value]

    def learn(self, value: str, data: Array, named: bool = False) -> None:
        """Record contents; unknown elements get an anonymous symbol, the same in every walk."""
        items = data.reshape(-1).tolist()
        if None in items:
            if not named and not any(item is not None for item in items):
                return
            before = self.graph.data(value)
            if before is not None and before.shape == data.shape:
                olds: list[Dim] = before.reshape(-1).tolist()
                names = [old if isinstance(old, Expr) else unknown() for old in olds]
            else:
                names = [unknown() for _ in items]
            pairs = zip(items, names, strict=True)
            data = vector([b if a is None else a for a, b in pairs]).reshape(data.shape)
        self._data[value] = data

    def learned(self) -> dict[str, Array]:
        """Return the contents of computed scalars and vectors, to be written to the graph."""
        return {
            value: data
            for value, data in self._data.items()
            if data is not None and data.ndim <= 1 and not self.graph.is_const(value)
        }


def _constant_contents(graph: Graph, value: str) -> Array | None:
    tensor = graph.tensor(value)
    if tensor is None or tensor.data_type not in CONTENT_TYPES:
        return None
    if prod(tensor.dims) > MOST_CONTENTS:
        return None
    array = graph.model.weights.array(tensor)
    # Converted one by one: an object array must hold ints, not numpy's integers or booleans.
    return vector([int(item) for item in array.reshape(-1).tolist()]).reshape(array.shape)
