"""Weights as a model stores them: type checks, and removal of dead constants."""

from __future__ import annotations

from onnx import TensorProto

from toolkit.ir import FLOATS, Graph, node as nd
from toolkit.rewriting.match_failure import MatchFailure


def float_weights(g: Graph, name: str, rank: int) -> tuple[int, ...] | None:
    """Return the shape of constant float32 weights; None for computed or quantized ones.

    Raise MatchFailure for other floats, for other ranks unless `rank` is 0, and for empty weights.
    """
    tensor = g.tensor(name) if name else None
    if tensor is None or tensor.data_type not in FLOATS:
        return None
    require_float32(tensor)
    if rank and len(tensor.dims) != rank:
        raise MatchFailure(f"weights of rank {len(tensor.dims)}, not {rank}")
    if not all(tensor.dims):
        raise MatchFailure("empty weights")
    return tuple(tensor.dims)


def require_float32(tensor: TensorProto) -> None:
    """Raise MatchFailure for weights of any other type."""
    if tensor.data_type != TensorProto.FLOAT:
        kind = TensorProto.DataType.Name(tensor.data_type).lower()
        remedy = "; run the pass fp32 first" if kind.endswith("float16") else ""
        raise MatchFailure(f"weights of {kind}, and only 32-bit floats are quantized{remedy}")


def drop_unused(g: Graph, name: str) -> None:
    """Remove an unused constant, and the DequantizeLinear that produced it.

    Graph inputs and pinned tensors stay.
    """
    scope = g.scope_of(name)
    if scope is None or not scope.is_unused(name):
        return
    producer = scope.producer(name)
    operands = nd.inputs_of(producer) if producer is not None else []
    if producer is not None:
        scope.prune(producer)
    for stored in (name, *operands):
        unused = stored in scope.initializers and scope.is_unused(stored)
        if unused and not scope.is_pinned(stored) and not scope.is_input(stored):
            scope.drop_initializer(stored)
