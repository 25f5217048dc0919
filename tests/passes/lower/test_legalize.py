"""Operators that an older release lacks are written in a form that it has."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from onnx import parser

import toolkit
from tests.ort import run
from toolkit.errors import UsageError
from toolkit.ir import node as nd
from toolkit.ir.model import Model
from toolkit.pass_manager.result import Result
from toolkit.targets.releases import find_release, obstacles

ATTENTION = "Attention <q_num_heads = 2, kv_num_heads = 2{}>"


def model(
    nodes: str, inputs: str = "float[N,S,8] x", weights: str = "", opset: int = 23, ir: int = 10
) -> Model:
    text = f"""<ir_version: {ir}, opset_import: ["" : {opset}, "com.microsoft" : 1]>
        g ({inputs}) => (float[N,S,8] y) <{weights}> {{ {nodes} }}"""
    return Model.from_proto(parser.parse_model(text))


def written(subject: Model, runtime: str, passes: str = "simplify", **options: str) -> Result:
    result = toolkit.optimize(subject, passes, runtime=runtime, **options)  # type: ignore[arg-type]
    assert obstacles(result.model, find_release(runtime)) == []
    assert "not proven" not in result.proof
    return result


def ops(result: Result) -> Counter[str]:
    return Counter(nd.qualified(node) for node in result.model.nodes())


def test_attention_becomes_the_contrib_operator_of_an_older_release() -> None:
    subject = model(f"y = {ATTENTION.format('')} (x, x, x)")
    assert ops(written(subject, "1.18")) == {"com.microsoft::MultiHeadAttention": 1}
    assert ops(written(subject, "1.23")) == {"Attention": 1}


def test_causal_self_attention_is_unidirectional() -> None:
    result = written(model(f"y = {ATTENTION.format(', is_causal = 1')} (x, x, x)"), "1.20")
    (node,) = result.model.nodes()
    assert nd.attr(node, "unidirectional") == 1


@pytest.mark.parametrize(
    ("mask", "expanded_for"),
    [
        ("float[N,1,1,S] m", "1.18 1.20 1.21"),
        ("float[S,S] m", "1.18 1.20 1.21"),
        ("float[N,1,S,S] m", "1.18 1.20"),
        ("float[1,2,S,S] m", "1.18"),
        ("float[N,2,S,S] m", ""),
    ],
)
@pytest.mark.parametrize("runtime", ["1.18", "1.20", "1.21"])
def test_a_mask_gets_the_sizes_that_the_release_needs(
    mask: str, expanded_for: str, runtime: str
) -> None:
    nodes = f"f = Max (m, lowest) y = {ATTENTION.format('')} (x, x, x, f)"
    subject = model(nodes, f"float[N,S,8] x, {mask}", "float lowest = {-10000}")
    found = ops(written(subject, runtime))
    assert found["com.microsoft::MultiHeadAttention"] == 1
    assert (found["Expand"] == 1) == (runtime in expanded_for.split())


@pytest.mark.parametrize("mask", ["float[S,S] m", "float[1,S,S] m", "float[N,1,S,S] m"])
def test_a_fully_masked_row_stays_zero(mask: str) -> None:
    subject = model(f"y = {ATTENTION.format('')} (x, x, x, m)", f"float[N,S,8] x, {mask}")
    original, result = subject.to_proto(), written(subject, "1.18")
    assert ops(result)["com.microsoft::MultiHeadAttention"] == 1
    x = np.random.default_rng(0).normal(size=(1, 3, 8)).astype(np.float32)
    m = np.zeros([{"N": 1, "S": 3}.get(d, 1) for d in mask[6:-3].split(",")], np.float32)
    m[..., 1, :] = -np.inf
    expected, actual = (
        run(proto, {"x": x, "m": m})[0] for proto in (original, result.model.inlined_proto())
    )
    np.testing.assert_allclose(actual, expected, atol=1e-5)
    assert not actual[0, 1].any()


def test_masks_per_head_that_may_hide_a_whole_row_are_written_out() -> None:
    inputs = "float[N,S,8] x, float[N,2,S,S] m"
    found = ops(written(model(f"y = {ATTENTION.format('')} (x, x, x, m)", inputs), "1.18"))
    assert "com.microsoft::MultiHeadAttention" not in found


def test_causal_attention_is_written_out_where_the_operator_has_no_causal_mask() -> None:
    subject = model(f"y = {ATTENTION.format(', is_causal = 1')} (x, x, x)")
    assert "com.microsoft::MultiHeadAttention" not in ops(written(subject, "1.16"))


def test_a_lifted_model_gets_an_ir_version_that_the_release_loads() -> None:
    subject = model("y = Relu (x)", opset=18, ir=10)
    assert written(subject, "1.16", "fuse").model.ir_version <= 9


@pytest.mark.parametrize(
    ("attributes", "operands"),
    [
        (", softcap = 2.0", "x, x, x"),
        ("", "x, x, x, allowed"),
        (", scale = 0.25", "x, k, k, allowed"),
    ],
)
def test_attention_without_a_contrib_form_is_written_out(attributes: str, operands: str) -> None:
    inputs = "float[N,S,8] x, float[N,T,8] k, bool[1,1,S,T] allowed"
    if "k" not in operands.split(", "):
        inputs = "float[N,S,8] x, bool[1,1,S,S] allowed"
    subject = model(f"y = {ATTENTION.format(attributes)} ({operands})", inputs)
    found = ops(written(subject, "1.18"))
    assert found["Softmax"] == 1
    assert "com.microsoft::MultiHeadAttention" not in found


@pytest.mark.parametrize(("approximate", "form"), [("none", "Gelu"), ("tanh", "FastGelu")])
def test_gelu_becomes_a_contrib_operator_where_the_opset_has_none(approximate, form) -> None:
    subject = model(f'y = Gelu <approximate = "{approximate}"> (x)', opset=20)
    assert ops(written(subject, "1.16")) == {f"com.microsoft::{form}": 1}
    assert ops(written(subject, "1.17")) == {"Gelu": 1}


def test_a_target_of_standard_operators_gets_no_contrib_operators() -> None:
    subject = model(f"h = Gelu (x) y = {ATTENTION.format('')} (h, h, h)")
    found = ops(written(subject, "1.16", target="onnx"))
    assert not any("::" in name for name in found)


def test_the_bias_of_blocked_weights_is_added_where_they_take_none() -> None:
    codes = ", ".join(str(i * 7 % 256) for i in range(128))
    weights = f"""uint8[8,1,16] w = {{{codes}}}, float[8] s = {{1, 1, 1, 1, 2, 2, 2, 2}},
        float[8] b = {{1, 2, 3, 4, 5, 6, 7, 8}}"""
    nodes = """p = Concat <axis = -1> (x, x, x, x)
        y = com.microsoft.MatMulNBits <K = 32, N = 8, bits = 4, block_size = 32> (p, w, s, , , b)"""
    subject = model(nodes, weights=weights, opset=17, ir=8)
    assert ops(written(subject, "1.18"))["Add"] == 1
    assert ops(written(subject, "1.23"))["Add"] == 0


def test_the_ir_version_is_lowered_to_that_of_the_release() -> None:
    subject = model("y = Relu (x)", opset=17, ir=11)
    assert written(subject, "1.16").model.ir_version <= 9


def test_a_result_that_cannot_be_written_for_the_release_is_refused() -> None:
    subject = model("y = com.microsoft.NoSuchOperator (x)", opset=17, ir=8)
    with pytest.raises(UsageError, match=r"does not load on onnxruntime 1\.18: com\.microsoft::No"):
        toolkit.optimize(subject, "cse", runtime="1.18", validate="off")
