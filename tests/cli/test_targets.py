"""`toolkit targets`, and --runtime on the command line."""

from __future__ import annotations

import json

import onnx
import pytest

from toolkit.cli import demo_model
from toolkit.targets import target_names
from toolkit.targets.releases import releases, runtime_version


def test_targets_are_listed(run):
    done = run("targets")
    assert (done.code, done.err) == (0, "")
    for name in target_names():
        assert f"\n{name} " in f"\n{done.out}"
    assert "com.microsoft" in done.out
    assert f"onnxruntime {runtime_version()} is installed" in done.out
    assert max(map(len, done.out.splitlines())) <= 80


def test_targets_as_json(run):
    data = json.loads(run("targets", "--json").out)
    assert [target["name"] for target in data["targets"]] == target_names()
    assert data["targets"][0]["missing"] == ""
    assert {"opset", "ir_version", "domains", "number_formats"} <= set(data["targets"][0])
    assert [entry["version"] for entry in data["releases"]] == [r.version for r in releases()]


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.onnx"
    onnx.save(demo_model.build(), path)
    return path


def test_the_result_loads_on_the_oldest_runtime(run, model, tmp_path):
    output, page = tmp_path / "out.onnx", tmp_path / "page.html"
    done = run(
        *("optimize", model, "-o", output, "--passes", "fuse", "--runtime", "1.16"),
        *("--json", tmp_path / "report.json", "--html", page),
    )
    assert done.code == 0, done.err
    assert "loads on   onnxruntime >= 1.16, opset 1" in done.out
    data = json.loads((tmp_path / "report.json").read_text())
    assert data["loads_on"]["onnxruntime"] == "1.16"
    assert "1.16 or newer" in page.read_text()
    proto = onnx.load(output)
    assert proto.ir_version <= 9
    assert proto.opset_import[0].version <= 19


@pytest.mark.parametrize("command", ["optimize", "explain", "inspect"])
@pytest.mark.parametrize("version", ["1.5", "new", "99.0"])
def test_an_unknown_runtime_is_one_line(run, model, tmp_path, command, version):
    before = sorted(tmp_path.iterdir())
    done = run(command, model, "--runtime", version)
    assert done.code == 2
    assert done.err.count("\n") == 1
    assert f"unknown onnxruntime version '{version}': choose one of 1.16, " in done.err
    assert sorted(tmp_path.iterdir()) == before


def test_an_opset_above_that_of_the_runtime_is_refused(run, model):
    done = run("optimize", model, "--runtime", "1.18", "--opset", "23")
    assert done.code == 2
    assert "opset 23 is out of range: onnxruntime 1.18 loads opsets 1 to 21" in done.err
