"""Write all biases and masks of an attention as one value, the operand `attn_mask`.

onnxruntime requires the shape [batch or 1, heads or 1, queries, keys]. A row of -inf results in 0,
and so does a row of the lowest finite number. But a model that masks with that number expects a
softmax of equal scores, the mean of all values. Such masks are raised to the next larger number: by
a Max, or, where -inf must be kept, by scaling with 1 - epsilon.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from onnx import NodeProto, TensorProto, helper

from passes.analysis.affine_index import size_in_inputs, truth
from passes.analysis.operands import int_vector, reshape
from passes.fuse.attention.scores import Bias
from passes.fuse.computed_sizes import SizeSource, reshape_to, size_vector
from toolkit.ir import Graph, Shape, TensorType, node as nd
from toolkit.rewriting.match_failure import MatchFailure
from toolkit.symbolic import Dim

_FLOOR = float(np.nextafter(np.finfo(np.float32).min, np.float32(0)))
"""The lowest float32 mask value that onnxruntime adds like any other number."""

_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16)
_MIN_HALF = float(np.finfo(np.float16).min)
_LOWEST_HALF = 0.9 * _MIN_HALF
_HALF_TO_FLOAT = 1e25
"""Multiplied by this, a mask value that absorbs float16 scores absorbs float32 scores, too."""

_MAX_ANCESTORS = 64
_MAX_MASK = 1 << 22
"""Largest constant, in elements, that is searched for mask values."""


def needs_full_precision(g: Graph, biases: list[Bias]) -> bool:
    """Return whether a float16 attention must be computed in float32.

    In a row that is fully masked with the lowest float16 number, the scores only differ in bits
    that float16 lacks. onnxruntime computes everything but the Attention kernel in float32.
    """
    for bias in biases:
        if bias.masked is not None:
            if np.isfinite(bias.masked) and bias.masked <= _LOWEST_HALF:
                return True
        else:
            lowest, _, unknown = _mask_values(g, bias.value, TensorProto.FLOAT16)
            if lowest or unknown:
                return True
    return False


@dataclass(frozen=True, slots=True)
class ScoreLayout:
    """The shape of the scores, and the element type of the computation."""

    batch: Dim
    heads: int
    queries: Dim
    keys: Dim
    dtype: int
    guarded: bool
    """Whether the original results in 0 for a row fully masked with -inf."""


@dataclass(slots=True)
class BiasWriter:
    """Writes the terms of a bias next to `at`."""

    g: Graph
    layout: ScoreLayout
    query: str
    at: NodeProto

    def total(self, biases: list[Bias], least: float) -> tuple[str, Shape]:
        """Write the sum of the terms, at least `least`; return its name and shape.

        `biases` lists the last added term first. The name is blank if no term masks anything.
        """
        g = self.g
        total, shape = "", ()
        for bias in reversed(biases):
            condition, term_shape = self._with_heads(bias)
            if bias.masked is None:
                term = self._additive(bias, condition)
            elif truth(g, condition) is (not bias.where_true):
                continue  # nothing is masked
            else:
                term = self._select(bias, condition, total if bias.replaces else "")
            if total:
                shape = self._broadcast_shape(shape, term_shape)
                total = term if bias.replaces else g.op("Add", total, term, at=self.at)
            else:
                total, shape = term, term_shape
            g.learn_type(total, TensorType(self.layout.dtype, shape))
        if total and np.isfinite(least):
            total = g.op("Max", total, self._constant(max(least, _FLOOR)), at=self.at)
            g.learn_type(total, TensorType(self.layout.dtype, shape))
        return total, shape

    def full(self, value: str, shape: Shape, key: str, axis: int) -> str:
        """Expand a bias to [.., queries, keys]; `axis` is the sequence axis of query and key."""
        g = self.g
        rows = shape[-2] if len(shape) > 1 else 1
        columns = shape[-1] if shape else 1
        if (rows, columns) == (self.layout.queries, self.layout.keys) and len(shape) > 1:
            return value
        sizes: list[SizeSource] = [1, 1]
        for known, wanted, operand in (
            (rows, self.layout.queries, self.query),
            (columns, self.layout.keys, key),
        ):
            sizes.append(1 if known == wanted else size_in_inputs(g, wanted) or (operand, axis))
        return g.op("Expand", value, size_vector(g, sizes, self.at), at=self.at)

    def _broadcast_shape(self, first: Shape, second: Shape) -> Shape:
        """Return the shape of a sum; of two sizes, prefer the one that the scores have."""
        layout = self.layout
        scores: Shape = (layout.batch, layout.heads, layout.queries, layout.keys)
        rank = max(len(first), len(second))
        sizes: list[Dim] = []
        for axis in range(-rank, 0):
            pair = [shape[axis] if -axis <= len(shape) else 1 for shape in (first, second)]
            known = [size for size in pair if size != 1] or [1]
            sizes.append(scores[axis] if scores[axis] in known else known[0])
        return tuple(sizes)

    # -- one term

    def _select(self, bias: Bias, condition: str, kept: str) -> str:
        """Write `masked` where the condition masks, elsewhere `kept`, or 0."""
        low = bias.masked or 0.0
        if np.isfinite(low):
            if bias.replaces and _MIN_HALF <= low <= _LOWEST_HALF:
                low *= _HALF_TO_FLOAT
            low = max(low, _FLOOR)
        kept, low = kept or self._constant(0.0), self._constant(low)
        pair = (low, kept) if bias.where_true else (kept, low)
        return self.g.op("Where", condition, *pair, at=self.at)

    def _additive(self, bias: Bias, value: str) -> str:
        g, dtype, factor = self.g, self.layout.dtype, bias.factor
        lowest, infinite, unknown = _mask_values(g, bias.value, dtype)
        narrowed = g.dtype(bias.value) != dtype
        if lowest and infinite and narrowed:
            raise MatchFailure(
                f"the bias '{bias.value}' masks with the lowest number and with -inf"
            )
        if unknown:
            lowest, infinite = True, infinite or self.layout.guarded
        if lowest and infinite:
            factor *= 1.0 - float(np.finfo(helper.tensor_dtype_to_np_dtype(dtype)).eps)
        if narrowed:
            value = g.op("Cast", value, at=self.at, to=dtype)
        if factor != 1.0:
            value = g.op("Mul", value, self._constant(factor), at=self.at)
        if lowest and not infinite:
            value = g.op("Max", value, self._constant(_FLOOR), at=self.at)
        return value

    def _constant(self, number: float) -> str:
        kind = helper.tensor_dtype_to_np_dtype(self.layout.dtype)
        return self.g.constant(np.array(number, kind), "bias")

    def _with_heads(self, bias: Bias) -> tuple[str, Shape]:
        """Return a term, or its condition, as [batch, heads, queries, keys], and its shape."""
        g, layout, value, rank = self.g, self.layout, bias.value, bias.rank
        shape = g.shape(value)
        if shape is None:
            raise MatchFailure(f"the shape of the bias '{value}' is not known")
        if len(shape) > min(rank, 5):
            raise MatchFailure(f"the rank of the bias '{value}' is larger than that of the scores")
        scores = (*bias.matrices, layout.queries, layout.keys)
        pairs = zip(reversed(shape), reversed(scores), strict=False)
        if any(_broadcasts_scores(size, own) for size, own in pairs):
            raise MatchFailure(f"the bias '{value}' broadcasts the scores")
        if bias.masked is not None and rank > 3:
            value = _without_neutral_terms(g, value, bias.where_true)
            stripped = g.shape(value)
            shape = shape if stripped is None else stripped
        if all(size == 1 for size in shape[:-2]):
            return (value, shape) if len(shape) < 5 else self._for_windows(value, shape)
        if rank > 3 and bias.matrices[-1] != layout.heads:
            raise MatchFailure(f"the bias '{value}' is for {bias.matrices[-1]} heads")
        if rank == 5 and len(shape) == 4 and shape[0] != 1:
            raise MatchFailure(f"the bias '{value}' is per window, for an unknown batch")
        if rank > 3:
            return (value, shape) if len(shape) < 5 else self._for_windows(value, shape)
        matrices = shape[-3]
        if matrices != layout.batch * layout.heads:
            raise MatchFailure(f"the bias '{value}' does not have one matrix per head")
        apart = (layout.batch, layout.heads, *shape[-2:])
        return reshape_to(g, value, apart, self.at), apart

    def _for_windows(self, value: str, shape: Shape) -> tuple[str, Shape]:
        """Repeat a bias [1, windows, heads, queries, keys] for every image of a batch.

        The batch of the attention is images times windows.
        """
        g, layout = self.g, self.layout
        _, windows, *rest = shape
        sizes = [size for size in rest if isinstance(size, int)]
        if shape[0] != 1 or not isinstance(windows, int) or len(sizes) != 3:
            raise MatchFailure(f"the bias '{value}' is not one per window")
        batch = g.op("Shape", self.query, at=self.at, start=0, end=1)
        images = g.op("Div", batch, int_vector(g, [windows], "windows"), at=self.at)
        target = g.op("Concat", images, int_vector(g, [1, 1, 1, 1]), at=self.at, axis=0)
        repeated = g.op("Expand", value, target, at=self.at)
        total: Shape = (layout.batch, *sizes)
        return reshape(g, repeated, (-1, *sizes), at=self.at, shape=total), total


def _without_neutral_terms(g: Graph, condition: str, where_true: bool) -> str:
    """Return the condition without Expand, and without terms that only broadcast it.

    Such a term is always true in an And, or always false in an Or.
    """
    for _ in range(_MAX_ANCESTORS):
        node = g.producer(condition)
        if node is None or g.shape(condition) is None:
            break
        if nd.is_op(node, "Expand") and g.shape(node.input[0]) is not None:
            condition = node.input[0]
        elif nd.is_op(node, "Or" if where_true else "And"):
            idle = [truth(g, name) is (not where_true) for name in node.input]
            if not any(idle):
                break
            other = node.input[1 if idle[0] else 0]
            if g.shape(other) is None:
                break
            condition = other
        else:
            break
    return condition


def _broadcasts_scores(size: Dim, own: Dim) -> bool:
    """Return whether a size of the bias is known to broadcast that of the scores."""
    if own == 1 or (isinstance(size, int) and isinstance(own, int)):
        return size not in (1, own)
    return False


def _mask_values(g: Graph, value: str, dtype: int) -> tuple[bool, bool, bool]:
    """Return whether a bias may contain the lowest finite number, -inf, or unknown values.

    Searches the constants that the bias is computed from, of either sign: a large one may be
    subtracted. Numbers below the lowest one of `dtype` count as the lowest.
    """
    lowest = infinite = unknown = False
    most = 0.99 * float(np.finfo(helper.tensor_dtype_to_np_dtype(dtype)).max)
    pending, seen = [value], {value}
    while pending:
        name = pending.pop()
        constant = g.const(name)
        node = g.producer(name)
        if constant is not None:
            if constant.dtype.kind == "f" and 0 < constant.size <= _MAX_MASK:
                size = np.abs(constant)
                infinite = infinite or bool(np.isinf(size).any())
                finite = size[np.isfinite(size)] if infinite else size
                lowest = lowest or (finite.size > 0 and float(finite.max()) >= most)
        elif node is None:
            unknown = unknown or g.dtype(name) in _FLOATS
        elif len(seen) > _MAX_ANCESTORS:
            unknown = True
        else:
            inputs = node.input[1:] if nd.is_op(node, "Where") else node.input
            if nd.is_op(node, "Cast") and g.dtype(node.input[0]) not in _FLOATS:
                continue  # booleans and integers mask nothing by themselves
            fresh = [one for one in inputs if one and one not in seen]
            seen.update(fresh)
            pending.extend(fresh)
    return lowest, infinite, unknown
