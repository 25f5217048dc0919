"""Quantization parameters of the tensors of a plan; tied tensors share theirs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from toolkit.errors import UsageError
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
        top = tensor
        while (above := self._parents.get(top, top)) != top:
            top = above
        while tensor != top:
            above = self._parents.get(tensor, tensor)
            self._parents[tensor], tensor = top, above
        return top


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
