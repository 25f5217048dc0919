"""Models and weights in files; pickles stay closed."""

from __future__ import annotations

import numpy as np
import pytest

import toolkit
from toolkit.errors import UsageError

torch = pytest.importorskip("torch")
nn = torch.nn
pytestmark = pytest.mark.export


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 5)).eval()


def same(exported, model):
    from toolkit.runtime.session import Session

    (name,) = exported.model.graph.feeds
    x = np.random.default_rng(0).standard_normal((3, 10)).astype(np.float32)
    (y,) = Session(exported.model).run({name: x})
    with torch.no_grad():
        return np.allclose(y, model(torch.from_numpy(x)).numpy(), atol=1e-5)


def test_an_exported_program(tmp_path):
    model = small()
    batch = torch.export.Dim("batch")
    program = torch.export.export(model, (torch.randn(2, 10),), dynamic_shapes=({0: batch},))
    torch.export.save(program, tmp_path / "model.pt2")
    exported = toolkit.export(str(tmp_path / "model.pt2"))
    assert exported.only.dynamic == {"input": {0: "batch"}}
    assert same(exported, model)
    named = toolkit.export(program, dynamic="input:0=rows", input_names=["input"])
    assert named.only.dynamic == {"input": {0: "rows"}}
    with pytest.raises(UsageError, match="is fixed in the ExportedProgram"):
        toolkit.export(program, dynamic="input:1=columns")
    with pytest.raises(UsageError, match="TorchScript does not support an ExportedProgram"):
        toolkit.export(program, exporter="torchscript")


def test_a_torchscript_file(tmp_path):
    model = small()
    path = tmp_path / "model.pt"
    torch.jit.script(model).save(str(path))
    exported = toolkit.export(path, torch.randn(1, 10))
    assert exported.only.exporter == "torchscript"
    assert exported.only.dynamic == {"input": {0: "batch"}}
    assert same(exported, model)
    with pytest.raises(UsageError, match="needs an example"):
        toolkit.export(path)
    with pytest.raises(UsageError, match="dynamo does not support TorchScript"):
        toolkit.export(path, torch.randn(1, 10), exporter="dynamo")


FACTORY = """
import torch

def build():
    torch.manual_seed(1)
    layers = torch.nn.Linear(10, 20), torch.nn.ReLU(), torch.nn.Linear(20, 5)
    return torch.nn.Sequential(*layers), torch.zeros(1, 10)
"""


@pytest.fixture
def factory(tmp_path):
    path = tmp_path / "factory.py"
    path.write_text(FACTORY)
    return f"{path}:build"


def test_weights_for_a_factory(tmp_path, factory):
    safetensors = pytest.importorskip("safetensors.torch")
    model = small()
    safetensors.save_file(model.state_dict(), tmp_path / "w.safetensors")
    torch.save(model.state_dict(), tmp_path / "w.pt")
    torch.save({"state_dict": model.state_dict(), "epoch": 3}, tmp_path / "checkpoint.ckpt")
    for name in ("w.safetensors", "w.pt", "checkpoint.ckpt"):
        exported = toolkit.export(factory, weights=tmp_path / name, exporter="torchscript")
        assert same(exported, model)
    assert not same(toolkit.export(factory, exporter="torchscript"), model)


class Evil:
    def __reduce__(self):
        return (exec, ("raise SystemExit('it was opened')",))


def test_a_pickle_is_not_opened(tmp_path, factory):
    torch.save(Evil(), tmp_path / "evil.pt")
    with pytest.raises(UsageError, match="is not opened"):
        toolkit.export(tmp_path / "evil.pt")
    with pytest.raises(UsageError, match="damaged or a pickle"):
        toolkit.export(factory, weights=tmp_path / "evil.pt")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("w.safetensors", b"nothing", "is not a safetensors file"),
        ("w.pt", b"nothing", "damaged or a pickle"),
        ("gone.pt", None, "does not exist"),
    ],
)
def test_weights_that_are_none(tmp_path, factory, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=message):
        toolkit.export(factory, weights=tmp_path / name)


def test_weights_of_another_model(tmp_path, factory):
    torch.save(nn.Linear(3, 3).state_dict(), tmp_path / "w.pt")
    with pytest.raises(UsageError, match=r"do not fit the model: .*Missing key"):
        toolkit.export(factory, weights=tmp_path / "w.pt")


@pytest.mark.parametrize("name", ["model.pt2", "model.pt", "model.safetensors"])
def test_files_that_hold_no_graph(tmp_path, name):
    (tmp_path / name).write_bytes(b"nothing of that kind")
    with pytest.raises(UsageError, match=name):
        toolkit.export(tmp_path / name)
