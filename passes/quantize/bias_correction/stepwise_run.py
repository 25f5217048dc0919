"""A model run on several samples at once, layer by layer: each node runs when it is needed.

What later nodes will read is kept for every sample; the rest is dropped on the way. A step runs the
nodes between what is kept and a value, with one of their inputs (a bias) given from outside, as
often as one likes, and then once more to go on from there. All steps together run the model twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from onnx import ModelProto, NodeProto, ValueInfoProto, helper

from toolkit.errors import ToolkitError
from toolkit.ir import node as nd
from toolkit.ir.graph import Array
from toolkit.ir.model import Model
from toolkit.runtime.session import Session

_GIVEN = "given from outside"


class Stuck(ToolkitError):
    """The walk cannot go on; the message says why."""


class Walk:
    """The samples on their way through a model, which must not change but for what is given."""

    def __init__(
        self, model: Model, feeds: Sequence[dict[str, Any]], custom_ops: Sequence[str] = ()
    ) -> None:
        self.model = model
        self.kept: list[dict[str, Any]] = [dict(feed) for feed in feeds]
        self._custom_ops = custom_ops
        self._done: set[int] = set()
        self._shell = model.to_proto()
        self._shell.ClearField("graph")

    def nbytes(self) -> int:
        """Of all that is kept for the samples."""
        return sum(np.asarray(v).nbytes for state in self.kept for v in state.values())

    def forget_from(self, count: int) -> None:
        """Go on with the first samples only."""
        del self.kept[count:]

    def step(self, value: str, node: NodeProto, slot: int) -> Step | None:
        """The way to `value`, with what `node` reads in `slot` given; None if it was passed."""
        g = self.model.graph
        maker = g.producer(value)
        if maker is None or id(maker) in self._done or id(node) in self._done:
            return None
        nodes = self._missing(maker)
        return Step(self, nodes, value, node, slot)

    def _missing(self, last: NodeProto) -> list[NodeProto]:
        """The nodes that `last` needs and that have not run, in their order."""
        g = self.model.graph
        found: dict[int, NodeProto] = {}
        pending = [last]
        while pending:
            node = pending.pop()
            if id(node) in found or id(node) in self._done:
                continue
            found[id(node)] = node
            for name in (*nd.inputs_of(node), *g.captures_of(node)):
                maker = g.producer(name)
                if maker is not None:
                    pending.append(maker)
        return [node for node in g.nodes if id(node) in found]

    def session(
        self, nodes: Sequence[NodeProto], outputs: Sequence[str], node: NodeProto, slot: int
    ) -> tuple[Session, list[str]]:
        """These nodes as a model, and the names of what it has to be fed."""
        g = self.model.graph
        proto = ModelProto()
        proto.CopyFrom(self._shell)
        made = {name for n in nodes for name in nd.outputs_of(n)}
        read: dict[str, None] = {}
        for original in nodes:
            copy = g.snapshot(original)
            if original is node:
                inputs = [*copy.input]
                inputs.extend([""] * (slot + 1 - len(inputs)))
                inputs[slot] = _GIVEN
                copy.input[:] = inputs
            proto.graph.node.append(copy)
            read.update(dict.fromkeys((*nd.inputs_of(copy), *g.captures_of(original))))
        fed: list[str] = []
        for name in read:
            if name in g.initializers and name not in self.kept[0]:
                proto.graph.initializer.append(g.initializers[name])
            elif name not in made and name != _GIVEN:
                fed.append(name)
                proto.graph.input.append(_declared(name, self.kept[0].get(name)))
        proto.graph.input.append(_declared(_GIVEN, np.zeros(0, np.float32)))
        proto.graph.output.extend(ValueInfoProto(name=name) for name in outputs)
        proto.graph.name = "walk"
        piece = Model(proto, self.model.weights, self.model.path)
        return Session(piece, custom_ops=self._custom_ops), fed

    def needed_behind(self, nodes: Sequence[NodeProto]) -> list[str]:
        """What these nodes make for others that have not run."""
        run = self._done | {id(node) for node in nodes}
        made = (name for node in nodes for name in nd.outputs_of(node))
        return [name for name in made if self._is_read(name, run)]

    def went(self, nodes: Sequence[NodeProto]) -> None:
        """These nodes have run: drop what nobody reads any more."""
        self._done.update(id(node) for node in nodes)
        for state in self.kept:
            for name in [n for n in state if not self._is_read(n, self._done)]:
                del state[name]

    def _is_read(self, name: str, run: set[int]) -> bool:
        return any(id(user) not in run for user in self.model.graph.users(name))


class Step:
    """Some nodes, between what is kept and a value."""

    def __init__(
        self, walk: Walk, nodes: list[NodeProto], value: str, node: NodeProto, slot: int
    ) -> None:
        self._walk, self._nodes, self._value = walk, nodes, value
        self._node, self._slot = node, slot
        self._session, self._fed = walk.session(nodes, [value], node, slot)

    def run(self, given: Array) -> list[Array]:
        """The value of every sample."""
        feeds = [self._feed(state, given) for state in self._walk.kept]
        return [self._session.run(feed)[0] for feed in feeds]

    def go(self, given: Array) -> None:
        """Run for good: the samples are behind these nodes."""
        walk = self._walk
        needed = walk.needed_behind(self._nodes)
        if needed:
            session, _ = walk.session(self._nodes, needed, self._node, self._slot)
            for state in walk.kept:
                found = session.run(self._feed(state, given))
                state.update(zip(needed, found, strict=True))
        walk.went(self._nodes)

    def _feed(self, state: dict[str, Any], given: Array) -> dict[str, Any]:
        missing = next((name for name in self._fed if name not in state), None)
        if missing is not None:
            raise Stuck(f"'{missing}' is not there any more")
        return {_GIVEN: given, **{name: state[name] for name in self._fed}}


def _declared(name: str, value: object) -> ValueInfoProto:
    if not isinstance(value, np.ndarray):
        raise Stuck(f"'{name}' is no tensor")
    info = ValueInfoProto(name=name)
    kind = cast("Array", value).dtype
    info.type.tensor_type.elem_type = helper.np_dtype_to_tensor_dtype(kind)
    return info
