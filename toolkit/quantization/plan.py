"""The quantization plan: the number format in which each node computes.

As JSON, it can be printed, edited and applied:

    {"version": 1, "nodes": [
      {"node": "MatMul_3", "output": "y", "op": "MatMul", "scheme": "dynamic", "axis": 1},
      {"node": "MatMul_4", "output": "z", "op": "MatMul", "scheme": "float", "reason": "..."},
      {"node": "Conv_1", "output": "c", "op": "Conv", "scheme": "static", "axis": 0},
      {"node": "MaxPool_2", "output": "p", "op": "MaxPool", "scheme": "static", "tied": true}],
     "tensors": [
      {"tensor": "x", "low": -1.5, "high": 2.0},
      {"tensor": "c", "dtype": "int8", "scale": 0.02, "zero": -5}]}

A node is identified by its first output, which is unique, or by its name. Nodes missing from the
plan stay float. The tensors of a static node have a range here; with `tied`, its operands and
results share the least range that covers all their ranges.

One plan can have entries of several schemes; each pass applies those of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from onnx import NodeProto

from toolkit.errors import UsageError
from toolkit.ir import node as nd
from toolkit.ir.model import Model
from toolkit.messages import by_reason, first_of

if TYPE_CHECKING:
    from toolkit.pass_manager.protocol import Context

Scheme = Literal["float", "dynamic", "static", "weight-only"]
WeightType = Literal["int8", "uint8", "int4", "uint4"]
ActivationType = Literal["uint8", "int8"]
Method = Literal["rtn", "hqq", "gptq"]
BLOCK_SIZES = (16, 32, 64, 128, 256)

VERSION = 1

RENAMED = "distinct-name"
"""The rule that gives the outputs of nodes the unique names that plans refer to."""


@dataclass(frozen=True, slots=True)
class Entry:
    """The scheme of one node. `axis` is that of the weight's scales; None: one scale for all.

    `block_size` weights along an input's axis share a scale; None: all of them. With
    `float_result`, a static 1x1 convolution has a float result.
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
    def key(self) -> str:
        """The key that identifies the node."""
        return f"output {self.output}" if self.output else f"node {self.node}"

    @property
    def label(self) -> str:
        return f"{self.op} '{self.node or self.output}'".strip()


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """The range of an activation, or its scale and zero point.

    `toolkit.quantization.qparams` computes the latter from a range.
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
    """The entries of all considered nodes, in graph order, and of tensors."""

    entries: tuple[Entry, ...] = ()
    tensors: tuple[TensorEntry, ...] = ()

    def find(self, node: NodeProto) -> Entry | None:
        """Return the entry of a node."""
        output = next(iter(nd.outputs_of(node)), "")
        return self._by_output.get(output) or (self._by_name.get(node.name) if node.name else None)

    def quantized(self) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.entries if entry.scheme != "float")

    def of_scheme(self, scheme: Scheme) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.entries if entry.scheme == scheme)

    def tensor(self, name: str) -> TensorEntry | None:
        """Return the entry of a tensor."""
        return self._by_tensor.get(name)

    def turned(
        self, which: Iterable[Entry | str], scheme: Scheme = "float", reason: str = ""
    ) -> Plan:
        """Return the plan with other schemes for some nodes, given by entry, output or node name.

        Other fields stay: a node set to float can be set back.
        """
        keys = {entry.key: entry for entry in self.entries}
        chosen: set[str] = set()
        for item in which:
            known = item.node or item.output if isinstance(item, Entry) else item
            found = keys.get(item.key) if isinstance(item, Entry) else self._named(item)
            if found is None:
                raise UsageError(f"the plan has no node '{known}'")
            chosen.add(found.key)
        turned = (
            replace(e, scheme=scheme, reason=reason) if e.key in chosen else e for e in self.entries
        )
        return replace(self, entries=tuple(turned))

    def merged(self, other: Plan) -> Plan:
        """Return the union of two plans; `other` takes precedence unless its scheme is float."""
        entries = {entry.key: entry for entry in self.entries}
        for entry in other.entries:
            if entry.scheme != "float" or entry.key not in entries:
                entries[entry.key] = entry
        tensors = {entry.tensor: entry for entry in (*self.tensors, *other.tensors)}
        return Plan(tuple(entries.values()), tuple(tensors.values()))

    def to_json(self) -> str:
        """Return JSON with one entry per line, without default fields."""
        usual = asdict(Entry())
        lines = [
            json.dumps({k: v for k, v in asdict(e).items() if k == "scheme" or v != usual[k]})
            for e in self.entries
        ]
        parts = [f'"version": {VERSION}', _listed("nodes", lines)]
        if self.tensors:
            plain = asdict(TensorEntry())
            shown = ({k: v for k, v in asdict(t).items() if v != plain[k]} for t in self.tensors)
            parts.append(_listed("tensors", [json.dumps(item) for item in shown]))
        return "{\n  " + ",\n  ".join(parts) + "\n}\n"

    def completed(self, model: Model) -> Plan:
        """Return the plan with the output and operator of every entry's node."""
        found: dict[str, list[Entry]] = {entry.key: [] for entry in self.entries}
        for node in model.nodes():
            entry = self.find(node)
            if entry is not None:
                own = Entry.of(node)
                full = replace(entry, node=own.node, output=own.output, op=own.op)
                found[entry.key].append(full)
        return replace(self, entries=tuple(e for entries in found.values() for e in entries))

    def require_known(self, model: Model, source: str = "plan") -> None:
        """Raise UsageError unless every entry refers to a node or a tensor of the model."""
        nodes = list(model.nodes())
        outputs = {name for node in nodes for name in nd.outputs_of(node)[:1]}
        names = {node.name for node in nodes if node.name}
        unknown = [
            entry.label
            for entry in self.entries
            if (entry.output not in outputs if entry.output else entry.node not in names)
        ]
        _refuse(unknown, f"{source}: the model has no node")
        values = {name for node in nodes for name in nd.outputs_of(node)}
        values.update(name for graph in model.graphs() for name in graph.inputs)
        strange = [f"'{t.tensor}'" for t in self.tensors if t.tensor not in values]
        _refuse(strange, f"{source}: the model has no tensor")

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


def note_left(plan: Plan, ctx: Context) -> None:
    """Note the nodes that stay float, one line per reason."""
    left = [(e.label, e.reason) for e in plan.entries if e.scheme == "float" and e.reason]
    for line in by_reason(left):
        ctx.note(f"left float: {line}")


def as_applied(model: Model, plan: Plan) -> Plan:
    """Return the plan with unapplied entries set to float."""
    sites = {
        site
        for rule, places in model.journal.places_by_rule().items()
        if rule != RENAMED  # the old name no longer exists
        for site in places
    }

    def is_done(entry: Entry) -> bool:
        done = entry.scheme == "float" or not entry.output or entry.output in sites
        return done or _has_dequantized_operands(model, entry.output)

    entries = [
        e if is_done(e) else replace(e, scheme="float", reason="the rewrite was undone")
        for e in plan.entries
    ]
    return replace(plan, entries=tuple(entries))


def _has_dequantized_operands(model: Model, output: str) -> bool:
    """Return whether all operands are dequantized already: the node needs no rewrite."""
    for graph in model.graphs():
        node = graph.producer(output)
        if node is not None:
            producers = [graph.producer(name) for name in nd.inputs_of(node)]
            return bool(producers) and all(
                nd.is_op(producer, "DequantizeLinear") for producer in producers
            )
    return False


def _refuse(unknown: list[str], what: str) -> None:
    if unknown:
        raise UsageError(f"{what} {first_of(unknown, 1)}")


def _listed(name: str, lines: list[str]) -> str:
    items = ",\n    ".join(lines)
    return f'"{name}": [\n    {items}\n  ]'
