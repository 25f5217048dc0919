"""`operands`: targets of Reshape, broadcasting, and both forms of an operand."""

from __future__ import annotations

import pytest

from passes.analysis.axes import positive_axes, positive_axis
from passes.analysis.operands import (
    broadcast,
    fits,
    int_operand,
    operand,
    permutation,
    reshape_target,
    set_int_operand,
)
from tests.checks import model
from toolkit.ir.tensor_type import Shape
from toolkit.symbolic import symbol

N, M = symbol("N"), symbol("M")


@pytest.mark.parametrize(
    ("source", "result", "target"),
    [
        ((2, 3), (6,), [6]),
        ((N, 2, 3), (N, 6), [0, 6]),  # copied from the same place
        ((N, 2), (2, N), [2, -1]),  # the only one that varies
        ((N, M, 2), (N, M * 2), None),  # copied and inferred: not beside an empty dimension
        ((N, M), (M, N), None),
        ((N, M), (N, M, 1), [0, 0, 1]),
        ((0, 3), (3, 0), None),  # a zero would mean "copy"
        ((0, 3), (0, 1, 3), [0, 1, 3]),
        ((N + 1, 2, M), (N + 1, M * 2), [0, -1]),  # beside one that is not empty
        ((N * 2,), (N, 2), [-1, 2]),
        ((1, 1), (), []),
        (None, (2,), None),
        ((2,), None, None),
    ],
)
def test_reshape_target(
    source: Shape | None, result: Shape | None, target: list[int] | None
) -> None:
    assert reshape_target(source, result) == target


def test_broadcast() -> None:
    assert broadcast((N, 1), (3,)) == (N, 3)
    assert broadcast((N, 1), (N, M)) == (N, M)
    assert broadcast((N,), (M,)) is None  # one of them may be 1
    assert broadcast((N,), (3,)) is None
    assert broadcast((), (2,)) == (2,)


def test_axes_from_the_back_need_the_rank() -> None:
    assert positive_axes([0, -1], 3) == [0, 2]
    assert positive_axes([1, 0], None) == [1, 0]
    assert positive_axes([-1], None) is None
    assert positive_axes([0, -3], 3) is None  # the same axis twice
    assert positive_axes([3], 3) is None
    assert positive_axes(None, 3) is None
    assert positive_axes([0], 0) is None  # a scalar has none


def test_an_axis_counts_from_the_front() -> None:
    assert [positive_axis(axis, 3) for axis in (0, 2, -1, -3)] == [0, 2, 2, 0]
    for axis, rank in ((3, 3), (-4, 3), (0, 0)):
        with pytest.raises(ValueError, match=f"axis {axis} of a tensor of rank {rank}"):
            positive_axis(axis, rank)


def test_operands_in_both_forms() -> None:
    new = model(
        """g (float[2, N] x, int64[1] s) => (float[2, p] y) <int64[1] one = {1}> {
            a = Slice (x, one, s, one)
            y = Transpose (a)
        }"""
    ).graph
    cut, turned = new.nodes
    assert int_operand(new, cut, "starts", 1) == [1]
    assert operand(new, cut, "ends", 2) is None  # only the caller knows
    assert int_operand(new, cut, "steps", 4, absent=[1]) == [1]
    assert permutation(new, turned) is None  # reversed, but of which rank?
    set_int_operand(new, cut, "steps", 4, [2], like="one")
    assert int_operand(new, cut, "steps", 4) == [2]
    new.verify()
    old = model(
        """<ir_version: 4, opset_import: ["" : 9]>
        g (float[2, N] x) => (float[2, 1] y) {
            y = Slice <starts = [1], ends = [2], axes = [1]> (x)
        }"""
    ).graph
    [cut] = old.nodes
    set_int_operand(old, cut, "starts", 1, [0])
    assert int_operand(old, cut, "starts", 1) == [0]
    assert len(cut.input) == 1


def test_fits() -> None:
    g = model(
        """g (float[N, 3] x, float[1, 1] one, float[1, 1, 1] deep, float[3] row, float s)
            => (float[N, 3] y) { y = Add (x, row) }"""
    ).graph
    assert fits(g, "row", "x", "y")  # the result has the shape of x
    assert fits(g, "one", "x", "unknown")
    assert fits(g, "s", "unknown", "unknown")
    assert not fits(g, "one", "unknown", "unknown")
    assert not fits(g, "deep", "x", "unknown")
    assert not fits(g, "row", "x", "unknown")
