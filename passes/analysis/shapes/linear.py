"""Rules of matrix products: MatMul, Gemm and Attention."""

from __future__ import annotations

from passes.analysis.shapes.dims import best, broadcast, product
from passes.analysis.shapes.facts import Answer, Fact, Op, Rule, Sizes, blank


def matmul_shape(a: Sizes | None, b: Sizes | None) -> Sizes | None:
    """Return the shape of numpy's matmul: vectors lose their axis, leading axes broadcast."""
    if a is None or b is None:
        return None
    if not a or not b:
        raise ValueError("matmul of a scalar")
    batch = broadcast(a[:-2], b[:-2])
    rows = a[-2:-1]  # empty for a vector
    columns = b[-1:] if len(b) > 1 else ()
    return (*batch, *rows, *columns)


def matmul(op: Op) -> Answer:
    return Fact(op.dtype(0) or op.dtype(1), matmul_shape(op.shape(0), op.shape(1)))


def gemm(op: Op) -> Answer:
    a, b = op.shape(0), op.shape(1)
    rows = a[1 if op.int("transA") else 0] if a is not None else None
    columns = b[0 if op.int("transB") else 1] if b is not None else None
    return Fact(op.dtype(0) or op.dtype(1), (rows, columns))


def attention(op: Op) -> Answer:
    """Infer Y, present key, present value and the scores of Attention-23.

    Query, key and value are [batch, heads, length, size] or [batch, length, heads * size].
    """
    query, key, value = (_heads(op, i) for i in range(3))
    past_key, past_value = op.shape(4), op.shape(5)
    batch = best((query[0], key[0], value[0]))
    length = best((key[2], value[2]))
    total = length
    if op.given(4):
        total = None
        if past_key is not None and length is not None:
            total = past_key[2] + length
    y: Sizes = (batch, query[1], query[2], value[3])
    if op.rank(0) == 3:
        y = (batch, query[2], product((query[1], value[3])))
    elif op.rank(0) is None:
        return None
    keys = key[3] if past_key is None else best((key[3], past_key[3]))
    values = value[3] if past_value is None else best((value[3], past_value[3]))
    return [
        Fact(op.dtype(0), y),
        Fact(op.dtype(1), (batch, key[1], total, keys)),
        Fact(op.dtype(2), (batch, value[1], total, values)),
        Fact(op.dtype(0), (batch, query[1], query[2], total)),
    ]


def _heads(op: Op, index: int) -> Sizes:
    """Return [batch, heads, length, size] of query, key or value."""
    shape = op.shape(index)
    if shape is None:
        return blank(4)
    if len(shape) == 4:
        return shape
    batch, length, width = shape
    heads = op.int("q_num_heads" if index == 0 else "kv_num_heads")
    if not heads or not isinstance(width, int):
        return (batch, heads or None, length, None)
    return (batch, heads, length, width // heads)


RULES: dict[str, Rule] = {
    "MatMul": matmul,
    "Gemm": gemm,
    "Attention": attention,
}
