"""The claims of the engine benchmark against peers, each computed from the data of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from peers import PEERS
from results import Run

OURS = "toolkit"
OURS_PROVEN = "toolkit-each"
SIMPLIFIERS = ("onnxslim", "onnxsim")
PYTHON_PEERS = tuple(name for name, peer in PEERS.items() if peer.python)

FEWEST_NODES_SHARE = 0.9
MEMORY_LIMIT_MB = 60
# The memory claim speaks of exported models of about 200 MB.
MEMORY_MODEL_MB = (180, 250)
# Peaks of equal graphs differ by this much from run to run.
GROWTH_SLACK_MB = 8
PROVEN_SHARE, PROVEN_EXTRA_MB = 0.5, 150
LINEAR_RATIO = 2.3


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim and its result; `holds` is None when the run has no data for it."""

    text: str
    holds: bool | None
    detail: str


def claims(run: Run) -> list[Claim]:
    makers: tuple[Callable[[Run], Claim], ...] = (
        sound,
        fewest_nodes,
        fastest,
        small_memory,
        no_growth,
        proven_memory,
        linear,
    )
    return [make(run) for make in makers]


def judge(text: str, misses: list[str], of: int, allowed: int = 0) -> Claim:
    """Return a claim about `of` items that holds if at most `allowed` of them are `misses`."""
    if not of:
        return Claim(text, None, "not measured")
    detail = f"{of - len(misses)} of {of}"
    if misses:
        detail += "; not: " + ", ".join(misses)
    return Claim(text, len(misses) <= allowed, detail)


def geometric_mean(ratios: Iterable[float]) -> float | None:
    logs = [math.log(ratio) for ratio in ratios]
    return math.exp(sum(logs) / len(logs)) if logs else None


def sound(run: Run) -> Claim:
    text = "Every model: written, standard operators only, outputs agree with the original's"
    ours = [row for (_, peer), row in run.rows.items() if PEERS[peer].ours]
    misses = [f"{row.model} ({row.peer})" for row in ours if not row.sound]
    return judge(text, misses, len(ours))


def fewest_nodes(run: Run) -> Claim:
    """Compare with the results of peers that are as correct as ours must be."""
    text = "Nodes: at most as many as the best of onnxslim and onnxsim on 9 of 10 exported models"
    misses: list[str] = []
    compared = 0
    for case in run.cases.values():
        rows = [run.get(case.name, peer) for peer in SIMPLIFIERS]
        best = min((r.nodes for r in rows if r is not None and r.sound), default=None)
        if not case.exported or best is None or (case.name, OURS) not in run.rows:
            continue
        compared += 1
        ours = run.get(case.name, OURS)
        if ours is None or not ours.sound:
            misses.append(f"{case.name} (no sound result)")
        elif ours.nodes > best:
            misses.append(f"{case.name} ({ours.nodes} against {best})")
    return judge(text, misses, compared, allowed=int(compared * (1 - FEWEST_NODES_SHARE) + 1e-9))


def fastest(run: Run) -> Claim:
    text = "Time: less than every Python peer on every exported model, validation off"
    misses: list[str] = []
    compared = 0
    for case in run.cases.values():
        rows = [run.get(case.name, peer) for peer in PYTHON_PEERS]
        best = min((r for r in rows if r is not None), key=lambda r: r.seconds, default=None)
        if best is None or not case.exported or (case.name, OURS) not in run.rows:
            continue
        compared += 1
        ours = run.get(case.name, OURS)
        if ours is None:
            misses.append(f"{case.name} (no result)")
        elif ours.seconds >= best.seconds:
            misses.append(f"{case.name} ({ours.seconds:.2f} s, {best.peer} {best.seconds:.2f} s)")
    return judge(text, misses, compared)


def small_memory(run: Run) -> Claim:
    text = f"Memory: at most {MEMORY_LIMIT_MB} MB above start-up for exported models of 200 MB"
    low, high = MEMORY_MODEL_MB
    rows = [row for case, row in run.of(OURS) if case.exported and low <= case.bytes / 1e6 <= high]
    misses = [f"{r.model} ({r.peak_mb:.0f} MB)" for r in rows if r.peak_mb > MEMORY_LIMIT_MB]
    return judge(text, misses, len(rows))


def no_growth(run: Run) -> Claim:
    text = "Memory: no growth with the weights, one graph with 200 MB and with 3 GB"
    small, large = run.get("mlp-200mb", OURS), run.get("mlp-3gb", OURS)
    if small is None or large is None:
        return Claim(text, None, "not measured")
    detail = f"{small.peak_mb:.1f} MB and {large.peak_mb:.1f} MB"
    return Claim(text, large.peak_mb <= small.peak_mb + GROWTH_SLACK_MB, detail)


def proven_memory(run: Run) -> Claim:
    text = "Memory: with every pass validated, at most half an exported model's size + 150 MB"
    rows = [(case, row) for case, row in run.of(OURS_PROVEN) if case.exported]
    misses = [
        f"{case.name} ({row.peak_mb:.0f} MB)"
        for case, row in rows
        if row.peak_mb > PROVEN_SHARE * case.bytes / 1e6 + PROVEN_EXTRA_MB
    ]
    return judge(text, misses, len(rows))


def linear(run: Run) -> Claim:
    text = f"Time is linear in the graph: 40k nodes take at most {LINEAR_RATIO} times 20k"
    short, long = run.get("chain-20k", OURS), run.get("chain-40k", OURS)
    if short is None or long is None:
        return Claim(text, None, "not measured")
    ratio = long.seconds / short.seconds
    cpu = long.cpu_seconds / short.cpu_seconds
    detail = f"{short.seconds:.2f} s and {long.seconds:.2f} s: {ratio:.2f} ({cpu:.2f} of CPU time)"
    return Claim(text, ratio <= LINEAR_RATIO, detail)
