"""The state of one attempt to match, with backtracking.

The remaining work is a linked list of goals, `(step, value, rest)`. A step examines its value and
returns the goals that remain, or False. To choose, a step solves each alternative with all
remaining goals, undoes its bindings if that fails, and returns the last alternative as its goals. A
pattern without choices is thus a loop. The number of steps of an attempt is bounded.
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
"""The goals that remain; None: everything matched; False: no match."""

Step: TypeAlias = Callable[["Search", str, Goals], Goals]

MAX_STEPS = 2000
"""The most steps of an attempt; rules need dozens, adversarial graphs more."""

UNBOUND: Any = object()

FLOAT_ROUNDING = 1e-5
"""The relative tolerance for float constants and attributes, which exporters round."""

_ROUNDING: dict[int, float] = {
    TensorProto.FLOAT16: 2e-3,
    TensorProto.BFLOAT16: 1.6e-2,
    TensorProto.FLOAT: FLOAT_ROUNDING,
    TensorProto.DOUBLE: FLOAT_ROUNDING,
}
"""The relative tolerance for constants of each type; others must be equal."""


@dataclass(slots=True)
class MatchedNode:
    """A matched node; a `shared` one may have other users, `counted` ones measure progress."""

    node: NodeProto
    shared: bool
    counted: bool


@dataclass(frozen=True, slots=True)
class Stop:
    """A failure: the number of nodes matched before, the value, and the reason.

    At equal numbers, the larger `weight` wins: 2 for an exact reason, 1 for the wrong operator, 0
    for a constant or an input instead of an operator.
    """

    matched: int
    weight: int
    where: str
    reason: str


class Search:
    """Bindings, matched nodes and budget of one attempt; reused from attempt to attempt.

    `bound` maps names to values, identities of matched nodes to MatchedNodes, and pattern objects
    that occur more than once to the value or node that they matched.
    """

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
        """Start a new attempt to solve the goals; `root` is the node to be replaced."""
        self.bound.clear()
        self.trail.clear()
        self.steps = MAX_STEPS
        self.root = root
        self.deepest = None
        return self.solve(goals)

    def solve(self, goals: Goals) -> bool:
        """Return whether all goals succeed."""
        while isinstance(goals, tuple):
            step, value, rest = goals
            self.steps -= 1
            if self.steps < 0:
                return self.recording and self.fail(value, f"gave up after {MAX_STEPS} steps")
            goals = step(self, value, rest)
        return goals is None

    def bind(self, key: Any, value: Any) -> None:
        """Bind a key until it is undone."""
        self.bound[key] = value
        self.trail.append(key)

    def undo(self, mark: int) -> None:
        """Undo the bindings made since the trail had length `mark`."""
        trail, bound = self.trail, self.bound
        while len(trail) > mark:
            del bound[trail.pop()]

    def found(self, node: NodeProto, shared: bool, counted: bool = True) -> None:
        """Record `node` as matched."""
        if id(node) not in self.bound:
            self.bind(id(node), MatchedNode(node, shared, counted))

    def nodes(self) -> list[NodeProto]:
        """Return the nodes matched so far, root first."""
        return [item.node for item in self._matched()]

    def _matched(self) -> list[MatchedNode]:
        return [item for item in self.bound.values() if isinstance(item, MatchedNode)]

    def is_inner(self, value: str) -> bool:
        """Return whether `value` may be inside a match: not an output, not captured."""
        if self.graph.is_output(value):
            return self.recording and self.fail(value, f"'{value}' is a graph output", exact=True)
        if self.graph.is_captured(value):
            return self.recording and self.fail(
                value, f"'{value}' is used by a subgraph", exact=True
            )
        return True

    def is_closed(self) -> bool:
        """Return whether the values inside the match have no users outside."""
        graph, bound = self.graph, self.bound
        for item in self._matched():
            if item.shared or item.node is self.root:
                continue
            for value in nd.outputs_of(item.node):
                if not self.recording and graph.user_count(value) > len(bound):
                    return False  # before examining thousands of users
                outside = [user for user in graph.users(value) if id(user) not in bound]
                if outside or graph.is_output(value) or graph.is_captured(value):
                    user = f" by {nd.label(outside[0])}" if outside else ""
                    return self.recording and self.fail(
                        value,
                        f"{nd.label(item.node)} is used outside the match{user}",
                        exact=True,
                    )
        return True

    # -- near misses

    def fail(self, value: str, reason: str, exact: bool = False) -> Literal[False]:
        """Record a failure if it is the deepest so far; return False.

        `exact` reasons (a constant, a guard) are more specific than a wrong operator. Steps check
        `recording` before the call, to avoid formatting the reason.
        """
        matched = sum(item.counted for item in self._matched())
        weight = 2 if exact else int(self.producer(value) is not None)
        best = self.deepest
        if best is None or (matched, weight) > (best.matched, best.weight):
            self.deepest = Stop(matched, weight, value, reason)
        return False

    def describe(self, value: str) -> str:
        """Describe `value` for a near miss."""
        if not value:
            return "nothing"
        node = self.producer(value)
        if self.graph.is_const(value):
            constant = self.scalar(value)
            return f"constant {constant[0]:.6g}" if constant else f"constant '{value}'"
        return nd.label(node) if node is not None else f"'{value}'"

    # -- constants

    def scalar(self, value: str) -> tuple[float, float] | None:
        """Return the number in a one-element constant and its relative tolerance, or None."""
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
        """Return whether a scalar constant has at most the rank of the other operands."""
        tensor = self.graph.tensor(value)
        rank = len(tensor.dims) if tensor is not None else 0
        if not rank:
            return True
        ranks = [self.graph.rank(other) for other in others if other and other != value]
        known = max((r for r in ranks if r is not None), default=0)
        return rank <= (max(known, 1) if None in ranks or not ranks else known)

    def same(self, one: str, other: str) -> bool:
        """Return whether two values are identical, or constants of equal type and contents."""
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
    """Return whether `found` equals `wanted` up to rounding; zero must be exact."""
    return math.isclose(found, wanted, rel_tol=tolerance)


def contents(array: Array) -> list[float] | None:
    """Return the numbers of a vector; None for other ranks and types."""
    if array.ndim != 1 or array.dtype.kind in "OSUc":
        return None
    return array.tolist()
