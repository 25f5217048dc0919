"""Lift models to many opsets and compare each with the original."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, parser

from passes.opset.opset import Opset
from tests.checks import random_feeds
from toolkit.ir.model import Model
from toolkit.pass_manager.protocol import Context
from toolkit.runtime.session import Session
from toolkit.settings import Settings

TARGETS = (7, 9, 11, 13, 18, 21, 23, 26)


def lift(proto: onnx.ModelProto, to: int, target: str = "ort-cpu") -> tuple[Model, list[str]]:
    model, ctx = Model.from_proto(proto), Context(Settings(target=target))
    Opset(to=to).run(model, ctx)
    return model, ctx.notes


def model_of(opset: int, text: str, ir: int = 8) -> onnx.ModelProto:
    return parser.parse_model(f'<ir_version: {ir}, opset_import: ["" : {opset}]> g {text}')


def assert_same(expected: Any, actual: Any, relative: float = 1e-6) -> None:
    if isinstance(expected, list):
        assert len(expected) == len(actual)
        for a, b in zip(expected, actual, strict=True):
            assert_same(a, b, relative)
        return
    if expected is None or actual is None:
        assert expected is actual
        return
    expected, actual = np.asarray(expected), np.asarray(actual)
    assert (expected.shape, expected.dtype) == (actual.shape, actual.dtype)
    if expected.dtype.kind != "f":
        assert np.array_equal(expected, actual)
        return
    if expected.dtype == np.float16:
        relative = max(relative, 2.0**-8)
    a, b = expected.astype(np.float64), actual.astype(np.float64)
    scale = np.abs(a[np.isfinite(a)]).max(initial=0)
    np.testing.assert_allclose(b, a, rtol=0, atol=relative * scale)


def check_structure(model: Model, opset: int) -> None:
    model.graph.verify()
    assert model.opsets[""] == opset
    versions = helper.OP_SET_ID_VERSION_MAP
    assert versions["ai.onnx", max(5, opset)] <= model.ir_version <= 13
    onnx.checker.check_model(model.inlined_proto(), full_check=True)


def outline(model: Model) -> list:
    """All that a lift may change, attributes in any order."""
    nodes = [
        (n.op_type, list(n.input), list(n.output), sorted(map(repr, n.attribute)))
        for graph in model.graphs()
        for n in graph.nodes
    ]
    graph = model.graph
    return [
        nodes,
        graph.inputs,
        graph.outputs,
        list(graph.initializers),
        model.opsets,
        model.ir_version,
    ]


def check(
    opset: int,
    text: str,
    reference: Callable[..., Sequence[Any]] | None = None,
    relative: float = 1e-6,
    upto: int = 26,
) -> None:
    """Lift the model to many opsets; each result must compute the same as the original.

    The original runs in onnxruntime; where that has no kernel so old, `reference` computes it.
    """
    proto = model_of(opset, text)
    original = Model.from_proto(proto)
    feeds = random_feeds(original)
    expected = Session(original).run(feeds) if reference is None else reference(**feeds)
    for to in TARGETS:
        if to <= opset or to > upto:
            continue
        model, notes = lift(proto, to)
        assert not any("stays at" in note for note in notes), notes
        check_structure(model, to)
        if to >= 7:
            assert_same(list(expected), Session(model).run(feeds), relative)
        edits = len(model.journal)
        Opset(to=to).run(model, Context())
        assert len(model.journal) == edits, "a second lift changed something"
        model.journal.rollback()
        assert outline(model) == outline(original)
