# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
"""The PyTorch front end: modules with an example, ExportedProgram and TorchScript files.

dynamo is tried first, then TorchScript. Unless dynamic axes are requested, those in which the model
itself supports other sizes are dynamic; one that the graph does not support is fixed again.
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
from toolkit.frontends.protocol import Draft, ExportPlan, Failure
from toolkit.frontends.pytorch import exporters, sources
from toolkit.frontends.pytorch.axes import find_axes
from toolkit.frontends.pytorch.call_signature import ModuleCall, bind, training_notes
from toolkit.frontends.pytorch.custom_ops import CustomOp, Translations, translations_of
from toolkit.frontends.pytorch.exporters import DYNAMO, TORCHSCRIPT
from toolkit.frontends.request import Axes, Request
from toolkit.frontends.test_inputs import cases_from, output_axes, resized, sizes_in

__all__ = ["FRONT_END", "CustomOp", "PyTorchFrontEnd"]


class PyTorchFrontEnd:
    """Exports PyTorch modules and the files that hold them."""

    name = "pytorch"
    supports = ("exporter", "weights", "translations")

    def takes(self, source: object) -> bool:
        if isinstance(source, Path):
            return source.is_file() and source.suffix in sources.SUFFIXES
        torch: Any = sys.modules.get("torch")  # without it, no object is a torch object
        if torch is None or not hasattr(torch, "nn"):
            return False
        export: Any = sys.modules.get("torch.export")
        kinds = (torch.nn.Module, *((export.ExportedProgram,) if export else ()))
        return isinstance(source, kinds)

    def plan(self, source: Any, request: Request, scratch: Path) -> ExportPlan:
        """Plan one graph, with the requested dynamic axes or those that the model supports."""
        torch = _require_torch()
        if isinstance(source, Path):
            source = sources.load_source(source)
        translations = translations_of(request.translations)
        if isinstance(source, torch.export.ExportedProgram):
            if request.weights is not None:
                raise UsageError(
                    "an ExportedProgram contains its weights: --weights is for factories only"
                )
            from toolkit.frontends.pytorch.program import plan_program

            return plan_program(source, request, scratch, translations)
        if request.weights is not None:
            sources.load_weights(source, request.weights)
        notes = training_notes(source)
        call = bind(source, request)
        names = _exporters(source, request)
        feed = call.feed()
        axes = request.axes_of(feed, call.outputs)
        if axes is None:
            request.progress("finding the dynamic axes")
            axes, found = find_axes(call, feed)
            notes += found
        part = ModuleGraphPlan(call, request, scratch, names, axes, translations)
        return ExportPlan([part], notes=tuple(notes))


FRONT_END = PyTorchFrontEnd()


def _require_torch() -> Any:
    """Import torch with its exporters; raise UsageError if a package is missing."""
    try:
        for name in ("torch", "torch.export", "torch.onnx", "onnxscript"):
            importlib.import_module(name)
    except ImportError as error:
        raise UsageError(f"PyTorch models need {error.name}: {install('export')}") from error
    return importlib.import_module("torch")


def _exporters(module: Any, request: Request) -> tuple[str, ...]:
    torch = importlib.import_module("torch")
    if isinstance(module, torch.jit.ScriptModule):
        if request.exporter == "dynamo":
            raise UsageError("dynamo does not support TorchScript: use --exporter torchscript")
        return (TORCHSCRIPT,)
    return (DYNAMO, TORCHSCRIPT) if request.exporter == "auto" else (request.exporter,)


@dataclass(slots=True)
class ModuleGraphPlan:
    """One module as one graph: dynamo, then TorchScript, then both with fewer dynamic axes.

    Axes that the user requested stay dynamic.
    """

    call: ModuleCall
    request: Request
    scratch: Path
    exporters: Sequence[str]
    axes: Axes
    translations: Translations
    name: str = "model"
    _round: int = 0
    """The number of times that axes were fixed and all exporters tried again."""
    _handled: int = 0
    """The number of failures of earlier rounds."""
    _failed: set[str] = field(default_factory=set[str])
    """Exporters that failed for reasons other than a dynamic axis."""
    _queue: list[str] = field(default_factory=list[str])
    _notes: list[str] = field(default_factory=list[str])

    def attempt(self, failures: Sequence[Failure]) -> Draft | None:
        if not failures and not self._queue:
            self._queue = list(self.exporters)
        if failures and not failures[-1].dims:
            self._failed.add(failures[-1].exporter)
        if not self._queue and not self._fix_axes(failures):
            return None
        exporter = self._queue.pop(0)
        self.request.progress(f"{self.name}: exporting with {exporter}")
        return self._draft(exporter)

    def _fix_axes(self, failures: Sequence[Failure]) -> bool:
        """Fix the dimensions behind this round's failures; return False if that cannot help."""
        blamed = frozenset[str]().union(*(f.dims for f in failures[self._handled :]))
        self._handled = len(failures)
        left = [exporter for exporter in self.exporters if exporter not in self._failed]
        if self.request.dynamic is not None or not blamed or not left:
            return False
        for dim in sorted(blamed):
            self._notes.append(
                f"dimension '{dim}' is fixed at the example's size: no exporter keeps it dynamic"
            )
        self.axes = {
            name: kept
            for name, dims in self.axes.items()
            if (kept := {axis: dim for axis, dim in dims.items() if dim not in blamed})
        }
        self._queue = left
        self._round += 1
        return True

    def _draft(self, exporter: str) -> Draft:
        feed = self.call.feed()
        traced = _at_trace_sizes(feed, self.axes)
        path = self.scratch / f"{self.name}-{exporter}-{self._round}.onnx"
        target = self.request.opset, path, self.translations
        if exporter == DYNAMO:
            exporters.write_dynamo(self.call, traced, self.axes, *target)
        else:
            of_outputs = output_axes(self.call, traced, self.axes)
            exporters.write_torchscript(self.call, traced, self.axes, of_outputs, *target)
        return Draft(
            path=path,
            reference=self.call,
            cases=cases_from(feed, self.axes, self.request.seed),
            exporter=exporter,
            dynamic=self.axes,
            traced=sizes_in(traced, self.axes),
            notes=tuple(self._notes),
        )


def _at_trace_sizes(feed: Feed, axes: Axes) -> Feed:
    """Return the example at distinct dynamic sizes of at least 2.

    torch specializes to a size of 1, and may identify two dimensions of equal size.
    """
    sizes: dict[str, int] = {}
    for dim, size in sizes_in(feed, axes).items():
        wanted = max(size, 2)
        while wanted in sizes.values():
            wanted += 1
        sizes[dim] = wanted
    return resized(feed, axes, sizes)
