"""Chains of views in one normal form.

Reshape, Flatten, Squeeze, Unsqueeze and Transpose split axes into factors, move them and merge
them. `view_chain` computes where a whole chain moves the factors of its source and rewrites it with
the fewest nodes that do the same:

    no factor moves         nothing, a Squeeze, an Unsqueeze or a Reshape
    whole axes move         a Transpose, with at most one of those before it or after it
    anything else           the chain stays

`cleanup` and `layout` both apply these rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from onnx import NodeProto

from passes.analysis.operands import (
    dims,
    given,
    int_vector,
    reshape,
    reshape_target,
    squeeze,
    transpose,
    unsqueeze,
)
from passes.analysis.view_algebra import Axis, Factor, leaves, size_of, viewed
from toolkit.ir import Graph, Shape, TensorType, node as nd
from toolkit.ir.op_traits import VIEWS
from toolkit.pattern import op, var
from toolkit.rewriting.rule import rewrite
from toolkit.symbolic import Dim, Expr, is_positive, symbol

x = var("x")

_LONGEST_CHAIN = 16


@dataclass(frozen=True, slots=True)
class ViewStep:
    """A node of the normal form: its operator, its axes or target, and the shape of its result."""

    op_type: str
    numbers: tuple[int, ...]
    shape: Shape


@rewrite(op.any(*VIEWS, "Transpose")(var(), ...))
def view_chain(g: Graph, node: NodeProto) -> str | None:
    """Rewrite a chain of views with the fewest nodes.

    Intermediate values with other users stay, so only the nodes below them count as removed. A
    chain that would be rewritten with as many nodes as it removes is rewritten only if the new
    node reads a value further up and is no costlier than the old one.
    """
    chain = list(_chain(g, node))
    best: tuple[int, str, list[ViewStep]] | None = None
    for length in range(len(chain), 0, -1):
        source = chain[length - 1].input[0]
        steps = _normal_form(g, source, chain[length - 1 :: -1])
        if steps is None:
            continue
        gain = _removed(g, chain[:length]) - len(steps)
        better = gain > 0 or (gain == 0 and _is_shorter(g, node, length, steps))
        if better and (best is None or gain > best[0]):
            best = gain, source, steps
    return None if best is None else _write(g, *best[1:], node)


def viewed_as(g: Graph, value: str, shape: Shape, at: NodeProto) -> str | None:
    """Reshape `value` to `shape`; return None if no constant target expresses that.

    The result is a view of `value`, or of a value that `value` is a view of.
    """
    for source in (value, *(node.input[0] for node in _chain(g, g.producer(value), VIEWS))):
        before = g.shape(source)
        steps = None if before is None else _in_order(g, before, shape)
        if steps is not None:
            return _write(g, source, steps, at)
    return None


def _chain(
    g: Graph, node: NodeProto | None, views: Sequence[str] = (*VIEWS, "Transpose")
) -> Iterator[NodeProto]:
    """Yield `node` and its producers as long as they are views, nearest first."""
    for _ in range(_LONGEST_CHAIN):
        if node is None or not nd.is_op(node, *views):
            return
        yield node
        node = g.producer(node.input[0])


def _removed(g: Graph, chain: Sequence[NodeProto]) -> int:
    """Count the nodes of a chain, nearest first, that are dead once the first one is replaced."""
    for count, node in enumerate(chain[1:], 1):
        if g.use_count(node.output[0]) != 1:
            return count
    return len(chain)


def _is_shorter(g: Graph, node: NodeProto, length: int, steps: Sequence[ViewStep]) -> bool:
    """Return whether one node that replaces `node` alone is worth writing."""
    if len(steps) != 1:
        return False
    written = steps[0].op_type
    if length == 1:  # a computed target need not be computed
        computed = nd.is_op(node, "Reshape") and not g.is_const(given(node, 1))
        return computed and written in ("Squeeze", "Unsqueeze")
    return written == node.op_type or (
        written in ("Squeeze", "Unsqueeze") and nd.is_op(node, *VIEWS)
    )


def _write(g: Graph, source: str, steps: Sequence[ViewStep], at: NodeProto) -> str:
    write = {
        "Squeeze": squeeze,
        "Unsqueeze": unsqueeze,
        "Reshape": reshape,
        "Transpose": transpose,
    }
    value = source
    for step in steps:
        value = write[step.op_type](g, value, step.numbers, at=at)
        if g.shape(source) is not None:
            g.learn_type(value, TensorType(g.dtype(source), step.shape))
    return value


def _normal_form(g: Graph, source: str, chain: Sequence[NodeProto]) -> list[ViewStep] | None:
    """Return the fewest steps from `source` to the result of a chain, None if they are unknown."""
    shape = g.shape(source)
    if shape is None:  # a permutation still determines the rank
        perm = nd.attr(chain[0], "perm") if nd.is_op(chain[0], "Transpose") else None
        if perm is None:
            return None
        shape = tuple(symbol(f"{source}?{axis}") for axis in range(len(perm)))
    before = after = _single_factors(shape)
    known = True  # whether `after` has the factors of `before`, so that they can be compared
    moved = False
    for node in chain:
        found = viewed(g, node, after)
        if nd.is_op(node, "Transpose"):
            if found is None:
                return None
            moved = moved or _flat(found) != _flat(after)
        elif found is None:
            result = g.shape(node.output[0])
            if result is None:
                return None
            found, known = _single_factors(result), False
        after = found
    sizes = tuple(size_of(axis) for axis in after)
    if not moved or (known and _flat(before) == _flat(after)):
        return _in_order(g, shape, sizes)
    return _transposed(g, before, after) if known else None


def _single_factors(shape: Shape) -> list[Axis]:
    return [[Factor(size)] for size in shape]


def _flat(axes: Sequence[Axis]) -> list[Factor]:
    return [factor for axis in axes for factor in leaves(axis)]


def _in_order(g: Graph, before: Shape, after: Shape) -> list[ViewStep] | None:
    """Return the steps between two shapes of the same elements in the same order."""
    if before == after:
        return []
    added, dropped = _ones_among(after, before), _ones_among(before, after)
    if added is not None:
        return [ViewStep("Unsqueeze", added, after)]
    if dropped is not None:
        return [ViewStep("Squeeze", dropped, after)]
    target = reshape_target(before, after) if g.opset() >= 5 else None
    return None if target is None else [ViewStep("Reshape", tuple(target), after)]


def _ones_among(longer: Shape, shorter: Shape) -> tuple[int, ...] | None:
    """Return the axes of size 1 that `longer` has in addition; None if more differs."""
    axes: list[int] = []
    left = list(shorter)
    for axis, size in enumerate(longer):
        if left and left[0] == size:
            left.pop(0)
        elif size == 1:
            axes.append(axis)
        else:
            return None
    return None if left else tuple(axes)


def _transposed(g: Graph, before: Sequence[Axis], after: Sequence[Axis]) -> list[ViewStep] | None:
    """Return a Transpose of whole axes, and a view before it or after it, whichever is shorter."""
    forms: list[list[ViewStep]] = []
    perm = _order(before, after)
    if perm is not None:
        shape = _sizes([before[axis] for axis in perm])
        last = _in_order(g, shape, _sizes(after))
        if last is not None:
            forms.append([ViewStep("Transpose", tuple(perm), shape), *last])
    order = _order(after, before)
    if order is not None:
        shape = _sizes([after[axis] for axis in order])
        first = _in_order(g, _sizes(before), shape)
        perm = tuple(order.index(axis) for axis in range(len(order)))
        if first is not None:
            forms.append([*first, ViewStep("Transpose", perm, _sizes(after))])
    return min(forms, key=len, default=None)


def _sizes(axes: Sequence[Axis]) -> Shape:
    return tuple(size_of(axis) for axis in axes)


def _order(axes: Sequence[Axis], other: Sequence[Axis]) -> list[int] | None:
    """Return `axes` in the order in which `other` has their factors, None if it splits one.

    Axes of size 1 take the positions of those in `other`, then the end.
    """
    starts = {id(leaves(axis)[0]): index for index, axis in enumerate(axes) if leaves(axis)}
    ones = [index for index, axis in enumerate(axes) if not leaves(axis)]
    order: list[int] = []
    for target in other:
        factors = leaves(target)
        if not factors and ones:
            order.append(ones.pop(0))
        while factors:
            index = starts.get(id(factors[0]))
            if index is None:
                return None
            whole = leaves(axes[index])
            if factors[: len(whole)] != whole:
                return None
            order.append(index)
            factors = factors[len(whole) :]
    order += ones
    return order if len(order) == len(axes) else None


@rewrite(op.Reshape(op.any(*VIEWS)(x, ...).shared().named("inner"), var("shape")))
def reshape_of_view(g: Graph, x: str, inner: NodeProto, shape: str, node: NodeProto) -> str | None:
    """Reshape `x` to the last target, in which a 0 must copy the same size from `x`.

    `view_chain` leaves computed targets and unknown sizes to this rule.
    """
    if nd.attr(node, "allowzero", 0):
        return g.op("Reshape", x, shape, at=node, allowzero=1)
    target = dims(g, shape)
    before, between = g.shape(x), g.shape(inner.output[0])
    if target is None:
        return None
    numbers: list[int] = []
    computed = False
    for position, size in enumerate(target):
        kept: Dim | None = between[position] if between and position < len(between) else None
        copied = before is not None and position < len(before) and before[position] == kept
        if isinstance(size, Expr):
            # A computed size may be 0 for an empty dimension, and then copies.
            if not copied and not is_positive(size):
                return None
            numbers.append(-1)
            computed = True
        elif size == 0 and not copied:
            if not isinstance(kept, int) or not kept:
                return None
            numbers.append(kept)
        else:
            numbers.append(size)
    if any(old == 0 != new for old, new in zip(target, numbers, strict=True)):
        if computed:
            return None
        shape = int_vector(g, numbers, "shape")
    return g.op("Reshape", x, shape, at=node)


RULES = (view_chain, reshape_of_view)
