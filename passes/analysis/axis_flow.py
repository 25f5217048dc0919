"""How operators carry axes: the source of each axis of a result, operand by operand.

`axis_flow(g, node)` has, for each operand with axes of its own, one source per axis of the result:

    b >= 0       carried: entry i of the result depends on the operand through entry i of its
                 axis b alone
    BROADCAST    all entries of the result depend on the operand in the same way: it lacks the axis,
                 has size 1 along it, or is used whole (the table of a Gather)
    MIXED        entries are reduced, cut, joined or moved, or nothing is known

`ROWS` has one row per operator. Operands that are absent from a flow (weights, shapes, bounds) do
not vary along carried axes. All outputs of a Split share one flow; of any other operator it
describes the first output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from onnx import NodeProto

from passes.analysis.axes import positive_axes
from passes.analysis.operands import given, int_operand, normalized_from, operand, permutation
from toolkit.ir import Graph, Shape, node as nd
from toolkit.ir.op_traits import BROADCASTING, ELEMENTWISE, REDUCTIONS
from toolkit.symbolic import Dim

BROADCAST = -1
MIXED = -2


@dataclass(frozen=True, slots=True)
class OperandAxes:
    """The source of each axis of the result in one operand."""

    sources: tuple[int, ...]
    """An axis of the operand, BROADCAST or MIXED."""
    missing: int = 0
    """Leading axes that the operand lacks compared with the shape it is broadcast to."""

    def keeps_first(self) -> bool:
        """Return whether the first axis stays first and its entries independent of each other."""
        if self.missing or not self.sources:
            return bool(self.missing)
        first, *others = self.sources
        return first == 0 or (first == BROADCAST and 0 not in others)


@dataclass(frozen=True, slots=True)
class AxisFlow:
    """Operand axes by input index."""

    operands: Mapping[int, OperandAxes]
    named: tuple[int, ...] = ()
    """The axes of the first operand that the node names, or operates along by default."""


def axis_flow(g: Graph, node: NodeProto) -> AxisFlow | None:
    """Return how `node` carries axes, or None where that is unknown."""
    row = ROWS.get(nd.qualified(node))
    return None if row is None else row(g, node)


def carried_from(g: Graph, node: NodeProto) -> tuple[int, ...] | None:
    """Return the sources of the result's axes in the first operand, or None."""
    found = axis_flow(g, node)
    return None if found is None else found.operands[0].sources


# -- axes that stay in place


def _in_place(
    g: Graph,
    node: NodeProto,
    mixed: Iterable[int] | None = (),
    named: bool = False,
    slots: Iterable[int] = (0,),
) -> AxisFlow | None:
    rank = g.rank(node.input[0])
    if rank is None or mixed is None:
        return None
    along = tuple(mixed)
    sources = tuple(MIXED if axis in along else axis for axis in range(rank))
    return AxisFlow({slot: OperandAxes(sources) for slot in slots}, along if named else ())


def _elementwise(g: Graph, node: NodeProto) -> AxisFlow | None:
    return _in_place(g, node)


def _axis(g: Graph, node: NodeProto, default: int) -> list[int] | None:
    return positive_axes([nd.attr(node, "axis", default)], g.rank(node.input[0]))


def _softmax(g: Graph, node: NodeProto) -> AxisFlow | None:
    if g.opset() >= 13:
        return _in_place(g, node, _axis(g, node, -1), named=True)
    first, rank = _axis(g, node, 1), g.rank(node.input[0]) or 0  # all axes from this one on
    return None if first is None else _in_place(g, node, range(first[0], rank))


def _split(g: Graph, node: NodeProto) -> AxisFlow | None:
    return _in_place(g, node, _axis(g, node, 0), named=True)


def _concat(g: Graph, node: NodeProto) -> AxisFlow | None:
    if len({g.rank(name) for name in node.input}) != 1:
        return None
    slots = range(len(node.input))
    return _in_place(g, node, _axis(g, node, 1), named=True, slots=slots)


def _quantize(g: Graph, node: NodeProto) -> AxisFlow | None:
    scale = g.shape(node.input[1])
    if scale in ((), (1,)):
        return _in_place(g, node)
    if scale is None or len(scale) != 1 or g.opset() < 13:
        return None  # block-wise scales have axes of their own
    return _in_place(g, node, _axis(g, node, 1), named=True)


def _norm(g: Graph, node: NodeProto) -> AxisFlow | None:
    first, rank = normalized_from(g, node), g.rank(node.input[0])
    return None if first is None or rank is None else _in_place(g, node, range(first, rank))


def _slice(g: Graph, node: NodeProto) -> AxisFlow | None:
    starts = nd.attr(node, "starts") or operand(g, node, "starts", 1)
    if starts is None:
        [count] = g.shape(node.input[1]) or (None,)
    else:
        count = len(starts)
    absent = range(count) if isinstance(count, int) else None
    axes = int_operand(g, node, "axes", 3, absent)
    return _in_place(g, node, positive_axes(axes, g.rank(node.input[0])), named=True)


def _pad(g: Graph, node: NodeProto) -> AxisFlow | None:
    rank = g.rank(node.input[0])
    if given(node, 3):
        axes = int_operand(g, node, "axes", 3)
        return _in_place(g, node, positive_axes(axes, rank), named=True)
    pads = int_operand(g, node, "pads", 1)
    if rank is None or pads is None or len(pads) != 2 * rank:
        return None
    return _in_place(g, node, [a for a in range(rank) if pads[a] or pads[rank + a]], named=True)


def _tile(g: Graph, node: NodeProto) -> AxisFlow | None:
    repeats = int_operand(g, node, "repeats", 1) if g.opset() >= 6 else None
    if repeats is None or len(repeats) != g.rank(node.input[0]):
        return None
    repeated = [axis for axis, times in enumerate(repeats) if times != 1]
    return _in_place(g, node, repeated, named=True)


def _windows(leading: int) -> Callable[[Graph, NodeProto], AxisFlow | None]:
    """Return the row of an operator that combines entries of all but the leading axes."""

    def row(g: Graph, node: NodeProto) -> AxisFlow | None:
        kernel = nd.attr(node, "kernel_shape", ())
        rank = len(kernel) + 2 if kernel else g.rank(node.input[0])
        if rank is None:
            return None
        sources = (*range(leading), *[MIXED] * (rank - leading))
        return AxisFlow({0: OperandAxes(sources)})

    return row


# -- axes that are dropped, inserted or moved


def _reduction(g: Graph, node: NodeProto) -> AxisFlow | None:
    axes, rank = int_operand(g, node, "axes", 1, absent=[]), g.rank(node.input[0])
    if axes == [] and nd.attr(node, "noop_with_empty_axes", 0):
        return _in_place(g, node)
    return _reduced(g, node, range(rank or 0) if axes == [] else positive_axes(axes, rank))


def _arg(g: Graph, node: NodeProto) -> AxisFlow | None:
    return _reduced(g, node, _axis(g, node, 0))


def _reduced(g: Graph, node: NodeProto, axes: Iterable[int] | None) -> AxisFlow | None:
    if nd.attr(node, "keepdims", 1):
        return _in_place(g, node, axes, named=True)
    return _dropped(g, node, axes)


def _dropped(g: Graph, node: NodeProto, axes: Iterable[int] | None) -> AxisFlow | None:
    rank = g.rank(node.input[0])
    if rank is None or axes is None:
        return None
    gone = tuple(axes)
    return AxisFlow({0: OperandAxes(tuple(a for a in range(rank) if a not in gone))}, gone)


def _squeeze(g: Graph, node: NodeProto) -> AxisFlow | None:
    axes = int_operand(g, node, "axes", 1, absent=[])
    if axes == []:
        return _reshape(g, node)
    return _dropped(g, node, positive_axes(axes, g.rank(node.input[0])))


def _unsqueeze(g: Graph, node: NodeProto) -> AxisFlow | None:
    axes, rank = int_operand(g, node, "axes", 1), g.rank(node.input[0])
    if axes is None or rank is None:
        return None
    new = positive_axes(axes, rank + len(axes))
    if new is None:
        return None
    kept = iter(range(rank))
    sources = (BROADCAST if a in new else next(kept) for a in range(rank + len(new)))
    return AxisFlow({0: OperandAxes(tuple(sources))})


def _transpose(g: Graph, node: NodeProto) -> AxisFlow | None:
    perm = permutation(g, node)
    return None if perm is None else AxisFlow({0: OperandAxes(perm)})


def _reshape(g: Graph, node: NodeProto) -> AxisFlow | None:
    """Carry an axis whose size and number of preceding entries stay the same."""
    before, after = g.shape(node.input[0]), g.shape(node.output[0])
    if before is None or after is None or 0 in before or 0 in after:
        return None
    found = {place: axis for axis, place in enumerate(_starts(before)) if place[1] != 1}
    sources: list[int] = []
    for axis, (start, size) in enumerate(_starts(after)):
        if size != 1:
            sources.append(found.get((start, size), MIXED))
        else:
            sources.append(axis if before[: axis + 1] == after[: axis + 1] else BROADCAST)
    return AxisFlow({0: OperandAxes(tuple(sources))})


def _starts(shape: Shape) -> list[tuple[Dim, Dim]]:
    """Return each axis's number of entries in front, and its size."""
    found: list[tuple[Dim, Dim]] = []
    entries: Dim = 1
    for size in shape:
        found.append((entries, size))
        entries = entries * size
    return found


# -- operands that are broadcast


def _aligned(*shapes: Shape) -> list[OperandAxes]:
    """Return the axes of operands that are broadcast against each other."""
    rank = max(map(len, shapes), default=0)
    full = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    found: list[OperandAxes] = []
    for shape, own in zip(shapes, full, strict=True):
        missing = rank - len(shape)
        sources: list[int] = [BROADCAST] * missing
        for axis in range(missing, rank):
            sizes = {other[axis] for other in full if other[axis] != 1}
            if len(sizes) > 1:
                sources.append(MIXED)  # either may turn out to be 1
            else:
                sources.append(BROADCAST if sizes and own[axis] == 1 else axis - missing)
        found.append(OperandAxes(tuple(sources), missing))
    return found


def _broadcasting(g: Graph, node: NodeProto) -> AxisFlow | None:
    shapes = [g.shape(name) for name in node.input]
    known = [shape for shape in shapes if shape is not None]
    if g.opset() < 7 or len(known) != len(shapes):
        return None
    return AxisFlow(dict(enumerate(_aligned(*known))))


def _expand(g: Graph, node: NodeProto) -> AxisFlow | None:
    before, after = g.shape(node.input[0]), g.shape(node.output[0])
    if before is None or after is None or len(before) > len(after):
        return None
    return AxisFlow({0: _aligned(before, after)[0]})


def _biased(g: Graph, node: NodeProto) -> AxisFlow | None:
    """Carry all axes of an activation with an optional bias along the last one."""
    rank = g.rank(node.input[0])
    if rank is None or not given(node, 1):
        return _in_place(g, node)
    bias = OperandAxes((*[BROADCAST] * (rank - 1), 0), rank - 1)
    return AxisFlow({0: OperandAxes(tuple(range(rank))), 1: bias})


def _matmul(g: Graph, node: NodeProto) -> AxisFlow | None:
    shapes = [g.shape(name) or () for name in node.input]
    if min(map(len, shapes)) < 2:
        return None
    x, y = _aligned(*(shape[:-2] for shape in shapes))
    rows = OperandAxes((*x.sources, len(shapes[0]) - 2, BROADCAST), x.missing)
    columns = OperandAxes((*y.sources, BROADCAST, len(shapes[1]) - 1), y.missing)
    return AxisFlow({0: rows, 1: columns})


def _gemm(g: Graph, node: NodeProto) -> AxisFlow | None:
    rows = OperandAxes((nd.attr(node, "transA", 0), BROADCAST))
    columns = OperandAxes((BROADCAST, 1 - nd.attr(node, "transB", 0)))
    if not given(node, 2):
        return AxisFlow({0: rows, 1: columns})
    result, added = g.shape(node.output[0]), g.shape(node.input[2])
    if result is None or added is None or g.opset() < 7:
        return None
    return AxisFlow({0: rows, 1: columns, 2: _aligned(added, result)[0]})


def _gather(g: Graph, node: NodeProto) -> AxisFlow | None:
    ranks, axes = [g.rank(name) for name in node.input], _axis(g, node, 0)
    if axes is None or ranks[0] is None or ranks[1] is None:
        return None
    [first], inserted, behind = axes, range(ranks[1]), range(axes[0] + 1, ranks[0])
    table = (*range(first), *[BROADCAST] * len(inserted), *behind)
    index = (*[BROADCAST] * first, *inserted, *[BROADCAST] * len(behind))
    return AxisFlow({0: OperandAxes(table), 1: OperandAxes(index)})


def _rotary(g: Graph, node: NodeProto) -> AxisFlow | None:
    """Carry the leading axes; each row has its own angles or position."""
    rank, ranks = g.rank(node.input[0]), {3: 2} if given(node, 3) else {1: 3, 2: 3}
    if rank is None or any(g.rank(node.input[slot]) != own for slot, own in ranks.items()):
        return None
    sources = OperandAxes((*range(rank - 1), MIXED))
    angles = OperandAxes((0, *[BROADCAST] * (rank - 3), 1, BROADCAST))
    return AxisFlow({0: sources, **dict.fromkeys(ranks, angles)})


ROWS: Mapping[str, Callable[[Graph, NodeProto], AxisFlow | None]] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys((*BROADCASTING, "PRelu"), _broadcasting),
    **dict.fromkeys(REDUCTIONS, _reduction),
    **dict.fromkeys(("ArgMax", "ArgMin"), _arg),
    **dict.fromkeys(("AveragePool", "MaxPool"), _windows(2)),
    "Concat": _concat,
    **dict.fromkeys(("Conv", "ConvTranspose", "DepthToSpace", "SpaceToDepth"), _windows(1)),
    **dict.fromkeys(("DequantizeLinear", "QuantizeLinear"), _quantize),
    "Expand": _expand,
    **dict.fromkeys(("Flatten", "Reshape"), _reshape),
    "Gather": _gather,
    "Gemm": _gemm,
    **dict.fromkeys(("GlobalAveragePool", "GlobalMaxPool"), _windows(2)),
    **dict.fromkeys(("Hardmax", "LogSoftmax", "Softmax"), _softmax),
    **dict.fromkeys(("LayerNormalization", "RMSNormalization"), _norm),
    "MatMul": _matmul,
    "Pad": _pad,
    "RotaryEmbedding": _rotary,
    "Slice": _slice,
    "Split": _split,
    "Squeeze": _squeeze,
    "Tile": _tile,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
    **dict.fromkeys(("com.microsoft::BiasGelu", "com.microsoft::FastGelu"), _biased),
    **dict.fromkeys(("com.microsoft::Gelu", "com.microsoft::QuickGelu"), _elementwise),
}
