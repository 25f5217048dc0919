"""The primitive edits of a model, as data.

`Graph.perform` and `Model.perform` carry them out. Every edit has an inverse, so undoing one is
performing its inverse.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from onnx import AttributeProto, NodeProto, TensorProto, ValueInfoProto

if TYPE_CHECKING:
    from toolkit.ir.graph import Graph
    from toolkit.ir.model import Model
    from toolkit.ir.tensor_type import TensorType
    from toolkit.ir.values import Array


@dataclass(frozen=True, slots=True, eq=False)
class InsertNode:
    """Attach a node at a position of the stable order."""

    graph: Graph
    node: NodeProto
    position: tuple[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class RemoveNode:
    """Detach a node whose results have no users."""

    graph: Graph
    node: NodeProto
    position: tuple[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class SetInputs:
    """Replace all operands of a node."""

    graph: Graph
    node: NodeProto
    before: Sequence[str]
    after: Sequence[str]


@dataclass(frozen=True, slots=True, eq=False)
class SetOperand:
    """Replace one value by another in the input slots that read it.

    A node may have thousands of other operands, and one that was read already needs `SetInputs`.
    """

    graph: Graph
    node: NodeProto
    slots: Sequence[int]
    before: str
    after: str


@dataclass(frozen=True, slots=True, eq=False)
class SetOutputs:
    """Rename the results of a node."""

    graph: Graph
    node: NodeProto
    before: Sequence[str]
    after: Sequence[str]


@dataclass(frozen=True, slots=True, eq=False)
class SetOperator:
    """Replace the operator of a node: type and domain."""

    graph: Graph
    node: NodeProto
    before: tuple[str, str]
    after: tuple[str, str]


@dataclass(frozen=True, slots=True, eq=False)
class SetAttribute:
    """Replace an attribute of a node; an empty sequence stands for its absence."""

    graph: Graph
    node: NodeProto
    name: str
    before: Sequence[AttributeProto]
    after: Sequence[AttributeProto]


@dataclass(frozen=True, slots=True, eq=False)
class SetInitializer:
    """Replace the stored tensor of a value; None stands for its absence."""

    graph: Graph
    value: str
    before: TensorProto | None
    after: TensorProto | None


@dataclass(frozen=True, slots=True, eq=False)
class SetType:
    """Replace the known type of a value and the type written to the model."""

    graph: Graph
    value: str
    before: tuple[TensorType | None, TensorType | None]
    after: tuple[TensorType | None, TensorType | None]


@dataclass(frozen=True, slots=True, eq=False)
class SetData:
    """Replace the symbolic contents of a value."""

    graph: Graph
    value: str
    before: Array | None
    after: Array | None


@dataclass(frozen=True, slots=True, eq=False)
class SetInterface:
    """Replace the declared inputs and outputs of a graph."""

    graph: Graph
    before: tuple[list[ValueInfoProto], list[ValueInfoProto]]
    after: tuple[list[ValueInfoProto], list[ValueInfoProto]]


@dataclass(frozen=True, slots=True, eq=False)
class SetModel:
    """Replace members of a model: opset imports, IR version, functions, or the whole of it."""

    model: Model
    before: Mapping[str, object]
    after: Mapping[str, object]


NodeEdit = (
    InsertNode | RemoveNode | SetInputs | SetOperand | SetOutputs | SetOperator | SetAttribute
)
GraphEdit = NodeEdit | SetInitializer | SetType | SetData | SetInterface
Edit = GraphEdit | SetModel


def perform(edit: Edit) -> None:
    """Carry out an edit on its model."""
    if isinstance(edit, SetModel):
        edit.model.perform(edit)
    else:
        edit.graph.perform(edit)


def inverse(edit: Edit) -> Edit:
    """Return the edit that undoes `edit`."""
    if isinstance(edit, InsertNode):
        return RemoveNode(edit.graph, edit.node, edit.position)
    if isinstance(edit, RemoveNode):
        return InsertNode(edit.graph, edit.node, edit.position)
    return replace(edit, before=edit.after, after=edit.before)
