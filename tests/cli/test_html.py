"""`--html`: the report as a page, whole in itself, whatever the names in a model are."""

from __future__ import annotations

import sys
from html.parser import HTMLParser

import onnx
import pytest

from tests.cli.models import parse
from toolkit.cli import demo_model
from toolkit.report.html import page

VOID = {"meta", "br"}

UNTIDY = """
import numpy as np
from toolkit import op, rewrite, var

x = var("x")


@rewrite(op.Identity(x), name="<i>&wrong")
def wrong(g, x):
    return g.op("Mul", x, g.constant(np.array(1.5, np.float32)))
"""


class Reader(HTMLParser):
    """The text of a page, its tags, and what is opened and not closed."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.links: list[str | None] = []
        self.feed(content)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("href", "src")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture
def read(run, tmp_path):
    """Run a command with --html and read the page."""

    def call(*arguments: object, code: int = 0) -> Reader:
        path = tmp_path / "report.html"
        done = run(*arguments, "--html", path)
        assert done.code == code, done.err
        found = Reader(path.read_text(encoding="utf-8"))
        assert found.open == []
        return found

    return call


@pytest.fixture
def untidy(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "rules.py").write_text(UNTIDY)
    return f"{tmp_path}/rules.py:wrong"


def test_what_is_on_the_page(read, tmp_path):
    model = tmp_path / "model.onnx"
    onnx.save(demo_model.build(), model)
    found = read("optimize", model, "--passes", "fuse")
    for words in (
        f"{model} written to {tmp_path}/model.opt.onnx",
        "Proven: error",
        "nodes 30 was 180 (-83 %)",
        "opset 23 was 17",
        "fuse-attention applied 1",
        "attention 1",
        "adapted to opset 23: 5 ReduceMean",
        "unchanged: inline, shapes",
        "Constant 45 0",
    ):
        assert words in found.text
    assert found.links == []
    assert "script" not in found.tags


def test_names_are_text(read, tmp_path, untidy):
    model = parse(
        """
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[n] x) => (float[n] y) { a = Identity(x)  y = Relu(a) }
        """
    )
    path = tmp_path / "a <b> & c.onnx"
    onnx.save(model, path)
    found = read("optimize", path, "--passes", untidy)
    assert "a <b> & c.onnx" in found.text
    assert "undone: <i>&wrong at 'a'" in found.text
    assert "reverted" in found.text
    assert found.tags.count("i") == 4  # two bars for each of two operators


def test_not_proven(read, tiny, untidy, tmp_path):
    found = read("optimize", tiny, "--passes", untidy, "--validate", "final", code=1)
    assert "nothing was written" in found.text
    assert "not proven: " in found.text
    assert "Operators" not in found.text
    assert not (tmp_path / "tiny.opt.onnx").exists()


def test_not_validated_is_not_called_proven(read, tiny):
    found = read("optimize", tiny, "--validate", "off")
    assert "not validated" in found.text
    assert "Proven" not in found.text


def test_the_speed_is_on_it():
    sides = {"path": "m.onnx", "bytes": 10, "nodes": 1, "ops": {"Relu": 1}}
    speed = {"times": 2.0, "low": 1.5, "high": 2.5}
    report = {"input": sides, "output": sides, "passes": [], "proof": "error 0", "seconds": 1.0}
    assert "speed 2.00x between 1.50x and 2.50x" in Reader(page({**report, "speed": speed})).text
    untimed = Reader(page({**report, "speed": {"reason": "it does not run"}})).text
    assert "speed" not in untimed


def test_files_that_are_taken(refused, tiny, tmp_path):
    out = tmp_path / "out.onnx"
    refused("optimize", tiny, "--html", tiny, says="is the input")
    refused("optimize", tiny, "-o", out, "--html", out, says="--html")
    both = tmp_path / "report"
    refused("optimize", tiny, "--json", both, "--html", both, says=("--html", "--json"))
    refused("optimize", tiny, "--html", tmp_path / "no" / "page.html", says="does not exist")
    data = tmp_path / "out.onnx.data"
    refused("optimize", tiny, "-o", out, "--external-data", "--html", data, says="data file")
