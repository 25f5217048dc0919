"""`--time`: how fast the written model is beside the original, in words and as data."""

from __future__ import annotations

import json

import onnx
import pytest

from tests.cli.models import parse
from toolkit.runtime import latency
from toolkit.runtime.latency import Timing

STRANGE = """
    <ir_version: 8, opset_import: ["" : 17, "acme" : 1]>
    g (float[n] x) => (float[n] y) { a = Identity(x)  y = acme.Strange(a) }
"""


@pytest.fixture
def timed(monkeypatch):
    """Half the time, on whatever feeds; the feeds are kept."""
    seen = []

    def timings(models, feeds, threads=1, effort=None, custom_ops=()):
        seen.append(feeds)
        first, second = models
        return {first: Timing(0.004, 1, 1, 1, 9), second: Timing(0.002, 0.5, 0.4, 0.8, 9)}

    monkeypatch.setattr(latency, "latency", timings)
    return seen


def test_optimize_says_how_fast(run, tiny, timed):
    done = run("optimize", tiny, "--time")
    assert (done.code, done.err) == (0, "")
    (line,) = (line for line in done.out.splitlines() if line.startswith("speed"))
    assert "2.00x (1.25x to 2.50x)" in line
    assert max(map(len, done.out.splitlines()[:-1])) <= 80


def test_nothing_is_timed_unasked(run, tiny, timed):
    done = run("optimize", tiny)
    assert "speed" not in done.out
    assert "speed" not in json.loads(run("optimize", tiny, "--json", "-").out)
    assert not timed


def test_samples_are_what_is_timed_on(run, tiny, sample, timed):
    data = json.loads(run("optimize", tiny, "--time", "--sample", sample, "--json", "-").out)
    (feeds,) = timed
    assert len(feeds) == data["speed"]["feeds"] == 1
    assert data["speed"]["seconds"] == {"before": 0.004, "after": 0.002}


def test_verify_says_how_fast(run, tiny, timed, tmp_path):
    other = tmp_path / "other.onnx"
    other.write_bytes(tiny.read_bytes())
    assert "2.00x" in run("verify", tiny, other, "--time").out
    data = json.loads(run("verify", tiny, other, "--time", "--json", "-").out)
    assert data["speed"]["times"] == 2


def test_a_clock_that_is_too_coarse(run, tiny, monkeypatch):
    nothing = Timing(0, 0, 0, 0, 9)
    monkeypatch.setattr(latency, "latency", lambda models, *_, **__: dict.fromkeys(models, nothing))
    done = run("optimize", tiny, "--time")
    assert done.code == 0
    assert "not timed: " in done.out


def test_it_measures(run, tiny):
    speed = json.loads(run("optimize", tiny, "--time", "--json", "-").out)["speed"]
    assert 0 < speed["low"] <= speed["times"] <= speed["high"]


def test_a_model_that_does_not_run_is_written_all_the_same(run, tmp_path):
    path = tmp_path / "model.onnx"
    onnx.save(parse(STRANGE), path)
    done = run("optimize", path, "--time")
    assert done.code == 0
    assert "not timed: " in done.out
    assert (tmp_path / "model.opt.onnx").is_file()
