"""Remove dead nodes, and unused optional outputs, initializers, functions and opset imports.

The inputs and outputs of the main graph stay, used or not. A node without outputs has a side effect
and stays, too.

One walk from the last node to the first, and into subgraphs on the way, visits every user of a
value before its producer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from onnx import FunctionProto, NodeProto

from toolkit.ir import Graph, Model, node as nd
from toolkit.ir.call_graph import called_by, calls_among, key_of, reached
from toolkit.ir.op_schema import facts_of
from toolkit.ir.op_traits import CONTROL_FLOW
from toolkit.verification.tolerance import EXACT, Tolerance

if TYPE_CHECKING:
    from toolkit.pass_manager.protocol import Context

_CONTRIB_OPTIONAL = {
    "SkipLayerNormalization": (1, 2, 3),
    "SkipSimplifiedLayerNormalization": (1, 2, 3),
}
"""Optional outputs of com.microsoft operators, for which ONNX has no schemas."""

_TIED_OUTPUTS = ("Attention",)
"""Operators with outputs that an input requires (present for past)."""


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
    """Drop the unused optional outputs of a live node."""
    unused = [i for i, name in enumerate(node.output) if name and graph.is_unused(name)]
    if not unused:
        return
    if nd.is_op(node, *CONTROL_FLOW):
        _trim_subgraph_outputs(graph, node, unused)
        return
    blank = [i for i in unused if _is_optional(graph, node, i)]
    if not blank or not graph.begin("unused-output", node):
        return
    kept = ["" if i in blank else name for i, name in enumerate(node.output)]
    graph.set_outputs(node, nd.without_blanks(kept))


def _is_optional(graph: Graph, node: NodeProto, index: int) -> bool:
    domain = nd.domain_of(node)
    if domain == "com.microsoft":
        return index in _CONTRIB_OPTIONAL.get(node.op_type, ())
    facts = facts_of(graph, node)
    if facts is None or node.op_type in _TIED_OUTPUTS:
        return False
    if node.op_type == "BatchNormalization" and (
        # Before opset 14, the number of outputs selects training mode.
        graph.opset() < 14 or nd.attr(node, "training_mode", 0)
    ):
        return False
    return index in facts.optional_outputs


def _trim_subgraph_outputs(graph: Graph, node: NodeProto, unused: list[int]) -> None:
    """Drop unused results of control flow: any of an If, the scan outputs of a Loop or Scan.

    Carried values stay: the next iteration needs them.
    """
    subgraphs = graph.subgraphs(node)
    if nd.is_op(node, "If"):
        carried, offset = 0, 0
    elif nd.is_op(node, "Loop"):
        carried, offset = len(node.input) - 2, 1  # the subgraph's first output is the condition
    elif graph.opset() >= 9:
        carried, offset = len(node.input) - nd.attr(node, "num_scan_inputs", 0), 0
    else:
        return
    dropped = {i for i in unused if i >= carried}
    if any(len(inner.outputs) != len(node.output) + offset for inner in subgraphs):
        return
    if not dropped or not graph.begin("unused-output", node):
        return
    graph.set_outputs(node, [v for i, v in enumerate(node.output) if i not in dropped])
    for inner in subgraphs:
        declared = inner.interface_outputs()
        kept = [v for i, v in enumerate(declared) if i - offset not in dropped]
        inner.set_interface(outputs=kept)
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
            model.free_initializers()  # IR 3 declares every initializer as an input
            graph.drop_initializer(name)


def drop_uncalled(model: Model) -> None:
    """Drop the functions that no graph calls, directly or indirectly."""
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
