"""The claims of the quantization benchmark, each computed from the data of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from claims import Claim, geometric_mean, judge
from quantization_results import FLOAT, Row, Run
from quantization_tools import MASKED

OURS, OURS_NO_DATA = "toolkit", "toolkit-no-data"
ORT_STATIC = ("ort-minmax", "ort-percentile", "ort-entropy")
ORT = ("ort-dynamic", "ort-dynamic-tensor", *ORT_STATIC)

SIMILARITY_DROP, ACCURACY_DROP = 0.3, 0.5
SMALLER = 3.6
# Against onnxruntime's best, by regime.
MINILM_FASTER = {"1x32": 1.3, "1x128": 1.3, "padded-4x128": 1.5}
MINILM = ("minilm", "minilm-pooled")
TRANSFORMERS_FASTER = 1.15
CALIBRATION_SLACK = 0.1
BIG_MB = 600
# Two models of one speed differ by this much from run to run.
NOISE = 0.02


def claims(run: Run) -> list[Claim]:
    makers: tuple[Callable[[Run], Claim], ...] = (
        similarity_kept,
        minilm_smaller,
        minilm_faster,
        minilm_pooled_faster,
        minilm_masked_faster,
        accuracy_kept,
        decisions_kept,
        never_grows,
        never_slower,
        convolutional_speed,
        convolutional_noise,
        transformers_run,
        transformers_faster,
        calibration_memory,
        big_memory,
    )
    return [make(run) for make in makers]


def similarity_kept(run: Run) -> Claim:
    text = f"MiniLM on STS-B loses at most {SIMILARITY_DROP} points of Spearman correlation"
    return _drops(text, run, MINILM, SIMILARITY_DROP)


def minilm_smaller(run: Run) -> Claim:
    text = f"MiniLM is at least {SMALLER} times smaller"
    rows = [row for name in MINILM if (row := run.get(name, OURS)) is not None]
    ratios = [run.row(row.subject, FLOAT).bytes / row.bytes for row in rows]
    if not ratios:
        return Claim(text, None, "not measured")
    return Claim(text, min(ratios) >= SMALLER, ", ".join(f"{ratio:.2f} times" for ratio in ratios))


def minilm_faster(run: Run) -> Claim:
    return _minilm_faster(run, "minilm", "MiniLM, all tokens")


def minilm_pooled_faster(run: Run) -> Claim:
    return _minilm_faster(run, "minilm-pooled", "MiniLM, one vector for a sentence")


def _minilm_faster(run: Run, subject: str, name: str, tool: str = OURS) -> Claim:
    wanted = ", ".join(f"{ratio}x at {regime}" for regime, ratio in MINILM_FASTER.items())
    text = f"{name}: faster than onnxruntime's best of at most {SIMILARITY_DROP} points, {wanted}"
    row = run.get(subject, tool)
    if row is None:
        return Claim(text, None, "not measured")
    peers = [tool for tool in ORT if _keeps_similarity(run, subject, tool)]
    found = {regime: _against(run, row, regime, peers) for regime in MINILM_FASTER}
    known = {regime: ratio for regime, ratio in found.items() if ratio is not None}
    if not known:
        return Claim(text, None, "no peer was measured")
    holds = all(ratio >= MINILM_FASTER[regime] for regime, ratio in known.items())
    return Claim(text, holds, ", ".join(f"{regime} {r:.2f}x" for regime, r in known.items()))


def _keeps_similarity(run: Run, subject: str, tool: str) -> bool:
    """Whether a peer is within the accuracy budget of the toolkit."""
    row = run.get(subject, tool)
    drop = None if row is None else run.drop(row)
    return drop is not None and drop <= SIMILARITY_DROP


def minilm_masked_faster(run: Run) -> Claim:
    return _minilm_faster(run, "minilm", "MiniLM, all tokens by mask-outputs", MASKED)


def accuracy_kept(run: Run) -> Claim:
    text = f"Keyword spotting, MNIST and digits lose at most {ACCURACY_DROP} points"
    return _drops(text, run, ("keywords", "mnist", "digits"), ACCURACY_DROP)


def decisions_kept(run: Run) -> Claim:
    text = "Detections of YOLOX (F1) and decisions of silero-vad agree with the float model's: 95 %"
    return _drops(text, run, ("yolox-nano", "silero-vad"), 5.0)


def never_grows(run: Run) -> Claim:
    text = "No model grows"
    rows = _ours(run)
    return judge(
        text,
        [f"{r.subject} {r.bytes} bytes" for r in rows if r.bytes > run.row(r.subject, FLOAT).bytes],
        len(rows),
    )


def never_slower(run: Run) -> Claim:
    text = "No model is slower than in floats"
    found = [(row, regime, ratio) for row in _ours(run) for regime, ratio in row.speed.items()]
    slow = [f"{row.subject} {regime} {ratio:.2f}x" for row, regime, ratio in found]
    misses = [line for line, (_, _, ratio) in zip(slow, found, strict=True) if ratio < 1 - NOISE]
    return judge(text, misses, len(found))


def convolutional_speed(run: Run) -> Claim:
    text = "Convolutional models: at least as fast as onnxruntime's best static setting"
    return _against_all(text, run, "convolutional", ORT_STATIC)


def convolutional_noise(run: Run) -> Claim:
    text = "Convolutional models: less noise in the outputs than onnxruntime's best static setting"
    misses: list[str] = []
    rows = [row for row in _ours(run) if row.kind == "convolutional"]
    for row in rows:
        peers = [run.get(row.subject, tool) for tool in ORT_STATIC]
        best = max((p.decibels for p in peers if p and p.decibels is not None), default=-math.inf)
        if (row.decibels or 0) < best:
            misses.append(f"{row.subject} {row.decibels:.1f} dB against {best:.1f}")
    return judge(text, misses, len(rows))


def transformers_run(run: Run) -> Claim:
    text = "Every transformer: at least as fast as the best of onnxruntime's settings"
    return _against_all(text, run, "transformer", ORT)


def transformers_faster(run: Run) -> Claim:
    text = f"Transformers: {TRANSFORMERS_FASTER}x the speed of onnxruntime's best, geometric mean"
    ratios = [
        ratio
        for row in _ours(run)
        if row.kind == "transformer"
        for regime in row.speed
        if (ratio := _against(run, row, regime, ORT)) is not None
    ]
    mean = geometric_mean(ratios)
    if mean is None:
        return Claim(text, None, "not measured")
    return Claim(text, mean >= TRANSFORMERS_FASTER, f"{mean:.2f}x over {len(ratios)}")


def calibration_memory(run: Run) -> Claim:
    text = "Calibration takes the same memory with 16 and with 1,024 samples (10 %)"
    peaks = [a["peak_mb"] for what, a in run.memory.items() if what.startswith("calibration")]
    if len(peaks) < 2:
        return Claim(text, None, "not measured")
    holds = max(peaks) <= (1 + CALIBRATION_SLACK) * min(peaks)
    return Claim(text, holds, " and ".join(f"{peak:.0f} MB" for peak in peaks))


def big_memory(run: Run) -> Claim:
    text = f"A model of 3 GB takes less than {BIG_MB} MB to int8 and to int4"
    found = {what: a for what, a in run.memory.items() if " GB" in what}
    if not found:
        return Claim(text, None, "not measured")
    holds = all(not a.get("error") and a["peak_mb"] < BIG_MB for a in found.values())
    return Claim(text, holds, ", ".join(f"{w} {a['peak_mb']:.0f} MB" for w, a in found.items()))


def _ours(run: Run) -> list[Row]:
    """Return the rows of the toolkit with data, including failures."""
    return [row for (_, tool), row in run.rows.items() if tool == OURS and not row.reason]


def _drops(text: str, run: Run, subjects: Iterable[str], allowed: float) -> Claim:
    misses: list[str] = []
    details: list[str] = []
    for subject in subjects:
        if (subject, OURS) not in run.rows:
            continue
        row = run.row(subject, OURS)
        drop = run.drop(row)
        shown = row.reason if drop is None else f"{drop:.2f}"
        details.append(f"{subject} {shown}")
        if drop is None or drop > allowed:
            misses.append(subject)
    if not details:
        return Claim(text, None, "not measured")
    return Claim(text, not misses, ", ".join(details))


def _against(run: Run, row: Row, regime: str, tools: Iterable[str]) -> float | None:
    """Return the speedup over the fastest of these tools."""
    peers = [run.get(row.subject, tool) for tool in tools]
    best = max((p.speed.get(regime, 0.0) for p in peers if p is not None), default=0.0)
    return row.speed[regime] / best if best and regime in row.speed else None


def _against_all(text: str, run: Run, kind: str, tools: Iterable[str]) -> Claim:
    misses: list[str] = []
    count = 0
    for row in (r for (_, tool), r in run.rows.items() if tool == OURS and r.kind == kind):
        if row.reason:
            misses.append(f"{row.subject}: {row.reason[:60]}")
            count += 1
        for regime in row.speed:
            ratio = _against(run, row, regime, tools)
            if ratio is not None:
                count += 1
                if ratio < 1 - NOISE:
                    misses.append(f"{row.subject} {ratio:.2f}x")
    return judge(text, misses, count)
