"""What a front end hands over: a Plan of Parts, and for each part a Draft to be proven.

A front end has a `name`, tells with `takes(source)` whether a source is one of its own, and makes
a `Plan`. A part is one graph to export. It may know several ways to get there: `attempt` is asked
for a draft, and asked again with the failures so far when the exporter raised `ExportFailed` or
the draft did not hold; None means that there is no other way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from toolkit.errors import ToolkitError
from toolkit.feeds.user_samples import Feed

if TYPE_CHECKING:
    from toolkit.frontends.request import Axes, Request
    from toolkit.verification.framework import Proof


class ExportFailed(ToolkitError):
    """An exporter could not write the graph; `exporter` is the one that failed.

    With `final` there is nothing else to try: the same would happen to every exporter. `dims` are
    the dynamic dimensions that it could not leave open.
    """

    def __init__(
        self, exporter: str, reason: str, *, final: bool = False, dims: Iterable[str] = ()
    ) -> None:
        super().__init__(reason)
        self.exporter = exporter
        self.final = final
        self.dims = frozenset(dims)


@dataclass(frozen=True, slots=True)
class Case:
    """One set of inputs to prove with.

    `sizes` are the dynamic dimensions in it, `label` says what is special about its values
    ("padded on the left", "zeros"), and is empty for usual ones. In a `tied` one many values are
    equal: outputs that are positions may come in any order, and are not compared.
    """

    feed: Feed
    sizes: Mapping[str, int] = field(default_factory=dict[str, int])
    label: str = ""
    tied: bool = False


@dataclass(frozen=True, slots=True)
class Failure:
    """A way that did not lead to a proven graph, and why; `proof` if there was a graph at all."""

    exporter: str
    reason: str
    proof: Proof | None = None
    dims: frozenset[str] = frozenset()
    """The dynamic dimensions that it depends on, where it is the sizes."""


@dataclass(frozen=True, slots=True)
class Draft:
    """An exported graph, not proven yet."""

    path: Path
    """The .onnx file, in the scratch folder; its external data lie beside it."""
    reference: Callable[[Feed], Mapping[str, Any]]
    """Runs the framework: outputs by the names that the graph gives them. It may raise anything for
    a feed that the model itself refuses."""
    cases: Sequence[Case]
    """Feeds at several sizes of every dynamic dimension; the model takes the first for sure."""
    exporter: str
    """What wrote it, in a word or two: "dynamo", "torchscript", "tf2onnx"."""
    dynamic: Axes = field(default_factory=dict[str, Mapping[int, str]])
    traced: Mapping[str, int] = field(default_factory=dict[str, int])
    """The sizes that the dynamic dimensions had when the graph was traced."""
    notes: tuple[str, ...] = ()


@runtime_checkable
class Part(Protocol):
    """One graph to export, and the ways to do so."""

    @property
    def name(self) -> str:
        """`model`; or what it is of several: `encoder`, `decoder`, `decoder_with_past`."""
        ...

    def attempt(self, failures: Sequence[Failure]) -> Draft | None:
        """The draft to try next, given what has failed; None when there is nothing left."""
        ...


@dataclass(frozen=True, slots=True)
class InOrder:
    """A part whose ways are known beforehand: the first that holds is taken."""

    name: str
    ways: Sequence[Callable[[], Draft]]

    def attempt(self, failures: Sequence[Failure]) -> Draft | None:
        return self.ways[len(failures)]() if len(failures) < len(self.ways) else None


@dataclass(frozen=True, slots=True)
class Plan:
    """All graphs of a model, the files that belong beside them, and what is to be said."""

    parts: Sequence[Part]
    companions: Mapping[str, Path] = field(default_factory=dict[str, Path])
    """Files to copy beside the model, by the name they get there: tokenizer, config."""
    notes: tuple[str, ...] = ()


class FrontEnd(Protocol):
    """What takes models of one framework; third parties register one under `toolkit.exporters`."""

    @property
    def name(self) -> str:
        """What `--framework` calls it."""
        ...

    def takes(self, source: object) -> bool:
        """Whether the source (an object, or a Path) is one of its own; imports nothing large."""
        ...

    def plan(self, source: Any, request: Request, scratch: Path) -> Plan:
        """How to export it; `scratch` is an empty folder that lives as long as the result."""
        ...
