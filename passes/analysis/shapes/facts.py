"""The interface of an inference rule: its operand (`Op`) and its result (`Fact`).

A rule is a function of an Op. It returns one Fact, one for each output, or None to defer to ONNX's
own inference. None in a Fact stands for the unknown: a dimension of a shape, an element of the
contents, or all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray
from onnx import AttributeProto, NodeProto, TensorProto

from toolkit.ir import Graph, Shape, TensorType
from toolkit.symbolic import Dim, Expr

Array = NDArray[Any]
Size: TypeAlias = int | Expr | None
Sizes: TypeAlias = Sequence[Size]

NOTHING = TensorType(0, None)
"""The type of a value without any known facts."""

BOOL, INT32, INT64 = TensorProto.BOOL, TensorProto.INT32, TensorProto.INT64
FLOAT = TensorProto.FLOAT
CONTENT_TYPES = (INT64, INT32, BOOL)
"""Element types whose contents are inferred; booleans as 0 and 1."""

MOST_CONTENTS = 64
"""Largest number of elements of a value whose contents are inferred (shapes, axes, sizes)."""

_RANGES: dict[int, tuple[int, int]] = {
    INT64: (-(1 << 63), (1 << 63) - 1),
    INT32: (-(1 << 31), (1 << 31) - 1),
    BOOL: (0, 1),
}


class Fact(NamedTuple):
    """The known facts of one output."""

    dtype: int
    shape: Sizes | None
    data: Array | None = None
    """Contents, as an object array of Dim; None for an unknown element."""


Answer: TypeAlias = Fact | Sequence[Fact] | None


class Knowledge(Protocol):
    """Source of facts about the inputs of an Op."""

    @property
    def graph(self) -> Graph: ...
    def type(self, value: str) -> TensorType: ...
    def data(self, value: str) -> Array | None: ...
    def contents(self, value: str) -> Array | None: ...


class Op:
    """A node with the known facts of its inputs."""

    __slots__ = ("inputs", "known", "node")

    def __init__(self, node: NodeProto, known: Knowledge) -> None:
        self.node = node
        self.known = known
        self.inputs: list[str] = list(node.input)

    def select(self, inputs: slice) -> Op:
        """Return the node with only these of its inputs."""
        op = Op(self.node, self.known)
        op.inputs = self.inputs[inputs]
        return op

    @property
    def version(self) -> int:
        """Return the opset of the default domain."""
        return self.known.graph.opset()

    @property
    def outputs(self) -> int:
        return len(self.node.output)

    def given(self, index: int) -> bool:
        """Return whether an optional input is present."""
        return index < len(self.inputs) and self.inputs[index] != ""

    def type(self, index: int) -> TensorType:
        return self.known.type(self.inputs[index]) if self.given(index) else NOTHING

    def types(self) -> list[TensorType]:
        return [self.known.type(value) if value else NOTHING for value in self.inputs]

    def dtype(self, index: int) -> int:
        return self.type(index).dtype

    def shape(self, index: int) -> Shape | None:
        return self.type(index).shape

    def rank(self, index: int) -> int | None:
        shape = self.type(index).shape
        return None if shape is None else len(shape)

    def data(self, index: int) -> Array | None:
        """Return the symbolic contents of an input, or None."""
        return self.known.data(self.inputs[index]) if self.given(index) else None

    def contents(self, index: int) -> Array | None:
        """Return `data`; unknown integers of a short vector get anonymous symbols first."""
        return self.known.contents(self.inputs[index]) if self.given(index) else None

    def all_contents(self) -> list[Array] | None:
        """Return the contents of all inputs if `data` knows at least one of them, or None."""
        indices = range(len(self.inputs))
        if all(self.data(i) is None for i in indices):
            return None
        found = [data for i in indices if (data := self.contents(i)) is not None]
        return found if len(found) == len(self.inputs) else None

    def length(self, index: int) -> int | None:
        """Return the number of elements of a vector input, or None."""
        shape = self.shape(index)
        return shape[0] if shape and len(shape) == 1 and isinstance(shape[0], int) else None

    def sizes(self, index: int) -> list[Dim] | None:
        """Return the contents of a scalar or vector as a list, or None."""
        data = self.data(index)
        if data is None or data.ndim > 1:
            return None
        return data.reshape(-1).tolist()

    def numbers(self, index: int) -> list[int] | None:
        """Return the contents of a scalar or vector if all of them are numbers, or None."""
        sizes = self.sizes(index)
        if sizes is None:
            return None
        numbers = [size for size in sizes if isinstance(size, int)]
        return numbers if len(numbers) == len(sizes) else None

    def const(self, index: int) -> Array | None:
        """Return the contents of a constant input of any type, or None."""
        return self.known.graph.const(self.inputs[index]) if self.given(index) else None

    def attribute(self, name: str) -> AttributeProto | None:
        for attribute in self.node.attribute:
            if attribute.name == name:
                return attribute
        return None

    def int(self, name: str, default: int = 0) -> int:
        found = self.attribute(name)
        return default if found is None else found.i

    def ints(self, name: str) -> list[int] | None:
        found = self.attribute(name)
        return None if found is None else list(found.ints)

    def text(self, name: str, default: str = "") -> str:
        found = self.attribute(name)
        return default if found is None else found.s.decode("utf-8", "replace")

    def axes(self, index: int, name: str = "axes") -> list[int] | None:
        """Return axes: an attribute in old opsets, an input in new ones."""
        found = self.ints(name)
        return found if found is not None else self.numbers(index)


Rule: TypeAlias = Callable[[Op], Answer]


def vector(items: Sequence[Any]) -> Array:
    """Return a 1-D object array."""
    array = np.empty(len(items), dtype=object)
    array[:] = items
    return array


def scalar(item: object) -> Array:
    """Return a 0-D object array."""
    array = np.empty((), dtype=object)
    array[()] = item
    return array


def in_range(value: Size, dtype: int) -> Size:
    """Return `value`, or None if it is a number that overflows the element type."""
    if isinstance(value, int):
        low, high = _RANGES[dtype]
        return value if low <= value <= high else None
    return value


def same_as_input(op: Op) -> Fact:
    """Return the element type and shape of the first input."""
    known = op.type(0)
    return Fact(known.dtype, known.shape)


def quantized(rule: Rule, operands: slice, type_of: int | None, default: int = 0) -> Rule:
    """Return `rule` for the quantized form of its operator.

    Besides the operands it has scales and zero points as inputs. Its result has the element type
    of the input `type_of`, or `default` without that input.
    """

    def applied(op: Op) -> Answer:
        dtype = op.dtype(type_of) if type_of is not None and op.given(type_of) else default
        found = None if op.int("channels_last") else rule(op.select(operands))
        fact = found[0] if isinstance(found, list) else found
        return Fact(dtype, fact.shape if isinstance(fact, Fact) else None)

    return applied


def numeric(data: Array) -> bool:
    """Return whether all of the contents are numbers."""
    items: list[Dim] = data.reshape(-1).tolist()
    return all(isinstance(item, int) for item in items)


def small_shape(sizes: Sizes) -> tuple[int, ...] | None:
    """Return a static shape of few enough elements to infer the contents, or None."""
    numbers = tuple(size for size in sizes if isinstance(size, int))
    return numbers if len(numbers) == len(sizes) and prod(numbers) <= MOST_CONTENTS else None


def blank(rank: int) -> list[Size]:
    """Return a shape of known rank and unknown sizes."""
    return [None] * rank


def of_rank(rank: int | None) -> list[Size] | None:
    """Return a shape of unknown sizes, or None if the rank is unknown, too."""
    return None if rank is None else blank(rank)
