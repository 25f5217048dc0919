"""Every adapter on a small model of its time."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto

from tests.passes.opset.lifting import assert_same, check, check_structure, lift, model_of
from toolkit.ir.model import Model
from toolkit.runtime.session import Session

# -- opsets 1 to 7, which few runtimes run: numpy computes the expected outputs


def softplus(x):
    return np.log1p(np.exp(x))


def prelu(x, slope):
    return np.where(x < 0, x * slope, x).astype(np.float32)


LEGACY = {
    "add_at_axis": (
        1,
        "(float[2,3,4,5] x, float[3,4] b) => (float[2,3,4,5] y)"
        "{ y = Add <axis = 1, broadcast = 1, consumed_inputs = [0, 0]> (x, b) }",
        lambda x, b: [x + b[..., None]],
    ),
    "mul_suffix": (
        6,
        "(float[2,3,4] x, float[3,4] b) => (float[2,3,4] y) { y = Mul <broadcast = 1> (x, b) }",
        lambda x, b: [x * b],
    ),
    "sub_negative_axis": (
        6,
        "(float[2,3,4] x, float[3] b) => (float[2,3,4] y)"
        "{ y = Sub <broadcast = 1, axis = -2> (x, b) }",
        lambda x, b: [x - b[:, None]],
    ),
    "div_equal_shapes": (
        6,
        "(float[2,3] x, float[2,3] b) => (float[2,3] y) { y = Div <axis = 0> (x, b) }",
        lambda x, b: [x / b],
    ),
    "pow_first_axis": (
        1,
        "(float[2,3] x, float[2] b) => (float[2,3] y)"
        "{ a = Abs (x) y = Pow <broadcast = 1, axis = 0> (a, b) }",
        lambda x, b: [np.abs(x) ** b[:, None]],
    ),
    "compare_and_combine": (
        1,
        "(float[2,3,4] x, float[3] b) => (bool[2,3,4] y) {"
        "  p = Less <broadcast = 1, axis = 1> (x, b) q = Greater <broadcast = 1, axis = 1> (x, b)"
        "  y = Or <broadcast = 0> (p, q) }",
        lambda x, b: [x != b[:, None]],
    ),
    "equal_integers": (
        1,
        "(int32[2,3,4] x, int32[2] b) => (bool[2,3,4] y)"
        "{ y = Equal <broadcast = 1, axis = 0> (x, b) }",
        lambda x, b: [x == b[:, None, None]],
    ),
    "rank_through_inference": (
        6,
        "(float[2,3,4,4] x, float[3] b) => (float[2,3,2,2] y) {"
        "  p = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (x)"
        "  r = Relu (p) y = Add <broadcast = 1, axis = 1> (r, b) }",
        lambda x, b: [np.maximum(x.reshape(2, 3, 2, 2, 2, 2).max((3, 5)), 0) + b[:, None, None]],
    ),
    "gemm": (
        1,
        "(float[2,3] a, float[3,4] b, float[4] c) => (float[2,4] y)"
        "{ y = Gemm <broadcast = 1, alpha = 0.5> (a, b, c) }",
        lambda a, b, c: [np.float32(0.5) * (a @ b) + c],
    ),
    "prelu_per_channel": (
        1,
        "(float[2,3,4] x, float[3] s) => (float[2,3,4] y) { y = PRelu (x, s) }",
        lambda x, s: [prelu(x, s[:, None])],
    ),
    "prelu_shared": (
        6,
        "(float[2,3,4] x, float[1] s) => (float[2,3,4] y) { y = PRelu (x, s) }",
        lambda x, s: [prelu(x, s)],
    ),
    "batch_norm": (
        1,
        "(float[2,3,4] x, float[3] s, float[3] b, float[3] m, float[3] v) => (float[2,3,4] y) {"
        "  w = Abs (v)"
        "  y = BatchNormalization <is_test = 1, consumed_inputs = [0, 0, 0, 1, 1]>"
        "      (x, s, b, m, w) }",
        lambda x, s, b, m, v: [
            (x - m[:, None]) / np.sqrt(np.abs(v)[:, None] + np.float32(1e-5)) * s[:, None]
            + b[:, None]
        ],
    ),
    "dropout": (
        1,
        "(float[2,3] x) => (float[2,3] y)"
        "{ y = Dropout <is_test = 1, ratio = 0.3, consumed_inputs = [0]> (x) }",
        lambda x: [x],
    ),
    "cast_by_name": (
        1,
        '(float[2,3] x) => (int32[2,3] y) { y = Cast <to = "INT32"> (x) }',
        lambda x: [x.astype(np.int32)],
    ),
    "concat_default_axis": (
        1,
        "(float[2,3] a, float[2,2] b) => (float[2,5] y) { y = Concat (a, b) }",
        lambda a, b: [np.concatenate([a, b], 1)],
    ),
    "selu_old_constants": (
        1,
        "(float[2,3] x) => (float[2,3] y) { y = Selu <consumed_inputs = [0]> (x) }",
        lambda x: [
            np.float32(1.0507)
            * np.where(x > 0, x, np.float32(1.6732) * np.expm1(x)).astype(np.float32)
        ],
    ),
    "tile_along_axis": (
        1,
        "(float[2,3] x) => (float[2,6] y) <float t = {2.0}, float a = {1.0}>{ y = Tile (x, t, a) }",
        lambda x: [np.tile(x, (1, 2))],
    ),
    "split_lengths_as_input": (
        1,
        "(float[2,5] x) => (float[2,2] a, float[2,3] b) <float[2] n = {2.0, 3.0}>"
        "{ a, b = Split <axis = 1> (x, n) }",
        lambda x: [x[:, :2], x[:, 2:]],
    ),
    "lp_pool_float_p": (
        1,
        "(float[1,2,4,4] x) => (float[1,2,1,1] y)"
        "{ p = LpPool <p = 2.0, kernel_shape = [2, 2]> (x) y = GlobalLpPool <p = 2.0> (p) }",
        lambda x: [
            np.sqrt(
                np.sum(
                    sum(x[..., i : i + 3, j : j + 3] ** 2 for i in (0, 1) for j in (0, 1)),
                    (2, 3),
                    keepdims=True,
                )
            )
        ],
    ),
    "pad_paddings": (
        1,
        "(float[2,3] x) => (float[3,6] y){ y = Pad <paddings = [0, 1, 1, 2], value = 1.5> (x) }",
        lambda x: [np.pad(x, ((0, 1), (1, 2)), constant_values=1.5)],
    ),
    "upsample_height_width": (
        1,
        "(float[1,2,3,3] x) => (float[1,2,6,9] y)"
        "{ y = Upsample <height_scale = 2.0, width_scale = 3.0> (x) }",
        lambda x: [x.repeat(2, 2).repeat(3, 3)],
    ),
    "unary_chain": (
        1,
        "(float[2,3] x) => (float[2,3] y) {"
        "  a = Abs <consumed_inputs = [0]> (x) b = Sqrt (a) c = Clip <max = 1.0> (b)"
        "  d = Neg (c) e = Exp (d) f = Sum (e, a) y = Max (f, e) }",
        lambda x: [
            np.exp(-np.minimum(np.sqrt(np.abs(x)), 1)) + np.abs(x),
        ],
    ),
}


@pytest.mark.parametrize("name", LEGACY)
def test_first_opsets(name: str) -> None:
    opset, text, reference = LEGACY[name]
    upto = 21 if "GlobalLpPool" in text else 26
    check(opset, text, reference, relative=3e-6, upto=upto)


def test_recurrent_op_of_opset_1() -> None:
    def reference(x, w, r):
        gates, h, c = [], np.zeros((2, 4), np.float32), np.zeros((2, 4), np.float32)
        for t in range(3):
            i, o, f, g = np.split(x[t] @ w[0].T + h @ r[0].T, 4, axis=1)
            i, o, f = (1 / (1 + np.exp(-z)) for z in (i, o, f))
            c = f * c + i * np.tanh(g)
            h = o * np.tanh(c)
            gates.append(h[None])
        return [np.stack(gates)]

    text = """(float[3,2,3] x, float[1,16,3] w, float[1,16,4] r) => (float[3,1,2,4] y)
        { y = LSTM <hidden_size = 4, output_sequence = 1> (x, w, r) }"""
    check(1, text, reference, relative=1e-5)


def test_operators_outside_the_standard() -> None:
    x = "(float[2,3,6,6] x) => (float[a,b,c,d] y)"
    check(7, f"{x} {{ y = Affine <alpha = 2.0, beta = 1.0> (x) }}")
    check(7, f"{x} {{ y = Scale <scale = 2.0> (x) }}")
    check(7, f"{x} {{ y = ImageScaler <scale = 2.0, bias = [0.5, 1.5, -1.0]> (x) }}")
    check(7, f"{x} {{ y = ScaledTanh <alpha = 2.0, beta = 1.5> (x) }}")
    check(7, f"{x} {{ y = ParametricSoftplus <alpha = 2.0, beta = 1.5> (x) }}")
    check(7, f"{x} {{ y = Crop <border = [1, 0, 2, 1]> (x) }}")
    check(7, f"{x} {{ y = Crop <border = [1, 2, 0, 0], scale = [3, 2]> (x) }}")
    bounds = "<int64[1] s = {1}, int64[1] e = {5}, int64[1] a = {3}>"
    check(7, f"{x} {bounds} {{ y = DynamicSlice (x, s, e, a) }}")
    text = "(float[2,3] x) => (float[2,3,4] y)"
    fill = "y = ConstantFill <value = 1.5, extra_shape = [4]> (x)"
    ones = np.full((2, 3, 4), 1.5, np.float32)
    model, _ = lift(model_of(6, f"{text} {{ {fill} }}"), 23)
    assert_same([ones], Session(model).run({"x": ones[..., 0]}))


# -- opset 7 and later, against onnxruntime running the original

X = "(float[2,3,4,5] x) => (float[a,b,c,d] y)"
STATISTICS = "<float[2,3] s = {1,2,3,4,5,6}, float[2,3] m = {1,2,1,2,1,2}>"
LATER = {
    "upsample_nearest_attribute": (7, X, "y = Upsample <scales = [1.0, 1.0, 2.0, 1.5]> (x)"),
    "upsample_linear_attribute": (
        7,
        X,
        'y = Upsample <mode = "linear", scales = [1.0, 1.0, 2.0, 1.7]> (x)',
    ),
    "upsample_input": (
        9,
        X + "<float[4] s = {1.0, 1.0, 2.0, 1.5}>",
        'y = Upsample <mode = "linear"> (x, s)',
    ),
    "resize_grow": (10, X + "<float[4] s = {1.0, 1.0, 1.3, 2.5}>", "y = Resize (x, s)"),
    "resize_shrink": (10, X + "<float[4] s = {1.0, 1.0, 0.6, 0.7}>", "y = Resize (x, s)"),
    "resize_both": (10, X + "<float[4] s = {1.0, 1.0, 0.6, 1.7}>", "y = Resize (x, s)"),
    "resize_linear": (
        10,
        X + "<float[4] s = {1.0, 1.0, 0.6, 1.7}>",
        'y = Resize <mode = "linear"> (x, s)',
    ),
    "resize_computed_scales": (
        10,
        X + "<float[4] s = {1.0, 1.0, 0.6, 1.7}>",
        "z = Sub (s, s) t = Add (s, z) y = Resize (x, t)",
    ),
    "resize_tensorflow": (
        11,
        X + "<float[0] r = {}, float[4] s = {1.0, 1.0, 0.6, 1.7}>",
        'y = Resize <coordinate_transformation_mode = "tf_half_pixel_for_nn",'
        ' nearest_mode = "floor"> (x, r, s)',
    ),
    "resize_tensorflow_round": (
        11,
        X + "<float[0] r = {}, float[4] s = {1.0, 1.0, 2.3, 0.7}>",
        'y = Resize <coordinate_transformation_mode = "tf_half_pixel_for_nn"> (x, r, s)',
    ),
    "resize_sizes": (
        11,
        X + "<float[0] r = {}, int64[4] n = {2, 3, 7, 3}>",
        'y = Resize <mode = "cubic"> (x, r, r, n)',
    ),
    "resize_empty_scales": (
        13,
        X + "<float[0] r = {}, int64[4] n = {2, 3, 7, 3}>",
        'y = Resize <mode = "linear"> (x, r, r, n)',
    ),
    "batch_norm_per_element": (
        7,
        "(float[4,2,3] x) => (float[4,2,3] y)" + STATISTICS,
        "y = BatchNormalization <spatial = 0> (x, s, m, s, m)",
    ),
    "batch_norm_training": (
        9,
        "(float[4,2] x) => (float[4,2] y, float[2] m) <float[2] s = {1, 2}>",
        "y, m, v, sm, sv = BatchNormalization <momentum = 0.7> (x, s, s, s, s)",
    ),
    "dropout_ratio": (7, X, "y = Dropout <ratio = 0.3> (x)"),
    "slice_attributes": (1, X, "y = Slice <starts = [1, -3], ends = [9, -1], axes = [1, 3]> (x)"),
    "slice_all_axes": (1, X, "y = Slice <starts = [0,1,0,2], ends = [1,3,2,4]> (x)"),
    "top_k": (
        1,
        "(float[2,3,4,5] x) => (float[a,b,c,d] v, int64[a,b,c,d] i)",
        "v, i = TopK <k = 2, axis = 2> (x)",
    ),
    "clip_both": (6, X, "y = Clip <min = -0.5, max = 1.5> (x)"),
    "clip_below": (6, X, "y = Clip <min = 0.0> (x)"),
    "clip_none": (6, X, "y = Clip (x)"),
    "pad_constant": (2, X, "y = Pad <pads = [0,0,1,2,0,1,-1,0], value = 0.5> (x)"),
    "pad_reflect": (
        2,
        X,
        'y = Pad <mode = "reflect", value = 7.0, pads = [0,0,1,2,0,0,1,0]> (x)',
    ),
    "scatter": (
        9,
        X + "<int64[1,1,1,2] i = {1, 2}, float[1,1,1,2] u = {7.0, 8.0}>",
        "y = Scatter <axis = 3> (x, i, u)",
    ),
    "softmax_default": (1, X, "y = Softmax (x)"),
    "softmax_last": (7, X, "y = Softmax <axis = 3> (x)"),
    "softmax_negative": (11, X, "y = Softmax <axis = -2> (x)"),
    "softmax_first": (11, X, "y = LogSoftmax <axis = 0> (x)"),
    "hardmax": (1, X, "y = Hardmax <axis = 2> (x)"),
    "softmax_ones_behind": (
        7,
        "(float[2,3,1,1] x) => (float[2,3,1,1] y)",
        "y = Softmax <axis = 1> (x)",
    ),
    "squeeze_unsqueeze": (
        1,
        "(float[2,1,3,1] x) => (float[a,b,c,d] y)",
        "a = Squeeze <axes = [1]> (x) b = Squeeze (a) y = Unsqueeze <axes = [0, 3]> (b)",
    ),
    "split": (
        2,
        "(float[2,6] x) => (float[a,b] p, float[a,b] q, float[a,b] r, float[a,b] s)",
        "p, q = Split <axis = 1, split = [2, 4]> (x) r, s = Split <axis = 1> (x)",
    ),
    "reductions": (
        8,
        X,
        "a = ReduceSum <axes = [1]> (x) b = ReduceMean <axes = [2, 3]> (a)"
        " c = ReduceMax <keepdims = 1> (x) d = ReduceL2 <axes = [0]> (x)"
        " e = ReduceSumSquare (d) f = ReduceProd <axes = [3]> (x) g = ReduceMin <axes = [1]> (f)"
        " y = Sum (b, c, e, g)",
    ),
    "reduce_negative_axes": (11, X, "a = ReduceL1 <axes = [-1]> (x) y = ReduceMean (a)"),
    "roi_align": (
        10,
        X + "<float[1,4] r = {0.7, 0.3, 4.4, 3.1}, int64[1] i = {1}>",
        "y = RoiAlign <output_height = 3, output_width = 3, sampling_ratio = 2> (x, r, i)",
    ),
    "grid_sample": (
        16,
        "(float[2,3,4,5] x, float[2,3,3,2] g) => (float[a,b,c,d] y)",
        'p = GridSample (x, g) q = GridSample <mode = "bicubic"> (x, g)'
        ' r = GridSample <mode = "nearest"> (x, g) y = Sum (p, q, r)',
    ),
    "dft": (
        17,
        "(float[2,8,1] x) => (float[a,b,c] y)",
        "y = DFT <onesided = 1> (x)",
    ),
    "dft_axis_length": (
        17,
        "(float[2,8,4,1] x) => (float[a,b,c,d] y) <int64 n = {6}>",
        "y = DFT <axis = 2> (x, n)",
    ),
    "group_norm": (
        18,
        "(float[2,6,4] x) => (float[2,6,4] y) <float[2] s = {1.5, 2.5}, float[2] b = {0.5, 1.0}>",
        "y = GroupNormalization <num_groups = 2> (x, s, b)",
    ),
    "quantize_per_tensor": (
        10,
        "(float[2,6] x) => (float[2,6] y) <float s = {0.1}, uint8 z = {128}>",
        "q = QuantizeLinear (x, s, z) y = DequantizeLinear (q, s, z)",
    ),
    "max_pool_indices": (
        8,
        "(float[1,2,5,5] x) => (float[a,b,c,d] y, int64[a,b,c,d] i)",
        "y, i = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (x)",
    ),
    "pools_ceil": (
        10,
        "(float[1,2,7,7] x) => (float[a,b,c,d] y, float[a,b,c,d] z)",
        "y = MaxPool <kernel_shape = [2, 2], strides = [3, 3], pads = [1,1,1,1], ceil_mode = 1> (x)"
        " z = AveragePool <kernel_shape = [3, 3], strides = [2, 2], pads = [1,1,1,1],"
        " ceil_mode = 1, count_include_pad = 1> (x)",
    ),
    "conv_transpose_auto_pad": (
        1,
        X + "<float[3,1,2,2] w = {1,2,3,4,5,6,7,8,9,10,11,12}>",
        'y = ConvTranspose <auto_pad = "SAME_LOWER", strides = [3, 3]> (x, w)',
    ),
    "optional_depth_to_space": (
        1,
        "(float[1,8,2,3] x) => (float[a,b,c,d] y)",
        "p = DepthToSpace <blocksize = 2> (x) y = SpaceToDepth <blocksize = 2> (p)",
    ),
    "one_hot_arg_max": (
        9,
        "(float[2,5] x) => (float[a,b] y) <int64 n = {5}, float[2] v = {0.0, 1.0}>",
        "i = ArgMax <axis = 1, keepdims = 0> (x) y = OneHot (i, n, v)",
    ),
}


@pytest.mark.parametrize("name", LATER)
def test_later_opsets(name: str) -> None:
    opset, signature, body = LATER[name]
    check(opset, f"{signature} {{ {body} }}", upto=21 if "RoiAlign" in body else 26)


def test_dropout_mask_of_numbers() -> None:
    """Below opset 10 the mask had the data's type; below 12 it was undefined at inference."""
    text = "(float[2,3] x) => (float[2,3] y, float[2,3] mask) { y, mask = Dropout (x) }"
    check(7, text, upto=11)
    model, notes = lift(model_of(7, text), 13)
    assert model.opsets[""] == 11
    assert "mask" in notes[0]


def test_softmax_of_unknown_rank() -> None:
    text = "(float[2,3,4] x, int64[n] s) => (float[a,b,c] y) { r = Reshape (x, s) y = Softmax (r) }"
    proto = model_of(9, text)
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    model, _ = lift(proto, 13)
    assert [n.op_type for n in model.graph.nodes].count("Flatten") == 1
    model.graph.verify()
    for shape in ([2, 12], [2, 3, 4], [1, 2, 3, 4]):
        x = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
        feeds = {"x": x, "s": np.array(shape)}
        expected = Session(Model.from_proto(proto)).run(feeds)
        assert_same(expected, Session(model).run(feeds))


def test_group_norm_with_channels_known_only_at_run_time() -> None:
    text = """(float[2,c,4] x) => (float[2,c,4] y)
        <float[2] s = {1.5, 2.5}, float[2] b = {0.5, 1.0}>
        { y = GroupNormalization <num_groups = 2> (x, s, b) }"""
    proto = model_of(18, text)
    feeds = {"x": np.random.default_rng(0).standard_normal((2, 6, 4)).astype(np.float32)}
    model, _ = lift(proto, 23)
    check_structure(model, 23)
    expected = Session(Model.from_proto(proto)).run(feeds)
    assert_same(expected, Session(model).run(feeds), 3e-6)


def test_softmax_stays_one_node_where_it_can() -> None:
    text = "(float[2,3] x) => (float[2,3] y) { a = Relu (x) y = Softmax (a) }"
    model, _ = lift(model_of(9, text), 13)
    assert [n.op_type for n in model.graph.nodes] == ["Relu", "Softmax"]


def test_constants_have_the_type_of_the_data() -> None:
    """The type of the sum is not declared; shape inference finds it."""
    text = """(float16[2,3] x) => (float16[2,3] y)
        { s = Add (x, x) y = Pad <pads = [0,0,0,0], value = 2.0> (s) }"""
    model, _ = lift(model_of(7, text), 13)
    pad = model.graph.producer("y")
    assert pad is not None
    assert model.graph.dtype(pad.input[2]) == TensorProto.FLOAT16


def test_scan_over_a_batch() -> None:
    body = """(float[2] state, float[2] item) => (float[2] next, float[2] out)
        { next = Add (state, item) d = Unsqueeze <axes = [0]> (next)
          s = Squeeze <axes = [0]> (d) out = Mul (s, bias) }"""
    text = f"""(float[3,2] init, float[3,4,2] x, float[2] bias) => (float[3,2] last, float[3,4,2] y)
        {{ last, y = Scan <num_scan_inputs = 1, directions = [1], body = b {body}>
            ("", init, x) }}"""
    check(8, text)
