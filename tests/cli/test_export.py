"""`toolkit export` with frameworks that need no installing: the command, its report, bad input."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from textwrap import dedent

import numpy as np
import onnx
import pytest

DEEPFLOW = (Path(__file__).parents[1] / "toolkit" / "frontends" / "deepflow.py").read_text()

FRONT_END = """
from pathlib import Path
from types import SimpleNamespace

import deepflow
import numpy as np
from toolkit.frontends.protocol import AttemptList, Draft, ExportPlan
from toolkit.frontends.test_inputs import cases_from


class Brand:
    def __init__(self, layers):
        self.layers = layers


def build():
    return Brand(deepflow.mlp().layers)


class FrontEnd:
    name = "brand"

    def takes(self, source):
        return isinstance(source, Brand)

    def plan(self, source, request, scratch):
        model = deepflow.Sequential(source.layers)
        path = Path(scratch) / "brand.onnx"
        proto = model.export_onnx(SimpleNamespace(shape=("batch", 10)), request.opset or 18)
        path.write_bytes(proto.SerializeToString())
        note = Path(scratch) / "brand.json"
        note.write_text("{}")

        def reference(feed):
            return {"y": model(deepflow.Tensor(feed["x"])).numpy()}

        def draft():
            axes = {"x": {0: "batch"}}
            cases = cases_from({"x": np.ones((1, 10), np.float32)}, axes, request.seed)
            return Draft(path, reference, cases, "brand's own", axes)

        return ExportPlan([AttemptList("model", [draft])], companions={"brand.json": note})
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder to stand in, with the framework in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deepflow.py").write_text(DEEPFLOW)
    return tmp_path


@pytest.fixture
def site(here, monkeypatch):
    """Distributions that register an exporter under `toolkit.exporters`."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(here)

    def install(name: str, entry: str, source: str = "") -> None:
        (here / f"{name}.py").write_text(dedent(source))
        info = here / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[toolkit.exporters]\n{entry}\n")

    yield install
    for name in set(sys.modules) - before:
        if name in ("deepflow", "brandwork", "broken"):
            del sys.modules[name]


# The command -------------------------------------------------------------------------------------


def test_a_framework_of_somebody_elses(run, here):
    done = run("export", "./deepflow.py:build", "-o", "model.onnx", "--opset", 11)
    assert done.code == 0, done.err
    for words in ("Sequential.export_onnx, opset 11", "x:0=batch", "batch 1, 2, 5", "model.onnx"):
        assert words in done.out
    saved = onnx.load("model.onnx")
    assert saved.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    assert run("verify", "model.onnx", "model.onnx").code == 0


def test_the_report_as_json(run, here):
    done = run("export", "./deepflow.py:build", "-o", "model.onnx", "--json", "-")
    report = json.loads(done.out)
    assert report["output"] == ["model.onnx"]
    assert report["framework"] == "export_onnx"
    (graph,) = report["graphs"]
    assert graph["dynamic"] == {"x": {"0": "batch"}}
    assert graph["inputs"] == [{"name": "x", "type": "float32", "shape": ["batch", 10]}]
    assert graph["proof"]["ok"]
    assert {run["sizes"]["batch"] for run in graph["proof"]["runs"]} == {1, 2, 5}
    assert all(run["error"] < 1e-6 for run in graph["proof"]["runs"])


def test_the_optimizer_goes_on(run, here):
    done = run(
        "export", "./deepflow.py:build", "-o", "m.onnx", "--passes", "simplify", "--quantize"
    )
    assert done.code == 0, done.err
    assert "quantize" in done.out
    assert len(onnx.load("m.onnx").graph.node) < 8


def test_a_map_alone_writes_nothing(run, here):
    done = run("export", "./deepflow.py:build", "--map", "--json", "report.json")
    assert done.code == 0, done.err
    assert "MatMul" in done.out
    rows = json.loads(Path("report.json").read_text())["map"]["model"]["rows"]
    assert {row["operator"]: row["nodes"] for row in rows}["MatMul"] == {"MatMul": 2}
    assert all(row["onnxruntime_cpu"] and row["onnx_standard"] for row in rows)
    assert not list(here.glob("*.onnx"))


def test_the_sidecar(run, here):
    done = run("export", "./deepflow.py:build", "-o", "m.onnx", "--external-data", "-q")
    assert (done.code, done.out) == (0, "")
    assert Path("m.onnx.data").exists()


def test_a_folder_gets_a_file_called_model(run, here):
    assert run("export", "./deepflow.py:build", "-o", "exported/").code == 0
    assert Path("exported/model.onnx").exists()


def test_a_registered_exporter(run, site):
    site("brandwork", "brand = brandwork:FrontEnd", FRONT_END)
    done = run("export", "brandwork:build", "-o", "model.onnx")
    assert done.code == 0, done.err
    assert "brand's own" in done.out
    assert Path("brand.json").read_text() == "{}"
    # a second time over its own files, but never over somebody else's
    assert run("export", "brandwork:build", "-o", "model.onnx").code == 0
    Path("model.onnx").unlink()
    Path("brand.json").write_text('{"mine": 1}')
    done = run("export", "brandwork:build", "-o", "model.onnx")
    assert done.code == 2
    assert "'brand.json' already exists and differs" in done.err
    assert not Path("model.onnx").exists()


# Bad input ---------------------------------------------------------------------------------------

MODELS = """
import numpy as np
import deepflow
from deepflow import Sequential, Tensor, build


def raises():
    raise RuntimeError("no weights\\nhere")


def ends():
    raise SystemExit(3)


def nothing():
    return None


def bare():
    return deepflow.mlp()


class Wrong(Sequential):
    def export_onnx(self, example, opset_version):
        made = super().export_onnx(example, opset_version)
        made.graph.node[-1].op_type = "Neg"
        return made


def wrong():
    return Wrong(deepflow.mlp().layers), Tensor(shape=(1, 10))


class Unknown(Sequential):
    def export_onnx(self, example, opset_version):
        made = super().export_onnx(example, opset_version)
        made.graph.node[-1].domain = "com.nowhere"
        made.opset_import.add(domain="com.nowhere", version=1)
        return made


def unknown():
    return Unknown(deepflow.mlp().layers), Tensor(shape=(1, 10))


class Lifted(Sequential):
    def export_onnx(self, example, opset_version):
        return super().export_onnx(example, 17)


def lifted():
    return Lifted(deepflow.mlp().layers), Tensor(shape=(1, 10))
"""


@pytest.fixture
def models(here):
    (here / "models.py").write_text(MODELS)
    return here


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("no/such/folder", "'no/such/folder' does not exist"),
        ("model.pt2", "'model.pt2' does not exist"),
        ("./gone.py:build", "./gone.py does not exist"),
        ("no_such_module:build", "cannot import no_such_module"),
        ("./models.py:biuld", ("no object 'biuld'", "did you mean 'build'")),
        ("./models.py:", "write module:name"),
        (
            "./models.py:raises",
            ("models.py:raises failed: RuntimeError: no weights here", "line 8"),
        ),
        ("./models.py:ends", "failed: SystemExit: 3"),
        ("./models.py:nothing", "no front end accepts a value of type NoneType"),
        ("./models.py:bare", "needs an example"),
        ("./models.py:unknown", ("'com.nowhere' is unknown", "--custom-ops")),
        (".", "no front end accepts '.'"),
        ("model.onnx", ("an ONNX model already", "toolkit optimize")),
    ],
)
def test_sources_that_are_none(refused, models, source, says):
    refused("export", source, "-o", "out.onnx", says=says)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--opset", 6), ("opset 6 is out of range", "exporters write 7")),
        (("--opset", 27), "onnxruntime loads up to 26"),
        (("--exporter", "magic"), ("magic", "dynamo")),
        (("--dynamic", "x"), "write input:0=batch"),
        (("--dynamic", "z:0=batch"), ("no such input", "inputs: x")),
        (("--dynamic", "x:5=batch"), "it has 2 axes"),
        (("--dynamic", "none", "--dynamic", "x:0=batch"), "fixes every size"),
        (("--example", "gone.npz"), "'gone.npz' does not exist"),
        (("--example", "floaty[1,2]"), "unknown type 'floaty'"),
        (("--example", "float32[1]", "--example", "x=float32[1]"), "all arguments by name"),
        (("--example", "deepflow.py"), "not an .npz file"),
        (("--input-names", "a,b"), "2 input names are given, but there are 1 inputs: x"),
        (("--output-names", "a,,b"), "an output name is empty"),
        (("--framework", "deepflo"), "unknown framework"),
        (("--translate", "./deepflow.py:mlp"), "not a dict"),
        (("--translate", "nothing"), "write module:name"),
        (("--custom-ops", "gone.so"), "not a file"),
        (("--passes", "fues"), "unknown pass"),
    ],
)
def test_options_that_do_not_fit(refused, models, options, says):
    refused("export", "./deepflow.py:build", "-o", "out.onnx", *options, says=says)


@pytest.mark.parametrize(
    ("output", "says"),
    [
        ((), "-o FILE is missing"),
        (("-o", "-"), "not possible"),
        (("-o", "no/such/out.onnx"), "does not exist"),
        (("-o", "out.onnx", "--json", "out.onnx"), "is the output too"),
    ],
)
def test_places_that_nothing_can_be_written_to(refused, models, output, says):
    refused("export", "./deepflow.py:build", *output, says=says)


def test_the_source_is_not_written_over(refused, here):
    np.savez("model.pt")
    Path("model.pt.npz").rename("model.pt")
    refused("export", "model.pt", "-o", "model.pt", says="is the source")


def test_a_graph_that_differs_is_not_written(run, models):
    done = run("export", "./models.py:wrong", "-o", "out.onnx", "--json", "report.json")
    assert done.code == 1
    assert done.err.startswith("error: the exported model differs from the original")
    assert done.err.count("\n") == 1
    assert not Path("out.onnx").exists()
    assert json.loads(Path("report.json").read_text())["output"] is None


def test_an_exporter_that_stops_below_the_opset_is_helped(run, models):
    assert run("export", "./models.py:lifted", "-o", "out.onnx", "--opset", 20).code == 0
    assert onnx.load("out.onnx").opset_import[0].version == 20


def test_an_exporter_that_writes_a_newer_opset(run, models):
    assert run("export", "./models.py:lifted", "-o", "out.onnx", "--opset", 13).code == 0
    assert onnx.load("out.onnx").opset_import[0].version == 13


def test_a_broken_entry_point_is_named_when_it_is_missed(refused, run, site):
    site("broken", "brand = broken:FrontEnd", "raise ValueError('half installed')")
    says = ("exporter 'brand' of broken could not be loaded", "half installed")
    refused("export", "sys:path", "-o", "out.onnx", says=says)
    refused("export", "sys:path", "-o", "out.onnx", "--framework", "brand", says=says)
    assert run("export", "./deepflow.py:build", "-o", "out.onnx").code == 0


def test_an_entry_point_that_is_no_front_end(refused, site):
    site("broken", "brand = broken:front_end", "front_end = 7")
    says = "exporter 'brand' of broken is not valid: no name, takes, plan"
    refused("export", "sys:path", "-o", "out.onnx", says=says)


def test_torch_is_optional(refused, here, monkeypatch):
    Path("model.pt2").write_bytes(b"something")
    monkeypatch.setitem(sys.modules, "torch", None)
    says = ("torch", "pip install 'onnx-toolkit-passes[export]'")
    refused("export", "model.pt2", "-o", "out.onnx", says=says)
