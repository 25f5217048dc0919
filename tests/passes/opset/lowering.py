"""Lower models one opset at a time and compare each with the original."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx

from passes.opset.opset import Opset
from tests.checks import random_feeds
from tests.passes.opset.lifting import assert_same, model_of, outline
from toolkit.ir.model import Model
from toolkit.pass_manager.protocol import Context
from toolkit.runtime.session import Session


def lower(proto: onnx.ModelProto, to: int) -> tuple[Model, list[str]]:
    model, ctx = Model.from_proto(proto), Context()
    Opset(to=to).run(model, ctx)
    return model, ctx.notes


def check_lowered(
    opset: int,
    text: str,
    lowest: int = 9,
    reason: str = "",
    relative: float = 1e-6,
    inputs: Mapping[str, Any] | None = None,
) -> Model:
    """Lower the model to every opset down to `lowest`; each result computes the same.

    Below `lowest` the model stays there for this `reason`. Returns the model at `lowest`.
    """
    proto = model_of(opset, text, ir=10)
    original = Model.from_proto(proto)
    feeds = dict(inputs) if inputs is not None else random_feeds(original)
    expected = Session(original).run(feeds)
    model = original
    for to in range(opset - 1, lowest - 1, -1):
        model, notes = lower(proto, to)
        assert not any("stays at" in note for note in notes), notes
        model.graph.verify()
        assert model.opsets[""] == to
        onnx.checker.check_model(model.inlined_proto(), full_check=True)
        assert_same(expected, Session(model).run(feeds), relative)
    if lowest > 9:
        stuck, notes = lower(proto, lowest - 1)
        assert stuck.opsets[""] == lowest
        assert reason, notes
        assert f"needs opset {lowest}: " in notes[0]
        assert reason in notes[0], notes
    changed, _ = lower(proto, lowest)
    changed.journal.rollback()
    assert _unordered(changed) == _unordered(original)
    return model


def _unordered(model: Model) -> list[Any]:
    nodes, inputs, outputs, initializers, *rest = outline(model)
    return [nodes, inputs, outputs, sorted(initializers), *rest]
