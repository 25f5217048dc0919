"""Write nodes whose result type is known."""

from __future__ import annotations

from typing import Any

from onnx import NodeProto

from toolkit.ir import Graph, TensorType


def typed_op(
    g: Graph,
    known: TensorType | None,
    op_type: str,
    *inputs: str,
    at: NodeProto | None = None,
    domain: str = "",
    **attributes: Any,
) -> str:
    """Add a node with one result of type `known`, if any, and return the result."""
    result = g.op(op_type, *inputs, domain=domain, at=at, **attributes)
    if known is not None:
        g.learn_type(result, known)
    return result
