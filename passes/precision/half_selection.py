"""Which nodes can compute in 16-bit floats, and with which of their inputs and outputs.

A node stays in 32 bits when

- its operator, as ONNX defines it, takes no 16-bit floats, or its output's type is an attribute;
- it sums or raises to powers, or the user keeps it;
- a constant of it is beyond 65504, or would become zero (the 1e-12 under a root);
- the runtime crashes when it loads it in 16 bits;
- it reads or makes a value that may be beyond 65504: as seen in calibration data; without any, what
  comes of such constants and of exponents and squares, up to an operator that bounds it.

Subgraphs keep their inputs and outputs, so nodes that have one do. What only moves data between
nodes of 32 bits stays with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from onnx import NodeProto, TensorProto

from passes.analysis.node_filter import matches
from toolkit.calibrate.statistics import Range
from toolkit.ir import node as nd
from toolkit.ir.graph import Graph
from toolkit.ir.model import Model
from toolkit.ir.op_schema import schema_of

LARGEST = float(np.finfo(np.float16).max)
_VANISHED = 0.01
"""Of a weight, this share of what is not zero may become zero."""
_FEW = 64
"""Of fewer numbers than this, none may: an epsilon, a factor."""

_KEPT = frozenset(
    (
        *("Range", "CumSum", "Pow", "Exp", "Softplus", "Mod", "NonMaxSuppression", "LRN"),
        *("ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceLogSum", "ReduceLogSumExp"),
        *("ReduceProd", "DFT", "STFT", "MelWeightMatrix"),
        *("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"),
    )
)
_GROWS = frozenset(("Pow", "Exp", "ReduceSumSquare", "ReduceProd"))
_BOUNDS = frozenset(
    (
        *("Softmax", "LogSoftmax", "Sigmoid", "HardSigmoid", "Tanh", "Erf", "Sqrt", "Log"),
        *("LayerNormalization", "RMSNormalization", "InstanceNormalization", "GroupNormalization"),
        *(
            "BatchNormalization",
            "Attention",
            "Clip",
            "MultiHeadAttention",
            "Softsign",
            "Reciprocal",
        ),
    )
)
_MOVES = frozenset(
    (
        *("Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Concat", "Split"),
        *("Slice", "Gather", "GatherND", "GatherElements", "Expand", "Tile", "DepthToSpace"),
        *("SpaceToDepth", "Pad", "Shape", "Size", "ReverseSequence"),
    )
)
_CONTRIBUTED = frozenset(
    f"com.microsoft::{op}"
    for op in (
        *("FusedMatMul", "Gelu", "FastGelu", "BiasGelu", "QuickGelu", "MatMulNBits"),
        *("MultiHeadAttention", "SkipLayerNormalization", "SkipSimplifiedLayerNormalization"),
    )
)
"""Of onnxruntime's own: all floats of theirs have one type."""


@dataclass(frozen=True, slots=True)
class Slots:
    """The inputs and outputs of a node, by place, that become 16-bit floats."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(slots=True)
class Choice:
    """What becomes of each node: `halves` by identity, and of the others the label and why."""

    halves: dict[int, Slots] = field(default_factory=dict[int, Slots])
    kept: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])


def choose(model: Model, keep: Sequence[str], ranges: Mapping[str, Range] | None) -> Choice:
    """Decide on all nodes; `ranges` are of values of the main graph, where they were seen."""
    choice = Choice()
    wide = _Wide(ranges)
    for graph in model.graphs():
        for node in graph.nodes:
            found = _decide(graph, node, keep, wide)
            if isinstance(found, Slots):
                choice.halves[id(node)] = found
            elif found:
                choice.kept.append((nd.label(node), found))
        for node in reversed(graph.nodes):
            if id(node) in choice.halves and _is_between(graph, node, choice):
                del choice.halves[id(node)]
    return choice


@dataclass(slots=True)
class _Wide:
    """The values that may be beyond 16 bits."""

    ranges: Mapping[str, Range] | None
    names: set[str] = field(default_factory=set[str])

    def seen(self, name: str) -> bool:
        found = self.ranges.get(name) if self.ranges is not None else None
        if found is not None:
            return max(-found.low, found.high) > LARGEST
        return name in self.names

    def pass_on(self, node: NodeProto, reads_wide: bool) -> None:
        """Note what a node makes of a wide value, or of any where its results grow."""
        grows = self.ranges is None and nd.is_op(node, *_GROWS)
        if (reads_wide and node.op_type not in _BOUNDS) or grows:
            self.names.update(nd.outputs_of(node))


def _crashes(g: Graph, node: NodeProto) -> bool:
    """A Transpose of batch and sequence before a MatMul, as torch's own attention has: onnxruntime
    1.31 puts a Cast between the two, and swaps what it finds in the wrong order."""
    if not nd.is_op(node, "Transpose") or list(nd.attr(node, "perm", ())) != [1, 0, 2]:
        return False
    return any(nd.is_op(reader, "MatMul") for reader in g.users(node.output[0]))


def _decide(g: Graph, node: NodeProto, keep: Sequence[str], wide: _Wide) -> Slots | str:
    """The slots of a node that can be halved; else why not, blank where there is no question."""
    values = [*nd.inputs_of(node), *nd.outputs_of(node)]
    if not any(g.dtype(name) == TensorProto.FLOAT for name in values) or nd.is_op(node, "Constant"):
        return ""
    bad = _unfit_constant(g, node)
    reads = [n for n in nd.inputs_of(node) if g.dtype(n) == TensorProto.FLOAT]
    reads_wide = any(wide.seen(name) for name in reads) or bad.startswith("a constant beyond")
    wide.pass_on(node, reads_wide)
    if nd.is_op(node, "Cast", "CastLike"):
        return ""
    if g.subgraphs(node):
        return "it has a subgraph"
    if matches(node, keep):
        return "as asked for"
    if nd.domain_of(node) == "" and node.op_type in _KEPT:
        return f"{node.op_type} loses too much in 16 bits"
    if bad:
        return bad
    if _crashes(g, node):
        return "onnxruntime crashes when it loads it in 16 bits"
    if reads_wide or any(wide.seen(name) for name in nd.outputs_of(node)):
        return f"values that may be beyond {LARGEST:.0f}"
    if any(not g.dtype(name) for name in values):
        return "values of unknown type"
    return _slots(g, node) or "no 16-bit form of it"


def _slots(g: Graph, node: NodeProto) -> Slots | None:
    places = [i for i, n in enumerate(node.input) if n and g.dtype(n) == TensorProto.FLOAT]
    made = [i for i, n in enumerate(node.output) if n and g.dtype(n) == TensorProto.FLOAT]
    if nd.qualified(node) in _CONTRIBUTED:
        return Slots(tuple(places), tuple(made)) if len(nd.outputs_of(node)) == 1 else None
    domain = nd.domain_of(node)
    schema = schema_of(node.op_type, g.opset(domain), domain)
    if schema is None:
        return None
    halved = {c.type_param_str for c in schema.type_constraints
              if "tensor(float16)" in c.allowed_type_strs}  # fmt: skip
    read = {i: schema.inputs[min(i, len(schema.inputs) - 1)].type_str for i in places}
    written = {i: schema.outputs[min(i, len(schema.outputs) - 1)].type_str for i in made}
    if any(kind not in halved and kind != "tensor(float)" for kind in read.values()):
        return None
    inputs = tuple(i for i, kind in read.items() if kind in halved)
    given = {read[i] for i in inputs}
    if any(kind not in given and kind != "tensor(float)" for kind in written.values()):
        return None  # the type of an output is an attribute's
    outputs = tuple(i for i, kind in written.items() if kind in halved)
    return Slots(inputs, outputs) if inputs else None


def _unfit_constant(g: Graph, node: NodeProto) -> str:
    """What is wrong with the constants of a node, if anything."""
    for name in nd.inputs_of(node):
        tensor = g.tensor(name)
        if tensor is None or tensor.data_type != TensorProto.FLOAT:
            continue
        array = g.const(name)
        reason = unfit(array) if array is not None else ""
        if reason:
            return f"a constant {reason}"
    return ""


def unfit(array: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> str:
    """Why 32-bit floats cannot be had in 16 bits; blank when they can. Infinities can."""
    there = lost = 0
    flat = array.reshape(-1)
    for start in range(0, flat.size, 1 << 20):
        piece = flat[start : start + (1 << 20)]
        sizes = np.abs(piece[np.isfinite(piece)])
        if sizes.size and float(sizes.max()) > LARGEST:
            return f"beyond {LARGEST:.0f}"
        there += int(np.count_nonzero(sizes))
        lost += int(np.count_nonzero((sizes > 0) & (sizes <= 2.0**-25)))
    if lost > (_VANISHED * there if flat.size >= _FEW else 0):
        return "that would be zero in 16 bits" if flat.size < _FEW else "of which too much vanishes"
    return ""


def _is_between(g: Graph, node: NodeProto, choice: Choice) -> bool:
    """Whether a node moves data from nodes of 32 bits to such nodes only."""
    if nd.domain_of(node) or node.op_type not in _MOVES:
        return False
    for name in nd.inputs_of(node):
        maker = g.producer(name)
        if g.dtype(name) == TensorProto.FLOAT and not g.is_const(name):
            if maker is None and g.is_defined(name):
                continue  # an input
            if maker is None or id(maker) in choice.halves:
                return False
    users = [user for name in nd.outputs_of(node) for user in g.users(name)]
    return not any(id(user) in choice.halves for user in users)
