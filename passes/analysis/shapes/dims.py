"""Arithmetic on dimensions: broadcasting, products, windows, slices.

All of it holds for every run of the model that does not fail: where an operator demands that two
sizes are equal, either one stands for both.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import gcd

from passes.analysis.axes import TO_THE_END
from passes.analysis.shapes.facts import Size, Sizes
from toolkit.symbolic import (
    Dim,
    Expr,
    bounds,
    ceildiv,
    floordiv,
    is_nonneg,
    maximum,
    minimum,
    substitute,
    symbol,
)
from toolkit.symbolic.polynomial import SYMBOL, Atom


def product(sizes: Iterable[Size]) -> Size:
    """The product; None when a factor is not known, unless another one is 0."""
    total: Dim = 1
    missing = False
    for size in sizes:
        if size is None:
            missing = True
        else:
            total = total * size
    return None if missing and total != 0 else total


def plus(*sizes: Size) -> Size:
    """The sum; None when a part is not known."""
    total: Dim = 0
    for size in sizes:
        if size is None:
            return None
        total = total + size
    return total


def best(sizes: Iterable[Size]) -> Size:
    """Of sizes that are surely equal the one that says most: number, name, formula, anonymous."""
    found: Size = None
    for size in sizes:
        if isinstance(size, int):
            return size
        if size is not None and (found is None or _says(size) > _says(found)):
            found = size
    return found


def _says(size: Dim) -> int:
    if _anonymous(size):
        return 0
    return 2 if isinstance(size, Expr) and _is_name(size) else 1


def _is_name(size: Expr) -> bool:
    """Whether the size is one symbol and nothing else: `length`, not `max(0, length - 1) + 1`."""
    if len(size.terms) != 1:
        return False
    [(monomial, factor)] = size.terms.items()
    return factor == 1 and len(monomial) == 1 and monomial[0].kind == SYMBOL


def _anonymous(size: Size) -> bool:
    return isinstance(size, Expr) and size.anonymous


def never_one(size: Expr) -> bool:
    """Whether the size is surely not 1: it is at least 2, or even, or the like."""
    factors = [factor for monomial, factor in size.terms.items() if monomial]
    if (size.terms.get((), 0) - 1) % gcd(*factors):
        return True
    low, high = bounds(size)
    return (low is not None and low > 1) or (high is not None and high < 1)


def spells_size(size: Dim) -> bool:
    """Whether it can only be 0 where a dimension of the model is (next to) nothing.

    So `batch`, `2*length + 1` and `floor(height/2)`, but neither `mod(length, 2)` nor `length - 3`.
    """
    if isinstance(size, int):
        return size > 0
    if any(factor < 0 for factor in size.terms.values()):
        return False
    return any(all(map(_is_size, monomial)) for monomial in size.terms)


def _is_size(atom: Atom) -> bool:
    if atom.op == "floor":
        return spells_size(atom.args[0])
    if atom.op in ("min", "max"):
        return all(map(spells_size, atom.args))
    return atom.op == "nonneg" or (isinstance(atom.key, str) and atom.op != "mod")


def broadcast_size(a: Size, b: Size) -> Size:
    """The size of a broadcast dimension.

    Of two sizes, one is 1 or both are equal. Two different symbols give neither of them: each may
    be the one that is 1.
    """
    if a is b:
        return a
    if isinstance(a, int):
        if a == 1:
            return b
        return a if not isinstance(b, int) or b in (1, a) else None
    if isinstance(b, int):
        return a if b == 1 else b
    if a == b:
        return a
    for size, other in ((a, b), (b, a)):
        if size is not None and (never_one(size) or (other is not None and one_for(size, other))):
            return size
    return None


def one_for(size: Expr, other: Expr) -> bool:
    """Whether `other` is surely 1 where `size` is: then `size` is what both broadcast to.

    So `length` and `min(512, length)`, a table cut to the length, broadcast to `length`.
    """
    name = next(iter(size.symbols), "")
    return size == symbol(name) and substitute(other, {name: 1}) == 1


def broadcast(a: Sizes, b: Sizes) -> Sizes:
    """The shape of an element-wise result."""
    if a is b or a == b:
        return a
    if len(a) < len(b):
        a, b = b, a
    extra = len(a) - len(b)
    return (*a[:extra], *(broadcast_size(x, y) for x, y in zip(a[extra:], b, strict=True)))


def broadcast_all(shapes: Iterable[Sizes | None]) -> Sizes | None:
    result: Sizes = ()
    for shape in shapes:
        if shape is None:
            return None
        result = broadcast(result, shape) if result else shape
    return result


def window(
    size: Size, kernel: Size, stride: int, dilation: int, pads: tuple[int, int], ceil: bool = False
) -> Size:
    """How often a window fits: floor((size + pads - extent)/stride) + 1, or the same with ceil.

    With ceil, runtimes disagree on a last window that starts in the padding at the end: None there.
    """
    if size is None or kernel is None:
        return None
    extent = (kernel - 1) * dilation + 1
    span = size + sum(pads) - extent
    if not ceil:
        return _countable(floordiv(span, stride) + 1)
    count = ceildiv(span, stride) + 1
    if isinstance(count, int) and isinstance(size, int):
        inside = (count - 1) * stride < size + pads[0]
    else:
        inside = is_nonneg(extent - stride - pads[1])
    return _countable(count) if inside else None


def _countable(size: Dim) -> Size:
    return None if isinstance(size, int) and size < 0 else size


def sliced(size: Size, start: Size, end: Size, step: Size) -> Size:
    """How many elements a Slice takes of `size`, or None where it cannot be told."""
    if size is None or start is None or end is None or not isinstance(step, int) or step == 0:
        return None
    if isinstance(size, int) and isinstance(start, int) and isinstance(end, int):
        taken = places(size, start, end, step)
        return None if taken is None else len(taken)
    if step < 0:
        whole = start == -1 or (isinstance(start, int) and start >= TO_THE_END) or start == size - 1
        to_begin = isinstance(end, int) and end <= -TO_THE_END
        return ceildiv(size, -step) if whole and to_begin else None
    span = _span(size, start, end)
    return None if span is None else ceildiv(span, step)


def places(size: int, start: int, end: int, step: int) -> range | None:
    """The indices that a Slice takes; None where runtimes disagree."""
    first = start + size if start < 0 else start
    last = end + size if end < 0 else end
    if step > 0:
        return range(min(max(first, 0), size), min(max(last, 0), size), step)
    if end >= TO_THE_END:
        return None  # onnxruntime goes all the way to the front, by the letter there is nothing
    # Unlike in Python, a start before the front is the front.
    return range(min(max(first, 0), size - 1), min(max(last, -1), size - 1), step)


def _span(size: Dim, start: Dim, end: Dim) -> Size:
    """Elements between start and end for a positive step.

    With start >= 0:  max(end' - start, 0),  end' = min(end, size) or end + size.
    With start < 0:   counted from the back, and not further than the front.
    """
    if isinstance(end, int) and end >= TO_THE_END:
        last: Dim = size
    elif is_nonneg(end):
        last = minimum(end, size)
    elif is_nonneg(-1 - end):
        last = end + size
    else:
        return None
    if is_nonneg(start):
        return maximum(last - start, 0)
    if is_nonneg(-1 - start):
        last = maximum(last, 0)
        return maximum(minimum(last - size - start, last), 0)
    return None
