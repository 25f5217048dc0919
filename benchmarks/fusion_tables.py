"""Format a run of the fusion benchmark as Markdown: coverage, nodes, errors, time, latency."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence

from claims import Claim, geometric_mean
from fusion_results import KINDS, REGIMES, Case, Row, Run
from tables import REASON_WIDTH, claim_list, table


def markdown(run: Run, claims: Sequence[Claim], setting: str) -> str:
    parts = [
        f"# Fusion benchmark\n\n{setting}",
        "## Claims\n\n" + claim_list(claims),
        "## Layers found\n\nAttention, norms and gelus that became one operator each, of those in "
        "the export; `!` does not agree with the original or does not run.\n\n"
        + _totals(run)
        + "\n\n"
        + _grid(run, _found, expected=True),
        "## Nodes left\n\n" + _grid(run, lambda _, row: f"{_flag(row)}{row.nodes}"),
        "## Largest error, relative to the output's scale\n\n"
        + _grid(run, lambda _, row: "-" if row.error is None else f"{row.error:.0e}"),
        "## Seconds of the work\n\nWithout imports. onnxscript: `optimize_for_ort` alone, without "
        "the optimizer before it, reading and writing; the toolkit: everything but writing.\n\n"
        + _grid(run, lambda _, row: f"{row.seconds:.2f}"),
        "## Latency: how many times as fast as the original\n\nonnxruntime's default optimization "
        "level, one thread, runs in turn, median of the rounds' ratios; plain input / padded "
        "batch.\n\n" + _means(run) + "\n\n" + _grid(run, lambda _, row: _speed(run, row)),
    ]
    if run.depths:
        parts.append("## Depth\n\n" + _depths(run))
    if notes := _notes(run):
        parts.append("## Notes\n\n" + notes)
    return "\n\n".join(parts) + "\n"


def _grid(run: Run, cell: Callable[[Case, Row], str], expected: bool = False) -> str:
    """Return a table with one row per export and one column per tool."""
    lines: list[list[str]] = []
    for case in run.cases.values():
        if case.reason or (expected and not case.transformer):
            continue
        line = [case.name, _three(case.expected) if expected else str(case.nodes)]
        for tool in run.tools:
            row = run.get(case.name, tool)
            line.append("-" if row is None else cell(case, row))
        lines.append(line)
    return table(["Export", "In it" if expected else "Nodes", *run.tools], lines)


def _flag(row: Row) -> str:
    return ("*" if row.foreign else "") + ("" if row.agrees else "!")


def _found(case: Case, row: Row) -> str:
    return f"{'' if row.agrees else '!'}{_three(row.found)}"


def _three(counts: dict[str, int]) -> str:
    return " ".join(str(counts.get(kind, 0)) for kind in KINDS)


def _totals(run: Run) -> str:
    lines: list[list[str]] = []
    for tool in run.tools:
        cases = [c for c in run.measured(tool) if c.transformer and not c.reason]
        covered = [run.coverage(case, tool) for case in cases]
        line = [tool]
        for kind in KINDS:
            wanted = sum(case.expected[kind] for case in cases)
            line.append(f"{sum(found[kind] for found in covered)} of {wanted}")
        lines.append(line)
    return table(["All exports, sound results", *KINDS], lines)


def _speed(run: Run, row: Row) -> str:
    ratios = (run.speedup(row.model, row.tool, regime) for regime in REGIMES)
    return " / ".join(f"{ratio:.2f}" for ratio in ratios if ratio is not None) or "-"


def _means(run: Run) -> str:
    lines: list[list[str]] = []
    for tool in run.tools:
        line = [tool]
        for regime in REGIMES:
            mean = geometric_mean(run.speedups(tool, [regime]).values())
            line.append("-" if mean is None else f"{mean:.3f}")
        lines.append(line)
    return table(["Geometric mean", *REGIMES], lines)


def _depths(run: Run) -> str:
    lines = [
        [str(layers), f"{figures['seconds']:.3f}", f"{figures['nodes']:.0f}"]
        for layers, figures in sorted(run.depths.items())
    ]
    return table(["Layers of BERT", "Seconds of `fuse`", "Nodes left"], lines)


def _notes(run: Run) -> str:
    lines = [f"- {case.name}: {case.reason}" for case in run.cases.values() if case.reason]
    lines += [
        f"- {row.model}, {row.tool}: {textwrap.shorten(row.reason, REASON_WIDTH)}"
        for row in run.rows.values()
        if row.reason
    ]
    return "\n".join(lines)
