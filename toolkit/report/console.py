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
"""Columns below which the table of passes does without what its last column tells too."""


def console(stderr: bool = False) -> Console:
    """A console on which names are just text: no markup or emoji codes are read in them."""
    return Console(markup=False, emoji=False, highlight=False, stderr=stderr)


def table(*columns: str, right: tuple[str, ...] = (), ratios: tuple[int, ...] = ()) -> Table:
    """An empty table: the first column is bold, those in `right` hold numbers, unbroken.

    With `ratios` it is as wide as the console: columns with a 0 take what they need, unbroken,
    and the others share the rest. Names that are too long are broken, never cut.
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


def line(out: Console, label: str, value: str, style: str = "") -> None:
    """`label     value`, the value wrapped under itself; a single word is never broken."""
    body = Text(value, style=style)
    if " " not in value:
        head = (f"{label:<{_LABEL_WIDTH}}", "bold")
        out.print(Text.assemble(head, body, no_wrap=True, overflow="ignore"), soft_wrap=True)
        return
    grid = Table.grid(padding=0)
    grid.add_column(width=_LABEL_WIDTH, style="bold", no_wrap=True)
    grid.add_column(ratio=1, overflow="fold")
    grid.add_row(label, body)
    out.print(grid)


# optimize ----------------------------------------------------------------------------------------


def print_result(out: Console, result: Result, opset: int | None = None) -> None:
    """The passes, what they changed, before and after, the proof; `opset` is the original's."""
    print_passes(out, result.passes)
    _print_before_after(out, result.before, result.after)
    lifted = result.model.opsets.get("", opset)
    if opset is not None and lifted != opset:
        line(out, "opset", f"{opset} -> {lifted}")
    line(out, "proof", result.proof)
    for note in result.notes:
        line(out, "note", note)
    line(out, "time", text.duration(result.seconds))


def print_passes(out: Console, passes: Sequence[PassResult]) -> None:
    """A row for each pass that did something, the names of the others, and an empty line."""
    if not passes:
        return
    telling = [row for row in passes if _tells(row)]
    idle = dict.fromkeys(row.name for row in passes if not _tells(row))
    for row in telling:
        idle.pop(row.name, None)
    if telling:
        out.print(_pass_table(telling, out.width >= _NARROW))
    for row in telling:
        _print_notes(out, row)
    if telling:
        out.print()
    if idle:
        line(out, "unchanged", ", ".join(idle), "dim")


def _tells(row: PassResult) -> bool:
    """Whether there is more to say of a pass than that it had nothing to do."""
    return row.status in ("applied", "reverted") or bool(row.undone or row.notes)


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
    """Why a pass or a single rewrite was undone, and what a pass had to say."""
    lines = [(str(undone), "yellow") for undone in row.undone]
    if row.status == "reverted":
        lines.append((f"reverted: {row.reason}", "red"))
    lines += [(note, "") for note in row.notes]
    if lines:
        out.print()
    for what, style in lines:
        _note(out, row.name, what, style)


def _note(out: Console, name: str, what: str, style: str) -> None:
    out.print(Padding(Text(f"{name}: ", style="bold") + Text(what, style=style), (0, 0, 0, 1)))


def _print_before_after(out: Console, before: ModelStats, after: ModelStats) -> None:
    nodes = f"{before.nodes:,} -> {after.nodes:,}"
    line(out, "nodes", f"{nodes} {text.change(before.nodes, after.nodes)}")
    size = f"{text.size(before.bytes)} -> {text.size(after.bytes)}"
    line(out, "size", f"{size} {text.change(before.bytes, after.bytes)}")
    changed = _changed_ops(before.ops, after.ops)
    if changed:
        line(out, "operators", changed)


def _changed_ops(before: dict[str, int], after: dict[str, int], most: int = 8) -> str:
    """`Constant 45 -> 0, Shape 12 -> 1, ...`: the largest changes first."""
    names = [n for n in {**before, **after} if before.get(n, 0) != after.get(n, 0)]
    names.sort(key=lambda n: -abs(before.get(n, 0) - after.get(n, 0)))
    shown = [f"{n} {before.get(n, 0)} -> {after.get(n, 0)}" for n in names[:most]]
    rest = len(names) - most
    return ", ".join([*shown, f"{rest} more"] if rest > 0 else shown)


@contextmanager
def progress_bar(wanted: bool) -> Generator[Callable[[Progress], None]]:
    """A bar on standard error while the pipeline runs; only on a terminal."""
    out = console(stderr=True)
    if not wanted or not out.is_terminal:
        yield lambda _: None
        return
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    what = TextColumn("{task.description}", markup=False)
    with Bar(BarColumn(24), what, TimeElapsedColumn(), console=out, transient=True) as bar:
        task = bar.add_task("loading", total=None)

        def show(where: Progress) -> None:
            name = f"{where.name}: " if where.name else ""
            description = f"{name}{where.stage}"
            done = where.index + where.part
            bar.update(task, completed=done, total=where.total, description=description)

        yield show


@contextmanager
def steps_bar(wanted: bool, first: str) -> Generator[Callable[[int, int | None, str], None]]:
    """A bar on standard error for (done, total, what); only on a terminal."""
    out = console(stderr=True)
    if not wanted or not out.is_terminal:
        yield lambda done, total, what: None
        return
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    what = TextColumn("{task.description}", markup=False)
    columns = (BarColumn(24), what, TimeElapsedColumn(), TimeRemainingColumn())
    with Bar(*columns, console=out, transient=True) as bar:
        task = bar.add_task(first, total=None)

        def advance(done: int, total: int | None, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)

        yield advance
