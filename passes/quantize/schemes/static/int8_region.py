"""The region of a graph that computes in int8.

A product pays off without int8 neighbors. Any other site is isolated unless int8 sites produce all
its activation operands and use its result. Removing a site may isolate its neighbors, which are
checked again until a fixpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from passes.quantize.schemes.static.quantizable_ops import Int8Site, limits_after
from toolkit.ir import Graph, node as nd

Results = Callable[[Int8Site], list[str]]
"""Returns the results of a site, or of the Relu or Clip after it."""


@dataclass(frozen=True, slots=True, eq=False)
class Int8Region:
    """The int8 sites in graph order, with the producer and the users of each tensor."""

    sites: list[Int8Site]
    results: Results
    producers: Mapping[str, Int8Site]
    users: Mapping[str, list[Int8Site]]

    def stored_results(self, site: Int8Site) -> list[str]:
        """Return the results that are stored in 8 bits.

        Every int8 convolution kernel has an 8-bit result. MatMul and Gemm also have kernels with
        float results, which are better if a user needs floats.
        """
        results = self.results(site)
        if site.kind != "product" or nd.is_op(site.node, "Conv", "ConvTranspose"):
            return results
        return [name for name in results if self._has_only_int8_users(site, name)]

    def scopes(self) -> dict[str, Graph]:
        """Return all tensors stored in 8 bits, with the graph that defines each."""
        found = (
            (name, site.graph.scope_of(name))
            for site in self.sites
            for name in (*site.activations, *self.stored_results(site))
        )
        return {name: graph for name, graph in found if graph is not None}

    def _has_only_int8_users(self, site: Int8Site, name: str) -> bool:
        users = site.graph.users(name)
        if not users or site.graph.is_output(name) or site.graph.is_captured(name):
            return False
        return len(self.users.get(name, ())) == len(users)


def limited_results(site: Int8Site) -> list[str]:
    """Return the results of a site, or of the Relu or Clip that is its sole user."""
    if site.kind == "carry":
        return nd.outputs_of(site.node)
    limits = limits_after(site.graph, site.node.output[0])
    return [limits[0] if limits is not None else site.node.output[0]]


def connected_region(sites: Iterable[Int8Site], results: Results) -> Int8Region:
    """Return the region of the sites that are not isolated."""
    listed = list(sites)
    # A Relu or Clip that its producer absorbs is not a site.
    absorbed = {s.node.output[0] for s in listed if s.node.output[0] not in results(s)}
    alive = {id(s.node): s for s in listed if s.node.input[0] not in absorbed}
    producers = {name: site for site in alive.values() for name in results(site)}
    users: dict[str, dict[int, Int8Site]] = {}
    for site in alive.values():
        for name in site.activations:
            users.setdefault(name, {})[id(site.node)] = site

    def is_connected(site: Int8Site) -> bool:
        if site.kind == "product":
            return True
        if not all(name in producers for name in site.activations):
            return False
        return any(users.get(name) for name in results(site))

    pending = list(alive.values())
    while pending:
        site = pending.pop()
        if id(site.node) not in alive or is_connected(site):
            continue
        del alive[id(site.node)]
        for name in results(site):
            producers.pop(name, None)
            pending.extend(users.get(name, {}).values())
        for name in site.activations:
            users[name].pop(id(site.node), None)
            if name in producers:
                pending.append(producers[name])
    by_name = {name: list(found.values()) for name, found in users.items()}
    return Int8Region(list(alive.values()), results, producers, by_name)
