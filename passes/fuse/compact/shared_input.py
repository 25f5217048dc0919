"""Linear maps that read the same value: the projections of an attention, gate and up of an MLP.

    x A, x B, x C  =  the parts of x [A B C]

Here they are only found. Kept apart they are as fast as merged into one on today's kernels, so
whether to merge them is the lowering's choice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from onnx import NodeProto

from passes.analysis.operands import given
from toolkit.ir import node as nd
from toolkit.ir.graph import Graph
from toolkit.ir.tensor_type import FLOATS


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """MatMuls, or Gemms alike but for their constants, that read `source`, in graph order."""

    source: str
    nodes: tuple[NodeProto, ...]
    inputs: int
    outputs: tuple[int, ...]


class _Kind(NamedTuple):
    """What the members of a group have in common."""

    source: str
    inputs: int
    op_type: str
    dtype: int
    is_turned: bool


def groups(g: Graph) -> list[Group]:
    """All groups of two or more nodes; a node is in one group at most."""
    found: dict[_Kind, list[tuple[NodeProto, int]]] = defaultdict(list)
    for node in g.nodes:
        member = _member(g, node)
        if member is not None:
            found[member[0]].append((node, member[1]))
    return [_group(kind, members) for kind, members in found.items() if len(members) > 1]


def _member(g: Graph, node: NodeProto) -> tuple[_Kind, int] | None:
    """The group that a node belongs to, and its number of outputs."""
    if not nd.is_op(node, "MatMul", "Gemm") or g.is_const(node.input[0]):
        return None
    weight = g.tensor(node.input[1])
    if weight is None or len(weight.dims) != 2 or weight.data_type not in FLOATS:
        return None
    if nd.is_op(node, "Gemm") and not _is_plain(g, node):
        return None
    is_turned = bool(nd.attr(node, "transB", 0))
    inputs, outputs = reversed(weight.dims) if is_turned else weight.dims
    return _Kind(node.input[0], inputs, node.op_type, weight.data_type, is_turned), outputs


def _is_plain(g: Graph, node: NodeProto) -> bool:
    """Whether a Gemm is x W + b with a constant b."""
    factors = nd.attr(node, "alpha", 1.0), nd.attr(node, "beta", 1.0)
    bias = given(node, 2)
    is_constant = not bias or g.is_const(bias)
    return factors == (1.0, 1.0) and not nd.attr(node, "transA", 0) and is_constant


def _group(kind: _Kind, members: Sequence[tuple[NodeProto, int]]) -> Group:
    nodes, outputs = zip(*members, strict=True)
    return Group(kind.source, nodes, kind.inputs, outputs)
