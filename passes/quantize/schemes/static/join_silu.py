"""Islands of floats between int8 layers, each as one operator.

SiLU as two operators of floats reads its input twice, and the runtime then converts it for each of
them. Written as one operator it takes about as long as in int8. The value keeps its name, by which
a plan knows its range.
"""

from __future__ import annotations

from onnx import NodeProto, TensorProto

from toolkit.ir import node as nd
from toolkit.ir.graph import Graph
from toolkit.ir.model import Model
from toolkit.quantization.plan import Plan


def raise_islands(model: Model, plan: Plan) -> None:
    """Make one QuickGelu of each x sigmoid(x) that the plan leaves in floats."""
    for g, node in list(model.places()):
        if not nd.is_op(node, "Mul") or _is_quantized(plan, node):
            continue
        gate = _gate(g, node)
        if gate is None or _is_quantized(plan, gate):
            continue
        x = gate.input[0]
        if g.dtype(x) != TensorProto.FLOAT or not g.begin("silu-island", node):
            continue
        g.set_op(node, "QuickGelu", "com.microsoft")
        g.set_inputs(node, [x])
        g.set_attr(node, "alpha", 1.0)
        g.prune(gate)


def _gate(g: Graph, node: NodeProto) -> NodeProto | None:
    """The Sigmoid of a factor by which the other is multiplied."""
    for slot in (0, 1):
        maker, other = g.producer(node.input[slot]), node.input[1 - slot]
        if maker is not None and nd.is_op(maker, "Sigmoid") and maker.input[0] == other:
            return maker
    return None


def _is_quantized(plan: Plan, node: NodeProto) -> bool:
    entry = plan.find(node)
    return entry is not None and entry.scheme != "float"
