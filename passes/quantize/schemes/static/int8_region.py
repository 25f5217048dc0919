"""Which sites compute in 8 bits together.

Products pay by themselves. What combines or carries pays only between others: each of its
activations is made by a site in 8 bits, and one of those reads its result. Dropping one may leave
another alone, so sites are dropped until all that remain hold; each is looked at again only when a
neighbour is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from passes.quantize.schemes.static.quantizable_ops import Site, limits_after
from toolkit.ir import node as nd
from toolkit.ir.graph import Graph

Results = Callable[[Site], list[str]]
"""The tensors that a site makes, behind a Relu or Clip where the range is taken there."""


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """Sites in 8 bits, in the order of the graph, and who makes and reads which tensor."""

    sites: list[Site]
    results: Results
    makers: Mapping[str, Site]
    readers: Mapping[str, list[Site]]

    def makes(self, site: Site) -> list[str]:
        """The results that are stored in 8 bits.

        Convolutions have no kernel with another result. A MatMul or Gemm has one, and it is the
        better one as soon as anything reads the result as floats.
        """
        results = self.results(site)
        if site.kind != "product" or site.is_conv:
            return results
        return [name for name in results if self._read_by_bytes_alone(site, name)]

    def tensors(self) -> list[str]:
        """All tensors that are stored in 8 bits."""
        return list(self.scopes())

    def scopes(self) -> dict[str, Graph]:
        """All tensors that are stored in 8 bits, with the graph that defines each."""
        found = (
            (name, site.graph.scope_of(name))
            for site in self.sites
            for name in (*site.activations, *self.makes(site))
        )
        return {name: graph for name, graph in found if graph is not None}

    def _read_by_bytes_alone(self, site: Site, name: str) -> bool:
        users = site.graph.users(name)
        if not users or site.graph.is_output(name) or site.graph.is_captured(name):
            return False
        return len(self.readers.get(name, ())) == len(users)


def behind_limits(site: Site) -> list[str]:
    """What a site makes, behind the Relu or Clip that alone reads it."""
    if site.kind == "carry":
        return nd.outputs_of(site.node)
    limits = limits_after(site.graph, site.node.output[0])
    return [limits.output if limits is not None else site.node.output[0]]


def as_made(site: Site) -> list[str]:
    """What a site makes, before anything that follows."""
    return nd.outputs_of(site.node)


def settle(sites: Iterable[Site], results: Results) -> Region:
    """The sites that pay."""
    alive = _without_limits(list(sites), results)
    makers = {name: site for site in alive.values() for name in results(site)}
    readers: dict[str, dict[int, Site]] = {}
    for site in alive.values():
        for name in site.activations:
            readers.setdefault(name, {})[id(site.node)] = site

    def holds(site: Site) -> bool:
        if site.kind == "product":
            return True
        if not all(name in makers for name in site.activations):
            return False
        return any(readers.get(name) for name in results(site))

    pending = list(alive.values())
    while pending:
        site = pending.pop()
        if id(site.node) not in alive or holds(site):
            continue
        del alive[id(site.node)]
        for name in results(site):
            makers.pop(name, None)
            pending.extend(readers.get(name, {}).values())
        for name in site.activations:
            readers[name].pop(id(site.node), None)
            if name in makers:
                pending.append(makers[name])
    listed = {name: list(found.values()) for name, found in readers.items()}
    return Region(list(alive.values()), results, makers, listed)


def _without_limits(sites: list[Site], results: Results) -> dict[int, Site]:
    """The sites by node, but for each Relu or Clip that belongs to what it reads."""
    passed = {s.node.output[0] for s in sites if s.node.output[0] not in results(s)}
    return {id(s.node): s for s in sites if s.node.input[0] not in passed}
