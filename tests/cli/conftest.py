"""Commands run the way a user runs them, and models in files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.cli.models import TEXT, listing, parse
from toolkit.cli.main import main


@dataclass
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str


@pytest.fixture
def run(capsys, monkeypatch):
    """Run the command line in this process, at 80 columns and without a terminal."""
    for variable in ("FORCE_COLOR", "GITHUB_ACTIONS", "PY_COLORS", "TOOLKIT_TRACEBACK"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("COLUMNS", "80")

    def call(*arguments: object) -> Done:
        capsys.readouterr()
        code = main([str(a) for a in arguments])
        captured = capsys.readouterr()
        return Done(code, captured.out, captured.err)

    return call


@pytest.fixture
def refused(run, tmp_path):
    """Run a command that must fail: exit 2, one line that says all of `words`, nothing written."""

    def call(*arguments: object, says: str | tuple[str, ...] = ()) -> str:
        before = listing(tmp_path)
        done = run(*arguments)
        assert done.code == 2, (done.out, done.err)
        assert done.err.startswith("error: ")
        assert done.err.count("\n") == 1
        assert "internal error" not in done.err
        assert done.out == ""
        for word in (says,) if isinstance(says, str) else says:
            assert word in done.err
        assert listing(tmp_path) == before
        return done.err

    return call


@pytest.fixture
def tiny(tmp_path) -> Path:
    """A valid model in a file."""
    path = tmp_path / "tiny.onnx"
    onnx.save(parse(TEXT), path)
    return path


@pytest.fixture
def sample(tmp_path) -> Path:
    """A real input for it."""
    path = tmp_path / "sample.npz"
    np.savez(path, x=np.arange(8, dtype=np.float32).reshape(2, 4))
    return path


# -- quantizing

RANDOM = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch) -> Path:
    """A user's cache of their own."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@pytest.fixture
def net(tmp_path) -> Path:
    """A classifier of 64 numbers."""
    w = RANDOM.standard_normal((64, 64)).astype(np.float32)
    v = RANDOM.standard_normal((64, 64)).astype(np.float32)
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "w"], ["a"], name="first"),
            helper.make_node("Relu", ["a"], ["b"]),
            helper.make_node("MatMul", ["b", "v"], ["logits"], name="last"),
        ],
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 64])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 64])],
        [numpy_helper.from_array(w, "w"), numpy_helper.from_array(v, "v")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path = tmp_path / "net.onnx"
    onnx.save(model, path)
    return path


@pytest.fixture
def samples(tmp_path) -> Path:
    path = tmp_path / "samples.npz"
    np.savez(path, x=RANDOM.standard_normal((40, 64)).astype(np.float32), label=np.arange(40))
    return path


METRIC = """
import numpy as np
def spread(outputs):
    return float(np.mean([o["logits"].std() for o in outputs]))
def nothing(outputs):
    return None
def fails(outputs):
    raise ValueError("no labels")
half = 0.5
def feeds():
    for i in range(5):
        yield {"x": np.full((1, 64), i, np.float32)}
"""


@pytest.fixture
def code(tmp_path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(METRIC)
    return path
