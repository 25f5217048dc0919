"""Results on a console: coloured on a terminal, plain text elsewhere, readable at 80 columns."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from toolkit.report import text

if TYPE_CHECKING:
    from toolkit.pass_manager.protocol import Progress
    from toolkit.pass_manager.result import ModelStats, PassResult, Result, Status

_STATUS_STYLE: dict[Status, str] = {
    "applied": "green",
    "unchanged": "dim",
    "reverted": "red",
    "skipped": "yellow",
}
_LABEL_WIDTH = 11
_NARROW = 72
"""Width below which the table of passes omits the number of rewrites, in columns."""


def console(stderr: bool = False) -> Console:
    """Return a console that prints text literally, without markup or emoji codes."""
    return Console(markup=False, emoji=False, highlight=False, stderr=stderr)


def table(*columns: str, right: tuple[str, ...] = (), ratios: tuple[int, ...] = ()) -> Table:
    """Return an empty table: the first column is bold, those in `right` hold unbroken numbers.

    With `ratios` it is as wide as the console: columns with ratio 0 take the width they need, and
    the others share the rest. Names that are too long are wrapped, never cut.
    """
    made = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for index, name in enumerate(columns):
        made.add_column(
            name,
            style="bold" if index == 0 else None,
            justify="right" if name in right else "left",
            ratio=(ratios[index] or None) if ratios else None,
            no_wrap=name in right or (bool(ratios) and not ratios[index]),
            overflow="fold",
        )
    return made


def line(out: Console, label: str, value: str, style: str = "", label_style: str = "bold") -> None:
    """Print `label     value`, the value wrapped under itself; a single word is never broken."""
    text = Text(value, style=style)
    if " " not in value:
        head = (f"{label:<{_LABEL_WIDTH}}", label_style)
        out.print(Text.assemble(head, text, no_wrap=True, overflow="ignore"), soft_wrap=True)
        return
    grid = Table.grid(padding=0)
    grid.add_column(width=_LABEL_WIDTH, style=label_style, no_wrap=True)
    grid.add_column(ratio=1, overflow="fold")
    grid.add_row(label, text)
    out.print(grid)


def print_rest(out: Console, rest: str) -> None:
    """Print that a table continues in the JSON report."""
    out.print(f"and {rest} (all of them: --json)")


# optimize ----------------------------------------------------------------------------------------


def print_result(out: Console, result: Result, opset: int | None = None) -> None:
    """Print the passes, the model before and after, and the proof.

    `opset` is that of the original.
    """
    print_passes(out, result.passes)
    _print_before_after(out, result.before, result.after)
    lifted = result.model.opsets.get("", opset)
    if opset is not None and lifted != opset:
        line(out, "opset", f"{opset} -> {lifted}")
    if result.loads_on is not None:
        line(out, "loads on", str(result.loads_on))
    line(out, "proof", result.proof)
    for note in result.notes:
        line(out, "note", note)
    line(out, "time", text.duration(result.seconds))


def print_passes(out: Console, passes: Sequence[PassResult]) -> None:
    """Print a row for each pass that changed something, then the names of the others."""
    active = [row for row in passes if _is_active(row)]
    if active:
        out.print(_pass_table(active, out.width >= _NARROW))
        for row in active:
            _print_notes(out, row)
        out.print()
    names = {row.name for row in active}
    unchanged = dict.fromkeys(row.name for row in passes if row.name not in names)
    if unchanged:
        line(out, "unchanged", ", ".join(unchanged), "dim")


def _is_active(row: PassResult) -> bool:
    """Return whether a pass changed or reported something."""
    from toolkit.pass_manager.result import UNCHANGED_SINCE

    skipped = row.status == "skipped" and row.reason != UNCHANGED_SINCE
    return row.status in ("applied", "reverted") or skipped or bool(row.undone or row.notes)


def _pass_table(passes: Sequence[PassResult], counted: bool) -> Table:
    numbers = ("rewrites", "error", "time") if counted else ("error", "time")
    columns = ("pass", "status", *numbers, "which")
    made = table(*columns, right=numbers, ratios=(*(0 for _ in columns[1:]), 1))
    for row in passes:
        count = [f"{row.rewrites:,}" if row.rewrites else ""] if counted else []
        made.add_row(
            row.name,
            Text(row.status, style=_STATUS_STYLE[row.status]),
            *count,
            text.error(row.error),
            text.duration(row.seconds),
            text.top(row.rules, most=4),
        )
    return made


def _print_notes(out: Console, row: PassResult) -> None:
    """Print why a pass or a single rewrite was undone, and the notes of the pass."""
    lines = [(str(undone), "yellow") for undone in row.undone]
    if row.status in ("reverted", "skipped"):
        lines.append((f"{row.status}: {row.reason}", _STATUS_STYLE[row.status]))
    lines += [(note, "") for note in row.notes]
    if lines:
        out.print()
    for note, style in lines:
        name = Text(f"{row.name}: ", style="bold")
        out.print(Padding(name + Text(note, style=style), (0, 0, 0, 1)))


def _print_before_after(out: Console, before: ModelStats, after: ModelStats) -> None:
    nodes = f"{before.nodes:,} -> {after.nodes:,}"
    line(out, "nodes", f"{nodes} {text.change(before.nodes, after.nodes)}")
    size = f"{text.size(before.bytes)} -> {text.size(after.bytes)}"
    line(out, "size", f"{size} {text.change(before.bytes, after.bytes)}")
    counts = {n: (before.ops.get(n, 0), after.ops.get(n, 0)) for n in {**before.ops, **after.ops}}
    by_change = sorted(counts.items(), key=lambda item: -abs(item[1][0] - item[1][1]))
    changed = [f"{n} {old} -> {new}" for n, (old, new) in by_change if old != new]
    if changed:
        line(out, "operators", text.listed(changed, most=8))


@contextmanager
def progress_bar(wanted: bool) -> Generator[Callable[[Progress], None]]:
    """Show the pipeline's progress on standard error, on a terminal only."""
    with steps_bar(wanted, "loading") as advance:

        def show(where: Progress) -> None:
            name = f"{where.name}: " if where.name else ""
            advance(where.index + where.part, where.total, f"{name}{where.stage}")

        yield show


@contextmanager
def steps_bar(wanted: bool, first: str) -> Generator[Callable[[float, int | None, str], None]]:
    """Show progress as (done, total, description) on standard error, on a terminal only."""
    out = console(stderr=True)
    if not wanted or not out.is_terminal:
        yield lambda done, total, description: None
        return
    from rich.progress import BarColumn, Progress as Bar, TextColumn, TimeElapsedColumn

    label = TextColumn("{task.description}", markup=False)
    with Bar(BarColumn(24), label, TimeElapsedColumn(), console=out, transient=True) as bar:
        task = bar.add_task(first, total=None)

        def advance(done: float, total: int | None, description: str) -> None:
            bar.update(task, completed=done, total=total, description=description)

        yield advance
