"""The strategies to export one graph; the first verified draft wins.

dynamo is tried before TorchScript, and torch's fused attention (sdpa) before eager attention. Sizes
of images and audio are fixed only if no exporter keeps them dynamic.
"""

# pyright may run without torch and transformers, so their types are not checked.
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
from toolkit.frontends.transformers.blueprints import Blueprint, run, with_fixed
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
        patched = ", patched" if self.patched else ""
        return f"{self.exporter}, {self.attention} attention{patched}"


def _has_sdpa(model: Any) -> bool:
    return getattr(model, "_supports_sdpa", False)


def strategies_for(model: Any, optional: bool, request: Request) -> list[Strategy]:
    """Return all strategies, the best first; then again with the `optional` dimensions fixed."""
    attentions = ("sdpa", "eager") if _has_sdpa(model) else ("eager",)
    plain = [
        Strategy(DYNAMO, attentions[0]),
        Strategy(DYNAMO, attentions[0], patched=True),
        *(Strategy(DYNAMO, attention) for attention in attentions[1:]),
        *(Strategy(TORCHSCRIPT, attention) for attention in attentions),
    ]
    if request.exporter != "auto":
        plain = [each for each in plain if each.exporter == request.exporter]
    fixed = [replace(each, fixed=True) for each in plain] if optional else []
    return [*plain, *fixed]


class CheckpointGraphPlan:
    """One graph of a checkpoint, with its remaining strategies."""

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
        self._left = strategies_for(blueprint.wrapper.model, bool(self._optional), request)
        self._tried: Strategy | None = None
        wrapper = blueprint.wrapper
        self._inputs = _renamed("input", wrapper.inputs, request.input_names)
        self._outputs = _renamed("output", tuple(wrapper.outputs), request.output_names)

    def attempt(self, failures: Sequence[Failure]) -> Draft | None:
        """Export with the next strategy that may avoid the last failure."""
        if failures and self._tried is not None:
            self._left = [s for s in self._left if _may_help(s, self._tried, failures[-1])]
        if not self._left:
            return None
        self._tried = strategy = self._left.pop(0)
        self._request.progress(f"{self.name}: exporting with {strategy}")
        folder = self._scratch / f"{self.name}-{len(failures)}"
        folder.mkdir()
        return self._draft(strategy, folder / f"{self.name}.onnx")

    def _draft(self, strategy: Strategy, path: Path) -> Draft:
        interface = self._blueprint.interface
        if strategy.fixed:
            interface = with_fixed(interface, self._optional)
        interface, axes = _with_requested_axes(interface, self._request)
        try:
            _set_attention(self._blueprint.wrapper.model, strategy.attention)
            self._write(strategy, path, interface, axes, self._feed(interface, 0))
        except (ValueError, ImportError) as error:
            reason = f"{strategy.attention} attention: {one_line(error, 200)}"
            raise ExportFailed(strategy.exporter, reason) from error
        except ExportFailed as error:
            # not final: another strategy may avoid an operator without a translation
            raise ExportFailed(strategy.exporter, str(error), dims=error.dims) from error
        # real text early: later passes are verified on the first cases
        first, *others = self._cases(interface, axes)
        return Draft(
            path=path,
            reference=self._reference(strategy),
            cases=[first, *self._extra_cases(axes), *others],
            exporter=strategy.exporter,
            dynamic=self._with_graph_names(axes),
            traced=_dynamic_sizes(interface.settings[0].sizes, axes),
            notes=(*self._blueprint.notes, *self._notes(strategy)),
        )

    def _notes(self, strategy: Strategy) -> Iterator[str]:
        if strategy.fixed:
            sizes = self._blueprint.interface.settings[0].sizes
            shown = " and ".join(f"{dim} {sizes[dim]}" for dim in sorted(self._optional))
            yield f"fixed at {shown}: no exporter keeps them dynamic"
        if strategy.attention == "eager" and _has_sdpa(self._blueprint.wrapper.model):
            yield "exported with eager attention: the export with fused attention failed"

    def _write(
        self, strategy: Strategy, path: Path, interface: GraphInterface, axes: Axes, feed: Feed
    ) -> None:
        opset, translations = self._request.opset, translations_of(self._request.translations)
        with quiet():
            call, graph_axes = self._call(feed), self._with_graph_names(axes)
        if strategy.exporter == TORCHSCRIPT:
            with quiet():
                found = _output_shapes(self._blueprint, interface, axes)
            shapes = {self._outputs[name]: shape for name, shape in found.items()}
            names = {
                n: {a: d for a, d in enumerate(s) if isinstance(d, str)} for n, s in shapes.items()
            }
            write_torchscript(call, feed, graph_axes, names, opset, path, translations)
            declare_outputs(path, shapes)
        elif strategy.patched:
            write_patched(call, feed, graph_axes, opset, path, translations)
        else:
            write_dynamo(call, feed, graph_axes, opset, path, translations)

    def _call(self, feed: Feed) -> ModuleCall:
        """Bind the wrapper to an example, under the graph's names."""
        names = replace(
            self._request,
            input_names=tuple(self._inputs.values()),
            output_names=tuple(self._outputs.values()),
        )
        values = tuple(torch.from_numpy(value) for value in feed.values())
        return bind_arguments(self._blueprint.wrapper, values, {}, names)

    def _reference(self, strategy: Strategy) -> Callable[[Feed], Mapping[str, Any]]:
        """Return a function that runs the wrapper with the attention of the exported graph.

        Rows that attend to nothing (left padding) are meaningless, but have values: fused attention
        returns zeros; eager attention, and dynamo's unpatched translation, an average.
        """
        wrapper = self._blueprint.wrapper
        attention = (
            "eager" if strategy.exporter == DYNAMO and not strategy.patched else strategy.attention
        )

        def reference(feed: Feed) -> Mapping[str, Any]:
            _set_attention(wrapper.model, attention)
            with quiet(), torch.no_grad():
                values = wrapper(*(torch.from_numpy(feed[n]) for n in self._inputs.values()))
            return {n: v.numpy() for n, v in zip(self._outputs.values(), values, strict=True)}

        return reference

    def _cases(self, interface: GraphInterface, axes: Axes) -> list[Case]:
        return [
            Case(self._feed(interface, place), _dynamic_sizes(setting.sizes, axes), setting.label)
            for place, setting in enumerate(interface.settings)
        ]

    def _extra_cases(self, axes: Axes) -> list[Case]:
        """Return the cases of real text and of the user's example, unless sizes are fixed."""
        if axes != self._blueprint.interface.axes() and self._request.dynamic is not None:
            return []
        named = {
            label: {self._inputs[name]: value for name, value in feed.items()}
            for label, feed in self._extra.items()
        }
        sizes = self._with_graph_names(axes)
        return [Case(feed, sizes_in(feed, sizes), label) for label, feed in named.items()]

    def _feed(self, interface: GraphInterface, place: int) -> Feed:
        made = interface.feed(interface.settings[place], self._request.seed + place)
        return {self._inputs[name]: value for name, value in made.items()}

    def _with_graph_names(self, axes: Axes) -> dict[str, dict[int, str]]:
        return {self._inputs[name]: dict(dims) for name, dims in axes.items()}


def _renamed(kind: str, have: Sequence[str], asked: Sequence[str]) -> dict[str, str]:
    """Map the wrapper's names to the graph's."""
    return {name: name for name in have} | new_names(kind, have, asked)


def _may_help(strategy: Strategy, tried: Strategy, failure: Failure) -> bool:
    """Return whether a strategy may succeed after this failure of another."""
    if failure.proof is not None and strategy.patched:
        return False  # patches only help tracing
    if strategy.fixed or tried.fixed or not failure.dims:
        return True
    # a size fixed by the model's code is fixed with any attention
    return strategy.exporter != tried.exporter


def _set_attention(model: Any, implementation: str) -> None:
    """Select the attention implementation if the model has several; raise ValueError if unknown."""
    switch = getattr(model, "set_attn_implementation", None)
    if switch is None:
        return
    with quiet():
        switch(implementation)


def _with_requested_axes(
    interface: GraphInterface, request: Request
) -> tuple[GraphInterface, Axes]:
    """Keep only the requested dimensions dynamic, under the requested names."""
    axes = interface.axes()
    if request.dynamic is None:
        return interface, axes
    ranks = {each.name: len(each.shape) for each in interface.inputs}
    wanted = resolve_axes(request.dynamic, ranks)
    names: dict[str, str] = {}
    for name, dims in wanted.items():
        for axis, dim in dims.items():
            if axis not in axes.get(name, {}):
                raise UsageError(f"axis {axis} of '{name}' cannot be dynamic in this model")
            names[axes[name][axis]] = dim
    every = {dim for dims in axes.values() for dim in dims.values()}
    interface = with_fixed(interface, frozenset(every - set(names))).renamed(names)
    return interface, interface.axes()


def _output_shapes(
    blueprint: Blueprint, interface: GraphInterface, axes: Axes
) -> dict[str, list[int | str]]:
    """Return the shapes of the outputs, found by running in all settings.

    A varying size gets the name of the input dimension that always equals it, else its own.
    """
    runs: list[tuple[Sizes, list[tuple[int, ...]]]] = []
    for setting in interface.settings:
        try:
            shapes = [tuple(v.shape) for v in run(blueprint.wrapper, interface, setting)]
        except Exception:  # a model may not support some sizes
            continue
        runs.append((setting.sizes, shapes))
    dims = {dim: tuple(sizes[dim] for sizes, _ in runs) for dim in _dynamic_sizes(runs[0][0], axes)}
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


def _dynamic_sizes(sizes: Sizes, axes: Axes) -> dict[str, int]:
    used = {dim for dims in axes.values() for dim in dims.values()}
    return {dim: size for dim, size in sizes.items() if dim in used}
