"""Remove what nobody needs: nodes, optional outputs, initializers, functions, opset imports.

The inputs and outputs of the main graph are a contract and stay, read or not. A node that defines
nothing is there for its side effect and stays too.

One walk from the last node to the first, into a node's subgraphs on the way: when a node is looked
at, everything that could have needed it is settled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from onnx import FunctionProto, NodeProto

from toolkit.ir import node as nd
from toolkit.ir.call_graph import called_by, calls_among, key_of, reached
from toolkit.ir.graph import Graph
from toolkit.ir.model import Model
from toolkit.ir.op_schema import facts_of
from toolkit.ir.op_traits import CONTROL_FLOW
from toolkit.verification.tolerance import EXACT, Tolerance

if TYPE_CHECKING:
    from toolkit.pass_manager.protocol import Context

_CONTRIB_OPTIONAL = {
    "SkipLayerNormalization": (1, 2, 3),
    "SkipSimplifiedLayerNormalization": (1, 2, 3),
}
"""com.microsoft operators with outputs that may be left out, which ONNX has no schema of."""

_TIED_OUTPUTS = ("Attention",)
"""Outputs that must be there because an input is (present for past): left alone."""


@dataclass(frozen=True, slots=True)
class RemoveDead:
    """Remove nodes, outputs, initializers, functions and imports that nothing uses."""

    name: ClassVar[str] = "dead"
    tolerance: ClassVar[Tolerance] = EXACT

    def run(self, model: Model, ctx: Context) -> None:
        _sweep(model.graph)
        for graph in model.graphs():
            _drop_initializers(graph)
        drop_uncalled(model)
        _drop_imports(model)


def _sweep(graph: Graph) -> None:
    """Remove the dead nodes of `graph` and of the graphs inside it."""
    for node in reversed(graph.nodes):
        outputs = nd.outputs_of(node)
        if outputs and all(map(graph.is_unused, outputs)):
            if graph.begin("dead-node", node):
                graph.remove(node)
            continue
        _trim(graph, node)
        for inner in graph.subgraphs(node):
            _sweep(inner)


def _trim(graph: Graph, node: NodeProto) -> None:
    """Drop the outputs of a live node that nobody reads, where the operator may go without."""
    unused = [i for i, name in enumerate(node.output) if name and graph.is_unused(name)]
    if not unused:
        return
    if nd.is_op(node, *CONTROL_FLOW):
        _trim_subgraph_outputs(graph, node, unused)
        return
    blank = [i for i in unused if _may_go_without(graph, node, i)]
    if not blank or not graph.begin("unused-output", node):
        return
    kept = ["" if i in blank else name for i, name in enumerate(node.output)]
    graph.set_outputs(node, nd.without_blanks(kept))


def _may_go_without(graph: Graph, node: NodeProto, index: int) -> bool:
    domain = nd.domain_of(node)
    if domain == "com.microsoft":
        return index in _CONTRIB_OPTIONAL.get(node.op_type, ())
    facts = facts_of(graph, node)
    if facts is None or node.op_type in _TIED_OUTPUTS:
        return False
    if node.op_type == "BatchNormalization" and (
        # Before opset 14 the number of outputs is what asks for training.
        graph.opset() < 14 or nd.attr(node, "training_mode", 0)
    ):
        return False
    return index in facts.optional_outputs


def _trim_subgraph_outputs(graph: Graph, node: NodeProto, unused: list[int]) -> None:
    """Drop results of control flow: any of an If, the scan outputs of a Loop or Scan.

    What a loop carries from one iteration to the next is needed inside, read outside or not.
    """
    bodies = graph.subgraphs(node)
    if nd.is_op(node, "If"):
        carried, offset = 0, 0
    elif nd.is_op(node, "Loop"):
        carried, offset = len(node.input) - 2, 1  # the body's first output is the condition
    elif graph.opset() >= 9:
        carried, offset = len(node.input) - nd.attr(node, "num_scan_inputs", 0), 0
    else:
        return
    dropped = {i for i in unused if i >= carried}
    if any(len(body.outputs) != len(node.output) + offset for body in bodies):
        return
    if not dropped or not graph.begin("unused-output", node):
        return
    graph.set_outputs(node, [v for i, v in enumerate(node.output) if i not in dropped])
    for body in bodies:
        declared = body.interface_outputs()
        kept = [v for i, v in enumerate(declared) if i - offset not in dropped]
        body.set_interface(outputs=kept)
    for name in ("scan_output_axes", "scan_output_directions"):
        listed = nd.attr(node, name)
        if listed is not None:
            still = [v for i, v in enumerate(listed) if i + carried not in dropped]
            graph.set_attr(node, name, still or None)


def _drop_initializers(graph: Graph) -> None:
    model = graph.model
    for name in list(graph.initializers):
        if not graph.is_unused(name) or graph.is_pinned(name):
            continue
        if graph.is_input(name) and not graph.is_const(name):
            continue
        if model.journal.begin("unused-initializer", name):
            model.free_initializers()  # before IR 4 an initializer was declared as an input, too
            graph.drop_initializer(name)


def drop_uncalled(model: Model) -> None:
    """Keep the functions that a graph calls, and those that they call."""
    needed = reached(calls_among(model.functions), map(called_by, model.nodes()))
    kept = [function for function in model.functions if key_of(function) in needed]
    if len(kept) < len(model.functions) and model.journal.begin("unused-function", ""):
        model.set_functions(kept)


def _drop_imports(model: Model) -> None:
    used = {nd.domain_of(node) for node in model.nodes()}
    for function in model.functions:
        used |= _domains_of(function)
    for domain in sorted(set(model.opsets) - used - {""}):
        if model.journal.begin("unused-import", domain):
            model.set_opset(domain, None)


def _domains_of(function: FunctionProto) -> set[str]:
    return {function.domain, *(entry.domain for entry in function.opset_import)}
