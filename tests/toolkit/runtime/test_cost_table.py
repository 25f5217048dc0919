"""The table of costs: what it says of a shape, how it is written and read, where it is kept."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.passes.lower.tables import candidate, table
from toolkit.runtime import cost_table as costs_module
from toolkit.runtime.cost_table import (
    Costs,
    CostsError,
    Regime,
    cache_path,
    cores,
    costs_in_use,
    cpu_name,
    nearest_table,
    runtime_version,
    shipped_path,
    vendor_of,
)

SHORT_WINS = {"8x768@1": 0.5, "512x768@1": 1.5, "8x768@2": 0.9, "512x768@2": 0.8}
COSTS = table(
    gelu=(
        candidate("usual", dict.fromkeys(SHORT_WINS, 1.0)),
        candidate("other", SHORT_WINS),
        candidate("noise", dict.fromkeys(SHORT_WINS, 0.99)),
        candidate("undone", dict.fromkeys(SHORT_WINS, 0.1), undone=True),
    )
)


@pytest.mark.parametrize(
    ("tokens", "threads", "gain"),
    [
        (8, 1, 2.0),
        (1, 1, 2.0),
        (32, 1, 2.0),  # nearer to 8 than to 512
        (512, 1, None),
        (100_000, 1, None),
        (None, 1, None),  # it loses at 512
        (8, 2, 1 / 0.9),
        (8, 16, 1 / 0.9),  # as with the most threads that were measured
        (512, 2, None),  # on one thread it loses
    ],
)
def test_the_regimes_nearest_to_a_shape_decide(
    tokens: int | None, threads: int, gain: float | None
) -> None:
    found = COSTS.gain("gelu", "other", tokens, 768, threads)
    assert found == (None if gain is None else pytest.approx(gain))


def test_a_size_that_varies_is_the_mean_of_all() -> None:
    varied = {"8x768@1": 0.8, "512x768@1": 1.0, "512x768@2": 0.5}
    costs = table(gelu=(candidate("usual", dict.fromkeys(varied, 1.0)), candidate("other", varied)))
    assert costs.gain("gelu", "other", None, None, 1) == pytest.approx(0.8**-0.5)
    assert costs.gain("gelu", "other", None, 768, 2) == pytest.approx(2.0)


@pytest.mark.parametrize("name", ["usual", "noise", "undone", "unknown"])
def test_nothing_is_gained_for_sure(name: str) -> None:
    assert COSTS.gain("gelu", name, 8, 768, 2) is None
    assert COSTS.gain("unknown", name, 8, 768, 2) is None


def test_a_table_is_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "costs.json"
    COSTS.save(path)
    assert Costs.load(path) == COSTS
    assert [file.name for file in path.parent.iterdir()] == ["costs.json"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"computations": 1}',
        '{"runtime": "1", "cpu": "c", "script": "s", "computations": {"a": {"b": {}}}}',
    ],
)
def test_what_is_no_table_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(CostsError, match="not a cost table"):
        Costs.load(path)


@pytest.mark.parametrize(("key", "value"), [("8x768", 1.0), ("8x768@1", -1.0), ("8x768@1", 1e999)])
def test_costs_that_are_no_costs_are_refused(tmp_path: Path, key: str, value: float) -> None:
    data = COSTS.to_json()
    data["computations"]["gelu"]["other"]["cost"] = {key: value}
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(data))
    with pytest.raises(CostsError, match="not a cost table"):
        Costs.load(path)


def test_a_regime_reads_as_it_is_written() -> None:
    assert Regime.parse("128x768@2") == Regime(128, 768, 2)
    assert str(Regime(128, 768, 2)) == "128x768@2"


def test_the_cache_is_of_one_runtime_and_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(costs_module, "runtime_version", lambda: "1.2.3")
    monkeypatch.setattr(costs_module, "cpu_name", lambda: "Some CPU @ 2.1 GHz, avx2")
    assert cache_path() == tmp_path / "toolkit" / "costs-1.2.3-some-cpu-2.1-ghz-avx2.json"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    assert cache_path().is_absolute()


AMD, INTEL = "AMD EPYC 9R14, avx512-vnni", "Intel(R) Xeon(R) Processor, avx2"


@pytest.fixture
def shipped(tmp_path: Path) -> Path:
    """A folder with the tables of two processors."""
    for cpu in (AMD, INTEL):
        replace(COSTS, cpu=cpu).save(shipped_path(tmp_path, cpu))
    return tmp_path


@pytest.mark.parametrize(
    ("cpu", "nearest"),
    [
        (AMD, AMD),
        (INTEL, INTEL),
        ("Intel(R) Core(TM) i7, avx512-vnni", INTEL),  # its maker says more than its instructions
        ("Intel64 Family 6 Model 85 Stepping 7, GenuineIntel", INTEL),
        ("AMD64 Family 25 Model 1 Stepping 1, AuthenticAMD", AMD),
        ("Hygon C86, avx2", INTEL),
        ("aarch64", AMD),
    ],
)
def test_the_table_of_the_nearest_processor_counts(shipped: Path, cpu: str, nearest: str) -> None:
    assert nearest_table(shipped, cpu).cpu == nearest


def test_makers() -> None:
    assert [vendor_of(cpu) for cpu in (AMD, INTEL, "aarch64")] == ["amd", "intel", "other"]
    assert vendor_of("AMD64") == "other"  # as any of them is called on Windows
    assert vendor_of("QEMU Virtual CPU (GenuineIntel), avx2") == "intel"


@pytest.mark.parametrize(
    ("cpu", "said"),
    [(AMD, AMD), ("aarch64", f"{AMD}; this is aarch64: toolkit tune measures it")],
)
def test_what_is_said_of_a_shipped_table(
    shipped: Path, monkeypatch: pytest.MonkeyPatch, cpu: str, said: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(shipped / "cache"))
    monkeypatch.setattr(costs_module, "cpu_name", lambda: cpu)
    monkeypatch.setattr(costs_module, "runtime_version", lambda: COSTS.runtime)
    assert costs_in_use(shipped)[1] == f"the shipped table, onnxruntime {COSTS.runtime} on {said}"


def test_this_machine() -> None:
    assert runtime_version()[0].isdigit()
    assert cpu_name()
    assert cores() >= 1
