"""What an output is: told by its name, its shape, what makes it, and its values on a few samples.

    classes     logits or probabilities along an axis: what matters is which is greatest
    text        classes at positions that are read as one, most of them blank: a line is right only
                when all of it is
    scores      numbers from 0 to 1, each a decision of its own
    embedding   vectors: what matters is where they point
    regression  numbers that matter as such: boxes, depths, images
    state       fed back as an input: see `toolkit.quality.states`
    exact       integers, booleans, strings

Numbers of different sizes in one output, as boxes beside scores, are groups of channels: by their
common scale alone the smaller ones could be anything. In doubt it is a regression.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from onnx import NodeProto

from toolkit.accuracy.budgets import Kind
from toolkit.accuracy.metrics import Array, Doubles
from toolkit.calibrate.statistics import is_float
from toolkit.ir import node as nd
from toolkit.ir.graph import Graph

_CLASSES = re.compile(r"logit|prob|softmax|class|label|categor|token")
_EMBEDDING = re.compile(r"embed|hidden|feature|pool|repr|encod|vector")
_REGRESSION = re.compile(r"box|coord|landmark|keypoint|depth|mask|flow|regress|offset|loc\b")

_THROUGH = ("Identity", "Cast", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Dropout", "Div")
"""Operators that change neither the values nor their order, or only the unit they are in."""

_LINEAR = ("Gemm", "MatMul", "FusedMatMul", "Add", "MatMulInteger", "MatMulNBits")
_NORMS = (
    *("LpNormalization", "LayerNormalization", "SkipLayerNormalization", "RMSNormalization"),
    *("SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization", "GroupNormalization"),
    *("InstanceNormalization", "BatchNormalization", "ReduceMean", "GlobalAveragePool", "Tanh"),
)
"""What vectors come out of."""

_POOLED, _LEAST_POOLED = ("ReduceSum", "ReduceMax"), 32
"""What makes one vector of many, if it is as long as that: sums of a few are numbers."""

_VOCABULARY = 1000
"""Channels of a sequence without a telling name that are a vocabulary."""

_MOST_NUMBERS, _ENOUGH = 256, 4
"""Linear outputs that may be numbers rather than classes, and samples that tell."""

_LEAST_TEXT, _BLANK = 8, 0.5
"""Positions that may be a text, and the share of them that has nothing to say."""

_APART = 10.0
"""Channels whose sizes are this many times apart are of different quantities."""

_MOST_GROUPS = 4

_GATED, _POSITIONS = 0.1, 64
"""A gate is that much lower than what it gates, on the mean of so many positions or more."""


@dataclass(frozen=True, slots=True)
class Group:
    """Channels that are measured together; None: all of them."""

    kind: Kind
    label: str = ""
    channels: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class OutputKind:
    """What an output is: its channels are along `axis` (-1 or 1), in one or more groups.

    Without an axis it has no channels: each element stands for itself.
    """

    name: str
    kind: Kind
    axis: int | None = -1
    groups: tuple[Group, ...] = ()
    gate: int | None = None
    """The channel that says whether there is anything at a position; other scores say what."""

    @property
    def scores(self) -> tuple[int, ...]:
        """The channels that are scores, where others are not."""
        of_scores = (g.channels for g in self.groups if g.kind == "scores" and g.channels)
        return next(of_scores, ())

    def gated(self, rows: Array) -> Array:
        """The rows with all scores as the model means them: those behind a gate, times it."""
        if self.gate is None:
            return rows
        behind = [channel for channel in self.scores if channel != self.gate]
        found = np.array(rows)
        found[:, behind] *= rows[:, [self.gate]]
        return found

    def rows(self, array: Array) -> Array:
        """The output as a matrix: a row for each position, a column for each channel."""
        if array.ndim < 2:
            return array.reshape(1, -1) if self.kind == "classes" else array.reshape(-1, 1)
        if self.kind == "exact" or self.axis is None:
            return array.reshape(-1, 1)
        turned = np.moveaxis(array, self.axis, -1)
        return turned.reshape(math.prod(turned.shape[:-1]), turned.shape[-1])


def infer_kind(
    graph: Graph, name: str, values: Sequence[Array], states: Collection[str] = ()
) -> OutputKind:
    """The kind of the output `name`, given what it was on some samples."""
    first = values[0]
    if not is_float(first):
        return _one(name, "exact")
    if name in states:
        return _one(name, "state")
    source = _source(graph, name, first.ndim)
    kind, axis = _kind(name.lower(), first, values, source)
    if kind == "classes" and axis == -1 and _is_text(values):
        return _one(name, "text")
    if kind == "scores" and _varies(values, axis):
        return _one(name, kind, None)
    if kind != "regression" or first.ndim < 2:
        return _one(name, kind, axis)
    linear = source is not None and nd.is_op(source, *_LINEAR)
    axis = -1 if linear else _channel_axis(values)
    if _varies(values, axis):
        return _one(name, kind, None)
    plain = OutputKind(name, kind, axis)
    rows = [plain.rows(value) for value in values]
    found = replace(plain, groups=_groups(rows))
    return replace(found, gate=_gate(rows, found.scores))


def _one(name: str, kind: Kind, axis: int | None = -1) -> OutputKind:
    return OutputKind(name, kind, axis, (Group(kind),))


def _source(graph: Graph, name: str, rank: int) -> NodeProto | None:
    """The node that computes the values of an output.

    A GatherND brings vectors of tokens back to their places; elsewhere it picks some, as those that
    a detector keeps, which are no longer what they were beside each other.
    """
    through = (*_THROUGH, "Where", "GatherND") if rank == 3 else (*_THROUGH, "Where")
    node = graph.producer(name)
    while node is not None and nd.is_op(node, *through):
        slot = _chosen_from(graph, node) if nd.is_op(node, "Where") else 0
        if slot is None:
            return node
        node = graph.producer(node.input[slot])
    return node


def _chosen_from(graph: Graph, where: NodeProto) -> int | None:
    """What a Where gives beside a constant, as of padding."""
    computed = [slot for slot in (1, 2) if graph.const(where.input[slot]) is None]
    return computed[0] if len(computed) == 1 else None


def _kind(
    name: str, first: Array, values: Sequence[Array], source: NodeProto | None
) -> tuple[Kind, int]:
    op = source.op_type if source is not None else ""
    axis = 1 if first.ndim == 4 else -1
    width = first.shape[axis] if first.ndim else 1
    within = all(_within_unit(value) for value in values)
    if width == 1 or first.ndim < 2:
        if first.ndim == 1 and op in ("Softmax", "LogSoftmax") and first.size > 1:
            return "classes", -1
        decides = within and (op in ("Sigmoid", "HardSigmoid") or "prob" in name)
        return ("scores" if decides else "regression"), -1
    if op in ("Softmax", "LogSoftmax"):
        square = first.ndim >= 4 and first.shape[-1] == first.shape[-2]  # of attention
        return ("regression", axis) if square else ("classes", axis)
    if within and op in ("Sigmoid", "HardSigmoid"):
        return "scores", axis
    if all(_sums_to_one(value, axis) for value in values) and within:
        return "classes", axis
    if _REGRESSION.search(name):
        return "regression", axis
    if _CLASSES.search(name):
        return "classes", axis
    pooled = op in _POOLED and first.ndim == 2 and width >= _LEAST_POOLED
    of_norm = op in _NORMS or all(_of_unit_length(v) for v in values)
    if _EMBEDDING.search(name) or pooled or of_norm:
        return ("embedding", -1) if first.ndim < 4 else ("regression", axis)
    linear = op in _LINEAR
    if linear and first.ndim == 3 and width >= _VOCABULARY:
        return "classes", -1
    if linear and first.ndim == 2 and not _is_always_greatest(values, width):
        return "classes", -1
    return "regression", axis


def _is_always_greatest(values: Sequence[Array], width: int) -> bool:
    """Whether one channel is the greatest on every sample, as ratings, angles and landmarks have
    it: then nothing is told apart by which one is."""
    tops = np.concatenate([value.argmax(axis=-1).reshape(-1) for value in values])
    return width <= _MOST_NUMBERS and tops.size >= _ENOUGH and np.unique(tops).size == 1


def _is_text(values: Sequence[Array]) -> bool:
    """Whether one class is the greatest at most positions, as the blank of CTC is, and not at all
    of them: samples in which nothing is read do not tell."""
    if values[0].ndim != 3 or values[0].shape[0] * values[0].shape[1] < _LEAST_TEXT:
        return False
    tops = np.concatenate([value.argmax(axis=-1).reshape(-1) for value in values])
    blank = np.unique(tops, return_counts=True)[1].max() / tops.size
    return _BLANK <= blank < 1


def _within_unit(value: Array) -> bool:
    return bool(value.size) and float(value.min()) >= 0 and float(value.max()) <= 1


def _sums_to_one(value: Array, axis: int) -> bool:
    return bool(np.allclose(value.astype(np.float64).sum(axis=axis), 1, atol=1e-3))


def _of_unit_length(value: Array) -> bool:
    lengths = np.linalg.norm(value.astype(np.float64), axis=-1)
    return bool(np.allclose(lengths, 1, atol=1e-3))


def _channel_axis(values: Sequence[Array]) -> int:
    """1 for images; of a sequence of predictions the shorter of the last two axes.

    One that is longer on one sample than on another counts positions.
    """
    first = values[0]
    if first.ndim == 4:
        return 1
    if first.ndim != 3:
        return -1
    if _varies(values, 1) != _varies(values, -1):
        return -1 if _varies(values, 1) else 1
    return 1 if first.shape[1] < first.shape[2] else -1


def _varies(values: Sequence[Array], axis: int) -> bool:
    """Whether the size along an axis depends on the sample."""
    return len({value.shape[axis] for value in values if value.ndim > 1}) > 1


def _groups(rows: Sequence[Array]) -> tuple[Group, ...]:
    """Channels from 0 to 1 beside others, and those of very different sizes."""
    low = np.min([r.min(axis=0, initial=np.inf) for r in rows], axis=0)
    high = np.max([r.max(axis=0, initial=-np.inf) for r in rows], axis=0)
    power = np.mean([np.square(r.astype(np.float64)).mean(axis=0) for r in rows], axis=0)
    sizes = np.sqrt(power)
    within: Array = (low >= 0) & (high <= 1)
    if not within.any() or within.all():
        return _by_size(np.array(range(sizes.size)), sizes, whole=True)
    inside: Array = np.flatnonzero(within)
    outside: Array = np.flatnonzero(~within)
    scores = Group("scores", _label(inside), tuple(inside.tolist()))
    return (*_by_size(outside, sizes), scores)


def _gate(rows: Sequence[Array], scores: Sequence[int]) -> int | None:
    """The first score where it is low in most positions at which others are high.

    So are detectors written that tell whether there is an object apart from its class.
    """
    if len(scores) < 2 or any(len(each) < _POSITIONS for each in rows):
        return None
    first = np.mean([each[:, scores[0]].mean() for each in rows])
    others = np.mean([each[:, list(scores[1:])].max(axis=1).mean() for each in rows])
    return scores[0] if first < _GATED * others else None


def _by_size(channels: Array, sizes: Doubles, whole: bool = False) -> tuple[Group, ...]:
    order = channels[np.argsort(sizes[channels], kind="stable")]
    ordered = np.maximum(sizes[order], 1e-12)
    cuts = np.flatnonzero(ordered[1:] > _APART * ordered[:-1]) + 1
    if len(cuts) >= _MOST_GROUPS:
        cuts = cuts[:0]  # sizes of all kinds: no quantities that could be told apart
    parts = [np.sort(part) for part in np.split(order, cuts)]
    if whole and len(parts) == 1:
        return (Group("regression"),)
    return tuple(Group("regression", _label(part), tuple(part.tolist())) for part in parts)


def _label(channels: Array) -> str:
    first, last = int(channels[0]), int(channels[-1])
    if last - first + 1 == channels.size:
        return f"channels {first}-{last}" if last > first else f"channel {first}"
    return f"{channels.size} channels from {first} to {last}"


def real_rows(kind: OutputKind, shape: Sequence[int], feed: Mapping[str, Array]) -> Array | None:
    """The positions of a sequence that are no padding; None when all of them are real."""
    if kind.axis != -1 or len(shape) != 3:
        return None
    for name, value in feed.items():
        if "mask" in name.lower() and value.shape == tuple(shape[:2]) and not value.all():
            return np.flatnonzero(value.reshape(-1))
    return None
