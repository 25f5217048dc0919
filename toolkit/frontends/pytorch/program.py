"""Export an ExportedProgram: torch.export has captured it, so only the translation is left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from toolkit.errors import UsageError
from toolkit.frontends.protocol import AttemptList, Draft, ExportPlan
from toolkit.frontends.pytorch import exporters
from toolkit.frontends.pytorch.call_signature import ModuleCall, bind, bind_arguments
from toolkit.frontends.pytorch.custom_ops import Translations
from toolkit.frontends.request import Axes, Request
from toolkit.frontends.test_inputs import cases_from, sizes_in


def plan_program(
    program: Any, request: Request, scratch: Path, translations: Translations
) -> ExportPlan:
    """Plan one graph with the program's dynamic axes."""
    if request.exporter == "torchscript":
        raise UsageError("TorchScript does not support an ExportedProgram: use --exporter dynamo")
    call = _call(program, request)
    axes = _axes(program, call, request)

    def draft() -> Draft:
        path = scratch / "model.onnx"
        request.progress("model: exporting the program")
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
        raise UsageError("the ExportedProgram has no example inputs: give an --example")
    args, kwargs = program.example_inputs
    return bind_arguments(module, tuple(args), dict(kwargs), request)


def _axes(program: Any, call: ModuleCall, request: Request) -> Axes:
    """Return the program's dynamic axes, under the requested names if there are any."""
    own = dict(zip(exporters.tensor_inputs(program), call.inputs, strict=True))
    left = {own[name]: dims for name, dims in exporters.dynamic_axes(program).items()}
    axes = _with_names(left)
    asked = request.axes_of(call.feed(), call.outputs)
    if asked is None:
        return axes
    for name, dims in asked.items():
        for axis in dims:
            if axis not in left.get(name, {}):
                raise UsageError(
                    f"dynamic axis {axis} of '{name}' is fixed in the ExportedProgram: call "
                    "torch.export.export again with that axis dynamic"
                )
    return {
        name: {axis: asked.get(name, {}).get(axis, dim) for axis, dim in dims.items()}
        for name, dims in axes.items()
    }


def _with_names(symbols: Axes) -> dict[str, dict[int, str]]:
    """Name torch's symbols: `batch` for the first at an axis 0, others by input and axis."""
    names: dict[str, str] = {}
    for name, dims in symbols.items():
        for axis, symbol in dims.items():
            is_batch = axis == 0 and "batch" not in names.values()
            names.setdefault(symbol, "batch" if is_batch else f"{name}_{axis}")
    return {n: {axis: names[s] for axis, s in dims.items()} for n, dims in symbols.items()}
