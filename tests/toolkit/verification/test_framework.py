"""The export proof: outcomes, findings and summaries."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import parser

from toolkit.errors import UsageError
from toolkit.frontends.protocol import Draft
from toolkit.frontends.request import Request, parse_dynamic, resolve_axes
from toolkit.frontends.test_inputs import axes_of, cases_from, resized, sizes_in
from toolkit.ir.model import Model
from toolkit.verification.framework import prove

DOUBLE = """
<ir_version: 10, opset_import: ["": 18]>
g (float[batch, length] x) => (float[batch, length] y) <float two = {2}> { y = Mul(x, two) }
"""
AXES = {"x": {0: "batch", 1: "length"}}


@pytest.fixture
def draft(tmp_path):
    def make(reference, text=DOUBLE, axes=AXES, feed=None, **options):
        path = tmp_path / "model.onnx"
        onnx.save(parser.parse_model(text), path)
        x = np.random.default_rng(0).standard_normal((2, 6)).astype(np.float32)
        cases = cases_from({"x": x} if feed is None else feed, axes)
        return Draft(path, reference, cases, "test", axes, {"batch": 2, "length": 6}, **options)

    return make


def found(draft):
    proof = prove(draft, Request())
    assert not proof.ok
    return "; ".join(proof.findings)


def test_equal_at_every_size(draft):
    proof = prove(draft(lambda feed: {"y": feed["x"] * 2}), Request())
    assert proof.ok
    assert proof.error == 0
    assert proof.sizes == {"batch": [1, 2, 5], "length": [1, 3, 6, 13]}
    assert proof.summary().startswith("equal to 0.0e+00 on ")
    assert proof.failing == frozenset()


def test_a_model_that_changes_with_a_size(draft):
    def reference(feed):
        return {"y": feed["x"] * (2 if feed["x"].shape[1] <= 10 else 3)}

    made = draft(reference)
    words = "dimension 'length': it differs from size 13 on, and is correct up to 6"
    assert words in found(made)
    assert prove(made, Request()).failing == {"length"}


def test_a_graph_that_is_correct_for_the_traced_size_only(draft):
    def reference(feed):
        return {"y": feed["x"] * (2 if feed["x"].shape[0] == 2 else 3)}

    assert "dimension 'batch': it differs for any size but 2, which was traced" in found(
        draft(reference)
    )


def test_a_model_that_changes_with_its_values(draft):
    def reference(feed):
        return {"y": feed["x"] * (2 if (feed["x"] < 0).any() else 3)}

    said = found(draft(reference))
    assert "it differs for other values, not for other sizes" in said
    assert "all positive" in said


def test_a_graph_that_refuses_inputs_of_the_model(draft):
    text = """
    <ir_version: 10, opset_import: ["": 18]>
    g (float[batch, length] x) => (float[a, b] y) <int64[2] s = {2, -1}> { y = Reshape(x, s) }
    """
    assert "dimension 'batch': it" in found(draft(lambda feed: {"y": feed["x"]}, text))


def test_sizes_that_the_framework_refuses_do_not_fail_the_graph(draft):
    def reference(feed):
        assert feed["x"].shape[1] <= 6
        return {"y": feed["x"] * 2}

    proof = prove(draft(reference), Request())
    assert proof.ok
    assert proof.sizes["length"] == [1, 3, 6]
    assert any("the model itself fails for batch 2, length 13" in note for note in proof.notes)


def test_a_dimension_of_one_size_is_not_dynamic(draft):
    def reference(feed):
        assert feed["x"].shape[1] == 6
        return {"y": feed["x"] * 2}

    made = draft(reference)
    assert "dimension 'length': the model itself supports only size 6" in found(made)
    assert prove(made, Request()).failing == {"length"}


def test_other_types_are_not_the_same(draft):
    said = found(draft(lambda feed: {"y": feed["x"].astype(np.float64) * 2}))
    assert "float32 instead of float64" in said


def test_a_model_of_random_numbers_cannot_be_proven(draft):
    random = np.random.default_rng(0)

    def reference(feed):
        return {"y": random.standard_normal(feed["x"].shape).astype(np.float32)}

    assert "differs from run to run" in found(draft(reference))


def test_an_example_that_the_model_refuses(draft):
    def reference(feed):
        raise ValueError("not these")

    with pytest.raises(UsageError, match="does not run on the example: ValueError: not these"):
        prove(draft(reference), Request())


def test_indices_of_equal_values_may_be_permuted(draft):
    text = """
    <ir_version: 10, opset_import: ["": 18]>
    g (float[batch, length] x) => (int64[batch] y)
    { y = ArgMax <axis = 1, keepdims = 0, select_last_index = 1> (x) }
    """
    proof = prove(draft(lambda feed: {"y": feed["x"].argmax(1)}, text), Request())
    assert proof.ok
    flat = np.ones((2, 6), np.float32)
    said = found(draft(lambda feed: {"y": feed["x"].argmax(1)}, text, feed={"x": flat}))
    assert "output 'y'" in said  # it fails on the user's own values too


def test_an_input_that_the_graph_has_dropped(draft):
    feed = {"x": np.ones((2, 6), np.float32), "unused": np.ones((2, 6), np.float32)}
    proof = prove(draft(lambda feed: {"y": feed["x"] * 2}, feed=feed), Request())
    assert proof.ok
    assert proof.notes == ("input 'unused' is unused and was dropped from the graph",)


def test_a_graph_that_does_not_load(draft):
    text = DOUBLE.replace('["": 18]', '["": 18, "com.nowhere": 1]').replace(
        "Mul(", "com.nowhere.Mul("
    )
    proof = prove(draft(lambda feed: {"y": feed["x"]}, text), Request())
    assert not proof.loads
    assert "the domain 'com.nowhere' is unknown" in proof.findings[0]


# Cases -------------------------------------------------------------------------------------------


def test_sizes_change_by_tiling_and_slicing():
    x = np.arange(6).reshape(2, 3)
    grown = resized({"x": x}, {"x": {0: "a", 1: "b"}}, {"a": 3, "b": 2})["x"]
    assert grown.tolist() == [[0, 1], [3, 4], [0, 1]]


def test_values_stay_in_the_examples_range():
    feed = {
        "ids": np.array([[3, 7, 5]]),
        "mask": np.array([[1, 1, 0]]),
        "share": np.array([[0.0, 0.5, 1.0]], np.float32),
    }
    axes = {name: {0: "batch", 1: "length"} for name in feed}
    for case in cases_from(feed, axes):
        assert case.feed["ids"].min() >= 3
        assert case.feed["ids"].max() <= 7
        assert set(np.unique(case.feed["mask"])) <= {0, 1}
        shapes = {value.shape for value in case.feed.values()}
        assert shapes == {(case.sizes["batch"], case.sizes["length"])}


def test_masks_are_padded_on_both_sides():
    ids = np.array([[5, 6, 7, 8], [5, 6, 7, 8]])
    feed = {"ids": ids, "attention_mask": np.ones_like(ids), "flags": ids > 0}
    cases = {case.label: case.feed for case in cases_from(feed, {})}
    right, left = cases["padded on the right"], cases["padded on the left"]
    assert 0 in right["attention_mask"][1]
    assert right["attention_mask"][:, 0].all()
    assert left["attention_mask"][:, -1].all()
    assert (left["flags"] == (left["attention_mask"] == 1)).all()
    assert (left["ids"] == ids).all()


@pytest.mark.parametrize(("kind", "error"), [("float16", 4e-3), ("float32", 1e-5)])
def test_tolerances_respect_the_precision_of_a_type(draft, kind, error):
    text = DOUBLE.replace("float two = {2}", "").replace("Mul(x, two)", "Add(x, x)")
    text = text.replace("float", kind if kind == "float16" else "float")
    x = np.random.default_rng(0).standard_normal((2, 6)).astype(kind)

    def near(feed):
        return {"y": (feed["x"].astype(np.float64) * 2 * (1 + error)).astype(kind)}

    def far(feed):
        return {"y": (feed["x"].astype(np.float64) * 2 * (1 + 20 * error)).astype(kind)}

    assert prove(draft(near, text, feed={"x": x}), Request()).ok
    assert "off by" in found(draft(far, text, feed={"x": x}))


def test_a_dimension_of_two_sizes_is_refused():
    feed = {"x": np.zeros((1, 2)), "y": np.zeros((3, 2))}
    with pytest.raises(UsageError, match="dimension 'batch' is 1 in 'x' and 3 in 'y'"):
        sizes_in(feed, {"x": {0: "batch"}, "y": {0: "batch"}})


def test_the_axes_that_a_graph_declares(tmp_path):
    path = tmp_path / "model.onnx"
    onnx.save(parser.parse_model(DOUBLE), path)
    assert axes_of(Model.load(path)) == AXES


@pytest.mark.parametrize(
    ("texts", "axes"),
    [
        ([], None),
        (["none"], {}),
        (["x:0=batch,1=length"], {"x": {0: "batch", 1: "length"}}),
        (["x:0=n", "y:-1=m"], {"x": {0: "n"}, "y": {-1: "m"}}),
    ],
)
def test_axes_in_text(texts, axes):
    assert parse_dynamic(texts) == axes


def test_axes_of_existing_inputs():
    ranks = {"x": 3, "y": 1}
    assert resolve_axes({"*": {0: "n", 1: "m"}}, ranks) == {"x": {0: "n", 1: "m"}, "y": {0: "n"}}
    assert resolve_axes({"x": {-1: "m"}}, ranks) == {"x": {2: "m"}}
    assert resolve_axes({"x": {0: "n"}, "z": {0: "n"}}, ranks, ["z"]) == {"x": {0: "n"}}
    with pytest.raises(UsageError, match="no such input"):
        resolve_axes({"z": {0: "n"}}, ranks)
