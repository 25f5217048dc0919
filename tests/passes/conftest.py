"""Neither the user's own measurements nor this machine's processor decide what tests see."""

from __future__ import annotations

import pytest

from toolkit.runtime import cost_table


@pytest.fixture(autouse=True)
def _one_processor(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cost_table, "cpu_name", lambda: "AMD EPYC, avx512-vnni")
