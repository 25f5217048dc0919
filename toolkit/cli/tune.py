"""`toolkit tune`: measure the cost table of `lower` on this machine."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from toolkit.cli.arguments import NO_VALUE
from toolkit.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from toolkit.runtime.cost_table import Candidate, Costs, Regime, Tunable


def tune(
    name: Annotated[
        str, typer.Argument(metavar="PASS", help="A pass with a cost model.")
    ] = "lower",
    show: Annotated[
        bool,
        typer.Option("--show", metavar=NO_VALUE, help="Print the costs in use without measuring."),
    ] = False,
    seconds: Annotated[
        float, typer.Option(metavar="S", min=1, max=3600, help="Approximate time to measure.")
    ] = 60.0,
    as_json: Annotated[
        bool, typer.Option("--json", metavar=NO_VALUE, help="Print JSON instead of a table.")
    ] = False,
) -> None:
    """Measure the cost of each lowering candidate on this machine, for optimize to use."""
    from toolkit.report.console import console, line, steps_bar
    from toolkit.runtime.cost_table import cache_path
    from toolkit.storage.atomic_write import require_writable

    chosen = _tunable(name)
    if show:
        costs, origin = chosen.costs_in_use()
    else:
        path = cache_path(chosen.topic)
        path.parent.mkdir(parents=True, exist_ok=True)
        require_writable(path)
        with steps_bar(not as_json, "measuring") as progress:
            costs = chosen.measure(progress, seconds)
        costs.save(path)
        origin = f"measured on this machine, '{path}'"
    if as_json:
        typer.echo(json.dumps(costs.to_json(), indent=1))
        return
    out = console()
    _print_costs(out, costs)
    line(out, "runtime", f"onnxruntime {costs.runtime}")
    line(out, "processor", costs.cpu)
    line(out, "costs", origin)


def _tunable(name: str) -> Tunable:
    from toolkit.pass_manager.registry import parse_passes
    from toolkit.runtime.cost_table import Tunable

    found = [one for one in parse_passes(name) if isinstance(one, Tunable)]
    if not found:
        raise UsageError(f"{name} has no cost model: there is nothing to measure for it")
    return found[0]


def _print_costs(out: Console, costs: Costs) -> None:
    """Print a row for each candidate: its speedup over the default, from least to most."""
    from rich.text import Text

    from toolkit.report.console import table

    regimes = [r for forms in costs.computations.values() for r in forms[0].cost]
    threads = sorted({regime.threads for regime in regimes})
    heads = [f"{count} thread{'s' if count > 1 else ''}" for count in threads]
    made = table("computation", "candidate", *heads, right=tuple(heads))
    for computation, forms in costs.computations.items():
        for index, form in enumerate(forms):
            name = f"{form.name}, reverted" if form.undone else form.name
            gains = [costs.gain(computation, form.name, threads=count) for count in threads]
            style = "green" if any(gains) else ""
            cells = [_range(form, count, is_default=index == 0) for count in threads]
            made.add_row("" if index else computation, Text(name, style=style), *cells)
    out.print(made)
    out.print(
        "\nThe default comes first, in microseconds from the smallest shape to the largest; the "
        "other candidates by their speedup over it. Reverted: the runtime undoes it at load time.\n"
    )


def _range(form: Candidate, threads: int, is_default: bool) -> str:
    """Format the microseconds of the default, or the speedup of another candidate."""
    found: list[Regime] = [regime for regime in form.cost if regime.threads == threads]
    if not found:
        return ""
    if is_default:
        times = [form.microseconds[regime] for regime in found]
        return f"{min(times):.0f} - {max(times):.0f} us"
    gains = [1 / form.cost[regime] for regime in found]
    return f"{min(gains):.2f} - {max(gains):.2f}x"
