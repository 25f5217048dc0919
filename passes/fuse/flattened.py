"""A product of flattened rows is a MatMul along the last axis.

    Reshape(Reshape(x, [-1, k]) W + b, [..., n])  =  x W + b                        x: [..., k]

That is how exporters write a linear layer whose framework multiplies matrices only: GPT-2's,
PyTorch's attention behind the heads, and all of TensorFlow's. Where x has its heads still apart,
[..., h, d] with h d = k, the Reshape that joins them stays, with the batch left as it is; and
likewise where they are taken apart behind the product.

For attention this comes first: what is known of batch and length is lost in a flattened row.
"""

from __future__ import annotations

import numpy as np
from onnx import NodeProto

from passes.fuse.affine import Channels, by_channel, use_count
from passes.operands import given, reshape, reshape_target
from toolkit import nodes as nd
from toolkit.graph import Graph
from toolkit.pattern import const, op, var
from toolkit.rules import Miss, rewrite
from toolkit.types import Shape, TensorType

flat = op.Reshape(var("x"), ...).shared().named("flat")
w = var("w", rank=2)
product = (op.Gemm(flat, w, ...) | op.MatMul(flat, w)).named("product")


@rewrite(op.Reshape(product, ...), op.Reshape(product + const("shift"), ...), opset=7)
def product_of_rows(
    g: Graph,
    x: str,
    flat: NodeProto,
    product: NodeProto,
    w: str,
    shift: str | None,
    node: NodeProto,
) -> str:
    """Reshape(Reshape(x) W + b) = x W + b"""
    if g.rank(flat.output[0]) != 2:
        raise Miss("what it multiplies has more axes than rows and columns")
    inner, columns = _sizes(g, product, w)
    biases = [bias for bias in (given(product, 2), shift) if bias]
    if any(by_channel(g, bias, Channels(2, 1, columns)) is None for bias in biases):
        raise Miss("its bias is not constant, or not the same for all rows")
    before, after = g.shape(x), g.shape(node.output[0])
    leading = _leading(before, inner, after, columns)
    result = g.op("MatMul", _rows(g, x, flat, (*leading, inner)), _upright(g, product, w), at=node)
    known = TensorType(g.dtype(x), (*leading, columns))
    g.learn_type(result, known)
    for bias in biases:
        result = g.op("Add", result, bias, at=node)
        g.learn_type(result, known)
    target = reshape_target(known.shape, after)
    if known.shape == after or target is None:
        return result
    return reshape(g, result, target, at=node)


def _sizes(g: Graph, product: NodeProto, w: str) -> tuple[int, int]:
    """Inputs and outputs of x W + b; a Miss when a Gemm is anything else."""
    factors = [nd.attr(product, "alpha", 1.0)]
    if given(product, 2):
        factors.append(nd.attr(product, "beta", 1.0))
    if any(factor != 1 for factor in factors) or nd.attr(product, "transA", 0):
        raise Miss("it has factors, or works along the first axis")
    sizes = g.shape(w) or ()
    if nd.attr(product, "transB", 0):
        sizes = sizes[::-1]
    numbers = [size for size in sizes if isinstance(size, int) and size > 0]
    if len(numbers) != 2:
        raise Miss("the size of its weight is not known")
    return numbers[0], numbers[1]


def _leading(before: Shape | None, inner: int, after: Shape | None, columns: int) -> Shape:
    """The axes that are flattened and come out again: those before the sizes of the product."""
    shared = _places(before, inner) & _places(after, columns)
    for place in sorted(shared, reverse=True):
        if before is not None and after is not None and before[:place] == after[:place]:
            return before[:place]
    raise Miss("what is flattened has other axes than what comes out")


def _places(shape: Shape | None, size: int) -> set[int]:
    """Where the axes begin that make up `size` at the end of a shape; two come before, or more."""
    places: set[int] = set()
    total = 1
    for place in reversed(range(2, len(shape or ()))):
        last = (shape or ())[place]
        if not isinstance(last, int):
            break
        total *= last
        if total == size:
            places.add(place)
    return places


def _rows(g: Graph, x: str, flat: NodeProto, wanted: Shape) -> str:
    """`x`, or a Reshape of it, with the rows that `flat` has in the shape of the result."""
    shape = g.shape(x)
    if shape == wanted:
        return x
    target = reshape_target(shape, wanted)
    if target is None or g.use_count(flat.output[0]) != 1:
        raise Miss("its heads are joined for other readers too")
    joined = reshape(g, x, target, at=flat)
    g.learn_type(joined, TensorType(g.dtype(x), wanted))
    return joined


def _upright(g: Graph, product: NodeProto, w: str) -> str:
    """The weight as [inputs, outputs]."""
    if not nd.attr(product, "transB", 0):
        return w
    weight = g.const(w)
    if weight is None or use_count(g, w) != 1:
        raise Miss("its weight is transposed, and not its own constant")
    return g.constant(np.transpose(weight), w)


RULES = (product_of_rows,)
