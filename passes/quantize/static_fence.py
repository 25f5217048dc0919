"""Keeping floats float between layers in 8 bits.

onnxruntime fuses whatever stands between a DQ and a Q, asked or not: a Conv or Gemm with float
weights gets weights in int8 with one scale for all of them, and an AveragePool or a Softmax a
kernel that is many times slower than floats. A `Sum` of one operand in front of the Q, which the
runtime neither removes nor fuses, keeps them as they are.
"""

from __future__ import annotations

from onnx import NodeProto

from passes.quantize.static_sites import bounds_of
from toolkit import nodes as nd
from toolkit.graph import Graph

_FUSED = ("Conv", "ConvTranspose", "Gemm", "AveragePool", "Softmax")


def fence(g: Graph, written: set[int]) -> None:
    """Fence what is not among the `written` nodes, and stands between a DQ and Qs alone."""
    for node in list(g.nodes):
        if id(node) in written or not nd.is_op(node, *_FUSED):
            continue
        if not nd.is_op(g.producer(node.input[0]), "DequantizeLinear"):
            continue
        result = _last(g, node)
        readers = g.users(result)
        if g.is_output(result) or not readers:
            continue
        if all(_leads_to_q(g, user) for user in readers) and g.begin("keep-float", node):
            kept = g.add("Sum", [result], at=node)
            g.replace(result, kept.output[0])
            g.set_input(kept, 0, result)


def _last(g: Graph, node: NodeProto) -> str:
    """What the node makes, behind Relus and Clips that alone read it."""
    value = node.output[0]
    while True:
        users = g.users(value)
        if len(users) != 1 or g.use_count(value) != 1 or bounds_of(g, users[0]) is None:
            return value
        value = users[0].output[0]


def _leads_to_q(g: Graph, node: NodeProto) -> bool:
    """Whether the node is a Q, or passes on to Qs alone what it reads, so that the Qs move up."""
    while nd.is_op(node, "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Slice"):
        users = g.users(node.output[0])
        if len(users) != 1 or g.is_output(node.output[0]):
            return False
        node = users[0]
    return nd.is_op(node, "QuantizeLinear")
