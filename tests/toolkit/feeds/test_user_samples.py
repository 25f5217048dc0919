"""The user's samples: loaded, and checked against the declared inputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.checks import model
from toolkit.errors import UsageError
from toolkit.feeds.user_samples import describe, read_sample, require_shape

TEXT = (
    "g (float[B,3] x, string[B] s) => (float[B,3] y, string[B] t) { y = Relu(x) t = Identity(s) }"
)
GOOD: dict[str, Any] = {"x": np.ones((2, 3), np.float32), "s": np.array(["a", "b"])}


def test_strings_become_objects():
    feed = read_sample(GOOD, model(TEXT).graph)
    assert feed["s"].dtype == object
    assert feed["x"] is GOOD["x"]


def test_a_file_holds_one_feed(tmp_path):
    np.savez(tmp_path / "s.npz", **GOOD)
    assert read_sample(tmp_path / "s.npz", model(TEXT).graph).keys() == GOOD.keys()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"x": np.ones((2, 3))}, "'x' is float64; the model takes float32[B, 3]"),
        ({"x": np.ones((2, 4), np.float32)}, "'x' has shape [2, 4]"),
        ({"z": np.ones(1)}, "has 'z', which is not an input"),
    ],
)
def test_a_sample_that_does_not_fit_is_refused(change, problem):
    with pytest.raises(UsageError) as caught:
        read_sample({**GOOD, **change}, model(TEXT).graph)
    assert problem in str(caught.value)


def test_types_are_described():
    graph = model(TEXT).graph
    assert describe(graph.type("x")) == "float32[B, 3]"
    assert describe(graph.type("s")) == "string[B]"
    assert describe(None) == "(no tensor)"


def test_dynamic_dimensions_fit_any_size():
    declared = model(TEXT).graph.type("x")
    assert declared is not None
    require_shape((7, 3), declared, "it")
    with pytest.raises(UsageError, match="it has rank 1"):
        require_shape((3,), declared, "it")
