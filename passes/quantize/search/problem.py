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

from passes.quantize.schemes.static.channels_last import either_way, turns
from passes.quantize.schemes.static.pointwise_conv import is_pointwise
from passes.quantize.schemes.static.quantizable_ops import ALL_PRODUCTS
from passes.quantize.search.costs import Kernels, Sizes
from passes.quantize.search.independent_layers import LEAST_SAVING, Loose, loose_in
from passes.quantize.search.min_cut import FLOAT_END, Item, Value, best_regions, total
from toolkit.ir import node as nd
from toolkit.ir.graph import Graph
from toolkit.ir.model import Model
from toolkit.quantization.plan import Entry, Plan

_LIMITS = ("Relu", "Clip")
_WANTED, _FORBIDDEN, _ALWAYS = 1e7, 1e9, 1e11
_HARMFUL = "too harmful for what it saves"
_ABOVE = 1 + 1e-9
_ALONG = LEAST_SAVING / 100
_BEFORE = "before the first int8 layer"


@dataclass(frozen=True, slots=True, eq=False)
class Survey:
    """Items in the order of the graph, and the plan's entries: by item, or loose."""

    plan: Plan
    items: tuple[Item, ...]
    values: tuple[Value, ...]
    entries: tuple[tuple[int, Entry], ...]
    loose: tuple[Loose, ...]
    in_time: bool = True
    """Whether costs are microseconds; else nobody asks for speed, and they count layers."""

    def best(
        self,
        harm: Mapping[Entry, float] | None = None,
        price: float = 0.0,
        crossing: float = 1.0,
        prefix: int = 0,
    ) -> Plan:
        """The plan that takes least, with everything else in floats.

        `crossing` is a factor on what conversions take; the first `prefix` items stay float. With
        `harm`, entries that it does not mention stay float as well.
        """
        known = harm if harm is not None else dict.fromkeys(self.plan.quantized(), 0.0)
        items = list(self.items)
        for at, entry in self.entries:
            own = items[at]
            if own.in_int8 is not None:
                barred = at < prefix or entry not in known
                cost = None if barred else own.in_int8 + price * known[entry]
                items[at] = replace(own, in_int8=cost)
        values = [
            replace(v, enter=v.enter * crossing, leave=v.leave * crossing) for v in self.values
        ]
        chosen = best_regions(items, values)
        left = [entry for at, entry in self.entries if at not in chosen]
        for group in self.loose:
            harms = [known.get(entry, math.inf) for entry in group.entries]
            if math.inf in harms or price * sum(harms) > group.saving:
                left += group.entries
        turned = self.plan.turned(left, reason="float is faster" if harm is None else _HARMFUL)
        before = [entry for at, entry in self.entries if at < prefix]
        return turned.turned(before, reason=_BEFORE) if before else turned

    def all_behind(self, prefix: int) -> Plan:
        """The plan with all in int8 that can be, whatever it takes, but for the first items."""
        items = list(self.items)
        for at, _ in self.entries:
            own = items[at]
            items[at] = Item(own.in_float) if at < prefix else replace(own, in_float=_WANTED)
        chosen = best_regions(items, self.values)
        left = [entry for at, entry in self.entries if at not in chosen]
        return self.plan.turned(left, reason=_BEFORE)

    def time(self, plan: Plan) -> float:
        """Microseconds of what can be int8, and of the conversions, by a plan."""
        kept = {entry.key for entry in plan.quantized()}
        inside = {at for at, entry in self.entries if entry.key in kept}
        items = list(self.items)
        for at, _ in self.entries:
            own = items[at]
            items[at] = replace(own, in_float=_ALWAYS) if at in inside else Item(own.in_float)
        chosen = best_regions(items, self.values)  # what has no entry goes with its neighbours
        lost = [g.saving for g in self.loose if any(e.key not in kept for e in g.entries)]
        return total(self.items, self.values, chosen) + sum(lost)

    def saving(self, plan: Plan) -> float:
        """Microseconds that a plan takes less than floats."""
        return self.time(self.plan.turned(self.plan.quantized())) - self.time(plan)

    def loose_prices(self, harm: Mapping[Entry, float]) -> list[float]:
        """The prices above which loose entries go back, the lowest first."""
        noises = (
            (group, sum(harm.get(entry, 0.0) for entry in group.entries)) for group in self.loose
        )
        return sorted({_ABOVE * group.saving / noise for group, noise in noises if noise > 0})

    def starts(self) -> list[int]:
        """The items that are products, where a prefix may end."""
        products = (at for at, entry in self.entries if entry.op in ALL_PRODUCTS)
        return list(dict.fromkeys(products))


def survey(model: Model, plan: Plan, sizes: Sizes, kernels: Kernels) -> Survey:
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
    loose = loose_in(model, plan, sizes, kernels)
    in_time = bool(kernels.rates)
    return Survey(plan, tuple(items), tuple(values), tuple(entries), loose, in_time)


def survey_pointwise(model: Model, plan: Plan, sizes: Sizes, kernels: Kernels) -> Survey | None:
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
    free = either_way(g)
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
    loose = loose_in(model, chosen, sizes, kernels)
    return Survey(chosen, tuple(items), tuple(turns(g, crossing)), known, loose)


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
