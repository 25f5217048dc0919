"""The model of the demo, written as an exporter would write it, and a planted mistake."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from onnx import ModelProto, numpy_helper, parser

from toolkit.ir import node as nd
from toolkit.ir.graph import Graph
from toolkit.pattern import var
from toolkit.rewriting.rule import Rule, rewrite

_MODEL = Path(__file__).parent / "data" / "demo.onnxtxt"
"""The text of the model; its head explains the syntax of seeded weights."""


def planted_mistake() -> Rule:
    """Return a rule that is right in two places of the model and wrong in a third.

    It replaces x * 0.5 by x / 2, but by x * 0.6 where x is an average.
    """
    x = var("x")

    @rewrite(x * 0.5)
    def halve(g: Graph, x: str) -> str:
        if nd.is_op(g.producer(x), "ReduceMean"):
            return g.op("Mul", x, g.constant(np.array(0.6, np.float32)))
        return g.op("Div", x, g.constant(np.array(2, np.float32)))

    return halve


def build() -> ModelProto:
    """Return the model, with the same bytes at every call."""
    model = parser.parse_model(_MODEL.read_text(encoding="utf-8"))
    random = np.random.default_rng(7)
    for tensor in model.graph.initializer:
        first, *last = tensor.float_data
        if last:
            values = np.linspace(first, last[0], tensor.dims[0])
        else:
            values = first * random.standard_normal(tensor.dims)
        tensor.CopyFrom(numpy_helper.from_array(values.astype(np.float32), tensor.name))
    return model
