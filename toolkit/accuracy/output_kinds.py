"""The kind of an output, inferred from its name, shape, producer and values on a few samples.

    classes     logits or probabilities along an axis; only the largest one matters
    text        classes at the positions of a text, most of them blank; all must be correct
    scores      numbers from 0 to 1, each an independent decision
    embedding   vectors; only their direction matters
    regression  numbers whose values matter: boxes, depths, images
    state       fed back as an input: see `toolkit.accuracy.recurrent_state`
    exact       integers, booleans, strings

Channels of different scales in one output, such as boxes and scores, form groups: a common scale
would not constrain the smaller ones. The default is regression.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from onnx import NodeProto

from toolkit.accuracy.budgets import Kind
from toolkit.accuracy.metrics import Array, Doubles, are_probabilities
from toolkit.calibrate.statistics import is_float
from toolkit.ir import node as nd
from toolkit.ir.graph import Graph
from toolkit.ir.op_traits import LINEAR, NORMALIZATIONS, VIEWS, has_trait

_CLASSES = re.compile(r"logit|prob|softmax|class|label|categor|token")
_EMBEDDING = re.compile(r"embed|hidden|feature|pool|repr|encod|vector")
_REGRESSION = re.compile(r"box|coord|landmark|keypoint|depth|mask|flow|regress|offset|loc\b")

_THROUGH = (*VIEWS, "Identity", "Cast", "Dropout", "Div")
"""Operators that keep the order of the values, up to their unit."""

_LINEAR = LINEAR | {"Add"}
"""Matrix products, with or without a bias."""
_VECTORS = NORMALIZATIONS | {"ReduceMean", "GlobalAveragePool", "Tanh"}
"""Operators whose results are embeddings."""

_POOLED, _MIN_POOLED = ("ReduceSum", "ReduceMax"), 32
"""Operators that pool vectors, and the smallest length of an embedding."""

_VOCABULARY = 1000
"""From this many channels on, a sequence is over a vocabulary, whatever its name."""

_MAX_NUMBERS, _MIN_SAMPLES = 256, 4
"""The largest width of a linear output that may be regression, and the samples to decide."""

_MIN_TEXT, _BLANK = 8, 0.5
"""The smallest number of positions of a text, and the smallest fraction of blanks among them."""

_APART = 10.0
"""From this ratio of scales on, channels are different quantities."""

_MAX_GROUPS = 4

_GATED, _POSITIONS = 0.1, 64
"""The ratio of a gate's mean to that of the scores it gates, over at least this many positions."""


@dataclass(frozen=True, slots=True)
class ChannelGroup:
    """Channels that are measured together; None for all of them."""

    kind: Kind
    label: str = ""
    channels: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class OutputKind:
    """The kind of an output, and its groups of channels along `axis` (-1 or 1).

    An output without an axis has no channels: its elements are independent.
    """

    name: str
    kind: Kind
    axis: int | None = -1
    groups: tuple[ChannelGroup, ...] = ()
    gate: int | None = None
    """The channel of a detector's objectness; the other scores are those of classes."""

    @property
    def scores(self) -> tuple[int, ...]:
        """The channels of scores, if there are other channels too."""
        of_scores = (g.channels for g in self.groups if g.kind == "scores" and g.channels)
        return next(of_scores, ())

    def gated(self, rows: Array) -> Array:
        """Return the rows with the scores of classes multiplied by the gate."""
        if self.gate is None:
            return rows
        behind = [channel for channel in self.scores if channel != self.gate]
        found = np.array(rows)
        found[:, behind] *= rows[:, [self.gate]]
        return found

    def rows(self, array: Array) -> Array:
        """Return the output as a matrix with a row per position and a column per channel."""
        if array.ndim < 2:
            return array.reshape(1, -1) if self.kind == "classes" else array.reshape(-1, 1)
        if self.kind == "exact" or self.axis is None:
            return array.reshape(-1, 1)
        return _rows(array, self.axis)


def infer_kind(
    graph: Graph, name: str, values: Sequence[Array], states: Collection[str] = ()
) -> OutputKind:
    """Infer the kind of the output `name` from its values on some samples."""
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
    linear = has_trait(source, _LINEAR)
    axis = -1 if linear else _channel_axis(values)
    if _varies(values, axis):
        return _one(name, kind, None)
    plain = OutputKind(name, kind, axis)
    rows = [plain.rows(value) for value in values]
    found = replace(plain, groups=_groups(rows))
    return replace(found, gate=_gate(rows, found.scores))


def _one(name: str, kind: Kind, axis: int | None = -1) -> OutputKind:
    return OutputKind(name, kind, axis, (ChannelGroup(kind),))


def _source(graph: Graph, name: str, rank: int) -> NodeProto | None:
    """Return the node that computes the values of an output, before data movement.

    GatherND restores padded tokens in outputs of rank 3; elsewhere it selects values, such as the
    detections to keep, and is not skipped.
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
    """Return the computed operand of a Where whose other operand is constant, as for padding."""
    computed = [slot for slot in (1, 2) if graph.const(where.input[slot]) is None]
    return computed[0] if len(computed) == 1 else None


def _kind(
    name: str, first: Array, values: Sequence[Array], source: NodeProto | None
) -> tuple[Kind, int]:
    op = nd.qualified(source) if source is not None else ""
    axis = 1 if first.ndim == 4 else -1
    width = first.shape[axis] if first.ndim else 1
    within = all(_within_unit(value) for value in values)
    if width == 1 or first.ndim < 2:
        if first.ndim == 1 and op in ("Softmax", "LogSoftmax") and first.size > 1:
            return "classes", -1
        decides = within and (op in ("Sigmoid", "HardSigmoid") or "prob" in name)
        return ("scores" if decides else "regression"), -1
    if op in ("Softmax", "LogSoftmax"):
        square = first.ndim >= 4 and first.shape[-1] == first.shape[-2]  # attention weights
        return ("regression", axis) if square else ("classes", axis)
    if within and op in ("Sigmoid", "HardSigmoid"):
        return "scores", axis
    if within and all(are_probabilities(_rows(value, axis)) for value in values):
        return "classes", axis
    if _REGRESSION.search(name):
        return "regression", axis
    if _CLASSES.search(name):
        return "classes", axis
    pooled = op in _POOLED and first.ndim == 2 and width >= _MIN_POOLED
    of_norm = op in _VECTORS or all(_of_unit_length(v) for v in values)
    if _EMBEDDING.search(name) or pooled or of_norm:
        return ("embedding", -1) if first.ndim < 4 else ("regression", axis)
    linear = op in _LINEAR
    if linear and first.ndim == 3 and width >= _VOCABULARY:
        return "classes", -1
    if linear and first.ndim == 2 and not _has_one_maximum(values, width):
        return "classes", -1
    return "regression", axis


def _has_one_maximum(values: Sequence[Array], width: int) -> bool:
    """Return whether one channel is the largest on every sample, as in angles and landmarks."""
    tops = np.concatenate([value.argmax(axis=-1).reshape(-1) for value in values])
    return width <= _MAX_NUMBERS and tops.size >= _MIN_SAMPLES and np.unique(tops).size == 1


def _is_text(values: Sequence[Array]) -> bool:
    """Return whether one class, as the blank of CTC, is the largest at most positions, not all."""
    if values[0].ndim != 3 or values[0].shape[0] * values[0].shape[1] < _MIN_TEXT:
        return False
    tops = np.concatenate([value.argmax(axis=-1).reshape(-1) for value in values])
    blank = np.unique(tops, return_counts=True)[1].max() / tops.size
    return _BLANK <= blank < 1


def _within_unit(value: Array) -> bool:
    return bool(value.size) and float(value.min()) >= 0 and float(value.max()) <= 1


def _rows(array: Array, axis: int) -> Array:
    """Return an array as a matrix whose columns are the channels along `axis`."""
    moved = np.moveaxis(array, axis, -1)
    return moved.reshape(math.prod(moved.shape[:-1]), moved.shape[-1])


def _of_unit_length(value: Array) -> bool:
    lengths = np.linalg.norm(value.astype(np.float64), axis=-1)
    return bool(np.allclose(lengths, 1, atol=1e-3))


def _channel_axis(values: Sequence[Array]) -> int:
    """Return 1 for images, and for sequences the shorter of the last two axes.

    An axis whose size varies between samples counts positions.
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
    """Return whether the size along an axis varies between samples."""
    return len({value.shape[axis] for value in values if value.ndim > 1}) > 1


def _groups(rows: Sequence[Array]) -> tuple[ChannelGroup, ...]:
    """Group the channels: scores within [0, 1], and the others by scale."""
    low = np.min([r.min(axis=0, initial=np.inf) for r in rows], axis=0)
    high = np.max([r.max(axis=0, initial=-np.inf) for r in rows], axis=0)
    power = np.mean([np.square(r.astype(np.float64)).mean(axis=0) for r in rows], axis=0)
    sizes = np.sqrt(power)
    within: Array = (low >= 0) & (high <= 1)
    if not within.any() or within.all():
        return _by_size(np.array(range(sizes.size)), sizes, whole=True)
    inside: Array = np.flatnonzero(within)
    outside: Array = np.flatnonzero(~within)
    scores = ChannelGroup("scores", _label(inside), tuple(inside.tolist()))
    return (*_by_size(outside, sizes), scores)


def _gate(rows: Sequence[Array], scores: Sequence[int]) -> int | None:
    """Return the first score if it is low at most positions where others are high.

    It is the objectness of detectors that predict it apart from the class.
    """
    if len(scores) < 2 or any(len(each) < _POSITIONS for each in rows):
        return None
    first = np.mean([each[:, scores[0]].mean() for each in rows])
    others = np.mean([each[:, list(scores[1:])].max(axis=1).mean() for each in rows])
    return scores[0] if first < _GATED * others else None


def _by_size(channels: Array, sizes: Doubles, whole: bool = False) -> tuple[ChannelGroup, ...]:
    order = channels[np.argsort(sizes[channels], kind="stable")]
    ordered = np.maximum(sizes[order], 1e-12)
    cuts = np.flatnonzero(ordered[1:] > _APART * ordered[:-1]) + 1
    if len(cuts) >= _MAX_GROUPS:
        cuts = cuts[:0]  # too many scales for different quantities
    parts = [np.sort(part) for part in np.split(order, cuts)]
    if whole and len(parts) == 1:
        return (ChannelGroup("regression"),)
    return tuple(ChannelGroup("regression", _label(part), tuple(part.tolist())) for part in parts)


def _label(channels: Array) -> str:
    first, last = int(channels[0]), int(channels[-1])
    if last - first + 1 == channels.size:
        return f"channels {first}-{last}" if last > first else f"channel {first}"
    return f"{channels.size} channels from {first} to {last}"


def real_rows(kind: OutputKind, shape: Sequence[int], feed: Mapping[str, Array]) -> Array | None:
    """Return the positions of a sequence that are not padding; None without padding."""
    if kind.axis != -1 or len(shape) != 3:
        return None
    for name, value in feed.items():
        if "mask" in name.lower() and value.shape == tuple(shape[:2]) and not value.all():
            return np.flatnonzero(value.reshape(-1))
    return None
