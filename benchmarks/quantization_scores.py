"""Score a quantized model: its result on the task, and the noise in its outputs.

Scores are in points of 100, higher is better. With labels a score is the task's own metric, else
the agreement with the float model.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Outputs = dict[str, Array]

SURE = 0.3
"""Minimum score of a detection."""
OVERLAP = 0.5
"""Minimum intersection over union of two boxes that match."""
_STRIDES = (8, 16, 32)


def run(
    path: Path, feeds: Sequence[Mapping[str, Array]], carry: Mapping[str, str] | None = None
) -> list[Outputs]:
    """Return the outputs for each feed; carried outputs become inputs of the next feed."""
    session = open_session(path)
    names = [output.name for output in session.get_outputs()]
    found: list[Outputs] = []
    handed: dict[str, Array] = {}
    for feed in feeds:
        outputs = dict(zip(names, session.run(names, {**feed, **handed}), strict=True))
        handed = {inside: outputs[out] for out, inside in (carry or {}).items()}
        found.append(outputs)
    return found


def open_session(path: Path) -> Any:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def noise(reference: Sequence[Outputs], found: Sequence[Outputs]) -> float:
    """Return the lowest signal-to-quantization-noise ratio of the float outputs, in decibels."""
    worst = np.inf
    for name in reference[0]:
        if reference[0][name].dtype.kind != "f":
            continue
        signal = sum(float(np.sum(np.square(r[name], dtype=np.float64))) for r in reference)
        pairs = zip(reference, found, strict=True)
        error = sum(float(np.sum(np.square(r[name] - f[name], dtype=np.float64))) for r, f in pairs)
        decibels = 10 * np.log10(signal / error) if error else np.inf
        worst = min(worst, decibels if np.isfinite(error) else -np.inf)
    return float(worst)


Score = Callable[[Sequence[Outputs], Sequence[Outputs], "Array | None"], float]


def accuracy(found: Sequence[Outputs], _: Sequence[Outputs], labels: Array | None) -> float:
    """Return the top-1 accuracy in percent."""
    assert labels is not None
    return 100 * float(np.mean(_classes(found) == labels))


def agreement(found: Sequence[Outputs], reference: Sequence[Outputs], _: Array | None) -> float:
    """Return the percentage of samples with the class of the float model."""
    return 100 * float(np.mean(_classes(found) == _classes(reference)))


def similarity(found: Sequence[Outputs], _: Sequence[Outputs], labels: Array | None) -> float:
    """Return the Spearman correlation of cosines with human ratings; each feed is one pair."""
    from scipy.stats import spearmanr

    assert labels is not None
    cosines: list[float] = []
    for outputs in found:
        (a, b) = outputs["pooled"]
        cosines.append(float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b))))
    correlation: Any = spearmanr(cosines, labels)
    return 100 * float(correlation.statistic)


def decisions(found: Sequence[Outputs], reference: Sequence[Outputs], _: Array | None) -> float:
    """Return the percentage of frames with the same decision."""
    pairs = zip(found, reference, strict=True)
    return 100 * float(np.mean([(f["output"] > 0.5) == (r["output"] > 0.5) for f, r in pairs]))


def boxes(found: Sequence[Outputs], reference: Sequence[Outputs], _: Array | None) -> float:
    """Return the F1 score of the detections against those of the float model."""
    hits = made = wanted = 0
    for outputs, truth in zip(found, reference, strict=True):
        ours, theirs = _detections(outputs["output"][0]), _detections(truth["output"][0])
        made, wanted = made + len(ours), wanted + len(theirs)
        left = list(theirs)
        for box, kind in ours:
            match = next((t for t in left if t[1] == kind and _overlap(box, t[0]) > OVERLAP), None)
            if match is not None:
                left.remove(match)
                hits += 1
    return 200 * hits / (made + wanted) if made + wanted else 100.0


def pooled(outputs: Outputs, mask: Array) -> Outputs:
    """Add the mean over the unmasked tokens, which sentence similarity compares."""
    (hidden,) = outputs.values()
    if hidden.ndim == 2:  # the model has pooled
        return {**outputs, "pooled": hidden}
    weight = mask[:, :, None].astype(np.float32)
    return {**outputs, "pooled": (hidden * weight).sum(1) / weight.sum(1)}


def _classes(outputs: Sequence[Outputs]) -> Array:
    return np.concatenate([next(iter(o.values())).reshape(len(o), -1).argmax(-1) for o in outputs])


def _detections(output: Array) -> list[tuple[tuple[float, ...], int]]:
    """Return boxes with classes by descending score, after non-maximum suppression."""
    grids = []
    for stride in _STRIDES:
        cells = 416 // stride
        y, x = np.mgrid[:cells, :cells]
        grids.append(np.stack([x, y, np.full_like(x, stride)], -1).reshape(-1, 3))
    x, y, stride = np.concatenate(grids).T
    centers = (output[:, :2] + np.stack([x, y], 1)) * stride[:, None]
    sizes = np.exp(np.minimum(output[:, 2:4], 10)) * stride[:, None]
    scores = output[:, 4:5] * output[:, 5:]
    kinds, best = scores.argmax(1), scores.max(1)
    kept: list[tuple[tuple[float, ...], int]] = []
    for index in np.argsort(-best):
        if best[index] < SURE:
            break
        low, high = centers[index] - sizes[index] / 2, centers[index] + sizes[index] / 2
        box = (*map(float, low), *map(float, high))
        kind = int(kinds[index])
        if all(kind != k or _overlap(box, other) < OVERLAP for other, k in kept):
            kept.append((box, kind))
    return kept


def _overlap(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    if width <= 0 or height <= 0:
        return 0.0
    areas = sum((box[2] - box[0]) * (box[3] - box[1]) for box in (a, b))
    return width * height / (areas - width * height)


SCORES: dict[str, Score] = {
    "accuracy": accuracy,
    "agreement": agreement,
    "similarity": similarity,
    "decisions": decisions,
    "boxes": boxes,
}
