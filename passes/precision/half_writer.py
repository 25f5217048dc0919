"""Writing nodes in 16-bit floats, one at a time; the graph is valid after each.

A value in 16 bits gets a name of its own, and a Cast back defines the name that it had: whoever
still reads that, be it a node of 32 bits, a subgraph or the model's caller, reads what it did.
Casts that nobody reads are removed at the end. What came from 16 bits, or from an integer, is cast
from there: no Cast follows a Cast.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import DTypeLike
from onnx import NodeProto, TensorProto, ValueInfoProto

from passes.analysis.node_filter import matches
from passes.precision.half_selection import Slots, unfit
from toolkit.ir import node as nd
from toolkit.ir.graph import Array, Graph
from toolkit.ir.model import Model
from toolkit.ir.tensor_type import TensorType
from toolkit.storage.spill import allocate

_Key: TypeAlias = tuple[int, str]
_CHUNK = 1 << 20


class Halves:
    """The values that exist in 16 bits so far, by graph and the name in 32 bits."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._names: dict[_Key, str] = {}
        self._back: list[tuple[Graph, NodeProto]] = []

    def convert(self, g: Graph, node: NodeProto, slots: Slots) -> None:
        """Let a node compute in 16 bits."""
        if not g.begin("fp16", node):
            return
        before = list(node.input)
        inputs = list(before)
        for place in slots.inputs:
            inputs[place] = self._half(g, inputs[place])
        g.set_inputs(node, inputs)
        for name in dict.fromkeys(before[place] for place in slots.inputs):
            _let_go(g, name)
        old = [node.output[place] for place in slots.outputs]
        outputs = list(node.output)
        for place in slots.outputs:
            outputs[place] = g.fresh(outputs[place])
        g.set_outputs(node, outputs)
        for name, place in zip(old, slots.outputs, strict=True):
            self._define(g, name, outputs[place])

    def take_inputs(self) -> None:
        """Let the model's inputs be in 16 bits."""
        g = self._model.graph
        declared = g.interface_inputs()
        floats = {v.name for v in declared if _is_float(v) and v.name not in g.initializers}
        for name in [v.name for v in declared if v.name in floats]:
            inside = g.fresh(name)
            shape = g.shape(name)
            g.replace(name, inside)
            g.add("Cast", [name], [inside], {"to": TensorProto.FLOAT})
            g.learn_type(inside, TensorType(TensorProto.FLOAT, shape))
            self._names[id(g), inside] = name
            producer = g.producer(inside)
            if producer is not None:
                self._back.append((g, producer))
        g.set_interface(inputs=[_halved(v) if v.name in floats else v for v in declared])

    def give_outputs(self) -> list[str]:
        """Let the model's outputs be in 16 bits; those that cannot."""
        g = self._model.graph
        declared = g.interface_outputs()
        halved: set[str] = set()
        left: list[str] = []
        for name in [v.name for v in declared if _is_float(v)]:
            half = self._names.get((id(g), name))
            if half is None or g.is_input(half) or g.is_output(half):
                left.append(name)
            else:
                g.replace(name, half)
                halved.add(name)
        if halved:
            g.set_interface(outputs=[_halved(v) if v.name in halved else v for v in declared])
            self.settle()
        return left

    def settle(self) -> None:
        """Remove the casts that nobody reads, and those behind another one."""
        for g, cast in self._back:
            if cast not in g:
                continue
            (half,) = cast.input
            for user in g.users(cast.output[0]):
                if not nd.is_op(user, "Cast") or user not in g:
                    continue
                same = nd.attr(user, "to") == TensorProto.FLOAT16
                if same and not g.is_output(user.output[0]):
                    g.replace(user.output[0], half)
                    g.prune(user)
                else:
                    g.set_input(user, 0, half)
            g.prune(cast)

    def _half(self, g: Graph, name: str) -> str:
        scope = g.scope_of(name) or g
        key = id(scope), name
        if key not in self._names:
            self._names[key] = self._made(scope, name)
        return self._names[key]

    def _made(self, g: Graph, name: str) -> str:
        floats = g.const(name)
        if floats is not None:
            return g.constant(converted(floats, np.float16), name)
        maker = g.producer(name)
        source = name
        if nd.is_op(maker, "Cast") and maker is not None:
            kind = g.dtype(maker.input[0])
            if kind == TensorProto.FLOAT16:
                return maker.input[0]
            if kind not in (0, TensorProto.DOUBLE):
                source = maker.input[0]
        made = g.op("Cast", source, to=TensorProto.FLOAT16)
        g.learn_type(made, TensorType(TensorProto.FLOAT16, g.shape(name)))
        return made

    def _define(self, g: Graph, name: str, half: str) -> None:
        """`name` as the Cast of `half`."""
        g.learn_type(half, TensorType(TensorProto.FLOAT16, g.shape(name)))
        self._back.append((g, g.add("Cast", [half], [name], {"to": TensorProto.FLOAT})))
        self._names[id(g), name] = half


def store_weights(model: Model, keep: Sequence[str], at_least: int) -> Iterator[tuple[str, str]]:
    """Store weights in 16 bits, with a Cast behind each; yields those that stay, and why."""
    for g in list(model.graphs()):
        for name, tensor in list(g.initializers.items()):
            elements = int(np.prod(tensor.dims))
            if tensor.data_type != TensorProto.FLOAT or elements < at_least:
                continue
            users = g.users(name)
            if g.is_input(name) or g.is_pinned(name) or g.is_output(name) or not users:
                continue
            if any(matches(user, keep) for user in users):
                continue
            floats = g.const(name)
            reason = unfit(floats) if floats is not None else ""
            if reason:
                yield name, f"numbers {reason}"
            elif floats is not None and g.begin("fp16-storage", users[0]):
                shape = g.shape(name)
                half = g.constant(converted(floats, np.float16), name)
                full = g.fresh(name)
                g.replace(name, full)
                g.add("Cast", [half], [full], {"to": TensorProto.FLOAT})
                g.learn_type(full, TensorType(TensorProto.FLOAT, shape))
                g.drop_initializer(name)


def converted(floats: Array, dtype: DTypeLike) -> Array:
    """The nearest floats of another type, a piece at a time; large ones are mapped to a file."""
    found = allocate(floats.shape, dtype)
    source, target = floats.reshape(-1), found.reshape(-1)
    for start in range(0, source.size, _CHUNK):
        target[start : start + _CHUNK] = source[start : start + _CHUNK]
    found.flags.writeable = False
    return found


def _let_go(g: Graph, name: str) -> None:
    """Remove a constant, or a Cast to 32 bits, that nobody reads any more."""
    scope = g.scope_of(name)
    if scope is None or not scope.is_unused(name) or scope.is_input(name):
        return
    maker = scope.producer(name)
    if maker is not None and nd.is_op(maker, "Constant", "Cast"):
        scope.prune(maker)
    elif name in scope.initializers and not scope.is_pinned(name):
        scope.drop_initializer(name)


def _is_float(value: ValueInfoProto) -> bool:
    return value.type.tensor_type.elem_type == TensorProto.FLOAT


def _halved(value: ValueInfoProto) -> ValueInfoProto:
    copy = ValueInfoProto()
    copy.CopyFrom(value)
    copy.type.tensor_type.elem_type = TensorProto.FLOAT16
    return copy
