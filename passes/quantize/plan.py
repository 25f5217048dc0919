"""A plan: which node computes in which numbers. It is data, made by one pass and read by another.

As JSON a user can print it, edit it and feed it back:

    {"version": 1, "nodes": [
      {"node": "MatMul_3", "output": "y", "op": "MatMul", "scheme": "dynamic", "axis": 1},
      {"node": "MatMul_4", "output": "z", "op": "MatMul", "scheme": "float", "reason": "..."}]}

A node is known by its first output, whose name is unique, or else by its own name. What a plan does
not mention stays in floats.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, Literal, cast, get_args

from onnx import NodeProto

from toolkit import nodes as nd
from toolkit.errors import UsageError
from toolkit.model import Model

Scheme = Literal["float", "dynamic", "static", "weight-only"]
WeightType = Literal["int8", "uint8", "int4", "uint4"]
Method = Literal["rtn", "hqq", "gptq"]
BLOCK_SIZES = (16, 32, 64, 128, 256)

_VERSION = 1


@dataclass(frozen=True, slots=True)
class Entry:
    """How one node computes. `axis` is that of the weight's scales; None: one scale for all.

    `block_size` weights along an input's axis share a scale; None: all of them.
    """

    node: str = ""
    output: str = ""
    op: str = ""
    scheme: Scheme = "float"
    weight: WeightType = "int8"
    symmetric: bool = True
    reduce_range: bool = False
    axis: int | None = None
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


@dataclass(frozen=True)
class Plan:
    """The entries of all nodes that were considered, in the order of the graph."""

    entries: tuple[Entry, ...] = ()

    def find(self, node: NodeProto) -> Entry | None:
        """What the plan says about a node."""
        output = next(iter(nd.outputs_of(node)), "")
        return self._by_output.get(output) or (self._by_name.get(node.name) if node.name else None)

    def quantized(self) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.entries if entry.scheme != "float")

    def to_json(self) -> str:
        """One entry a line, without what is as usual."""
        usual = asdict(Entry())
        lines = [
            json.dumps({k: v for k, v in asdict(e).items() if k == "scheme" or v != usual[k]})
            for e in self.entries
        ]
        body = ",\n    ".join(lines)
        return f'{{\n  "version": {_VERSION},\n  "nodes": [\n    {body}\n  ]\n}}\n'

    @classmethod
    def from_json(cls, text: str, source: str = "plan") -> Plan:
        """Read what `to_json` wrote; UsageError, in one line, for anything else."""
        try:
            data: Any = json.loads(text)
        except ValueError as error:
            raise UsageError(f"{source} is not JSON: {error}") from error
        if not isinstance(data, dict):
            raise UsageError(f"{source}: expected an object with 'version' and 'nodes'")
        found = cast("dict[str, Any]", data)
        if found.get("version") != _VERSION:
            raise UsageError(f"{source}: version {found.get('version')!r} is not {_VERSION}")
        nodes = found.get("nodes")
        if not isinstance(nodes, list):
            raise UsageError(f"{source}: 'nodes' is not a list")
        listed = cast("list[Any]", nodes)
        return cls(tuple(_entry(item, f"{source}: node {i}") for i, item in enumerate(listed)))

    def require_known(self, model: Model, source: str = "plan") -> None:
        """UsageError unless every entry is about a node of the model."""
        nodes = [node for graph in model.graphs() for node in graph.nodes]
        outputs = {name for node in nodes for name in nd.outputs_of(node)[:1]}
        names = {node.name for node in nodes if node.name}
        unknown = [
            entry.label
            for entry in self.entries
            if (entry.output not in outputs if entry.output else entry.node not in names)
        ]
        if unknown:
            more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
            raise UsageError(f"{source}: the model has no node {unknown[0]}{more}")

    @cached_property
    def _by_output(self) -> Mapping[str, Entry]:
        return {entry.output: entry for entry in self.entries if entry.output}

    @cached_property
    def _by_name(self) -> Mapping[str, Entry]:
        return {entry.node: entry for entry in self.entries if not entry.output}


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


_CHOICES: Mapping[str, tuple[Any, ...]] = {
    "scheme": get_args(Scheme),
    "weight": get_args(WeightType),
    "symmetric": (True, False),
    "reduce_range": (True, False),
    "block_size": (*BLOCK_SIZES, None),
    "method": get_args(Method),
}


def _entry(item: Any, where: str) -> Entry:
    if not isinstance(item, dict):
        raise UsageError(f"{where} is not an object")
    given = cast("dict[str, Any]", item)
    names = [field.name for field in fields(Entry)]
    unknown = sorted(set(given) - set(names))
    if unknown:
        raise UsageError(f"{where}: '{unknown[0]}' is none of {', '.join(names)}")
    if not given.get("node") and not given.get("output"):
        raise UsageError(f"{where}: give its 'output' or 'node'")
    for name, value in given.items():
        if name in _CHOICES:
            if not any(value == c and type(value) is type(c) for c in _CHOICES[name]):
                listed = ", ".join(map(str, _CHOICES[name])).lower()
                raise UsageError(f"{where}: {name} {value!r} is none of {listed}")
        elif name == "axis":
            if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
                raise UsageError(f"{where}: axis {value!r} is no whole number")
        elif not isinstance(value, str):
            raise UsageError(f"{where}: {name} {value!r} is no text")
    return Entry(**given)
