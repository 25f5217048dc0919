"""The interface of adapters: one node, the types of its values, and how to refuse."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import GraphProto, NodeProto, helper, shape_inference

from passes.analysis.operands import given
from toolkit.ir import Graph, Model, TensorType, from_proto, node as nd

Array = NDArray[Any]


class CannotConvert(Exception):
    """Raised for a node that has no equivalent in the other opset; the message says why."""


class Types:
    """The types of values: those the graph knows, else those ONNX's shape inference finds.

    Create it while all nodes of the model are still at one opset.
    """

    def __init__(self, model: Model, infer: bool) -> None:
        """`infer`: run shape inference now, before nodes of two opsets mix."""
        self._inferred: dict[tuple[int, str], TensorType] = {}
        if infer:
            try:
                proto = shape_inference.infer_shapes(model.to_proto(), data_prop=True)
            except (shape_inference.InferenceError, ValueError):
                return  # fall back to the types the graph knows
            self._read(model.graph, proto.graph)

    def of(self, graph: Graph, value: str) -> TensorType | None:
        known = graph.type(value)
        if known is not None and known.dtype and known.shape is not None:
            return known
        scope = graph.scope_of(value)
        return self._inferred.get((id(scope), value), known)

    def _read(self, graph: Graph, proto: GraphProto) -> None:
        for declared in proto.value_info:
            found = from_proto(declared.type)
            if found is not None:
                self._inferred[id(graph), declared.name] = found
        for node, written in zip(graph.nodes, proto.node, strict=True):
            for child, inner in zip(graph.subgraphs(node), nd.graphs_of(written), strict=True):
                self._read(child, inner)


@dataclass(frozen=True, slots=True)
class AdapterContext:
    """One node whose operator changes with the opset, and the edits an adapter makes to it."""

    graph: Graph
    node: NodeProto
    types: Types

    # -- reading

    def attr(self, name: str, default: Any = None) -> Any:
        return nd.attr(self.node, name, default)

    def input(self, index: int) -> str:
        """Return the name of an input; blank when it is omitted."""
        return given(self.node, index)

    def used_outputs(self, start: int) -> list[str]:
        """Return the outputs from index `start` on that have users."""
        return [v for v in self.node.output[start:] if v and not self.graph.is_unused(v)]

    def rank(self, value: str) -> int | None:
        found = self.types.of(self.graph, value)
        return None if found is None else found.rank

    def sizes(self, value: str) -> tuple[int | None, ...] | None:
        """Return the dimensions of `value`, None for a symbolic one; None for an unknown rank."""
        found = self.types.of(self.graph, value)
        if found is None or found.shape is None:
            return None
        return tuple(d if isinstance(d, int) else None for d in found.shape)

    def dtype(self, value: str) -> np.dtype[Any]:
        """Return the element type of `value`, for constants that must match it."""
        found = self.types.of(self.graph, value)
        if found is None or not found.dtype:
            raise CannotConvert(f"the element type of '{value}' is unknown")
        return helper.tensor_dtype_to_np_dtype(found.dtype)

    def const(self, value: str, what: str) -> Array:
        """Return the contents of a constant that has to become `what`."""
        known = self.graph.const(value)
        if known is None:
            raise CannotConvert(f"{what} is computed at run time, and older opsets need a constant")
        return known

    def known_rank(self, value: str) -> int:
        rank = self.rank(value)
        if rank is None:
            raise CannotConvert(f"the rank of '{value}' is unknown")
        return rank

    # -- editing

    def take(self, name: str, default: Any = None) -> Any:
        """Remove an attribute and return its value."""
        value = self.attr(name, None)
        if value is None:
            return default
        self.graph.del_attr(self.node, name)
        return value

    def set(self, **attributes: Any) -> None:
        for name, value in attributes.items():
            self.graph.set_attr(self.node, name, value)

    def constant(self, values: Any, dtype: Any = np.int64, hint: str = "const") -> str:
        return self.graph.constant(np.asarray(values, dtype=dtype), hint)

    def op(self, op_type: str, *inputs: str, **attributes: Any) -> str:
        """Add a node next to this one and return its output."""
        value = self.graph.op(op_type, *inputs, at=self.node, **attributes)
        if op_type == "Cast":
            self.graph.learn_type(value, TensorType(attributes["to"], None))
        return value

    def set_inputs(self, *values: str) -> None:
        """Set the inputs, without trailing blanks."""
        self.graph.set_inputs(self.node, nd.without_blanks(values))

    def hand_over(self, index: int = 0) -> tuple[str, str]:
        """Rename an output; return (new name, old name), the old one free to be redefined."""
        outputs = list(self.node.output)
        old = outputs[index]
        outputs[index] = self.graph.fresh(old)
        self.graph.set_outputs(self.node, outputs)
        return outputs[index], old

    def define(self, value: str, op_type: str, *inputs: str, **attributes: Any) -> None:
        """Add a node next to this one that defines `value`."""
        self.graph.add(op_type, inputs, [value], attributes, at=self.node)

    def become(self, op_type: str, *inputs: str, **attributes: Any) -> None:
        """Turn the node into another operator with one result."""
        for attribute in list(self.node.attribute):
            self.graph.del_attr(self.node, attribute.name)
        self.graph.set_outputs(self.node, self.node.output[:1])
        self.graph.set_op(self.node, op_type)
        before = nd.inputs_of(self.node)
        self.set_inputs(*inputs)
        self.set(**attributes)
        self.drop_unused(before)

    def drop_unused(self, values: Iterable[str]) -> None:
        """Remove constants that have lost their last user."""
        for value in dict.fromkeys(filter(None, values)):
            scope = self.graph.scope_of(value)
            if scope is None or not scope.is_unused(value) or scope.is_pinned(value):
                continue
            producer = scope.producer(value)
            if nd.is_op(producer, "Constant"):
                assert producer is not None
                scope.remove(producer)
            elif value in scope.initializers and not scope.is_input(value):
                scope.drop_initializer(value)


Adapter = Callable[[AdapterContext], None]
"""Rewrites a node for the neighbouring opset; raises CannotConvert where that is impossible."""
