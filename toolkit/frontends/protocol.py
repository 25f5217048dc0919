"""The front-end protocol: the types a framework's front end implements and returns.

To add a front end (say, JAX), write one module with a class that has

    name                            the value of `--framework`
    takes(source)                   whether the source belongs to this framework
    plan(source, request, scratch)  an ExportPlan: one GraphPlan per ONNX graph

and register an instance: in `select.BUILT_IN`, or, from another distribution, under the entry point
`toolkit.exporters`. `GraphPlan.attempt` returns a Draft, which is verified against the framework.
It is called again with all failures so far when the exporter raised `ExportFailed` or the draft did
not match the framework; None means that there is nothing left to try. See `generic.py` for the
smallest example.
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
    """An exporter could not write the graph.

    `final`: every other exporter would fail in the same way, so none is tried. `dims`: the dynamic
    dimensions that the exporter could not keep dynamic.
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
    """One test input of a proof.

    `label` describes unusual values ("padded on the left", "zeros"). In a `tied` case many values
    are equal, so that integer outputs (positions, as of argmax) are ambiguous and not compared.
    """

    feed: Feed
    sizes: Mapping[str, int] = field(default_factory=dict[str, int])
    """Sizes of the dynamic dimensions."""
    label: str = ""
    tied: bool = False


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed attempt and its reason; `proof` is set if the exporter wrote a graph at all."""

    exporter: str
    reason: str
    proof: Proof | None = None
    dims: frozenset[str] = frozenset()
    """The dynamic dimensions whose size decides between success and failure, if any."""


@dataclass(frozen=True, slots=True)
class Draft:
    """An exported graph that has not been verified yet."""

    path: Path
    """The .onnx file, in the scratch folder, with its external data beside it."""
    reference: Callable[[Feed], Mapping[str, Any]]
    """Runs the framework and returns outputs by graph output name. May raise any exception for a
    feed that the model does not support."""
    cases: Sequence[Case]
    """Test inputs at several sizes of every dynamic dimension; the model must support the first."""
    exporter: str
    """A short name of the exporter: "dynamo", "torchscript", "tf2onnx"."""
    dynamic: Axes = field(default_factory=dict[str, Mapping[int, str]])
    traced: Mapping[str, int] = field(default_factory=dict[str, int])
    """Sizes of the dynamic dimensions at trace time."""
    notes: tuple[str, ...] = ()


@runtime_checkable
class GraphPlan(Protocol):
    """One graph to export, with the attempts to make."""

    @property
    def name(self) -> str:
        """`model`; or, of several graphs, `encoder`, `decoder`, `decoder_with_past`."""
        ...

    def attempt(self, failures: Sequence[Failure]) -> Draft | None:
        """Export once more, given the failures so far; None when nothing is left to try."""
        ...


@dataclass(frozen=True, slots=True)
class AttemptList:
    """A GraphPlan with a fixed list of attempts; the first verified draft wins."""

    name: str
    attempts: Sequence[Callable[[], Draft]]

    def attempt(self, failures: Sequence[Failure]) -> Draft | None:
        return self.attempts[len(failures)]() if len(failures) < len(self.attempts) else None


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """All graphs of a model, its companion files, and notes for the report."""

    graphs: Sequence[GraphPlan]
    companions: Mapping[str, Path] = field(default_factory=dict[str, Path])
    """Files to copy beside the model (tokenizer, config), by their name there."""
    notes: tuple[str, ...] = ()


class FrontEnd(Protocol):
    """Exports the models of one framework."""

    @property
    def name(self) -> str:
        """The value of `--framework`."""
        ...

    def takes(self, source: object) -> bool:
        """Return whether the source (an object or a Path) belongs to this framework.

        Must not import the framework.
        """
        ...

    def plan(self, source: Any, request: Request, scratch: Path) -> ExportPlan:
        """Plan the export; `scratch` is an empty folder that lives as long as the result."""
        ...
