"""What was fused, and what stopped the rest, on a console."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from toolkit.report import text
from toolkit.report.console import line, table

if TYPE_CHECKING:
    from toolkit.explanation import Explanation, Fused, Unfused
    from toolkit.rewriting.match_failure import NearMiss

_LABEL_WIDTH = 11
_PLACES = 3
_MISSES = 10


def print_explanation(out: Console, found: Explanation) -> None:
    """The rules that applied, the cores that are left, near misses, and the sum of it."""
    if found.fused:
        _print_fused(out, found.fused)
    for core in found.unfused:
        _print_unfused(out, core)
    _print_misses(out, found.misses)
    fused = sum(len(rule.places) for rule in found.fused)
    style = "yellow" if found.unfused else "green" if fused else ""
    done = f"{text.count(fused, 'place')} by {text.count(len(found.fused), 'rule')}"
    line(out, "fused", done if fused else "nothing", style)
    left = text.count(len(found.unfused), "place")
    line(out, "unfused", left if found.unfused else "nothing that the rules look for", style)
    if found.besides:
        line(out, "besides", f"rewrites by {text.top(found.besides, most=6)}")
    line(out, "nodes", f"{found.nodes[0]:,} -> {found.nodes[1]:,}")
    line(out, "time", text.duration(found.seconds))
    for problem in found.problems:
        line(out, "failed", problem, "red")


def _print_fused(out: Console, rows: Sequence[Fused]) -> None:
    made = table("rule", "times", "first places", right=("times",), ratios=(0, 0, 1))
    for row in rows:
        shown = list(row.places[:_PLACES])
        if len(row.places) > _PLACES:
            shown.append(f"and {len(row.places) - _PLACES} more")
        made.add_row(row.rule, f"{len(row.places):,}", "\n".join(shown))
    out.print(made)
    out.print()


def _print_unfused(out: Console, core: Unfused) -> None:
    out.print(Text.assemble(("unfused".ljust(_LABEL_WIDTH), "bold yellow"), core.core))
    if core.nearest is None:
        _print_detail(out, "nearest", f"none: {core.reason}")
    else:
        miss = core.nearest
        far = f"{miss.matched} of {text.count(miss.total, 'node')} matched"
        _print_detail(out, "nearest", f"{miss.rule} at {miss.root}, {far}")
        _print_detail(out, "stopped", f"at {miss.node}: {miss.reason}")
    out.print()


def _print_misses(out: Console, misses: Sequence[NearMiss]) -> None:
    for miss in misses[:_MISSES]:
        line(out, "near miss", str(miss))
    if len(misses) > _MISSES:
        out.print(f"and {len(misses) - _MISSES:,} more (all of them: --json)")
    if misses:
        out.print()


def _print_detail(out: Console, label: str, what: str) -> None:
    grid = Table.grid(padding=0)
    grid.add_column(width=_LABEL_WIDTH, style="dim", no_wrap=True)
    grid.add_column(ratio=1, overflow="fold")
    grid.add_row(f"  {label}", Text(what))
    out.print(grid)
