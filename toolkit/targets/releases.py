"""The releases of onnxruntime: what each of them loads on a CPU.

The table `data/ort-cpu.json` is measured from the wheels by `benchmarks/ort_releases.py`. It holds,
by intervals of releases, the kernels with their versions and types, the schemas of operators that
ONNX does not define, and the newest opset and IR version. The runtime loads a node if it has a
kernel for the operator's version and the types, or if ONNX defines the operator as a function whose
operators it has kernels for.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.errors import UsageError

if TYPE_CHECKING:
    from onnx import FunctionProto, NodeProto, TypeProto

    from toolkit.ir.graph import Graph
    from toolkit.ir.model import Model

_TABLE = Path(__file__).parent / "data" / "ort-cpu.json"

_STANDARD = ("", "ai.onnx.ml")
_DISTRIBUTIONS = ("onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino", "onnxruntime-directml")

_TYPE_NAMES = {"float32": "float", "float64": "double"}
"""Element types that the runtime calls by another name than numpy."""


_SINCE = {("MatMulNBits", "bits", 8): (1, 22), ("DequantizeLinear", "block_size", None): (1, 19)}
"""(Operator, attribute, value) -> the first release that runs it, where the table cannot tell; None
stands for every value but 0."""


@dataclass(frozen=True, slots=True)
class _Kernel:
    """A kernel: the versions of the operator that it covers, and its types by constraint."""

    first: int
    last: int
    """0 if open-ended; then it covers the version that it starts with."""
    types: Mapping[str, frozenset[str]]

    def covers(self, since: int) -> bool:
        return self.first == since or self.first < since <= self.last


@dataclass(frozen=True, slots=True)
class _Schema:
    """The operands and results of an operator as (name, type constraint), and its attributes."""

    since: int
    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]
    attributes: frozenset[str]
    function: bool = False

    @property
    def repeats(self) -> bool:
        """Whether the last operand may be given several times."""
        return bool(self.inputs) and self.inputs[-1][0].endswith("*")


@dataclass(frozen=True, slots=True)
class Use:
    """The use of an operator by a node: operands and results as element types, "" if unknown."""

    op_type: str
    domain: str
    opset: int
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    attributes: frozenset[tuple[str, int]] = frozenset()
    """Names and values; 0 for values that are not integers."""
    node: NodeProto | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return f"{self.domain}::{self.op_type}" if self.domain else self.op_type

    def with_type(self, old: str, new: str) -> Use:
        """Return the use with operands and results of another type."""
        inputs = tuple(new if kind == old else kind for kind in self.inputs)
        outputs = tuple(new if kind == old else kind for kind in self.outputs)
        return replace(self, inputs=inputs, outputs=outputs)


@dataclass(frozen=True)
class Release:
    """One release of onnxruntime on a CPU."""

    version: str
    max_opset: int
    max_ir: int
    index: int = field(repr=False)

    def __str__(self) -> str:
        return f"onnxruntime {self.version}"

    def to_json(self) -> dict[str, Any]:
        return {"version": self.version, "opset": self.max_opset, "ir_version": self.max_ir}

    @property
    def number(self) -> tuple[int, int]:
        """The version, for comparison."""
        return _number(self.version)

    def obstacle(self, use: Use) -> str:
        """Return why a node does not load, or an empty string."""
        if use not in self._known:
            self._known[use] = self._find_obstacle(use)
        return self._known[use]

    def runs_at(self, use: Use, opset: int) -> bool:
        """Return whether a standard operator has a kernel at an opset, or is younger than that."""
        own = f":{use.op_type}" in _table()["schemas"]
        if not own and _standard_schema(use.op_type, opset, "") is None:
            return True
        return not self.obstacle(replace(use, opset=opset))

    @cached_property
    def _known(self) -> dict[Use, str]:
        return {}

    @cached_property
    def _kernels(self) -> Mapping[str, list[_Kernel]]:
        return {
            name: [
                _Kernel(lo, hi, {n: frozenset(t.split()) for n, t in types.items()})
                for first, last, lo, hi, types in entries
                if first <= self.index <= last
            ]
            for name, entries in _table()["kernels"].items()
        }

    @cached_property
    def _schemas(self) -> Mapping[str, list[_Schema]]:
        """The schemas of operators outside the standard."""
        return {
            name: [
                _Schema(since, _formals(inputs), _formals(outputs), frozenset(attributes.split()))
                for first, last, since, inputs, outputs, attributes in entries
                if first <= self.index <= last
            ]
            for name, entries in _table()["schemas"].items()
        }

    def _find_obstacle(self, use: Use) -> str:
        own = [
            s for s in self._schemas.get(f"{use.domain}:{use.op_type}", ()) if s.since <= use.opset
        ]
        schema = max(own, key=lambda s: s.since, default=None)
        if use.domain in _STANDARD:
            if use.domain == "" and use.opset > self.max_opset:
                return f"opset {use.opset} is newer than {self.max_opset}, the newest it loads"
            schema = _standard_schema(use.op_type, use.opset, use.domain) or schema
        elif not use.domain.startswith("com.m"):
            return ""  # an operator of a custom library
        if schema is None:
            return f"{use}: there is no such operator"
        if use.domain not in _STANDARD:
            unknown = sorted({name for name, _ in use.attributes} - schema.attributes)
            if unknown:
                return f"{use}: it has no attribute {', '.join(unknown)}"
            if len(use.inputs) > len(schema.inputs) and not schema.repeats:
                return f"{use}: it takes at most {len(schema.inputs)} operands"
        if use.op_type == "Constant" and use.domain == "":
            return ""  # becomes a weight
        name = f"{use} (opset {use.opset})" if use.domain == "" else str(use)
        covering = [
            kernel
            for kernel in self._kernels.get(f"{use.domain}:{use.op_type}", ())
            if kernel.covers(schema.since)
        ]
        # Nodes without a kernel for float16 get casts to float32.
        for candidate in (use, use.with_type("float16", "float32")):
            if any(_accepts(kernel, schema, candidate) for kernel in covering):
                return self._attribute_obstacle(use)
        if schema.function and self._expands(use):
            return ""
        kinds = ", ".join(dict.fromkeys(filter(None, use.inputs)))
        return f"{name}: no kernel" + (f" for {kinds}" if covering and kinds else "")

    def _attribute_obstacle(self, use: Use) -> str:
        """Return which value of an attribute the kernel does not take, or an empty string."""
        for name, value in use.attributes:
            exact = _SINCE.get((use.op_type, name, value))
            first = exact or (_SINCE.get((use.op_type, name, None)) if value else None)
            if first is not None and self.number < first:
                return f"{use}: no kernel for {name} = {value}"
        return ""

    def _expands(self, use: Use) -> bool:
        """Return whether ONNX defines the operator by operators that have kernels."""
        body = _function_body(use)
        return body is not None and not any(map(self.obstacle, _uses_in(body, use)))


def opset_ceiling(model: Model, release: Release) -> int:
    """Return the newest opset at which a release has kernels for the model's operators.

    That may be older than the newest opset it loads: 1.23 loads opset 23 and has no kernel for its
    QuantizeLinear. Operators that it lacks at every opset, and those that an older opset does not
    have, do not count: they are written in another form.
    """
    uses = [use for use in uses_of(model) if use.domain == ""]
    newest = min(release.max_opset, model.opsets.get("", 1))
    for use in uses:
        at = (opset for opset in range(newest, 0, -1) if release.runs_at(use, opset))
        newest = next(at, newest)
    return newest


def releases() -> list[Release]:
    """Return all known releases, oldest first."""
    return list(_releases())


@cache
def _releases() -> tuple[Release, ...]:
    table = _table()
    rows = zip(table["releases"], table["opset"], table["ir"], strict=True)
    return tuple(Release(_minor(v), opset, ir, i) for i, (v, opset, ir) in enumerate(rows))


def find_release(version: str) -> Release:
    """Return the release of a version such as `1.18` or `1.18.1`; raises UsageError.

    A version newer than all known ones is treated as the newest.
    """
    known = releases()
    found = re.fullmatch(r"(?:onnxruntime[ =]*)?(\d+)\.(\d+)(?:\.\d+)*", version.strip())
    if found is not None:
        number = int(found[1]), int(found[2])
        for release in known:
            if _number(release.version) == number:
                return release
    listed = ", ".join(release.version for release in known)
    raise UsageError(f"unknown onnxruntime version '{version}': choose one of {listed}")


@cache
def installed_release() -> Release:
    """Return the release that is installed, or the nearest known one that is older."""
    found = re.match(r"(\d+)\.(\d+)", runtime_version())
    known = releases()
    if found is None:
        return known[-1]
    number = int(found[1]), int(found[2])
    return next((r for r in reversed(known) if _number(r.version) <= number), known[0])


@cache
def runtime_version() -> str:
    """Return the version of onnxruntime, from any of its distributions."""
    for name in _DISTRIBUTIONS:
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return "unknown"


def obstacles(model: Model, release: Release) -> list[str]:
    """Return the reasons why a release does not load the model, in plain words."""
    return _obstacles(model, release, uses_of(model))


def oldest_release(model: Model) -> Release | None:
    """Return the oldest release such that it and all newer ones load the model, or None."""
    uses = uses_of(model)
    oldest = None
    for release in reversed(releases()):
        if _obstacles(model, release, uses):
            break
        oldest = release
    return oldest


@dataclass(frozen=True, slots=True)
class Needs:
    """The runtime that a model needs: the oldest release from which on all load it, or None."""

    release: Release | None
    opset: int
    ir_version: int

    def __str__(self) -> str:
        runtime = f"onnxruntime >= {self.release.version}" if self.release else "no onnxruntime"
        return f"{runtime}, opset {self.opset}, IR {self.ir_version}"

    def to_json(self) -> dict[str, Any]:
        return {
            "onnxruntime": self.release.version if self.release else None,
            "opset": self.opset,
            "ir_version": self.ir_version,
        }


def needs_of(model: Model) -> Needs:
    """Return the oldest runtime, the opset and the IR version that a model needs."""
    return Needs(oldest_release(model), model.opsets.get("", 0), model.ir_version)


def _obstacles(model: Model, release: Release, uses: Mapping[Use, int]) -> list[str]:
    opset, found = model.opsets.get("", 1), list[str]()
    if model.ir_version > release.max_ir:
        newest = f"{release.max_ir}, the newest it loads"
        found.append(f"IR version {model.ir_version} is newer than {newest}")
    if opset > release.max_opset:
        return [*found, f"opset {opset} is newer than {release.max_opset}, the newest it loads"]
    reasons: Counter[str] = Counter()
    for use, count in uses.items():
        reason = release.obstacle(use)
        if reason:
            reasons[reason] += count
    many = {reason: f" ({n} nodes)" if n > 1 else "" for reason, n in reasons.items()}
    return [*found, *(f"{reason}{count}" for reason, count in many.items())]


def uses_of(model: Model) -> Mapping[Use, int]:
    """Count the uses of operators in a model and its functions."""
    from toolkit.ir import node as nd

    local = {(nd.plain_domain(f.domain), f.name) for f in model.functions}
    counts: Counter[Use] = Counter()
    types = _types_of(model)
    for node in model.nodes():
        domain = nd.domain_of(node)
        if (domain, node.op_type) not in local:
            counts[
                Use(
                    node.op_type,
                    domain,
                    model.opsets.get(domain, 1),
                    tuple(types.get(name, "") for name in node.input),
                    tuple(types.get(name, "") for name in node.output),
                    frozenset((a.name, a.i) for a in node.attribute),
                    node,
                )
            ] += 1
    for function in model.functions:
        imports = {nd.plain_domain(e.domain): e.version for e in function.opset_import}
        counts.update(
            use
            for use in _untyped(function.node, imports)
            if (use.domain, use.op_type) not in local
        )
    return counts


def _untyped(nodes: Iterable[NodeProto], imports: Mapping[str, int]) -> Iterator[Use]:
    """Yield the uses of operators by nodes of a function, where types are unknown."""
    from toolkit.ir import node as nd

    for node in nodes:
        domain = nd.domain_of(node)
        yield Use(node.op_type, domain, imports.get(domain, 1), node=node)
        for inner in nd.graphs_of(node):
            yield from _untyped(inner.node, imports)


def operand_types(graph: Graph, node: NodeProto) -> tuple[str, ...]:
    """Return the element types of a node's operands, empty where unknown."""
    return tuple(map(_type_name, (graph.dtype(name) if name else 0 for name in node.input)))


def _types_of(model: Model) -> Mapping[str, str]:
    """Return the element types of values, as far as they are known."""
    from toolkit.ir import node as nd

    known: dict[str, str] = {}
    for graph, node in model.places():
        for name in (*nd.inputs_of(node), *nd.outputs_of(node)):
            if name not in known:
                known[name] = _type_name(graph.dtype(name))
    if not all(known.values()):
        from onnx import shape_inference

        with suppress(Exception):  # inference fails at an invalid node
            inferred = shape_inference.infer_shapes(model.to_proto())
            for info in inferred.graph.value_info:
                if not known.get(info.name):
                    known[info.name] = _type_name(info.type.tensor_type.elem_type)
    return known


def _accepts(kernel: _Kernel, schema: _Schema, use: Use) -> bool:
    """Return whether a kernel takes the types of a use, as far as they are known."""
    for formals, kinds in ((schema.inputs, use.inputs), (schema.outputs, use.outputs)):
        for index, kind in enumerate(kinds):
            if not kind or not formals:
                continue
            name, constraint = formals[min(index, len(formals) - 1)]
            accepted = kernel.types.get(constraint, kernel.types.get(name))
            if accepted is not None and _TYPE_NAMES.get(kind, kind) not in accepted:
                return False
    return True


@cache
def _standard_schema(op_type: str, opset: int, domain: str) -> _Schema | None:
    from onnx import defs

    if not defs.has(op_type, opset, domain):
        return None
    found: Any = defs.get_schema(op_type, opset, domain)  # its type stubs lack functions
    return _Schema(
        since=found.since_version,
        inputs=tuple((formal.name, formal.type_str) for formal in found.inputs),
        outputs=tuple((formal.name, formal.type_str) for formal in found.outputs),
        attributes=frozenset(found.attributes),
        function=found.has_function or found.has_context_dependent_function,
    )


def _function_body(use: Use) -> FunctionProto | None:
    """Return the definition of an operator as a function, or None."""
    from onnx import FunctionProto, NodeProto, defs

    schema: Any = defs.get_schema(use.op_type, use.opset, use.domain)  # not in its type stubs
    fixed: list[int] = [v for v in schema.function_opset_versions if v <= use.opset]
    typed: list[int] = [
        v for v in schema.context_dependent_function_opset_versions if v <= use.opset
    ]
    with suppress(Exception):  # some definitions need types that are unknown
        if fixed:
            version = max(fixed)
            body = FunctionProto.FromString(schema.get_function_with_opset_version(version))
            # The runtime takes no such definition by operators that have changed since.
            return body if all(_same_since(n, version, use.opset) for n in body.node) else None
        node = use.node or NodeProto(op_type=use.op_type, input=["x"], output=["y"])
        types = [_tensor_type(kind) for kind in _padded(use.inputs, len(node.input))]
        return FunctionProto.FromString(
            schema.get_context_dependent_function_with_opset_version(
                max(typed),
                node.SerializeToString(),
                [type_.SerializeToString() for type_ in types],
            )
        )
    return None


def _same_since(node: NodeProto, one: int, other: int) -> bool:
    from onnx import defs

    schemas = (defs.get_schema(node.op_type, version, node.domain) for version in (one, other))
    return len({schema.since_version for schema in schemas}) == 1


def _uses_in(body: FunctionProto, use: Use) -> Iterator[Use]:
    """Yield the uses of operators in the definition of an operator for given operands."""
    from onnx import GraphProto, ModelProto, ValueInfoProto, helper, shape_inference

    kinds = _padded(use.inputs, len(body.input))
    pairs = zip(body.input, kinds, strict=True)
    inputs = [ValueInfoProto(name=name, type=_tensor_type(kind)) for name, kind in pairs]
    graph = GraphProto(name="body", node=body.node, input=inputs)
    graph.output.extend(ValueInfoProto(name=name) for name in body.output)
    model = ModelProto(ir_version=8, graph=graph, opset_import=[helper.make_opsetid("", use.opset)])
    with suppress(Exception):  # attributes that refer to those of the node
        graph = shape_inference.infer_shapes(model).graph
    types = {
        info.name: _type_name(info.type.tensor_type.elem_type)
        for info in (*inputs, *graph.value_info, *graph.output)
    }
    for inner in _untyped(body.node, {"": use.opset}):
        if inner.node is not None:
            inputs_ = tuple(types.get(name, "") for name in inner.node.input)
            yield replace(inner, inputs=inputs_)


def _padded(kinds: Sequence[str], count: int) -> list[str]:
    """Return `count` element types: float32 for unknown ones."""
    return [kind or "float32" for kind in (*kinds, *("" for _ in range(count)))][:count]


def _tensor_type(kind: str) -> TypeProto:
    from onnx import TensorProto, TypeProto

    number = TensorProto.DataType.Value(_TYPE_NAMES.get(kind, kind).upper())
    return TypeProto(tensor_type=TypeProto.Tensor(elem_type=number))


def _type_name(dtype: int) -> str:
    from toolkit.ir.tensor_type import dtype_name

    return dtype_name(dtype) if dtype else ""


@cache
def _table() -> Mapping[str, Any]:
    return json.loads(_TABLE.read_text(encoding="utf-8"))


def _formals(text: str) -> tuple[tuple[str, str], ...]:
    """Parse operands written as `X:T B:T`."""
    pairs = (entry.split(":", 1) for entry in text.split(" ") if entry)
    return tuple((name, constraint) for name, constraint in pairs)


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _number(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
