"""The uses of an input's values: the operators that take them, unchanged or with an offset.

Values are followed forward through operators that only move or select them (Reshape, Slice, Concat,
Cast, ...), integer offsets are added up, and subgraphs are entered by inputs and captures.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from onnx import NodeProto, TensorProto

from toolkit.ir import node as nd
from toolkit.ir.graph import Graph
from toolkit.ir.op_traits import MOVEMENT

_MAX_STEPS = 4000

_ALL = -1
_PASSED_ON: dict[str, tuple[int, ...]] = {
    **dict.fromkeys((*MOVEMENT, "Cast", "Pad", "Dropout", "Clip"), (0,)),
    **dict.fromkeys(("ReduceMax", "ReduceMin", "Abs", "TopK", "SplitToSequence"), (0,)),
    **dict.fromkeys(("ScatterND", "ScatterElements", "Scatter"), (0, 2)),
    "Concat": (_ALL,),
    "Where": (1, 2),
}
"""The operands whose values an operator's result holds, besides constants, by operator."""


@dataclass(frozen=True, slots=True)
class Use:
    """One use of an input's values by an operator."""

    graph: Graph
    node: NodeProto
    slot: int
    offset: int = 0
    """The sum of the constants added to the values."""
    joined: bool = False
    """Whether the values were concatenated with others."""
    cast_to: int = 0
    """The element type of the last Cast; 0 for none."""

    def is_op(self, *op_types: str) -> bool:
        return nd.is_op(self.node, *op_types)

    def other(self) -> str:
        """Return the other operand of a binary operator."""
        return self.node.input[1 - self.slot] if len(self.node.input) == 2 else ""


@dataclass(frozen=True, slots=True)
class _At:
    graph: Graph
    value: str
    offset: int
    joined: bool
    cast_to: int


def uses_of(graph: Graph, name: str) -> list[Use]:
    """Return all uses of the input `name`, the nearest first."""
    found: list[Use] = []
    pending = [_At(graph, name, 0, False, 0)]
    seen: set[tuple[int, str]] = set()
    for at in pending:  # breadth first: it grows during the iteration
        key = id(at.graph), at.value
        if key in seen or len(seen) > _MAX_STEPS:
            continue
        seen.add(key)
        for node in at.graph.users(at.value):
            for slot, read in enumerate(node.input):
                if read == at.value:
                    use = Use(at.graph, node, slot, at.offset, at.joined, at.cast_to)
                    found.append(use)
                    pending.extend(_onward(at, use))
            for inner in at.graph.subgraphs(node):
                if not inner.is_defined(at.value):
                    pending.append(replace(at, graph=inner))
        pending.extend(_out_of_subgraph(at))
    return found


def _onward(at: _At, use: Use) -> Iterator[_At]:
    """Yield the values that hold the input's values after one use."""
    node = use.node
    if use.is_op("Loop", "Scan"):
        for inner in at.graph.subgraphs(node):
            first = 2 if use.is_op("Loop") else 0
            if use.slot >= first and use.slot < len(inner.inputs):
                yield replace(at, graph=inner, value=inner.inputs[use.slot])
        return
    shift = _shift(use)
    if shift is not None:
        yield replace(at, value=node.output[0], offset=at.offset + shift)
        return
    slots = _PASSED_ON.get(node.op_type, ()) if node.domain in nd.STANDARD_DOMAINS else ()
    if use.slot not in slots and _ALL not in slots:
        return
    moved = at
    if use.is_op("Cast"):
        moved = replace(at, cast_to=int(nd.attr(node, "to", 0)))
    elif use.is_op("Concat"):
        moved = replace(at, joined=True)
    # the second result of TopK and Dropout holds indices or a mask
    outputs = node.output if use.is_op("Split") else node.output[:1]
    for output in outputs:
        if output:
            yield replace(moved, value=output)


def _out_of_subgraph(at: _At) -> Iterator[_At]:
    """Yield the outputs of the enclosing node for an output of its subgraph."""
    parent, owner = at.graph.parent, at.graph.owner
    if parent is None or owner is None or not at.graph.is_output(at.value):
        return
    skipped = 1 if nd.is_op(owner, "Loop") else 0  # the first is the loop condition
    for index, name in enumerate(at.graph.outputs):
        outer = index - skipped
        if name == at.value and 0 <= outer < len(owner.output) and owner.output[outer]:
            yield replace(at, graph=parent, value=owner.output[outer])


def _shift(use: Use) -> int | None:
    """Return the integer constant that an Add or Sub adds to the values."""
    if not use.is_op("Add", "Sub") or (use.is_op("Sub") and use.slot == 1):
        return None
    if use.cast_to not in (0, TensorProto.INT32, TensorProto.INT64):
        return None
    constant = scalar(use.graph, use.other())
    if constant is None or constant != int(constant) or abs(constant) > 1 << 16:
        return None
    return int(constant) if use.is_op("Add") else -int(constant)


def scalar(graph: Graph, value: str) -> float | None:
    """Return the value of a numeric constant with one element, or None."""
    tensor = graph.tensor(value) if value else None
    if tensor is None or np.prod(tensor.dims) != 1 or tensor.data_type == TensorProto.STRING:
        return None
    number = float(graph.model.weights.array(tensor).reshape(-1)[0].real)
    return number if np.isfinite(number) else np.finfo(np.float32).max * np.sign(number)
