"""Tensors that 8 bits do not hold: which are named, and which are not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from passes.quantize.diagnostics import (
    feature_troubles,
    note_troubles,
    range_troubles,
    weight_troubles,
)
from passes.quantize.schemes.dynamic.quantize_dynamic import QuantizeDynamic
from passes.quantize.schemes.static.quantize_static import QuantizeStatic
from tests.checks import model
from tests.passes.fuse.constants import floats, typed
from toolkit.calibrate.data import Calib
from toolkit.calibrate.observers import MinMax, Mse, Observer
from toolkit.ir.graph import Array
from toolkit.ir.model import Model
from toolkit.pass_manager.protocol import Context

SIGNATURE = "g (float[N, 400] x) => (float[N, 3] y)"


def layer(change: tuple[int, int, float] | None = None) -> Model:
    subject = model(typed(SIGNATURE, floats("w", 400, 3), "y = MatMul (x, w)"))
    if change is not None:
        weights = np.array(subject.graph.const("w"))
        weights[change[:2]] = change[2]
        subject.graph.put_initializer(subject.weights.put("w", weights))
    return subject


def troubles(values: Array, observer: Observer) -> list[str]:
    feeds = [{"x": row.reshape(1, 400).astype(np.float32)} for row in values]
    subject = layer()
    found = Calib(feeds).open(subject).collect(subject, {"x": observer})
    return [str(trouble) for trouble in range_troubles(found)]


def test_weights() -> None:
    assert list(weight_troubles(layer())) == []
    assert "not finite" in str(*weight_troubles(layer((7, 1, np.nan))))
    assert list(weight_troubles(layer((7, 1, 5.0)))) == []
    assert "in 1 of 3 outputs" in str(*weight_troubles(layer((7, 1, 500.0))))
    assert "in 1 of 3 outputs" in str(*weight_troubles(layer((7, 1, 1e6))))


def test_a_channel_that_is_one_weight_is_no_trouble() -> None:
    """As a normalization leaves it that has all but switched it off."""
    subject = layer((7, 1, 5.0))
    weight = np.array(subject.graph.const("w"))
    weight[:, 1] *= 1e-9
    weight[7, 1] = 5.0
    subject.graph.set_input(subject.graph.nodes[0], 1, subject.graph.constant(weight, "v"))
    assert list(weight_troubles(subject)) == []


def test_zeros_are_no_trouble() -> None:
    subject = layer()
    weights = np.zeros((400, 3), np.float32)
    subject.graph.put_initializer(subject.weights.put("w", weights))
    assert list(weight_troubles(subject)) == []
    weights[7, 1] = 0.1
    subject.graph.put_initializer(subject.weights.put("w", weights))
    assert list(weight_troubles(subject)) == [], "one number and zeros are exact"


@pytest.mark.parametrize("observer", [Mse(), MinMax()])
def test_ranges(observer: Observer) -> None:
    usual = np.random.default_rng(0).standard_normal((20, 400))
    assert troubles(usual, observer) == []
    assert troubles(np.maximum(usual, 0), observer) == []
    usual[3, 5] = 1000
    (found,) = troubles(usual, observer)
    assert found.startswith("'x': its largest value is ")
    assert "try smooth" in found


@pytest.mark.parametrize("observer", [Mse(), MinMax()])
def test_values_that_hardly_differ(observer: Observer) -> None:
    values = 100 + np.random.default_rng(0).uniform(-0.1, 0.1, (4, 400))
    (found,) = troubles(values, observer)
    assert "nearly constant" in found
    assert troubles(values - 100, observer) == []
    assert troubles(np.zeros((2, 400)), observer) == []


def features(values: Array) -> list[str]:
    subject = layer()
    data = Calib([{"x": values.astype(np.float32)}]).open(subject)
    return [str(trouble) for trouble in feature_troubles(subject, data)]


def test_features_that_take_the_range() -> None:
    """One scale is for all of them: of 400, 25 may be so before that is how they are."""
    values = np.random.default_rng(0).standard_normal((20, 400))
    assert features(values) == []
    assert features(np.zeros((2, 400))) == []
    values[:, 5] *= 100
    (found,) = features(values)
    assert found.startswith("'x': 1 of 400 features reach ")
    assert "try smooth" in found
    values[:, 5] = 1000 + values[:, 5] / 1e4
    assert "they hardly vary" in str(*features(values))
    values[:, :26] = values[:, 5:6]
    assert features(values) == []


@pytest.mark.parametrize("item", [QuantizeDynamic(min_elements=0), QuantizeStatic()])
def test_passes_name_what_is_hard(item: Any) -> None:
    subject = layer((7, 1, 500.0))
    values = np.ones((4, 400), np.float32)
    values[:, 5] = 1000
    ctx = Context(calibration=Calib([{"x": values}]).open(subject))
    item.run(subject, ctx)
    assert "in 1 of 3 outputs" in ctx.notes[0]
    assert "1 of 400 features" in ctx.notes[1]


def test_notes_are_bounded() -> None:
    subject = layer((7, 1, np.inf))
    (trouble,) = weight_troubles(subject)
    ctx = Context()
    note_troubles([trouble] * 9, ctx)
    assert len(ctx.notes) == 2
    assert "4 more" in ctx.notes[1]
