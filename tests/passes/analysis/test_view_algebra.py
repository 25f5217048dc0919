"""Views in the factor algebra."""

from __future__ import annotations

import pytest

from passes.analysis.shapes import Shapes
from passes.analysis.view_algebra import Factor, Trace, leaves, regroup, size_of
from tests.checks import model
from toolkit.pass_manager.protocol import Context
from toolkit.symbolic import symbol

HEADER = '<ir_version: 10, opset_import: ["" : 23]>\n'
N, S = symbol("N"), symbol("S")


def sizes(axes: object) -> list[list[object]]:
    return [[factor.size for factor in leaves(axis)] for axis in axes]  # type: ignore[attr-defined]


def axes(*shape: object) -> list[list[Factor]]:
    return [[Factor(size)] for size in shape]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("before", "after", "groups"),
    [
        ((N, S, 12), (N, S, 3, 4), [[N], [S], [3], [4]]),
        ((N * 3, S, 4), (N, 3, S, 4), [[N], [3], [S], [4]]),
        ((N, 3, S, 4), (N * 3, S, 4), [[N, 3], [S], [4]]),
        ((4, 6), (8, 3), [[4, 2], [3]]),
        ((N, 1, S), (N, S), [[N], [S]]),
        ((N, S), (1, N, 1, S, 1), [[], [N], [], [S], []]),
    ],
)
def test_regroup(before: object, after: object, groups: object) -> None:
    found = regroup(axes(*before), after)  # type: ignore[misc, arg-type]
    assert found is not None
    assert sizes(found) == groups


@pytest.mark.parametrize(
    ("before", "after"), [((N, S), (S, N)), ((4, 6), (5, 5)), ((N, 4), (N, 2)), ((0, 4), (4, 0))]
)
def test_incompatible_shapes_do_not_regroup(before: object, after: object) -> None:
    assert regroup(axes(*before), after) is None  # type: ignore[misc, arg-type]


def traced(body: str, weights: str = "") -> tuple[Trace, dict[str, list[list[object]]]]:
    subject = model(f"""{HEADER}g (float[N, S, 8] x) => (float[a, b, c, d] y)
        <int64[4] heads = {{0, 0, 2, 4}}, float two = {{2}}{weights}> {{ {body} }}""")
    Shapes(annotate=False).run(subject, Context())
    trace = Trace(subject.graph, "y")
    return trace, {source.value: sizes(source.axes) for source in trace.sources}


def test_heads_are_traced_to_tokens() -> None:
    body = "h = Reshape (x, heads) t = Transpose <perm = [0, 2, 3, 1]> (h) y = Mul (two, t)"
    trace, found = traced(body)
    assert sizes(trace.axes) == [[N], [2], [4], [S]]
    assert found["x"] == [[N], [S], [2, 4]]
    assert [source.scale for source in trace.sources] == [1.0, 2.0, 2.0, 2.0]


def test_repetitions_are_factors_that_the_source_lacks() -> None:
    body = """h = Reshape (x, heads) u = Unsqueeze (h, axis) e = Expand (u, many)
        y = Reshape (e, all)"""
    weights = """, int64[1] axis = {3}, int64[5] many = {1, 1, 1, 3, 1},
        int64[4] all = {0, 0, 6, 4}"""
    trace, found = traced(body, weights)
    assert sizes(trace.axes) == [[N], [S], [2, 3], [4]]
    assert found["x"] == [[N], [S], [2, 4]]
    assert size_of(trace.axes[2]) == 6


def test_a_trace_ends_at_an_operator_that_is_not_a_view() -> None:
    _, found = traced("r = Relu (x) y = Reshape (r, heads)")
    assert "r" in found
    assert "x" not in found
