"""Every downward adapter on a small model, to the oldest opset that can express it."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, parser

import toolkit
from passes.opset.conversion import lower_ir
from passes.opset.ir_version import least_ir
from passes.opset.minimize import MinimizeOpset
from passes.opset.opset import Opset
from tests.checks import random_feeds
from tests.passes.opset.lifting import assert_same, model_of
from tests.passes.opset.lowering import check_lowered, lower
from toolkit.errors import UsageError
from toolkit.ir.model import Model
from toolkit.pass_manager.protocol import Context, Origin
from toolkit.runtime.session import Session

X = "(float[2,3,8] x) => (float[2,3,8] y)"
SAME = {
    "gelu": (23, X, "y = Gelu (x)"),
    "gelu_tanh": (23, X, 'y = Gelu <approximate = "tanh"> (x)'),
    "swish": (24, X, "y = Swish <alpha = 1.5> (x)"),
    "hard_swish": (22, X, "y = HardSwish (x)"),
    "mish": (22, X, "y = Mish (x)"),
    "celu": (22, X, "y = Celu <alpha = 2.0> (x)"),
    "greater_or_equal": (
        22,
        "(int64[2,3] x, int64[2,3] b) => (bool[2,3] y)",
        "y = GreaterOrEqual (x, b)",
    ),
    "cast_like": (
        22,
        "(float[2,3] x, int64[1] b) => (int64[2,3] y)",
        "y = CastLike (x, b)",
    ),
    "layer_norm": (
        23,
        X + " <float[8] s = {1,2,3,4,5,6,7,8}, float[8] b = {8,7,6,5,4,3,2,1}>",
        "y = LayerNormalization <epsilon = 0.01> (x, s, b)",
    ),
    "layer_norm_of_two_axes": (
        23,
        "(float[2,3,2] x) => (float[2,3,2] y) <float[3,2] s = {1,2,3,4,5,6}>",
        "y = LayerNormalization <axis = 1> (x, s)",
    ),
    "layer_norm_statistics": (
        23,
        "(float[2,3,8] x) => (float[2,3,8] y, float[a,b,c] m, float[d,e,f] i)"
        " <float[8] s = {1,2,3,4,5,6,7,8}>",
        'y, m, i = LayerNormalization (x, s, "")',
    ),
    "rms_norm": (
        23,
        X + " <float[8] s = {1,2,3,4,5,6,7,8}>",
        "y = RMSNormalization (x, s)",
    ),
    "group_norm": (
        23,
        "(float[2,4,5] x) => (float[2,4,5] y) <float[4] s = {1,2,3,4}, float[4] b = {0,1,2,3}>",
        "y = GroupNormalization <num_groups = 2> (x, s, b)",
    ),
    "reduce_axes": (
        18,
        "(float[2,3,8] x) => (float[2,3] y, float[2,3] z) <int64[1] a = {-1}>",
        "y = ReduceMean <keepdims = 0> (x, a) z = ReduceSum <keepdims = 0> (x, a)",
    ),
    "reduce_nothing": (
        18,
        X,
        "y = ReduceMax <noop_with_empty_axes = 1> (x)",
    ),
    "sum_of_squares_over_no_axis": (18, X, "y = ReduceSumSquare <noop_with_empty_axes = 1> (x)"),
    "minimum_of_integers": (
        13,
        "(int64[2,3] a, int64[3] b, int64[1] c) => (int64[2,3] y, int64[2,3] z)",
        "y = Min (a, b, c) z = Max (a, b)",
    ),
    "computed_shape_with_allowzero": (
        14,
        "(float[B,6] x, float[B,2,3] t) => (float[b,c,d] y)",
        "s = Shape (t) y = Reshape <allowzero = 1> (x, s)",
    ),
    "reduce_everything": (18, "(float[2,3] x) => (float[1,1] y)", "y = ReduceMax (x)"),
    "squeeze_and_unsqueeze": (
        21,
        "(float[2,3] x) => (float[2,3] y) <int64[2] a = {0, -1}>",
        "u = Unsqueeze (x, a) y = Squeeze (u, a)",
    ),
    "clip": (
        13,
        "(float[2,3] x) => (float[2,3] y) <float low = {-0.5}>",
        "y = Clip (x, low)",
    ),
    "pad_some_axes": (
        18,
        "(float[2,3,4] x) => (float[a,b,c] y)"
        " <int64[2] p = {1, 2}, float v = {1.5}, int64[1] a = {-2}>",
        "y = Pad (x, p, v, a)",
    ),
    "split_in_parts": (
        18,
        "(float[2,8] x) => (float[2,4] y, float[2,4] z)",
        "y, z = Split <axis = -1, num_outputs = 2> (x)",
    ),
    "split_in_unequal_parts": (
        18,
        "(float[2,7] x) => (float[2,3] a, float[2,3] b, float[2,1] c)",
        "a, b, c = Split <axis = 1, num_outputs = 3> (x)",
    ),
    "split_by_lengths": (
        18,
        "(float[2,5] x) => (float[2,2] a, float[2,3] b) <int64[2] n = {2, 3}>",
        "a, b = Split <axis = 1> (x, n)",
    ),
    "softmax_along_the_last_axis": (13, X, "y = Softmax <axis = -1> (x)"),
    "softmax_along_an_inner_axis": (13, X, "y = Softmax <axis = 1> (x)"),
    "log_softmax_with_sizes_of_one": (
        13,
        "(float[2,3,1,1] x) => (float[2,3,1,1] y)",
        "y = LogSoftmax <axis = 1> (x)",
    ),
    "shape_from_start_to_end": (
        21,
        "(float[2,3,8] x) => (int64[1] y)",
        "y = Shape <start = 1, end = 2> (x)",
    ),
    "reshape_without_zeros": (
        14,
        "(float[2,3] x) => (float[3,2] y) <int64[2] s = {3, 2}>",
        "y = Reshape <allowzero = 1> (x, s)",
    ),
    "resize_upsampling": (
        18,
        "(float[1,2,4,4] x) => (float[1,2,8,8] y) <float[2] s = {2.0, 2.0}>",
        'y = Resize <axes = [2, 3], coordinate_transformation_mode = "asymmetric",'
        ' nearest_mode = "floor"> (x, "", s)',
    ),
    "dropout": (
        13,
        "(float[2,3] x) => (float[2,3] y) <float r = {0.3}>",
        "y = Dropout <seed = 3> (x, r)",
    ),
    "batch_norm": (
        15,
        "(float[2,3,4] x) => (float[2,3,4] y) <float[3] s = {1,2,3}>",
        "y = BatchNormalization (x, s, s, s, s)",
    ),
    "top_k": (
        11,
        "(float[2,5] x) => (float[2,2] y, int64[2,2] i) <int64[1] k = {2}>",
        "y, i = TopK <axis = -1> (x, k)",
    ),
    "slice_from_the_end": (
        13,
        "(float[2,5] x) => (float[a,b] y) <int64[1] s = {1}, int64[1] e = {4}, int64[1] a = {-1}>",
        "y = Slice (x, s, e, a)",
    ),
    "gather_known_indices": (
        13,
        "(float[2,5] x) => (float[2,2] y) <int64[2] i = {0, 3}>",
        "y = Gather <axis = -1> (x, i)",
    ),
    "gather_computed_indices": (
        13,
        "(float[2,5] x, int64[3] n) => (float[2,3] y) <int64 k = {2}>",
        "r = Mod (n, k) i = Neg (r) y = Gather <axis = 1> (x, i)",
    ),
    "gemm_without_bias": (
        13,
        "(float[2,5] a, float[5,3] b) => (float[2,3] y)",
        "y = Gemm (a, b)",
    ),
    "constant_attributes": (
        13,
        "(float[2,3] x) => (float[2,3] y)",
        "c = Constant <value_floats = [1.0, 2.0, 3.0]> () y = Add (x, c)",
    ),
    "trilu": (
        14,
        "(float[4,5] x) => (float[4,5] y) <int64 k = {1}>",
        "y = Trilu <upper = 0> (x, k)",
    ),
    "bounds_of_types_that_do_not_occur": (
        23,
        "(float[2,3] x) => (float[3,2] y, bool[2,3] z)",
        "a = Identity (x) y = Transpose (a) z = IsNaN (a)",
    ),
}
LOWEST = {"gather_computed_indices": 10}


@pytest.mark.parametrize("name", SAME)
def test_lowered_models_compute_the_same(name: str) -> None:
    opset, signature, body = SAME[name]
    lowest = LOWEST.get(name, 9)
    reason = "older opsets do not have this operator" if lowest > 9 else ""
    check_lowered(opset, f"{signature} {{ {body} }}", lowest, reason, relative=2e-6)


REFUSED = {
    "computed_axes": (
        23,
        18,
        "(float[2,3] x, int64[1] a) => (float[b,c] y)",
        "y = ReduceMean (x, a)",
        "its axes is computed at run time",
    ),
    "computed_pads": (
        12,
        11,
        "(float[2,3] x, int64[4] p) => (float[b,c] y)",
        "y = Pad (x, p)",
        "its pads is computed",
    ),
    "new_attribute": (
        18,
        18,
        "(float[1,1,4,4] x) => (float[1,1,a,b] y) <float[4] s = {1.0, 1.0, 0.5, 0.5}>",
        'y = Resize <antialias = 1, mode = "linear"> (x, "", s)',
        "attribute antialias=1 is new",
    ),
    "new_attribute_value": (
        18,
        18,
        "(float[3] x, float[3] u) => (float[3] y) <int64[3] i = {0, 2, 2}>",
        'y = ScatterElements <reduction = "max"> (x, i, u)',
        "reduction=max is new",
    ),
    "reduction": (
        16,
        16,
        "(float[3] x, float[3] u) => (float[3] y) <int64[3] i = {0, 2, 2}>",
        'y = ScatterElements <reduction = "add"> (x, i, u)',
        "attribute reduction=add is new",
    ),
    "new_type": (
        14,
        14,
        "(int8[3] x) => (int8[3] y)",
        "y = Relu (x)",
        "'x' is a tensor(int8), which is new for it",
    ),
    "new_operator": (
        16,
        16,
        "(float[1,1,4,4] x, float[1,2,2,2] g) => (float[1,1,2,2] y)",
        "y = GridSample (x, g)",
        "older opsets do not have this operator",
    ),
    "volumes": (
        20,
        20,
        "(float[1,1,2,4,4] x, float[1,2,2,2,3] g) => (float[1,1,2,2,2] y)",
        "y = GridSample (x, g)",
        "two spatial dimensions",
    ),
    "regions_shifted_by_half_a_pixel": (
        16,
        16,
        "(float[1,1,4,4] x) => (float[1,1,2,2] y) <float[1,4] r = {0,0,2,2}, int64[1] i = {0}>",
        "y = RoiAlign <output_height = 2, output_width = 2> (x, r, i)",
        "half a pixel",
    ),
    "sizes": (
        13,
        11,
        "(float[1,1,4,4] x) => (float[1,1,8,8] y) <int64[4] s = {1, 1, 8, 8}>",
        'y = Resize (x, "", "", s)',
        "given sizes",
    ),
    "half_pixel": (
        13,
        11,
        "(float[1,1,4,4] x) => (float[1,1,8,8] y) <float[4] s = {1.0, 1.0, 2.0, 2.0}>",
        'y = Resize <mode = "linear"> (x, "", s)',
        "no half_pixel linear sampling",
    ),
    "steps": (
        10,
        10,
        "(float[6] x) => (float[3] y)"
        " <int64[1] s = {0}, int64[1] e = {6}, int64[1] a = {0}, int64[1] t = {2}>",
        "y = Slice (x, s, e, a, t)",
        "its step is not 1",
    ),
    "mask_of_dropout": (
        13,
        12,
        "(float[3] x) => (float[3] y, bool[3] m)",
        "y, m = Dropout (x)",
        "its mask is used",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_nodes_that_use_what_is_new_are_refused(name: str) -> None:
    opset, lowest, signature, body, reason = REFUSED[name]
    check_lowered(opset, f"{signature} {{ {body} }}", lowest, reason)


# -- attention and rotary embedding

HEADS = "(float[2,4,5,8] q, float[2,{kv},6,8] k, float[2,{kv},6,8] v{more}) => (float[2,4,5,8] y)"
ATTENTION = {
    "plain": (HEADS, 4, "", "(q, k, v)"),
    "scale": (HEADS, 4, "", "<scale = 0.5> (q, k, v)"),
    "grouped": (HEADS, 2, "", "(q, k, v)"),
    "one_key_head": (HEADS, 1, "", "(q, k, v)"),
    "causal": (HEADS, 4, "", "<is_causal = 1> (q, k, v)"),
    "softcap": (HEADS, 4, ", float[5,6] m", "<softcap = 2.0> (q, k, v, m)"),
    "boolean_mask": (HEADS, 4, ", bool[2,1,5,6] m", "(q, k, v, m)"),
    "both_masks": (HEADS, 4, ", bool[5,6] m", "<is_causal = 1> (q, k, v, m)"),
    "float_and_causal": (HEADS, 4, ", float[5,6] m", "<is_causal = 1> (q, k, v, m)"),
    "packed": (
        "(float[2,5,32] q, float[2,6,16] k, float[2,6,16] v) => (float[2,5,32] y)",
        2,
        "",
        "<q_num_heads = 4, kv_num_heads = 2> (q, k, v)",
    ),
    "dynamic": (
        "(float[B,S,32] q, float[B,T,16] k, float[B,T,16] v) => (float[B,S,32] y)",
        2,
        "",
        "<q_num_heads = 4, kv_num_heads = 2, is_causal = 1> (q, k, v)",
    ),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_is_written_out(name: str) -> None:
    signature, heads, more, call = ATTENTION[name]
    signature = signature.replace("{kv}", str(heads)).replace("{more}", more)
    _check_down_to(11, f"{signature} {{ y = Attention {call} }}")


def _check_down_to(lowest: int, text: str) -> None:
    proto = model_of(23, text, ir=10)
    original = Model.from_proto(proto)
    feeds = random_feeds(original)
    expected = Session(original).run(feeds)
    for to in (22, 17, 13, lowest):
        model, notes = lower(proto, to)
        assert model.opsets[""] == to, notes
        assert_same(expected, Session(model).run(feeds), 3e-6)


def test_attention_with_a_cache() -> None:
    text = """(float[1,2,3,8] q, float[1,2,3,8] k, float[1,2,3,8] v,
               float[1,2,P,8] pk, float[1,2,P,8] pv)
        => (float[1,2,3,8] y, float[1,2,T,8] nk, float[1,2,T,8] nv)
        { y, nk, nv = Attention <is_causal = 1> (q, k, v, "", pk, pv) }"""
    _check_down_to(13, text)


def test_a_row_without_keys_is_zero() -> None:
    text = """(float[1,1,2,4] q, float[1,1,3,4] k, float[1,1,3,4] v, bool[2,3] m)
        => (float[1,1,2,4] y) { y = Attention (q, k, v, m) }"""
    proto = model_of(23, text, ir=10)
    feeds = random_feeds(Model.from_proto(proto))
    feeds["m"] = np.array([[True, False, True], [False, False, False]])
    model, _ = lower(proto, 22)
    (found,) = Session(model).run(feeds)
    assert (found[0, 0, 1] == 0).all()
    assert_same(Session(Model.from_proto(proto)).run(feeds), [found], 3e-6)


def test_attention_with_lengths_of_its_own_stays() -> None:
    text = """(float[1,1,2,4] q, float[1,1,3,4] k, float[1,1,3,4] v, int64[1] n)
        => (float[1,1,2,4] y) { y = Attention (q, k, v, "", "", "", n) }"""
    model, notes = lower(model_of(24, text, ir=10), 17)
    assert model.opsets[""] == 24
    assert "needs opset 24: input nonpad_kv_seqlen is new" in notes[0]


@pytest.mark.parametrize("attributes", ["", "interleaved = 1", "rotary_embedding_dim = 4"])
@pytest.mark.parametrize("packed", [False, True])
def test_rotary_embedding_is_written_out(attributes: str, packed: bool) -> None:
    size = 4 if "dim" in attributes else 8
    listed = [attributes, *(["num_heads = 2"] if packed or "dim" in attributes else [])]
    shape = "2,3,16" if packed else "2,2,3,8"
    text = f"""(float[{shape}] x, float[10,{size // 2}] c, float[10,{size // 2}] s)
        => (float[{shape}] y) <int64[2,3] p = {{0, 1, 2, 5, 7, 9}}>
        {{ y = RotaryEmbedding <{", ".join(filter(None, listed))}> (x, c, s, p) }}"""
    _check_down_to(11, text.replace("<>", ""))


# -- quantization

QUANTIZED = {
    "output_dtype": (
        23,
        9 + 1,
        "(float[2,6] x) => (float[2,6] y) <float s = {0.1}>",
        "q = QuantizeLinear <output_dtype = 3> (x, s) y = DequantizeLinear (q, s)",
    ),
    "per_channel_weights": (
        23,
        9 + 1,
        "(float[2,3] x) => (float[2,2] y)"
        " <int8[3,2] w = {1,2,3,4,5,6}, float[2] s = {0.1, 0.2}, int8[2] z = {1, 2}>",
        "d = DequantizeLinear <axis = 1> (w, s, z) y = MatMul (x, d)",
    ),
    "four_bits": (
        21,
        9 + 1,
        "(float[2,3] x) => (float[2,2] y)"
        " <uint4[3,2] w = {33, 67, 101}, float[2] s = {0.1, 0.2}, uint4[2] z = {33}>",
        "d = DequantizeLinear <axis = 1> (w, s, z) y = MatMul (x, d)",
    ),
    "half_precision": (
        21,
        10,
        "(float16[2,6] x) => (float16[2,6] y) <float16 s = {12288}, uint8 z = {128}>",
        "q = QuantizeLinear (x, s, z) y = DequantizeLinear (q, s, z)",
    ),
    "blocks": (
        21,
        9,
        "(float[2,4] x) => (float[2,2] y)"
        " <uint4[4,2] w = {33, 67, 101, 135}, float[2,2] s = {0.1, 0.2, 0.3, 0.4},"
        " uint4[2,2] z = {33, 67}>",
        "d = DequantizeLinear <axis = 0, block_size = 2> (w, s, z) y = MatMul (x, d)",
    ),
}


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_models_are_lowered(name: str) -> None:
    opset, lowest, signature, body = QUANTIZED[name]
    if name in ("per_channel_weights", "four_bits"):
        lowest = 9
    reason = "older opsets do not have this operator" if lowest > 9 else ""
    check_lowered(opset, f"{signature} {{ {body} }}", lowest, reason)


def test_quantizing_per_channel_needs_opset_13() -> None:
    text = """(float[2,6] x) => (int8[2,6] q) <float[2] s = {0.1, 0.2}, int8[2] z = {0, 0}>
        { q = QuantizeLinear <axis = 0> (x, s, z) }"""
    check_lowered(21, text, 13, "a scale per channel")


# -- subgraphs, functions, IR


def test_nodes_in_branches_are_lowered() -> None:
    text = """(bool c, float[2,3] x) => (float[2,3] y) <int64[1] a = {1}> {
        y = If (c) <
            then_branch = t () => (float[2,3] p) { q = ReduceMean (x, a) p = Mul (x, q) },
            else_branch = e () => (float[2,3] p) { p = Gelu (x) }
        > }"""
    check_lowered(20, text, inputs={"c": np.array(True), "x": np.ones((2, 3), np.float32)})


FUNCTION = """<ir_version: 10, opset_import: ["" : 21, "local" : 1]>
    g (float[2,3] x) => (float[2,1] y) { a = Relu (x) y = local.Total (a) }
    <opset_import: ["" : 21], domain: "local">
    Total (x) => (y) { n = Constant <value = int64[1] {1}> () m = ReduceMean (x, n) y = Mul (m, m) }
    """


def test_functions_are_lowered_with_the_model() -> None:
    proto = parser.parse_model(FUNCTION)
    model, notes = lower(proto, 13)
    assert notes == ["adapted to opset 13: 1 ReduceMean"]
    assert model.opsets[""] == 13
    assert [e.version for e in model.functions[0].opset_import] == [13]
    assert model.ir_version == 8  # functions came with it
    feeds = {"x": np.random.default_rng(0).standard_normal((2, 3)).astype(np.float32)}
    assert_same(Session(Model.from_proto(proto)).run(feeds), Session(model).run(feeds))


@pytest.mark.parametrize(
    ("dtype", "least"),
    [("float", 7), ("bfloat16", 7), ("float8e4m3fn", 9), ("int4", 10)],
)
def test_types_demand_an_ir_version(dtype: str, least: int) -> None:
    proto = model_of(13, f"({dtype}[2] x) => ({dtype}[2] y) {{ y = Identity (x) }}", ir=11)
    model = Model.from_proto(proto)
    assert least_ir(model) == least
    lower_ir(model, floor=8)
    assert model.ir_version == max(8, least)


def test_metadata_demands_no_ir_version() -> None:
    proto = model_of(13, "(float[2] x) => (float[2] y) { y = Relu (x) }", ir=11)
    proto.graph.node[0].metadata_props.add(key="a", value="b")
    model = Model.from_proto(proto)
    lower_ir(model, floor=3)
    assert model.ir_version == 7
    onnx.checker.check_model(model.inlined_proto(), full_check=True)


# -- the whole pass


def test_several_obstacles_are_named_in_one_line() -> None:
    nodes = " ".join(f"y{i} = GridSample (x, g)" for i in range(5))
    outputs = ", ".join(f"float[1,1,2,2] y{i}" for i in range(5))
    text = f"(float[1,1,4,4] x, float[1,2,2,2] g) => ({outputs}) {{ {nodes} }}"
    _, notes = lower(model_of(17, text), 11)
    assert notes[0].startswith("stays at opset 16, not 11: GridSample 'y0' needs opset 16: ")
    assert notes[0].endswith("; and 2 more")


def test_a_version_that_did_not_hold_ends_the_descent() -> None:
    text = "(float[2,3] x) => (float[2,3] y) { y = Softmax (x) }"
    model = Model.from_proto(model_of(21, text))
    model.journal.veto_rule("opset-12")
    Opset(to=9).run(model, Context())
    assert model.opsets[""] == 13


def test_minimizing_keeps_fused_operators() -> None:
    text = "(float[2,3] x) => (float[2,3] y) { g = Gelu (x) y = Softmax (g) }"
    model = Model.from_proto(model_of(23, text, ir=11))
    ctx = Context(origin=Origin(opset=13, ir_version=7))
    MinimizeOpset().run(model, ctx)
    assert (model.opsets[""], model.ir_version) == (20, 9)
    assert [n.op_type for n in model.graph.nodes] == ["Gelu", "Softmax"]
    assert ctx.notes == ["opset 20 is needed: 1 Gelu"]


def test_minimizing_stops_at_the_opset_of_the_original() -> None:
    text = "(float[2,3] x) => (float[2,3] y) { y = Softmax (x) }"
    model = Model.from_proto(model_of(23, text, ir=11))
    MinimizeOpset().run(model, Context(origin=Origin(opset=13, ir_version=9)))
    assert (model.opsets[""], model.ir_version) == (13, 9)
    MinimizeOpset(floor=11).run(model, Context())
    assert model.opsets[""] == 11


# -- the opset of a whole run

OLD = "(float[2,3] x) => (float[2,3] y) { a = Clip <max = 0.5> (x) y = Softmax (a) }"
NEWER = "(float[2,3] x) => (float[2,3] y) { g = Gelu (x) y = Softmax (g) }"


def test_fuse_returns_to_the_opset_that_the_model_came_with() -> None:
    found = toolkit.optimize(model_of(9, OLD), "fuse")
    assert (found.model.opsets[""], found.model.ir_version) == (9, 8)
    assert found.passes[-1].name == "minimize-opset"
    assert found.passes[-1].status == "applied"


def test_an_opset_that_was_asked_for_is_kept() -> None:
    assert toolkit.optimize(model_of(9, OLD), "opset").model.opsets[""] == 23
    assert toolkit.optimize(model_of(9, OLD), "opset:to=13,fuse").model.opsets[""] == 13
    assert toolkit.optimize(model_of(9, OLD), "fuse,opset:to=18").model.opsets[""] == 18


def test_a_model_above_the_limit_is_lowered() -> None:
    found = toolkit.optimize(model_of(23, NEWER), "cleanup", opset=17)
    assert found.model.opsets[""] == 17
    assert found.passes[0].name == "opset"
    assert found.passes[0].error is not None
    assert found.passes[0].error < 1e-6
    assert "Gelu" not in {n.op_type for n in found.model.graph.nodes}


def test_a_limit_that_cannot_be_met_is_an_error() -> None:
    text = """(float[1,1,4,4] x, float[1,2,2,2] g) => (float[1,1,2,2] y)
        { y = GridSample (x, g) }"""
    with pytest.raises(UsageError, match=r"opset 13 cannot be met: .*'y' needs opset 16: older"):
        toolkit.optimize(model_of(20, text), "cleanup", opset=13)


def test_keep_leaves_the_opset_as_it_is() -> None:
    found = toolkit.optimize(model_of(21, NEWER.replace("Gelu", "Relu")), "fuse", opset="keep")
    assert found.model.opsets[""] == 21
    assert "minimize-opset" not in {result.name for result in found.passes}


def test_a_lowering_that_does_not_hold_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    from passes.opset import lowering_table

    def wrong(ctx):
        ctx.set(axis=0)

    monkeypatch.setitem(lowering_table.LOWERING[13], "Softmax", wrong)
    found = toolkit.optimize(model_of(9, OLD), "fuse")
    assert found.model.opsets[""] == 13
    assert [undone.rule for undone in found.passes[-1].undone] == ["opset-12"]
    with pytest.raises(UsageError, match=r"opset 9 cannot be met: .*undone: opset-12"):
        toolkit.optimize(model_of(13, NEWER.replace("Gelu", "Relu")), "cleanup", opset=9)


def test_half_precision_is_lowered_with_its_types() -> None:
    text = """(float16[2,4] x) => (float16[2,4] y) <float16[4] s = {15360, 16384, 15360, 16384}>
        { n = LayerNormalization (x, s) y = Gelu (n) }"""
    model, _ = lower(model_of(20, text), 16)
    casts = [n for n in model.graph.nodes if n.op_type == "Cast"]
    assert [n.attribute[0].i for n in casts] == [TensorProto.FLOAT, TensorProto.FLOAT16]
    feeds = random_feeds(model)
    (expected,) = Session(Model.from_proto(model_of(20, text))).run(feeds)
    (found,) = Session(model).run(feeds)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-2)


def test_group_norm_with_a_scale_per_group() -> None:
    """Its schema of opset 18 is deprecated, and a newer one takes its place at once."""
    text = """(float[2,4,5] x) => (float[2,4,5] y) <float[2] s = {1,2}, float[2] b = {0,1}>
        { y = GroupNormalization <num_groups = 2> (x, s, b) }"""
    proto = model_of(20, text)
    model, _ = lower(proto, 11)
    assert model.opsets[""] == 11
    feeds = random_feeds(model)
    expected = Session(Model.from_proto(proto)).run(feeds)
    assert_same(expected, Session(model).run(feeds), 3e-6)


def test_a_reshape_that_loses_allowzero_is_noted() -> None:
    text = """(float[B,6] x, float[B,2,3] t) => (float[b,c,d] y)
        { s = Shape (t) y = Reshape <allowzero = 1> (x, s) }"""
    _, notes = lower(model_of(14, text), 13)
    assert "Reshape below opset 14 has no allowzero: tensors must not be empty" in notes


def test_a_double_that_no_float_attribute_holds_stays() -> None:
    text = """(double[N] x) => (double[M] y) <int64[2] p = {1, 1}, double v = {0.1}>
        { y = Pad (x, p, v) }"""
    _, notes = lower(model_of(13, text), 10)
    assert "its value is not a 32-bit float" in notes[0]
