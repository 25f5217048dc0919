"""How much noise each entry of a plan adds, with nothing but that entry in int8.

What only combines or carries is never alone in int8: it is measured by what the noise of the whole
plan loses without all of its kind, in equal shares.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from passes.quantize.schemes.static.quantizable_ops import ALL_PRODUCTS
from passes.quantize.search.candidate_eval import Trials
from toolkit.quantization.plan import Entry, Plan

_DOING = "measuring the sensitivity of each layer"
SAMPLES = 4
_SECONDS = 12.0
"""How long it may take, about: fewer samples where more would take longer."""
_MOST = 1e6
"""The sensitivity of an entry with which the model does not run or its outputs are not finite."""


def sensitivities(trials: Trials, plan: Plan) -> dict[Entry, float]:
    """The noise that each entry in int8 adds, as a share of the signal's power."""
    entries = plan.quantized()
    alone = [e for e in entries if e.op in ALL_PRODUCTS or e.scheme != "static"]
    others: dict[str, list[Entry]] = {}
    for entry in entries:
        if entry.op not in ALL_PRODUCTS and entry.scheme == "static":
            others.setdefault(entry.op, []).append(entry)
    steps = len(alone) + len(others) + 2
    found: dict[Entry, float] = {}
    started = time.thread_time()
    before = trials.noise(only(plan, ()), SAMPLES)  # of what other passes have quantized
    each = (time.thread_time() - started) / SAMPLES
    samples = max(1, min(SAMPLES, int(_SECONDS / max(each * steps, 1e-9))))
    if before and samples < SAMPLES:
        before = trials.noise(only(plan, ()), samples)
    for index, entry in enumerate(alone):
        trials.ctx.progress(_DOING, (index + 1) / steps)
        noise = trials.noise(only(plan, [entry]), samples)
        found[entry] = max(0.0, min(_MOST, noise) - before)
    if others:
        whole = trials.noise(plan, samples)
        for index, entries_of in enumerate(others.values()):
            trials.ctx.progress(_DOING, (len(alone) + index + 1) / steps)
            without = trials.noise(plan.turned(entries_of), samples)
            share = max(0.0, min(_MOST, whole) - without) / len(entries_of)
            found.update(dict.fromkeys(entries_of, share))
    return found


def only(plan: Plan, entries: Iterable[Entry]) -> Plan:
    """The plan with nothing but these entries in int8."""
    kept = set(entries)
    return plan.turned([entry for entry in plan.quantized() if entry not in kept])
