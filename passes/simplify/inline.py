"""Inline model-local functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from onnx import FunctionProto, NodeProto

from passes.simplify.dce import drop_uncalled
from toolkit.ir import Graph, Model, node as nd
from toolkit.ir.call_graph import all_nodes, called_by, key_of
from toolkit.ir.clone import clone
from toolkit.ir.op_schema import schema_of
from toolkit.pass_manager.protocol import Context
from toolkit.verification.tolerance import EXACT, Tolerance


@dataclass(frozen=True, slots=True)
class InlineFunctions:
    """Replace calls of model-local functions by the function's nodes."""

    name: ClassVar[str] = "inline"
    tolerance: ClassVar[Tolerance] = EXACT

    def run(self, model: Model, ctx: Context) -> None:
        functions = {key_of(f): f for f in model.functions}
        if not functions:
            return
        pending = [(graph, node) for graph in model.graphs() for node in graph.nodes]
        while pending:
            graph, node = pending.pop()
            function = functions.get(called_by(node))
            if function is None:
                pending.extend((child, n) for child in graph.subgraphs(node) for n in child.nodes)
                continue
            obstacle = _miscalled(node, function) or _obstacle(model, function)
            if obstacle:
                ctx.note(f"function {function.name} kept: {obstacle}")
            elif graph.begin("inline-function", node):
                pending.extend((graph, n) for n in inline_call(graph, node, function))
        drop_uncalled(model)


def inline_call(graph: Graph, node: NodeProto, function: FunctionProto) -> list[NodeProto]:
    for entry in function.opset_import:
        graph.require_opset(entry.domain, entry.version)
    inputs = [*node.input, *[""] * (len(function.input) - len(node.input))]
    names = dict(zip(function.input, inputs, strict=True))
    passed_through = set(names)
    attributes = {a.name: a for a in function.attribute_proto}
    attributes.update({a.name: a for a in graph.snapshot(node).attribute})
    copies = clone(function.node, names, graph.fresh, attributes)
    inserted = [graph.insert(copy, at=node) for copy in copies]
    for value, inner in zip(node.output, function.output, strict=False):
        if not value:
            continue
        if inner in passed_through:
            inserted.append(graph.add("Identity", [names[inner]], at=node))
            graph.replace(value, inserted[-1].output[0])
        else:
            names[inner] = graph.replace(value, names[inner])
    graph.prune(node)
    return [n for n in inserted if n in graph]


def _miscalled(node: NodeProto, function: FunctionProto) -> str:
    if len(node.input) > len(function.input):
        return f"it takes {len(function.input)} inputs, not {len(node.input)}"
    if len(node.output) > len(function.output):
        return f"it has {len(function.output)} outputs, not {len(node.output)}"
    return ""


def _obstacle(model: Model, function: FunctionProto) -> str:
    """Return why the function cannot be inlined: an operator of another version. "" if it can."""
    for entry in function.opset_import:
        domain = nd.plain_domain(entry.domain)
        current = model.opsets.get(domain, entry.version)
        if current == entry.version:
            continue
        for node in all_nodes(function.node):
            if nd.domain_of(node) == domain and not _same_op(node, entry.version, current):
                return f"{node.op_type} differs between opsets {entry.version} and {current}"
    return ""


def _same_op(node: NodeProto, one: int, other: int) -> bool:
    domain = nd.domain_of(node)
    before, after = (schema_of(node.op_type, version, domain) for version in (one, other))
    return before is not None and after is not None and before.since_version == after.since_version
