"""Any framework with `export_onnx`: the same function, the same proof."""

from __future__ import annotations

import gc
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import toolkit
from toolkit.errors import NotProven, UsageError

_FILE = Path(__file__).with_name("deepflow.py")
_SPEC: Any = importlib.util.spec_from_file_location("deepflow", _FILE)
deepflow = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(deepflow)


def test_the_guides_example_gets_a_dynamic_batch():
    model, example = deepflow.build()
    exported = toolkit.export(model, example, opset=11)
    graph = exported.only
    assert exported.framework == "export_onnx"
    assert graph.model.opsets == {"": 11}
    assert graph.dynamic == {"x": {0: "batch"}}
    assert graph.proof.sizes == {"batch": [1, 2, 5]}
    assert graph.proof.error < 1e-6


def test_bytes_and_file_hold_the_same_model(tmp_path):
    exported = toolkit.export(*deepflow.build())
    (saved,) = exported.save(tmp_path / "model.onnx")
    assert saved.read_bytes() == exported.to_bytes()
    onnx.checker.check_model(onnx.load(saved), full_check=True)


def test_the_scratch_folder_lives_as_long_as_a_model_of_it():
    model = toolkit.export(*deepflow.build()).model
    folder = model.weights.folder
    gc.collect()
    assert folder.is_dir()
    assert toolkit.optimize(model, "simplify").after.nodes
    del model
    gc.collect()
    assert not folder.exists()


def test_names_are_the_users():
    exported = toolkit.export(*deepflow.build(), input_names=["input"], output_names=["output"])
    assert list(exported.model.graph.feeds) == ["input"]
    assert list(exported.model.graph.outputs) == ["output"]


def test_a_name_that_an_inner_value_has():
    exported = toolkit.export(*deepflow.build(), input_names=["h0"])
    assert list(exported.model.graph.feeds) == ["h0"]


def test_every_size_fixed_on_request():
    exported = toolkit.export(*deepflow.build(), dynamic="none")
    assert exported.only.dynamic == {}
    assert exported.model.graph.shape("x") == (1, 10)


def test_passes_go_on_into_the_optimizer():
    exported = toolkit.export(*deepflow.build(), passes="simplify")
    assert exported.only.optimized is not None
    assert exported.model.node_count() < exported.only.model.node_count()


class Locked(deepflow.Sequential):
    """Its exporter writes the example's batch into the graph."""

    def nodes(self, index, layer, value, result):
        made = super().nodes(index, layer, value, f"loose{index}")
        shape = helper.make_node("Constant", [], [f"shape{index}"], value_ints=[1, -1])
        inputs = [f"loose{index}", f"shape{index}"]
        return [*made, shape, helper.make_node("Reshape", inputs, [result])]


def test_a_graph_locked_to_its_batch_is_left_so_and_said_to_be():
    model = Locked(deepflow.mlp().layers)
    graph = toolkit.export(model, deepflow.Tensor(shape=(1, 10))).only
    assert graph.dynamic == {}
    assert graph.model.graph.shape("x") == (1, 10)
    assert "batch" in graph.failures[0].reason
    assert "which was traced" in graph.failures[0].reason


def test_a_batch_that_was_asked_for_must_hold():
    model = Locked(deepflow.mlp().layers)
    with pytest.raises(NotProven, match="dimension 'batch'"):
        toolkit.export(model, deepflow.Tensor(shape=(1, 10)), dynamic="x:0=batch")


class Wrong(deepflow.Sequential):
    """Its exporter forgets the last bias."""

    def export_onnx(self, example, opset_version):
        made = super().export_onnx(example, opset_version)
        zeros = np.zeros(5, np.float32)
        made.graph.initializer[-1].CopyFrom(onnx.numpy_helper.from_array(zeros, "b1"))
        return made


def test_a_wrong_graph_is_not_handed_over():
    with pytest.raises(NotProven, match="on every input"):
        toolkit.export(Wrong(deepflow.mlp().layers), deepflow.Tensor(shape=(1, 10)))


class Raises(deepflow.Sequential):
    def export_onnx(self, example, opset_version):
        raise RuntimeError("no such\nlayer")


class Returns(deepflow.Sequential):
    def export_onnx(self, example, opset_version):
        return 7


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Raises, "export_onnx failed: RuntimeError: no such layer"),
        (Returns, "export_onnx returned a int"),
    ],
)
def test_an_exporter_that_fails(kind, message):
    with pytest.raises(UsageError, match=message):
        toolkit.export(kind(deepflow.mlp().layers), deepflow.Tensor(shape=(1, 10)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"example": None}, "needs an example"),
        ({"input_names": ["a", "b"]}, "2 input names are given, but there are 1"),
        ({"output_names": ["a", "a"]}, "given twice"),
        ({"dynamic": "z:0=batch"}, "no such input; inputs: x"),
        ({"dynamic": "x:2=batch"}, "it has 2 axes"),
        ({"dynamic": "x:zero=batch"}, "write an axis and its name"),
        ({"opset": 6}, "out of range"),
        ({"opset": 27}, "out of range"),
        ({"exporter": "magic"}, "exporter"),
        ({"framework": "export_onx"}, "did you mean 'export_onnx'"),
    ],
)
def test_bad_requests(options, message):
    model, example = deepflow.build()
    with pytest.raises(UsageError, match=message):
        toolkit.export(model, **{"example": example, **options})


def test_a_source_that_nobody_takes():
    with pytest.raises(UsageError, match="no front end accepts a value of type int"):
        toolkit.export(7)
