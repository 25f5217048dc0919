"""Which changes of inputs and outputs break a model's callers."""

from __future__ import annotations

import pytest

from tests.checks import model
from toolkit.ir.signature import Interface

OLD = "g (float[N, 4] x) => (float[N, 4] y) { y = Relu (x) }"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (OLD, ""),
        ("g (float[M, 4] a) => (float[M, 4] y) { y = Relu (a) }", "the inputs are"),
        ("g (float[N, 4] x) => (float[N, 4] z) { z = Relu (x) }", "the outputs are"),
        ("g (double[N, 4] x) => (float[N, 4] y) { y = Cast <to = 1> (x) }", "another element type"),
        ("g (float[N, 4] x) => (float[N, 4, 1] y) { y = Relu (x) }", "rank 3 instead of 2"),
        ("g (float[N, 5] x) => (float[N, 4] y) { y = Relu (x) }", "a dimension of 5 instead of 4"),
        ("g (float[2, 4] x) => (float[N, 4] y) { y = Relu (x) }", "fixed at 2, which was dynamic"),
        ("g (float[N, 4] x) => (float[2, 4] y) { y = Relu (x) }", ""),
        ("g (float[M, K] x) => (float[M, K] y) { y = Relu (x) }", ""),
    ],
)
def test_the_first_difference_is_named(text: str, problem: str) -> None:
    found = Interface.of(model(OLD)).broken_by(model(text))
    assert problem in found
    assert bool(problem) == bool(found)
