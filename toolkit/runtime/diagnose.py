"""Diagnose why onnxruntime does not load a model.

The runtime reports only the first problem. If it refuses the model, each operator is loaded alone
with the element types of its operands, so that all missing kernels are named.
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
"""Texts in the runtime's errors for a single operator, and their meaning."""

Types = dict[str, TypeProto]
"""Types of values by name."""


def find_obstacles(model: Model, custom_ops: Sequence[str] = ()) -> list[str]:
    """Return the reasons why onnxruntime does not load the file, one per line."""
    newer: list[str] = []
    if model.ir_version > MAX_IR:  # sessions lower it
        newer = [f"IR version {model.ir_version} is newer than {MAX_IR}, the newest it loads"]
    return [*newer, *why_refused(model, custom_ops)]


def why_refused(model: Model, custom_ops: Sequence[str] = ()) -> list[str]:
    """Return the reasons why a session does not load the graph, one per line."""
    try:
        Session(model, custom_ops=custom_ops)
    except RuntimeRefused as refusal:
        opset = model.opsets.get("", 0)
        if opset > MAX_OPSET:  # no operator loads
            causes = [f"opset {opset} is newer than {MAX_OPSET}, the newest it loads"]
            return [*causes, *_unknown_domains(model)]
        causes = [*_unknown_domains(model), *_missing_kernels(model)]
        return causes or [f"onnxruntime refuses it: {refusal}"]
    return []


def _unknown_domains(model: Model) -> Iterator[str]:
    """Yield the operators of domains that ONNX, onnxruntime and the model do not define."""
    functions = {(f.domain, f.name) for f in model.functions}
    known = {schema.domain for schema in defs.get_all_schemas()} | set(ORT_CPU.domains)
    unknown: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for node in model.nodes():
        if nd.domain_of(node) not in known and (node.domain, node.op_type) not in functions:
            unknown[node.domain][node.op_type] += 1
    for domain, ops in unknown.items():
        listed = ", ".join(f"{op} x{n}" if n > 1 else op for op, n in ops.most_common())
        yield f"{listed}: the domain '{domain}' is unknown; --custom-ops LIB may define it"


# Kernels, one operator at a time -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KernelCheck:
    """A node loaded alone: the element types of its operands, and why it has no kernel."""

    node: NodeProto
    kinds: tuple[str, ...]
    reason: str
    """Empty if there is a kernel."""


def try_kernels(model: Model, custom_ops: Sequence[str] = ()) -> Iterator[KernelCheck]:
    """Load every node with known types alone, or once for all equal ones."""
    proto = model.to_proto()
    # If inference fails at an invalid node, use the declared types.
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
        yield KernelCheck(node, kinds, reasons[key])


def _missing_kernels(model: Model) -> Iterator[str]:
    """Yield the operators without a CPU kernel for their element types."""
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
    """Yield every node of the graph and its subgraphs with the types visible to it."""
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
    """Return a model of this node alone, or None if the type of an operand is missing."""
    names = list(dict.fromkeys(nd.inputs_of(node)))
    if any(types.get(n, TypeProto()).WhichOneof("value") != "tensor_type" for n in names):
        return None
    graph = GraphProto(name="alone", node=[node])
    graph.input.extend(ValueInfoProto(name=name, type=_unshaped(types[name])) for name in names)
    graph.output.extend(ValueInfoProto(name=name) for name in nd.outputs_of(node))
    return ModelProto(ir_version=proto.ir_version, opset_import=proto.opset_import, graph=graph)


def _unshaped(declared: TypeProto) -> TypeProto:
    return TypeProto(tensor_type=TypeProto.Tensor(elem_type=declared.tensor_type.elem_type))


def _refusal(single: ModelProto, custom_ops: Sequence[str]) -> str:
    """Return why the runtime has no kernel for this operator, or an empty string."""
    try:
        Session(Model.from_proto(single), custom_ops=custom_ops)
    except RuntimeRefused as refusal:
        return next((why for text, why in _REFUSALS.items() if text in str(refusal)), "")
    return ""
