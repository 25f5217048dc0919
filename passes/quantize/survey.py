"""A model as a problem of regions: what each node takes in floats and in int8, and what is between.

A plan says which nodes can be static. A Relu or Clip that alone reads a result belongs to what it
reads: it is free in both. What combines or carries (Add, MaxPool) computes in int8 only behind
int8, so that entering there is forbidden.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from onnx import NodeProto

from passes.quantize.costs import Kernels, Sizes
from passes.quantize.plan import Entry, Plan
from passes.quantize.regions import FLOAT_END, Item, Value, best_regions, total
from toolkit import nodes as nd
from toolkit.graph import Graph

PRODUCTS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
_LIMITS = ("Relu", "Clip")
_FORBIDDEN = 1e9


@dataclass(frozen=True, slots=True, eq=False)
class Survey:
    """Items in the order of the graph, with the plan's entries among them by item."""

    items: tuple[Item, ...]
    values: tuple[Value, ...]
    entries: tuple[tuple[int, Entry], ...]

    def best(self, prefix: int = 0, crossing: float = 1.0) -> frozenset[int]:
        """The fastest choice of items, without the first `prefix` of those that could be int8.

        `crossing` is a factor on what conversions cost.
        """
        barred = {item for item, _ in self.entries[:prefix]}
        items = [replace(i, in_int8=None) if n in barred else i for n, i in enumerate(self.items)]
        values = [
            replace(v, enter=v.enter * crossing, leave=v.leave * crossing) for v in self.values
        ]
        return best_regions(items, values)

    def time(self, chosen: Iterable[int] = ()) -> float:
        """Microseconds of what can be int8 and of the conversions, with these items in int8."""
        return total(self.items, self.values, chosen)

    def left(self, chosen: Iterable[int]) -> list[Entry]:
        """The entries of the items that were not chosen."""
        inside = frozenset(chosen)
        return [entry for item, entry in self.entries if item not in inside]


def survey(g: Graph, plan: Plan, sizes: Sizes, kernels: Kernels) -> Survey:
    """The problem that a plan is for a graph, with the shapes of one feed."""
    number = _numbers(g)
    items = [Item(0.0) for _ in range(max(number.values(), default=-1) + 1)]
    entries: list[tuple[int, Entry]] = []
    combining: set[int] = set()
    for node in g.nodes:
        entry = plan.find(node)
        at = number[id(node)]
        if entry is None or entry.scheme != "static":
            continue
        found = kernels.of(node, sizes)
        times = (0.0, 0.0) if found is None else (found.in_float, found.in_int8)
        before = items[at]
        items[at] = Item(before.in_float + times[0], (before.in_int8 or 0.0) + times[1])
        entries.append((at, entry))
        if not nd.is_op(node, *PRODUCTS):
            combining.add(at)
    values = _values(g, number, sizes, kernels, frozenset(combining))
    return Survey(tuple(items), tuple(values), tuple(entries))


def _numbers(g: Graph) -> dict[int, int]:
    """Of each node the item that it belongs to."""
    numbers: dict[int, int] = {}
    count = 0
    for node in g.nodes:
        maker = g.producer(node.input[0]) if node.input and nd.is_op(node, *_LIMITS) else None
        if maker is not None and id(maker) in numbers and g.use_count(node.input[0]) == 1:
            numbers[id(node)] = numbers[id(maker)]
        else:
            numbers[id(node)] = count
            count += 1
    return numbers


def _values(
    g: Graph, number: dict[int, int], sizes: Sizes, kernels: Kernels, combining: frozenset[int]
) -> Iterable[Value]:
    names = [*g.feeds, *(name for node in g.nodes for name in nd.outputs_of(node))]
    for name in names:
        producer = g.producer(name)
        maker = FLOAT_END if producer is None else number[id(producer)]
        readers = _readers(g, name, number)
        if maker in readers:
            readers.remove(maker)  # an activation that belongs to it
        if not readers:
            continue
        shape = sizes.get(name, ())
        elements = math.prod(shape)
        width = shape[1] if len(shape) > 2 else 1
        cost = kernels.crossing(elements, width)
        yield Value(maker, tuple(readers), cost, cost)
        for reader in combining.intersection(readers):
            yield Value(maker, (reader,), _FORBIDDEN, 0.0)


def _readers(g: Graph, name: str, number: dict[int, int]) -> list[int]:
    found = dict.fromkeys(number.get(id(node), FLOAT_END) for node in _users(g, name))
    if g.is_output(name) or g.is_captured(name):
        found[FLOAT_END] = None
    return list(found)


def _users(g: Graph, name: str) -> list[NodeProto]:
    return [user for user in g.users(name) if name in user.input]
