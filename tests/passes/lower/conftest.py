"""The user's own measurements must not decide what tests see."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _empty_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
