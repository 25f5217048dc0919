"""`--map`: the module and operator of the framework behind each ONNX node.

The map is read from the exported file: dynamo annotates every node with metadata
(`pkg.torch.onnx.*`), and we annotate those of TorchScript, which itself only names nodes after
their module (`/encoder/layer.0/MatMul`). Without either, nodes are grouped by operator alone.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onnx import NodeProto, defs, shape_inference

from toolkit.ir import node as nd
from toolkit.ir.model import Model
from toolkit.ir.op_traits import VIEWS
from toolkit.ir.tensor_type import dtype_name, from_proto
from toolkit.runtime.diagnose import try_kernels

_META = "pkg.torch.onnx."
_TARGET = re.compile(r"call_function\[target=torch\.ops\.([\w.]+)\]")
_NO_MODULE = "_empty_nn_module_stack"
"""The scope of operators that torch itself added, such as those that read sizes of inputs."""
_RESHAPES = (*VIEWS, "Expand", "Transpose")
# Without `prims.convert_element_type`: that is an implicit type promotion.
_IMPLIES_CAST = re.compile(r"_to_copy|\.to(\.|$)|type_as|\.float|\.int|\.bool|\.half")
_IMPLIES_RESHAPE = re.compile(
    r"view|reshape|expand|permute|transpose|squeeze|flatten|\.t(\.|$)|select|slice|repeat|unfold|"
    r"split|chunk|stack|movedim|broadcast|pixel|shuffle"
)


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a node: its module's path and class, its operator, its line of code."""

    module: str = ""
    kind: str = ""
    operator: str = ""
    instance: str = ""
    """The call, which distinguishes two uses of the same operator."""
    source: str = ""


@dataclass(frozen=True, slots=True)
class OperatorRow:
    """One operator of one module, and the ONNX nodes it was exported to."""

    module: str
    kind: str
    operator: str
    calls: int
    nodes: dict[str, int]
    """ONNX operators with their counts."""
    opset: int
    """The oldest opset that has all of them in this version; 0 if none is standard."""
    dtypes: tuple[str, ...]
    changes: tuple[str, ...]
    """Casts and reshapes that the exporter added."""
    standard: bool
    runs: bool
    """Whether onnxruntime has a CPU kernel for all of them."""
    reasons: tuple[str, ...] = ()
    source: str = ""

    @property
    def how(self) -> str:
        """`direct` if every call became one node, else `decomposed`."""
        return "direct" if sum(self.nodes.values()) <= self.calls else "decomposed"

    def to_json(self) -> dict[str, Any]:
        return {
            "module": self.module,
            "class": self.kind,
            "operator": self.operator,
            "calls": self.calls,
            "nodes": self.nodes,
            "how": self.how,
            "opset": self.opset,
            "dtypes": list(self.dtypes),
            "changes": list(self.changes),
            "onnx_standard": self.standard,
            "onnxruntime_cpu": self.runs,
            "reasons": list(self.reasons),
            "source": self.source,
        }


@dataclass(frozen=True, slots=True)
class OperatorMap:
    """The map of a model: one row per operator, and the origins of its values and weights."""

    rows: tuple[OperatorRow, ...]
    values: dict[str, str]
    """Module and operator by intermediate value."""
    initializers: dict[str, str]
    """Module by weight; empty for constants that the exporter added."""
    flags: tuple[str, ...]
    """Casts and reshapes that the exporter added, with their modules."""

    def to_json(self) -> dict[str, Any]:
        return {
            "rows": [row.to_json() for row in self.rows],
            "values": self.values,
            "initializers": self.initializers,
            "flags": list(self.flags),
        }


def map_operators(model: Model, custom_ops: Sequence[str] = ()) -> OperatorMap:
    """Return the map of a model as its exporter wrote it."""
    kinds, missing = _kernels(model, custom_ops)
    types = _types(model)
    groups: dict[tuple[str, str, str], list[tuple[NodeProto, Origin]]] = {}
    values: dict[str, str] = {}
    for node in _nodes(model):
        origin = origin_of(node)
        key = origin.module, origin.kind, origin.operator or node.op_type
        groups.setdefault(key, []).append((node, origin))
        for output in nd.outputs_of(node):
            values[output] = "/".join(filter(None, [origin.module, origin.operator]))
    rows = [_row(key, members, model, kinds, missing, types) for key, members in groups.items()]
    initializers = _owners(model)
    flags = [
        f"{row.module or 'the model'}: {c} ({row.operator})" for row in rows for c in row.changes
    ]
    return OperatorMap(tuple(rows), values, initializers, tuple(flags))


def _owners(model: Model) -> dict[str, str]:
    """Return the module of each weight, by its name (`encoder.layer.weight`) or its sole user."""
    users: dict[str, set[str]] = {}
    for node in _nodes(model):
        for name in nd.inputs_of(node):
            users.setdefault(name, set()).add(origin_of(node).module)
    owners: dict[str, str] = {}
    for name in model.graph.initializers:
        modules = users.get(name, set())
        sole = modules.pop() if len(modules) == 1 else ""
        owners[name] = sole if "/" in name or "::" in name else name.rpartition(".")[0] or sole
    return owners


def origin_of(node: NodeProto) -> Origin:
    """Return the origin of a node from its metadata, or else from its name."""
    meta = {entry.key: entry.value for entry in node.metadata_props}
    scopes = _parsed_list(meta.get(f"{_META}name_scopes"))
    classes = _parsed_list(meta.get(f"{_META}class_hierarchy"))
    if scopes:
        if scopes[-2:][0].startswith(_NO_MODULE):
            scopes[-2:-1], classes[-2:-1] = [""], [""]
        found = _TARGET.search(meta.get(f"{_META}fx_node", ""))
        operator = found[1] if found else (classes[-1] if classes else "")
        return Origin(
            module=scopes[-2] if len(scopes) > 1 else "",
            kind=classes[-2].rpartition(".")[2] if len(classes) > 1 else "",
            operator=operator,
            instance=scopes[-1],
            source=_own_line(meta.get(f"{_META}stack_trace", "")),
        )
    parts = node.name.split("/")
    if node.name.startswith("/") and len(parts) > 2:
        inner = [part for part in parts[1:-1] if part]
        return Origin(module=module_path(inner), instance=node.name)
    return Origin(instance=node.name)


def note_origin(node: NodeProto, origin: Origin) -> None:
    """Store the origin of a node as dynamo does, for `origin_of`."""
    file, _, line = origin.source.rpartition(":")
    found = {
        "name_scopes": repr([origin.module, origin.instance]),
        "class_hierarchy": repr([origin.kind, origin.operator]),
        "stack_trace": f'File "{file}", line {line}' if file else "",
    }
    for key, value in found.items():
        if value:
            node.metadata_props.add(key=f"{_META}{key}", value=value)


def module_path(scopes: Sequence[str]) -> str:
    """Join scopes to a path: `encoder, layer, layer.0, self` is `encoder.layer.0.self`."""
    path: list[str] = []
    for scope in scopes:
        head, dot, _ = scope.rpartition(".")
        if dot and path and path[-1] == head:  # a ModuleList occurs twice
            path.pop()
        path.append(scope)
    return ".".join(path)


def _parsed_list(text: str | None) -> list[str]:
    if not text:
        return []
    try:
        return [str(part) for part in ast.literal_eval(text)]
    except (ValueError, SyntaxError):
        return []


def _own_line(trace: str) -> str:
    """Return the innermost line of a stack outside torch, as `model.py:7`."""
    found = re.findall(r'File "([^"]+)", line (\d+)', trace)
    files = [(re.split(r"[/\\]", path), line) for path, line in found]
    own = [(path[-1], line) for path, line in files if "torch" not in path]
    return ":".join(own[-1]) if own else ""


# Facts about nodes -------------------------------------------------------------------------------


def _nodes(model: Model) -> Iterator[NodeProto]:
    """Yield all nodes except Constants, which hold weights."""
    for graph in model.graphs():
        yield from (node for node in graph.nodes if not nd.is_op(node, "Constant"))


def _kernels(
    model: Model, custom_ops: Sequence[str]
) -> tuple[dict[str, tuple[str, ...]], dict[str, str]]:
    """Return each node's element types and, if it does not run, the reason, by first output."""
    kinds: dict[str, tuple[str, ...]] = {}
    missing: dict[str, str] = {}
    for tried in try_kernels(model, custom_ops):
        key = next(iter(nd.outputs_of(tried.node)), "")
        kinds[key] = tried.kinds
        if tried.reason:
            missing[key] = f"{nd.qualified(tried.node)}: {tried.reason}"
    return kinds, missing


def _types(model: Model) -> Mapping[str, str]:
    """Return the element types of values where inference finds them."""
    proto = shape_inference.infer_shapes(model.to_proto())
    declared = (*proto.graph.input, *proto.graph.value_info, *proto.graph.output)
    found = {value.name: from_proto(value.type) for value in declared}
    types = {name: dtype_name(kind.dtype) for name, kind in found.items() if kind is not None}
    return types | {t.name: dtype_name(t.data_type) for t in proto.graph.initializer}


def _row(
    key: tuple[str, str, str],
    members: Sequence[tuple[NodeProto, Origin]],
    model: Model,
    kinds: Mapping[str, tuple[str, ...]],
    missing: Mapping[str, str],
    types: Mapping[str, str],
) -> OperatorRow:
    nodes = [node for node, _ in members]
    outputs = [next(iter(nd.outputs_of(node)), "") for node in nodes]
    reasons = tuple(dict.fromkeys(missing[name] for name in outputs if name in missing))
    own = {(f.domain, f.name) for f in model.functions}
    return OperatorRow(
        module=key[0],
        kind=key[1],
        operator=key[2],
        calls=len({origin.instance for _, origin in members}),
        nodes=dict(Counter(nd.qualified(node) for node in nodes).most_common()),
        opset=max((_since(node, model) for node in nodes), default=0),
        dtypes=tuple(dict.fromkeys(k for name in outputs for k in kinds.get(name, ()))),
        changes=tuple(_changes(key[2], nodes, types)),
        standard=all(
            nd.domain_of(n) in ("", "ai.onnx.ml") or (n.domain, n.op_type) in own for n in nodes
        ),
        runs=not reasons,
        reasons=reasons,
        source=next((origin.source for _, origin in members if origin.source), ""),
    )


def _since(node: NodeProto, model: Model) -> int:
    """Return the opset that introduced this version of the operator; 0 if it is not standard."""
    domain = nd.domain_of(node)
    try:
        return defs.get_schema(node.op_type, model.opsets.get(domain, 1), domain).since_version
    except Exception:  # onnx's private class for a missing schema
        return 0


def _changes(operator: str, nodes: Iterable[NodeProto], types: Mapping[str, str]) -> Iterator[str]:
    """Yield the casts and reshapes among the nodes that the operator itself does not imply."""
    found: Counter[str] = Counter()
    for node in nodes:
        inputs, outputs = list(nd.inputs_of(node)), list(nd.outputs_of(node))
        if nd.is_op(node, "Cast") and not _IMPLIES_CAST.search(operator):
            before, after = types.get(inputs[0], "?"), types.get(outputs[0], "?")
            found[f"Cast {before} -> {after}"] += 1
        elif node.op_type in _RESHAPES and not (
            operator == node.op_type or _IMPLIES_RESHAPE.search(operator)
        ):
            found[f"{node.op_type} added by the exporter"] += 1
    for what, count in found.items():
        yield what if count == 1 else f"{what}, {count} times"
