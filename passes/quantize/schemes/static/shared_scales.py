"""Quantization parameters of the tensors of a plan, and the tensors that share theirs.

Carriers share one range, and so do the operands and the result of some Concats: with one scale a
Concat copies codes; with several it is slower than in float. The result has the widest range
anyway: an operand without other users loses nothing, one with other users may lose one bit at most.
The range of an operand after a Relu or Clip must stay within the bounds; otherwise the Relu or Clip
is not fused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from passes.quantize.schemes.static.int8_region import Int8Region
from passes.quantize.schemes.static.quantizable_ops import Int8Site, limits_after
from toolkit.errors import UsageError
from toolkit.ir import node as nd
from toolkit.quantization.number_format import FORMATS
from toolkit.quantization.plan import TensorEntry
from toolkit.quantization.qparams import QParams


class Ties:
    """Groups of tensors that share their parameters (a union-find)."""

    def __init__(self) -> None:
        self._parents: dict[str, str] = {}

    def tie(self, tensors: Sequence[str]) -> None:
        """Join the groups of all these tensors."""
        for name in tensors[1:]:
            self._parents[self.group(name)] = self.group(tensors[0])

    def group(self, tensor: str) -> str:
        """Return the name of the tensor's group: one of its members."""
        while (above := self._parents.get(tensor, tensor)) != tensor:
            self._parents[tensor] = self._parents.get(above, above)  # halve the path
            tensor = above
        return tensor


def qparams_of(entries: Iterable[TensorEntry], ties: Ties) -> dict[str, QParams]:
    """Return the parameters of every tensor; those of a group cover the ranges of its members."""
    groups: dict[str, list[TensorEntry]] = {}
    for entry in entries:
        groups.setdefault(ties.group(entry.tensor), []).append(entry)
    found: dict[str, QParams] = {}
    for members in groups.values():
        found.update(dict.fromkeys((member.tensor for member in members), _common(members)))
    return found


def _common(members: Sequence[TensorEntry]) -> QParams:
    first = members[0]
    given = [entry for entry in members if entry.scale is not None]
    for other in members[1:]:
        if (other.dtype, other.symmetric) != (first.dtype, first.symmetric):
            _refuse(first, other, "dtype and symmetry")
    for other in given[1:]:
        if (other.scale, other.zero) != (given[0].scale, given[0].zero):
            _refuse(given[0], other, "scale and zero point")
    fmt = FORMATS[first.dtype]
    if given:
        return QParams.of(given[0].scale or 0.0, given[0].zero or 0, fmt)
    low = min(entry.low or 0.0 for entry in members)
    high = max(entry.high or 0.0 for entry in members)
    return QParams.from_range(low, high, fmt, first.symmetric)


def _refuse(one: TensorEntry, other: TensorEntry, what: str) -> None:
    raise UsageError(f"tensors '{one.tensor}' and '{other.tensor}' are tied, but differ in {what}")


# -- the choice of the tensors that share a scale


@dataclass(frozen=True, slots=True)
class _TiedRange:
    """The range that tied tensors share, and its limits."""

    low: float
    high: float
    least: float = -math.inf
    most: float = math.inf
    """The bounds that a fused Relu or Clip sets."""
    narrowest: float = math.inf
    """The width of the narrowest own range of a tensor with other users."""

    def __or__(self, other: _TiedRange) -> _TiedRange:
        return _TiedRange(
            min(self.low, other.low),
            max(self.high, other.high),
            max(self.least, other.least),
            min(self.most, other.most),
            min(self.narrowest, other.narrowest),
        )

    @property
    def is_allowed(self) -> bool:
        inside = self.least <= self.low and self.high <= self.most
        return inside and self.high - self.low <= 2 * self.narrowest


def tied_sites(region: Int8Region, tensors: Mapping[str, TensorEntry]) -> set[int]:
    """Return the ids of the sites that share one range: all carriers, and some Concats."""
    ties = Ties()
    groups = {name: _alone(region, name, entry) for name, entry in tensors.items()}
    tied: set[int] = set()

    def tie(site: Int8Site, always: bool) -> None:
        names = list(dict.fromkeys((*site.activations, *region.stored_results(site))))
        members = list(dict.fromkeys(map(ties.group, names)))
        joined = groups[members[0]]
        for member in members[1:]:
            joined |= groups[member]
        if always or joined.is_allowed:
            ties.tie(names)
            groups[ties.group(names[0])] = joined
            tied.add(id(site.node))

    for site in region.sites:
        if site.kind == "carry":
            tie(site, always=True)
    for site in region.sites:
        if nd.is_op(site.node, "Concat"):
            tie(site, always=False)
    return tied


def _alone(region: Int8Region, name: str, entry: TensorEntry) -> _TiedRange:
    """Return the group of a single tensor."""
    low, high = entry.low or 0.0, entry.high or 0.0
    producer = region.producers.get(name)
    if producer is None:
        return _TiedRange(low, high, narrowest=high - low)
    least, most = -math.inf, math.inf
    limits = limits_after(producer.graph, producer.node.output[0])
    if producer.kind != "carry" and limits is not None and limits[0] == name:
        _, least, most = limits
    joined = nd.is_op(producer.graph.sole_user(name), "Concat")
    sensitive = producer.kind != "carry" and not joined
    return _TiedRange(low, high, least, most, high - low if sensitive else math.inf)
