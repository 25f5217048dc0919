"""The contents of a model on a console, for `toolkit inspect`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from toolkit.errors import one_line
from toolkit.report import text
from toolkit.report.console import line, print_rest, table

if TYPE_CHECKING:
    from toolkit.inspection import ModelFacts, TensorFacts, ValueFacts

_LONGEST_METADATA = 60


def print_facts(out: Console, facts: ModelFacts, most: int) -> None:
    """Print all facts about a model, and its `most` largest tensors."""
    _print_head(out, facts)
    _print_values(out, "input", facts.inputs)
    _print_values(out, "output", facts.outputs)
    if facts.dynamic:
        out.print()
    for name, places in facts.dynamic.items():
        line(out, "dynamic", f"{name if name != '?' else 'no name'}: {', '.join(places)}")
    _print_ops(out, facts)
    _print_tensors(out, facts.tensors, most)
    _print_obstacles(out, facts)


def _print_head(out: Console, facts: ModelFacts) -> None:
    if facts.path is not None:
        line(out, "model", facts.path)
    line(out, "size", text.size(facts.bytes))
    for name, bytes_ in facts.external_files.items():
        line(out, "data", f"{name} ({text.size(bytes_)})")
    if facts.producer:
        line(out, "producer", facts.producer)
    opsets = ", ".join(f"{domain} {version}" for domain, version in facts.opsets.items())
    line(out, "opsets", f"{opsets}; IR version {facts.ir_version}")
    inside = [text.count(facts.subgraphs, "subgraph")] if facts.subgraphs else []
    if facts.functions:
        names = text.listed(facts.functions, most=5)
        inside.append(f"{text.count(len(facts.functions), 'function')}: {names}")
    line(out, "nodes", "; ".join([f"{facts.nodes:,}", *inside]))
    kinds = ", ".join(f"{kind} {text.size(n)}" for kind, n in facts.bytes_by_dtype.items() if n)
    line(out, "weights", f"{text.count(facts.parameters, 'parameter')} ({kinds or 'no bytes'})")
    for key, value in facts.metadata.items():
        line(out, "metadata", f"{key} = {one_line(value, _LONGEST_METADATA)}")


def _print_values(out: Console, kind: str, values: list[ValueFacts]) -> None:
    made = table(kind, "type", "shape")
    for value in values:
        default = " (has a default)" if value.has_default else ""
        made.add_row(value.name, value.type, f"{text.shape(value.shape)}{default}")
    out.print()
    out.print(made)


def _print_ops(out: Console, facts: ModelFacts) -> None:
    made = table("operator", "nodes", "weights", right=("nodes", "weights"))
    for op, nodes in facts.ops.items():
        weights = facts.bytes_by_op.get(op, 0)
        made.add_row(op, f"{nodes:,}", text.size(weights) if weights else "")
    out.print()
    out.print(made)


def _print_tensors(out: Console, tensors: list[TensorFacts], most: int) -> None:
    if not tensors or not most:
        return
    made = table("tensor", "type", "shape", "size", "used by", right=("size",))
    for tensor in tensors[:most]:
        users = ", ".join(tensor.ops) or "none"
        made.add_row(
            tensor.name, tensor.dtype, text.shape(tensor.shape), text.size(tensor.bytes), users
        )
    out.print()
    out.print(made)
    rest = tensors[most:]
    if rest:
        size = text.size(sum(tensor.bytes for tensor in rest))
        print_rest(out, f"{text.count(len(rest), 'smaller tensor')}, {size}")


def _print_obstacles(out: Console, facts: ModelFacts) -> None:
    out.print()
    line(out, "loads on", str(facts.loads_on))
    if not facts.obstacles:
        line(out, "runs", f"{facts.runtime} loads it", "green")
        return
    line(out, "runs", f"{facts.runtime} does not load it:", "red")
    for obstacle in facts.obstacles:
        out.print(Text(f"  - {obstacle}"))
