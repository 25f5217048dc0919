"""`toolkit export` from PyTorch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.export

MODELS = """
import torch
from torch import nn

from toolkit.frontends.pytorch import CustomOp


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.nn.functional.silu(self.linear(self.norm(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.dropout = nn.Dropout(0.2)

    def forward(self, ids):
        h = self.table(ids)
        for block in self.blocks:
            h = block(h)
        return self.dropout(h).mean(1)


def build():
    torch.manual_seed(0)
    return Model(), torch.randint(0, 20, (1, 6))


def bare():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 4), nn.ReLU())


class Branch(nn.Module):
    def forward(self, x):
        return x * 2 if x.sum() > 0 else x - 1


@torch.library.custom_op("toolkit_cli_tests::inverse", mutates_args=())
def inverse(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.inv(x)


@inverse.register_fake
def _(x):
    return torch.empty_like(x)


class Inverse(nn.Module):
    def forward(self, x):
        return torch.ops.toolkit_cli_tests.inverse(x)


def inverted():
    return Inverse(), torch.eye(3) * 2


TABLE = {"toolkit_cli_tests::inverse": CustomOp("ai.onnx.contrib", "Inverse")}
"""


@pytest.fixture
def models(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("models.py").write_text(MODELS)
    return tmp_path


def test_a_model_end_to_end(run, models):
    done = run("export", "./models.py:build", "-o", "model.onnx", "--map", "--json", "r.json")
    assert done.code == 0, done.err
    assert done.err == ""
    for words in ("dynamo", "ids:0=batch,1=sequence", "blocks.0.norm", "dropout (Dropout)"):
        assert words in done.out
    session = onnxruntime.InferenceSession("model.onnx")
    y: Any = session.run(None, {"ids": np.zeros((7, 11), np.int64)})[0]
    assert y.shape == (7, 8)
    report = json.loads(Path("r.json").read_text())
    rows = report["map"]["model"]["rows"]
    norm = next(row for row in rows if row["module"] == "blocks.1.norm")
    assert norm["class"] == "LayerNorm"
    assert norm["nodes"] == {"LayerNormalization": 1}
    assert (norm["how"], norm["opset"], norm["dtypes"]) == ("direct", 17, ["float32"])
    assert norm["onnx_standard"]
    assert norm["onnxruntime_cpu"]
    weights = report["map"]["model"]["initializers"]
    assert weights["blocks.1.linear.bias"] == "blocks.1.linear"
    # folded by the exporter, which transposed it
    assert [n for n in weights if n.startswith("blocks.1.linear/")]
    values = report["map"]["model"]["values"]
    assert any(name.startswith("blocks.0.norm/") for name in values)


def test_a_trace_is_mapped_by_its_scopes(run, models):
    arguments = ("--exporter", "torchscript", "--map", "--json", "-")
    done = run("export", "./models.py:build", *arguments)
    report = json.loads(done.out)["map"]["model"]
    modules = {row["module"] for row in report["rows"]}
    assert {"table", "blocks.0.norm", "blocks.1.linear"} <= modules
    assert report["initializers"]["blocks.1.linear.bias"] == "blocks.1.linear"


def test_examples_from_the_command_line(run, models):
    done = run(
        *("export", "./models.py:bare", "-o", "a.onnx", "--example", "float32[1,10]"),
        *("--opset", 13, "--input-names", "input", "--output-names", "output"),
    )
    assert done.code == 0, done.err
    saved = onnx.load("a.onnx")
    assert saved.opset_import[0].version == 13
    assert [v.name for v in (*saved.graph.input, *saved.graph.output)] == ["input", "output"]
    np.savez("x.npz", input=np.zeros((2, 10), np.float32))
    arguments = ("--example", "x.npz", "--dynamic", "input:0=rows", "--exporter", "torchscript")
    assert run("export", "./models.py:bare", "-o", "b.onnx", *arguments).code == 0
    assert onnx.load("b.onnx").graph.input[0].type.tensor_type.shape.dim[0].dim_param == "rows"


def test_a_baked_branch_writes_nothing(run, models):
    arguments = ("-o", "model.onnx", "--example", "float32[1,4]")
    done = run("export", "./models.py:Branch", *arguments)
    assert done.code == 1
    assert done.err.count("\n") == 1
    assert "specialized by tracing" in done.err
    assert not Path("model.onnx").exists()


def test_the_optimizer_goes_on(run, models):
    arguments = ("-o", "model.onnx", "--passes", "fuse")
    done = run("export", "./models.py:build", *arguments)
    assert done.code == 0, done.err
    assert "fuse-norms" in done.out


def test_custom_operators(run, refused, models):
    extensions = pytest.importorskip("onnxruntime_extensions")
    source = ("export", "./models.py:inverted", "-o", "model.onnx", "--dynamic", "none")
    refused(*source, says=("1 operator has no translation", "models.py, line", "--translate"))
    translated = (*source, "--translate", "./models.py:TABLE")
    refused(*translated, says=("'ai.onnx.contrib' is unknown", "--custom-ops LIB"))
    done = run(*translated, "--custom-ops", extensions.get_library_path())
    assert done.code == 0, done.err
    assert onnx.load("model.onnx").graph.node[0].domain == "ai.onnx.contrib"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--example", "float32[1,11]"), "does not run on the example"),
        (("--example", "x=float32[1,10]"), "does not run on the example"),
        (("--example", "float32[1,10]", "--example", "float32[1]"), "does not fit forward(input)"),
        (("--example", "float32[1,10]", "--dynamic", "x:0=batch"), "inputs: input"),
        (("--example", "float32[1,10]", "--weights", "gone.pt"), "does not exist"),
        ((), "needs an example"),
    ],
)
def test_bad_input(refused, models, arguments, says):
    refused("export", "./models.py:bare", "-o", "model.onnx", *arguments, says=says)
