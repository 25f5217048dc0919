"""A plan: which node computes in which numbers. It is data, made by one pass and read by another.

As JSON a user can print it, edit it and feed it back:

    {"version": 1, "nodes": [
      {"node": "MatMul_3", "output": "y", "op": "MatMul", "scheme": "dynamic", "axis": 1},
      {"node": "MatMul_4", "output": "z", "op": "MatMul", "scheme": "float", "reason": "..."},
      {"node": "Conv_1", "output": "c", "op": "Conv", "scheme": "static", "axis": 0},
      {"node": "MaxPool_2", "output": "p", "op": "MaxPool", "scheme": "static", "tied": true}],
     "tensors": [
      {"tensor": "x", "low": -1.5, "high": 2.0},
      {"tensor": "c", "dtype": "int8", "scale": 0.02, "zero": -5}]}

A node is known by its first output, whose name is unique, or else by its own name. What a plan does
not mention stays in floats. A static node reads tensors that have a range here; `tied` makes what
it reads and what it makes share one: the least that covers all of theirs.

Dynamic layers and static ones live in one plan: each pass applies the entries of its scheme.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from onnx import NodeProto

from toolkit import nodes as nd
from toolkit.errors import UsageError
from toolkit.model import Model

if TYPE_CHECKING:
    from toolkit.context import Context

Scheme = Literal["float", "dynamic", "static", "weight-only"]
WeightType = Literal["int8", "uint8", "int4", "uint4"]
ActivationType = Literal["uint8", "int8"]
Method = Literal["rtn", "hqq", "gptq"]
BLOCK_SIZES = (16, 32, 64, 128, 256)

_VERSION = 1
_NAMED = 3
"""How many nodes a note names."""


@dataclass(frozen=True, slots=True)
class Entry:
    """How one node computes. `axis` is that of the weight's scales; None: one scale for all.

    `block_size` weights along an input's axis share a scale; None: all of them. With
    `float_result`, a static convolution of single pixels leaves its result in floats.
    """

    node: str = ""
    output: str = ""
    op: str = ""
    scheme: Scheme = "float"
    weight: WeightType = "int8"
    symmetric: bool = True
    reduce_range: bool = False
    axis: int | None = None
    tied: bool = False
    float_result: bool = False
    block_size: int | None = None
    method: Method = "rtn"
    reason: str = ""

    @classmethod
    def of(cls, node: NodeProto, **how: Any) -> Entry:
        output = next(iter(nd.outputs_of(node)), "")
        return cls(node=node.name, output=output, op=nd.qualified(node), **how)

    @property
    def label(self) -> str:
        return f"{self.op} '{self.node or self.output}'".strip()


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """What an activation can hold: a range, or the scale and the zero point themselves.

    See `passes.quantize.static_ranges` for how these follow from a range.
    """

    tensor: str = ""
    dtype: ActivationType = "uint8"
    symmetric: bool = False
    low: float | None = None
    high: float | None = None
    scale: float | None = None
    zero: int | None = None


@dataclass(frozen=True)
class Plan:
    """The entries of all nodes that were considered, in the order of the graph; and of tensors."""

    entries: tuple[Entry, ...] = ()
    tensors: tuple[TensorEntry, ...] = ()

    def find(self, node: NodeProto) -> Entry | None:
        """What the plan says about a node."""
        output = next(iter(nd.outputs_of(node)), "")
        return self._by_output.get(output) or (self._by_name.get(node.name) if node.name else None)

    def quantized(self) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.entries if entry.scheme != "float")

    def tensor(self, name: str) -> TensorEntry | None:
        """What the plan says about a tensor."""
        return self._by_tensor.get(name)

    def turned(
        self, which: Iterable[Entry | str], scheme: Scheme = "float", reason: str = ""
    ) -> Plan:
        """The plan with other schemes for some nodes: entries, or names of outputs or nodes.

        The rest of an entry stays, so that what is turned to float can be turned back.
        """
        keys = {_key(entry): entry for entry in self.entries}
        chosen: set[str] = set()
        for item in which:
            known = (item.node and item.node) or item.output if isinstance(item, Entry) else item
            found = keys.get(_key(item)) if isinstance(item, Entry) else self._named(item)
            if found is None:
                raise UsageError(f"the plan has no node '{known}'")
            chosen.add(_key(found))
        turned = (
            replace(e, scheme=scheme, reason=reason) if _key(e) in chosen else e
            for e in self.entries
        )
        return replace(self, entries=tuple(turned))

    def merged(self, other: Plan) -> Plan:
        """Both plans in one. Of a node or tensor in both, `other` counts unless it says float."""
        entries = {_key(entry): entry for entry in self.entries}
        for entry in other.entries:
            if entry.scheme != "float" or _key(entry) not in entries:
                entries[_key(entry)] = entry
        tensors = {entry.tensor: entry for entry in (*self.tensors, *other.tensors)}
        return Plan(tuple(entries.values()), tuple(tensors.values()))

    def to_json(self) -> str:
        """One entry a line, without what is as usual."""
        usual = asdict(Entry())
        lines = [
            json.dumps({k: v for k, v in asdict(e).items() if k == "scheme" or v != usual[k]})
            for e in self.entries
        ]
        parts = [f'"version": {_VERSION}', _listed("nodes", lines)]
        if self.tensors:
            plain = asdict(TensorEntry())
            shown = ({k: v for k, v in asdict(t).items() if v != plain[k]} for t in self.tensors)
            parts.append(_listed("tensors", [json.dumps(item) for item in shown]))
        return "{\n  " + ",\n  ".join(parts) + "\n}\n"

    @classmethod
    def from_json(cls, text: str, source: str = "plan") -> Plan:
        """Read what `to_json` wrote; UsageError, in one line, for anything else."""
        try:
            data: Any = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{source} is not JSON: {error}") from error
        if not isinstance(data, dict):
            raise UsageError(f"{source}: expected an object with 'version' and 'nodes'")
        found = cast("dict[str, Any]", data)
        version = found.get("version")
        if type(version) is not int or version != _VERSION:
            raise UsageError(f"{source}: version {version!r} is not {_VERSION}")
        unknown = sorted(set(found) - {"version", "nodes", "tensors"})
        if unknown:
            raise UsageError(f"{source}: '{unknown[0]}' is none of version, nodes, tensors")
        nodes = _items(found.get("nodes"), f"{source}: 'nodes'")
        tensors = _items(found.get("tensors", []), f"{source}: 'tensors'")
        entries = tuple(_entry(item, f"{source}: node {i}") for i, item in enumerate(nodes))
        ranges = tuple(_tensor(item, f"{source}: tensor {i}") for i, item in enumerate(tensors))
        _require_once(map(_key, entries), source)
        _require_once((f"tensor {found.tensor}" for found in ranges), source)
        return cls(entries, ranges)

    def require_known(self, model: Model, source: str = "plan") -> None:
        """UsageError unless every entry is about a node or a tensor of the model."""
        nodes = [node for graph in model.graphs() for node in graph.nodes]
        outputs = {name for node in nodes for name in nd.outputs_of(node)[:1]}
        names = {node.name for node in nodes if node.name}
        unknown = [
            entry.label
            for entry in self.entries
            if (entry.output not in outputs if entry.output else entry.node not in names)
        ]
        _refuse(unknown, f"{source}: the model has no node")
        values = {name for node in model.graph.nodes for name in nd.outputs_of(node)}
        values.update(model.graph.inputs)
        strange = [f"'{t.tensor}'" for t in self.tensors if t.tensor not in values]
        _refuse(strange, f"{source}: the main graph has no tensor")

    def _named(self, name: str) -> Entry | None:
        if name in self._by_output:
            return self._by_output[name]
        return next((e for e in self.entries if name and e.node == name), None)

    @cached_property
    def _by_tensor(self) -> Mapping[str, TensorEntry]:
        return {entry.tensor: entry for entry in self.tensors}

    @cached_property
    def _by_output(self) -> Mapping[str, Entry]:
        return {entry.output: entry for entry in self.entries if entry.output}

    @cached_property
    def _by_name(self) -> Mapping[str, Entry]:
        return {entry.node: entry for entry in self.entries if not entry.output}


def nodes_of(model: Model) -> Iterator[NodeProto]:
    """The nodes of all graphs."""
    return (node for graph in model.graphs() for node in graph.nodes)


def note_left(plan: Plan, ctx: Context) -> None:
    """One line for each reason, with the first of the nodes that it is about."""
    left: dict[str, list[str]] = {}
    for entry in plan.entries:
        if entry.scheme == "float" and entry.reason:
            left.setdefault(entry.reason, []).append(entry.label)
    for reason, labels in left.items():
        more = f" and {len(labels) - _NAMED} more" if len(labels) > _NAMED else ""
        ctx.note(f"left float: {', '.join(labels[:_NAMED])}{more} ({reason})")


def as_applied(model: Model, plan: Plan) -> Plan:
    """The plan with what was not done as float: what cannot be quantized, or did not hold."""
    sites = {site for places in model.journal.places_by_rule().values() for site in places}

    def is_done(entry: Entry) -> bool:
        done = entry.scheme == "float" or not entry.output or entry.output in sites
        return done or _reads_integers(model, entry.output)

    entries = [
        e if is_done(e) else replace(e, scheme="float", reason="it could not be kept")
        for e in plan.entries
    ]
    return replace(plan, entries=tuple(entries))


def _reads_integers(model: Model, output: str) -> bool:
    """Whether all that a node reads was in 8 bits for others: then nothing of it changes."""
    node = model.graph.producer(output)
    makers = [model.graph.producer(name) for name in nd.inputs_of(node)] if node else []
    return bool(makers) and all(nd.is_op(maker, "DequantizeLinear") for maker in makers)


@dataclass(frozen=True, slots=True)
class Selection:
    """Which nodes to consider: patterns of an operator's name, a node's, or its first output's."""

    include: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = ()

    def takes(self, node: NodeProto) -> bool:
        return matches(node, self.include) and not matches(node, self.exclude)

    def idle(self, nodes: Iterable[NodeProto]) -> list[str]:
        """The patterns that no node matches: most likely mistyped."""
        waiting = dict.fromkeys((*self.include, *self.exclude))
        for node in nodes:
            for pattern in [p for p in waiting if p == "*" or matches(node, (p,))]:
                del waiting[pattern]
            if not waiting:
                break
        return [pattern for pattern in waiting if pattern != "*"]


def matches(node: NodeProto, patterns: Iterable[str]) -> bool:
    """Whether any pattern (`Gemm`, `*/attention/*`) fits the operator, the name or the output."""
    names = [nd.qualified(node), node.name, *nd.outputs_of(node)[:1]]
    return any(fnmatchcase(name, pattern) for pattern in patterns for name in names if name)


def _key(entry: Entry) -> str:
    """What tells an entry's node from others."""
    return f"output {entry.output}" if entry.output else f"node {entry.node}"


def _refuse(unknown: list[str], what: str) -> None:
    if unknown:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise UsageError(f"{what} {unknown[0]}{more}")


# -- JSON

_CHOICES: Mapping[str, tuple[Any, ...]] = {
    "scheme": get_args(Scheme),
    "weight": get_args(WeightType),
    "dtype": get_args(ActivationType),
    "symmetric": (True, False),
    "reduce_range": (True, False),
    "tied": (True, False),
    "float_result": (True, False),
    "block_size": (*BLOCK_SIZES, None),
    "method": get_args(Method),
}
_NUMBERS = ("low", "high", "scale")
_WHOLE = ("axis", "zero")
_SMALLEST, _LARGEST = 2.0**-126, 3.4e38
"""Scales that 32-bit floats hold as normal numbers."""


def _listed(name: str, lines: list[str]) -> str:
    body = ",\n    ".join(lines)
    return f'"{name}": [\n    {body}\n  ]'


def _require_once(names: Iterable[str], source: str) -> None:
    counted = Counter(names)
    if counted and max(counted.values()) > 1:
        kind, _, name = counted.most_common(1)[0][0].partition(" ")
        raise UsageError(f"{source}: {kind} '{name}' is there twice")


def _items(listed: Any, what: str) -> list[Any]:
    if not isinstance(listed, list):
        raise UsageError(f"{what} is not a list")
    return cast("list[Any]", listed)


def _entry(item: Any, where: str) -> Entry:
    given = _checked(item, [field.name for field in fields(Entry)], where)
    if not given.get("node") and not given.get("output"):
        raise UsageError(f"{where}: give its 'output' or 'node'")
    return Entry(**given)


def _tensor(item: Any, where: str) -> TensorEntry:
    given = _checked(item, [field.name for field in fields(TensorEntry)], where)
    if not given.get("tensor"):
        raise UsageError(f"{where}: give its name as 'tensor'")
    found = TensorEntry(**given)
    where = f"{where} ('{found.tensor}')"
    ranged = found.low is not None and found.high is not None
    if ranged == (found.scale is not None):
        raise UsageError(f"{where}: give either 'low' and 'high', or 'scale' and 'zero'")
    if found.low is not None and found.high is not None and found.low > found.high:
        raise UsageError(f"{where}: low {found.low} is above high {found.high}")
    if found.scale is not None:
        least, most = (0, 255) if found.dtype == "uint8" else (-128, 127)
        if not _SMALLEST <= found.scale <= _LARGEST:
            raise UsageError(f"{where}: scale {found.scale} is no positive 32-bit float")
        if found.zero is None or not least <= found.zero <= most:
            raise UsageError(f"{where}: zero {found.zero} is not in {least}..{most}")
    return found


def _checked(item: Any, names: list[str], where: str) -> dict[str, Any]:
    """The object's members, each of its field's kind."""
    if not isinstance(item, dict):
        raise UsageError(f"{where} is not an object")
    given = cast("dict[str, Any]", item)
    unknown = sorted(set(given) - set(names))
    if unknown:
        raise UsageError(f"{where}: '{unknown[0]}' is none of {', '.join(names)}")
    for name, value in given.items():
        if name in _CHOICES:
            if not any(value == c and type(value) is type(c) for c in _CHOICES[name]):
                listed = ", ".join(map(str, _CHOICES[name])).lower()
                raise UsageError(f"{where}: {name} {value!r} is none of {listed}")
        elif name in _WHOLE:
            if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
                raise UsageError(f"{where}: {name} {value!r} is no whole number")
        elif name in _NUMBERS:
            if value is not None and not _is_finite(value):
                raise UsageError(f"{where}: {name} {value!r} is no number")
        elif not isinstance(value, str):
            raise UsageError(f"{where}: {name} {value!r} is no text")
    return given


def _is_finite(value: Any) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number that no float holds
        return False
