"""An export on a console: its graphs, exporters and proofs, and the operator map."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from toolkit.ir.signature import describe_value
from toolkit.report import text
from toolkit.report.console import line, print_result, table

if TYPE_CHECKING:
    from toolkit.frontends.exported import Exported, ExportedGraph
    from toolkit.frontends.operator_map import OperatorMap, OperatorRow
    from toolkit.verification.framework import CaseResult

_STYLES = {"equal": "green", "differs": "red", "refused": "red", "skipped": "dim"}


def print_exported(out: Console, exported: Exported) -> None:
    """Print every graph with its signature and proof, then notes and companion files."""
    for graph in exported.graphs.values():
        if len(exported.graphs) > 1:
            out.rule(graph.name, align="left", characters="-")
        _print_graph(out, graph)
        if graph.optimized is not None:
            out.print()
            print_result(out, graph.optimized)
    for note in exported.notes:
        line(out, "note", note, "yellow")
    if exported.companions:
        line(out, "beside it", ", ".join(sorted(exported.companions)))
    line(out, "in all", text.duration(exported.seconds))


def _print_graph(out: Console, graph: ExportedGraph) -> None:
    values = table("", "name", "type", "shape")
    for kind, names in (("input", graph.model.graph.feeds), ("output", graph.model.graph.outputs)):
        for name in names:
            value = describe_value(graph.model, name)
            values.add_row(kind, name, value["type"] or "no tensor", text.shape(value["shape"]))
    out.print(values)
    out.print()
    runs = table("sizes", "values", "parity", "outcome", right=("parity",))
    for run in graph.proof.runs:
        runs.add_row(*_cells(run))
    out.print(runs)
    out.print()
    for failure in graph.failures:
        line(out, "tried", f"{failure.exporter}: {failure.reason}", "yellow")
    opset = graph.model.opsets.get("", 0)
    nodes = text.count(graph.model.node_count(), "node")
    line(out, "exporter", f"{graph.exporter}, opset {opset}, {nodes}")
    line(out, "dynamic", _dynamic(graph))
    for note in (*graph.notes, *graph.proof.notes):
        line(out, "note", note, "yellow")
    line(out, "proof", graph.proof.summary(), "green")


def _cells(run: CaseResult) -> tuple[str, str, str, Text]:
    sizes = ", ".join(f"{name} {size}" for name, size in run.sizes.items()) or "as in the example"
    outcome = Text(run.outcome, style=_STYLES[run.outcome])
    if run.outcome == "skipped":
        outcome.append(": the framework itself fails on it")
    elif run.reason:
        outcome.append(f": {run.reason}")
    return sizes, run.label, text.error(run.error), outcome


def _dynamic(graph: ExportedGraph) -> str:
    if not graph.dynamic:
        return "none: every size is fixed"
    return "; ".join(
        f"{name}:{','.join(f'{axis}={dim}' for axis, dim in dims.items())}"
        for name, dims in graph.dynamic.items()
    )


# --map -------------------------------------------------------------------------------------------


def print_map(out: Console, found: OperatorMap) -> None:
    """Print a row for each operator of each module, then added casts and reshapes."""
    made = table(
        *("module", "operator", "ONNX nodes", "opset", "types", "runs"),
        right=("opset",),
        ratios=(4, 3, 4, 0, 0, 0),
    )
    for row in found.rows:
        module = f"{row.module} ({row.kind})" if row.module and row.kind else row.module or row.kind
        operator = row.operator.removesuffix(".default").removeprefix("aten.")
        called = f"{operator} x{row.calls}" if row.calls > 1 else operator
        nodes = ", ".join(f"{op} x{n}" if n > 1 else op for op, n in row.nodes.items())
        parts = "" if row.how == "direct" else f" ({row.how})"
        opset = str(row.opset) if row.opset else "-"
        made.add_row(module, called, nodes + parts, opset, ",".join(row.dtypes), _runs(row))
    out.print(made)
    out.print()
    _print_lines(out, "changed", found.flags)
    _print_lines(out, "cannot run", (reason for row in found.rows for reason in row.reasons))
    named = sum(bool(module) for module in found.initializers.values())
    line(out, "weights", f"{named} of {len(found.initializers)} traced back to a module")
    out.print()


def _runs(row: OperatorRow) -> Text:
    """Return whether an operator runs: everywhere, in onnxruntime only, or not at all."""
    if not row.runs:
        return Text("no", style="red")
    return Text("yes") if row.standard else Text("ort only", style="yellow")


def _print_lines(out: Console, label: str, lines: Iterable[str], most: int = 12) -> None:
    listed = list(dict.fromkeys(lines))
    for each in listed[:most]:
        line(out, label, each, "yellow")
    if len(listed) > most:
        line(out, label, f"and {len(listed) - most} more (all of them: --json)", "yellow")
