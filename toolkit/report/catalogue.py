"""The passes and their options on a console."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console

from toolkit.report.console import table

if TYPE_CHECKING:
    from toolkit.registry import PassInfo


def print_catalogue(out: Console, rows: list[PassInfo]) -> None:
    """A row for each pass and group."""
    made = table("pass", "what it does", "options", ratios=(0, 3, 2))
    for row in rows:
        what = f"group: {row.summary}" if row.kind == "group" else row.summary
        options = "\n".join(
            option.name if option.default is None else f"{option.name}={option.default}"
            for option in row.options
        )
        made.add_row(row.name, what, options, style="red" if row.kind == "broken" else None)
    out.print(made)
    out.print("\nOne in detail: toolkit passes NAME")


def print_pass(out: Console, row: PassInfo) -> None:
    """One of them with its options."""
    out.print(f"{row.name} ({row.kind}, from {row.origin})", style="bold")
    if row.summary:
        out.print(row.summary)
    if row.kind == "group":
        out.print(
            "\nAn option given to the group goes to every member that has it, as in: "
            f"--passes {row.name}:OPTION=VALUE"
        )
    if not row.options:
        return
    made = table("option", "type", "default", "meaning", ratios=(0, 0, 0, 1))
    for option in row.options:
        default = "(required)" if option.default is None else option.default
        made.add_row(option.name, option.type, default, option.doc)
    out.print()
    out.print(made)
    out.print(f"\nAs in: --passes {row.name}:{row.options[0].name}=VALUE")
