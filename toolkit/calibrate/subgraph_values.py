"""Values that are made in the bodies of If, Loop and Scan, brought to the main graph.

A body runs once, often or not at all in a run of the model, and its values may have another shape
each time. So what a value was goes into a sequence, which every node around it hands on:

    If      the branch of the value inserts it; the other one inserts an empty tensor
    Loop    carries the sequence from step to step
    Scan    cannot carry one: a scan output stacks the steps, and goes in as one tensor

A scan output has one shape for all steps, which no sequence has: of what is in a body inside of the
body of a Scan, nothing is seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from onnx import NodeProto, TensorProto, helper

from toolkit.calibrate.statistics import Array
from toolkit.ir import node as nd
from toolkit.ir.graph import Graph
from toolkit.ir.model import Model

FIRST_OPSET = 13
"""The first whose If and Loop know sequences."""

_PLAIN = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE)
_CARRIED = 2
"""The first input of a Loop, and of its body, that is carried."""


def inner_values(model: Model) -> dict[str, Graph]:
    """The values of bodies that can be seen, with the body that defines each.

    One name may stand for values of several bodies: such a name says nothing.
    """
    found = [(name, graph) for graph in list(model.graphs())[1:] for name in _defined(graph)]
    counted = Counter(name for name, _ in found)
    return {name: graph for name, graph in found if counted[name] == 1 and not obstacle(graph)}


def obstacle(graph: Graph) -> str:
    """Why nothing of a body can be seen; empty when it can."""
    if graph.opset() < FIRST_OPSET:
        return f"in a subgraph, where nothing is observed below opset {FIRST_OPSET}"
    for body in _path(graph):
        if not nd.is_op(body.owner, "If", "Loop", "Scan"):
            return "in a subgraph of an operator other than If, Loop and Scan"
        if nd.is_op(body.owner, "Scan") and body is not graph:
            return "in a subgraph inside of a Scan, where nothing is observed"
    return ""


@dataclass(frozen=True, slots=True)
class Surfaced:
    """A sequence of the main graph: what a value was, each time that its body ran."""

    name: str
    stacked: bool
    """Whether each of its tensors holds all steps of a Scan."""

    def pieces(self, found: Sequence[Array]) -> tuple[Array, ...]:
        """What the value was, from what the runtime gives; nothing for what is empty."""
        each = (piece for tensor in found for piece in (tensor if self.stacked else [tensor]))
        return tuple(piece for piece in each if piece.size)


def surface(graph: Graph, value: str, dtype: int, rank: int | None) -> Surfaced:
    """Make a value of a body one of the main graph; what type and rank it has, if that is known."""
    if dtype not in (*_PLAIN, TensorProto.INT64):
        value, dtype = graph.op("Cast", value, to=TensorProto.FLOAT), TensorProto.FLOAT
    stacked = nd.is_op(graph.owner, "Scan")
    bodies = list(_path(graph))
    sequence = graph.model.graph.op("SequenceEmpty", dtype=dtype)
    before: dict[int, str] = {}
    for body in reversed(bodies):
        if nd.is_op(body.owner, "Loop"):
            sequence = _carried_in(body, sequence, dtype)
        before[id(body)] = sequence
    if not stacked:
        sequence = graph.op("SequenceInsert", sequence, value)
    for body in bodies:
        parent, owner = _around(body)
        if nd.is_op(owner, "Scan"):
            steps = _scanned(body, value, dtype, rank)
            sequence = parent.op("SequenceInsert", sequence, steps)
        elif nd.is_op(owner, "Loop"):
            sequence = _carried_out(body, sequence, dtype)
        else:
            sequence = _chosen(body, before[id(body)], sequence, dtype)
    return Surfaced(sequence, stacked)


def _defined(graph: Graph) -> Iterator[str]:
    yield from graph.inputs
    yield from (name for node in graph.nodes for name in nd.outputs_of(node))


def _path(graph: Graph) -> Iterator[Graph]:
    """The body and those around it, without the main graph."""
    while graph.parent is not None:
        yield graph
        graph = graph.parent


def _around(body: Graph) -> tuple[Graph, NodeProto]:
    assert body.parent is not None
    assert body.owner is not None
    return body.parent, body.owner


def _carried_in(body: Graph, sequence: str, dtype: int) -> str:
    """What the body of a Loop reads the sequence as."""
    parent, owner = _around(body)
    parent.set_inputs(owner, [*_padded(owner.input, _CARRIED), sequence])
    name = body.fresh("seen")
    made = helper.make_tensor_sequence_value_info(name, dtype, None)
    body.set_interface(inputs=[*body.interface_inputs(), made])
    return name


def _carried_out(body: Graph, sequence: str, dtype: int) -> str:
    """What a Loop gives the sequence as, behind all else that is carried."""
    parent, owner = _around(body)
    carried = len(owner.input) - _CARRIED - 1
    outputs = body.interface_outputs()
    outputs.insert(1 + carried, helper.make_tensor_sequence_value_info(sequence, dtype, None))
    body.set_interface(outputs=outputs)
    name = parent.fresh("seen")
    made = _padded(owner.output, carried)
    parent.set_outputs(owner, [*made[:carried], name, *made[carried:]])
    return name


def _scanned(body: Graph, value: str, dtype: int, rank: int | None) -> str:
    """A scan output of what the body makes in each step; the runtime insists on its rank."""
    parent, owner = _around(body)
    copy = body.op("Identity", value)  # a value may not be an output twice, nor an input at once
    outputs = body.interface_outputs()
    shape = None if rank is None else [None] * rank
    body.set_interface(outputs=[*outputs, helper.make_tensor_value_info(copy, dtype, shape)])
    for name in ("scan_output_axes", "scan_output_directions"):
        if nd.attr(owner, name) is not None:
            parent.set_attr(owner, name, [*nd.attr(owner, name), 0])
    name = parent.fresh("seen")
    parent.set_outputs(owner, [*_padded(owner.output, len(outputs)), name])
    return name


def _chosen(body: Graph, before: str, sequence: str, dtype: int) -> str:
    """What an If gives the sequence as: with the value, or as it was and nothing more."""
    parent, owner = _around(body)
    count = len(body.outputs)
    for branch in parent.subgraphs(owner):
        inserted = sequence
        if branch is not body:
            nothing = helper.make_tensor("", dtype, [0], [])
            inserted = branch.op("SequenceInsert", before, branch.op("Constant", value=nothing))
        made = helper.make_tensor_sequence_value_info(inserted, dtype, None)
        branch.set_interface(outputs=[*branch.interface_outputs(), made])
    name = parent.fresh("seen")
    parent.set_outputs(owner, [*_padded(owner.output, count), name])
    return name


def _padded(names: Sequence[str], count: int) -> list[str]:
    """The names, and blanks for those that were left out at the end."""
    return [*names, *[""] * (count - len(names))]
