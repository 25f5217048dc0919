"""Gathers of neighbours as Slices."""

from __future__ import annotations

import pytest

from passes.lower import gather_to_slice
from tests.passes.lower.tables import lowered, stays

LAST = "g (float[N, 6] x) => (float[N, K] y) <int64[3] at = {%s}>"
SLICE = """a = Constant <value = int64[1] {%d}> () b = Constant <value = int64[1] {%d}> ()
    c = Constant <value = int64[1] {%d}> () y = Slice (x, a, b, c)"""


@pytest.mark.parametrize(
    ("at", "start", "end"), [("0, 1, 2", 0, 3), ("3, 4, 5", 3, 6), ("-3, -2, -1", 3, 6)]
)
def test_neighbours_along_the_last_axis(at: str, start: int, end: int) -> None:
    signature = (LAST % at).replace("K", "3")
    nodes = "y = Gather <axis = -1> (x, at)"
    lowered(gather_to_slice.rules, "slice", signature, nodes, SLICE % (start, end, 1))


def test_neighbours_along_another_axis() -> None:
    signature = "g (float[6, N] x) => (float[2, N] y) <int64[2] at = {1, 2}>"
    lowered(gather_to_slice.rules, "slice", signature, "y = Gather (x, at)", SLICE % (1, 3, 0))


@pytest.mark.parametrize("at", ["0, 2, 4", "2, 1, 0", "1, 1, 1", "-1, 0, 1", "0, 1, 1"])
def test_others_stay(at: str) -> None:
    signature = (LAST % at).replace("K", "3")
    stays(gather_to_slice.rules, "slice", signature, "y = Gather <axis = -1> (x, at)")


def test_an_axis_of_unknown_length_stays() -> None:
    signature = "g (float[N, S] x) => (float[N, 2] y) <int64[2] at = {0, 1}>"
    stays(gather_to_slice.rules, "slice", signature, "y = Gather <axis = -1> (x, at)")


def test_beyond_the_end_stays() -> None:
    signature = (LAST % "4, 5, 6").replace("K", "3")
    stays(gather_to_slice.rules, "slice", signature, "y = Gather <axis = -1> (x, at)", run=False)


def test_scalars_matrices_and_computed_indices_stay() -> None:
    scalar = "g (float[N, 6] x) => (float[N] y) <int64 at = {1}>"
    stays(gather_to_slice.rules, "slice", scalar, "y = Gather <axis = -1> (x, at)")
    matrix = "g (float[N, 6] x) => (float[N, 1, 2] y) <int64[1, 2] at = {0, 1}>"
    stays(gather_to_slice.rules, "slice", matrix, "y = Gather <axis = -1> (x, at)")
    given = "g (float[N, 6] x, int64[2] at) => (float[N, 2] y)"
    stays(gather_to_slice.rules, "slice", given, "y = Gather <axis = -1> (x, at)")


def test_one_row_of_a_table_stays() -> None:
    signature = "g (float[6, N] x) => (float[1, N] y) <int64[1] at = {2}>"
    stays(gather_to_slice.rules, "slice", signature, "y = Gather (x, at)")
