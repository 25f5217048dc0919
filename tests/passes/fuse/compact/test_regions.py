"""The analyses of `compact`: functions of distances, and chains that move rows."""

from __future__ import annotations

from passes.analysis.shapes import Shapes
from passes.fuse.compact import lookup_tables, row_gathers
from tests.checks import model
from toolkit.ir.graph import Graph
from toolkit.pass_manager.protocol import Context


def graph(text: str) -> Graph:
    found = model(f'<ir_version: 10, opset_import: ["" : 23]>\n{text}')
    Shapes(annotate=False).run(found, Context())
    return found.graph


BUCKETS = "m = Abs (d) l = Min (m, LIMIT) t = Mul (l, two) s = Sub (t, one) y = Add (s, one)"


def test_a_function_that_is_constant_beyond_a_bound() -> None:
    text = f"""g (int64[S, T] d) => (int64[S, T] y)
        <int64 limit = {{20}}, int64 one = {{1}}, int64 two = {{2}}> {{ {BUCKETS} }}"""
    (found,) = lookup_tables.functions(graph(text.replace("LIMIT", "limit")))
    assert (found.source, found.root.output[0], found.bound) == ("d", "y", 32)
    assert len(found.nodes) == 5
    unbounded = text.replace("Min (m, LIMIT)", "Neg (m)")
    assert not lookup_tables.functions(graph(unbounded))


def test_a_chain_that_moves_rows() -> None:
    text = """g (float[N, 4, 6, 5] x) => (float[] y)
        <int64[6] cut = {-1, 2, 2, 3, 2, 5}, int64[4] join = {-1, 2, 2, 5}> {
        r = Relu (x) a = Reshape (r, cut) t = Transpose <perm = [0, 1, 3, 2, 4, 5]> (a)
        w = Reshape (t, join) y = Exp (w) }"""
    (found,) = row_gathers.chains(graph(text))
    assert (found.source, found.root.output[0], len(found.nodes)) == ("r", "w", 3)
    shared = text.replace("y = Exp (w)", "v = Exp (t) y = Exp (w)")
    assert not row_gathers.chains(graph(shared))
