"""Feeds: domains inferred from uses, accepted sizes, and the user's samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.checks import model, parse
from toolkit.errors import UsageError
from toolkit.feeds import make_feeds
from toolkit.feeds.domains import Anything, Ids, Length, Mask, OneOf, Parameter, Positive
from toolkit.feeds.generate import analyzed
from toolkit.feeds.infer_domain import infer_domain
from toolkit.ir.model import Model
from toolkit.symbolic import symbol


def domain(text: str, name: str = "x"):
    return infer_domain(analyzed(model(text)), name)


def feeds(text: str, **options):
    """Return feeds for a model; it must run on them."""
    found = make_feeds(model(text), **options)
    assert len(found), found.refusal
    return found


# Domains -----------------------------------------------------------------------------------------

TABLE = "<float[5,2] table = {0,1,2,3,4,5,6,7,8,9}>"


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("y = Gather(table, x)", Ids(5)),
        ("y = Gather<axis = 1>(table, x)", Ids(2)),
        ("a = Cast<to = 6>(x) b = Identity(a) y = Gather(table, b)", Ids(5)),
        ("one = Constant<value = int64 {1}>() a = Add(x, one) y = Gather(table, a)", Ids(5, 1)),
        ("two = Constant<value = int64 {2}>() a = Sub(x, two) y = Gather(table, a)", Ids(5, -2)),
        (
            "pad = Constant<value = int64 {3}>() e = Equal(x, pad) i = Cast<to = 7>(e)"
            " s = Add(i, i) g = Gather(table, x) y = Identity(g)",
            Ids(5, 0, 3),
        ),
        (
            "hundred = Constant<value = int64 {100}>() e = Equal(x, hundred) y = Gather(table, x)",
            Ids(5),
        ),
    ],
)
def test_ids(nodes, expected):
    assert domain(f"g (int64[B,S] x) => (float[B,S,?] y) {TABLE} {{ {nodes} }}") == expected


def test_ids_stay_below_the_rows():
    text = f"g (int64[B,S] x) => (float[B,S,2] y) {TABLE} {{ y = Gather(table, x) }}"
    drawn = np.concatenate([feed["x"].reshape(-1) for feed in feeds(text, count=8).feeds])
    assert set(drawn.tolist()) == {0, 1, 2, 3, 4}


def test_ids_are_padded_with_the_compared_constant():
    text = f"""g (int64[B,S] x) => (float[B,S,2] y, bool[B,S] valid) {TABLE} {{
        pad = Constant<value = int64 {{4}}>() is_pad = Equal(x, pad) valid = Not(is_pad)
        y = Gather(table, x) }}"""
    ids = feeds(text).feeds[0]["x"]
    assert (ids[1:, -1] == 4).all()


def test_one_hot():
    rows = ", ".join(map(str, range(7)))
    spelled = f"""g (int32[B,S] x) => (bool[B,S,7] y) <int32[7] counting = {{{rows}}}> {{
        axes = Constant<value = int64[1] {{2}}>()
        a = Unsqueeze(x, axes) y = Equal(a, counting) }}"""
    assert domain(spelled) == Ids(7)
    operator = """g (int64[B] x) => (float[B,6] y) <int64 depth = {6}, float[2] v = {0, 1}> {
        y = OneHot(x, depth, v) }"""
    assert domain(operator) == Ids(6)


def test_a_choice_covers_every_branch():
    text = """g (float[N] v, int64 x) => (float[N] y) {
        rate = Constant<value = int64 {16000}>() high = Equal(x, rate)
        y = If (high) <then_branch = t () => (float[N] a) { a = Neg(v) },
                       else_branch = e () => (float[N] b) { b = Abs(v) }> }"""
    assert isinstance(domain(text), OneOf)
    drawn = [int(feed["x"]) for feed in feeds(text).feeds]
    assert 16000 in drawn
    assert set(drawn) != {16000}


def test_a_boolean_switch_takes_both_values():
    text = """g (float[N] v, bool x) => (float[N] y) {
        y = If (x) <then_branch = t () => (float[N] a) { a = Neg(v) },
                    else_branch = e () => (float[N] b) { b = Abs(v) }> }"""
    assert {bool(feed["x"]) for feed in feeds(text).feeds} == {True, False}


@pytest.mark.parametrize(
    "nodes",
    [
        "f = Cast<to = 1>(x) i = Sub(one, f) y = Mul(i, low)",
        "b = Cast<to = 9>(x) n = Not(b) y = Cast<to = 1>(n)",
        "b = Cast<to = 9>(x) y = Where(b, one, low)",
        "axes = Constant<value = int64[1] {1}>() u = Unsqueeze(x, axes) f = Cast<to = 1>(u)"
        " i = Sub(one, f) m = Mul(i, low) s = Squeeze(m, axes) y = Identity(s)",
        "zero = Constant<value = int64 {0}>() e = Equal(x, zero) y = Cast<to = 1>(e)",
    ],
)
def test_masks(nodes):
    text = f"""g (int64[B,S] x) => (float[B,S] y) <float one = {{1}}, float low = {{-10000}}> {{
        {nodes} }}"""
    assert domain(text) == Mask()
    first, second = (feed["x"] for feed in feeds(text, count=2).feeds)
    for mask in (first, second):
        assert set(np.unique(mask)) <= {0, 1}
        assert mask.any(axis=-1).all()
    assert (np.diff(first) <= 0).all(), "padded on the right"
    assert (np.diff(second) >= 0).all(), "padded on the left"
    assert len(set(first.sum(axis=-1))) > 1, "rows of different lengths"


def test_float_masks_are_recognized():
    consts = "<float one = {1}, float low = {-10000}>"
    mask = f"g (float[B,S] x) => (float[B,S] y) {consts} {{ i = Sub(one, x) y = Mul(i, low) }}"
    assert domain(mask) == Mask()
    other = f"g (float[B,S] x) => (float[B,S] y) {consts} {{ i = Sub(one, x) y = Neg(i) }}"
    assert domain(other) == Anything()


def test_names_break_ties_only():
    counted = "g (int64[B,S] {0}) => (int64[B,?] y) {{ y = ReduceSum({0}) }}"
    assert domain(counted.format("attention_mask"), "attention_mask") == Mask()
    assert domain(counted.format("counts"), "counts") == Anything()
    used = f"g (int64[B,S] mask) => (float[B,S,2] y) {TABLE} {{ y = Gather(table, mask) }}"
    assert domain(used, "mask") == Ids(5)


def test_lengths_of_a_recurrent_layer():
    weights = {"w": (1, 4, 3), "r": (1, 4, 1)}
    proto = parse("""g (float[S,B,3] v, int32[B] x) => (float[S,1,B,1] y) {
        y = LSTM<hidden_size = 1>(v, w, r, , x) }""")
    for name, shape in weights.items():
        proto.graph.initializer.append(numpy_helper.from_array(np.ones(shape, np.float32), name))
    made = Model.from_proto(proto)
    assert infer_domain(analyzed(made), "x") == Length(symbol("S"))
    found = make_feeds(made)
    assert len(found) == 3
    for feed in found.feeds:
        assert feed["x"].max() == feed["v"].shape[0]
        assert feed["x"].min() >= 1


@pytest.mark.parametrize(
    ("signature", "nodes", "expected"),
    [
        ("float[2,3] v, int64[3] x", "y = Reshape(v, x)", Parameter("reshape")),
        ("int64[2] x", "y = ConstantOfShape(x)", Parameter("small")),
        ("float[2,3] v, int64[2] x", "y = Tile(v, x)", Parameter("small")),
        ("float[N] x", "y = Sqrt(x)", Positive()),
        ("float[N] v, float[N] x", "y = Div(v, x)", Positive()),
        ("int64[N] v, int64[N] x", "y = Mod(v, x)", Positive()),
        ("float[N] x", "e = Constant<value = float {2}>() y = Pow(x, e)", Anything()),
        ("float[N] x", "e = Constant<value = float {0.5}>() y = Pow(x, e)", Positive()),
        ("uint8[N] x", "y = Identity(x)", Anything()),
        ("float16[N] x", "y = Identity(x)", Anything()),
        ("bfloat16[N] x", "y = Identity(x)", Anything()),
        ("double[N] x", "y = Identity(x)", Anything()),
        ("string[N] x", "y = Identity(x)", Anything()),
    ],
)
def test_parameters_and_unconstrained_values(signature, nodes, expected):
    proto = parse(f"g ({signature}) => (float y) {{ {nodes} }}")
    proto.graph.output[0].CopyFrom(onnx.ValueInfoProto(name="y"))
    made = Model.from_proto(proto)
    assert infer_domain(analyzed(made), "x") == expected
    found = make_feeds(made)
    assert len(found), found.refusal


def test_uses_inside_loops_and_functions():
    loop = f"""g (int64 n, int64[B] x) => (float[?,B,2] y) {TABLE} {{
        go = Constant<value = bool {{1}}>()
        y = Loop (n, go) <body = b (int64 i, bool c) => (bool d, float[B,2] row) {{
            d = Identity(c) row = Gather(table, x) }}> }}"""
    assert domain(loop) == Ids(5)
    assert domain(loop, "n") == Parameter("small")
    assert len(feeds(loop)) == 3
    function = f"""<ir_version: 10, opset_import: ["" : 21, "own" : 1]>
        g (int64[B] x) => (float[B,2] y) {TABLE} {{ y = own.Look(x, table) }}
        <domain: "own", opset_import: ["" : 21]> Look (i, t) => (o) {{ o = Gather(t, i) }}"""
    assert domain(function) == Ids(5)
    assert len(feeds(function)) == 3


# Sizes -------------------------------------------------------------------------------------------


def test_several_sizes_equal_for_equal_names_and_distinct_otherwise():
    found = feeds("g (float[B,S] a, float[B,S] b, float[S] c) => (float[B,S] y) { y = Sum(a,b,c) }")
    assert found.sizes == {"B": [1, 2, 3], "S": [5, 8, 16]}
    for feed in found.feeds:
        assert feed["a"].shape == feed["b"].shape
        assert feed["a"].shape[0] != feed["a"].shape[1]


def test_expressions_are_evaluated():
    text = """g (float[B,past] a, float[B,x] m) => (float[B,?] y) { y = Concat<axis = 1>(a, m) }"""
    proto = parse(text)
    proto.graph.input[1].type.tensor_type.shape.dim[1].dim_param = "past + 1"
    for feed in make_feeds(Model.from_proto(proto)).feeds:
        assert feed["m"].shape[1] == feed["a"].shape[1] + 1


def test_a_total_is_a_sum():
    text = """g (float[B,sequence_length] a, float[B,past_sequence_length] p,
               float[B,total_sequence_length] t) => (float[B,?] y) {
        c = Concat<axis = 1>(p, a) y = Add(c, t) }"""
    assert len(feeds(text)) == 3


def test_a_sum_of_sizes_is_found_without_names():
    """A decoder's cache, with a symbol for each of its tensors, and a mask over all of it."""
    text = """g (float[B,s] a, float[B,p] p0, float[B,q] p1, float[B,t] m) => (float[B,?] y) {
        c = Concat<axis = 1>(p0, a) d = Concat<axis = 1>(p1, a) y = Sum(c, d, m) }"""
    found = feeds(text)
    assert len(found) == 3
    assert len(found.sizes["t"]) == 3
    for feed in found.feeds:
        assert feed["m"].shape[1] == feed["a"].shape[1] + feed["p0"].shape[1]


def test_dimensions_without_a_name_are_tied_when_they_have_to_be():
    found = feeds("g (float[?,?] a, float[?,?] b) => (float[?,?] y) { y = Add(a, b) }")
    assert len(found) == 3
    assert len(found.sizes["a.0"]) == 3


def test_placeholder_names_are_different_dimensions():
    proto = parse("g (float[n,m] a) => (float[n,m] y) { y = Neg(a) }")
    for dim in proto.graph.input[0].type.tensor_type.shape.dim:
        dim.dim_param = "?"
    for feed in make_feeds(Model.from_proto(proto)).feeds:
        assert feed["a"].shape[0] != feed["a"].shape[1]


def test_sizes_that_only_a_run_reveals():
    baked = """g (float[B,S] x) => (float[?,?] y) {
        shape = Constant<value = int64[2] {-1, 512}>() r = Reshape(x, shape) y = Add(r, x) }"""
    assert set(feeds(baked).sizes["S"]) == {512}
    square = """g (float[1,1,h,w] x) => (float[1,1,?,?] y) {
        t = Transpose<perm = [0,1,3,2]>(x) y = Add(x, t) }"""
    assert len(set(feeds(square).sizes["h"])) > 1


def test_sizes_fixed_by_the_weights():
    proto = parse("g (float[?,?,?,?] x) => (float[?,?,?,?] y) { r = Relu(x) y = Conv(r, w) }")
    proto.graph.initializer.append(numpy_helper.from_array(np.ones((4, 7, 3, 3), np.float32), "w"))
    found = make_feeds(Model.from_proto(proto))
    assert found.sizes["x.1"] == [7]
    assert len(found.sizes["x.2"]) == 3


def test_an_input_without_a_shape():
    proto = parse("g (float[2] x) => (float[2] y) { y = MatMul(x, w) }")
    proto.graph.initializer.append(numpy_helper.from_array(np.ones((6, 2), np.float32), "w"))
    proto.graph.input[0].type.tensor_type.ClearField("shape")
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    found = make_feeds(Model.from_proto(proto))
    assert found.feeds[0]["x"].shape[-1] == 6


def test_a_static_model_gets_two_feeds_and_no_input_one():
    assert len(feeds("g (float[2] x) => (float[2] y) { y = Neg(x) }")) == 2
    assert len(feeds("g () => (float[2] y) <float[2] c = {1, 2}> { y = Neg(c) }")) == 1


def test_no_feed_at_all():
    text = """g (float[2,3] x) => (float[?] y) {
        shape = Constant<value = int64[1] {7}>() y = Reshape(x, shape) }"""
    found = make_feeds(model(text))
    assert not len(found)
    assert "Reshape" in found.refusal


# Other inputs ------------------------------------------------------------------------------------


def test_defaults_are_not_fed():
    text = "g (float[2] x, float[2] c) => (float[2] y) <float[2] c = {1, 2}> { y = Add(x, c) }"
    assert list(feeds(text).feeds[0]) == ["x"]


def test_a_sequence_and_an_optional():
    kind = helper.make_tensor_type_proto(TensorProto.FLOAT, ["n"])
    for wrapped in (helper.make_sequence_type_proto(kind), helper.make_optional_type_proto(kind)):
        sequence = wrapped.HasField("sequence_type")
        op = "ConcatFromSequence" if sequence else "OptionalGetElement"
        attributes: dict[str, Any] = {"axis": 0} if sequence else {}
        node = helper.make_node(op, ["x"], ["y"], **attributes)
        output = helper.make_tensor_value_info("y", TensorProto.FLOAT, [None])
        graph = helper.make_graph([node], "g", [helper.make_value_info("x", wrapped)], [output])
        imports = [helper.make_opsetid("", 21)]
        made = Model.from_proto(helper.make_model(graph, opset_imports=imports, ir_version=10))
        assert len(make_feeds(made)) == 3


def test_a_seed_gives_the_same_feeds():
    text = (
        "g (float[B,S] x, uint8[S] b) => (float[B,S] y, uint8[S] z) { y = Neg(x) z = Identity(b) }"
    )
    first, second, third = (feeds(text, seed=seed).feeds for seed in (1, 1, 2))
    for one, two in zip(first, second, strict=True):
        np.testing.assert_array_equal(one["x"], two["x"])
    assert (first[0]["x"] != third[0]["x"]).any()


# Samples -----------------------------------------------------------------------------------------

TAKES_TWO = """g (float[B,3] x, int64[B] i) => (float[B,3] y, int64[B] j) {
    y = Neg(x) j = Neg(i) }"""


def good_sample() -> dict[str, Any]:
    return {"x": np.ones((4, 3), np.float32), "i": np.arange(4)}


def test_a_sample_comes_first(tmp_path):
    np.savez(tmp_path / "s.npz", **good_sample())
    for sample in (tmp_path / "s.npz", str(tmp_path / "s.npz"), good_sample()):
        found = feeds(TAKES_TWO, samples=[sample])
        assert len(found) == 4
        assert found.feeds[0]["x"].shape == (4, 3)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"i": None}, "lacks 'i'; the model takes: x float32[B, 3], i int64[B]"),
        ({"z": np.ones(2)}, "has 'z', which is not an input"),
        ({"x": np.ones((4, 3))}, "'x' is float64; the model takes float32[B, 3]"),
        ({"x": np.ones((4, 2), np.float32)}, "'x' has shape [4, 2]; the model takes float32[B, 3]"),
        ({"x": np.ones(3, np.float32)}, "'x' has rank 1"),
    ],
)
def test_samples_that_do_not_fit(tmp_path, change, reason):
    sample = {k: v for k, v in (good_sample() | change).items() if v is not None}
    np.savez(tmp_path / "s.npz", **sample)
    with pytest.raises(UsageError) as caught:
        make_feeds(model(TAKES_TWO), samples=[tmp_path / "s.npz"])
    assert reason in str(caught.value)
    assert "s.npz" in str(caught.value)


def test_samples_that_are_not_archives(tmp_path):
    np.save(tmp_path / "one.npy", np.ones(3))
    (tmp_path / "junk.npz").write_bytes(b"junk")
    for name, reason in (
        ("one.npy", "single array"),
        ("junk.npz", ".npz"),
        ("gone", "exist"),
    ):
        with pytest.raises(UsageError, match=reason):
            make_feeds(model(TAKES_TWO), samples=[tmp_path / name])


def test_a_sample_on_which_the_model_fails():
    text = f"g (int64[B] x) => (float[B,2] y) {TABLE} {{ y = Gather(table, x) }}"
    with pytest.raises(UsageError, match="the model fails on the sample"):
        make_feeds(model(text), samples=[{"x": np.array([99])}])


def test_a_feed_without_nans_is_preferred():
    """Padding on the left masks all keys of the first rows of a causal softmax."""
    text = """g (float[B,S,S] s, int64[B,S] mask) => (float[B,S,S] y)
        <float zero = {0}, float low = {-inf}, int64[1] axis = {1}, int64 none = {0}> {
        k = Greater(mask, none) rows = Unsqueeze(k, axis) ones = Cast<to = 1>(rows)
        n = Neg(zero) f = Shape(s) full = Expand(ones, f) tri = Trilu<upper = 0>(full)
        keep = Greater(tri, zero) m = Where(keep, s, low) y = Softmax<axis = -1>(m)
    }"""
    for feed in feeds(text, count=3).runs:
        assert not np.isnan(feed.outputs[0]).any()
        assert not feed.feed["mask"].all()


def test_nans_that_no_feed_avoids_stay():
    text = "g (float[B,4] x) => (float[B,4] y) { a = Abs(x) n = Neg(a) y = Sqrt(n) }"
    assert all(np.isnan(trial.outputs[0]).all() for trial in feeds(text).runs)
