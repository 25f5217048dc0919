"""Graph: the index over one GraphProto, and its only writer.

Nodes are the protobuf's own NodeProto objects, held by reference. The index (producers, users,
captures by subgraphs, types, constants) is updated by every edit, and every edit goes through the
journal. The GraphProto itself is only written when a snapshot is taken.

A subgraph is a Graph of its own. Its uses of outer values are reported to the enclosing graphs as
captures, so that `users`, `use_count` and `replace` see through scopes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from onnx import AttributeProto, GraphProto, NodeProto, TensorProto, ValueInfoProto, helper

from toolkit.ir import edits as ed, node as nd
from toolkit.ir.def_use import CycleError
from toolkit.ir.tensor_type import TensorType
from toolkit.ir.values import Array, Values

__all__ = ["CycleError", "Graph"]


class Graph(Values):
    """One graph of a model: main graph or subgraph."""

    # -- primitive edits, recorded in the journal

    def fresh(self, hint: str) -> str:
        """Return a name that is unique in the model."""
        return self.model.fresh(hint)

    def begin(self, rule: str, site: NodeProto) -> bool:
        """Start a rewrite in the journal; return False if it is vetoed and must not be made."""
        return self.model.journal.begin(rule, next(iter(nd.outputs_of(site)), site.name))

    def insert(self, node: NodeProto, at: NodeProto | None = None) -> NodeProto:
        """Insert a NodeProto, near `at` or behind its producers."""
        if node in self:
            raise ValueError(f"{nd.label(node)} is in the graph already")
        self._require_free(nd.outputs_of(node))
        self.require_opset(nd.domain_of(node))
        self._edit(ed.InsertNode(self, node, self._position_near(node, at)))
        return node

    def remove(self, node: NodeProto) -> None:
        """Remove a node whose results are unused."""
        for name in nd.outputs_of(node):
            if not self.is_unused(name):
                raise ValueError(f"cannot remove {nd.label(node)}: '{name}' is still used")
        self._edit(ed.RemoveNode(self, node, self._position[id(node)]))

    def set_inputs(self, node: NodeProto, values: Sequence[str]) -> None:
        """Replace all operands of a node."""
        old, new = list(node.input), list(values)
        if old != new:
            self._edit(ed.SetInputs(self, node, old, new))

    def set_outputs(self, node: NodeProto, values: Sequence[str]) -> None:
        """Rename the results of a node, but not their uses."""
        if node not in self:
            raise ValueError(f"{nd.label(node)} is not in the graph")
        old, new = list(node.output), list(values)
        self._require_free(name for name in new if name and name not in old)
        if old != new:
            self._edit(ed.SetOutputs(self, node, old, new))

    def set_op(self, node: NodeProto, op_type: str, domain: str = "") -> None:
        """Replace the operator of a node."""
        self.require_opset(domain)
        old = node.op_type, node.domain
        self._edit(ed.SetOperator(self, node, old, (op_type, domain)))

    def set_attr(self, node: NodeProto, name: str, value: Any) -> None:
        """Set an attribute; None deletes it. Subgraphs are edited as graphs instead."""
        before = [a for a in node.attribute if a.name == name]
        old = NodeProto().attribute
        old.extend(before)
        new = [] if value is None else [helper.make_attribute(name, value)]
        self._edit(ed.SetAttribute(self, node, name, old, new))

    def set_type(self, value: str, type_: TensorType) -> None:
        """Declare the type of a value; snapshots contain it."""
        known, annotated = self._types.get(value), self._annotated.get(value)
        declared = self._declared.get(value)
        if annotated != type_ and (declared is None or known != type_):
            self._edit(ed.SetType(self, value, (known, annotated), (type_, type_)))

    def put_initializer(self, tensor: TensorProto) -> None:
        """Add or replace the initializer of this name."""
        if self.model.ir_version < 4 and tensor.name not in self._input_names:
            self.model.free_initializers()
        old = self._initializers.get(tensor.name)
        self._edit(ed.SetInitializer(self, tensor.name, old, tensor))

    def drop_initializer(self, name: str) -> None:
        """Remove an initializer."""
        self._edit(ed.SetInitializer(self, name, self._initializers[name], None))

    def set_interface(
        self,
        inputs: list[ValueInfoProto] | None = None,
        outputs: list[ValueInfoProto] | None = None,
    ) -> None:
        """Replace the declared inputs or outputs; in the main graph this changes the interface."""
        old = self._inputs, self._outputs
        new = (old[0] if inputs is None else inputs), (old[1] if outputs is None else outputs)
        self._edit(ed.SetInterface(self, old, new))

    def require_opset(self, domain: str, version: int = 1) -> None:
        """Import an operator domain unless it is imported."""
        self.model.require_opset(nd.plain_domain(domain), version)

    # -- composed edits

    def add(
        self,
        op_type: str,
        inputs: Sequence[str],
        outputs: int | Sequence[str] = 1,
        attrs: Mapping[str, Any] | None = None,
        domain: str = "",
        name: str = "",
        at: NodeProto | None = None,
    ) -> NodeProto:
        """Add a node; `outputs` is the number of results, which get fresh names, or their names."""
        if isinstance(outputs, int):
            hint = name or op_type.lower()
            outputs = [self.fresh(hint) for _ in range(outputs)]
        node = nd.make_node(op_type, inputs, outputs, attrs, domain, name or self.fresh(op_type))
        return self.insert(node, at)

    def op(
        self,
        op_type: str,
        *inputs: str,
        domain: str = "",
        at: NodeProto | None = None,
        **attributes: Any,
    ) -> str:
        """Add a node with one result and return its name."""
        node = self.add(op_type, inputs, 1, attributes, domain, at=at)
        return node.output[0]

    def constant(self, array: Array, hint: str = "const") -> str:
        """Add an initializer and return its name."""
        name = self.fresh(hint)
        self.put_initializer(self.model.weights.put(name, np.asarray(array)))
        return name

    def set_input(self, node: NodeProto, index: int, value: str) -> None:
        """Replace one operand of a node."""
        values = list(node.input)
        values[index] = value
        self.set_inputs(node, values)

    def del_attr(self, node: NodeProto, name: str) -> None:
        """Delete an attribute."""
        self.set_attr(node, name, None)

    def replace(self, old: str, new: str) -> str:
        """Replace all uses of `old` by `new`; a graph output keeps its name.

        `new` inherits the type and symbolic contents of `old`, since the values are equal. Returns
        the resulting name of the value: `new`, or `old` if that is the name of an output.
        """
        self._inherit(old, new)
        if not self.is_output(old):
            self._redirect(old, new)
            return new
        producer = self._producers.get(old)
        if producer is None:
            raise ValueError(
                f"'{old}' is both input and output of the graph: it cannot be replaced"
            )
        self._rename_output(producer, old, self.fresh(old))
        producer = self._producers.get(new)
        if producer is not None and not self.is_output(new):
            self._rename_output(producer, new, old)
            self._redirect(new, old)
            return old
        self._redirect(old, new)
        self.add("Identity", [new], [old])
        return new

    def lift(self, node: NodeProto, tensor: TensorProto) -> None:
        """Replace a node with one result by an initializer of the same name with these contents."""
        value = node.output[0]
        self.set_outputs(node, [self.fresh(value)])
        self.remove(node)
        stored = TensorProto()
        stored.CopyFrom(tensor)
        stored.name = value
        self.put_initializer(stored)

    def prune(self, node: NodeProto) -> None:
        """Remove `node` if its results are unused, then the producers that this leaves unused."""
        pending = [node]
        while pending:
            node = pending.pop()
            if id(node) not in self._nodes or not all(map(self.is_unused, nd.outputs_of(node))):
                continue
            used = [*nd.inputs_of(node), *self.captures_of(node)]
            self.remove(node)
            producers = (self._producers.get(name) for name in dict.fromkeys(used))
            pending.extend(p for p in producers if p is not None)

    def perform(self, edit: ed.GraphEdit) -> None:
        """Carry out an edit without recording it; the journal calls this."""
        match edit:
            case ed.InsertNode():
                self._attach(edit.node, edit.position)
            case ed.RemoveNode():
                self._detach(edit.node)
            case ed.SetInputs():
                self._set_operands(edit.node, edit.after)
            case ed.SetOperand():
                self._set_operand(edit.node, edit.slots, edit.after)
            case ed.SetOutputs():
                self._set_results(edit.node, edit.after)
            case ed.SetOperator():
                edit.node.op_type, edit.node.domain = edit.after
            case ed.SetAttribute():
                _set_attr(edit.node, edit.name, edit.after)
            case ed.SetInitializer():
                self._store(edit.value, edit.after)
            case ed.SetType():
                _restore(self._types, edit.value, edit.after[0])
                _restore(self._annotated, edit.value, edit.after[1])
            case ed.SetData():
                _restore(self._data, edit.value, edit.after)
            case ed.SetInterface():
                self._declare(edit.after)
            case _:
                raise TypeError(f"{edit!r} is not an edit of a graph")

    # -- snapshots

    def verify(self) -> None:
        """Assert that the index equals one that is built from scratch (for tests)."""
        copy = GraphProto()
        self.write(copy)
        fresh = Graph(self.model, copy, self.parent and _Silent(self.parent), self.owner)
        fresh._compare(self)
        assert fresh._input_names == self._input_names, "inputs are stale"
        for node, twin in zip(self.nodes, fresh.nodes, strict=True):
            for child, other in zip(self.subgraphs(node), fresh.subgraphs(twin), strict=True):
                assert child.parent is self
                assert child.owner is node
                other._compare(child)
                child.verify()

    # -- internals

    def _make_children(self, node: NodeProto) -> list[Graph]:
        return [Graph(self.model, g, self, node) for g in nd.graphs_of(node)]

    def _edit(self, edit: ed.GraphEdit) -> None:
        self.model.journal.apply(edit)

    def _require_free(self, names: Iterable[str]) -> None:
        for name in names:
            if self.is_defined(name):
                raise ValueError(f"'{name}' is defined in the graph already; use `fresh`")

    def _declare(self, interface: tuple[list[ValueInfoProto], list[ValueInfoProto]]) -> None:
        self._hide_outputs()
        with self._changing_scope({v.name for v in (*self._inputs, *interface[0])}):
            self._inputs, self._outputs = interface
            self._input_names = {v.name for v in self._inputs}
        self._expose_outputs()

    def _store(self, name: str, tensor: TensorProto | None) -> None:
        with self._changing_scope([name]):
            _restore(self._initializers, name, tensor)
        self.forget([name])

    def _rename_output(self, node: NodeProto, old: str, new: str) -> None:
        self.set_outputs(node, [new if name == old else name for name in node.output])

    def _redirect(self, old: str, new: str) -> None:
        """Replace the uses of `old`, here and in subgraphs, by `new`."""
        for node in list(self._users.get(old, {}).values()):
            self._replace_input(node, old, new)
        for owner in list(self._captures.get(old, ())):
            for child in self._children[owner]:
                if not child.is_defined(old):
                    child._redirect(old, new)
                    child._redirect_output(old, new)

    def _replace_input(self, node: NodeProto, old: str, new: str) -> None:
        """Edit only the slots that change: a node may have thousands of others."""
        slots = [slot for slot, name in enumerate(node.input) if name == old]
        if new in node.input:  # an undo could not distinguish the slots of both
            self.set_inputs(node, [new if name == old else name for name in node.input])
        else:
            self._edit(ed.SetOperand(self, node, slots, old, new))

    def _redirect_output(self, old: str, new: str) -> None:
        if old in self._output_names:
            renamed: list[ValueInfoProto] = []
            for declared in self._outputs:
                copy = ValueInfoProto()
                copy.CopyFrom(declared)
                copy.name = new if copy.name == old else copy.name
                renamed.append(copy)
            self.set_interface(outputs=renamed)

    def _inherit(self, old: str, new: str) -> None:
        """Copy the type and contents of `old` to `new`; undone with the rewrite."""
        type_ = self.type(old)
        if type_ is not None and self.type(new) is None:
            annotated = self._annotated.get(new)
            self._edit(ed.SetType(self, new, (None, annotated), (type_, annotated)))
        contents = self._data.get(old)
        if contents is not None and new not in self._data:
            self._edit(ed.SetData(self, new, None, contents))


class _Silent(Graph):
    """A parent that ignores captures, for `verify`."""

    def __init__(self, graph: Graph) -> None:
        self.__dict__ = dict(graph.__dict__)

    def _capture(self, name: str, owner: NodeProto, change: int) -> None:
        return


def _set_attr(node: NodeProto, name: str, replacement: Iterable[AttributeProto]) -> None:
    for index in range(len(node.attribute) - 1, -1, -1):
        if node.attribute[index].name == name:
            del node.attribute[index]
    node.attribute.extend(replacement)


def _restore(table: dict[str, Any], key: str, value: Any) -> None:
    if value is None:
        table.pop(key, None)
    else:
        table[key] = value
