"""Phrases of messages."""

from __future__ import annotations

from toolkit.messages import by_reason, first_of, suggestion


def test_a_near_name_is_suggested() -> None:
    assert suggestion("Flod", ["fuse", "fold"]) == ": did you mean 'fold'?"
    assert suggestion("quantize", ["fuse", "fold"]) == ""


def test_long_lists_are_cut_short() -> None:
    assert first_of(["a", "b", "c"]) == "a, b, c"
    assert first_of(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"
    assert first_of(["a", "b"], 1) == "a and 1 more"


def test_names_are_gathered_by_their_reasons() -> None:
    found = [("a", "too small"), ("b", "excluded"), ("c", "too small")]
    assert list(by_reason(found)) == ["a, c (too small)", "b (excluded)"]
