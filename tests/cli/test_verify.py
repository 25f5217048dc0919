"""`toolkit verify`: equal, different, not comparable."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from tests.cli.models import TEXT, listing, parse


@pytest.fixture
def other(tmp_path):
    """The tiny model with its weight moved by `amount` relative to the largest."""

    def make(amount: float):
        model = parse(TEXT)
        weight = numpy_helper.to_array(model.graph.initializer[0]).copy()
        model.graph.initializer[0].CopyFrom(
            numpy_helper.from_array((weight * np.float32(1 + amount)).astype(np.float32), "w")
        )
        path = tmp_path / "other.onnx"
        onnx.save(model, path)
        return path

    return make


def test_equal(run, tiny, other, tmp_path):
    path = other(0)
    before = listing(tmp_path)
    done = run("verify", tiny, path)
    assert (done.code, done.err) == (0, "")
    assert "y" in done.out
    assert listing(tmp_path) == before


def test_different(run, tiny, other):
    done = run("verify", tiny, other(0.01))
    assert (done.code, done.err) == (1, "")
    assert "differ" in done.out
    assert max(map(len, done.out.splitlines())) <= 80
    assert "\x1b" not in done.out


def test_tolerance(run, tiny, other):
    path = other(0.01)
    assert run("verify", tiny, path, "--tolerance", "0.02").code == 0
    assert run("verify", tiny, path, "--tolerance", "0.001").code == 1
    assert run("verify", tiny, path, "--tolerance", "-1").code == 2
    assert run("verify", tiny, path, "--tolerance", "nan").code == 2
    assert run("verify", tiny, path, "--tolerance", "inf").code == 2


def test_json(run, tiny, other, tmp_path):
    done = run("verify", tiny, other(0.01), "--json", "-")
    assert done.code == 1
    data = json.loads(done.out)
    assert data["ok"] is False
    (output,) = data["outputs"]
    assert output["name"] == "y"
    report = tmp_path / "report.json"
    assert run("verify", tiny, other(0), "--json", report).code == 0
    assert json.loads(report.read_text())["ok"] is True


def test_samples(run, tiny, other, sample):
    assert run("verify", tiny, other(0), "--sample", sample, "--seed", 5).code == 0


@pytest.mark.parametrize(
    "text",
    [
        TEXT.replace(" x)", " input)").replace("(x)", "(input)"),
        TEXT.replace(" y)", " z)").replace("y =", "z ="),
        TEXT.replace("(float[batch, 4] x)", "(float[batch, 4] x, float[2] more)"),
        TEXT.replace("float[batch, 4] x", "float[2, 2, 4] x"),
    ],
    ids=["another input", "another output", "one more input", "another rank"],
)
def test_not_comparable(refused, tiny, tmp_path, text):
    path = tmp_path / "other.onnx"
    onnx.save(parse(text), path)
    refused("verify", tiny, path)


def test_a_model_that_does_not_run(refused, tiny, tmp_path):
    path = tmp_path / "strange.onnx"
    text = TEXT.replace('"" : 17', '"" : 17, "acme" : 1').replace("Relu", "acme.Strange")
    onnx.save(parse(text), path)
    for models in ((path, path), (tiny, path)):
        refused("verify", *models, says=("strange.onnx", "Strange: the domain 'acme' is unknown"))
