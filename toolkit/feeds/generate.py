"""Generate synthetic feeds: draw them from the inputs' domains, and keep those that run."""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
from onnx import ModelProto, TypeProto, helper, inliner, shape_inference

from toolkit.errors import RuntimeRefused
from toolkit.feeds.dim_sizes import (
    Role,
    Sizes,
    find_symbols,
    first_sizes,
    more_sizes,
    sizes_from_weights,
)
from toolkit.feeds.domains import Domain, FeedVariant, OneOf
from toolkit.feeds.infer_domain import infer_domain
from toolkit.feeds.user_samples import Feed
from toolkit.ir.graph import Graph
from toolkit.ir.model import Model
from toolkit.ir.tensor_type import Shape, from_proto, is_nameless
from toolkit.symbolic import Dim, Expr, evaluate, symbol

RunModel = Callable[[Feed], list[Any]]

_MAX_BYTES = 1 << 25
"""The largest size of a feed in bytes."""
_HEAVY_BYTES = 1 << 19
"""The size in bytes (a photograph) from which two feeds of a dynamic model suffice."""
_MAX_REFUSALS = 60
_OTHER_SIDE = 101
"""The step, odd, to a variation that pads on the other side."""
_LIKELY_RANKS = (2, 4, 3, 1, 0)
"""The ranks to try for inputs without a declared shape."""
_SEQUENCE_LENGTH = 3
_LARGE_GRAPH = 5000
"""From this many nodes on, collecting the analyzed graph at once pays off."""


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A feed that the model accepted, its outputs, and the sizes of the dynamic dimensions."""

    feed: Feed
    outputs: list[Any]
    sizes: Sizes = field(default_factory=dict[str, int])


@dataclass(frozen=True, slots=True)
class _Input:
    name: str
    dtype: int
    shape: Shape | None
    sequence: bool
    domain: Domain


@dataclass(frozen=True, slots=True)
class _Layout:
    """Shapes of all inputs, the symbols in them, and the sizes fixed by weights."""

    shapes: Mapping[str, Shape]
    roles: Mapping[str, Role]
    fixed: Sizes


class FeedGenerator:
    """A generator of feeds for one model.

    The constructor analyzes the graph: its copy, as large as the model's own graph, is freed before
    a session is opened.
    """

    def __init__(self, model: Model, seed: int) -> None:
        graph = analyzed(model)
        self._seed = seed
        self._refusals = 0
        self.refusal = ""
        """Why the model failed on the first feed."""
        self._inputs = list(_inputs(graph))
        known = {i.name for i in self._inputs}
        unknown = next((name for name in graph.feeds if name not in known), None)
        if unknown is not None:
            self.refusal = f"input '{unknown}' is neither a tensor nor a sequence of tensors"
        self._layouts: list[_Layout] = [] if unknown else list(_layouts(graph, self._inputs))
        if len(graph) > _LARGE_GRAPH:
            # a model and its graph are a reference cycle
            del graph
            gc.collect()

    def find(self, run: RunModel, count: int | None) -> list[RecordedRun]:
        """Return up to `count` feeds on which `run`, the model, does not raise RuntimeRefused.

        The default is three for a dynamic model, two for others.
        """
        for layout in self._layouts:
            first = self._first(run, layout)
            if first is not None:
                wanted = _default_count(self._inputs, first) if count is None else count
                return self._more(run, first, wanted, layout)
        return []

    def _first(self, run: RunModel, layout: _Layout) -> RecordedRun | None:
        roles, fixed = layout.roles, layout.fixed
        lively = ((sizes, False) for sizes in first_sizes(roles, fixed))
        calm = ((sizes, True) for sizes in islice(first_sizes(roles, fixed), 4))
        for sizes, is_calm in (*lively, *calm):
            found = self._without_nan(run, layout, sizes, 0, is_calm)
            if found is not None:
                return found
        return None

    def _more(
        self, run: RunModel, first: RecordedRun, count: int, layout: _Layout
    ) -> list[RecordedRun]:
        found = [first]
        for variation in range(1, count):
            used = [run.sizes for run in found]
            candidates = more_sizes(layout.roles, layout.fixed, first.sizes, variation)
            fresh = [sizes for sizes in _distinct(candidates) if sizes not in used]
            for sizes in [*fresh, first.sizes]:
                other = self._without_nan(run, layout, sizes, variation, False)
                if other is not None:
                    found.append(other)
                    break
        return found

    def _without_nan(
        self, run: RunModel, layout: _Layout, sizes: Sizes, variation: int, calm: bool
    ) -> RecordedRun | None:
        """Return a run with these sizes, preferably one whose outputs have no NaN.

        NaNs cannot be compared. A causal model may return them for padding on the left, where all
        keys are masked.
        """
        found = self._attempt(run, layout, sizes, variation, calm)
        if found is None or not _has_nan(found):
            return found
        other = self._attempt(run, layout, sizes, variation + _OTHER_SIDE, calm)
        return found if other is None or _has_nan(other) else other

    def _attempt(
        self, run: RunModel, layout: _Layout, sizes: Sizes, variation: int, calm: bool
    ) -> RecordedRun | None:
        if self._refusals >= _MAX_REFUSALS:
            return None
        random = np.random.default_rng((self._seed, variation))
        variant = FeedVariant(random, sizes, variation, calm)
        feed: Feed = {}
        room = _MAX_BYTES
        for given in self._inputs:
            shape = tuple(evaluate(dim, sizes) for dim in layout.shapes[given.name])
            dtype: np.dtype[Any] = helper.tensor_dtype_to_np_dtype(given.dtype)
            if any(size < 0 for size in shape):
                return None
            room -= math.prod(shape) * dtype.itemsize
            if room < 0:
                limit = f"synthetic inputs would exceed {_MAX_BYTES >> 20} MB"
                self.refusal = self.refusal or limit
                return None
            times = _SEQUENCE_LENGTH if given.sequence else 1
            # numpy draws a scalar for the empty shape, which the runtime does not take
            drawn = [np.asarray(given.domain.draw(shape, dtype, variant)) for _ in range(times)]
            feed[given.name] = drawn if given.sequence else drawn[0]
        try:
            return RecordedRun(feed, run(feed), sizes)
        except RuntimeRefused as refusal:
            self._refusals += 1
            self.refusal = self.refusal or str(refusal)
            return None


def _has_nan(run: RecordedRun) -> bool:
    single = [value for value in run.outputs if not isinstance(value, (list, dict))]
    arrays = [np.asarray(value) for value in single]
    return any(array.dtype.kind == "f" and bool(np.isnan(array).any()) for array in arrays)


def _layouts(graph: Graph, inputs: Sequence[_Input]) -> Iterator[_Layout]:
    """Yield the inputs' shapes, with several ranks for inputs that declare none."""
    unknown = [i.name for i in inputs if i.shape is None]
    for likely in _LIKELY_RANKS if unknown else (0,):
        shapes: dict[str, Shape] = {i.name: i.shape for i in inputs if i.shape is not None}
        for name in unknown:
            fixed, axes = sizes_from_weights(graph, name)
            least = max((-axis for axis in axes), default=0)
            rank = fixed if fixed is not None else max(likely, least)
            shapes[name] = tuple(symbol(f"{name}.{axis}") for axis in range(rank))
        yield _Layout(shapes, find_symbols(shapes, graph), _fixed(graph, shapes))


def _fixed(graph: Graph, shapes: Mapping[str, Shape]) -> Sizes:
    """Return the symbols whose size is fixed by weights."""
    fixed: Sizes = {}
    for name, shape in shapes.items():
        for axis, size in sizes_from_weights(graph, name)[1].items():
            dim: Dim = shape[axis] if -len(shape) <= axis < len(shape) else 0
            if isinstance(dim, Expr) and len(dim.symbols) == 1 and not dim.anonymous:
                fixed.setdefault(next(iter(dim.symbols)), size)
    return fixed


def _default_count(inputs: Sequence[_Input], first: RecordedRun) -> int:
    """Return the number of feeds that covers every size and choice at a bounded cost."""
    if not inputs:
        return 1
    choices = [len(i.domain.values) for i in inputs if isinstance(i.domain, OneOf)]
    heavy = sum(np.asarray(value).nbytes for value in first.feed.values()) > _HEAVY_BYTES
    return max(3 if first.sizes and not heavy else 2, min(max(choices, default=0), 4))


def _distinct(candidates: Iterable[Sizes]) -> list[Sizes]:
    return [dict(key) for key in dict.fromkeys(tuple(sizes.items()) for sizes in candidates)]


def _inputs(graph: Graph) -> Iterator[_Input]:
    """Yield the inputs that can be drawn: tensors, sequences of tensors, optionals of either."""
    for value in graph.interface_inputs(feeds_only=True):
        kind, sequence = _innermost(value.type)
        type_ = from_proto(kind)
        if type_ is not None:
            domain = infer_domain(graph, value.name)
            yield _Input(value.name, type_.dtype, type_.shape, sequence, domain)


# -- the analyzed graph


def analyzed(model: Model) -> Graph:
    """Return a copy of the graph with functions inlined, dimensions named and shapes inferred."""
    proto = model.to_proto()
    if proto.functions:
        proto = inliner.inline_local_functions(proto)
    _name_dimensions(proto)
    # onnx raises many kinds of errors; the declared shapes are used then
    with contextlib.suppress(Exception):
        proto = shape_inference.infer_shapes(proto, data_prop=True)
    return Model(proto, model.weights).graph


def _name_dimensions(proto: ModelProto) -> None:
    """Give each nameless dimension of an input a unique name."""
    for value in proto.graph.input:
        tensor = _innermost(value.type)[0].tensor_type
        for axis, dim in enumerate(tensor.shape.dim):
            known = dim.WhichOneof("value")
            if known == "dim_value" and dim.dim_value >= 0:
                continue
            if known != "dim_param" or is_nameless(dim.dim_param):
                dim.dim_param = f"{value.name}.{axis}"


def _innermost(kind: TypeProto) -> tuple[TypeProto, bool]:
    """Return the element type of an optional or a sequence, and whether there is a sequence."""
    if kind.WhichOneof("value") == "optional_type":
        kind = kind.optional_type.elem_type
    sequence = kind.WhichOneof("value") == "sequence_type"
    return (kind.sequence_type.elem_type if sequence else kind), sequence
