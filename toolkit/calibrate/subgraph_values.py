"""Expose values of subgraphs of If, Loop and Scan in the main graph.

A subgraph may run any number of times per run of the model, and the shapes of its values may vary.
The values are therefore inserted into a sequence, which each enclosing node passes on:

    If      the branch of the value inserts it; the other branch inserts an empty tensor
    Loop    carries the sequence from iteration to iteration
    Scan    cannot carry a sequence: a scan output stacks the iterations into one tensor

Unlike a sequence, a scan output has one shape for all iterations: values of subgraphs nested in a
Scan cannot be observed.
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
from toolkit.ir.op_traits import CONTROL_FLOW

FIRST_OPSET = 13
"""The first opset whose If and Loop support sequences."""

_PLAIN = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE)
_CARRIED = 2
"""The index of the first loop-carried input of a Loop and of its subgraph."""


def inner_values(model: Model) -> dict[str, Graph]:
    """Return the observable values of subgraphs, with the subgraph that defines each.

    A name that several subgraphs define is ambiguous and left out.
    """
    found = [(name, graph) for graph in list(model.graphs())[1:] for name in _defined(graph)]
    counted = Counter(name for name, _ in found)
    return {name: graph for name, graph in found if counted[name] == 1 and not obstacle(graph)}


def obstacle(graph: Graph) -> str:
    """Return why the values of a subgraph cannot be observed, or an empty string."""
    if graph.opset() < FIRST_OPSET:
        return f"in a subgraph, where nothing is observed below opset {FIRST_OPSET}"
    for subgraph in _ancestry(graph):
        if not nd.is_op(subgraph.owner, *CONTROL_FLOW):
            return "in a subgraph of an operator other than If, Loop and Scan"
        if nd.is_op(subgraph.owner, "Scan") and subgraph is not graph:
            return "in a subgraph nested in a Scan, where nothing is observed"
    return ""


@dataclass(frozen=True, slots=True)
class Surfaced:
    """A sequence in the main graph: the values of a subgraph value at each execution."""

    name: str
    stacked: bool
    """Whether each tensor holds all iterations of a Scan."""

    def pieces(self, found: Sequence[Array]) -> tuple[Array, ...]:
        """Split the sequence that the runtime returns into values, without empty ones."""
        each = (piece for tensor in found for piece in (tensor if self.stacked else [tensor]))
        return tuple(piece for piece in each if piece.size)


def surface(graph: Graph, value: str, dtype: int, rank: int | None) -> Surfaced:
    """Expose a value of a subgraph, with this type and rank (if known), in the main graph."""
    if dtype not in (*_PLAIN, TensorProto.INT64):
        value, dtype = graph.op("Cast", value, to=TensorProto.FLOAT), TensorProto.FLOAT
    stacked = nd.is_op(graph.owner, "Scan")
    subgraphs = list(_ancestry(graph))
    sequence = graph.model.graph.op("SequenceEmpty", dtype=dtype)
    before: dict[int, str] = {}
    for subgraph in reversed(subgraphs):
        if nd.is_op(subgraph.owner, "Loop"):
            sequence = _into_loop(subgraph, sequence, dtype)
        before[id(subgraph)] = sequence
    if not stacked:
        sequence = graph.op("SequenceInsert", sequence, value)
    for subgraph in subgraphs:
        parent, owner = _enclosing(subgraph)
        if nd.is_op(owner, "Scan"):
            steps = _after_scan(subgraph, value, dtype, rank)
            sequence = parent.op("SequenceInsert", sequence, steps)
        elif nd.is_op(owner, "Loop"):
            sequence = _after_loop(subgraph, sequence, dtype)
        else:
            sequence = _after_if(subgraph, before[id(subgraph)], sequence, dtype)
    return Surfaced(sequence, stacked)


def _defined(graph: Graph) -> Iterator[str]:
    yield from graph.inputs
    yield from (name for node in graph.nodes for name in nd.outputs_of(node))


def _ancestry(graph: Graph) -> Iterator[Graph]:
    """Yield the subgraph and those around it, without the main graph."""
    while graph.parent is not None:
        yield graph
        graph = graph.parent


def _enclosing(subgraph: Graph) -> tuple[Graph, NodeProto]:
    assert subgraph.parent is not None
    assert subgraph.owner is not None
    return subgraph.parent, subgraph.owner


def _into_loop(subgraph: Graph, sequence: str, dtype: int) -> str:
    """Carry the sequence into the subgraph of a Loop; return its name there."""
    parent, owner = _enclosing(subgraph)
    parent.set_inputs(owner, [*_padded(owner.input, _CARRIED), sequence])
    name = subgraph.fresh("observed")
    made = helper.make_tensor_sequence_value_info(name, dtype, None)
    subgraph.set_interface(inputs=[*subgraph.interface_inputs(), made])
    return name


def _after_loop(subgraph: Graph, sequence: str, dtype: int) -> str:
    """Carry the sequence out of a Loop, after its other carried values; return its name."""
    parent, owner = _enclosing(subgraph)
    carried = len(owner.input) - _CARRIED - 1
    outputs = subgraph.interface_outputs()
    outputs.insert(1 + carried, helper.make_tensor_sequence_value_info(sequence, dtype, None))
    subgraph.set_interface(outputs=outputs)
    name = parent.fresh("observed")
    made = _padded(owner.output, carried)
    parent.set_outputs(owner, [*made[:carried], name, *made[carried:]])
    return name


def _after_scan(subgraph: Graph, value: str, dtype: int, rank: int | None) -> str:
    """Add a scan output of the value; return its name. The runtime requires a rank."""
    parent, owner = _enclosing(subgraph)
    # a value may be neither an output twice nor both an input and an output
    copy = subgraph.op("Identity", value)
    outputs = subgraph.interface_outputs()
    shape = None if rank is None else [None] * rank
    subgraph.set_interface(outputs=[*outputs, helper.make_tensor_value_info(copy, dtype, shape)])
    for name in ("scan_output_axes", "scan_output_directions"):
        if nd.attr(owner, name) is not None:
            parent.set_attr(owner, name, [*nd.attr(owner, name), 0])
    name = parent.fresh("observed")
    parent.set_outputs(owner, [*_padded(owner.output, len(outputs)), name])
    return name


def _after_if(subgraph: Graph, before: str, sequence: str, dtype: int) -> str:
    """Return the sequence after an If: its branch inserts the value, the other passes it on."""
    parent, owner = _enclosing(subgraph)
    count = len(subgraph.outputs)
    for branch in parent.subgraphs(owner):
        inserted = sequence
        if branch is not subgraph:
            nothing = helper.make_tensor("", dtype, [0], [])
            inserted = branch.op("SequenceInsert", before, branch.op("Constant", value=nothing))
        made = helper.make_tensor_sequence_value_info(inserted, dtype, None)
        branch.set_interface(outputs=[*branch.interface_outputs(), made])
    name = parent.fresh("observed")
    parent.set_outputs(owner, [*_padded(owner.output, count), name])
    return name


def _padded(names: Sequence[str], count: int) -> list[str]:
    """Return the names, with blanks for omitted ones at the end."""
    return [*names, *[""] * (count - len(names))]
