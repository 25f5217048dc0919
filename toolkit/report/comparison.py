"""The comparison of two models on a console."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from toolkit.report import text
from toolkit.report.console import line, table

if TYPE_CHECKING:
    from toolkit.verification.models import Comparison


def print_comparison(out: Console, comparison: Comparison, tolerance: float) -> None:
    """Print a row for each output, then the verdict."""
    numbers = ("max |A-B|", "of scale")
    made = table("output", "type", "shape", *numbers, "verdict", right=numbers)
    for row in comparison.per_output:
        verdict = Text("equal" if row.ok else "differs", style="green" if row.ok else "red")
        if row.reason:
            verdict.append(f": {row.reason}")
        errors = text.error(row.max_abs), text.error(row.max_rel)
        made.add_row(row.name, row.dtype, text.shape(row.shape), *errors, verdict)
    if comparison.per_output:
        out.print(made)
        out.print()
    if comparison.note:
        line(out, "note", comparison.note)
    runs = text.count(comparison.feeds, "feed")
    found = "equal" if comparison.ok else "the models differ"
    verdict = f"{found}: largest error {text.error(comparison.error)} on {runs}"
    style = "green" if comparison.ok else "red"
    line(out, "verdict", f"{verdict}, {text.error(tolerance)} allowed", style)
