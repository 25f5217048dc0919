"""The values of one graph: interface, initializers, types, constants, symbolic contents.

The parts of a GraphProto are held here, and assembled again when a snapshot is written. Inferred
types and contents are kept beside the declared ones and are not written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from onnx import GraphProto, NodeProto, TensorProto, TypeProto, ValueInfoProto, helper

from toolkit.ir import node as nd
from toolkit.ir.def_use import DefUse
from toolkit.ir.tensor_type import Shape, TensorType, from_proto, to_proto

if TYPE_CHECKING:
    from toolkit.ir.graph import Graph
    from toolkit.ir.model import Model

Array = NDArray[Any]

_SMALL_DATA = 64
"""The largest number of elements of an integer constant that `data` returns; shapes are small."""


class Values(DefUse["Graph"]):
    """The values of one graph, on top of its def-use index."""

    def __init__(
        self,
        model: Model,
        proto: GraphProto,
        parent: Graph | None = None,
        owner: NodeProto | None = None,
    ) -> None:
        super().__init__(parent, owner)
        self.model = model
        self._inputs: list[ValueInfoProto] = list(proto.input)
        self._outputs: list[ValueInfoProto] = list(proto.output)
        self._initializers: dict[str, TensorProto] = {t.name: t for t in proto.initializer}
        self._sparse = frozenset(s.values.name for s in proto.sparse_initializer)
        self._pinned = _annotation_names(proto) | (model.trained if parent is None else set())
        self._declared: dict[str, ValueInfoProto] = {v.name: v for v in proto.value_info}
        self._annotated: dict[str, TensorType] = {}
        self._types: dict[str, TensorType | None] = {}
        self._data: dict[str, Array] = {}
        self._input_names = {v.name for v in self._inputs}
        originals = list(proto.node)
        # All definitions come before any use: nodes may be unsorted.
        self._producers = {name: node for node in originals for name in node.output if name}
        for index, node in enumerate(originals):
            self._connect(node, (index, 0))
        self._expose_outputs()
        for name in ("node", "initializer", "input", "output", "value_info"):
            proto.ClearField(name)
        self._shell = proto  # all other fields

    # -- queries

    @property
    def name(self) -> str:
        return self._shell.name

    @property
    def inputs(self) -> list[str]:
        """The declared inputs, including those with an initializer as default value."""
        return [v.name for v in self._inputs]

    @property
    def feeds(self) -> list[str]:
        """The inputs that a caller must feed."""
        return [v.name for v in self._inputs if v.name not in self._initializers]

    def interface_inputs(self, feeds_only: bool = False) -> list[ValueInfoProto]:
        """Return the declared inputs with their types."""
        return [v for v in self._inputs if not feeds_only or v.name not in self._initializers]

    def interface_outputs(self) -> list[ValueInfoProto]:
        """Return the declared outputs with their types."""
        return list(self._outputs)

    @property
    def outputs(self) -> list[str]:
        return [v.name for v in self._outputs]

    @property
    def initializers(self) -> Mapping[str, TensorProto]:
        return self._initializers

    def is_input(self, value: str) -> bool:
        return value in self._input_names

    def is_pinned(self, value: str) -> bool:
        """Return whether training info or a quantization annotation refers to this initializer."""
        return value in self._pinned

    @property
    def has_sparse(self) -> bool:
        """Whether the graph has sparse initializers, which are not edited."""
        return bool(self._sparse)

    def type(self, value: str) -> TensorType | None:
        """Return the known tensor type of `value`, here or in an enclosing graph, or None."""
        if value in self._types:
            return self._types[value]
        scope = self.scope_of(value)
        if scope is None:
            return None
        if scope is not self:
            return scope.type(value)
        tensor = self._initializers.get(value)
        if tensor is not None:
            found = TensorType(tensor.data_type, tuple(tensor.dims))
        else:
            declared = self._declaration(value)
            found = from_proto(declared.type) if declared is not None else None
        self._types[value] = found
        return found

    def declared_type(self, value: str) -> TypeProto | None:
        """Return the type that the model declares for `value`, which may be a sequence or a map."""
        declared = self._declaration(value)
        return declared.type if declared is not None else None

    def dtype(self, value: str) -> int:
        """Return the element type of `value`; 0 if unknown."""
        found = self.type(value)
        return found.dtype if found is not None else 0

    def shape(self, value: str) -> Shape | None:
        found = self.type(value)
        return found.shape if found is not None else None

    def rank(self, value: str) -> int | None:
        found = self.type(value)
        return found.rank if found is not None else None

    def tensor(self, value: str) -> TensorProto | None:
        """Return the tensor of a constant: an initializer that is no input, or a Constant node."""
        scope = self.scope_of(value)
        if scope is not None and scope is not self:
            return scope.tensor(value)
        tensor = self._initializers.get(value)
        if tensor is not None:
            overridable = value in self._input_names and self.model.ir_version >= 4
            return None if overridable else tensor
        node = self._producers.get(value)
        if node is not None and nd.is_op(node, "Constant"):
            return _constant_tensor(node)
        return None

    def is_const(self, value: str) -> bool:
        return self.tensor(value) is not None

    def const(self, value: str) -> Array | None:
        """Return the contents of a constant as a read-only view, or None."""
        tensor = self.tensor(value)
        return None if tensor is None else self.model.weights.array(tensor)

    def data(self, value: str) -> Array | None:
        """Return the symbolic contents of an integer scalar or vector (array of Dim), or None."""
        found = self._data.get(value)
        if found is not None:
            return found
        scope = self.scope_of(value)
        if scope is None:
            return None
        if scope is not self:
            return scope.data(value)
        tensor = self.tensor(value)
        if tensor is None or tensor.data_type not in (TensorProto.INT64, TensorProto.INT32):
            return None
        if len(tensor.dims) > 1 or (tensor.dims and tensor.dims[0] > _SMALL_DATA):
            return None
        numbers = self.model.weights.array(tensor).tolist()
        found = self._data[value] = np.array(numbers, dtype=object)
        return found

    def opset(self, domain: str = "") -> int:
        """Return the imported version of an operator domain, or 0."""
        return self.model.opsets.get(domain, 0)

    # -- inferred facts

    def learn_type(self, value: str, type_: TensorType) -> None:
        """Record an inferred type; this is not an edit of the model."""
        self._types[value] = type_

    def learn_data(self, value: str, contents: Array) -> None:
        """Record inferred symbolic contents; this is not an edit of the model."""
        self._data[value] = contents

    def forget(self, values: Iterable[str]) -> None:
        """Drop the facts about removed values, whose names may be reused."""
        for value in values:
            self._types.pop(value, None)
            self._data.pop(value, None)

    # -- snapshots

    def write(self, proto: GraphProto) -> None:
        """Write the graph into `proto`, which must be empty."""
        proto.CopyFrom(self._shell)
        proto.input.extend(self._inputs)
        proto.output.extend(self._outputs)
        proto.initializer.extend(self._initializers.values())
        for value in dict.fromkeys((*self._declared, *self._annotated)):
            if value in self._producers and value not in self._output_names:
                self._write_type(value, proto.value_info.add())
        proto.node.extend(self.nodes)
        if self._children:
            for node, written in zip(self.nodes, proto.node, strict=True):
                self._write_children(node, written)

    def snapshot(self, node: NodeProto) -> NodeProto:
        """Return a copy of the node with the current contents of its subgraphs."""
        copy = NodeProto()
        copy.CopyFrom(node)
        self._write_children(node, copy)
        return copy

    def _write_type(self, value: str, info: ValueInfoProto) -> None:
        declared = self._declared.get(value)
        if declared is not None:
            info.CopyFrom(declared)
        annotated = self._annotated.get(value)
        if annotated is not None:
            info.name = value
            info.ClearField("type")
            to_proto(annotated, info.type)

    def _write_children(self, node: NodeProto, written: NodeProto) -> None:
        children = self._children.get(id(node), ())
        for child, slot in zip(children, nd.graphs_of(written), strict=bool(children)):
            slot.Clear()
            child.write(slot)

    # -- internals

    def _is_input_or_stored(self, value: str) -> bool:
        return value in self._initializers or value in self._input_names or value in self._sparse

    def _declaration(self, value: str) -> ValueInfoProto | None:
        found = self._declared.get(value)
        return found if found is not None else self._interface.get(value)

    def _expose_outputs(self) -> None:
        self._interface = {v.name: v for v in (*self._outputs, *self._inputs)}
        self._output_names = Counter(v.name for v in self._outputs)
        for name in self._output_names:
            self._forward(name, +1)

    def _hide_outputs(self) -> None:
        for name in self._output_names:
            self._forward(name, -1)
        self._output_names = Counter()


_CONSTANT_TYPES = {
    "float": TensorProto.FLOAT,
    "int": TensorProto.INT64,
    "string": TensorProto.STRING,
}
"""The element type of Constant's attributes `value_float`, `value_floats` and so on."""


def _constant_tensor(node: NodeProto) -> TensorProto | None:
    """Return the tensor of a Constant node, from any of its attributes; None if sparse."""
    if len(node.attribute) != 1:
        return None
    attribute = node.attribute[0]
    if attribute.ref_attr_name:
        return None
    if attribute.name == "value":
        return attribute.t
    value = helper.get_attribute_value(attribute)
    kind = _CONSTANT_TYPES.get(attribute.name.removeprefix("value_").removesuffix("s"))
    if kind is None:
        return None
    many = attribute.name.endswith("s")
    return helper.make_tensor("", kind, [len(value)] if many else [], value if many else [value])


def _annotation_names(proto: GraphProto) -> set[str]:
    entries = (e for a in proto.quantization_annotation for e in a.quant_parameter_tensor_names)
    return {entry.value for entry in entries}
