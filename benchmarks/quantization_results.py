"""The data of one run of the quantization benchmark, and its tables."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from claims import Claim
from tables import REASON_WIDTH, claim_list, table

FLOAT = "float"
_NOTES = 4


@dataclass(slots=True)
class Row:
    """The result of one tool on one subject: speedup by regime, score in points, noise."""

    subject: str
    kind: str
    tool: str
    bytes: int = 0
    score: float | None = None
    decibels: float | None = None
    seconds: float = 0
    peak_mb: float = 0
    reason: str = ""
    notes: list[str] = field(default_factory=list[str])
    speed: dict[str, float] = field(default_factory=dict[str, float])
    milliseconds: dict[str, float] = field(default_factory=dict[str, float])

    def line(self, base: float) -> str:
        """Return one line for the console."""
        if self.reason:
            return f"{self.subject:20} {self.tool:16} {self.reason}"
        return (
            f"{self.subject:20} {self.tool:16} {self.bytes / 1e6:7.2f} MB "
            f"{self.score or 0:6.2f} ({(self.score or 0) - base:+.2f}) "
            f"{self.decibels or 0:5.1f} dB {self.seconds:6.1f} s {self.peak_mb:6.0f} MB peak"
        )


@dataclass(slots=True)
class Run:
    """All rows, the missing subjects with their reasons, and the memory figures by name."""

    tools: Sequence[str]
    rows: dict[tuple[str, str], Row] = field(default_factory=dict[tuple[str, str], Row])
    missing: dict[str, str] = field(default_factory=dict[str, str])
    memory: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])

    def add(self, row: Row) -> None:
        self.rows[row.subject, row.tool] = row

    def keep(self, written: Mapping[str, Any]) -> None:
        """Add the results of an earlier run, as `to_json` wrote them."""
        for row in written["rows"]:
            self.add(Row(**row))
        self.missing.update(written["missing"])
        self.memory.update(written["memory"])

    def row(self, subject: str, tool: str) -> Row:
        return self.rows[subject, tool]

    def get(self, subject: str, tool: str) -> Row | None:
        """Return the row of a tool if it wrote a model that runs."""
        found = self.rows.get((subject, tool))
        return found if found is not None and not found.reason else None

    def of(self, subject: str) -> list[Row]:
        return [row for row in self.rows.values() if row.subject == subject]

    def floats(self) -> Iterator[Row]:
        return (row for row in self.rows.values() if row.tool == FLOAT)

    def drop(self, row: Row) -> float | None:
        """Return the points lost against the float model."""
        base = self.rows[row.subject, FLOAT].score
        return None if row.score is None or base is None else base - row.score

    def to_json(self) -> dict[str, Any]:
        rows = [asdict(row) for row in self.rows.values()]
        for row in rows:
            if row["decibels"] is not None and not math.isfinite(row["decibels"]):
                row["decibels"] = None
        return {"rows": rows, "missing": self.missing, "memory": self.memory}


def markdown(run: Run, judged: Sequence[Claim], setting: str) -> str:
    parts = [
        f"# Quantization benchmark\n\n{setting}",
        "## Claims\n\n" + claim_list(judged),
        "## Score\n\nPoints of 100: accuracy, "
        "Spearman correlation (minilm), agreement with the float model where there are no labels."
        "\n\n" + _grid(run, _score),
        "## Speed: how many times as fast as the float model\n\nRegimes as in the data.\n\n"
        + _grid(run, _speed),
        "## Size, MB\n\n" + _grid(run, lambda row: f"{row.bytes / 1e6:.2f}"),
        "## Signal to noise of the worst output, dB\n\n"
        + _grid(run, lambda row: "" if row.decibels is None else f"{row.decibels:.1f}"),
        "## Seconds, and peak of anonymous memory in MB\n\n"
        + _grid(run, lambda row: f"{row.seconds:.0f} / {row.peak_mb:.0f}" if row.seconds else ""),
    ]
    if run.memory:
        lines = [
            [what, f"{answer['peak_mb']:.0f}", answer.get("error", "")]
            for what, answer in run.memory.items()
        ]
        parts.append("## Memory\n\n" + table(["What", "Peak MB", ""], lines))
    notes = [
        f"- {row.subject}, {row.tool}: {textwrap.shorten(text, REASON_WIDTH)}"
        for row in run.rows.values()
        for text in ([row.reason] if row.reason else row.notes[:_NOTES])
    ]
    notes += [f"- {name}: left out, {reason}" for name, reason in run.missing.items()]
    parts.append("## Notes\n\n" + "\n".join(notes))
    return "\n\n".join(parts) + "\n"


def _grid(run: Run, cell: Callable[[Row], str]) -> str:
    """Return a table with one row per subject and one column per tool."""
    lines: list[list[str]] = []
    for base in run.floats():
        line = [base.subject]
        for tool in (FLOAT, *run.tools):
            row = run.rows.get((base.subject, tool))
            line.append("-" if row is None else "failed" if row.reason else cell(row) or "-")
        lines.append(line)
    return table(["Subject", FLOAT, *run.tools], lines)


def _score(row: Row) -> str:
    return "" if row.score is None else f"{row.score:.2f}"


def _speed(row: Row) -> str:
    return " / ".join(f"{ratio:.2f}" for ratio in row.speed.values())
