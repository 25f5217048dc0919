"""The sensitivity of layers and the accumulated error, on a console."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from toolkit.report import text
from toolkit.report.console import print_rest, table

if TYPE_CHECKING:
    from toolkit.accuracy.sensitivity import NoiseRow


def print_sensitivity(
    out: Console, layers: Sequence[NoiseRow], values: Sequence[NoiseRow], most: int
) -> None:
    """Print the most sensitive layers, and values spread over the graph, `most` of each."""
    made = table("layer, quantized alone", "SQNR", "of the budget", right=("SQNR", "of the budget"))
    for row in sorted(layers, key=_sqnr)[:most]:
        made.add_row(row.label, row.reason or _decibels(row), _share(row.used))
    out.print(made)
    _print_rest(out, layers, most, "layer")
    out.print("lowest SQNR first; quantize:exclude=NAME keeps a layer in float")
    out.print()
    made = table("value, all quantized", "SQNR", right=("SQNR",))
    for row in _spread(values, most):
        made.add_row(row.label, _decibels(row))
    out.print(made)
    _print_rest(out, values, most, "value")


def _share(used: float | None) -> str:
    if used is None:
        return ""
    return "< 1 %" if 0 < used < 0.01 else f"{100 * used:.0f} %"


def _sqnr(row: NoiseRow) -> float:
    return -math.inf if row.decibels is None else row.decibels


def _decibels(row: NoiseRow) -> str:
    found = row.decibels
    if found is None:
        return ""
    return "the same" if math.isinf(found) and found > 0 else f"{found:.1f} dB"


def _spread(rows: Sequence[NoiseRow], most: int) -> list[NoiseRow]:
    """Return at most `most` rows, evenly spaced from first to last."""
    if len(rows) <= most:
        return list(rows)
    if most == 1:
        return [rows[-1]]
    return [rows[index * (len(rows) - 1) // (most - 1)] for index in range(most)]


def _print_rest(out: Console, rows: Sequence[NoiseRow], most: int, noun: str) -> None:
    if len(rows) > most:
        print_rest(out, text.count(len(rows) - most, f"more {noun}"))
