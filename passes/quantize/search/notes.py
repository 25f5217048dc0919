"""Notes on the outcome of a search: the layers in int8, and the reasons for the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from passes.quantize.schemes.static.quantizable_ops import ALL_PRODUCTS
from toolkit.accuracy.budgets import decibels
from toolkit.quantization.plan import Entry, Plan, note_left

if TYPE_CHECKING:
    from passes.quantize.search.candidate_eval import Trials
    from passes.quantize.search.search import Found
    from toolkit.pass_manager.protocol import Context

_NAMED = 3
_NEGLIGIBLE = 0.03
"""Fraction of the highest sensitivity below which a layer is not named: it fell back because it
saves little time."""
_RUINED = 0.5
"""Noise relative to the signal power above which outputs are useless and no figure is shown."""
_NO_NOISE = 1e-9
"""Upper limit of noise that is rounding, or stands for integer outputs, see `Trials.noise`."""
_NOTHING = "nothing is quantized"


def note_fallbacks(found: Found, trials: Trials, ctx: Context) -> None:
    """Note the fallbacks for the budget, most sensitive first, or why nothing is quantized."""
    if not found.holds:
        ctx.note(_collapse(found, trials))
        return
    if not found.fallbacks:
        return
    quality = trials.quality(found.plan)
    figures = f": {quality.summary()}" if quality is not None else ""
    ctx.note(f"falls back to float to keep the budget: {_named(found)}{figures}")


def _collapse(found: Found, trials: Trials) -> str:
    quality = None if found.tried is None else trials.known(found.tried)
    reason = f" ({quality.reason})" if quality is not None and quality.reason else ""
    worst = f"; most sensitive: {_named(found)}" if found.fallbacks else ""
    return (
        f"{_NOTHING}: no part of it keeps the budget{reason}{worst}; --max-drop sets another budget"
    )


def _named(found: Found) -> str:
    """Return the names of the most sensitive fallbacks, with the SQNR of each alone."""
    sensitivity = found.sensitivity or {}
    ordered = sorted(found.fallbacks, key=lambda entry: -sensitivity.get(entry, 0.0))
    most = sensitivity.get(ordered[0], 0.0)
    named = [e for e in ordered if sensitivity.get(e, 0.0) >= _NEGLIGIBLE * most][:_NAMED]
    names = [f"{entry.label} ({_noise_alone(sensitivity.get(entry))})" for entry in named]
    more = f" and {len(ordered) - len(named)} more" if len(ordered) > len(named) else ""
    return f"{', '.join(names)}{more}"


def _noise_alone(noise: float | None) -> str:
    if noise is None:
        return "not tried alone"
    if noise >= _RUINED:
        return "ruins the outputs alone"
    if noise <= _NO_NOISE:
        return "hardly any noise alone"
    return f"SQNR {decibels(noise):.0f} dB alone"


def note_what(done: Plan, plan: Plan, ctx: Context) -> None:
    """Note the layers that were quantized, and one line per reason for those that were not."""
    kinds: dict[str, list[Entry]] = {}
    for entry in done.quantized():
        if entry.op in ALL_PRODUCTS or entry.scheme != "static":
            kinds.setdefault(f"{entry.scheme} {entry.op}", []).append(entry)
    if kinds:
        listed = ", ".join(f"{len(found)} {kind}" for kind, found in kinds.items())
        fewer = any("4" in entry.weight for entry in done.quantized())
        ctx.note(f"in int8{' or int4' if fewer else ''}: {listed}")
    elif plan.entries and not any(note.startswith(_NOTHING) for note in ctx.notes):
        ctx.note(f"{_NOTHING}, for the reasons below")
    note_left(plan, ctx)
