"""Rules of products of matrices: MatMul and its quantized forms, Gemm, Einsum, recurrent cells."""

from __future__ import annotations

from passes.analysis.shapes.dims import best, broadcast, broadcast_size, product
from passes.analysis.shapes.facts import INT32, Answer, Fact, Op, Rule, Size, Sizes, blank
from toolkit.ir.tensor_type import Shape


def matmul_shape(a: Sizes | None, b: Sizes | None) -> Sizes | None:
    """numpy's matmul: vectors lose their dimension, leading dimensions are broadcast."""
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


def matmul_integer(op: Op) -> Answer:
    return Fact(INT32, matmul_shape(op.shape(0), op.shape(1)))


def qlinear_matmul(op: Op) -> Answer:
    return Fact(op.dtype(7), matmul_shape(op.shape(0), op.shape(3)))


def gemm(op: Op) -> Answer:
    return Fact(op.dtype(0) or op.dtype(1), gemm_shape(op, op.shape(0), op.shape(1)))


def gemm_shape(op: Op, a: Shape | None, b: Shape | None) -> Sizes:
    rows: Size = None
    columns: Size = None
    if a is not None:
        rows = a[1 if op.int("transA") else 0]
    if b is not None:
        columns = b[0 if op.int("transB") else 1]
    return (rows, columns)


def einsum(op: Op) -> Answer:
    """Each letter is one size; `...` stands for dimensions that are broadcast."""
    dtype = op.dtype(0)
    left, arrow, right = op.text("equation").replace(" ", "").partition("->")
    terms = left.split(",")
    shapes = [op.shape(i) for i in range(len(op.inputs))]
    letters: dict[str, Size] = {}
    batch: Sizes | None = ()
    for term, shape in zip(terms, shapes, strict=True):
        before, dots, after = term.partition("...")
        if shape is None:
            batch = None if dots else batch
            letters.update({letter: letters.get(letter) for letter in before + after})
            continue
        count = len(shape) - len(before) - len(after)
        if count < 0 or (count and not dots):
            raise ValueError("the equation does not fit the ranks")
        middle = shape[len(before) : len(before) + count]
        batch = None if batch is None else broadcast(batch, middle)
        outer = (*shape[: len(before)], *shape[len(before) + count :])
        for letter, size in zip(before + after, outer, strict=True):
            known = letter in letters
            letters[letter] = broadcast_size(letters[letter], size) if known else size
    if not arrow:
        once = sorted(x for x in letters if left.count(x) == 1)
        right = ("..." if "..." in left else "") + "".join(once)
    before, dots, after = right.partition("...")
    if dots and batch is None:
        return Fact(dtype, None)
    middle = batch if dots and batch is not None else ()
    return Fact(dtype, (*(letters[x] for x in before), *middle, *(letters[x] for x in after)))


def recurrent(cells: int) -> Rule:
    """LSTM (`cells` = 1), GRU and RNN: Y, Y_h and, for an LSTM, Y_c."""

    def rule(op: Op) -> Answer:
        dtype, x, recurrence = op.dtype(0), op.shape(0), op.shape(2)
        directions = 2 if op.text("direction", "forward") == "bidirectional" else 1
        hidden: Size = op.int("hidden_size") or (recurrence[2] if recurrence is not None else None)
        length: Size = x[0] if x is not None else None
        batch: Size = x[1] if x is not None else None
        if op.int("layout"):
            length, batch = batch, length
            y = Fact(dtype, (batch, length, directions, hidden))
            state = Fact(dtype, (batch, directions, hidden))
        else:
            y = Fact(dtype, (length, directions, batch, hidden))
            state = Fact(dtype, (directions, batch, hidden))
        return [y, state, *[state] * cells]

    return rule


def attention(op: Op) -> Answer:
    """Attention-23: Y, present key, present value, and the scores.

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
    """[batch, heads, length, size] of query, key or value."""
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
    "MatMulInteger": matmul_integer,
    "QLinearMatMul": qlinear_matmul,
    "Gemm": gemm,
    "Einsum": einsum,
    "LSTM": recurrent(1),
    "GRU": recurrent(0),
    "RNN": recurrent(0),
    "Attention": attention,
}
