"""A model as a problem of regions: what each node takes in floats and in int8, and what is between.

A plan says which nodes can be static. A Relu or Clip that alone reads a result belongs to what it
reads: it is free in both. What combines or carries (Add, MaxPool) computes in int8 only behind
int8, so that entering there is forbidden. Dynamic layers take floats and give floats, and so do
those of which the weights alone are quantized: they are `loose`, each to be chosen for itself, or
with those that read the same weight. Convolutions of single pixels can be so, too (`pointwise`):
that is a second survey of the same model. A body is part of the graph where its node is, and counts
for one run of it: how often it runs is not known.

Harm is weighed against time: with a price p, an entry that makes the noise n costs p n besides its
time. At a price of 0 the fastest choice comes out; the higher it is, the more of what is harmful
for what it saves goes back to floats.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from onnx import NodeProto

from passes.quantize.schemes.static.channels_last import layout_agnostic, transposable_values
from passes.quantize.schemes.static.pointwise_conv import is_pointwise
from passes.quantize.schemes.static.quantizable_ops import ALL_PRODUCTS
from passes.quantize.search.costs import Kernels, Sizes
from passes.quantize.search.independent_layers import (
    LEAST_SAVING,
    IndependentGroup,
    independent_groups,
)
from passes.quantize.search.min_cut import FLOAT_END, Item, Value, best_regions, total
from toolkit.ir import node as nd
from toolkit.ir.graph import Graph
from toolkit.ir.model import Model
from toolkit.quantization.plan import Entry, Plan

_LIMITS = ("Relu", "Clip")
_FORBIDDEN, _ALWAYS = 1e9, 1e11
"""Microseconds that a minimum cut never, and always, pays."""
_SENSITIVE = "too sensitive for what it saves"
_ALONG = LEAST_SAVING / 100


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """Items in the order of the graph, and the plan's entries: by item, or loose."""

    plan: Plan
    items: tuple[Item, ...]
    values: tuple[Value, ...]
    entries: tuple[tuple[int, Entry], ...]
    independent: tuple[IndependentGroup, ...]
    in_time: bool = True
    """Whether costs are microseconds; else nobody asks for speed, and they count layers."""

    def best(
        self,
        sensitivity: Mapping[Entry, float] | None = None,
        price: float = 0.0,
    ) -> Plan:
        """Return the fastest plan when noise costs `price` microseconds per unit.

        With `sensitivity`, the noise of each entry, entries that it does not name stay float.
        """
        known = (
            sensitivity if sensitivity is not None else dict.fromkeys(self.plan.quantized(), 0.0)
        )
        items = list(self.items)
        for at, entry in self.entries:
            own = items[at]
            if own.in_int8 is not None:
                cost = own.in_int8 + price * known[entry] if entry in known else None
                items[at] = replace(own, in_int8=cost)
        chosen = best_regions(items, self.values)
        left = [entry for at, entry in self.entries if at not in chosen]
        for group in self.independent:
            noises = [known.get(entry, math.inf) for entry in group.entries]
            if math.inf in noises or price * sum(noises) > group.saving:
                left += group.entries
        return self.plan.turned(
            left, reason="float is faster" if sensitivity is None else _SENSITIVE
        )

    def time(self, plan: Plan) -> float:
        """Microseconds of what can be int8, and of the conversions, by a plan."""
        kept = {entry.key for entry in plan.quantized()}
        inside = {at for at, entry in self.entries if entry.key in kept}
        items = list(self.items)
        for at, _ in self.entries:
            own = items[at]
            items[at] = replace(own, in_float=_ALWAYS) if at in inside else Item(own.in_float)
        chosen = best_regions(items, self.values)  # what has no entry goes with its neighbours
        lost = [g.saving for g in self.independent if any(e.key not in kept for e in g.entries)]
        return total(self.items, self.values, chosen) + sum(lost)

    def saving(self, plan: Plan) -> float:
        """Microseconds that a plan takes less than floats."""
        return self.time_in_float() - self.time(plan)

    def time_in_float(self) -> float:
        """Return the microseconds of everything that can be int8, in float."""
        return self.time(self.plan.turned(self.plan.quantized()))


def problem_of(model: Model, plan: Plan, sizes: Sizes, kernels: Kernels) -> Problem:
    """The problem that a plan is for a model, with the shapes of one feed."""
    number = _numbers(model.graph)
    items = [Item(0.0) for _ in range(max(number.values(), default=-1) + 1)]
    entries: list[tuple[int, Entry]] = []
    combining: set[int] = set()
    for _, node in _in_order(model.graph):
        entry = plan.find(node)
        if entry is None or entry.scheme != "static":
            continue
        at = number[id(node)]
        times = _times(kernels, node, sizes)
        before = items[at]
        items[at] = Item(before.in_float + times[0], (before.in_int8 or 0.0) + times[1])
        entries.append((at, entry))
        if nd.qualified(node) not in ALL_PRODUCTS:
            combining.add(at)
    barred = frozenset(combining)
    values = [v for g in model.graphs() for v in _values(g, number, sizes, kernels, barred)]
    independent = independent_groups(model, plan, sizes, kernels)
    in_time = bool(kernels.rates)
    return Problem(plan, tuple(items), tuple(values), tuple(entries), independent, in_time)


def pointwise_problem(model: Model, plan: Plan, sizes: Sizes, kernels: Kernels) -> Problem | None:
    """The same plan with convolutions of single pixels that leave floats, and nothing else static.

    Here the regions are those with the channels last. Each convolution in one has to make 8 bits of
    what it reads, which those that read the same share. None where there are no such convolutions.
    """
    g = model.graph
    nodes = list(g.nodes)
    points = {id(n): e for n in nodes if is_pointwise(g, n) and (e := _static(plan, n))}
    if not points:
        return None

    def crossing(name: str) -> float:
        return _crossing(kernels, name, sizes)

    sharing = Counter(node.input[0] for node in nodes if id(node) in points)
    free = layout_agnostic(g)
    items: list[Item] = []
    for node in nodes:
        if id(node) in points:
            in_float, in_int8 = _times(kernels, node, sizes)
            read = node.input[0]
            items.append(Item(in_float, in_int8 + crossing(read) / sharing[read]))
        else:
            items.append(Item(0.0, 0.0) if id(node) in free else Item(0.0))
    chosen = _with_floats(plan, [entry.output for entry in points.values()])
    entries = [(at, chosen.find(n)) for at, n in enumerate(nodes) if id(n) in points]
    known = tuple((at, entry) for at, entry in entries if entry is not None)
    independent = independent_groups(model, chosen, sizes, kernels)
    return Problem(
        chosen, tuple(items), tuple(transposable_values(g, crossing)), known, independent
    )


def _static(plan: Plan, node: NodeProto) -> Entry | None:
    entry = plan.find(node)
    return (
        entry if entry is not None and entry.scheme == "static" and entry.weight == "int8" else None
    )


def _with_floats(plan: Plan, outputs: Iterable[str]) -> Plan:
    """The plan with results in floats for these, and floats for all others that are static."""
    kept = frozenset(outputs)
    others = [e for e in plan.entries if e.scheme == "static" and e.output not in kept]
    turned = plan.turned(others, reason="float is faster")
    entries = [replace(e, float_result=e.output in kept) for e in turned.entries]
    return replace(turned, entries=tuple(entries))


def _times(kernels: Kernels, node: NodeProto, sizes: Sizes) -> tuple[float, float]:
    """In floats and in int8; a product of which nothing is known pays by its size.

    Where speed is not asked for, the others go with their neighbours, and no further.
    """
    found = kernels.of(node, sizes)
    if found is not None and found.in_float:
        return found.in_float, found.in_int8
    if nd.qualified(node) in ALL_PRODUCTS:
        return LEAST_SAVING, 0.0
    return (0.0, 0.0) if kernels.rates else (_ALONG, 0.0)


def _crossing(kernels: Kernels, name: str, sizes: Sizes) -> float:
    """What it takes to convert a value."""
    shape = sizes.get(name, ())
    return kernels.crossing(math.prod(shape), shape[1] if len(shape) > 2 else 1)


def _in_order(g: Graph) -> Iterator[tuple[Graph, NodeProto]]:
    """All nodes with their graphs; those of bodies in front of the node that they belong to."""
    for node in g.nodes:
        for body in g.subgraphs(node):
            yield from _in_order(body)
        yield g, node


def _numbers(main: Graph) -> dict[int, int]:
    """Of each node the item that it belongs to."""
    numbers: dict[int, int] = {}
    count = 0
    for g, node in _in_order(main):
        maker = g.producer(node.input[0]) if node.input and nd.is_op(node, *_LIMITS) else None
        if maker is not None and id(maker) in numbers and g.use_count(node.input[0]) == 1:
            numbers[id(node)] = numbers[id(maker)]
        else:
            numbers[id(node)] = count
            count += 1
    return numbers


def _values(
    g: Graph, number: dict[int, int], sizes: Sizes, kernels: Kernels, combining: frozenset[int]
) -> Iterator[Value]:
    names = [*g.feeds, *(name for node in g.nodes for name in nd.outputs_of(node))]
    for name in names:
        producer = g.producer(name)
        maker = FLOAT_END if producer is None else number[id(producer)]
        readers = _readers(g, name, number)
        if maker in readers:
            readers.remove(maker)  # an activation that belongs to it
        if not readers:
            continue
        cost = _crossing(kernels, name, sizes)
        yield Value(maker, tuple(readers), cost, cost)
        for reader in combining.intersection(readers):
            yield Value(maker, (reader,), _FORBIDDEN, 0.0)


def _readers(g: Graph, name: str, number: dict[int, int]) -> list[int]:
    found = dict.fromkeys(number.get(id(node), FLOAT_END) for node in _users(g, name))
    if g.is_output(name):
        found[FLOAT_END] = None
    return list(found)


def _users(g: Graph, name: str) -> Iterator[NodeProto]:
    """The nodes that read a value themselves, in bodies too."""
    for user in g.users(name):
        if name in user.input:
            yield user
        for body in g.subgraphs(user):
            if not body.is_defined(name):
                yield from _users(body, name)
