"""Operands of attention in the forms that the Attention operator takes.

A value whose last two axes are (sequence, head size), or the other way round for a transposed key,
is wanted either as tokens [batch, sequence, heads * head size], the fastest form, or with its heads
apart [batch, heads, sequence, head size]. Heads that are only repeated (grouped queries) are left
out of both: the operator repeats them itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from onnx import NodeProto

from passes.analysis.operands import int_vector, reshape, transpose
from passes.analysis.view_algebra import Axis, Factor, Source, Trace, int_product, leaves, size_of
from toolkit.ir.graph import Graph
from toolkit.ir.tensor_type import TensorType
from toolkit.symbolic import Dim

_ORDERS = ((0, 1, 2), (1, 0, 2), (0, 2, 1))
"""Where a source of three axes has batch, sequence and the rest: tokens, the sequence first, or, as
convolutions give it, the sequence last."""


@dataclass(frozen=True, slots=True)
class Form:
    """How to make an operand of `source`: reshaped to `target` if need be, axes moved by `perm`."""

    source: Source
    target: tuple[int, ...]
    perm: tuple[int, ...]
    batch: Dim
    sequence: Dim
    heads: int
    size: int

    @property
    def on_tokens(self) -> bool:
        """Whether it is [batch, sequence, heads * size]."""
        return bool(self.target) or len(self.source.axes) == 3

    @property
    def steps(self) -> int:
        """Nodes that it takes."""
        return bool(self.target) + bool(self.perm)


class Operand:
    """Query, key or value: the value that a MatMul reads, and what it is a view of."""

    def __init__(
        self, g: Graph, value: str, sequence: int = -2, size: int = -1, scaled: bool = True
    ) -> None:
        """`sequence` and `size` are axes counted from the back, those before are batch and heads.

        `scaled`: what it is a view of may differ by a factor, which the form then names.
        """
        self._g = g
        trace = Trace(g, value)
        self.rank = rank = len(trace.axes)
        self._sources = [s for s in trace.sources if scaled or s.scale == 1.0]
        before = [trace.axes[i] for i in range(rank) if i - rank not in (sequence, size)]
        self._prefix = [factor for axis in before for factor in axis]
        self._batch = before[0] if rank == 4 else None
        nothing: Axis = ()
        self._sequence = trace.axes[sequence] if rank > 2 else nothing
        self._size = trace.axes[size] if rank > 2 else nothing

    @property
    def matrices(self) -> Dim:
        """How many matrices there are: batch times heads."""
        return size_of(self._prefix)

    def keeps_heads(self, form: Form) -> bool:
        """Whether a form has all heads of the operand, repeated ones too."""
        return form.batch * form.heads == self.matrices

    def tokens(self) -> Form | None:
        """The operand as [batch, sequence, heads * size], with as many heads as can be told."""
        found = [form for source in self._sources for form in self._token_forms(source)]
        return max(found, key=lambda form: (form.heads, -form.steps), default=None)

    def merged(self) -> Form | None:
        """The operand as [matrices, sequence, size]: one head, and a batch of all matrices."""
        found = [form for source in self._sources for form in self._token_forms(source)]
        single = [form for form in found if form.heads == 1 and form.batch == self.matrices]
        return min(single, key=lambda form: form.steps, default=None)

    def apart(self) -> Form | None:
        """The operand as [batch, heads, sequence, size]."""
        found = [form for source in self._sources for form in self._apart_forms(source)]
        # The farthest of the cheapest: what lies between may then go.
        return min(reversed(found), key=lambda form: (form.steps, form.heads), default=None)

    def _token_forms(self, source: Source) -> list[Form]:
        """The source as tokens: a single sequence, its last two axes merged, or its axes moved."""
        axes = [leaves(axis) for axis in source.axes]
        target: tuple[int, ...] = ()
        if len(axes) == 4:
            axes = [axes[0], axes[1], axes[2] + axes[3]]
            target = (0, 0, int_product(axes[2]) or 0)
        elif len(axes) == 2:
            axes = [[], *axes]
            target = (1, -1, int_product(axes[2]) or 0)
        if len(axes) != 3 or target[2:] == (0,):
            return []
        found = (self._form(source, [axes[i] for i in perm], target, perm) for perm in _ORDERS)
        return [form for form in found if form is not None]

    def _form(
        self,
        source: Source,
        axes: list[list[Factor]],
        target: tuple[int, ...],
        perm: tuple[int, ...],
    ) -> Form | None:
        (batch, sequence, rest), perm = axes, () if perm == _ORDERS[0] else perm
        prefix, size = leaves(self._prefix), leaves(self._size)
        if sequence != leaves(self._sequence) or prefix[: len(batch)] != batch:
            return None
        heads = rest[: len(rest) - len(size)]
        if heads + size != rest or not self._heads_are(prefix[len(batch) :], heads):
            return None
        return self._made(source, batch, sequence, heads, target, perm)

    def _apart_forms(self, source: Source) -> list[Form]:
        axes = [leaves(axis) for axis in source.axes]
        if len(axes) != 4:
            return []
        prefix, sequence, size = leaves(self._prefix), leaves(self._sequence), leaves(self._size)
        if prefix[: len(axes[0])] != axes[0]:
            return []
        if not self._heads_are(prefix[len(axes[0]) :], axes[1]):
            return []
        if axes[2:] == [sequence, size]:
            perm: tuple[int, ...] = ()
        elif axes[2:] == [size, sequence]:
            perm = (0, 1, 3, 2)
        else:
            return []
        form = self._made(source, axes[0], sequence, axes[1], (), perm)
        return [] if form is None else [form]

    @staticmethod
    def _heads_are(wanted: list[Factor], heads: list[Factor]) -> bool:
        """Whether these are the heads, or each of them is repeated as often as the rest says."""
        return wanted[: len(heads)] == heads

    def _made(
        self,
        source: Source,
        batch: list[Factor],
        sequence: list[Factor],
        heads: list[Factor],
        target: tuple[int, ...],
        perm: tuple[int, ...],
    ) -> Form | None:
        if self._batch is not None and batch != leaves(self._batch):
            return None  # what comes out would have its batch and heads grouped otherwise
        # Behind the heads only repetitions may follow, of which the source knows nothing.
        own = {factor for axis in source.axes for factor in leaves(axis)}
        repeats = leaves(self._prefix)[len(batch) + len(heads) :]
        count, size = int_product(heads), int_product(self._size)
        if count is None or size is None or own.intersection(repeats):
            return None
        return Form(source, target, perm, size_of(batch), size_of(sequence), count, size)

    def write(self, form: Form, at: NodeProto) -> str:
        """The operand in this form."""
        g, value = self._g, form.source.value
        dtype = g.dtype(value)
        shape = g.shape(value) or ()
        if form.target:
            value = reshape(g, value, form.target, at=at)
            shape = (*((1, *shape) if len(shape) == 2 else shape)[:2], form.target[2])
            g.learn_type(value, TensorType(dtype, shape))
        if form.perm:
            value = transpose(g, value, form.perm, at=at)
            g.learn_type(value, TensorType(dtype, tuple(shape[axis] for axis in form.perm)))
        return value


def heads_restored(g: Graph, value: str, at: NodeProto) -> str:
    """What was [batch, heads, a, b], or tokens, before its first axes were merged, as the former.

    The value itself where that cannot be told. Its last two axes may have changed places since.
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
            perm = (0, 1, 3, 2)
            turned = transpose(g, source.value, perm, at=at)
            sizes = tuple(size_of(source.axes[axis]) for axis in perm)
            g.learn_type(turned, TensorType(g.dtype(value), sizes))
            return turned
    operand = Operand(g, value, scaled=False)
    form = operand.tokens()
    if form is None or not operand.keeps_heads(form):
        return value
    return heads_apart(g, operand.write(form, at), form.heads, form.size, at)


def heads_apart(g: Graph, tokens: str, heads: int, size: int, at: NodeProto) -> str:
    """Tokens [batch, sequence, heads * size] as [batch, heads, sequence, size]."""
    dtype, shape = g.dtype(tokens), g.shape(tokens)
    apart = reshape(g, tokens, (0, 0, heads, size), at=at)
    moved = transpose(g, apart, (0, 2, 1, 3), at=at)
    if shape is not None:
        batch, sequence, _ = shape
        g.learn_type(apart, TensorType(dtype, (batch, sequence, heads, size)))
        g.learn_type(moved, TensorType(dtype, (batch, heads, sequence, size)))
    return moved


def heads_merged(g: Graph, value: str, at: NodeProto) -> str:
    """[batch, heads, a, b] as [batch * heads, a, b]; nothing may be empty that -1 stands for."""
    length = g.op("Shape", value, at=at, start=2, end=None)
    target = g.op("Concat", int_vector(g, [-1]), length, at=at, axis=0)
    return g.op("Reshape", value, target, at=at)


def mismatch(query: Form, key: Form, value: Form, operand: Operand) -> str:
    """Why these do not fit together, for this query; blank when they do."""
    if not operand.keeps_heads(query):
        return "the query's heads are repeated"
    if key.batch != value.batch or query.batch not in (1, key.batch):
        return f"the batches differ: {query.batch}, {key.batch}, {value.batch}"
    # The MatMuls see to it that keys and values, and the sizes of queries and keys, are as many.
    if key.heads != value.heads or query.heads % key.heads:
        return f"the heads do not fit: {query.heads}, {key.heads}, {value.heads}"
    return ""
