"""The sensitivity of each entry of a plan: the noise of the model with this entry alone in int8.

Combining and data-movement operators are never alone in int8. Their sensitivity is the noise that
the whole plan loses without all operators of the same type, in equal shares.
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
"""CPU seconds of all measurements; beyond them, each takes fewer samples."""
_MOST = 1e6
"""The sensitivity of an entry with which the model does not run or its outputs are not finite."""


def sensitivities(trials: Trials, plan: Plan) -> dict[Entry, float]:
    """Return the noise that each entry in int8 adds, relative to the signal power."""
    alone: list[Entry] = []
    others: dict[str, list[Entry]] = {}
    for entry in plan.quantized():
        if entry.op in ALL_PRODUCTS or entry.scheme != "static":
            alone.append(entry)
        else:
            others.setdefault(entry.op, []).append(entry)
    steps = len(alone) + len(others) + 2
    found: dict[Entry, float] = {}
    started = time.thread_time()
    before = trials.noise(only(plan, ()), SAMPLES)  # of earlier quantization passes
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
        for index, entries in enumerate(others.values()):
            trials.ctx.progress(_DOING, (len(alone) + index + 1) / steps)
            without = trials.noise(plan.turned(entries), samples)
            share = max(0.0, min(_MOST, whole) - without) / len(entries)
            found.update(dict.fromkeys(entries, share))
    return found


def only(plan: Plan, entries: Iterable[Entry]) -> Plan:
    """Return the plan with these entries quantized and all others float."""
    kept = set(entries)
    return plan.turned([entry for entry in plan.quantized() if entry not in kept])
