"""`toolkit sensitivity`."""

from __future__ import annotations

import json

import onnx

from tests.cli.models import parse
from tests.cli.test_calibration import DYNAMIC

IDLE = "quantize-dynamic:min_elements=9999"

CONV = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[1, 1, 8, 8] x) => (float[1, 2, 6, 6] y)
<float[2, 1, 3, 3] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 8, 7, 6, 5, 4, 3, 2, 1}>
{ y = Conv(x, w) }
"""


def test_tables(run, net, samples):
    done = run("sensitivity", net, *DYNAMIC, "--calib", samples)
    assert done.code == 0, done.err
    assert "MatMul first" in done.out
    assert "MatMul last" in done.out
    assert "dB" in done.out
    assert "logits" in done.out


def test_without_samples(run, net):
    assert run("sensitivity", net, *DYNAMIC).code == 0


def test_convolutions_take_the_samples(run, tmp_path, monkeypatch):
    model = tmp_path / "conv.onnx"
    onnx.save(parse(CONV), model)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    done = run("sensitivity", model, "--calib", "random")
    assert done.code == 0, done.err
    assert "Conv " in done.out


def test_convolutions_without_samples(refused, tmp_path):
    model = tmp_path / "conv.onnx"
    onnx.save(parse(CONV), model)
    refused("sensitivity", model, says=("finds nothing to quantize", "--calib SOURCE"))


def test_no_name_is_cut(run, tmp_path, monkeypatch):
    model = parse(CONV)
    model.graph.node[0].name = name = "a/very/long/path/of/modules/" * 4
    onnx.save(model, tmp_path / "conv.onnx")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    done = run("sensitivity", tmp_path / "conv.onnx", "--calib", "random")
    assert "…" not in done.out
    names = (line.split("  ")[0].strip() for line in done.out.splitlines())
    assert name in "".join(names)
    assert max(map(len, done.out.splitlines())) <= 80


def test_json(run, net, samples):
    done = run("sensitivity", net, *DYNAMIC, "--calib", samples, "--json", "-")
    data = json.loads(done.out)
    assert [row["name"] for row in data["layers"]] == ["MatMul first", "MatMul last"]
    assert all(20 < row["decibels"] < 60 for row in data["layers"])
    assert data["values"][-1]["name"] == "logits"


def test_bad_input(refused, net, samples, tmp_path):
    refused("sensitivity", net, "--passes", "simplify", says="quantizes")
    refused("sensitivity", net, "--passes", IDLE, says="finds nothing to quantize")
    refused("sensitivity", net, *DYNAMIC, "--calib", tmp_path / "none.npz", says="not exist")
    refused("sensitivity", net, *DYNAMIC, "--tokenizer", "x", says="without --calib")
    refused("sensitivity", tmp_path / "none.onnx", says="does not exist")
