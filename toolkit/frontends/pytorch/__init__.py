# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
"""PyTorch: modules with an example, ExportedProgram and TorchScript files, weights with a factory.

dynamo writes the graph first, TorchScript where dynamo cannot. Without a word about dynamic axes,
those that the model itself takes are tried; one that does not hold in the graph is fixed again.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolkit.errors import UsageError
from toolkit.extras import install
from toolkit.feeds.user_samples import Feed
from toolkit.frontends.generic import follow
from toolkit.frontends.protocol import Draft, ExportPlan, Failure
from toolkit.frontends.pytorch import exporters, sources
from toolkit.frontends.pytorch.axes import find_axes
from toolkit.frontends.pytorch.call_signature import ModuleCall, bind, training_notes
from toolkit.frontends.pytorch.custom_ops import CustomOp, Translations, translations_of
from toolkit.frontends.pytorch.exporters import DYNAMO, TORCHSCRIPT
from toolkit.frontends.request import Axes, Request, resolve_axes
from toolkit.frontends.test_inputs import cases_from, resized, sizes_in

__all__ = ["FRONT_END", "CustomOp", "PyTorchFrontEnd"]


class PyTorchFrontEnd:
    """The front end of torch."""

    name = "pytorch"
    supports = ("exporter", "weights", "translations")

    def takes(self, source: object) -> bool:
        if isinstance(source, Path):
            return source.is_file() and source.suffix in sources.SUFFIXES
        torch: Any = sys.modules.get("torch")  # without it, nothing can be one of its objects
        if torch is None or not hasattr(torch, "nn"):
            return False
        export: Any = sys.modules.get("torch.export")
        kinds = (torch.nn.Module, *((export.ExportedProgram,) if export else ()))
        return isinstance(source, kinds)

    def plan(self, source: Any, request: Request, scratch: Path) -> ExportPlan:
        torch = require_torch()
        if isinstance(source, Path):
            source = sources.load_source(source)
        translations = translations_of(request.translations)
        if isinstance(source, torch.export.ExportedProgram):
            if request.weights is not None:
                raise UsageError("an ExportedProgram has its weights: --weights is for factories")
            from toolkit.frontends.pytorch.program import plan_program

            return plan_program(source, request, scratch, translations)
        if request.weights is not None:
            sources.load_weights(source, request.weights)
        notes = training_notes(source)
        call = bind(source, request)
        exporters = _exporters(source, request)
        feed = call.feed()
        if request.dynamic is not None:
            ranks = {name: value.ndim for name, value in feed.items()}
            axes: Axes = resolve_axes(request.dynamic, ranks, call.outputs)
            found: list[str] = []
        else:
            request.progress("finding the sizes that may change")
            axes, found = find_axes(call, feed)
        part = ModuleGraphPlan(call, request, scratch, exporters, axes, translations)
        return ExportPlan([part], notes=(*notes, *found))


FRONT_END = PyTorchFrontEnd()


def require_torch() -> Any:
    """torch, with its parts for exporting; UsageError says what to install without it."""
    try:
        torch = importlib.import_module("torch")
        importlib.import_module("torch.export")
        importlib.import_module("torch.onnx")
        importlib.import_module("onnxscript")
    except ImportError as error:
        raise UsageError(
            f"{error.name} is needed to export from PyTorch: {install('export')}"
        ) from error
    return torch


def _exporters(module: Any, request: Request) -> tuple[str, ...]:
    torch = importlib.import_module("torch")
    if isinstance(module, torch.jit.ScriptModule):
        if request.exporter == "dynamo":
            raise UsageError("dynamo does not take TorchScript: use --exporter torchscript")
        return (TORCHSCRIPT,)
    return (DYNAMO, TORCHSCRIPT) if request.exporter == "auto" else (request.exporter,)


@dataclass(slots=True)
class ModuleGraphPlan:
    """One module as a graph: dynamo, then TorchScript; then again with fewer axes open.

    Axes that the user asked for are never given up.
    """

    call: ModuleCall
    request: Request
    scratch: Path
    exporters: Sequence[str]
    axes: Axes
    translations: Translations
    name: str = "model"
    _level: int = 0
    _seen: int = 0
    _hopeless: set[str] = field(default_factory=set[str])
    """Exporters that failed for other reasons than a size."""
    _queue: list[str] = field(default_factory=list[str])
    _notes: list[str] = field(default_factory=list[str])

    def attempt(self, failures: Sequence[Failure]) -> Draft | None:
        if not failures and not self._queue:
            self._queue = list(self.exporters)
        if failures and not failures[-1].dims:
            self._hopeless.add(failures[-1].exporter)
        if not self._queue and not self._give_up_some(failures):
            return None
        exporter = self._queue.pop(0)
        self.request.progress(f"{self.name}: exporting with {exporter}")
        return self._draft(exporter)

    def _give_up_some(self, failures: Sequence[Failure]) -> bool:
        """Fix the dimensions that did not hold, and start over; False when that leads nowhere."""
        blamed = frozenset[str]().union(*(f.dims for f in failures[self._seen :]))
        self._seen = len(failures)
        left = [exporter for exporter in self.exporters if exporter not in self._hopeless]
        if self.request.dynamic is not None or not blamed or not left:
            return False
        for dim in sorted(blamed):
            self._notes.append(f"dimension '{dim}' is fixed at the example's size: it did not hold")
        self.axes = {
            name: kept
            for name, dims in self.axes.items()
            if (kept := {axis: dim for axis, dim in dims.items() if dim not in blamed})
        }
        self._queue = left
        self._level += 1
        return True

    def _draft(self, exporter: str) -> Draft:
        feed = self.call.feed()
        traced = traced_sizes(feed, self.axes)
        path = self.scratch / f"{self.name}-{exporter}-{self._level}.onnx"
        write(exporter, self.call, traced, self.axes, self.request, path, self.translations)
        return Draft(
            path=path,
            reference=self.call,
            cases=cases_from(feed, self.axes, self.request.seed),
            exporter=exporter,
            dynamic=self.axes,
            traced=sizes_in(traced, self.axes),
            notes=tuple(self._notes),
        )


def traced_sizes(feed: Feed, axes: Axes) -> Feed:
    """The example at sizes to trace with: open ones are 2 at least, and no two the same.

    torch takes a size of 1 for fixed, and two equal sizes may seem to be one dimension.
    """
    sizes: dict[str, int] = {}
    for dim, size in sizes_in(feed, axes).items():
        wanted = max(size, 2)
        while wanted in sizes.values():
            wanted += 1
        sizes[dim] = wanted
    return resized(feed, axes, sizes)


def write(
    exporter: str,
    call: ModuleCall,
    feed: Feed,
    axes: Axes,
    request: Request,
    path: Path,
    translations: Translations,
) -> None:
    """Write a call's graph with one of the exporters."""
    if exporter == DYNAMO:
        exporters.write_dynamo(call, feed, axes, request.opset, path, translations)
        return
    output_axes = follow(call, feed, axes)
    opset = request.opset
    exporters.write_torchscript(call, feed, axes, output_axes, opset, path, translations)
