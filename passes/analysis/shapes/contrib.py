"""Rules of onnxruntime's own operators (domain com.microsoft)."""

from __future__ import annotations

from onnx import TensorProto

from passes.analysis.shapes import elementwise, linear, reduction, slice_concat, windows
from passes.analysis.shapes.dims import best, plus, product
from passes.analysis.shapes.facts import (
    FLOAT,
    INT32,
    Answer,
    Fact,
    Op,
    Rule,
    Size,
    Sizes,
    blank,
    quantized,
    same_as_input,
)
from toolkit.symbolic import floordiv

# -- products


def fused_matmul(op: Op) -> Answer:
    if op.int("transBatchA") or op.int("transBatchB"):
        return Fact(op.dtype(0), None)
    a, b = (_swapped(op, i, name) for i, name in enumerate(("transA", "transB")))
    return Fact(op.dtype(0), linear.matmul_shape(a, b))


def _swapped(op: Op, index: int, name: str) -> Sizes | None:
    shape = op.shape(index)
    if shape is None or len(shape) < 2 or not op.int(name):
        return shape
    return (*shape[:-2], shape[-1], shape[-2])


def matmul_block_quantized(op: Op) -> Answer:
    """Infer MatMulNBits and MatMulBnb4, whose attribute N is the number of columns."""
    shape = op.shape(0)
    return Fact(op.dtype(0), None if shape is None else (*shape[:-1], op.int("N")))


# -- attention


def attention(op: Op) -> Answer:
    """Infer Y and the present [2, batch, heads, ...] from a packed weight [in, q + k + v]."""
    return _attention(op, op.dtype(0), past_at=4)


def qattention(op: Op) -> Answer:
    return _attention(op, op.dtype(3), past_at=8)


def _attention(op: Op, dtype: int, past_at: int) -> Answer:
    x, weight, past = op.shape(0), op.shape(1), op.shape(past_at)
    heads = op.int("num_heads")
    hidden: Size = None
    widths = op.ints("qkv_hidden_sizes")
    if widths is not None:
        hidden = widths[2]
    elif weight is not None:
        hidden = floordiv(weight[1], 3)
    batch, length = (x[0], x[1]) if x is not None else (None, None)
    total = None if op.given(past_at) else length
    if past is not None and not op.int("past_present_share_buffer"):
        total = plus(past[3], length)
    size = floordiv(hidden, heads) if isinstance(hidden, int) and heads else None
    return [
        Fact(dtype, (batch, length, hidden)),
        Fact(dtype, (2, batch, heads or None, total, size)),
    ]


def multi_head_attention(op: Op) -> Answer:
    """Infer the result for a query [batch, length, width] or packed [batch, length, heads, 3, n].

    Presents follow from an unpacked key and value without past.
    """
    dtype, query, key, value = op.dtype(0), op.shape(0), op.shape(1), op.shape(2)
    heads = op.int("num_heads")
    if query is None:
        return [Fact(dtype, blank(3))]
    if len(query) == 5:
        return [Fact(dtype, (query[0], query[1], product((query[2], query[4]))))]
    width: Size = query[2]
    if value is not None:
        width = value[2] if len(value) == 3 else product((value[1], value[3]))
    elif op.given(2):
        width = None
    if op.given(6) or op.given(7) or key is None or value is None or len(key) != 3:
        return [Fact(dtype, (query[0], query[1], width)), Fact(dtype, None), Fact(dtype, None)]
    length = best((key[1], value[1])) if len(value) == 3 else key[1]
    sizes = [floordiv(side, heads) for side in (key[2], width) if side is not None and heads]
    present = [Fact(dtype, (query[0], heads or None, length, size)) for size in sizes]
    return [Fact(dtype, (query[0], query[1], width)), *present]


def group_query_attention(op: Op) -> Answer:
    """Infer the result for a query [batch, length, heads * size], packed with key and value or not.

    The presents may share the buffer of the pasts, so their length is unknown.
    """
    dtype, query, past = op.dtype(0), op.shape(0), op.shape(3)
    if query is None:
        return [Fact(dtype, blank(3))]
    heads, shared = op.int("num_heads"), op.int("kv_num_heads")
    width: Size = query[2]
    size: Size = past[3] if past is not None and len(past) == 4 else None
    if not op.given(1):
        size = floordiv(query[2], heads + 2 * shared)
        width = size * heads
    present = (query[0], shared or None, None, size)
    cache = op.dtype(3) or dtype
    return [Fact(dtype, (query[0], query[1], width)), Fact(cache, present), Fact(cache, present)]


def embed_layer_normalization(op: Op) -> Answer:
    ids, table = op.shape(0), op.shape(2)
    quantized = op.node.op_type == "QEmbedLayerNormalization"
    dtype = FLOAT if quantized else op.dtype(2)
    batch, length = (ids[0], ids[1]) if ids is not None else (None, None)
    hidden = table[1] if table is not None else None
    embedded = Fact(dtype, (batch, length, hidden))
    return [embedded, Fact(INT32, (batch,)), embedded]


def skip_layer_normalization(op: Op) -> Answer:
    """Infer Y, mean, inverse standard deviation, and the sum that is normalized."""
    same = same_as_input(op)
    statistic = Fact(FLOAT, None if same.shape is None else (*same.shape[:-1], 1))
    return [same, statistic, statistic, same]


def bias_split_gelu(op: Op) -> Answer:
    shape = op.shape(0)
    if shape is None:
        return Fact(op.dtype(0), None)
    return Fact(op.dtype(0), (*shape[:-1], floordiv(shape[-1], 2)))


def dynamic_quantize_lstm(op: Op) -> Answer:
    """Infer Y, Y_h and Y_c."""
    length, batch, _ = op.shape(0) or blank(3)
    directions = 2 if op.text("direction", "forward") == "bidirectional" else 1
    hidden = op.int("hidden_size") or None
    state = Fact(op.dtype(0), (directions, batch, hidden))
    return [Fact(op.dtype(0), (length, directions, batch, hidden)), state, state]


_SAME = (
    "BiasAdd",
    "BiasGelu",
    "BiasSoftmax",
    "FastGelu",
    "Gelu",
    "GemmaRotaryEmbedding",
    "GroupNorm",
    "Inverse",
    "QLinearLeakyRelu",
    "QLinearSigmoid",
    "QLinearSoftmax",
    "QuickGelu",
    "RotaryEmbedding",
    "ScaledSiLU",
    "SkipGroupNorm",
    "Trilu",
)

RULES: dict[str, Rule] = {
    **dict.fromkeys(_SAME, same_as_input),
    "Attention": attention,
    "BiasSplitGelu": bias_split_gelu,
    "DequantizeLinear": quantized(same_as_input, slice(1), 1),
    "DynamicQuantizeLSTM": dynamic_quantize_lstm,
    "DynamicQuantizeMatMul": quantized(linear.matmul, slice(2), 0),
    "EmbedLayerNormalization": embed_layer_normalization,
    "FusedConv": windows.conv,
    "FusedGemm": linear.gemm,
    "FusedMatMul": fused_matmul,
    "FusedMatMulActivation": fused_matmul,
    "GatherND": slice_concat.gather_nd,
    "GroupQueryAttention": group_query_attention,
    "MatMulBnb4": matmul_block_quantized,
    "MatMulInteger16": quantized(linear.matmul, slice(2), None, INT32),
    "MatMulIntegerToFloat": quantized(linear.matmul, slice(2), 2),
    "MatMulNBits": matmul_block_quantized,
    "MultiHeadAttention": multi_head_attention,
    "Pad": slice_concat.pad,
    "QAttention": qattention,
    "QEmbedLayerNormalization": embed_layer_normalization,
    "QGemm": quantized(linear.gemm, slice(0, 6, 3), 8, FLOAT),
    "QLinearAdd": quantized(elementwise.broadcasting(), slice(0, 6, 3), 0),
    "QLinearAveragePool": quantized(windows.pool, slice(1), 0),
    "QLinearConcat": quantized(slice_concat.concat, slice(2, None, 3), 1),
    "QLinearConv": windows.RULES["QLinearConv"],
    "QLinearGlobalAveragePool": quantized(windows.global_pool, slice(1), 0),
    "QLinearMul": quantized(elementwise.broadcasting(), slice(0, 6, 3), 0),
    "QLinearReduceMean": quantized(reduction.reduction(), slice(1), 0),
    "QuantizeLinear": quantized(same_as_input, slice(1), 2, TensorProto.UINT8),
    "Range": slice_concat.range_,
    "SkipLayerNormalization": skip_layer_normalization,
    "SkipSimplifiedLayerNormalization": skip_layer_normalization,
    "TransposeMatMul": fused_matmul,
}
