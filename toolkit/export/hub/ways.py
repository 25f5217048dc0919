"""The ways to export one graph, and the drafts that they give: the first that holds is taken.

dynamo comes before TorchScript and torch's fused attention (sdpa) before the plain one (eager).
Sizes of images and audio stay dynamic as long as any exporter keeps them; then they are fixed.
"""

# Runs only where torch and transformers are; types end at their border.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from toolkit.errors import UsageError
from toolkit.export.draft import Case, Draft, ExportFailed, Failure
from toolkit.export.hub.graphs import Blueprint, run, without
from toolkit.export.hub.inputs import Interface, Sizes
from toolkit.export.hub.quiet import quiet
from toolkit.export.hub.writing import write_dynamo, write_torchscript
from toolkit.export.request import Axes, Request, resolve_axes
from toolkit.feeds.samples import Feed


@dataclass(frozen=True, slots=True)
class Way:
    """An exporter, an attention implementation, and whether optional dimensions are fixed."""

    exporter: str
    attention: str
    patched: bool = False
    fixed: bool = False

    def __str__(self) -> str:
        return f"{self.exporter}, {self.attention} attention" + (", patched" if self.patched else "")


def ways_of(blueprint: Blueprint, request: Request) -> list[Way]:
    """All ways, the best first."""
    model: Any = blueprint.wrapper.model
    attentions = ("sdpa", "eager") if getattr(model, "_supports_sdpa", False) else ("eager",)
    plain = [
        *(Way("dynamo", attention) for attention in attentions),
        Way("dynamo", attentions[0], patched=True),
        *(Way("torchscript", attention) for attention in attentions),
    ]
    if request.exporter != "auto":
        plain = [way for way in plain if way.exporter == request.exporter]
    fixed = [replace(way, fixed=True) for way in plain] if blueprint.interface.optional else []
    return [*plain, *fixed]


class HubPart:
    """One graph of a checkpoint, tried way by way."""

    def __init__(
        self, blueprint: Blueprint, request: Request, scratch: Path, extra: Sequence[Case] = ()
    ) -> None:
        self.name = blueprint.name
        self._blueprint, self._request, self._scratch = blueprint, request, scratch
        self._extra = extra
        self._left = ways_of(blueprint, request)

    def attempt(self, failures: Sequence[Failure]) -> Draft | None:
        """The next way. A proof that failed is no matter of patches, which only help tracing."""
        if failures and failures[-1].proof is not None:
            while self._left and self._left[0].patched:
                self._left.pop(0)
        if not self._left:
            return None
        way = self._left.pop(0)
        self._request.progress(f"{self.name}: exporting with {way}")
        folder = self._scratch / f"{self.name}-{len(failures)}"
        folder.mkdir()
        return self._draft(way, folder / f"{self.name}.onnx", tuple(failures))

    def _draft(self, way: Way, path: Path, failures: tuple[Failure, ...]) -> Draft:
        wrapper, interface = self._blueprint.wrapper, self._blueprint.interface
        notes = list(self._blueprint.notes)
        if way.fixed:
            sizes = [f"{d} {interface.settings[0].sizes[d]}" for d in sorted(interface.optional)]
            notes.append(f"{' and '.join(sizes)} fixed: no exporter keeps them dynamic")
            interface = without(interface, interface.optional)
        if way.attention == "eager" and getattr(wrapper.model, "_supports_sdpa", False):
            notes.append("plain attention (eager): the fused one did not export")
        interface, axes = _asked(interface, self._request)
        traced = interface.settings[0]
        feed = interface.feed(traced, self._request.seed)
        request = self._request
        attend(wrapper.model, way.attention)
        if way.exporter == "dynamo":
            write_dynamo(
                wrapper,
                feed,
                axes,
                path,
                opset=request.opset,
                patched=way.patched,
                translations=request.translations,
            )
        else:
            write_torchscript(
                wrapper,
                feed,
                {**axes, **output_axes(self._blueprint, interface, axes)},
                path,
                opset=request.opset,
            )
        return Draft(
            path=path,
            reference=self._reference(way),
            cases=[*self._cases(interface, axes), *self._extra],
            exporter=way.exporter,
            dynamic=axes,
            traced=_shown(traced.sizes, axes),
            notes=tuple(notes),
        )

    def _reference(self, way: Way) -> Any:
        """Runs the wrapper.

        Rows that attend to nothing, as of padding on the left, mean nothing, but have values: the
        fused attention gives zeros, the plain one and what dynamo writes an average.
        """
        wrapper = self._blueprint.wrapper
        attention = "eager" if way.exporter == "dynamo" else way.attention

        def reference(feed: Feed) -> Mapping[str, Any]:
            attend(wrapper.model, attention)
            with quiet(), torch.no_grad():
                values = wrapper(*(torch.from_numpy(feed[name]) for name in wrapper.inputs))
            return {n: v.numpy() for n, v in zip(wrapper.outputs, values, strict=True)}

        return reference

    def _cases(self, interface: Interface, axes: Axes) -> list[Case]:
        return [
            Case(
                interface.feed(setting, self._request.seed + count),
                _shown(setting.sizes, axes),
                setting.label,
            )
            for count, setting in enumerate(interface.settings)
        ]


def attend(model: Any, implementation: str) -> None:
    """Switch the attention implementation, where the model has a choice."""
    switch = getattr(model, "set_attn_implementation", None)
    if switch is None:
        return
    try:
        with quiet():
            switch(implementation)
    except (ValueError, ImportError) as error:
        raise ExportFailed(implementation, f"{implementation} attention: {error}") from error


def _asked(interface: Interface, request: Request) -> tuple[Interface, Axes]:
    """The interface with those dimensions only that the user wants dynamic."""
    axes = interface.axes()
    if request.dynamic is None:
        return interface, axes
    ranks = {each.name: len(each.shape) for each in interface.inputs}
    wanted = resolve_axes(request.dynamic, ranks)
    for name, dims in wanted.items():
        for axis in dims:
            if axis not in axes.get(name, {}):
                raise UsageError(f"axis {axis} of '{name}' has one size only in this model")
    kept = {axes[name][axis] for name, dims in wanted.items() for axis in dims}
    every = {dim for dims in axes.values() for dim in dims.values()}
    interface = without(interface, frozenset(every - kept))
    named = {
        (n, a): wanted.get(n, {}).get(a, d) for n, dims in axes.items() for a, d in dims.items()
    }
    renamed: dict[str, dict[int, str]] = {}
    for name, dims in interface.axes().items():
        renamed[name] = {axis: named[name, axis] for axis in dims}
    return interface, renamed


def output_axes(blueprint: Blueprint, interface: Interface, axes: Axes) -> dict[str, dict[int, str]]:
    """Which dimensions of the outputs change with the inputs, found by running.

    They get the name of the input dimension that always has the same size, else a name of theirs.
    """
    runs = [
        [tuple(value.shape) for value in run(blueprint.wrapper, interface, setting)]
        for setting in interface.settings
    ]
    sizes = [_shown(setting.sizes, axes, interface) for setting in interface.settings]
    dims = {dim: tuple(each[dim] for each in sizes) for dim in sizes[0]}
    found: dict[str, dict[int, str]] = {}
    for place, (name, known) in enumerate(blueprint.wrapper.outputs.items()):
        for axis, seen in enumerate(zip(*(shapes[place] for shapes in runs), strict=True)):
            if len(set(seen)) > 1:
                same = next((dim for dim, values in dims.items() if values == seen), None)
                own = known.get(axis) if known.get(axis) not in dims else None
                found.setdefault(name, {})[axis] = same or own or f"{name}_{axis}"
    return found


def _shown(sizes: Sizes, axes: Axes, interface: Interface | None = None) -> dict[str, int]:
    """The sizes by the names that the graph gives its dimensions."""
    used = {dim for dims in axes.values() for dim in dims.values()}
    return {dim: size for dim, size in sizes.items() if dim in used}
