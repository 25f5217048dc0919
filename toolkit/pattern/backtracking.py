"""The state of one attempt to match, and how it backtracks.

What remains to be matched is a linked list of goals, `(step, value, rest)`. A step looks at its
value and returns the goals that remain after it, or False. Where there is a choice it tries each
possibility with the whole remainder (`solve`), takes back what that bound, and returns the last
possibility as if it were the only one. So a pattern without choices is a loop, and every attempt is
bounded by a number of steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from onnx import NodeProto, TensorProto

from toolkit.ir import node as nd
from toolkit.ir.graph import Array, Graph

Goal: TypeAlias = "tuple[Step, str, Goals]"
Goals: TypeAlias = Goal | Literal[False] | None
"""What remains to be matched; None: all is matched; False: it does not match."""

Step: TypeAlias = Callable[["Search", str, Goals], Goals]

MAX_STEPS = 2000
"""Goals that one attempt may look at. Rules need some dozens; only adversarial graphs need more."""

UNBOUND: Any = object()

_ROUNDING: dict[int, float] = {
    TensorProto.FLOAT16: 2e-3,
    TensorProto.BFLOAT16: 1.6e-2,
    TensorProto.FLOAT: 1e-5,
    TensorProto.DOUBLE: 1e-5,
}
"""Relative difference within which a constant of this type is the number that was meant."""


@dataclass(slots=True)
class Found:
    """A node that matched; `shared` ones may be read elsewhere, `counted` ones measure progress."""

    node: NodeProto
    shared: bool
    counted: bool


@dataclass(frozen=True, slots=True)
class Stop:
    """Where an attempt ended: how many nodes had matched, at which value, and why.

    `weight` decides between two of the same depth: 2 for an exact reason, 1 for another operator
    than expected, 0 for a constant or an input in place of an operator.
    """

    matched: int
    weight: int
    where: str
    reason: str


class Search:
    """Bindings, matched nodes and budget of one attempt; reused from attempt to attempt.

    `bound` holds three kinds of keys: names, identities of matched nodes (to Found), and pattern
    objects that occur more than once (to the value or node that they stand for).
    """

    __slots__ = (
        "_scalars",
        "bound",
        "deepest",
        "graph",
        "producer",
        "recording",
        "root",
        "steps",
        "trail",
    )

    def __init__(self, graph: Graph, recording: bool = False) -> None:
        self.graph = graph
        self.producer = graph.producer
        self.recording = recording
        self.bound: dict[Any, Any] = {}
        self.trail: list[Any] = []
        self.steps = 0
        self.root: NodeProto | None = None
        self.deepest: Stop | None = None
        self._scalars: dict[str, tuple[TensorProto | None, tuple[float, float] | None]] = {}

    def attempt(self, root: NodeProto, goals: Goals) -> bool:
        """Try from scratch to reach all goals, with `root` as the node that will be replaced."""
        self.bound.clear()
        self.trail.clear()
        self.steps = MAX_STEPS
        self.root = root
        self.deepest = None
        return self.solve(goals)

    def solve(self, goals: Goals) -> bool:
        while isinstance(goals, tuple):
            step, value, rest = goals
            self.steps -= 1
            if self.steps < 0:
                return self.recording and self.fail(value, f"gave up after {MAX_STEPS} steps")
            goals = step(self, value, rest)
        return goals is None

    def bind(self, key: Any, value: Any) -> None:
        self.bound[key] = value
        self.trail.append(key)

    def undo(self, mark: int) -> None:
        """Take back what was bound since the trail was `mark` long."""
        trail, bound = self.trail, self.bound
        while len(trail) > mark:
            del bound[trail.pop()]

    def found(self, node: NodeProto, shared: bool, counted: bool = True) -> None:
        """Note that `node` is part of the match."""
        if id(node) not in self.bound:
            self.bind(id(node), Found(node, shared, counted))

    def nodes(self) -> list[NodeProto]:
        """The nodes matched so far, root first."""
        return [item.node for item in self.bound.values() if isinstance(item, Found)]

    def is_inner(self, value: str) -> bool:
        """Whether `value` can lie inside a match: neither a graph output nor captured."""
        if self.graph.is_output(value):
            return self.recording and self.fail(value, f"'{value}' is a graph output", exact=True)
        if self.graph.is_captured(value):
            return self.recording and self.fail(
                value, f"'{value}' is read by a subgraph", exact=True
            )
        return True

    def is_read_once(self, value: str) -> bool:
        """Whether a single input of a single node reads `value`, and nothing else."""
        return self.graph.reader_count(value) == 1 and self.graph.use_count(value) == 1

    def is_closed(self) -> bool:
        """Whether all that lies inside the match is read only there."""
        graph, bound = self.graph, self.bound
        for item in list(bound.values()):
            if not isinstance(item, Found) or item.shared or item.node is self.root:
                continue
            for value in nd.outputs_of(item.node):
                if not self.recording and graph.reader_count(value) > len(bound):
                    return False  # certainly, without a look at thousands of readers
                outside = [user for user in graph.users(value) if id(user) not in bound]
                if outside or graph.is_output(value) or graph.is_captured(value):
                    readers = f" by {nd.label(outside[0])}" if outside else ""
                    return self.recording and self.fail(
                        value,
                        f"{nd.label(item.node)} is read outside the match{readers}",
                        exact=True,
                    )
        return True

    # -- near misses

    def fail(self, value: str, reason: str, exact: bool = False) -> Literal[False]:
        """Give up this path. `exact` reasons (a constant, a guard) tell more than a wrong operator.

        The deepest failure is kept. Steps look at `recording` before they call this, so that no
        text is made for nothing.
        """
        found = (item for item in self.bound.values() if isinstance(item, Found))
        matched = sum(item.counted for item in found)
        weight = 2 if exact else int(self.producer(value) is not None)
        best = self.deepest
        if best is None or (matched, weight) > (best.matched, best.weight):
            self.deepest = Stop(matched, weight, value, reason)
        return False

    def describe(self, value: str) -> str:
        """What `value` is, in words."""
        if not value:
            return "nothing"
        node = self.producer(value)
        if self.graph.is_const(value):
            constant = self.scalar(value)
            return f"constant {constant[0]:.6g}" if constant else f"constant '{value}'"
        return nd.label(node) if node is not None else f"'{value}'"

    # -- constants

    def scalar(self, value: str) -> tuple[float, float] | None:
        """The number in a constant of one element, and its relative tolerance."""
        node = self.producer(value)
        if not value or (node is not None and node.op_type != "Constant"):
            return None
        tensor = self.graph.tensor(value)
        known = self._scalars.get(value)
        if known is None or known[0] is not tensor:
            known = self._scalars[value] = tensor, self._read_scalar(tensor)
        return known[1]

    def _read_scalar(self, tensor: TensorProto | None) -> tuple[float, float] | None:
        if tensor is None or any(size != 1 for size in tensor.dims):
            return None
        array = self.graph.model.weights.array(tensor)
        if array.dtype.kind in "OSUc":
            return None
        return float(array.reshape(-1)[0]), _ROUNDING.get(tensor.data_type, 0.0)

    def keeps_rank(self, value: str, others: list[str]) -> bool:
        """Whether the rank of the scalar constant `value` is not above that of what it meets."""
        tensor = self.graph.tensor(value)
        rank = len(tensor.dims) if tensor is not None else 0
        if not rank:
            return True
        ranks = [self.graph.rank(other) for other in others if other and other != value]
        known = max((r for r in ranks if r is not None), default=0)
        return rank <= (max(known, 1) if None in ranks or not ranks else known)

    def same(self, one: str, other: str) -> bool:
        """Whether two values are one, or constants of equal type and contents."""
        if one == other:
            return True
        first, second = self.graph.tensor(one), self.graph.tensor(other)
        if first is None or second is None or first.data_type != second.data_type:
            return False
        if list(first.dims) != list(second.dims):
            return False
        array = self.graph.model.weights.array
        return bool(np.array_equal(array(first), array(second)))


def close(found: float, wanted: float, tolerance: float) -> bool:
    """Whether `found` is `wanted` but for rounding; an expected zero is exact."""
    return math.isclose(found, wanted, rel_tol=tolerance)


def contents(array: Array) -> list[float] | None:
    """The numbers of a vector; None for other ranks and types."""
    if array.ndim != 1 or array.dtype.kind in "OSUc":
        return None
    return array.tolist()
