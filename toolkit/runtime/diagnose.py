"""What keeps a model from running in onnxruntime on this machine, and why.

The runtime stops at the first thing that it does not like. When it refuses the model, each
operator is tried alone with the element types it gets, so that all missing kernels are named.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from onnx import (
    GraphProto,
    ModelProto,
    NodeProto,
    TypeProto,
    ValueInfoProto,
    defs,
    helper,
    shape_inference,
)

from toolkit.errors import RuntimeRefused
from toolkit.ir import node as nd
from toolkit.ir.model import Model
from toolkit.ir.tensor_type import dtype_name
from toolkit.runtime import MAX_IR, MAX_OPSET
from toolkit.runtime.session import Session
from toolkit.targets.ort_cpu import TARGET as ORT_CPU

_REFUSALS = {
    "Could not find an implementation for": "onnxruntime has no CPU kernel for it",
    "Type Error: Type": "the operator does not take that type",
}
"""What the runtime says of an operator that stands alone, and what that means."""

Types = dict[str, TypeProto]


def find_obstacles(model: Model, custom_ops: Sequence[str] = ()) -> list[str]:
    """One line for each reason why onnxruntime does not load the file; empty when it does."""
    newer: list[str] = []
    if model.ir_version > MAX_IR:  # of the file; a session gets the model under one that it loads
        newer = [f"IR version {model.ir_version} is newer than {MAX_IR}, the newest it loads"]
    return [*newer, *why_refused(model, custom_ops)]


def why_refused(model: Model, custom_ops: Sequence[str] = ()) -> list[str]:
    """One line for each reason why a session does not take the graph; empty when it does."""
    try:
        Session(model, custom_ops=custom_ops)
    except RuntimeRefused as refusal:
        causes = [*_too_new(model), *_unknown_domains(model), *_missing_kernels(model)]
        return causes or [f"onnxruntime refuses it: {refusal}"]
    return []


def _too_new(model: Model) -> Iterator[str]:
    opset = model.opsets.get("", 0)
    if opset > MAX_OPSET:
        yield f"opset {opset} is newer than {MAX_OPSET}, the newest it loads"


def _unknown_domains(model: Model) -> Iterator[str]:
    """Operators of domains that neither ONNX, nor onnxruntime, nor the model itself defines."""
    functions = {(f.domain, f.name) for f in model.functions}
    known = {schema.domain for schema in defs.get_all_schemas()} | set(ORT_CPU.domains)
    strangers: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for graph in model.graphs():
        for node in graph.nodes:
            if nd.domain_of(node) not in known and (node.domain, node.op_type) not in functions:
                strangers[node.domain][node.op_type] += 1
    for domain, ops in strangers.items():
        listed = ", ".join(f"{op} x{n}" if n > 1 else op for op, n in ops.most_common())
        yield f"{listed}: the domain '{domain}' is unknown; --custom-ops LIB may bring it"


# Kernels, one operator at a time -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tried:
    """A node tried alone: the element types that it reads, and why the runtime has no kernel."""

    node: NodeProto
    kinds: tuple[str, ...]
    reason: str
    """Empty when there is one."""


def try_kernels(model: Model, custom_ops: Sequence[str] = ()) -> Iterator[Tried]:
    """Every node whose types are known, tried alone; equal ones once."""
    proto = model.to_proto()
    # Where a node is broken, the rest is looked at with the types that are declared.
    with contextlib.suppress(Exception):
        proto = shape_inference.infer_shapes(proto)
    reasons: dict[tuple[str, tuple[str, ...]], str] = {}
    for node, types in _typed_nodes(proto.graph, {}):
        single = _alone(proto, node, types)
        if single is None:
            continue
        inputs = (types[name] for name in nd.inputs_of(node))
        kinds = tuple(dict.fromkeys(dtype_name(t.tensor_type.elem_type) for t in inputs))
        key = nd.qualified(node), kinds
        if key not in reasons:
            reasons[key] = _refusal(single, custom_ops)
        yield Tried(node, kinds, reasons[key])


def _missing_kernels(model: Model) -> Iterator[str]:
    """Operators that exist, but not for these element types or not on the CPU."""
    if model.opsets.get("", 0) > MAX_OPSET:
        return  # nothing loads at all
    counts: Counter[str] = Counter()
    reasons: dict[str, str] = {}
    for tried in try_kernels(model):
        version = model.opsets.get(nd.domain_of(tried.node), 1)
        name = nd.qualified(tried.node)
        kinds = f" on {', '.join(tried.kinds)}" if tried.kinds else ""
        label = f"{name} (opset {version}){kinds}"
        reasons[label] = tried.reason
        counts[label] += 1
    for label, reason in reasons.items():
        if reason:
            nodes = "1 node" if counts[label] == 1 else f"{counts[label]} nodes"
            yield f"{label}: {reason} ({nodes})"


def _typed_nodes(
    graph: GraphProto, outer: Mapping[str, TypeProto]
) -> Iterator[tuple[NodeProto, Types]]:
    """Every node of the graph and its subgraphs, with the types known where it stands."""
    types: Types = dict(outer)
    for value in (*graph.input, *graph.value_info, *graph.output):
        types[value.name] = value.type
    for tensor in graph.initializer:
        types[tensor.name] = helper.make_tensor_type_proto(tensor.data_type, tensor.dims)
    for node in graph.node:
        inner = list(nd.graphs_of(node))
        for subgraph in inner:
            yield from _typed_nodes(subgraph, types)
        if not inner:
            yield node, types


def _alone(proto: ModelProto, node: NodeProto, types: Types) -> ModelProto | None:
    """A model of this one node, everything that it reads an input; None if a type is missing."""
    read = list(dict.fromkeys(nd.inputs_of(node)))
    if any(types.get(n, TypeProto()).WhichOneof("value") != "tensor_type" for n in read):
        return None
    graph = GraphProto(name="alone", node=[node])
    graph.input.extend(ValueInfoProto(name=name, type=_unshaped(types[name])) for name in read)
    graph.output.extend(ValueInfoProto(name=name) for name in nd.outputs_of(node))
    return ModelProto(ir_version=proto.ir_version, opset_import=proto.opset_import, graph=graph)


def _unshaped(declared: TypeProto) -> TypeProto:
    return TypeProto(tensor_type=TypeProto.Tensor(elem_type=declared.tensor_type.elem_type))


def _refusal(single: ModelProto, custom_ops: Sequence[str]) -> str:
    """Why the runtime does not take this operator; empty when it does, or for other reasons."""
    try:
        Session(Model.from_proto(single), custom_ops=custom_ops)
    except RuntimeRefused as refusal:
        return next((why for text, why in _REFUSALS.items() if text in str(refusal)), "")
    return ""
