"""Run a model on several samples step by step, each node only when it is needed.

Values with pending users are kept for every sample, others are dropped. A step runs the nodes
between the kept values and one value, with one of their inputs (a bias) supplied by the caller, any
number of times, and then advances. All steps together run the model twice.
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
    """The run cannot continue; the message gives the reason."""


class StepwiseRun:
    """The state of all samples between two steps; the model must not change except for biases."""

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
        """Return the size of all kept values."""
        return sum(np.asarray(v).nbytes for state in self.kept for v in state.values())

    def forget_from(self, count: int) -> None:
        """Drop all but the first samples."""
        del self.kept[count:]

    def step(self, value: str, node: NodeProto, slot: int) -> RunStep | None:
        """Return the step to `value` with input `slot` of `node` supplied; None if it has run."""
        g = self.model.graph
        producer = g.producer(value)
        if producer is None or id(producer) in self._done or id(node) in self._done:
            return None
        nodes = self._missing(producer)
        return RunStep(self, nodes, value, node, slot)

    def _missing(self, last: NodeProto) -> list[NodeProto]:
        """Return the pending nodes that `last` depends on, in graph order."""
        g = self.model.graph
        found: dict[int, NodeProto] = {}
        pending = [last]
        while pending:
            node = pending.pop()
            if id(node) in found or id(node) in self._done:
                continue
            found[id(node)] = node
            for name in (*nd.inputs_of(node), *g.captures_of(node)):
                producer = g.producer(name)
                if producer is not None:
                    pending.append(producer)
        return [node for node in g.nodes if id(node) in found]

    def session(
        self, nodes: Sequence[NodeProto], outputs: Sequence[str], node: NodeProto, slot: int
    ) -> tuple[Session, list[str]]:
        """Return a session for these nodes, and the names of its feeds."""
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
        """Return the results of these nodes that pending nodes use."""
        run = self._done | {id(node) for node in nodes}
        made = (name for node in nodes for name in nd.outputs_of(node))
        return [name for name in made if self._is_read(name, run)]

    def went(self, nodes: Sequence[NodeProto]) -> None:
        """Mark the nodes as run and drop values without pending users."""
        self._done.update(id(node) for node in nodes)
        for state in self.kept:
            for name in [n for n in state if not self._is_read(n, self._done)]:
                del state[name]

    def _is_read(self, name: str, run: set[int]) -> bool:
        return any(id(user) not in run for user in self.model.graph.users(name))


class RunStep:
    """The nodes between the kept values and one value."""

    def __init__(
        self, walk: StepwiseRun, nodes: list[NodeProto], value: str, node: NodeProto, slot: int
    ) -> None:
        self._walk, self._nodes = walk, nodes
        self._needed = walk.needed_behind(nodes)
        outputs = list(dict.fromkeys((value, *self._needed)))
        self._session, self._fed = walk.session(nodes, outputs, node, slot)
        self._outputs = outputs
        self._given: Array | None = None
        self._results: list[list[Any]] = []

    def run(self, given: Array) -> list[Array]:
        """Return the value of every sample."""
        feeds = [self._feed(state, given) for state in self._walk.kept]
        self._given, self._results = given, [self._session.run(feed) for feed in feeds]
        return [found[0] for found in self._results]

    def go(self, given: Array) -> None:
        """Advance all samples past these nodes."""
        if self._needed:
            if self._given is None or not np.array_equal(given, self._given):
                self.run(given)
            for state, found in zip(self._walk.kept, self._results, strict=True):
                values = dict(zip(self._outputs, found, strict=True))
                state.update((name, values[name]) for name in self._needed)
        self._walk.went(self._nodes)

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
