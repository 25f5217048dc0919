"""The claims of `fuse` against its peers, each computed from the data of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from claims import Claim, geometric_mean, judge
from fusion_peers import TOOLS
from fusion_results import BERT_LIKE, CAUSAL, KINDS, NAMED, Case, Run

OURS, OURS_STANDARD = "toolkit", "toolkit-onnx"
TIMED_PEER = "onnxscript"
SIMPLIFIERS = tuple(name for name, tool in TOOLS.items() if tool.simplifier)
PEERS = tuple(name for name, tool in TOOLS.items() if not tool.ours)

ERROR_LIMIT = 1e-4
NODES_SHARE = 0.5
LAYER_NODES, OTHER_NODES = 18, 14
"""Embeddings need 8 nodes: three lookups, two sums, a norm, a projection to the width of the layers
(a MatMul and an Add, in ELECTRA and ALBERT). A padding mask needs 6: Cast and Unsqueeze, Where for
masks with a finite number, and Shape, Concat and Expand for the rows, which the runtime wants."""
LAYERS = 2
SLOWEST = 0.98
GOAL, MASKED_GOAL = 1.05, 1.15
LINEAR_RATIO = 1.3


def claims(run: Run) -> list[Claim]:
    makers: tuple[Callable[[Run], Claim], ...] = (
        *(lambda run, kind=kind: covered(run, kind) for kind in KINDS),
        carries_over,
        agrees,
        half_the_nodes,
        few_nodes_otherwise,
        bert_nodes,
        never_slower,
        faster_than_peers,
        fast,
        fast_when_masked,
        quick,
        linear,
    )
    return [make(run) for make in makers]


def _ours(run: Run) -> list[str]:
    return [tool for tool in (OURS_STANDARD, OURS) if tool in run.tools]


def _coverage(run: Run, cases: Iterable[Case], kinds: Iterable[str]) -> tuple[list[str], int, str]:
    """Return the exports with unfused layers, their total number, and the layers fused."""
    misses: list[str] = []
    compared = found_layers = layers = 0
    for case in cases:
        found = run.coverage(case, *_ours(run))
        compared += 1
        found_layers += sum(found[kind] for kind in kinds)
        layers += sum(case.expected[kind] for kind in kinds)
        missing = [
            f"{found[k]}/{case.expected[k]} {k}" for k in kinds if found[k] < case.expected[k]
        ]
        if missing:
            misses.append(f"{case.name} ({', '.join(missing)})")
    return misses, compared, f"{found_layers} of {layers} layers"


def covered(run: Run, kind: str) -> Claim:
    text = f"Coverage: all {kind} of the named architectures, by either exporter and attention"
    cases = [c for c in _transformers(run) if c.architecture in NAMED]
    misses, compared, layers = _coverage(run, cases, [kind])
    claim = judge(text, misses, compared)
    return Claim(text, claim.holds, f"{layers}; exports: {claim.detail}" if compared else "")


def carries_over(run: Run) -> Claim:
    text = "Coverage: attention, norms and gelus of the architectures that nobody named"
    cases = [c for c in _transformers(run) if c.architecture not in NAMED]
    misses, compared, layers = _coverage(run, cases, KINDS)
    claim = judge(text, misses, compared)
    return Claim(text, claim.holds, f"{layers}; exports: {claim.detail}" if compared else "")


def _transformers(run: Run) -> list[Case]:
    ours = _ours(run)
    return [c for c in run.measured(*ours) if c.transformer and not c.reason] if ours else []


def agrees(run: Run) -> Claim:
    text = f"Numerics: at most {ERROR_LIMIT:.0e} of the output's scale, several sizes, padding"
    rows = [row for row in run.rows.values() if TOOLS[row.tool].ours]
    misses = [
        f"{row.model} ({row.tool}: {row.reason or row.error})"
        for row in rows
        if not row.agrees or row.error is None or row.error > ERROR_LIMIT
    ]
    return judge(text, misses, len(rows))


def _best_simplifier(run: Run, case: Case) -> int | None:
    rows = (run.sound(case.name, tool) for tool in SIMPLIFIERS)
    return min((r.nodes for r in rows if r is not None and not r.foreign), default=None)


def _against_simplifiers(run: Run, text: str, transformer: bool, share: float) -> Claim:
    misses: list[str] = []
    compared = 0
    for case in run.measured(OURS_STANDARD):
        best = _best_simplifier(run, case)
        if case.transformer is not transformer or best is None:
            continue
        compared += 1
        ours = run.sound(case.name, OURS_STANDARD)
        if ours is None:
            misses.append(f"{case.name} (no sound result)")
        elif ours.nodes > share * best:
            misses.append(f"{case.name} ({ours.nodes} against {best})")
    return judge(text, misses, compared)


def half_the_nodes(run: Run) -> Claim:
    text = "Nodes, target onnx: at most half of the best simplifier's on transformers"
    return _against_simplifiers(run, text, True, NODES_SHARE)


def few_nodes_otherwise(run: Run) -> Claim:
    text = "Nodes, target onnx: no more than the best simplifier's on other networks"
    return _against_simplifiers(run, text, False, 1)


def bert_nodes(run: Run) -> Claim:
    text = (
        f"Nodes, target onnx: BERT-like encoders have at most {LAYER_NODES} a layer "
        f"+ {OTHER_NODES} for embeddings and mask"
    )
    rows = [
        row
        for case in run.measured(OURS_STANDARD)
        if case.architecture in BERT_LIKE and (row := run.get(case.name, OURS_STANDARD))
    ]
    limit = LAYERS * LAYER_NODES + OTHER_NODES
    return judge(text, [f"{r.model} ({r.nodes})" for r in rows if r.nodes > limit], len(rows))


def never_slower(run: Run) -> Claim:
    text = f"Latency: never below {SLOWEST} of the original's speed, one thread"
    ratios = run.speedups(OURS)
    misses = [f"{name} ({ratio:.2f})" for name, ratio in ratios.items() if ratio < SLOWEST]
    return judge(text, misses, len(ratios))


def faster_than_peers(run: Run) -> Claim:
    """Compare with peers on the exports where their result is correct."""
    text = "Latency: geometric mean above every peer's"
    misses: list[str] = []
    compared: list[str] = []
    for peer in PEERS:
        theirs, ours = run.speedups(peer), run.speedups(OURS)
        common = [name for name in theirs if name in ours]
        one, other = (geometric_mean(r[name] for name in common) for r in (ours, theirs))
        if one is None or other is None:
            continue
        told = f"{peer} {other:.3f} against {one:.3f} on {len(common)}"
        compared.append(told)
        if one <= other:
            misses.append(told)
    claim = judge(text, misses, len(compared))
    return Claim(text, claim.holds, "; ".join(compared) or claim.detail)


def _goal(text: str, ratios: dict[str, float], goal: float) -> Claim:
    mean = geometric_mean(ratios.values())
    if mean is None:
        return Claim(text, None, "not measured")
    return Claim(text, mean >= goal, f"{mean:.3f} over {len(ratios)}")


def fast(run: Run) -> Claim:
    text = f"Latency, the goal: geometric mean of {GOAL} over all models"
    return _goal(text, run.speedups(OURS), GOAL)


def fast_when_masked(run: Run) -> Claim:
    text = f"Latency, the goal: geometric mean of {MASKED_GOAL} on causal models and padded inputs"
    causal = [case for case in run.cases.values() if case.architecture in CAUSAL]
    ratios = run.speedups(OURS, ["padded"]) | run.speedups(OURS, ["plain"], causal)
    return _goal(text, ratios, MASKED_GOAL)


def quick(run: Run) -> Claim:
    text = f"Time: `fuse` without validation is as fast as {TIMED_PEER}'s optimize_for_ort"
    misses: list[str] = []
    compared = 0
    for case in run.measured(OURS, TIMED_PEER):
        ours, theirs = run.get(case.name, OURS), run.get(case.name, TIMED_PEER)
        if ours is None or theirs is None:
            continue
        compared += 1
        if ours.seconds > theirs.seconds:
            misses.append(f"{case.name} ({ours.seconds:.2f} s against {theirs.seconds:.2f} s)")
    return judge(text, misses, compared)


def linear(run: Run) -> Claim:
    text = f"Time is linear in depth: a layer of 48 costs at most {LINEAR_RATIO} times one of 12"
    seconds = {layers: figures["seconds"] for layers, figures in sorted(run.depths.items())}
    if not {2, 12, 48} <= set(seconds):
        return Claim(text, None, "not measured")
    early = (seconds[12] - seconds[2]) / 10
    late = (seconds[48] - seconds[12]) / 36
    shown = ", ".join(f"{layers} layers {value:.2f} s" for layers, value in seconds.items())
    return Claim(text, late <= LINEAR_RATIO * early, f"{shown}: {late / early:.2f}")
