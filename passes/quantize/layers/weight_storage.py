"""Weights as a model stores them: which are quantized, and what becomes of those nobody reads."""

from __future__ import annotations

from onnx import TensorProto

from toolkit.ir import node as nd
from toolkit.ir.graph import Graph
from toolkit.rewriting.match_failure import Miss


def require_float32(tensor: TensorProto) -> None:
    """A Miss for weights of any other type."""
    if tensor.data_type != TensorProto.FLOAT:
        kind = TensorProto.DataType.Name(tensor.data_type).lower()
        remedy = "; fp32 in front of it helps" if kind.endswith("float16") else ""
        raise Miss(f"weights of {kind}, and only 32-bit floats are quantized{remedy}")


def drop_unused(g: Graph, name: str) -> None:
    """Remove a constant that nobody reads any more, with the DequantizeLinear that made it.

    A caller's input and a pinned tensor stay.
    """
    scope = g.scope_of(name)
    if scope is None or not scope.is_unused(name):
        return
    maker = scope.producer(name)
    read = list(nd.inputs_of(maker)) if maker is not None else []
    if maker is not None:
        scope.prune(maker)
    for stored in (name, *read):
        free = stored in scope.initializers and scope.is_unused(stored)
        if free and not scope.is_pinned(stored) and not scope.is_input(stored):
            scope.drop_initializer(stored)
