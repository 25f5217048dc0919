"""Select the nodes that can compute in float16, with their float16 inputs and outputs.

A node stays in float32 if

- its ONNX operator does not support float16, or an attribute sets the type of its output;
- it computes sums or powers, or the user excludes it;
- one of its constants exceeds 65504, or would underflow (the 1e-12 under a root);
- onnxruntime crashes when it loads the node in float16;
- an operand or a result may exceed 65504, according to calibration data. Without such data, results
  of large constants, exponentials and squares may, up to the next operator with bounded results.

Nodes with subgraphs stay in float32, and so does data movement between float32 nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from onnx import NodeProto, TensorProto

from passes.analysis.node_filter import matches
from toolkit.calibrate.statistics import Range
from toolkit.ir import Graph, Model, node as nd
from toolkit.ir.op_schema import schema_of
from toolkit.ir.op_traits import MOVEMENT, ONE_FLOAT_TYPE, has_trait

MAX_HALF = float(np.finfo(np.float16).max)
_MAX_UNDERFLOW = 0.01
"""Largest fraction of the nonzero elements of a weight that may underflow to zero."""
_FEW = 64
"""In a constant with fewer elements (an epsilon, a factor), none may underflow."""

_KEPT = frozenset(
    (
        *("Range", "CumSum", "Pow", "Exp", "Softplus", "Mod", "NonMaxSuppression", "LRN"),
        *("ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceLogSum", "ReduceLogSumExp"),
        *("ReduceProd", "DFT", "STFT", "MelWeightMatrix"),
        *("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"),
    )
)
"""Operators that lose too much precision in float16, or whose types must not change."""
_GROWS = frozenset(("Pow", "Exp", "ReduceSumSquare", "ReduceProd"))
"""Operators whose results may exceed the range of float16."""
_BOUNDS = frozenset(
    (
        *("Softmax", "LogSoftmax", "Sigmoid", "HardSigmoid", "Tanh", "Erf", "Sqrt", "Log"),
        *("LayerNormalization", "RMSNormalization", "InstanceNormalization", "GroupNormalization"),
        *("BatchNormalization", "Attention", "MultiHeadAttention"),
        *("Clip", "Softsign", "Reciprocal"),
    )
)
"""Operators whose results are usually within the range of float16."""
_MOVES = MOVEMENT | {"Concat", "Pad", "Shape", "Size"}


@dataclass(frozen=True, slots=True)
class Slots:
    """The indices of the inputs and outputs of a node that become float16."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(slots=True)
class HalfNodes:
    """The slots of float16 nodes by node id, and the labels and reasons of other nodes."""

    halves: dict[int, Slots] = field(default_factory=dict[int, Slots])
    kept: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])


def select_nodes(
    model: Model, keep: Sequence[str], ranges: Mapping[str, Range] | None
) -> HalfNodes:
    """Select float16 nodes; `ranges` are calibration ranges of values of the main graph."""
    selected = HalfNodes()
    wide = _Wide(ranges)
    for graph in model.graphs():
        for node in graph.nodes:
            found = _decide(graph, node, keep, wide)
            if isinstance(found, Slots):
                selected.halves[id(node)] = found
            elif found:
                selected.kept.append((nd.label(node), found))
        for node in reversed(graph.nodes):
            if id(node) in selected.halves and _is_between(graph, node, selected):
                del selected.halves[id(node)]
    return selected


@dataclass(slots=True)
class _Wide:
    """The values that may exceed the range of float16."""

    ranges: Mapping[str, Range] | None
    names: set[str] = field(default_factory=set[str])

    def may_exceed(self, name: str) -> bool:
        found = self.ranges.get(name) if self.ranges is not None else None
        if found is not None:
            return max(-found.low, found.high) > MAX_HALF
        return name in self.names

    def propagate(self, node: NodeProto, from_wide: bool) -> None:
        """Record the results of a node with a wide operand, or with results that grow."""
        grows = self.ranges is None and nd.is_op(node, *_GROWS)
        if (from_wide and node.op_type not in _BOUNDS) or grows:
            self.names.update(nd.outputs_of(node))


def _crashes(g: Graph, node: NodeProto) -> bool:
    """Whether onnxruntime 1.31 crashes: on a Transpose of batch and sequence before a MatMul, as in
    torch's attention, it inserts a Cast between them and swaps them incorrectly."""
    if not nd.is_op(node, "Transpose") or list(nd.attr(node, "perm", ())) != [1, 0, 2]:
        return False
    return any(nd.is_op(user, "MatMul") for user in g.users(node.output[0]))


def _decide(g: Graph, node: NodeProto, keep: Sequence[str], wide: _Wide) -> Slots | str:
    """Return the float16 slots of a node, or why it stays in float32; blank without floats."""
    values = [*nd.inputs_of(node), *nd.outputs_of(node)]
    if not any(g.dtype(name) == TensorProto.FLOAT for name in values) or nd.is_op(node, "Constant"):
        return ""
    bad = _unfit_constant(g, node)
    floats = [n for n in nd.inputs_of(node) if g.dtype(n) == TensorProto.FLOAT]
    from_wide = any(map(wide.may_exceed, floats)) or bad.startswith("a constant beyond")
    wide.propagate(node, from_wide)
    if nd.is_op(node, "Cast", "CastLike"):
        return ""
    if g.subgraphs(node):
        return "it has a subgraph"
    if matches(node, keep):
        return "excluded by keep"
    if nd.domain_of(node) == "" and node.op_type in _KEPT:
        return f"{node.op_type} loses too much precision in 16 bits"
    if bad:
        return bad
    if _crashes(g, node):
        return "onnxruntime crashes when loading it in 16 bits"
    if from_wide or any(map(wide.may_exceed, nd.outputs_of(node))):
        return f"its values may exceed {MAX_HALF:.0f}"
    if any(not g.dtype(name) for name in values):
        return "its types are unknown"
    return _slots(g, node) or "the operator does not support 16 bits"


def _slots(g: Graph, node: NodeProto) -> Slots | None:
    operands = [i for i, n in enumerate(node.input) if n and g.dtype(n) == TensorProto.FLOAT]
    results = [i for i, n in enumerate(node.output) if n and g.dtype(n) == TensorProto.FLOAT]
    if has_trait(node, ONE_FLOAT_TYPE):
        return Slots(tuple(operands), tuple(results)) if len(nd.outputs_of(node)) == 1 else None
    domain = nd.domain_of(node)
    schema = schema_of(node.op_type, g.opset(domain), domain)
    if schema is None:
        return None
    halved = {c.type_param_str for c in schema.type_constraints
              if "tensor(float16)" in c.allowed_type_strs}  # fmt: skip
    read = {i: schema.inputs[min(i, len(schema.inputs) - 1)].type_str for i in operands}
    written = {i: schema.outputs[min(i, len(schema.outputs) - 1)].type_str for i in results}
    if any(kind not in halved and kind != "tensor(float)" for kind in read.values()):
        return None
    inputs = tuple(i for i, kind in read.items() if kind in halved)
    given = {read[i] for i in inputs}
    if any(kind not in given and kind != "tensor(float)" for kind in written.values()):
        return None  # an attribute sets the type of an output
    outputs = tuple(i for i, kind in written.items() if kind in halved)
    return Slots(inputs, outputs) if inputs else None


def _unfit_constant(g: Graph, node: NodeProto) -> str:
    """Return why a constant of the node does not fit float16, or blank."""
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
    """Return why a float32 array does not fit float16, or blank. Infinities fit."""
    nonzero = lost = 0
    flat = array.reshape(-1)
    for start in range(0, flat.size, 1 << 20):
        piece = flat[start : start + (1 << 20)]
        sizes = np.abs(piece[np.isfinite(piece)])
        if sizes.size and float(sizes.max()) > MAX_HALF:
            return f"beyond {MAX_HALF:.0f}"
        nonzero += int(np.count_nonzero(sizes))
        lost += int(np.count_nonzero((sizes > 0) & (sizes <= 2.0**-25)))
    if lost > (_MAX_UNDERFLOW * nonzero if flat.size >= _FEW else 0):
        return "that underflows in 16 bits" if flat.size < _FEW else "with too much underflow"
    return ""


def _is_between(g: Graph, node: NodeProto, selected: HalfNodes) -> bool:
    """Whether a node only moves data between float32 nodes."""
    if nd.domain_of(node) or node.op_type not in _MOVES:
        return False
    for name in nd.inputs_of(node):
        producer = g.producer(name)
        if g.dtype(name) == TensorProto.FLOAT and not g.is_const(name):
            if producer is None and g.is_defined(name):
                continue  # an input
            if producer is None or id(producer) in selected.halves:
                return False
    users = [user for name in nd.outputs_of(node) for user in g.users(name)]
    return not any(id(user) in selected.halves for user in users)
