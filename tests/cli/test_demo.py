"""`toolkit demo`, and the model behind it."""

from __future__ import annotations

import sys

import onnx
import pytest

from tests.cli.models import listing
from toolkit.cli import demo_model


def test_the_model_is_small_valid_and_always_the_same():
    model = demo_model.build()
    onnx.checker.check_model(model, full_check=True)
    written = model.SerializeToString()
    assert len(written) < 200_000
    assert written == demo_model.build().SerializeToString()


def test_the_model_shows_what_there_is_to_do():
    ops = {node.op_type for node in demo_model.build().graph.node}
    assert ops >= {"Constant", "Shape", "Gather", "Concat", "If", "Identity", "Cast", "Dropout"}


def test_demo(run):
    done = run("demo")
    assert done.code == 0, done.err
    assert done.err == ""
    lines = [line for line in done.out.splitlines() if not line.startswith("written")]
    assert max(map(len, lines)) <= 80
    assert "\x1b" not in done.out
    assert "undone: halve at" in done.out
    assert "the other 2 stay" in " ".join(done.out.split())


def test_demo_keeps_the_models_where_it_is_told_to(run, tmp_path):
    assert run("demo", "--out", tmp_path).code == 0
    assert list(listing(tmp_path)) == ["demo.onnx", "demo.opt.onnx"]
    small = onnx.load(tmp_path / "demo.opt.onnx")
    assert len(small.graph.node) < 40
    assert {"Attention", "Gelu"} <= {node.op_type for node in small.graph.node}


@pytest.mark.skipif(sys.platform == "win32", reason="paths differ")
def test_demo_makes_the_folder(run, tmp_path):
    folder = tmp_path / "new" / "folder"
    assert run("demo", "--out", folder).code == 0
    assert (folder / "demo.opt.onnx").is_file()


def test_demo_into_a_file(refused, tiny):
    refused("demo", "--out", tiny, says=tiny.name)
