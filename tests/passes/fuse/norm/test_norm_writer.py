"""Normalizations written with the operator that fits their axes."""

from __future__ import annotations

import numpy as np
import pytest

from passes.analysis.shapes import Shapes
from passes.fuse.norm.layer_rms import scaled_difference
from passes.fuse.norm.norm_writer import (
    LAYER,
    NormSpec,
    inverse,
    reduced_axes,
    write_instance_norm,
    write_norm,
)
from tests.checks import check, model
from toolkit.ir.graph import Graph
from toolkit.pass_manager.protocol import Context
from toolkit.rewriting.rule import MatchFailure


def graph(declared: str = "float[N, 3, 4, 5] x", nodes: str = "y = Relu (x)") -> Graph:
    found = model(f"""<ir_version: 10, opset_import: ["" : 23]>
        g ({declared}) => (float[] y) <int64[1] last = {{-1}}, int64[2] axes = {{3, 2}}> {{
        {nodes} }}""")
    Shapes(annotate=False).run(found, Context())
    return found.graph


def written(g: Graph, axes: tuple[int, ...]) -> list[str]:
    before = set(map(id, g.nodes))
    write_norm(g, LAYER, NormSpec("x", axes, 1e-5, 2.0), g.nodes[0])
    return [node.op_type for node in g.nodes if id(node) not in before]


def test_axes_that_are_not_the_last_are_transposed() -> None:
    assert written(graph(), (3,)) == ["LayerNormalization"]
    assert written(graph(), (2, 3)) == ["LayerNormalization"]
    assert written(graph(), (1,)) == ["Transpose", "LayerNormalization", "Transpose"]


def test_an_unknown_size_has_no_scale() -> None:
    with pytest.raises(MatchFailure, match="is not known"):
        written(graph("float[N, 3, 4, S] x"), (3,))


def test_an_instance_norm_is_over_all_spatial_axes() -> None:
    g = graph()
    name = write_instance_norm(g, NormSpec("x", (2, 3), 1e-5, 2.0), g.nodes[0])
    node = g.producer(name or "")
    assert node is not None
    np.testing.assert_array_equal(g.const(node.input[1]), np.full(3, 2, np.float32))
    assert write_instance_norm(g, NormSpec("x", (3,), 1e-5), g.nodes[0]) is None


def test_reductions_must_agree_and_keep_their_axes() -> None:
    g = graph(nodes="m = ReduceMean (x, last) p = GlobalAveragePool (x) a = ReduceMean (x, axes)"
              " d = ReduceMean <keepdims = 0> (x, last) y = Add (m, p)")  # fmt: skip
    last, pool, both, dropped, _ = g.nodes
    assert reduced_axes(g, "x", last) == (3,)
    assert reduced_axes(g, "x", pool, None, both) == (2, 3)
    with pytest.raises(MatchFailure, match="different axes"):
        reduced_axes(g, "x", last, pool)
    with pytest.raises(MatchFailure, match="does not keep"):
        reduced_axes(g, "x", dropped)


def test_inverse_of_a_permutation() -> None:
    assert inverse([2, 0, 1]) == [1, 2, 0]


def test_a_bias_that_repeats_rows_does_not_enlarge_the_scaled_difference() -> None:
    subject = check(
        scaled_difference,
        """agraph (float[1, 4] x, float[1, 1] r, float[3, 4] b) => (float[3, 4] y)
        <int64[1] last = {-1}> {
            m = ReduceMean (x, last)
            xr = Mul (x, r)
            mr = Mul (m, r)
            d = Sub (xr, mr)
            y = Add (d, b)
        }""",
    )
    [product] = [node for node in subject.graph.nodes if node.op_type == "Mul"]
    assert subject.graph.shape(product.output[0]) == (1, 4)
