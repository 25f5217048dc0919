"""What a graph says about its values: interface, stored tensors, types, constants, contents.

The parts of a GraphProto live on in here, and are put together again when a snapshot is written.
Types and contents that were inferred are knowledge about the values, kept beside what is declared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from onnx import GraphProto, NodeProto, TensorProto, TypeProto, ValueInfoProto, helper

from toolkit.ir import node as nd
from toolkit.ir.def_use import Links
from toolkit.ir.tensor_type import Shape, TensorType, from_proto, to_proto

if TYPE_CHECKING:
    from toolkit.ir.graph import Graph
    from toolkit.ir.model import Model

Array = NDArray[Any]

_SMALL_DATA = 64
"""Integer constants up to this many elements answer `data`, as shapes and axes do."""


class Values(Links["Graph"]):
    """One graph's values, on top of their connections."""

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
        # All definitions before any read: nodes may come unsorted.
        self._producers = {name: node for node in originals for name in node.output if name}
        for index, node in enumerate(originals):
            self._connect(node, (index, 0))
        self._expose_outputs()
        for name in ("node", "initializer", "input", "output", "value_info"):
            proto.ClearField(name)  # the parts live on in this index; the rest is the shell
        self._shell = proto

    # -- reading

    @property
    def name(self) -> str:
        return self._shell.name

    @property
    def inputs(self) -> list[str]:
        """Names of the declared inputs, initializers with a default value among them."""
        return [v.name for v in self._inputs]

    @property
    def feeds(self) -> list[str]:
        """Names of the inputs that a caller has to feed."""
        return [v.name for v in self._inputs if v.name not in self._initializers]

    def interface_inputs(self, feeds_only: bool = False) -> list[ValueInfoProto]:
        """The declared inputs with their types."""
        return [v for v in self._inputs if not feeds_only or v.name not in self._initializers]

    def interface_outputs(self) -> list[ValueInfoProto]:
        """The declared outputs with their types."""
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
        """Whether training info or a quantization annotation refers to this initializer."""
        return value in self._pinned

    @property
    def has_sparse(self) -> bool:
        """Whether the graph has sparse initializers, which are kept but not edited."""
        return bool(self._sparse)

    def type(self, value: str) -> TensorType | None:
        """The tensor type of `value` as far as it is known here or in an enclosing graph."""
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
        """The full type that the model declares for `value` (sequences and maps too)."""
        declared = self._declaration(value)
        return declared.type if declared is not None else None

    def dtype(self, value: str) -> int:
        """Element type of `value`; 0 when unknown."""
        found = self.type(value)
        return found.dtype if found is not None else 0

    def shape(self, value: str) -> Shape | None:
        found = self.type(value)
        return found.shape if found is not None else None

    def rank(self, value: str) -> int | None:
        found = self.type(value)
        return found.rank if found is not None else None

    def tensor(self, value: str) -> TensorProto | None:
        """The tensor behind a constant: initializer that no caller can override, or Constant."""
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
        """The contents of a constant, as a read-only view; None for anything else."""
        tensor = self.tensor(value)
        return None if tensor is None else self.model.weights.array(tensor)

    def data(self, value: str) -> Array | None:
        """The symbolic integers in a scalar or vector (object array of Dim), where known."""
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
        """The version of an operator domain that the model imports; 0 when it does not."""
        return self.model.opsets.get(domain, 0)

    # -- knowledge

    def learn_type(self, value: str, type_: TensorType) -> None:
        """Note the type of a value: knowledge about it, not a change of the model."""
        self._types[value] = type_

    def learn_data(self, value: str, contents: Array) -> None:
        """Note the symbolic contents of a value: knowledge about it, not a change of the model."""
        self._data[value] = contents

    def forget(self, values: Iterable[str]) -> None:
        """Drop what is known of values that are no more, so that their names can be given again."""
        for value in values:
            self._types.pop(value, None)
            self._data.pop(value, None)

    # -- snapshots

    def write(self, proto: GraphProto) -> None:
        """Write the graph into `proto`, a copy of nothing: fresh and empty."""
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
        """A copy of the node with its subgraphs as they are now."""
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

    def _is_given(self, value: str) -> bool:
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


def _constant_tensor(node: NodeProto) -> TensorProto | None:
    """What a Constant node holds, in whichever of its attribute forms; None for sparse ones."""
    if len(node.attribute) != 1:
        return None
    attribute = node.attribute[0]
    if attribute.ref_attr_name:
        return None
    if attribute.name == "value":
        return attribute.t
    value = helper.get_attribute_value(attribute)
    if attribute.name in ("value_float", "value_floats"):
        kind = TensorProto.FLOAT
    elif attribute.name in ("value_int", "value_ints"):
        kind = TensorProto.INT64
    elif attribute.name in ("value_string", "value_strings"):
        kind = TensorProto.STRING
    else:
        return None
    many = attribute.name.endswith("s")
    return helper.make_tensor("", kind, [len(value)] if many else [], value if many else [value])


def _annotation_names(proto: GraphProto) -> set[str]:
    entries = (e for a in proto.quantization_annotation for e in a.quant_parameter_tensor_names)
    return {entry.value for entry in entries}
