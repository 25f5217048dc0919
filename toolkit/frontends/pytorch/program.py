"""An ExportedProgram: a graph already, of which only the translation is left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from toolkit.errors import UsageError
from toolkit.frontends.protocol import AttemptList, Draft, ExportPlan
from toolkit.frontends.pytorch import exporters
from toolkit.frontends.pytorch.call_signature import ModuleCall, bind, bind_arguments
from toolkit.frontends.pytorch.custom_ops import Translations
from toolkit.frontends.request import Axes, Request, resolve_axes
from toolkit.frontends.test_inputs import cases_from, sizes_in


def plan_program(
    program: Any, request: Request, scratch: Path, translations: Translations
) -> ExportPlan:
    """One graph with the axes that the program leaves open."""
    if request.exporter == "torchscript":
        raise UsageError("an ExportedProgram is dynamo's: --exporter torchscript does not take it")
    call = _call(program, request)
    axes = _axes(program, call, request)

    def draft() -> Draft:
        path = scratch / "model.onnx"
        request.progress("model: translating the program")
        exporters.write_program(program, call, axes, request.opset, path, translations)
        feed = call.feed()
        cases = cases_from(feed, axes, request.seed)
        return Draft(path, call, cases, exporters.DYNAMO, axes, sizes_in(feed, axes))

    return ExportPlan([AttemptList("model", [draft])])


def _call(program: Any, request: Request) -> ModuleCall:
    module = program.module()
    if request.example is not None:
        return bind(module, request)
    if program.example_inputs is None:
        raise UsageError("the ExportedProgram holds no example inputs: give an --example")
    args, kwargs = program.example_inputs
    return bind_arguments(module, tuple(args), dict(kwargs), request)


def _axes(program: Any, call: ModuleCall, request: Request) -> Axes:
    """The axes that the program leaves open, under the user's names where there are some."""
    own = dict(zip(exporters.tensor_inputs(program), call.inputs, strict=True))
    left = {own[name]: dims for name, dims in exporters.open_axes(program).items()}
    axes = _named(left)
    if request.dynamic is None:
        return axes
    ranks = {name: value.ndim for name, value in call.feed().items()}
    asked = resolve_axes(request.dynamic, ranks, call.outputs)
    for name, dims in asked.items():
        for axis in dims:
            if axis not in left.get(name, {}):
                raise UsageError(
                    f"dynamic axis {axis} of '{name}': the ExportedProgram has fixed it; export "
                    "the module again with it open"
                )
    return {
        name: {axis: asked.get(name, {}).get(axis, dim) for axis, dim in dims.items()}
        for name, dims in axes.items()
    }


def _named(symbols: Axes) -> dict[str, dict[int, str]]:
    """Names for torch's symbols: `batch` for that of the first axis 0, else input and axis."""
    names: dict[str, str] = {}
    for name, dims in symbols.items():
        for axis, symbol in dims.items():
            is_batch = axis == 0 and "batch" not in names.values()
            names.setdefault(symbol, "batch" if is_batch else f"{name}_{axis}")
    return {n: {axis: names[s] for axis, s in dims.items()} for n, dims in symbols.items()}
