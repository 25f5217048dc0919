"""Fused and unfused computations on a console."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from toolkit.report import text
from toolkit.report.console import line, print_rest, table

if TYPE_CHECKING:
    from toolkit.explanation import Explanation, Fused, Unfused
    from toolkit.rewriting.match_failure import NearMiss

_MAX_PLACES = 3
_MAX_NEAR_MISSES = 10


def print_explanation(out: Console, found: Explanation) -> None:
    """Print the applied rules, the unfused computations, near misses and a summary."""
    if found.fused:
        _print_fused(out, found.fused)
    for core in found.unfused:
        _print_unfused(out, core)
    _print_near_misses(out, found.misses)
    fused = sum(len(rule.places) for rule in found.fused)
    style = "yellow" if found.unfused else "green" if fused else ""
    done = f"{text.count(fused, 'place')} by {text.count(len(found.fused), 'rule')}"
    line(out, "fused", done if fused else "nothing", style)
    left = text.count(len(found.unfused), "place")
    line(out, "unfused", left if found.unfused else "nothing that a rule could fuse", style)
    if found.besides:
        line(out, "besides", f"rewrites by {text.top(found.besides, most=6)}")
    line(out, "nodes", f"{found.nodes[0]:,} -> {found.nodes[1]:,}")
    line(out, "time", text.duration(found.seconds))
    for problem in found.problems:
        line(out, "failed", problem, "red")


def _print_fused(out: Console, rows: Sequence[Fused]) -> None:
    made = table("rule", "times", "first places", right=("times",), ratios=(0, 0, 1))
    for row in rows:
        rest = len(row.places) - _MAX_PLACES
        shown = (*row.places[:_MAX_PLACES], *([f"and {rest} more"] if rest > 0 else []))
        made.add_row(row.rule, f"{len(row.places):,}", "\n".join(shown))
    out.print(made)
    out.print()


def _print_unfused(out: Console, core: Unfused) -> None:
    line(out, "unfused", core.core, label_style="bold yellow")
    if core.nearest is None:
        line(out, "  nearest", f"none: {core.reason}", label_style="dim")
    else:
        near = core.nearest
        matched = f"{near.matched} of {text.count(near.total, 'node')} matched"
        line(out, "  nearest", f"{near.rule} at {near.root}, {matched}", label_style="dim")
        line(out, "  stopped", f"at {near.node}: {near.reason}", label_style="dim")
    out.print()


def _print_near_misses(out: Console, near_misses: Sequence[NearMiss]) -> None:
    for near in near_misses[:_MAX_NEAR_MISSES]:
        line(out, "near miss", str(near))
    if len(near_misses) > _MAX_NEAR_MISSES:
        print_rest(out, f"{len(near_misses) - _MAX_NEAR_MISSES:,} more")
    if near_misses:
        out.print()
