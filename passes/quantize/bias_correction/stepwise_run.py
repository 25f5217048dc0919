"""Run a model on several samples in steps, each of which may run again with another bias.

Values with pending users are kept for every sample, others are dropped. A step runs the nodes
between the kept values and one value, with one of their inputs (a bias) supplied by the caller, any
number of times, and then advances. All steps together run the model about twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from onnx import ModelProto, NodeProto, ValueInfoProto, helper

from toolkit.errors import ToolkitError
from toolkit.ir import Array, Model, node as nd
from toolkit.runtime.session import Session

_SUPPLIED = "supplied by the caller"


class CannotAdvance(ToolkitError):
    """The run cannot continue; the message names the reason."""


class StepwiseRun:
    """The state of all samples between two steps. Only biases of the model may change meanwhile."""

    def __init__(
        self, model: Model, feeds: Sequence[dict[str, Any]], custom_ops: Sequence[str] = ()
    ) -> None:
        self.model = model
        self.kept: list[dict[str, Any]] = [dict(feed) for feed in feeds]
        self._custom_ops = custom_ops
        self.done: set[int] = set()
        """The ids of the nodes that have run."""
        self._shell = model.to_proto()
        self._shell.ClearField("graph")

    def nbytes(self) -> int:
        """Return the size of all kept values."""
        return sum(np.asarray(v).nbytes for state in self.kept for v in state.values())

    def step(self, value: str, node: NodeProto, slot: int) -> RunStep | None:
        """Return the step to `value` with input `slot` of `node` supplied; None if it has run."""
        g = self.model.graph
        producer = g.producer(value)
        if producer is None or id(producer) in self.done or id(node) in self.done:
            return None
        nodes = self._pending_for(producer)
        return RunStep(self, nodes, value, node, slot)

    def _pending_for(self, last: NodeProto) -> list[NodeProto]:
        """Return the pending nodes that `last` depends on, in graph order."""
        g = self.model.graph
        found: dict[int, NodeProto] = {}
        pending = [last]
        while pending:
            node = pending.pop()
            if id(node) in found or id(node) in self.done:
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
        produced = {name for n in nodes for name in nd.outputs_of(n)}
        used: dict[str, None] = {}
        for original in nodes:
            copy = g.snapshot(original)
            if original is node:
                inputs = [*copy.input]
                inputs.extend([""] * (slot + 1 - len(inputs)))
                inputs[slot] = _SUPPLIED
                copy.input[:] = inputs
            proto.graph.node.append(copy)
            used.update(dict.fromkeys((*nd.inputs_of(copy), *g.captures_of(original))))
        fed: list[str] = []
        for name in used:
            if name in g.initializers and name not in self.kept[0]:
                proto.graph.initializer.append(g.initializers[name])
            elif name not in produced and name != _SUPPLIED:
                fed.append(name)
                proto.graph.input.append(_declared(name, self.kept[0].get(name)))
        proto.graph.input.append(_declared(_SUPPLIED, np.zeros(0, np.float32)))
        proto.graph.output.extend(ValueInfoProto(name=name) for name in outputs)
        proto.graph.name = "step"
        piece = Model(proto, self.model.weights, self.model.path)
        return Session(piece, custom_ops=self._custom_ops), fed

    def mark_run(self, nodes: Sequence[NodeProto]) -> None:
        """Mark the nodes as run and drop values without pending users."""
        self.done.update(id(node) for node in nodes)
        for state in self.kept:
            for name in [n for n in state if not self.has_pending_users(n, self.done)]:
                del state[name]

    def has_pending_users(self, name: str, run: set[int]) -> bool:
        return any(id(user) not in run for user in self.model.graph.users(name))


class RunStep:
    """The nodes between the kept values and one value."""

    def __init__(
        self, run: StepwiseRun, nodes: list[NodeProto], value: str, node: NodeProto, slot: int
    ) -> None:
        self._run, self._nodes = run, nodes
        done = {*run.done, *map(id, nodes)}
        results = (name for n in nodes for name in nd.outputs_of(n))
        self._needed = [name for name in results if run.has_pending_users(name, done)]
        outputs = list(dict.fromkeys((value, *self._needed)))
        self._session, self._fed = run.session(nodes, outputs, node, slot)
        self._outputs = outputs
        self._supplied: Array | None = None
        self._results: list[list[Any]] = []

    def run(self, supplied: Array) -> list[Array]:
        """Return the value of every sample."""
        feeds = [self._feed(state, supplied) for state in self._run.kept]
        self._supplied, self._results = supplied, [self._session.run(feed) for feed in feeds]
        return [found[0] for found in self._results]

    def advance(self, supplied: Array) -> None:
        """Advance all samples past these nodes."""
        if self._needed:
            if self._supplied is None or not np.array_equal(supplied, self._supplied):
                self.run(supplied)
            for state, found in zip(self._run.kept, self._results, strict=True):
                values = dict(zip(self._outputs, found, strict=True))
                state.update((name, values[name]) for name in self._needed)
        self._run.mark_run(self._nodes)

    def _feed(self, state: dict[str, Any], supplied: Array) -> dict[str, Any]:
        missing = next((name for name in self._fed if name not in state), None)
        if missing is not None:
            raise CannotAdvance(f"'{missing}' was dropped in an earlier step")
        return {_SUPPLIED: supplied, **{name: state[name] for name in self._fed}}


def _declared(name: str, value: object) -> ValueInfoProto:
    if not isinstance(value, np.ndarray):
        raise CannotAdvance(f"'{name}' is not a tensor")
    info = ValueInfoProto(name=name)
    kind = cast("Array", value).dtype
    info.type.tensor_type.elem_type = helper.np_dtype_to_tensor_dtype(kind)
    return info
