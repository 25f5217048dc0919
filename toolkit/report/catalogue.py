"""The passes and their options on a console."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from toolkit.report.console import table

if TYPE_CHECKING:
    from toolkit.pass_manager.pass_options import OptionInfo
    from toolkit.pass_manager.registry import PassInfo


def print_catalogue(out: Console, rows: list[PassInfo]) -> None:
    """Print a row for each pass and group."""
    made = table("pass", "description and options", ratios=(0, 1))
    for row in rows:
        what = Text(f"group: {row.summary}" if row.kind == "group" else row.summary)
        if row.options:
            what.append("\n" + ", ".join(map(_with_default, row.options)), "dim")
        made.add_row(row.name, what, style="red" if row.kind == "broken" else None)
    out.print(made)
    out.print("\nFor details: toolkit passes NAME")


def print_pass(out: Console, row: PassInfo) -> None:
    """Print one pass or group with its options."""
    out.print(f"{row.name} ({row.kind}, from {row.origin})", style="bold")
    if row.summary:
        out.print(row.summary)
    if row.kind == "group":
        out.print(
            "\nAn option of the group is passed to every member that has it, as in: "
            f"--passes {row.name}:OPTION=VALUE"
        )
    if not row.options:
        return
    made = table("option", "meaning", ratios=(0, 1))
    for option in row.options:
        made.add_row(option.name, _meaning(option))
    out.print()
    out.print(made)
    out.print(f"\nAs in: --passes {row.name}:{row.options[0].name}=VALUE")


def _with_default(option: OptionInfo) -> str:
    return option.name if option.default is None else f"{option.name}={option.default}"


def _meaning(option: OptionInfo) -> Text:
    """Return the description of an option, with its type and default below."""
    default = "(required)" if option.default is None else f"by default {option.default or 'none'}"
    description = Text(f"{option.doc}\n" if option.doc else "")
    return description.append(f"{option.type}, {default}", "dim")
