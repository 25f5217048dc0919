"""The ways to export one graph, and the drafts that they give: the first that holds is taken.

dynamo comes before TorchScript and torch's fused attention (sdpa) before the plain one (eager).
Sizes of images and audio stay dynamic as long as any exporter keeps them; then they are fixed.
"""

# Runs only where torch and transformers are; types end at their border.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from toolkit.errors import UsageError, one_line
from toolkit.feeds.user_samples import Feed
from toolkit.frontends.protocol import Case, Draft, ExportFailed, Failure
from toolkit.frontends.pytorch.call_signature import ModuleCall, bind_arguments
from toolkit.frontends.pytorch.custom_ops import translations_of
from toolkit.frontends.pytorch.exporters import (
    DYNAMO,
    TORCHSCRIPT,
    quiet,
    write_dynamo,
    write_torchscript,
)
from toolkit.frontends.request import Axes, Request, resolve_axes
from toolkit.frontends.signature import new_names
from toolkit.frontends.test_inputs import sizes_in
from toolkit.frontends.transformers.blueprints import Blueprint, run, without
from toolkit.frontends.transformers.exporters import declare_outputs, write_patched
from toolkit.frontends.transformers.inputs import GraphInterface, Sizes


@dataclass(frozen=True, slots=True)
class Strategy:
    """An exporter, an attention implementation, and whether optional dimensions are fixed."""

    exporter: str
    attention: str
    patched: bool = False
    fixed: bool = False

    def __str__(self) -> str:
        return f"{self.exporter}, {self.attention} attention" + (
            ", patched" if self.patched else ""
        )


def ways_of(model: Any, optional: bool, request: Request) -> list[Strategy]:
    """All ways, the best first; with `optional` dimensions, all once more with these fixed."""
    attentions = ("sdpa", "eager") if getattr(model, "_supports_sdpa", False) else ("eager",)
    plain = [
        Strategy(DYNAMO, attentions[0]),
        Strategy(DYNAMO, attentions[0], patched=True),
        *(Strategy(DYNAMO, attention) for attention in attentions[1:]),
        *(Strategy(TORCHSCRIPT, attention) for attention in attentions),
    ]
    if request.exporter != "auto":
        plain = [way for way in plain if way.exporter == request.exporter]
    fixed = [replace(way, fixed=True) for way in plain] if optional else []
    return [*plain, *fixed]


class CheckpointGraphPlan:
    """One graph of a checkpoint, tried way by way."""

    def __init__(
        self,
        blueprint: Blueprint,
        request: Request,
        scratch: Path,
        extra: Mapping[str, Feed],
    ) -> None:
        self.name = blueprint.name
        self._blueprint, self._request, self._scratch = blueprint, request, scratch
        self._extra = extra
        self._optional = blueprint.interface.optional if request.dynamic is None else frozenset()
        self._left = ways_of(blueprint.wrapper.model, bool(self._optional), request)
        self._tried: Strategy | None = None
        wrapper = blueprint.wrapper
        self._inputs = _renamed("input", wrapper.inputs, request.input_names)
        self._outputs = _renamed("output", tuple(wrapper.outputs), request.output_names)

    def attempt(self, failures: Sequence[Failure]) -> Draft | None:
        """The next way that can help against the last failure."""
        if failures and self._tried is not None:
            self._left = [way for way in self._left if _helps(way, self._tried, failures[-1])]
        if not self._left:
            return None
        self._tried = way = self._left.pop(0)
        self._request.progress(f"{self.name}: exporting with {way}")
        folder = self._scratch / f"{self.name}-{len(failures)}"
        folder.mkdir()
        return self._draft(way, folder / f"{self.name}.onnx")

    def _draft(self, way: Strategy, path: Path) -> Draft:
        interface = self._blueprint.interface
        if way.fixed:
            interface = without(interface, self._optional)
        interface, axes = _asked(interface, self._request)
        try:
            attend(self._blueprint.wrapper.model, way.attention)
            self._write(way, path, interface, axes, self._feed(interface, 0))
        except (ValueError, ImportError) as error:
            reason = f"{way.attention} attention: {one_line(error, 200)}"
            raise ExportFailed(way.exporter, reason) from error
        except ExportFailed as error:
            # an operator that one way has no translation for may not occur in another
            raise ExportFailed(way.exporter, str(error), dims=error.dims) from error
        # real text early: the first cases also judge the passes that come after
        first, *others = self._cases(interface, axes)
        return Draft(
            path=path,
            reference=self._reference(way),
            cases=[first, *self._extra_cases(axes), *others],
            exporter=way.exporter,
            dynamic=self._public(axes),
            traced=_shown(interface.settings[0].sizes, axes),
            notes=(*self._blueprint.notes, *self._notes(way)),
        )

    def _notes(self, way: Strategy) -> Iterator[str]:
        if way.fixed:
            sizes = self._blueprint.interface.settings[0].sizes
            shown = " and ".join(f"{dim} {sizes[dim]}" for dim in sorted(self._optional))
            yield f"{shown}, fixed: the exporters do not keep them open"
        if way.attention == "eager" and getattr(
            self._blueprint.wrapper.model, "_supports_sdpa", False
        ):
            yield "plain attention (eager): with the fused one it did not hold"

    def _write(
        self, way: Strategy, path: Path, interface: GraphInterface, axes: Axes, feed: Feed
    ) -> None:
        opset, translations = self._request.opset, translations_of(self._request.translations)
        with quiet():
            call, open_ = self._call(feed), self._public(axes)
        if way.exporter == TORCHSCRIPT:
            with quiet():
                seen = output_shapes(self._blueprint, interface, axes)
            shapes = {self._outputs[name]: shape for name, shape in seen.items()}
            names = {
                n: {a: d for a, d in enumerate(s) if isinstance(d, str)} for n, s in shapes.items()
            }
            write_torchscript(call, feed, open_, names, opset, path, translations)
            declare_outputs(path, shapes)
        elif way.patched:
            write_patched(call, feed, open_, opset, path, translations)
        else:
            write_dynamo(call, feed, open_, opset, path, translations)

    def _call(self, feed: Feed) -> ModuleCall:
        """The wrapper with its example, under the graph's names."""
        names = replace(
            self._request,
            input_names=tuple(self._inputs.values()),
            output_names=tuple(self._outputs.values()),
        )
        values = tuple(torch.from_numpy(value) for value in feed.values())
        return bind_arguments(self._blueprint.wrapper, values, {}, names)

    def _reference(self, way: Strategy) -> Callable[[Feed], Mapping[str, Any]]:
        """Runs the wrapper.

        Rows that attend to nothing, as of padding on the left, mean nothing, but have values: the
        fused attention gives zeros, the plain one and what dynamo writes (unpatched) an average.
        """
        wrapper = self._blueprint.wrapper
        attention = "eager" if way.exporter == DYNAMO and not way.patched else way.attention

        def reference(feed: Feed) -> Mapping[str, Any]:
            attend(wrapper.model, attention)
            with quiet(), torch.no_grad():
                values = wrapper(*(torch.from_numpy(feed[n]) for n in self._inputs.values()))
            return {n: v.numpy() for n, v in zip(self._outputs.values(), values, strict=True)}

        return reference

    def _cases(self, interface: GraphInterface, axes: Axes) -> list[Case]:
        return [
            Case(self._feed(interface, place), _shown(setting.sizes, axes), setting.label)
            for place, setting in enumerate(interface.settings)
        ]

    def _extra_cases(self, axes: Axes) -> list[Case]:
        """Texts and the user's example, where their sizes are open."""
        if axes != self._blueprint.interface.axes() and self._request.dynamic is not None:
            return []
        named = {
            label: {self._inputs[name]: value for name, value in feed.items()}
            for label, feed in self._extra.items()
        }
        sizes = self._public(axes)
        return [Case(feed, sizes_in(feed, sizes), label) for label, feed in named.items()]

    def _feed(self, interface: GraphInterface, place: int) -> Feed:
        made = interface.feed(interface.settings[place], self._request.seed + place)
        return {self._inputs[name]: value for name, value in made.items()}

    def _public(self, axes: Axes) -> dict[str, dict[int, str]]:
        return {self._inputs[name]: dict(dims) for name, dims in axes.items()}


def _renamed(kind: str, have: Sequence[str], asked: Sequence[str]) -> dict[str, str]:
    """The graph's names for the wrapper's."""
    return {name: name for name in have} | new_names(kind, have, asked)


def _helps(way: Strategy, tried: Strategy, failure: Failure) -> bool:
    """Whether a way may lead further than one that failed so."""
    if failure.proof is not None and way.patched:
        return False  # patches help tracing
    if way.fixed or tried.fixed or not failure.dims:
        return True
    # a size that the model's code fixes stays so with any attention
    return way.exporter != tried.exporter


def attend(model: Any, implementation: str) -> None:
    """Switch the attention implementation, where the model has a choice; ValueError: it has not."""
    switch = getattr(model, "set_attn_implementation", None)
    if switch is None:
        return
    with quiet():
        switch(implementation)


def _asked(interface: GraphInterface, request: Request) -> tuple[GraphInterface, Axes]:
    """The interface with those dimensions only that the user wants dynamic, under their names."""
    axes = interface.axes()
    if request.dynamic is None:
        return interface, axes
    ranks = {each.name: len(each.shape) for each in interface.inputs}
    wanted = resolve_axes(request.dynamic, ranks)
    names: dict[str, str] = {}
    for name, dims in wanted.items():
        for axis, said in dims.items():
            if axis not in axes.get(name, {}):
                raise UsageError(f"axis {axis} of '{name}' has one size only in this model")
            names[axes[name][axis]] = said
    every = {dim for dims in axes.values() for dim in dims.values()}
    interface = without(interface, frozenset(every - set(names)))
    return interface.renamed(names), interface.renamed(names).axes()


def output_shapes(
    blueprint: Blueprint, interface: GraphInterface, axes: Axes
) -> dict[str, list[int | str]]:
    """The shapes of the outputs, found by running in all settings.

    A dimension that changes gets the name of the input dimension that always has the same size,
    else a name of its own.
    """
    runs: list[tuple[Sizes, list[tuple[int, ...]]]] = []
    for setting in interface.settings:
        try:
            shapes = [tuple(v.shape) for v in run(blueprint.wrapper, interface, setting)]
        except Exception:  # a model may refuse some sizes
            continue
        runs.append((setting.sizes, shapes))
    dims = {dim: tuple(sizes[dim] for sizes, _ in runs) for dim in _shown(runs[0][0], axes)}
    found: dict[str, list[int | str]] = {}
    for place, (name, known) in enumerate(blueprint.wrapper.outputs.items()):
        shape: list[int | str] = []
        for axis, seen in enumerate(zip(*(shapes[place] for _, shapes in runs), strict=True)):
            same = next((dim for dim, sizes in dims.items() if sizes == seen), None)
            own = known.get(axis)
            own = own if own is not None and own not in dims else f"{name}_{axis}"
            shape.append(same or own if len(set(seen)) > 1 else seen[0])
        found[name] = shape
    return found


def _shown(sizes: Sizes, axes: Axes) -> dict[str, int]:
    """The sizes of the dimensions that are open."""
    used = {dim for dims in axes.values() for dim in dims.values()}
    return {dim: size for dim, size in sizes.items() if dim in used}
