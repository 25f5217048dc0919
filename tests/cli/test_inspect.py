"""`toolkit inspect`: the facts, on the console and as JSON."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest

from tests.cli.models import listing, parse, with_external
from toolkit.cli import demo_model
from toolkit.inspection import inspect
from toolkit.ir.model import Model


def facts_of(text: str):
    return inspect(Model.from_proto(parse(text)))


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.onnx"
    onnx.save(demo_model.build(), path)
    return path


def test_the_facts(run, model):
    data = json.loads(run("inspect", model, "--json", "-").out)
    assert data["bytes"] == model.stat().st_size
    assert (data["ir_version"], data["opsets"]) == (8, {"ai.onnx": 17})
    assert data["producer"] == "toolkit demo"
    assert data["inputs"] == [
        {
            "name": "image",
            "type": "float32",
            "shape": ["batch", 3, 32, 32],
            "has_default": False,
        }
    ]
    assert data["outputs"][0]["shape"] == ["batch", 10]
    assert data["dynamic"] == {"batch": ["image[0]", "logits[0]"]}
    assert data["subgraphs"] == 2
    assert sum(data["ops"].values()) == data["nodes"]
    proto = demo_model.build()
    constants = sum(node.op_type == "Constant" for node in proto.graph.node)
    assert len(data["tensors"]) == len(proto.graph.initializer) + constants
    assert sum(data["bytes_by_op"].values()) == data["weight_bytes"]
    assert sum(data["bytes_by_dtype"].values()) == data["weight_bytes"]
    assert data["obstacles"] == []


def test_the_console(run, model, tmp_path):
    before = listing(tmp_path)
    done = run("inspect", model)
    assert (done.code, done.err) == (0, "")
    assert "\x1b" not in done.out
    lines = [line for line in done.out.splitlines() if not line.startswith("model ")]
    assert max(map(len, lines)) <= 80
    for text in ("[batch, 3, 32, 32]", "ai.onnx 17", "Transpose", "stem.1.weight", "loads it"):
        assert text in done.out
    assert listing(tmp_path) == before


def test_top(run, model):
    none, all_of_them = (
        run("inspect", model, "--top", 0).out,
        run("inspect", model, "--top", 99).out,
    )
    assert "stem.1.weight" not in none
    assert "classifier.bias" in all_of_them


def test_json_file(run, model, tmp_path):
    done = run("inspect", model, "--json", tmp_path / "facts.json")
    assert json.loads((tmp_path / "facts.json").read_text())["nodes"] == 180
    assert "stem.1.weight" in done.out


def test_external_data(run, tmp_path):
    (tmp_path / "weights.bin").write_bytes(bytes(64))
    onnx.save(with_external("weights.bin"), tmp_path / "model.onnx")
    data = json.loads(run("inspect", tmp_path / "model.onnx", "--json", "-").out)
    assert data["external_files"] == {"weights.bin": 64}
    assert data["tensors"][0]["file"] == "weights.bin"
    assert "weights.bin" in run("inspect", tmp_path / "model.onnx").out


def test_functions_metadata_and_defaults():
    proto = parse(
        """
        <ir_version: 8, opset_import: ["" : 17, "local" : 1], metadata_props: ["author": "me"]>
        g (float[n, 2] x, float[2] w = {1, 2}) => (float[n, 2] y) { y = local.twice(x) }
        <domain: "local", opset_import: ["" : 17]>
        twice (a) => (b) { b = Add(a, a) }
        """
    )
    facts = inspect(Model.from_proto(proto))
    assert facts.functions == ["local::twice"]
    assert facts.ops == {"local::twice": 1, "Add": 1}
    assert facts.metadata == {"author": "me"}
    assert [value.has_default for value in facts.inputs] == [False, True]
    assert facts.obstacles == []
    assert facts.bytes == len(proto.SerializeToString())


def test_types_that_are_no_tensors():
    proto = parse(
        """
        <ir_version: 8, opset_import: ["" : 17]>
        g (seq(float[n]) s, float x, string[2] t) => (float y) { y = Identity(x) }
        """
    )
    facts = inspect(Model.from_proto(proto))
    assert [(v.type, v.shape) for v in facts.inputs] == [
        ("sequence of float32", None),
        ("float32", ()),
        ("string", (2,)),
    ]


def test_dimensions_without_a_name(run, tmp_path):
    proto = parse(
        """
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[?, 2] x) => (float[?, 2] y) { y = Relu(x) }
        """
    )
    onnx.save(proto, tmp_path / "model.onnx")
    assert inspect(Model.from_proto(proto)).dynamic == {"?": ["x[0]", "y[0]"]}
    assert "[?, 2]" in run("inspect", tmp_path / "model.onnx").out


@pytest.mark.parametrize(
    ("body", "reasons"),
    [
        ("y = acme.Strange(x)  z = acme.Strange(x)", ["Strange x2: the domain 'acme' is unknown"]),
        ("y = Relu(x)  z = NonZero(i)", ["NonZero (opset 17) on int8: onnxruntime has no"]),
        ("y = Selu(i)  z = Celu(i)", ["Selu (opset 17) on int8", "Celu (opset 17) on int8"]),
    ],
)
def test_what_would_not_run(run, tmp_path, body, reasons):
    text = f"""
        <ir_version: 8, opset_import: ["" : 17, "acme" : 1]>
        g (float[n] x, int8[n] i) => (y, z) {{ {body} }}
    """
    onnx.save(parse(text), tmp_path / "model.onnx")
    obstacles = json.loads(run("inspect", tmp_path / "model.onnx", "--json", "-").out)["obstacles"]
    assert len(obstacles) == len(reasons)
    for obstacle, reason in zip(obstacles, reasons, strict=True):
        assert reason in obstacle
    done = run("inspect", tmp_path / "model.onnx")
    assert done.code == 0
    assert "does not load it:" in done.out


def test_an_older_release(run, tmp_path):
    text = '<ir_version: 10, opset_import: ["" : 23]> g (float[n] x) => (y) { y = Relu(x) }'
    onnx.save(parse(text), tmp_path / "model.onnx")
    data = json.loads(run("inspect", tmp_path / "model.onnx", "--json", "-").out)
    assert data["loads_on"] == {"onnxruntime": "1.23", "opset": 23, "ir_version": 10}
    assert data["obstacles"] == []
    done = run("inspect", tmp_path / "model.onnx", "--runtime", "1.18.0")
    assert "loads on   onnxruntime >= 1.23, opset 23, IR 10" in done.out
    assert "onnxruntime 1.18 does not load it:" in done.out
    assert "opset 23 is newer than 21, the newest it loads" in done.out


def test_too_new():
    proto = parse('<ir_version: 8, opset_import: ["" : 17]> g (float[n] x) => (y) { y = Relu(x) }')
    proto.ir_version = 14
    proto.opset_import[0].version = 28
    first, second = inspect(Model.from_proto(proto)).obstacles
    assert "IR version 14" in first
    assert "opset 28" in second


def test_it_does_not_change_the_model(model):
    loaded = Model.load(model)
    before = loaded.to_proto().SerializeToString(deterministic=True)
    inspect(loaded)
    assert loaded.to_proto().SerializeToString(deterministic=True) == before
    assert np.array_equal(loaded.graph.const("positions").shape, (1, 64, 32))
