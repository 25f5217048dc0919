"""Reshapes and Expands to sizes that are only known at run time."""

from __future__ import annotations

import pytest

from passes.analysis.shapes import Shapes
from passes.fuse.computed_sizes import reshape_to, size_vector
from tests.checks import model
from toolkit.ir.graph import Graph
from toolkit.pass_manager.protocol import Context
from toolkit.rewriting.match_failure import MatchFailure
from toolkit.settings import Settings

TEXT = """<ir_version: 10, opset_import: ["" : 23]>
    g (float[N, 3, S, T] x) => (float[N, 3, S, T] y) { y = Relu (x) }"""


def graph() -> Graph:
    found = model(TEXT)
    Shapes(annotate=False).run(found, Context(Settings()))
    return found.graph


def test_consecutive_axes_take_one_shape() -> None:
    g = graph()
    value = size_vector(g, [1, 1, ("x", 2), ("x", 3), ("x", 0)], g.nodes[0])
    concat = g.producer(value)
    assert concat is not None
    producers = [g.producer(name) for name in concat.input]
    assert [node and node.op_type for node in producers] == [None, "Shape", "Shape"]


def test_known_sizes_are_a_constant() -> None:
    g = graph()
    assert g.const(size_vector(g, [2, 3], g.nodes[0])) is not None


def test_a_reshape_reads_sizes_that_move() -> None:
    g = graph()
    shape = g.shape("x")
    assert shape is not None
    batch, channels, rows, columns = shape
    flat = reshape_to(g, "x", (batch * channels, rows, columns), g.nodes[0])
    assert g.shape(flat) == (batch * channels, rows, columns)
    assert [node.op_type for node in g.nodes if node.op_type == "Shape"] == ["Shape"]
    with pytest.raises(MatchFailure):
        reshape_to(g, "x", (batch * rows, channels * columns), g.nodes[0])
