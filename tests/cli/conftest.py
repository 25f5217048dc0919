"""Commands run the way a user runs them, and models in files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest

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
