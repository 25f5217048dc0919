"""The collector: run the float model on every feed and update the statistics of its tensors.

Observed tensors become additional outputs of a copy of the model. All outputs of a run are in
memory at once. The tensors are therefore split into sweeps over the data, each within a budget of
bytes, as measured on the first feed. Memory does not grow with the number of feeds.

Values in subgraphs of If, Loop and Scan are observed at each execution of the subgraph (see
`toolkit.calibrate.subgraph_values`). The values of all iterations of a loop are in memory at once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
from onnx import TensorProto, ValueInfoProto, helper

from toolkit.calibrate.cache import Store, calibration_digest
from toolkit.calibrate.observers import Observer
from toolkit.calibrate.statistics import Array, Mismatch, NotFinite, Range, Statistic
from toolkit.calibrate.subgraph_values import inner_values, surface
from toolkit.errors import RuntimeRefused, UsageError
from toolkit.feeds import Feed
from toolkit.ir import node as nd
from toolkit.ir.model import Model
from toolkit.ir.tensor_type import FLOATS, TensorType
from toolkit.symbolic import unknown

if TYPE_CHECKING:
    from toolkit.runtime.session import Session

BUDGET = 1 << 28
"""The default size of the tensors observed in one run, in bytes."""

_DEFAULT_ITEM_SIZE = 4
"""Bytes per element of a tensor of unknown type; most are float32."""

_UNSIZED = 64
"""The number of tensors per sweep if sizes cannot be measured because some values are sequences."""

_UNEVEN = "changes its shape between iterations of a Scan: it cannot be calibrated"

PAUSE_SECONDS = 20.0
"""The interval at which a sweep is saved: the most that an interruption loses."""

Progress = Callable[[int, "int | None", str], None]
"""Called after each feed with (done, total, description); the total may be unknown at first."""


_Outputs = tuple[Feed, Mapping[str, Any]]
"""A feed, and the outputs that the recorder needs."""


class Feeds(Protocol):
    """Feeds that can be read repeatedly, such as a `toolkit.calibrate.readers.Reader`."""

    def __iter__(self) -> Iterator[Feed]: ...

    def count(self) -> int | None: ...

    def digest(self) -> str: ...


class Recorder(Protocol):
    """A consumer of the model's own outputs, which a sweep computes too."""

    @property
    def awaited(self) -> Sequence[str]:
        """The outputs it needs; empty if none."""
        ...

    def record(self, runs: Iterable[_Outputs]) -> None:
        """Take every feed with these outputs."""
        ...


@dataclass(frozen=True, slots=True)
class Calibration:
    """The statistics of observed tensors, and the ranges selected from them."""

    observers: Mapping[str, Observer]
    statistics: Mapping[str, Statistic]
    failed: Mapping[str, str]
    """Why tensors have no range: NaN, infinity, or a varying number of channels."""
    sweeps: int
    """The number of passes over the data; 0 if all statistics were cached."""
    unseen: frozenset[str] = frozenset()
    """Values of subgraphs that no feed has executed."""

    def range(self, tensor: str) -> Range:
        """Return the range of a tensor; raises NotFinite, with its name, if it has none."""
        if tensor in self.failed:
            raise NotFinite(self.failed[tensor])
        return self.observers[tensor].range(self.statistics[tensor])

    def ranges(self) -> dict[str, Range]:
        """Return the ranges of all tensors that have one."""
        return {tensor: self.range(tensor) for tensor in self.statistics}

    def merge(self, other: Calibration) -> Calibration:
        """Combine with the calibration on a following shard of the data.

        Shards may be calibrated on different machines: the result is that of the whole data.
        """
        if self.observers != other.observers:
            raise UsageError("calibrations with different observers cannot be merged")
        failed = {**other.failed, **self.failed}
        statistics: dict[str, Statistic] = {}
        for name, observer in self.observers.items():
            shards = [part.statistics[name] for part in (self, other) if name in part.statistics]
            if shards and name not in failed:
                statistics[name] = observer.start(name)
                for shard in shards:
                    statistics[name].merge(shard)
        sweeps, unseen = max(self.sweeps, other.sweeps), self.unseen & other.unseen
        return Calibration(self.observers, statistics, failed, sweeps, unseen)


def observable(model: Model) -> list[str]:
    """Return the observable values: inputs, results of nodes, and floats in subgraphs."""
    graph = model.graph
    results = (name for node in graph.nodes for name in node.output if name)
    inner = (name for name, graph in inner_values(model).items() if graph.dtype(name) in FLOATS)
    return list(dict.fromkeys((*graph.feeds, *results, *inner)))


def collect(
    model: Model,
    feeds: Feeds,
    observers: Mapping[str, Observer],
    *,
    budget: int = BUDGET,
    cache: Path | None = None,
    progress: Progress | None = None,
    custom_ops: Sequence[str] = (),
    recorder: Recorder | None = None,
) -> Calibration:
    """Observe the tensors named by `observers` on every feed; `recorder` takes the outputs.

    With a `cache` folder, statistics are saved there after each sweep, in a file named by a digest
    of the model and the data. Cached statistics are not collected again: in another run, by another
    observer of the same statistic, or after an interruption. A long sweep is saved at intervals and
    resumed.
    """
    inner = inner_values(model)
    known = {*observable(model), *inner}
    unknown = next((name for name in observers if name not in known), None)
    if unknown is not None:
        raise UsageError(f"'{unknown}' cannot be observed: it has no producer, or several")
    store = Store(cache, calibration_digest(model, feeds.digest())) if cache else Store()
    statistics = {name: observer.start(name) for name, observer in observers.items()}
    left = [name for name, statistic in statistics.items() if not store.load(statistic)]
    sweeps = sweeps_of(model, feeds, left, budget, custom_ops)
    for name in set(left).difference(*sweeps):
        statistics[name].failure = f"tensor '{name}' {_UNEVEN}"
    count = feeds.count()

    def reported(runs: Iterable[_Outputs], number: int) -> Iterator[_Outputs]:
        nonlocal count
        done = 0
        for done, run in enumerate(runs, 1):
            if progress is not None:
                total = count * len(sweeps) if count is not None else None
                what = f"calibrating, sweep {number + 1} of {len(sweeps)}"
                progress(number * (count or 0) + done, total, what)
            yield run
        count = done  # known from the first sweep on

    for number, names in enumerate(sweeps):
        chosen = {name: statistics[name] for name in names}
        resumed = store.resume(chosen.values())
        awaited = recorder.awaited if recorder is not None and not resumed else ()
        run = Run(model, list(dict.fromkeys((*names, *awaited))), custom_ops)
        runs = reported(_sweep(run, feeds, chosen, awaited, store, resumed), number)
        if recorder is not None and awaited:
            recorder.record(runs)
        deque(runs, maxlen=0)
        store.keep(chosen.values())
    failed = {name: found.failure for name, found in statistics.items() if found.failure}
    unseen = {n for n, found in statistics.items() if n in inner and not found.seen} - failed.keys()
    observed = {n: f for n, f in statistics.items() if n not in failed and n not in unseen}
    return Calibration(dict(observers), observed, failed, len(sweeps), frozenset(unseen))


def _sweep(
    run: Run,
    feeds: Iterable[Feed],
    statistics: Mapping[str, Statistic],
    awaited: Container[str],
    store: Store,
    resumed: int,
) -> Iterator[_Outputs]:
    """Update statistics with every feed from `resumed` on; yield the feeds with their outputs."""
    written = time.monotonic()
    for index, feed in enumerate(feeds):
        outputs: dict[str, Any] = {}
        if index >= resumed:
            if time.monotonic() - written > PAUSE_SECONDS:
                store.pause(statistics.values(), index)
                written = time.monotonic()
            for name, value in run(feed, index):
                if name in awaited:
                    outputs[name] = value
                if name in statistics:
                    _update(statistics[name], value)
        yield feed, outputs


def _update(statistic: Statistic, value: Any) -> None:
    if not statistic.failure and not isinstance(value, (list, dict)):  # sequences and maps
        try:
            for piece in pieces_of(value):
                statistic.update(piece)
        except (NotFinite, Mismatch) as error:
            statistic.failure = str(error)


class Run:
    """A model with additional outputs; inputs are taken from the feed.

    A value of a subgraph is a tuple of its values at each execution.
    """

    def __init__(self, model: Model, names: Sequence[str], custom_ops: Sequence[str]) -> None:
        inputs = set(model.graph.inputs)
        inner = inner_values(model)
        self._fed = [name for name in names if name in inputs]
        self._made = [name for name in names if name not in inputs and name not in inner]
        hidden = {name: inner[name] for name in names if name in inner}
        copy = model.copy()
        graphs = inner_values(copy) if hidden else {}
        self._inner = {
            name: surface(graphs[name], name, g.dtype(name), g.rank(name))
            for name, g in hidden.items()
        }
        self._wanted = [*self._made, *(found.name for found in self._inner.values())]
        self._session = _session(copy, self._wanted, custom_ops) if self._wanted else None

    def __call__(self, feed: Feed, index: int) -> Iterator[tuple[str, Any]]:
        yield from ((name, feed[name]) for name in self._fed if name in feed)
        if self._session is None:
            return
        try:
            outputs = self._session.run(feed, self._wanted)
        except RuntimeRefused as refusal:
            raise UsageError(f"the model fails on calibration feed {index}: {refusal}") from refusal
        outputs.reverse()
        for name in self._made:
            yield name, outputs.pop()  # frees each one after use
        for name, found in self._inner.items():
            yield name, found.pieces(outputs.pop())


def pieces_of(value: Any) -> list[Array]:
    """Return the values that a Run yields for a tensor: one, or one per execution."""
    found = cast("tuple[Any, ...]", value) if isinstance(value, tuple) else (value,)
    return [np.asarray(piece) for piece in found]


def _session(copy: Model, names: Sequence[str], custom_ops: Sequence[str]) -> Session:
    from toolkit.runtime.session import Session

    # Only these: a session keeps all outputs in memory until the end of the run.
    declared = {value.name: value for value in copy.graph.interface_outputs()}
    # The runtime infers the type of an output that declares none.
    outputs = [declared.get(name) or ValueInfoProto(name=name) for name in names]
    copy.graph.set_interface(outputs=outputs)
    return Session(copy, custom_ops=custom_ops)


def sweeps_of(
    model: Model, feeds: Iterable[Feed], names: Sequence[str], budget: int, ops: Sequence[str]
) -> list[list[str]]:
    """Split tensors into sweeps whose size on the first feed fits the budget.

    Values of a Scan whose shape differs between iterations are left out.
    """
    if not names:
        return []
    first = next(iter(feeds))
    inner = inner_values(model)
    outer = [name for name in names if name not in inner]
    try:
        sizes = _sizes(model, first, outer, ops)
    except RuntimeRefused:  # a value is a sequence or a map
        sizes = dict.fromkeys(outer, budget // _UNSIZED)
    sizes |= _sizes(model, first, [name for name in names if name in inner], ops)
    sweeps: list[list[str]] = [[]]
    room = budget
    for name in filter(sizes.__contains__, names):
        if sizes[name] > room and sweeps[-1]:
            sweeps.append([])
            room = budget
        sweeps[-1].append(name)
        room -= sizes[name]
    return [names for names in sweeps if names]


def _sizes(model: Model, feed: Feed, names: Sequence[str], ops: Sequence[str]) -> dict[str, int]:
    """Return the sizes in bytes on one feed, except of tensors that a Scan cannot stack."""
    copy = model.copy()
    inner = inner_values(copy)
    shapes: dict[str, str] = {}
    for name in names:
        graph = inner.get(name, copy.graph)
        shape = graph.op("Shape", name)
        graph.set_type(shape, TensorType(TensorProto.INT64, (unknown(),)))
        shapes[shape] = name
    sizes: dict[str, int] = {}
    for shape, found in Run(copy, list(shapes), ops)(feed, 0):
        name, executions = shapes[shape], pieces_of(found)
        graph = inner.get(name, copy.graph)
        if not nd.is_op(graph.owner, "Scan") or len({tuple(each) for each in executions}) < 2:
            dtype = graph.dtype(name)
            size = helper.tensor_dtype_to_np_dtype(dtype).itemsize if dtype else _DEFAULT_ITEM_SIZE
            sizes[name] = size * sum(int(np.prod(each)) for each in executions)
    return sizes
