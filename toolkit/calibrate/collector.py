"""The collector: runs the float model on every feed and hands what tensors hold to statistics.

Tensors to observe become extra outputs of a copy of the model. All that are outputs at once stay in
memory during a run, so they are taken in sweeps over the data, as many tensors in each as fit into
a budget of bytes. How large they are is measured on the first feed; a larger feed takes more in
proportion. Memory does not grow with the number of feeds.

Values of the bodies of If, Loop and Scan are observed each time that the body runs (see `bodies`).
Those of all steps of a loop are in memory at once, and count so. Of one whose body runs on no feed
nothing is known.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from toolkit.ir.graph import Graph
from toolkit.ir.model import Model
from toolkit.ir.tensor_type import FLOATS

if TYPE_CHECKING:
    from toolkit.runtime.session import Session

BUDGET = 1 << 28
"""Bytes of observed tensors in one run, by default."""

_UNKNOWN_ITEM = 4
"""Bytes of an element whose type nobody knows: what is observed are floats."""

_UNEVEN = "changes its shape from step to step of a Scan: it has no range to calibrate"

PAUSE_SECONDS = 20.0
"""How often a sweep is written down: what an interruption may lose."""

Progress = Callable[[int, "int | None", str], None]
"""Told after each feed: (done, total, what); the total is None while nobody knows it."""


class Feeds(Protocol):
    """Feeds that can be read again; `toolkit.calibrate.readers.Reader` is one."""

    def __iter__(self) -> Iterator[Feed]: ...

    def count(self) -> int | None: ...

    def digest(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was observed."""

    observers: Mapping[str, Observer]
    statistics: Mapping[str, Statistic]
    failed: Mapping[str, str]
    """Tensors without a range, and why: they hold NaN or infinity, or change their channels."""
    sweeps: int
    """How many times the data were read for it; 0 when all of it was known."""
    unseen: frozenset[str] = frozenset()
    """Values of bodies that no feed has run: there is nothing to tell of them."""

    def range(self, tensor: str) -> Range:
        """The range of a tensor; raises NotFinite, with its name, when it has none."""
        if tensor in self.failed:
            raise NotFinite(self.failed[tensor])
        return self.observers[tensor].range(self.statistics[tensor])

    def ranges(self) -> dict[str, Range]:
        """The ranges of all tensors that have one."""
        return {tensor: self.range(tensor) for tensor in self.statistics}


def observable(model: Model) -> list[str]:
    """The values that may be observed: inputs and whatever a node makes; of bodies, floats."""
    graph = model.graph
    made = (name for node in graph.nodes for name in node.output if name)
    inner = (name for name, body in inner_values(model).items() if body.dtype(name) in FLOATS)
    return list(dict.fromkeys((*graph.feeds, *made, *inner)))


def collect(
    model: Model,
    feeds: Feeds,
    observers: Mapping[str, Observer],
    *,
    budget: int = BUDGET,
    cache: Path | None = None,
    progress: Progress | None = None,
    custom_ops: Sequence[str] = (),
) -> Calibration:
    """Observe the tensors that `observers` names, on every feed.

    With a `cache` folder, statistics are kept in a file there, named by a digest of model and data.
    It is written after each sweep, whole or not at all: what it holds is not collected again, be it
    in another run, with another observer that reads the same statistic, or after an interruption.
    A long sweep is written down as it goes, and taken up again where it was.
    """
    inner = inner_values(model)
    known = {*observable(model), *inner}
    strange = next((name for name in observers if name not in known), None)
    if strange is not None:
        raise UsageError(f"'{strange}' cannot be observed: no node makes it, or several do")
    store = Store(cache, calibration_digest(model, feeds.digest())) if cache else Store()
    statistics: dict[str, Statistic] = {}
    failed: dict[str, str] = {}
    left: dict[str, Statistic] = {}
    for name, observer in observers.items():
        statistic = observer.start(name)
        failure = store.failure(statistic)
        if failure:
            failed[name] = failure
        else:
            (statistics if store.load(statistic) else left)[name] = statistic
    sweeps = sweeps_of(model, feeds, list(left), budget, custom_ops)
    taken = {name for names in sweeps for name in names}
    failed |= {name: f"tensor '{name}' {_UNEVEN}" for name in left if name not in taken}
    tell = _Teller(progress, len(sweeps), feeds.count())
    for names in sweeps:
        chosen = {name: left[name] for name in names}
        failures = _sweep(Run(model, names, custom_ops), feeds, chosen, tell, store)
        failed |= failures
        statistics |= {name: chosen[name] for name in names if name not in failures}
        kept = [chosen[name] for name in names if name not in failures]
        store.keep(kept, [(chosen[name], why) for name, why in failures.items()])
    unseen = frozenset(n for n, found in statistics.items() if n in inner and not found.seen)
    ordered = {n: statistics[n] for n in observers if n in statistics and n not in unseen}
    return Calibration(dict(observers), ordered, failed, len(sweeps), unseen)


def _sweep(
    run: Run,
    feeds: Iterable[Feed],
    statistics: Mapping[str, Statistic],
    tell: _Teller,
    store: Store,
) -> dict[str, str]:
    """Count every feed; returns the tensors that cannot be counted, and why."""
    done, failed = store.resume(statistics)
    written = time.monotonic()
    for index, feed in enumerate(feeds):
        if index < done:
            tell.one_more()
            continue
        if time.monotonic() - written > PAUSE_SECONDS:
            store.pause(statistics, failed, index)
            written = time.monotonic()
        for name, values in run(feed, index):
            if name in failed or isinstance(values, (list, dict)):
                continue  # sequences and maps have no range
            try:
                for piece in pieces_of(values):
                    statistics[name].update(piece)
            except (NotFinite, Mismatch) as error:
                failed[name] = str(error)
        tell.one_more()
    tell.end_of_sweep()
    return failed


class Run:
    """The model with some of its values as outputs; inputs are read from the feed itself.

    What is in a body comes as a tuple: what it was each time.
    """

    def __init__(self, model: Model, names: Sequence[str], custom_ops: Sequence[str]) -> None:
        inputs = set(model.graph.inputs)
        inner = inner_values(model)
        self._fed = [name for name in names if name in inputs]
        self._made = [name for name in names if name not in inputs and name not in inner]
        hidden = {name: inner[name] for name in names if name in inner}
        copy = model.copy()
        places = inner_values(copy) if hidden else {}
        self._inner = {
            name: surface(places[name], name, g.dtype(name), g.rank(name))
            for name, g in hidden.items()
        }
        self._wanted = [*self._made, *(found.name for found in self._inner.values())]
        self._session = _session(copy, self._wanted, custom_ops) if self._wanted else None

    def __call__(self, feed: Feed, index: int) -> Iterator[tuple[str, Any]]:
        yield from ((name, feed[name]) for name in self._fed if name in feed)
        if self._session is None:
            return
        outputs = _fetched(self._session, feed, self._wanted, index)
        outputs.reverse()
        for name in self._made:
            yield name, outputs.pop()  # each is freed when it was counted
        for name, found in self._inner.items():
            yield name, found.pieces(outputs.pop())


def _fetched(session: Session, feed: Feed, names: Sequence[str], index: int) -> list[Any]:
    try:
        return session.run(feed, names)
    except RuntimeRefused as refusal:
        raise UsageError(f"the model refuses calibration feed {index}: {refusal}") from refusal


def pieces_of(value: Any) -> list[Array]:
    """A tensor that a Run gives; of one in a body what it was each time."""
    found = cast("tuple[Any, ...]", value) if isinstance(value, tuple) else (value,)
    return [np.asarray(piece) for piece in found]


def _session(copy: Model, names: Sequence[str], custom_ops: Sequence[str]) -> Session:
    from toolkit.runtime.session import Session

    # Only these: outputs that nobody fetches would be kept until the end of the run as well.
    declared = {value.name: value for value in copy.graph.interface_outputs()}
    # The runtime infers the type of an output that declares none.
    outputs = [declared.get(name) or ValueInfoProto(name=name) for name in names]
    copy.graph.set_interface(outputs=outputs)
    return Session(copy, custom_ops=custom_ops)


def sweeps_of(
    model: Model, feeds: Iterable[Feed], names: Sequence[str], budget: int, ops: Sequence[str]
) -> list[list[str]]:
    """The tensors of each sweep, such that those of the first feed fit into the budget.

    What a Scan makes in another shape at each step is in none.
    """
    if not names:
        return []
    first = next(iter(feeds))
    inner = inner_values(model)
    outer = [name for name in names if name not in inner]
    try:
        sizes = _sizes(model, first, outer, ops)
    except RuntimeRefused:  # of a value that is no tensor
        sizes = _probed_sizes(model, first, outer, budget, ops)
    sizes |= _inner_sizes(model, first, {n: inner[n] for n in names if n in inner}, ops)
    sweeps: list[list[str]] = [[]]
    room = budget
    for name in names:
        if name in inner and name not in sizes:
            continue
        size = sizes.get(name, 0)
        if size > room and sweeps[-1]:
            sweeps.append([])
            room = budget
        sweeps[-1].append(name)
        room -= size
    return [names for names in sweeps if names]


def _sizes(model: Model, feed: Feed, names: Sequence[str], ops: Sequence[str]) -> dict[str, int]:
    """The bytes of tensors on a feed, by one run that counts their elements."""
    if not names:
        return {}
    copy = model.copy()
    counts = [copy.graph.op("Size", name) for name in names]
    elements = _session(copy, counts, ops).run(feed, counts)
    return {n: int(e) * _itemsize(model.graph, n) for n, e in zip(names, elements, strict=True)}


def _inner_sizes(
    model: Model, feed: Feed, names: Mapping[str, Graph], ops: Sequence[str]
) -> dict[str, int]:
    """The bytes of values of bodies, of all steps; without those that a Scan cannot stack."""
    if not names:
        return {}
    copy = model.copy()
    places = inner_values(copy)
    shapes = {n: surface(places[n], places[n].op("Shape", n), TensorProto.INT64, 1) for n in names}
    wanted = [found.name for found in shapes.values()]
    sizes: dict[str, int] = {}
    found = _fetched(_session(copy, wanted, ops), feed, wanted, 0)
    for (name, surfaced), sequence in zip(shapes.items(), found, strict=True):
        seen = surfaced.pieces(sequence)
        if not surfaced.stacked or len({tuple(shape) for shape in seen}) < 2:
            elements = sum(int(np.prod(shape)) for shape in seen)
            sizes[name] = elements * _itemsize(names[name], name)
    return sizes


def _itemsize(graph: Graph, name: str) -> int:
    dtype = graph.dtype(name)
    return helper.tensor_dtype_to_np_dtype(dtype).itemsize if dtype else _UNKNOWN_ITEM


def _probed_sizes(
    model: Model, feed: Feed, names: Sequence[str], budget: int, ops: Sequence[str]
) -> dict[str, int]:
    """The bytes of values on a feed: of one, then of twice as many as long as there is room."""
    sizes: dict[str, int] = {}
    at, step = 0, 1
    while at < len(names):
        probed = names[at : at + step]
        sizes |= {n: np.asarray(v).nbytes for n, v in Run(model, probed, ops)(feed, 0)}
        at += step
        largest = max(sizes.values(), default=1)
        step = max(1, min(2 * step, budget // (2 * max(largest, 1))))
    return sizes


class _Teller:
    """Tells the progress over all sweeps; the first one finds out how many feeds there are."""

    def __init__(self, progress: Progress | None, sweeps: int, count: int | None) -> None:
        self._progress, self._sweeps, self._count = progress, sweeps, count
        self._done = self._sweep = self._in_sweep = 0

    def one_more(self) -> None:
        self._done += 1
        self._in_sweep += 1
        if self._progress is not None:
            total = self._count * self._sweeps if self._count is not None else None
            what = f"calibrating, sweep {self._sweep + 1} of {self._sweeps}"
            self._progress(self._done, total, what)

    def end_of_sweep(self) -> None:
        self._count, self._in_sweep = self._in_sweep, 0
        self._sweep += 1
