"""Feeds that the model takes: drawn from the inputs' domains, tried, and kept when they run."""

from __future__ import annotations

import contextlib
import gc
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
from toolkit.feeds.domains import Choice, Domain, Occasion
from toolkit.feeds.infer_domain import infer_domain
from toolkit.feeds.user_samples import Feed
from toolkit.ir.graph import Graph
from toolkit.ir.model import Model
from toolkit.ir.tensor_type import Shape, from_proto, is_nameless
from toolkit.symbolic import Dim, Expr, evaluate, symbol

Run = Callable[[Feed], list[Any]]

_MOST_BYTES = 1 << 25
"""Inputs of one feed; larger sizes are not tried."""
_HEAVY_BYTES = 1 << 19
"""From here on (a photograph), two feeds of a dynamic model must do."""
_MOST_REFUSALS = 60
_OTHER_SIDE = 101
"""From one variation to another that pads on the other side."""
_LIKELY_RANKS = (2, 4, 3, 1, 0)
"""For inputs that declare no shape."""
_SEQUENCE_LENGTH = 3
_LARGE_GRAPH = 5000
"""Nodes from which on collecting the analysed graph saves more than it takes."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A feed that the model took, what it answered, and the sizes of the dynamic dimensions."""

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
    """Shapes for all inputs, the symbols in them, and the sizes that the weights dictate."""

    shapes: Mapping[str, Shape]
    roles: Mapping[str, Role]
    fixed: Sizes


class Search:
    """The search for feeds of one model.

    All questions about the graph are asked here at once: the analysed graph takes as much memory
    as the model's own, and is gone before a session is opened, which takes more.
    """

    def __init__(self, model: Model, seed: int) -> None:
        graph = analysed(model)
        self._seed = seed
        self._refusals = 0
        self.refusal = ""
        """Why the first feed that was tried was refused."""
        self._inputs = list(_inputs(graph))
        known = {i.name for i in self._inputs}
        strange = next((name for name in graph.feeds if name not in known), None)
        if strange is not None:
            self.refusal = f"input '{strange}' is neither a tensor nor a sequence of tensors"
        self._layouts: list[_Layout] = [] if strange else list(_layouts(graph, self._inputs))
        if len(graph) > _LARGE_GRAPH:
            # A model and its graph refer to each other: they go only when they are collected.
            del graph
            gc.collect()

    def find(self, run: Run, count: int | None) -> list[Trial]:
        """Up to `count` feeds that `run`, the model, does not raise RuntimeRefused for.

        By default three of a dynamic model, two of others.
        """
        for layout in self._layouts:
            first = self._first(run, layout)
            if first is not None:
                wanted = _usual_count(self._inputs, first) if count is None else count
                return self._more(run, first, wanted, layout)
        return []

    def _first(self, run: Run, layout: _Layout) -> Trial | None:
        roles, fixed = layout.roles, layout.fixed
        lively = ((sizes, False) for sizes in first_sizes(roles, fixed))
        calm = ((sizes, True) for sizes in islice(first_sizes(roles, fixed), 4))
        for sizes, is_calm in (*lively, *calm):
            trial = self._answered(run, layout, sizes, 0, is_calm)
            if trial is not None:
                return trial
        return None

    def _more(self, run: Run, first: Trial, count: int, layout: _Layout) -> list[Trial]:
        found = [first]
        for variation in range(1, count):
            used = [trial.sizes for trial in found]
            candidates = more_sizes(layout.roles, layout.fixed, first.sizes, variation)
            fresh = [sizes for sizes in _distinct(candidates) if sizes not in used]
            for sizes in [*fresh, first.sizes]:
                trial = self._answered(run, layout, sizes, variation, False)
                if trial is not None:
                    found.append(trial)
                    break
        return found

    def _answered(
        self, run: Run, layout: _Layout, sizes: Sizes, variation: int, calm: bool
    ) -> Trial | None:
        """A feed of these sizes; where the answer has NaNs, one to which it has none, if there is.

        Where the answer is NaN nothing is shown. A causal model may give it for what is padded on
        the left: no key is left there to attend to.
        """
        trial = self._attempt(run, layout, sizes, variation, calm)
        if trial is None or not _has_nan(trial):
            return trial
        other = self._attempt(run, layout, sizes, variation + _OTHER_SIDE, calm)
        return trial if other is None or _has_nan(other) else other

    def _attempt(
        self, run: Run, layout: _Layout, sizes: Sizes, variation: int, calm: bool
    ) -> Trial | None:
        if self._refusals >= _MOST_REFUSALS:
            return None
        random = np.random.default_rng((self._seed, variation))
        occasion = Occasion(random, sizes, variation, calm)
        feed: Feed = {}
        room = _MOST_BYTES
        for given in self._inputs:
            shape = tuple(evaluate(dim, sizes) for dim in layout.shapes[given.name])
            dtype: np.dtype[Any] = helper.tensor_dtype_to_np_dtype(given.dtype)
            room -= int(np.prod(shape)) * dtype.itemsize
            if room < 0 or any(size < 0 for size in shape):
                return None
            times = _SEQUENCE_LENGTH if given.sequence else 1
            drawn = [given.domain.draw(shape, dtype, occasion) for _ in range(times)]
            feed[given.name] = drawn if given.sequence else drawn[0]
        try:
            return Trial(feed, run(feed), sizes)
        except RuntimeRefused as refusal:
            self._refusals += 1
            self.refusal = self.refusal or str(refusal)
            return None


def _has_nan(trial: Trial) -> bool:
    single = [value for value in trial.outputs if not isinstance(value, (list, dict))]
    arrays = [np.asarray(value) for value in single]
    return any(array.dtype.kind == "f" and bool(np.isnan(array).any()) for array in arrays)


def _layouts(graph: Graph, inputs: Sequence[_Input]) -> Iterator[_Layout]:
    """The inputs' shapes; where some declare none, several ranks are tried for those."""
    unknown = [i.name for i in inputs if i.shape is None]
    for likely in _LIKELY_RANKS if unknown else (0,):
        shapes: dict[str, Shape] = {i.name: i.shape for i in inputs if i.shape is not None}
        for name in unknown:
            dictated, axes = sizes_from_weights(graph, name)
            least = max((-axis for axis in axes), default=0)
            rank = dictated if dictated is not None else max(likely, least)
            shapes[name] = tuple(symbol(f"{name}.{axis}") for axis in range(rank))
        yield _Layout(shapes, find_symbols(shapes, graph), _fixed(graph, shapes))


def _fixed(graph: Graph, shapes: Mapping[str, Shape]) -> Sizes:
    """The symbols whose size the weights dictate."""
    fixed: Sizes = {}
    for name, shape in shapes.items():
        for axis, size in sizes_from_weights(graph, name)[1].items():
            dim: Dim = shape[axis] if -len(shape) <= axis < len(shape) else 0
            if isinstance(dim, Expr) and len(dim.symbols) == 1 and not dim.anonymous:
                fixed.setdefault(next(iter(dim.symbols)), size)
    return fixed


def _usual_count(inputs: Sequence[_Input], first: Trial) -> int:
    """How many feeds show enough: every size and every choice, at a bounded cost."""
    if not inputs:
        return 1
    choices = [len(i.domain.values) for i in inputs if isinstance(i.domain, Choice)]
    heavy = sum(np.asarray(value).nbytes for value in first.feed.values()) > _HEAVY_BYTES
    return max(3 if first.sizes and not heavy else 2, min(max(choices, default=0), 4))


def _distinct(candidates: Iterable[Sizes]) -> list[Sizes]:
    return [dict(key) for key in dict.fromkeys(tuple(sizes.items()) for sizes in candidates)]


def _inputs(graph: Graph) -> Iterator[_Input]:
    """The inputs that can be drawn: tensors, sequences of tensors, optionals of either."""
    for value in graph.interface_inputs(feeds_only=True):
        kind = value.type
        if kind.WhichOneof("value") == "optional_type":
            kind = kind.optional_type.elem_type
        sequence = kind.WhichOneof("value") == "sequence_type"
        if sequence:
            kind = kind.sequence_type.elem_type
        type_ = from_proto(kind)
        if type_ is not None:
            domain = infer_domain(graph, value.name)
            yield _Input(value.name, type_.dtype, type_.shape, sequence, domain)


# -- the graph that questions about an input are asked of


def analysed(model: Model) -> Graph:
    """The model's graph with functions inlined, every dimension named and shapes inferred."""
    proto = model.to_proto()
    if proto.functions:
        proto = inliner.inline_local_functions(proto)
    _name_dimensions(proto)
    # onnx raises many kinds of errors; what the model declares must do then.
    with contextlib.suppress(Exception):
        proto = shape_inference.infer_shapes(proto, data_prop=True)
    return Model(proto, model.weights).graph


def _name_dimensions(proto: ModelProto) -> None:
    """Give every nameless dimension of an input a name of its own."""
    for value in proto.graph.input:
        tensor = _innermost(value.type).tensor_type
        for axis, dim in enumerate(tensor.shape.dim):
            known = dim.WhichOneof("value")
            if known == "dim_value" and dim.dim_value >= 0:
                continue
            if known != "dim_param" or is_nameless(dim.dim_param):
                dim.dim_param = f"{value.name}.{axis}"


def _innermost(kind: TypeProto) -> TypeProto:
    while kind.WhichOneof("value") in ("optional_type", "sequence_type"):
        optional = kind.WhichOneof("value") == "optional_type"
        kind = kind.optional_type.elem_type if optional else kind.sequence_type.elem_type
    return kind
