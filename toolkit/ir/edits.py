"""The primitive edits of a model, as data.

`Graph.perform` and `Model.perform` carry them out. Every edit has an inverse, so undoing one is
performing its inverse.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from onnx import AttributeProto, NodeProto, TensorProto, ValueInfoProto

if TYPE_CHECKING:
    from toolkit.ir.graph import Graph
    from toolkit.ir.model import Model
    from toolkit.ir.tensor_type import TensorType
    from toolkit.ir.values import Array


@dataclass(frozen=True, slots=True, eq=False)
class GraphEdit:
    """An edit of one graph."""

    graph: Graph


@dataclass(frozen=True, slots=True, eq=False)
class NodeEdit(GraphEdit):
    """An edit of one node."""

    node: NodeProto


@dataclass(frozen=True, slots=True, eq=False)
class InsertNode(NodeEdit):
    """Attach a node at a position of the stable order."""

    position: tuple[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class RemoveNode(NodeEdit):
    """Detach a node whose results have no users."""

    position: tuple[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class SetInputs(NodeEdit):
    """Replace all operands of a node."""

    before: Sequence[str]
    after: Sequence[str]


@dataclass(frozen=True, slots=True, eq=False)
class SetOperand(NodeEdit):
    """Replace one value by another in the input slots that hold it.

    A node may have thousands of other operands. If the new value is already one of them, an undo
    needs `SetInputs`.
    """

    slots: Sequence[int]
    before: str
    after: str


@dataclass(frozen=True, slots=True, eq=False)
class SetOutputs(NodeEdit):
    """Rename the results of a node."""

    before: Sequence[str]
    after: Sequence[str]


@dataclass(frozen=True, slots=True, eq=False)
class SetOperator(NodeEdit):
    """Replace the operator of a node: type and domain."""

    before: tuple[str, str]
    after: tuple[str, str]


@dataclass(frozen=True, slots=True, eq=False)
class SetAttribute(NodeEdit):
    """Replace an attribute of a node; an empty sequence stands for its absence."""

    name: str
    before: Sequence[AttributeProto]
    after: Sequence[AttributeProto]


@dataclass(frozen=True, slots=True, eq=False)
class SetInitializer(GraphEdit):
    """Replace the stored tensor of a value; None stands for its absence."""

    value: str
    before: TensorProto | None
    after: TensorProto | None


@dataclass(frozen=True, slots=True, eq=False)
class SetType(GraphEdit):
    """Replace the known type of a value and the type written to the model."""

    value: str
    before: tuple[TensorType | None, TensorType | None]
    after: tuple[TensorType | None, TensorType | None]


@dataclass(frozen=True, slots=True, eq=False)
class SetData(GraphEdit):
    """Replace the symbolic contents of a value."""

    value: str
    before: Array | None
    after: Array | None


@dataclass(frozen=True, slots=True, eq=False)
class SetInterface(GraphEdit):
    """Replace the declared inputs and outputs of a graph."""

    before: tuple[list[ValueInfoProto], list[ValueInfoProto]]
    after: tuple[list[ValueInfoProto], list[ValueInfoProto]]


@dataclass(frozen=True, slots=True, eq=False)
class SetModel:
    """Replace members of a model: opset imports, IR version, functions, or the whole of it."""

    model: Model
    before: Mapping[str, object]
    after: Mapping[str, object]


Edit = GraphEdit | SetModel


def perform(edit: Edit) -> None:
    """Carry out an edit on its model."""
    if isinstance(edit, SetModel):
        edit.model.perform(edit)
    else:
        edit.graph.perform(edit)


def inverse(edit: Edit) -> Edit:
    """Return the edit that undoes `edit`."""
    match edit:
        case InsertNode():
            return RemoveNode(edit.graph, edit.node, edit.position)
        case RemoveNode():
            return InsertNode(edit.graph, edit.node, edit.position)
        case _:
            swapped: Any = edit  # all others have these two fields
            return replace(swapped, before=swapped.after, after=swapped.before)
