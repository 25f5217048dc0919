"""What each onnxruntime release loads: the table agrees with the installed one and with facts."""

from __future__ import annotations

import pytest
from onnx import parser

from tests import ort
from toolkit.errors import UsageError
from toolkit.ir.model import Model
from toolkit.runtime.cost_table import runtime_version
from toolkit.targets.releases import (
    find_release,
    installed_release,
    obstacles,
    oldest_release,
    releases,
)


def model(nodes: str, opset: int, *, types: str = "float[N,8]", ir: int = 8) -> Model:
    text = f"""<ir_version: {ir}, opset_import: ["" : {opset}, "com.microsoft" : 1]>
        g ({types} x) => (y) {{ {nodes} }}"""
    return Model.from_proto(parser.parse_model(text))


def test_releases_are_in_order_and_load_ever_newer_models() -> None:
    numbers = [release.number for release in releases()]
    assert numbers == sorted(set(numbers))
    for older, newer in zip(releases(), releases()[1:], strict=False):
        assert older.max_opset <= newer.max_opset
        assert older.max_ir <= newer.max_ir


@pytest.mark.parametrize("text", ["1.18", "1.18.1", "onnxruntime 1.18", " 1.18.0 "])
def test_a_release_is_found_by_any_of_its_versions(text: str) -> None:
    assert find_release(text).version == "1.18"


@pytest.mark.parametrize("text", ["1.3", "18", "newest", "", "1.18.x", "2.0"])
def test_an_unknown_version_names_the_known_ones(text: str) -> None:
    with pytest.raises(UsageError, match=r"unknown onnxruntime version '.*': choose one of 1\.16,"):
        find_release(text)


def test_the_installed_release_is_the_newest_known_one_that_is_not_newer() -> None:
    installed = tuple(map(int, runtime_version().split(".")[:2]))
    assert installed_release() == max(
        (r for r in releases() if r.number <= installed), key=lambda r: r.number
    )


@pytest.mark.parametrize(
    ("nodes", "opset", "oldest"),
    [
        ("y = Relu (x)", 13, "1.16"),
        ("y = Gelu (x)", 20, "1.17"),
        ("y = com.microsoft.Gelu (x)", 13, "1.16"),
        ("y = Attention <q_num_heads = 2, kv_num_heads = 2> (x, x, x)", 23, "1.23"),
        ("y = Swish (x)", 24, "1.24"),  # ONNX's function of operators with kernels
        ("y = com.microsoft.NoSuchOperator (x)", 13, None),
        ("y = Swish (x)", 25, None),  # the function's operators have changed since
    ],
)
def test_the_oldest_release_has_the_kernels(nodes: str, opset: int, oldest: str | None) -> None:
    made = model(nodes, opset, types="float[N,4,8]")
    found = oldest_release(made)
    assert (found and found.version) == oldest


@pytest.mark.parametrize(
    ("nodes", "opset", "types", "reason"),
    [
        ("y = Attention (x, x, x)", 23, "float[1,2,4,8]", "opset 23 is newer than 21, the newest"),
        ("y = Round (x)", 21, "bfloat16[N]", "Round (opset 21): no kernel for bfloat16"),
        ("y = com.microsoft.Nothing (x)", 21, "float[N]", "there is no such operator"),
        ("y = com.microsoft.Gelu <a = 1> (x)", 21, "float[N]", "Gelu: it has no attribute a"),
        ("y = com.microsoft.Gelu (x, x)", 21, "float[N]", "Gelu: it takes at most 1 operands"),
        ("a = Round (x) y = Round (a)", 21, "bfloat16[N]", "no kernel for bfloat16 (2 nodes)"),
    ],
)
def test_obstacles_name_the_reason(nodes: str, opset: int, types: str, reason: str) -> None:
    (found,) = obstacles(model(nodes, opset, types=types), find_release("1.18"))
    assert reason in found


def test_ir_versions_have_a_ceiling() -> None:
    found = obstacles(model("y = Relu (x)", 21, ir=11), find_release("1.22"))
    assert found == ["IR version 11 is newer than 10, the newest it loads"]


def test_operators_of_custom_libraries_and_of_the_model_are_not_judged() -> None:
    text = """<ir_version: 10, opset_import: ["" : 21, "mine" : 1, "local" : 1]>
        g (float[N] x) => (y) { a = mine.Thing (x) y = local.Twice (a) }
        <domain: "local", opset_import: ["" : 21]> Twice (a) => (b) { b = Add (a, a) }"""
    made = Model.from_proto(parser.parse_model(text))
    assert obstacles(made, find_release("1.18")) == []


def test_a_value_of_an_attribute_can_be_newer_than_its_operator() -> None:
    text = """<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>
        g (float[N,32] x, uint8[8,1,32] w, float[8] s) => (y) {
            y = com.microsoft.MatMulNBits <K = 32, N = 8, bits = 8, block_size = 32> (x, w, s) }"""
    found = oldest_release(Model.from_proto(parser.parse_model(text)))
    assert found is not None
    assert found.version == "1.22"


def test_blocked_dequantization_loads_before_it_runs() -> None:
    text = """<ir_version: 10, opset_import: ["" : 21]>
        g (int8[4,4] x, float[2,4] s) => (y) {
            y = DequantizeLinear <axis = 0, block_size = 2> (x, s) }"""
    found = oldest_release(Model.from_proto(parser.parse_model(text)))
    assert found is not None
    assert found.version == "1.19"


@pytest.mark.parametrize(
    "nodes",
    [
        "y = Round (x)",
        "y = Gelu (x)",
        "y = GreaterOrEqual (x, x)",
        "y = MeanVarianceNormalization <axes = [0]> (x)",
        "y = Elu (x)",
        "y = LpNormalization (x)",
        "y = com.microsoft.FusedMatMul (x, x)",
        "y = SimplifiedLayerNormalization (x, x)",
    ],
)
@pytest.mark.parametrize("types", ["float[8,8]", "float16[8,8]", "double[8,8]", "int8[8,8]"])
def test_the_table_agrees_with_the_installed_runtime(nodes: str, types: str) -> None:
    made = model(nodes, 21, types=types)
    predicted = not obstacles(made, installed_release())
    try:
        ort.session(made.to_proto())
    except Exception:
        loads = False
    else:
        loads = True
    assert predicted == loads
