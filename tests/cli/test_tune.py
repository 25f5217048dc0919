"""`toolkit tune`: measure, keep, show."""

from __future__ import annotations

import json

import pytest

from passes.lower import lower
from tests.passes.lower.tables import candidate, table
from toolkit.runtime.cost_table import Costs, cache_path

PASS = "passes.lower.lower:Lower"
MEASURED = table(
    gelu=(candidate("gelu", 1.0), candidate("contrib", 0.5), candidate("erf", 0.1, undone=True)),
    mish=(candidate("mish", 1.0), candidate("rational", 0.25)),
)


@pytest.fixture(autouse=True)
def measured(monkeypatch, tmp_path):
    """Measuring takes no time, and nobody's own table is touched."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    asked: list[float] = []

    def measure(self, progress, seconds):
        asked.append(seconds)
        progress(1, 2, "gelu")
        return MEASURED

    monkeypatch.setattr(lower.Lower, "measure", measure)
    return asked


def test_it_measures_and_keeps_the_table(run, measured):
    done = run("tune", PASS, "--seconds", "5")
    assert done.code == 0
    assert measured == [5.0]
    assert Costs.load(cache_path()) == MEASURED
    assert "2.00 - 2.00x" in done.out
    assert "erf, reverted" in done.out
    assert str(cache_path()) in "".join(done.out.split())
    assert done.err == ""


def test_a_minute_by_default(run, measured):
    assert run("tune", PASS).code == 0
    assert measured == [60.0]


def test_it_shows_the_table_in_use(run, measured):
    done = run("tune", PASS, "--show")
    assert done.code == 0
    assert "the shipped table" in done.out
    assert "residual-layernorm" in done.out
    assert measured == []
    MEASURED.save(cache_path())
    assert "measured on this machine" in run("tune", PASS, "--show").out


def test_it_fits_the_width(run):
    assert max(map(len, run("tune", PASS, "--show").out.splitlines()[:-5])) <= 80


def test_json(run):
    assert json.loads(run("tune", PASS, "--json").out) == MEASURED.to_json()
    assert json.loads(run("tune", PASS, "--show", "--json").out) == MEASURED.to_json()


def test_a_pass_without_costs(refused):
    refused("tune", "passes.simplify.dce:RemoveDead", says="has no cost model")


def test_an_unknown_pass(refused):
    refused("tune", "nonsense", says="unknown pass")


def test_a_cache_that_cannot_be_written(refused, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    refused("tune", PASS)


def test_too_short_a_time(refused):
    refused("tune", PASS, "--seconds", "0", says="--seconds")
