"""Spool: a one-time iterator becomes an iterable that can be read again."""

from __future__ import annotations

import numpy as np

from toolkit.storage.spool import Spool


def test_items_can_be_read_again():
    spool = Spool(iter([{"x": np.arange(3)}, {"x": np.arange(4)}]))
    assert spool.count() is None
    for _ in range(2):
        assert [len(item["x"]) for item in spool] == [3, 4]
    assert spool.count() == 2
    assert len(spool.load(1)["x"]) == 4


def test_an_iteration_that_stops_early_leaves_the_rest():
    read: list[int] = []

    def items():
        for index in range(4):
            read.append(index)
            yield index

    spool = Spool(items())
    assert next(iter(spool)) == 0
    assert read == [0]
    assert list(spool) == [0, 1, 2, 3]
    assert read == [0, 1, 2, 3]


def test_items_are_stored_before_they_are_handed_out():
    spool = Spool(iter([[1, 2]]))
    for item in spool:
        item.append(3)
    assert list(spool) == [[1, 2]]
