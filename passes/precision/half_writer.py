"""Convert nodes to float16, one at a time; the graph is valid after each.

A float16 value gets a new name, and a Cast back to float32 defines the old name: its other users
(float32 nodes, subgraphs, outputs) are unaffected. Dead Casts are removed at the end. A value cast
from float16 or an integer is cast again from there: no Cast follows a Cast.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import DTypeLike
from onnx import NodeProto, TensorProto, ValueInfoProto

from passes.analysis.node_filter import matches
from passes.precision.half_selection import Slots, unfit
from toolkit.ir import Array, Graph, Model, TensorType, node as nd
from toolkit.storage.spill import allocate

_Key: TypeAlias = tuple[int, str]
_CHUNK = 1 << 20
"""Elements converted at a time."""


class Halves:
    """The float16 versions of values so far, by graph and float32 name."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._names: dict[_Key, str] = {}
        self._back: list[tuple[Graph, NodeProto]] = []

    def convert(self, g: Graph, node: NodeProto, slots: Slots) -> None:
        """Make a node compute in float16."""
        if not g.begin("fp16", node):
            return
        before, old = list(node.input), list(node.output)
        halves = {index: self._half(g, before[index]) for index in slots.inputs}
        g.set_inputs(node, [halves.get(i, name) for i, name in enumerate(before)])
        for name in dict.fromkeys(before[index] for index in slots.inputs):
            _remove_if_dead(g, name)
        results = {index: g.fresh(old[index]) for index in slots.outputs}
        g.set_outputs(node, [results.get(i, name) for i, name in enumerate(old)])
        for index, half in results.items():
            self._define(g, old[index], half)

    def take_inputs(self) -> None:
        """Declare the model's inputs as float16."""
        g = self._model.graph
        declared = g.interface_inputs()
        floats = [v.name for v in declared if _is_float(v) and v.name not in g.initializers]
        for name in floats:
            cast = _cast_instead(g, name, name)
            self._names[id(g), cast.output[0]] = name
            self._back.append((g, cast))
        half = TensorProto.FLOAT16
        g.set_interface(inputs=[retyped(v, half) if v.name in floats else v for v in declared])

    def give_outputs(self) -> list[str]:
        """Declare the model's outputs as float16; return the outputs that stay in float32."""
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
            kind = TensorProto.FLOAT16
            g.set_interface(outputs=[retyped(v, kind) if v.name in halved else v for v in declared])
            self.settle()
        return left

    def settle(self) -> None:
        """Remove dead Casts, and merge a Cast with the one before it."""
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
            self._names[key] = _as_half(scope, name)
        return self._names[key]

    def _define(self, g: Graph, name: str, half: str) -> None:
        """Define `name` as the Cast of `half`."""
        g.learn_type(half, TensorType(TensorProto.FLOAT16, g.shape(name)))
        self._back.append((g, g.add("Cast", [half], [name], {"to": TensorProto.FLOAT})))
        self._names[id(g), name] = half


def _as_half(g: Graph, name: str) -> str:
    """Return a constant in float16, or a Cast of `name` or of the value it was cast from."""
    floats = g.const(name)
    if floats is not None:
        return g.constant(converted(floats, np.float16), name)
    producer = g.producer(name)
    source = name
    if nd.is_op(producer, "Cast") and producer is not None:
        kind = g.dtype(producer.input[0])
        if kind == TensorProto.FLOAT16:
            return producer.input[0]
        if kind not in (0, TensorProto.DOUBLE):
            source = producer.input[0]
    made = g.op("Cast", source, to=TensorProto.FLOAT16)
    g.learn_type(made, TensorType(TensorProto.FLOAT16, g.shape(name)))
    return made


def store_weights(model: Model, keep: Sequence[str], at_least: int) -> Iterator[tuple[str, str]]:
    """Store weights in float16, each before a Cast; yield skipped weights with the reason."""
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
                yield name, f"a constant {reason}"
            elif floats is not None and g.begin("fp16-storage", users[0]):
                _cast_instead(g, name, g.constant(converted(floats, np.float16), name))
                g.drop_initializer(name)


def _cast_instead(g: Graph, name: str, half: str) -> NodeProto:
    """Replace `name` with a Cast of `half` to float32; return the Cast."""
    full, shape = g.fresh(name), g.shape(name)
    g.replace(name, full)
    cast = g.add("Cast", [half], [full], {"to": TensorProto.FLOAT})
    g.learn_type(full, TensorType(TensorProto.FLOAT, shape))
    return cast


def converted(floats: Array, dtype: DTypeLike) -> Array:
    """Convert an array to another float type, in chunks; large results are mapped to a file."""
    found = allocate(floats.shape, dtype)
    source, target = floats.reshape(-1), found.reshape(-1)
    for start in range(0, source.size, _CHUNK):
        target[start : start + _CHUNK] = source[start : start + _CHUNK]
    found.flags.writeable = False
    return found


def _remove_if_dead(g: Graph, name: str) -> None:
    """Remove a constant, or a Cast to float32, without users."""
    scope = g.scope_of(name)
    if scope is None or not scope.is_unused(name) or scope.is_input(name):
        return
    producer = scope.producer(name)
    if producer is not None and nd.is_op(producer, "Constant", "Cast"):
        scope.prune(producer)
    elif name in scope.initializers and not scope.is_pinned(name):
        scope.drop_initializer(name)


def _is_float(value: ValueInfoProto) -> bool:
    return value.type.tensor_type.elem_type == TensorProto.FLOAT


def retyped(value: ValueInfoProto, dtype: int) -> ValueInfoProto:
    """Return a declaration with another element type."""
    copy = ValueInfoProto()
    copy.CopyFrom(value)
    copy.type.tensor_type.elem_type = dtype
    return copy
