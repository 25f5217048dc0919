"""Arithmetic on dimensions: broadcasting, products, windows, slices.

Results hold for every run of the model that does not fail: where an operator requires two sizes to
be equal, either one stands for both.
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
    """Return the product; None if a factor is unknown, unless another one is 0."""
    total: Dim = 1
    missing = False
    for size in sizes:
        if size is None:
            missing = True
        else:
            total = total * size
    return None if missing and total != 0 else total


def plus(*sizes: Size) -> Size:
    """Return the sum, or None if a term is unknown."""
    total: Dim = 0
    for size in sizes:
        if size is None:
            return None
        total = total + size
    return total


def best(sizes: Iterable[Size]) -> Size:
    """Return the most specific of equal sizes: number, symbol, formula or anonymous symbol."""
    known = [size for size in sizes if size is not None]
    return max(known, key=_specificity, default=None)


def _specificity(size: Dim) -> int:
    if isinstance(size, int):
        return 3
    return 0 if size.anonymous else 2 if _is_symbol(size) else 1


def _is_symbol(size: Expr) -> bool:
    """Return whether the size is a single symbol: `length`, not `max(0, length - 1) + 1`."""
    if len(size.terms) != 1:
        return False
    [(monomial, factor)] = size.terms.items()
    return factor == 1 and len(monomial) == 1 and monomial[0].kind == SYMBOL


def never_one(size: Expr) -> bool:
    """Return whether the size is provably not 1, by its bounds or by a common divisor."""
    factors = [factor for monomial, factor in size.terms.items() if monomial]
    if (size.terms.get((), 0) - 1) % gcd(*factors):
        return True
    low, high = bounds(size)
    return (low is not None and low > 1) or (high is not None and high < 1)


def is_zero_only_if_empty(size: Dim) -> bool:
    """Return whether the size is 0 only if a dimension of the model is (close to) 0.

    True for `batch`, `2*length + 1` and `floor(height/2)`; false for `mod(length, 2)` and
    `length - 3`.
    """
    if isinstance(size, int):
        return size > 0
    if any(factor < 0 for factor in size.terms.values()):
        return False
    return any(all(map(_is_size, monomial)) for monomial in size.terms)


def _is_size(atom: Atom) -> bool:
    if atom.op == "floor":
        return is_zero_only_if_empty(atom.args[0])
    if atom.op in ("min", "max"):
        return all(map(is_zero_only_if_empty, atom.args))
    return atom.op == "nonneg" or (isinstance(atom.key, str) and atom.op != "mod")


def broadcast_size(a: Size, b: Size) -> Size:
    """Return the size of a broadcast dimension, or None.

    One of the sizes is 1 or both are equal. Of two different symbols, either may be 1.
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
    """Return whether `other` is 1 wherever `size` is 1, so that both broadcast to `size`.

    For example, `length` and `min(512, length)`, a table sliced to the length.
    """
    name = next(iter(size.symbols), "")
    return size == symbol(name) and substitute(other, {name: 1}) == 1


def broadcast(a: Sizes, b: Sizes) -> Sizes:
    """Return the shape of an elementwise result."""
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
    """Return the number of windows, floor((size + pads - extent)/stride) + 1, or None.

    With `ceil`, rounded up; None if the last window may start in the padding at the end, where
    runtimes disagree.
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
    """Return the number of elements that a Slice takes of `size`, or None."""
    if size is None or start is None or end is None or not isinstance(step, int) or step == 0:
        return None
    if isinstance(size, int) and isinstance(start, int) and isinstance(end, int):
        taken = slice_indices(size, start, end, step)
        return None if taken is None else len(taken)
    if step < 0:
        whole = start == -1 or (isinstance(start, int) and start >= TO_THE_END) or start == size - 1
        to_begin = isinstance(end, int) and end <= -TO_THE_END
        return ceildiv(size, -step) if whole and to_begin else None
    span = _span(size, start, end)
    return None if span is None else ceildiv(span, step)


def slice_indices(size: int, start: int, end: int, step: int) -> range | None:
    """Return the indices that a Slice takes, or None where runtimes disagree."""
    first = start + size if start < 0 else start
    last = end + size if end < 0 else end
    if step > 0:
        return range(min(max(first, 0), size), min(max(last, 0), size), step)
    if end >= TO_THE_END:
        return None  # onnxruntime stops at the front, the specification at the back
    # Unlike in Python, a start before the front is clamped to the front.
    return range(min(max(first, 0), size - 1), min(max(last, -1), size - 1), step)


def _span(size: Dim, start: Dim, end: Dim) -> Size:
    """Return the number of elements between start and end for a positive step, or None.

    With start >= 0:  max(end' - start, 0),  end' = min(end, size) or end + size.
    With start < 0:   counted from the back and clamped to the front.
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
