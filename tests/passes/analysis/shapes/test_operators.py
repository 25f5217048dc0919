"""Shapes: the rules of operators, compared with runs in onnxruntime."""

from __future__ import annotations

import pytest
from onnx import TensorProto
from soundness import is_anonymous, shape, sound

# -- spatial


@pytest.mark.parametrize(
    ("node", "result"),
    [
        (
            "Conv<strides=[2, 2], pads=[1, 1, 1, 1]>(x, k)",
            "[b, 4, floor((h + 1)/2), floor((w + 1)/2)]",
        ),
        ("Conv<dilations=[2, 2]>(x, k)", "[b, 4, h - 4, w - 4]"),
        (
            'Conv<auto_pad="SAME_UPPER", strides=[2, 3]>(x, k)',
            "[b, 4, floor((h + 1)/2), floor((w + 2)/3)]",
        ),
        ('Conv<auto_pad="VALID">(x, k)', "[b, 4, h - 2, w - 2]"),
        ("MaxPool<kernel_shape=[2, 2], strides=[2, 2]>(x)", "[b, 3, floor(h/2), floor(w/2)]"),
        (
            "MaxPool<kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1>(x)",
            "[b, 3, floor(h/2), floor(w/2)]",
        ),
        ("AveragePool<kernel_shape=[3, 1], pads=[1, 0, 1, 0]>(x)", "[b, 3, h, w]"),
        ("GlobalAveragePool(x)", "[b, 3, 1, 1]"),
        ("ConvTranspose<strides=[2, 2]>(x, t)", "[b, 8, 2*h + 1, 2*w + 1]"),
        (
            "ConvTranspose<strides=[2, 2], pads=[1, 1, 1, 1], output_padding=[1, 1], group=3>"
            "(x, u)",
            "[b, 6, 2*h, 2*w]",
        ),
        ('ConvTranspose<auto_pad="SAME_UPPER", strides=[2, 2]>(x, t)', "[b, 8, 2*h, 2*w]"),
        ("SpaceToDepth<blocksize=1>(x)", "[b, 3, h, w]"),
        ('Resize<mode="nearest">(x, , scales)', "[b, 3, 2*h, floor(w/2)]"),
        ("LpPool<kernel_shape=[2, 2]>(x)", "[b, 3, h - 1, w - 1]"),
    ],
)
def test_windows(node: str, result: str) -> None:
    text = f"""
        g (float[b, 3, h, w] x, float[4, 3, 3, 3] k, float[3, 8, 3, 3] t,
           float[3, 2, 3, 3] u) => (y)
        <float[4] scales = {{1, 1, 2, 0.5}}> {{ y = {node} }}
    """
    assert shape(sound(text)) == result


def test_ceil_mode_that_may_drop_a_window_is_unknown() -> None:
    model = sound("""
        g (float[1, 1, 2, h] x) => (y)
        { y = MaxPool<kernel_shape=[1, 1], strides=[2, 2], ceil_mode=1>(x) }
    """)
    assert is_anonymous(model, "y", 2)
    assert is_anonymous(model, "y", 3)


def test_resize_to_computed_sizes() -> None:
    model = sound("""
        g (float[b, 3, h, w] x) => (y)
        <int64[1] zero = {0}, int64[1] two = {2}, int64[1] four = {4}, int64[2] twice = {2, 2}>
        { s = Shape(x)  front = Slice(s, zero, two)  back = Slice(s, two, four)
          larger = Mul(back, twice)  sizes = Concat<axis=0>(front, larger)
          y = Resize<mode="nearest">(x, , , sizes) }
    """)
    assert shape(model) == "[b, 3, 2*h, 2*w]"


# -- products, reductions, normalization, recurrence


@pytest.mark.parametrize(
    ("node", "result"),
    [
        ("MatMul(x, w)", "[b, s, 5]"),
        ("MatMul(x, v)", "[b, s]"),
        ('Einsum<equation="bsk,kn->bns">(x, w)', "[b, 5, s]"),
        ('Einsum<equation="...k,kn->...n">(x, w)', "[b, s, 5]"),
        ('Einsum<equation="bsk,btk->st">(x, x)', "[s, s]"),
        ("ReduceMean<axes=[-1]>(x)", "[b, s, 1]"),
        ("ReduceMax<axes=[0, 2], keepdims=0>(x)", "[s]"),
        ("ReduceL2(x)", "[1, 1, 1]"),
        ("ArgMax<axis=1, keepdims=0>(x)", "[b, 4]"),
        ("Softmax(x)", "[b, s, 4]"),
        ("LayerNormalization(x, v)", "[b, s, 4]"),
        ("Flatten<axis=2>(x)", "[b*s, 4]"),
        ("Flatten<axis=0>(x)", "[1, 4*b*s]"),
        ("Transpose(x)", "[4, s, b]"),
        ("CumSum(x, one)", "[b, s, 4]"),
        ("Trilu(x)", "[b, s, 4]"),
        ("Where(m, x, v)", "[b, s, 4]"),
    ],
)
def test_products_and_reductions(node: str, result: str) -> None:
    text = f"""
        g (float[b, s, 4] x, float[4, 5] w, float[4] v, bool[b, 1, 1] m) => (y)
        <int64 one = {{1}}> {{ y = {node} }}
    """
    assert shape(sound(text)) == result


def test_gemm_topk_and_several_outputs() -> None:
    model = sound("""
        g (float[b, 6] x, float[5, 6] w, float[5] c, float[b, s, 4] z, float[s, 4] v) => (y)
        <int64[1] k = {2}>
        { y = Gemm<transB=1>(x, w, c)  values, at = TopK<axis=-1>(z, k)
          n, mean, deviation = LayerNormalization<axis=1>(z, v)  d, mask = Dropout(z) }
    """)
    assert shape(model) == "[b, 5]"
    assert shape(model, "at") == "[b, s, 2]"
    assert shape(model, "mean") == "[b, 1, 1]"
    assert model.graph.dtype("at") == TensorProto.INT64
    assert model.graph.dtype("mask") == TensorProto.BOOL


def test_recurrent_cells() -> None:
    model = sound("""
        g (float[s, b, 3] x, float[2, 16, 3] w, float[2, 16, 4] r, float[1, 12, 3] gw,
           float[1, 12, 4] gr) => (y)
        { y, h, c = LSTM<hidden_size=4, direction="bidirectional">(x, w, r)
          gy, gh = GRU<hidden_size=4>(x, gw, gr) }
    """)
    assert shape(model) == "[s, 2, b, 4]"
    assert shape(model, "c") == "[2, b, 4]"
    assert shape(model, "gh") == "[1, b, 4]"


def test_attention() -> None:
    text = """
        g (float[b, s, 12] q, float[b, s, 6] k, float[b, s, 6] v, float[12] one, float[b, s, 2] c,
           float[b, 2, w, 3] pk, float[b, 2, w, 3] pv) => (y)
        { y, nk, nv = Attention<q_num_heads=4, kv_num_heads=2>(q, k, v, , pk, pv)
          z = Attention<q_num_heads=2, kv_num_heads=2>(k, k, v)
          n = RMSNormalization(q, one)  e = RotaryEmbedding<num_heads=3>(q, c, c) }
    """
    model = sound(text, opset=23)
    assert shape(model) == "[b, s, 12]"
    assert shape(model, "nk") == "[b, 2, s + w, 3]"
    assert shape(model, "z") == "[b, s, 6]"


# -- onnxruntime's operators


def test_contrib_fusions() -> None:
    model = sound("""
        g (float[b, s, 8] x, float[b, s, 8] skip, float[8] g, float[8] c, float[8, 6] w,
           float[b, 2, s, 4] kv) => (y)
        { y, m, d, sum = com.microsoft.SkipLayerNormalization(x, skip, g, c)
          r, , , rs = com.microsoft.SkipSimplifiedLayerNormalization(x, skip, g)
          f = com.microsoft.FusedMatMul<transB=1>(x, skip)
          fg = com.microsoft.FastGelu(x, c)  bg = com.microsoft.BiasGelu(x, c)
          qg = com.microsoft.QuickGelu(x)  gg = com.microsoft.Gelu(x)
          a = com.microsoft.MultiHeadAttention<num_heads=2>(x, x, skip)
          a2 = com.microsoft.MultiHeadAttention<num_heads=2>(x, kv, kv) }
    """)
    assert shape(model) == "[b, s, 8]"
    assert shape(model, "f") == "[b, s, s]"
    assert shape(model, "a") == "[b, s, 8]"
    assert shape(model, "a2") == "[b, s, 8]"


def test_contrib_quantized() -> None:
    model = sound("""
        g (float[b, s, 8] x, uint8[b, s, 8] q, int8[8, 6] w, uint8[b, s, 1] p) => (y)
        <float scale = {0.1}, uint8 zero = {0}, int8 none = {0}>
        { y = com.microsoft.DynamicQuantizeMatMul(x, w, scale, none)
          m = com.microsoft.MatMulIntegerToFloat(q, w, scale, scale, zero, none)
          a = com.microsoft.QLinearAdd(q, scale, zero, p, scale, zero, scale, zero)
          u = com.microsoft.QLinearMul(q, scale, zero, q, scale, zero, scale, zero)
          s = com.microsoft.QLinearSigmoid(q, scale, zero, scale, zero)
          c = com.microsoft.QLinearConcat<axis=1>(scale, zero, q, scale, zero, q, scale, zero)
          d, ds, dz = DynamicQuantizeLinear(x)  i = MatMulInteger(q, w)
          e = QuantizeLinear(x, scale, zero)  f = DequantizeLinear(e, scale, zero) }
    """)
    assert shape(model) == "[b, s, 6]"
    assert shape(model, "a") == "[b, s, 8]"
    assert shape(model, "c") == "[b, 2*s, 8]"
    assert model.graph.dtype("i") == TensorProto.INT32


def test_contrib_convolutions_and_gemm() -> None:
    model = sound("""
        g (uint8[b, 3, h, w] q, int8[4, 3, 3, 3] k, float[b, 3, h, w] x, float[4, 3, 3, 3] kf,
           uint8[b, 6] a, int8[6, 5] c) => (y)
        <float scale = {0.1}, uint8 zero = {0}, int8 none = {0}>
        { y = QLinearConv<strides=[2, 2]>(q, scale, zero, k, scale, none, scale, zero)
          f = com.microsoft.FusedConv<activation="Relu">(x, kf)
          p = com.microsoft.QLinearGlobalAveragePool(q, scale, zero, scale, zero)
          v = com.microsoft.QLinearAveragePool<kernel_shape=[2, 2]>(q, scale, zero, scale, zero)
          g = com.microsoft.QGemm(a, scale, zero, c, scale, none)
          i = ConvInteger(q, k) }
    """)
    assert shape(model, "g") == "[b, 5]"
    assert shape(model, "p") == "[b, 3, 1, 1]"
    assert shape(model, "f") == "[b, 4, h - 2, w - 2]"


def test_contrib_attention_with_weights() -> None:
    model = sound("""
        g (float[b, s, 8] x, float[8, 24] w, float[24] c, float[2, b, 2, h, 4] past,
           int32[b, s] ids, float[9, 8] table, float[9, 8] places, float[8] g) => (y)
        { y, present = com.microsoft.Attention<num_heads=2>(x, w, c, , past)
          e, m = com.microsoft.EmbedLayerNormalization(ids, , table, places, , g, g) }
    """)
    assert shape(model) == "[b, s, 8]"
    assert shape(model, "present") == "[2, b, 2, h + s, 4]"
    assert shape(model, "e") == "[b, s, 8]"


def test_group_query_attention() -> None:
    model = sound(
        """
        g (float[b, s, 64] q, float[b, s, 32] k, float[b, 2, 0, 16] past) => (y)
        <int32[1] one = {4}, int32[1] total = {5}>
        { y, pk, pv = com.microsoft.GroupQueryAttention<num_heads=4, kv_num_heads=2>
              (q, k, k, past, past, one, total) }
        """,
        sizes=[{"b": 1, "s": 5}],
    )
    assert shape(model) == "[b, s, 64]"
    assert shape(model, "pk").startswith("[b, 2, ?")


def test_block_quantized_matmul_and_quantized_attention() -> None:
    model = sound("""
        g (float[b, s, 32] x, uint8[4, 1, 16] w, float[4] scales, uint8[b, s, 8] q, int8[8, 24] k,
           float[24] c, int32[b] mask) => (y)
        <float scale = {0.1}, uint8 zero = {0}, int8 none = {0}>
        { y = com.microsoft.MatMulNBits<K=32, N=4, bits=4, block_size=32>(x, w, scales)
          a = com.microsoft.QAttention<num_heads=2>(q, k, c, scale, scale, , zero, none) }
    """)
    assert shape(model) == "[b, s, 4]"
    assert shape(model, "a") == "[b, s, 8]"


def test_contrib_quantized_lstm() -> None:
    model = sound("""
        g (float[s, b, 3] x, int8[2, 3, 16] w, int8[2, 4, 16] r) => (y)
        <float[2] scale = {0.1, 0.1}, int8[2] zero = {0, 0}>
        { y, h, c = com.microsoft.DynamicQuantizeLSTM<hidden_size=4, direction="bidirectional">
              (x, w, r, , , , , , scale, zero, scale, zero) }
    """)
    assert shape(model) == "[s, 2, b, 4]"
    assert shape(model, "h") == shape(model, "c") == "[2, b, 4]"
