"""The table from a framework's operators to ONNX nodes, read from what exporters leave behind."""

from __future__ import annotations

import pytest
from onnx import parser

from toolkit.frontends.operator_map import map_operators, origin_of
from toolkit.ir.model import Model

TEXT = """
<ir_version: 10, opset_import: ["": 18, "com.mine": 1]>
g (float[N,4] x, int64[N,4] ids) => (float[N,4] y)
<float[4,4] "net.0.weight" = {1,0,0,0, 0,1,0,0, 0,0,1,0, 0,0,0,1}, float half = {0.5}>
{
    a = MatMul(x, "net.0.weight")  b = Mul(a, half)  i = Cast <to = 1> (ids)  c = Add(b, i)
    d = Sigmoid(c)  y = Mul(c, d)
}
"""
ORIGINS = {
    "a": ("net.0", "Linear", "linear", "aten.linear.default"),
    "b": ("net.0", "Linear", "linear", "aten.linear.default"),
    "i": ("", "Net", "convert", "prims.convert_element_type.default"),
    "c": ("", "Net", "add", "aten.add.Tensor"),
    "d": ("net.1", "SiLU", "silu", "aten.silu.default"),
    "y": ("net.1", "SiLU", "silu", "aten.silu.default"),
}


@pytest.fixture
def model():
    proto = parser.parse_model(TEXT)
    for node in proto.graph.node:
        module, kind, call, target = ORIGINS[node.output[0]]
        scopes = ["", module, call] if module else ["", call]
        classes = ["demo.Net", f"torch.nn.{kind}", target] if module else ["demo.Net", target]
        trace = 'File "/home/me/net.py", line 7, in forward\n  File "/usr/torch/linear.py", line 9'
        for key, value in {
            "name_scopes": repr(scopes),
            "class_hierarchy": repr(classes),
            "fx_node": f"%{call} : call_function[target=torch.ops.{target}](args = ())",
            "stack_trace": trace,
        }.items():
            node.metadata_props.add(key=f"pkg.torch.onnx.{key}", value=value)
    return Model.from_proto(proto)


def test_rows_by_module_and_operator(model):
    found = {(row.module, row.operator): row for row in map_operators(model).rows}
    linear = found["net.0", "aten.linear.default"]
    assert linear.nodes == {"MatMul": 1, "Mul": 1}
    assert (linear.kind, linear.calls, linear.how) == ("Linear", 1, "decomposed")
    assert (linear.opset, linear.dtypes) == (14, ("float32",))
    assert linear.source == "net.py:7"
    assert linear.standard
    assert linear.runs
    assert found["", "aten.add.Tensor"].how == "direct"
    assert found["net.1", "aten.silu.default"].nodes == {"Sigmoid": 1, "Mul": 1}


def test_a_cast_that_nobody_asked_for_is_flagged(model):
    flags = map_operators(model).flags
    assert flags == ("the model: Cast int64 -> float32 (prims.convert_element_type.default)",)


def test_names_lead_back(model):
    found = map_operators(model)
    assert found.values["d"] == "net.1/aten.silu.default"
    assert found.initializers == {"net.0.weight": "net.0", "half": "net.0"}


def test_what_runs_where():
    text = """
    <ir_version: 10, opset_import: ["": 18, "com.microsoft": 1]>
    g (float[N,4] x, bfloat16[N,4] z) => (float[N,4] y, bfloat16[N,4] w)
    { y = com.microsoft.QuickGelu(x)  w = Tanh(z) }
    """
    rows = {
        row.operator: row for row in map_operators(Model.from_proto(parser.parse_model(text))).rows
    }
    assert (rows["QuickGelu"].standard, rows["QuickGelu"].runs) == (False, True)
    assert (rows["Tanh"].standard, rows["Tanh"].runs) == (True, False)
    assert "no CPU kernel" in rows["Tanh"].reasons[0]


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("/encoder/layer/layer.0/self/MatMul", "encoder.layer.0.self"),
        ("/net/net.2/Gemm", "net.2"),
        ("/Add", ""),
        ("node_of_somebody_else", ""),
    ],
)
def test_scopes_of_a_trace(name, module):
    (node,) = parser.parse_graph("g (float x) => (float y) { y = Abs(x) }").node
    node.name = name
    assert origin_of(node).module == module
