"""Third-party optimizers as passes: they run, are verified, and are undone when wrong."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import toolkit
from passes.external.optimizers import OnnxSim, OrtOptimizer
from toolkit.cli import demo_model
from toolkit.errors import UsageError
from toolkit.ir.model import Model
from toolkit.pass_manager import adapters
from toolkit.pass_manager.protocol import Context
from toolkit.pass_manager.registry import parse_passes
from toolkit.storage.weights import is_external, reference
from toolkit.verification.tolerance import EXACT

surgeon = pytest.importorskip("onnx_graphsurgeon")
rewriter = pytest.importorskip("onnxscript.rewriter")

TEXT = """
<ir_version: 8, opset_import: ["" : 17], producer_name: "exporter", doc_string: "a model">
g (float[n, 64] x) => (float[n, 64] y)
{
    a = Relu(x)
    b = Relu(a)
    c = MatMul(b, w)
    y = Identity(c)
}
"""


@pytest.fixture
def source(tmp_path):
    """Two consecutive Relus, and a weight large enough to stay external."""
    proto = onnx.parser.parse_model(TEXT)
    array = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    proto.graph.initializer.append(numpy_helper.from_array(array, "w"))
    entry = proto.metadata_props.add()
    entry.key, entry.value = "author", "somebody"
    path = tmp_path / "model.onnx"
    onnx.save(proto, path)
    return path


@adapters.from_graphsurgeon
def relu_once(graph):
    for node in graph.nodes:
        if node.op == "Relu" and node.inputs[0].inputs and node.inputs[0].inputs[0].op == "Relu":
            node.i(0).outputs.clear()
            node.inputs = [graph.inputs[0]]
    graph.cleanup().toposort()


@adapters.from_graphsurgeon
def relu_never(graph):
    for node in graph.nodes:
        if node.op == "Relu":
            node.op = "Abs"


@adapters.from_function
def drop_identity(proto):
    nodes = {node.op_type: node for node in proto.graph.node}
    nodes["MatMul"].output[0] = "y"
    proto.graph.node.remove(nodes["Identity"])


def relu_relu(op, x):
    return op.Relu(op.Relu(x))


def relu(op, x):
    return op.Relu(x)


def never(op, x):
    return op.Sin(op.Relu(x))


def relu_rule():
    return rewriter.RewriteRule(relu_relu, relu)


def run(source, *passes, **options):
    result = toolkit.optimize(source, list(passes), **options)
    result.model.graph.verify()
    return result


def ops(result) -> list[str]:
    return [node.op_type for node in result.model.graph.nodes]


@pytest.mark.parametrize(
    ("item", "left"),
    [
        (relu_once, ["Relu", "MatMul", "Identity"]),
        (drop_identity, ["Relu", "Relu", "MatMul"]),
        (adapters.from_onnxscript(relu_rule()), ["Relu", "MatMul", "Identity"]),
        (adapters.from_onnxscript([relu_rule()]), ["Relu", "MatMul", "Identity"]),
        (
            adapters.from_onnxscript(rewriter.RewriteRuleSet([relu_rule()])),
            ["Relu", "MatMul", "Identity"],
        ),
    ],
    ids=["graphsurgeon", "function", "onnxscript rule", "onnxscript rules", "onnxscript set"],
)
def test_a_correct_result_is_kept(source, item, left):
    result = run(source, item)
    assert [(p.status, p.reason) for p in result.passes] == [("applied", "")]
    assert ops(result) == left
    assert ops(run(result.model, item)) == left


@pytest.mark.parametrize("item", [relu_never], ids=["graphsurgeon"])
def test_a_wrong_one_is_undone(source, item):
    result = run(source, item)
    assert result.passes[0].status == "reverted"
    assert "y" in result.passes[0].reason
    assert ops(result) == ["Relu", "Relu", "MatMul", "Identity"]


def test_returning_another_model(source):
    @adapters.from_function
    def other(proto):
        new = onnx.ModelProto()
        new.CopyFrom(proto)
        del new.graph.node[1]
        new.graph.node[1].input[0] = "a"
        return new

    assert ops(run(source, other)) == ["Relu", "MatMul", "Identity"]


def test_returning_another_graph(source):
    @adapters.from_graphsurgeon
    def other(graph):
        graph = graph.copy()
        relu_once_in(graph)
        return graph

    def relu_once_in(graph):
        graph.nodes[1].inputs = [graph.inputs[0]]
        graph.cleanup().toposort()

    assert ops(run(source, other)) == ["Relu", "MatMul", "Identity"]


@pytest.mark.parametrize(
    "item",
    [
        adapters.from_graphsurgeon(lambda graph: None, name="nothing"),
        adapters.from_graphsurgeon(lambda graph: graph, name="nothing"),
        adapters.from_function(lambda proto: None, name="nothing"),
        adapters.from_function(lambda proto: proto, name="nothing"),
        adapters.from_onnxscript(rewriter.RewriteRule(never, relu), name="nothing"),
    ],
)
def test_nothing_to_do_is_unchanged(source, item):
    result = run(source, item)
    assert [(p.name, p.status) for p in result.passes] == [("nothing", "unchanged")]


@pytest.mark.parametrize(
    "item", [relu_once, adapters.from_onnxscript(relu_rule()), drop_identity, OrtOptimizer()]
)
def test_the_description_of_the_model_is_kept(source, item):
    result = run(source, item)
    proto = result.model.to_proto()
    assert (proto.producer_name, proto.doc_string) == ("exporter", "a model")
    assert [(e.key, e.value) for e in proto.metadata_props] == [("author", "somebody")]
    assert proto.ir_version == 8
    assert result.model.opsets == {"": 17}
    stored = result.model.graph.initializers["w"]
    assert is_external(stored)
    assert reference(stored)[0] == "model.onnx"  # the bytes of the original file


def test_a_failing_function_costs_only_itself(source):
    @adapters.from_function
    def fails(proto):
        raise KeyError("no such node")

    @adapters.from_function
    def returns_nonsense(proto) -> Any:
        return 3

    result = run(source, fails, returns_nonsense, drop_identity)
    assert [p.status for p in result.passes] == ["reverted", "reverted", "applied"]
    assert "no such node" in result.passes[0].reason
    assert "ModelProto" in result.passes[1].reason


def test_names_and_tolerance():
    assert relu_once.name == "relu_once"
    assert adapters.from_onnxscript([]).name == "onnxscript"
    exact = adapters.from_function(lambda proto: None, name="mine", tolerance=EXACT)
    assert (exact.name, exact.tolerance) == ("mine", EXACT)


def test_old_models_whose_initializers_are_inputs(source):
    proto = onnx.load(source)
    proto.ir_version = 3
    del proto.opset_import[:]
    proto.opset_import.add(version=9)
    proto.graph.input.append(
        onnx.helper.make_tensor_value_info("w", onnx.TensorProto.FLOAT, [64, 64])
    )
    result = run(proto, relu_once)
    assert result.passes[0].status == "applied", result.passes[0].reason


def test_inputs_with_a_default_keep_it(source):
    proto = onnx.load(source)
    proto.graph.input.append(
        onnx.helper.make_tensor_value_info("w", onnx.TensorProto.FLOAT, [64, 64])
    )
    assert run(proto, relu_once).model.graph.inputs == ["x", "w"]


def test_a_model_over_two_gigabytes_is_reported(source, monkeypatch):
    monkeypatch.setattr("toolkit.storage.serialize.PROTOBUF_LIMIT", 1000)
    for item in (relu_once, OrtOptimizer()):
        result = run(source, item)
        assert result.passes[0].status == "reverted"
        assert "2 GiB" in result.passes[0].reason


@pytest.mark.parametrize(
    ("package", "item"),
    [
        ("onnx_graphsurgeon", relu_once),
        ("onnxscript.rewriter", adapters.from_onnxscript([])),
        ("onnxsim", OnnxSim()),
    ],
)
def test_a_missing_package_names_the_extra(source, monkeypatch, package, item):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UsageError, match=r"pip install 'onnx-toolkit-passes\[adapters\]'"):
        run(source, item)


# Whole optimizers --------------------------------------------------------------------------------


def test_onnxsim(source):
    pytest.importorskip("onnxsim")
    result = run(demo_model.build(), *parse_passes("onnxsim"))
    assert result.passes[0].status == "applied", result.passes[0].reason
    assert result.after.nodes < result.before.nodes / 2
    assert not result.model.to_proto().metadata_props


@pytest.mark.parametrize("level", ["basic", "extended", "all"])
def test_onnxruntime(level):
    result = run(demo_model.build(), *parse_passes(f"onnxruntime:level={level}"))
    assert result.passes[0].status == "applied", result.passes[0].reason
    assert result.after.nodes < result.before.nodes / 2
    foreign = {op.split("::")[0] for op in result.after.ops if "::" in op}
    assert (
        foreign
        == {
            "basic": set(),
            "extended": {"com.microsoft"},
            "all": {"com.microsoft", "com.microsoft.nchwc"},
        }[level]
    )


def test_target_onnx_takes_no_foreign_operators():
    result = run(demo_model.build(), OrtOptimizer("extended"), target="onnx")
    assert result.passes[0].status == "reverted"
    assert "com.microsoft" in result.passes[0].reason
    assert run(demo_model.build(), OrtOptimizer(), target="onnx").passes[0].status == "applied"


def test_what_onnxruntime_refuses_is_undone(source):
    proto = onnx.load(source)
    proto.graph.node[0].op_type, proto.graph.node[0].domain = "Strange", "acme"
    proto.opset_import.add(domain="acme", version=1)
    result = run(proto, OrtOptimizer())
    assert result.passes[0].status == "reverted"
    assert "Strange" in result.passes[0].reason


def test_from_a_users_file(source, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    path = tmp_path / "mine.py"
    path.write_text(
        "from toolkit.pass_manager.adapters import from_graphsurgeon\n\n\n"
        "@from_graphsurgeon\n"
        "def relu_once(graph):\n"
        "    graph.nodes[1].inputs = [graph.inputs[0]]\n"
        "    graph.cleanup().toposort()\n"
    )
    result = run(source, *parse_passes(f"{path}:relu_once"))
    assert [(p.name, p.status) for p in result.passes] == [("relu_once", "applied")]


def test_rollback_restores_the_model(source):
    model = Model.load(source)
    before = model.to_proto().SerializeToString(deterministic=True)
    relu_once.run(model, Context())
    assert len(model.journal) == 1
    model.rollback()
    model.graph.verify()
    assert model.to_proto().SerializeToString(deterministic=True) == before
