"""Candidate sizes of dynamic dimensions, and sizes fixed by weights."""

from __future__ import annotations

from itertools import islice

import pytest

from tests.checks import model
from toolkit.feeds.dim_sizes import Role, find_symbols, first_sizes, more_sizes, sizes_from_weights
from toolkit.feeds.generate import analyzed


def roles(text):
    graph = analyzed(model(text))
    return find_symbols({name: graph.shape(name) or () for name in graph.feeds}, graph)


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ("float[B,S] x", {"B": Role.BATCH, "S": Role.SEQUENCE}),
        ("float[N,3,H,W] x", {"N": Role.BATCH, "H": Role.SPATIAL, "W": Role.SPATIAL}),
        ("float[N,H,W,3] x", {"N": Role.BATCH, "H": Role.SPATIAL, "W": Role.SPATIAL}),
        ("float[2,B,8] x", {"B": Role.BATCH}),
        ("float[my_batch,time] x", {"my_batch": Role.BATCH, "time": Role.SEQUENCE}),
    ],
)
def test_roles(inputs, expected):
    out = inputs.replace(" x", " y")
    assert roles(f"g ({inputs}) => ({out}) {{ y = Identity(x) }}") == expected


def test_the_first_sizes_differ_between_symbols():
    found = {"B": Role.BATCH, "S": Role.SEQUENCE, "T": Role.SEQUENCE}
    first, tied = islice(first_sizes(found, {}), 2)
    assert len(set(first.values())) == 3
    assert tied["S"] == tied["T"]


def test_without_symbols_there_is_one_candidate():
    assert list(first_sizes({}, {})) == [{}]


def test_sizes_fixed_by_weights_are_kept():
    found = {"B": Role.BATCH, "C": Role.SEQUENCE}
    assert all(sizes["C"] == 7 for sizes in first_sizes(found, {"C": 7}))
    assert all(sizes["C"] == 7 for sizes in more_sizes(found, {"C": 7}, {"B": 2, "C": 7}, 1))


def test_a_mask_may_cover_a_cache_and_a_single_token():
    lengths = {"mask": Role.SEQUENCE, "cache": Role.SEQUENCE}
    found = list(first_sizes(lengths, {}))
    assert any(sizes["mask"] == sizes["cache"] + 1 for sizes in found)
    assert any(sizes["cache"] == sizes["mask"] + 1 for sizes in found)


def test_a_total_is_the_sum_of_its_parts_by_name():
    names = ("sequence", "past_sequence", "total_sequence")
    for sizes in islice(first_sizes(dict.fromkeys(names, Role.SEQUENCE), {}), 3):
        assert sizes["total_sequence"] == sizes["sequence"] + sizes["past_sequence"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("g (float[A,B] x) => (float[A,4] y) <float[3,4] w> { y = MatMul(x, w) }", (None, {-1: 3})),
        (
            "g (float[A,B] x) => (float[A,4] y) <float[4,3] w> { y = Gemm <transB = 1> (x, w) }",
            (2, {1: 3}),
        ),
        (
            "g (float[N,C,H,W] x) => (float[N,4,P,Q] y) <float[4,3,1,1] w> { y = Conv(x, w) }",
            (4, {1: 3}),
        ),
        (
            "g (float[A,B] x) => (float[A,4] y) <float[3,4] w> { r = Relu(x) y = MatMul(r, w) }",
            (None, {-1: 3}),
        ),
        ("g (float[A,B] x) => (float[A,B] y) { y = Relu(x) }", (None, {})),
    ],
)
def test_sizes_from_weights(text, expected):
    filled = text
    for shape, count in (("[3,4] w", 12), ("[4,3] w", 12), ("[4,3,1,1] w", 12)):
        filled = filled.replace(f"{shape}>", f"{shape} = {{{', '.join(['1'] * count)}}}>")
    assert sizes_from_weights(model(filled).graph, "x") == expected
