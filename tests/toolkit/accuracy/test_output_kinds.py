"""The kinds of outputs, inferred from names, producers and values."""

from __future__ import annotations

import numpy as np
import pytest

from tests.checks import model
from toolkit.accuracy.output_kinds import infer_kind, real_rows
from toolkit.accuracy.recurrent_state import chains, state_pairs

RANDOM = np.random.default_rng(0)

MASKED = "p = GatherND (h, x) y = Where (real, p, zero)"
"""Scatter rows back to their positions, with zeros at padding."""


def normal(*shape: int):
    return RANDOM.standard_normal(shape).astype(np.float32)


def unit(*shape: int):
    found = normal(*shape)
    return found / np.linalg.norm(found, axis=-1, keepdims=True)


def shares(*shape: int):
    found = np.exp(normal(*shape))
    return found / found.sum(axis=-1, keepdims=True)


def kind(nodes: str, value, name: str = "y", states=()):
    head = f"g (float[N] x, float[K, N] w, bool[N] real) => (float[N] {name}) <float zero = {{0}}>"
    graph = model(f"{head} {{ {nodes} }}").graph
    return infer_kind(graph, name, [value, value], states)


@pytest.mark.parametrize(
    ("nodes", "value", "wanted", "axis"),
    [
        ("y = Softmax (x)", shares(2, 10), "classes", -1),
        ("s = Softmax (x) y = Squeeze (s)", shares(10), "classes", -1),
        ("y = LogSoftmax (x)", np.log(shares(2, 5, 10)), "classes", -1),
        ("y = Relu (x)", shares(2, 10), "classes", -1),  # inferred from the values
        ("y = MatMul (x, w)", normal(2, 10), "classes", -1),
        ("m = MatMul (x, w) c = Cast <to = 1> (m) y = Identity (c)", normal(2, 10), "classes", -1),
        ("y = MatMul (x, w)", normal(2, 5, 30000), "classes", -1),
        ("y = MatMul (x, w)", normal(2, 5, 9), "regression", -1),
        ("y = Softmax (x)", shares(2, 4, 8, 8), "regression", 1),  # attention weights
        ("y = Sigmoid (x)", shares(2, 1), "scores", -1),
        ("y = Sigmoid (x)", shares(2, 20), "scores", -1),
        ("y = LayerNormalization (x, x)", normal(2, 5, 32), "embedding", -1),
        (f"h = LayerNormalization (x, x) {MASKED}", normal(2, 5, 32), "embedding", -1),
        ("h = Softmax (x) y = GatherND (h, w)", shares(4).reshape(4), "regression", -1),
        ("h = Add (x, w) y = GatherND (h, w)", normal(7, 4), "regression", -1),
        ("h = LayerNormalization (x, x) y = Where (real, h, x)", normal(2, 5, 32), "regression", 1),
        ("y = Relu (x)", unit(3, 32), "embedding", -1),
        ("s = ReduceSum (x) y = Div (s, w)", normal(3, 32), "embedding", -1),
        ("y = ReduceMax (x)", normal(3, 32), "embedding", -1),
        ("s = ReduceSum (x) y = Div (s, w)", normal(3, 4), "regression", -1),  # expected values
        ("s = ReduceSum (x) y = Div (s, w)", normal(3, 4, 32), "regression", 1),
        ("m = MatMul (x, w) y = Div (m, w)", normal(2, 10), "classes", -1),  # by a temperature
        ("y = Relu (x)", normal(2, 1), "regression", -1),
        ("y = Conv (x, w)", normal(1, 3, 8, 8), "regression", 1),
        ("y = Relu (x)", normal(7), "regression", -1),
        ("y = ArgMax (x)", np.array([1, 2]), "exact", -1),
    ],
)  # fmt: skip
def test_by_operator_and_values(nodes, value, wanted, axis):
    found = kind(nodes, value)
    assert found.kind == wanted
    if wanted not in ("exact", "scores") and value.ndim > 1:
        assert found.axis == axis


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("logits", "classes"),
        ("class_probs", "classes"),
        ("last_hidden_state", "embedding"),
        ("sentence_embedding", "embedding"),
        ("pred_boxes", "regression"),
        ("landmarks", "regression"),
    ],
)
def test_by_name(name, wanted):
    assert kind(f"{name} = Relu (x)", normal(2, 6, 8), name).kind == wanted


def test_boxes_beside_scores_are_two_groups():
    value = np.concatenate([300 * normal(1, 50, 4), shares(1, 50, 6)], axis=-1)
    found = kind("y = Concat <axis = 2> (x, x)", value)
    assert found.axis == -1
    boxes, scores = found.groups
    assert (boxes.kind, boxes.channels, boxes.label) == ("regression", (0, 1, 2, 3), "channels 0-3")
    assert (scores.kind, scores.channels) == ("scores", (4, 5, 6, 7, 8, 9))


def test_channels_may_come_first():
    value = np.concatenate([300 * normal(1, 4, 500), shares(1, 6, 500)], axis=1)
    found = kind("y = Concat <axis = 1> (x, x)", value)
    assert found.axis == 1
    assert [group.kind for group in found.groups] == ["regression", "scores"]
    assert found.rows(value).shape == (500, 10)


def test_channels_of_different_scales_are_groups():
    value = normal(1, 50, 4) * np.array([1, 1, 1000, 1000], np.float32)
    found = kind("y = Concat <axis = 2> (x, x)", value)
    assert [group.channels for group in found.groups] == [(0, 1), (2, 3)]


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (3 + 0.2 * normal(8, 3) + np.array([2, 0, 1], np.float32), "regression"),
        (3 + 2 * normal(8, 3) + np.array([2, 0, 1], np.float32), "classes"),
        (3 + 0.2 * normal(1, 3) + np.array([2, 0, 1], np.float32), "classes"),  # too few to tell
        (normal(8, 1000) + 20 * np.eye(1000, dtype=np.float32)[:1], "classes"),
    ],
)
def test_numbers_with_one_constant_maximum_are_not_classes(value, wanted):
    """Ratings of a clip: one is always larger than the other."""
    assert kind("m = MatMul (x, w) y = Add (m, x)", value).kind == wanted


def blanks(positions: int, blank: float) -> np.ndarray:
    """Logits of text recognition, with this many blank positions."""
    found = normal(1, positions, 12)
    found[0, : round(blank * positions), 0] += 20
    found[0, round(blank * positions) :, 3] += 20
    return found


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (blanks(40, 0.6), "text"),
        (np.exp(blanks(40, 0.6)) / np.exp(blanks(40, 0.6)).sum(-1, keepdims=True), "text"),
        (blanks(4, 0.5), "classes"),  # too few positions
        (normal(1, 40, 12), "classes"),  # no blank
        (blanks(40, 1.0), "classes"),  # nothing to read
        (blanks(40, 0.6)[0], "classes"),
    ],
)
def test_mostly_blank_classes_are_a_text(value, wanted):
    assert kind("logits = Relu (x)", value, "logits").kind == wanted


@pytest.mark.parametrize("nodes", ["y = Relu (x)", "y = Sigmoid (x)"])
def test_an_axis_of_varying_size_has_no_channels(nodes):
    """The pitch, or the loudness, of each frame of a clip."""
    graph = model(f"g (float[N] x) => (float[N, M] y) {{ {nodes} }}").graph
    values = [np.abs(np.tanh(normal(1, length))) for length in (90, 40)]
    found = infer_kind(graph, "y", values)
    assert found.axis is None
    assert [found.rows(value).shape for value in values] == [(90, 1), (40, 1)]
    assert infer_kind(graph, "y", values[:1]).rows(values[0]).shape == (1, 90)


@pytest.mark.parametrize("lengths", [(9, 9), (9, 30)])
def test_positions_may_be_fewer_than_channels(lengths):
    """Notes of each frame: clips of two lengths show which axis is fixed."""
    graph = model("g (float[N] x) => (float[N, M, K] y) { y = Relu (x) }").graph
    values = [normal(1, length, 20) for length in lengths]
    assert infer_kind(graph, "y", values).axis == (1 if lengths[0] == lengths[1] else -1)


def test_padding_does_not_count():
    value = normal(2, 3, 8)
    mask = np.array([[1, 1, 0], [1, 0, 0]])
    found = kind("y = LayerNormalization (x, x)", value)
    rows = real_rows(found, value.shape, {"x": value, "attention_mask": mask})
    assert rows is not None
    assert rows.tolist() == [0, 1, 3]
    assert real_rows(found, value.shape, {"attention_mask": np.ones((2, 3))}) is None
    assert real_rows(found, value.shape, {"attention_mask": np.ones((2, 4))}) is None


# -- states

STATE = np.zeros((2, 1, 4), np.float32)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("state", "stateN"),
        ("h0", "hn"),
        ("mem_in", "mem_out"),
        ("input_state", "output_state"),
        ("prevHidden", "nextHidden"),
        ("initial_h", "Y_h"),
    ],
)
def test_states_are_paired(before, after):
    feed = {"x": normal(1, 8), before: STATE}
    assert state_pairs(feed, {"y": normal(1, 2), after: STATE}) == {before: after}


def test_two_states():
    feed = {"x": normal(1, 8), "h0": STATE, "c0": STATE}
    assert state_pairs(feed, {"y": normal(1), "hn": STATE, "cn": STATE}) == {"h0": "hn", "c0": "cn"}


@pytest.mark.parametrize(
    ("feed", "outputs"),
    [
        ({"input": normal(1, 8)}, {"output": normal(1, 8)}),  # an image to an image
        ({"x": normal(1, 8), "state": STATE}, {"stateN": normal(2, 1, 5)}),
        ({"ids": np.ones(3, int), "past": normal(1, 0, 4)}, {"present": normal(1, 3, 4)}),
        ({"x": normal(1, 8), "other": STATE}, {"y": STATE}),
        ({"x": normal(1, 8), "state": STATE}, {"a": STATE, "b": STATE}),
    ],
)  # fmt: skip
def test_unpaired_values_are_not_states(feed, outputs):
    assert state_pairs(feed, outputs) == {}


def test_chains():
    feeds = [{"x": np.full((1, 2), i)} for i in range(20)]
    assert [len(chain) for chain in chains(feeds, stateful=False)] == [1] * 20
    assert [len(chain) for chain in chains(feeds, stateful=True)] == [8, 8, 4]
    odd = [{"x": np.zeros((1, 2))}, {"x": np.zeros((2, 2))}]
    assert [len(chain) for chain in chains(odd, stateful=True)] == [4, 4]
