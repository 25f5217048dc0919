"""Operands of attention in the layouts that the Attention operator takes.

The last two axes of an operand are (sequence, head size), swapped for a transposed key. Attention
takes tokens [batch, sequence, heads * head size], the fastest layout, or separate heads
[batch, heads, sequence, head size]. Repeated heads (grouped queries) are left out of both: the
operator repeats them itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from onnx import NodeProto

from passes.analysis.operands import reshape, transpose
from passes.analysis.view_algebra import (
    Axis,
    Factor,
    Trace,
    TracedSource,
    int_product,
    leaves,
    size_of,
)
from passes.fuse.computed_sizes import reshape_to
from toolkit.ir.graph import Graph
from toolkit.rewriting.match_failure import MatchFailure
from toolkit.symbolic import Dim

_ORDERS = ((0, 1, 2), (1, 0, 2), (0, 2, 1))
"""Axes of batch, sequence and features in a source of rank 3: tokens, sequence first, or sequence
last (after a convolution)."""


@dataclass(frozen=True, slots=True)
class OperandForm:
    """An operand computed from `source`: reshaped to `target` and transposed by `perm`, if set."""

    source: TracedSource
    target: tuple[int, ...]
    perm: tuple[int, ...]
    batch: Dim
    sequence: Dim
    heads: int
    size: int
    keeps_heads: bool
    """Whether it has all heads of the operand, repeated ones included."""

    @property
    def on_tokens(self) -> bool:
        """Return whether it is [batch, sequence, heads * size]."""
        return bool(self.target) or len(self.source.axes) == 3

    @property
    def steps(self) -> int:
        """The number of nodes it takes."""
        return bool(self.target) + bool(self.perm)

    def write(self, g: Graph, at: NodeProto) -> str:
        """Write the operand in this form."""
        value = self.source.value
        if self.target:
            value = reshape(g, value, self.target, at=at)
        return transpose(g, value, self.perm, at=at) if self.perm else value


class AttentionOperand:
    """The query, key or value of an attention: an operand of a MatMul, and its sources."""

    def __init__(
        self, g: Graph, value: str, sequence: int = -2, size: int = -1, scaled: bool = True
    ) -> None:
        """`sequence` and `size` are negative axes; those before them are batch and heads.

        With `scaled`, a source may differ from the operand by a constant factor, `source.scale`.
        """
        trace = Trace(g, value)
        self.rank = rank = len(trace.axes)
        self._sources = [s for s in trace.sources if scaled or s.scale == 1.0]
        before = [trace.axes[i] for i in range(rank) if i - rank not in (sequence, size)]
        self._prefix = [factor for axis in before for factor in axis]
        self._batch = before[0] if rank == 4 else None
        nothing: Axis = ()
        self._sequence = trace.axes[sequence] if rank > 2 else nothing
        self._size = trace.axes[size] if rank > 2 else nothing

    def tokens(self) -> OperandForm | None:
        """Return the form [batch, sequence, heads * size] with as many heads as are known."""
        return max(self._token_forms(), key=lambda form: (form.heads, -form.steps), default=None)

    def merged(self) -> OperandForm | None:
        """Return the form [batch * heads, sequence, size] of one head and a larger batch."""
        matrices = size_of(self._prefix)
        single = [f for f in self._token_forms() if f.heads == 1 and f.batch == matrices]
        return min(single, key=lambda form: form.steps, default=None)

    def separate(self) -> OperandForm | None:
        """Return the form [batch, heads, sequence, size]."""
        # Of the cheapest, the farthest: the nodes in between become dead.
        found = reversed(self._separate_forms())
        return min(found, key=lambda form: (form.steps, form.heads), default=None)

    def _token_forms(self) -> list[OperandForm]:
        """Return the forms as tokens: with the last two axes merged, or the axes moved."""
        found: list[OperandForm | None] = []
        for source in self._sources:
            axes = [leaves(axis) for axis in source.axes]
            target: tuple[int, ...] = ()
            if len(axes) == 4:
                axes = [axes[0], axes[1], axes[2] + axes[3]]
                target = (0, 0, int_product(axes[2]) or 0)
            elif len(axes) == 2:
                axes = [[], *axes]
                target = (1, -1, int_product(axes[2]) or 0)
            if len(axes) != 3 or target[2:] == (0,):
                continue
            for perm in _ORDERS:
                batch, sequence, rest = (axes[axis] for axis in perm)
                cut = len(rest) - len(leaves(self._size))
                order = () if perm == _ORDERS[0] else perm
                found.append(
                    self._form(source, (batch, rest[:cut], sequence, rest[cut:]), target, order)
                )
        return [form for form in found if form is not None]

    def _separate_forms(self) -> list[OperandForm]:
        found: list[OperandForm | None] = []
        for source in self._sources:
            if len(source.axes) == 4:
                batch, heads, *matrix = (leaves(axis) for axis in source.axes)
                found.append(self._form(source, (batch, heads, *matrix), (), ()))
                found.append(self._form(source, (batch, heads, *matrix[::-1]), (), (0, 1, 3, 2)))
        return [form for form in found if form is not None]

    def _form(
        self,
        source: TracedSource,
        axes: tuple[list[Factor], ...],
        target: tuple[int, ...],
        perm: tuple[int, ...],
    ) -> OperandForm | None:
        """Return the form of `source` with these axes (batch, heads, sequence, size), if it fits.

        Only repeated heads, which are not factors of the source, may follow the heads.
        """
        batch, heads, sequence, size = axes
        prefix, known = leaves(self._prefix), [leaves(self._sequence), leaves(self._size)]
        repeats = prefix[len(batch) + len(heads) :]
        if [sequence, size] != known or batch + heads + repeats != prefix:
            return None
        if self._batch is not None and batch != leaves(self._batch):
            return None  # the result would split batch and heads differently
        count, width = int_product(heads), int_product(size)
        own = {factor for axis in source.axes for factor in leaves(axis)}
        if count is None or width is None or own.intersection(repeats):
            return None
        sizes = size_of(batch), size_of(sequence), count, width
        return OperandForm(source, target, perm, *sizes, sizes[0] * count == size_of(prefix))


def heads_restored(g: Graph, value: str, at: NodeProto) -> str:
    """Return a value with merged batch and heads as [batch, heads, a, b], by its source or tokens.

    Returns `value` itself if neither is found. The last two axes may have been swapped since.
    """
    trace = Trace(g, value)
    axes = [leaves(axis) for axis in trace.axes]
    for source in trace.sources:
        own = [leaves(axis) for axis in source.axes]
        if len(own) != 4 or source.scale != 1.0 or own[0] + own[1] != axes[0]:
            continue
        if own[2:] == axes[1:]:
            return source.value
        if own[2:] == axes[:0:-1]:
            return transpose(g, source.value, (0, 1, 3, 2), at=at)
    form = AttentionOperand(g, value, scaled=False).tokens()
    if form is None or not form.keeps_heads:
        return value
    return split_heads(g, form.write(g, at), form.heads, form.size, at)


def split_heads(g: Graph, tokens: str, heads: int, size: int, at: NodeProto) -> str:
    """Write tokens [batch, sequence, heads * size] as [batch, heads, sequence, size]."""
    return transpose(g, reshape(g, tokens, (0, 0, heads, size), at=at), (0, 2, 1, 3), at=at)


def merge_batch_and_heads(g: Graph, value: str, at: NodeProto) -> str:
    """Write [batch, heads, a, b] as [batch * heads, a, b], where a and b are positive."""
    shape = g.shape(value)
    if shape is None:
        raise MatchFailure(f"the shape of '{value}' is not known")
    return reshape_to(g, value, (shape[0] * shape[1], *shape[2:]), at)


def mismatch(query: OperandForm, key: OperandForm, value: OperandForm) -> str:
    """Return why three forms do not fit together; blank when they do."""
    if not query.keeps_heads:
        return "the heads of the query are repeated"
    if key.batch != value.batch or query.batch not in (1, key.batch):
        return f"the batches differ: {query.batch}, {key.batch}, {value.batch}"
    # The MatMuls ensure equal lengths of keys and values, and equal sizes of queries and keys.
    if key.heads != value.heads or query.heads % key.heads:
        return f"the heads do not fit: {query.heads}, {key.heads}, {value.heads}"
    return ""
