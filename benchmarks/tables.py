"""Format a run of the engine benchmark as Markdown: nodes, seconds, memory, failures, claims."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence

from claims import Claim
from results import Row, Run

REASON_WIDTH = 200
VERDICTS = {True: "holds", False: "FAILS", None: "no data"}


def markdown(run: Run, claims: Sequence[Claim], setting: str) -> str:
    parts = [
        f"# Engine benchmark\n\n{setting}",
        "## Claims\n\n" + claim_list(claims),
        "## Nodes left\n\n`*` holds operators outside the ONNX standard, `!` does not agree with "
        "the original or does not run.\n\n" + _grid(run, _nodes),
        "## Seconds of the call\n\nMedian; without interpreter start and imports.\n\n"
        + _grid(run, lambda row: f"{row.seconds:.2f}"),
        "## CPU seconds of the call\n\nThe same, unmoved by other work on the machine and by the "
        "disk.\n\n" + _grid(run, lambda row: f"{row.cpu_seconds:.2f}"),
        "## Peak anonymous memory above start-up, MB\n\n"
        + _grid(run, lambda row: f"{row.peak_mb:.0f}"),
        "## Start-up\n\n" + _startup(run),
    ]
    if notes := _notes(run):
        parts.append("## Notes\n\n" + notes)
    return "\n\n".join(parts) + "\n"


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, with names left-aligned and figures right-aligned."""
    widths = [max(len(line[i]) for line in (header, *lines)) for i in range(len(header))]

    def render(line: Sequence[str]) -> str:
        cells = (
            text.rjust(width) if i else text.ljust(width)
            for i, (text, width) in enumerate(zip(line, widths, strict=True))
        )
        return "| " + " | ".join(cells) + " |"

    rule = ["-" * width if not i else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
    return "\n".join([render(header), render(rule), *(render(line) for line in lines)])


def _grid(run: Run, cell: Callable[[Row], str]) -> str:
    """Return a table with one row per model and one column per peer."""
    lines: list[list[str]] = []
    for case in run.cases.values():
        if case.reason:
            continue
        line = [case.name, f"{case.bytes / 1e6:.0f}", str(case.nodes)]
        for peer in run.peers:
            found = run.get(case.name, peer)
            line.append("-" if found is None else cell(found))
        lines.append(line)
    return table(["Model", "MB", "Nodes", *run.peers], lines)


def _nodes(row: Row) -> str:
    return f"{'*' if row.foreign else ''}{'' if row.agrees else '!'}{row.nodes}"


def claim_list(claims: Sequence[Claim]) -> str:
    return "\n".join(f"- **{VERDICTS[c.holds]}**: {c.text}. {c.detail}" for c in claims)


def _startup(run: Run) -> str:
    """Return the start-up time of interpreter and imports, the median over all models."""
    lines: list[list[str]] = []
    for peer in run.peers:
        rows = sorted((row for _, row in run.of(peer)), key=lambda row: row.startup_seconds)
        if rows:
            middle = rows[len(rows) // 2]
            lines.append([peer, f"{middle.startup_seconds:.2f}", f"{middle.startup_mb:.0f}"])
    return table(["Peer", "Seconds", "Anonymous MB"], lines)


def _notes(run: Run) -> str:
    lines = [f"- {case.name}: {case.reason}" for case in run.cases.values() if case.reason]
    for row in run.rows.values():
        if row.reason:
            lines.append(f"- {row.model}, {row.peer}: {textwrap.shorten(row.reason, REASON_WIDTH)}")
    foreign: dict[str, set[str]] = {}
    for row in run.rows.values():
        foreign.setdefault(row.peer, set()).update(row.foreign)
    for peer, ops in foreign.items():
        if ops:
            lines.append(
                f"- {peer} writes operators outside the standard: {', '.join(sorted(ops))}"
            )
    return "\n".join(lines)
