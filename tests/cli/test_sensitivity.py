"""`toolkit sensitivity`."""

from __future__ import annotations

import json

from tests.cli.test_calibration import DYNAMIC

IDLE = "quantize-dynamic:min_elements=9999"


def test_tables(run, net, samples):
    done = run("sensitivity", net, *DYNAMIC, "--calib", samples)
    assert done.code == 0, done.err
    assert "MatMul first" in done.out
    assert "MatMul last" in done.out
    assert "dB" in done.out
    assert "logits" in done.out


def test_without_samples(run, net):
    assert run("sensitivity", net, *DYNAMIC).code == 0


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
