"""The choice between float and int8 for each node, as a minimum-cut problem.

A plan lists the nodes that can be static. A Relu or Clip that is the only user of a result belongs
to the producer's item and is free in both kinds. Combining and data-movement operators (Add,
MaxPool) compute in int8 only on int8 operands, so converting their inputs is forbidden. Dynamic and
weight-only layers have float inputs and outputs and are chosen independently. So can pointwise
convolutions: `pointwise_problem` is the same model with these alone. A subgraph is part of the
graph of its node and counts as one run, since the number of iterations is unknown.

The objective adds noise to time: at price p, an entry of noise n costs p n microseconds more. Price
0 gives the fastest plan; with a rising price, entries with much noise for their saving fall back to
float.
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
from toolkit.ir import Graph, Model, node as nd
from toolkit.quantization.plan import Entry, Plan

_LIMITS = ("Relu", "Clip")
_FORBIDDEN, _ALWAYS = 1e9, 1e11
"""Microseconds that exclude an assignment, and that force one even at a forbidden conversion."""
_SENSITIVE = "too sensitive for what it saves"
_ALONG = LEAST_SAVING / 100
"""The saving of a node other than a product, in layers: it follows its neighbours."""


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """A plan, the items and values of its graph, and the entries by item or independent."""

    plan: Plan
    items: tuple[Item, ...]
    values: tuple[Value, ...]
    entries: tuple[tuple[int, Entry], ...]
    independent: tuple[IndependentGroup, ...]
    in_time: bool = True
    """Whether costs are microseconds; otherwise speed does not matter, and they count layers."""

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
        """Return the microseconds of all items and conversions under a plan."""
        kept = {entry.key for entry in plan.quantized()}
        inside = {at for at, entry in self.entries if entry.key in kept}
        items = list(self.items)
        for at, _ in self.entries:
            own = items[at]
            items[at] = replace(own, in_float=_ALWAYS) if at in inside else Item(own.in_float)
        chosen = best_regions(items, self.values)  # items without entries follow their neighbours
        lost = [g.saving for g in self.independent if any(e.key not in kept for e in g.entries)]
        return total(self.items, self.values, chosen) + sum(lost)

    def saving(self, plan: Plan) -> float:
        """Return the microseconds that a plan saves."""
        return self.time_in_float() - self.time(plan)

    def time_in_float(self) -> float:
        """Return the microseconds of all items in float."""
        return self.time(self.plan.turned(self.plan.quantized()))


def problem_of(model: Model, plan: Plan, sizes: Sizes, kernels: Kernels) -> Problem:
    """Return the problem of a plan, with the shapes of one feed."""
    number = _item_numbers(model.graph)
    items = [Item(0.0) for _ in range(max(number.values(), default=-1) + 1)]
    entries: list[tuple[int, Entry]] = []
    combining: set[int] = set()
    for _, node in _in_order(model.graph):
        entry = plan.find(node)
        if entry is None or entry.scheme != "static":
            continue
        at = number[id(node)]
        in_float, in_int8 = _times(kernels, node, sizes)
        before = items[at]
        items[at] = Item(before.in_float + in_float, (before.in_int8 or 0.0) + in_int8)
        entries.append((at, entry))
        if nd.qualified(node) not in ALL_PRODUCTS:
            combining.add(at)
    barred = frozenset(combining)
    values = [v for g in model.graphs() for v in _values(g, number, sizes, kernels, barred)]
    independent = independent_groups(model, plan, sizes, kernels)
    in_time = bool(kernels.rates)
    return Problem(plan, tuple(items), tuple(values), tuple(entries), independent, in_time)


def pointwise_problem(model: Model, plan: Plan, sizes: Sizes, kernels: Kernels) -> Problem | None:
    """Return the problem of the same plan with pointwise convolutions as its only static layers.

    These have float results, and the regions are those with the channels last. Each convolution
    quantizes its input, a cost shared by all users of that input. None without such convolutions.
    """
    g = model.graph
    nodes = list(g.nodes)
    static = {id(n): e for n in nodes if (e := plan.find(n)) and e.scheme == "static"}
    points = {
        id(n): static[id(n)]
        for n in nodes
        if id(n) in static and static[id(n)].weight == "int8" and is_pointwise(g, n)
    }
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
            operand = node.input[0]
            items.append(Item(in_float, in_int8 + crossing(operand) / sharing[operand]))
        else:
            items.append(Item(0.0, 0.0) if id(node) in free else Item(0.0))
    chosen = _with_float_results(plan, [entry.output for entry in points.values()])
    entries = [(at, chosen.find(n)) for at, n in enumerate(nodes) if id(n) in points]
    known = tuple((at, entry) for at, entry in entries if entry is not None)
    independent = independent_groups(model, chosen, sizes, kernels)
    return Problem(
        chosen, tuple(items), tuple(transposable_values(g, crossing)), known, independent
    )


def _with_float_results(plan: Plan, outputs: Iterable[str]) -> Plan:
    """Return the plan with float results for these outputs and all other static layers in float."""
    kept = frozenset(outputs)
    others = [e for e in plan.entries if e.scheme == "static" and e.output not in kept]
    turned = plan.turned(others, reason="float is faster")
    entries = [replace(e, float_result=e.output in kept) for e in turned.entries]
    return replace(turned, entries=tuple(entries))


def _times(kernels: Kernels, node: NodeProto, sizes: Sizes) -> tuple[float, float]:
    """Return the costs in float and in int8; a product without known times saves one layer.

    Where speed does not matter, other operators save a fraction of a layer.
    """
    found = kernels.of(node, sizes)
    if found is not None and found.in_float:
        return found.in_float, found.in_int8
    if nd.qualified(node) in ALL_PRODUCTS:
        return LEAST_SAVING, 0.0
    return (0.0, 0.0) if kernels.rates else (_ALONG, 0.0)


def _crossing(kernels: Kernels, name: str, sizes: Sizes) -> float:
    """Return the microseconds of converting a value."""
    shape = sizes.get(name, ())
    return kernels.crossing(math.prod(shape), shape[1] if len(shape) > 2 else 1)


def _in_order(g: Graph) -> Iterator[tuple[Graph, NodeProto]]:
    """Yield all nodes with their graphs, those of subgraphs before the node that holds them."""
    for node in g.nodes:
        for subgraph in g.subgraphs(node):
            yield from _in_order(subgraph)
        yield g, node


def _item_numbers(main: Graph) -> dict[int, int]:
    """Return the item of each node by its id."""
    numbers: dict[int, int] = {}
    count = 0
    for g, node in _in_order(main):
        limits = node.input and nd.is_op(node, *_LIMITS)
        producer = g.producer(node.input[0]) if limits else None
        if producer is not None and id(producer) in numbers and g.use_count(node.input[0]) == 1:
            numbers[id(node)] = numbers[id(producer)]
        else:
            numbers[id(node)] = count
            count += 1
    return numbers


def _values(
    g: Graph, number: dict[int, int], sizes: Sizes, kernels: Kernels, combining: frozenset[int]
) -> Iterator[Value]:
    names = [*g.feeds, *(name for node in g.nodes for name in nd.outputs_of(node))]
    for name in names:
        node = g.producer(name)
        producer = FLOAT_END if node is None else number[id(node)]
        users = dict.fromkeys(number.get(id(user), FLOAT_END) for user in _users(g, name))
        if g.is_output(name):
            users[FLOAT_END] = None
        users.pop(producer, None)  # a Relu or Clip of the same item
        if not users:
            continue
        cost = _crossing(kernels, name, sizes)
        yield Value(producer, tuple(users), cost, cost)
        for user in combining.intersection(users):
            yield Value(producer, (user,), _FORBIDDEN, 0.0)


def _users(g: Graph, name: str) -> Iterator[NodeProto]:
    """Yield the nodes with the value as an operand, in subgraphs too."""
    for user in g.users(name):
        if name in user.input:
            yield user
        for subgraph in g.subgraphs(user):
            if not subgraph.is_defined(name):
                yield from _users(subgraph, name)
