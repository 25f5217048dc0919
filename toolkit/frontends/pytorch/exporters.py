# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
"""torch's two exporters: dynamo (torch.export, then translation) and TorchScript (tracing).

Each traces at the sizes of a feed, writes one .onnx file with `axes` dynamic, and raises
ExportFailed with the exporter's reason in one line.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import re
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import onnx

from toolkit.errors import ToolkitError
from toolkit.feeds.user_samples import Feed
from toolkit.frontends.operator_map import origin_of
from toolkit.frontends.protocol import ExportFailed
from toolkit.frontends.pytorch import external_weights
from toolkit.frontends.pytorch.call_signature import ModuleCall, evaluating, tensors_in
from toolkit.frontends.pytorch.custom_ops import Translations
from toolkit.frontends.pytorch.errors import (
    library_folders,
    reason_of,
    unsupported,
    unsupported_in_trace,
)
from toolkit.frontends.pytorch.tracing import capturable, move_labels, traceable
from toolkit.frontends.request import Axes
from toolkit.frontends.signature import rename_values
from toolkit.frontends.silence import silence

DYNAMO, TORCHSCRIPT = "dynamo", "torchscript"
_TORCHSCRIPT_OPSETS = (7, 20)
"""The oldest and the newest opset that the exporter writes."""
_TORCHSCRIPT_DEFAULT = 18


def write_dynamo(
    call: ModuleCall,
    feed: Feed,
    axes: Axes,
    opset: int | None,
    path: Path,
    translations: Translations,
) -> None:
    """Write `path` (and `path.data`) with torch.export and its ONNX translation."""
    write_program(capture(call, feed, axes), call, axes, opset, path, translations)


def capture(call: ModuleCall, feed: Feed, axes: Axes) -> Any:
    """Return the ExportedProgram of a call, with these axes dynamic."""
    torch = importlib.import_module("torch")
    args, kwargs = call.arguments_with(call.tensors(feed))
    shapes = _dynamic_shapes(call, feed, axes)
    errors: list[Exception] = []
    for strict in (False, True):
        try:
            with quiet(), evaluating(call.module), torch.no_grad(), capturable():
                program = torch.export.export(
                    call.module, args, kwargs, dynamic_shapes=shapes, strict=strict
                )
        except Exception as error:  # the tracer raises a dozen unrelated classes
            errors.append(error)
            continue
        _require_dynamic(program, call, axes, feed)
        return program
    raise ExportFailed(DYNAMO, reason_of(errors[0])) from errors[0]


def _dynamic_shapes(call: ModuleCall, feed: Feed, axes: Axes) -> dict[str, Any]:
    """Return torch.export's `dynamic_shapes`: the dynamic axes of every argument."""
    torch = importlib.import_module("torch")
    auto = torch.export.Dim.AUTO
    by_place = {
        (leaf.parameter, leaf.path): dict.fromkeys(axes.get(leaf.name, {}), auto)
        for leaf in call.leaves
    }

    def spec(value: Any, parameter: str, path: tuple[Any, ...]) -> Any:
        if isinstance(value, torch.Tensor):
            return by_place[parameter, path]
        if isinstance(value, Mapping):
            return {key: spec(each, parameter, (*path, key)) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            listed = [spec(each, parameter, (*path, i)) for i, each in enumerate(value)]
            return listed if isinstance(value, list) else tuple(listed)
        return None

    made: dict[str, Any] = {}
    for name, value in call.parameters_with(call.tensors(feed)).items():
        if call.kinds[name] is inspect.Parameter.VAR_KEYWORD:
            made |= {key: spec(each, name, (key,)) for key, each in value.items()}
        else:
            made[name] = spec(value, name, ())
    return made


def dynamic_axes(program: Any) -> dict[str, dict[int, str]]:
    """Return a program's dynamic axes by its own input names, as torch's symbols."""
    found: dict[str, dict[int, str]] = {}
    for node in _user_inputs(program):
        sizes: Any = getattr(node.meta.get("val"), "shape", ())
        for axis, size in enumerate(sizes):
            if not isinstance(size, int):
                found.setdefault(node.name, {})[axis] = str(size)
    return found


def tensor_inputs(program: Any) -> list[str]:
    """Return the names of a program's tensor inputs, in order."""
    torch = importlib.import_module("torch")
    nodes = _user_inputs(program)
    return [node.name for node in nodes if isinstance(node.meta.get("val"), torch.Tensor)]


def _user_inputs(program: Any) -> list[Any]:
    wanted = set(program.graph_signature.user_inputs)
    return [n for n in program.graph.nodes if n.op == "placeholder" and n.name in wanted]


def _require_dynamic(program: Any, call: ModuleCall, axes: Axes, feed: Feed) -> None:
    """Raise ExportFailed if torch.export has fixed one of these axes."""
    own = dict(zip(call.inputs, tensor_inputs(program), strict=False))
    left = dynamic_axes(program)
    fixed = [
        (name, axis, dim)
        for name, dims in axes.items()
        for axis, dim in dims.items()
        if axis not in left.get(own.get(name, name), {})
    ]
    if fixed:
        name, axis, dim = fixed[0]
        size = feed[name].shape[axis]
        reason = (
            f"dimension '{dim}' (axis {axis} of '{name}') is fixed at {size} by the model's code, "
            "or equal to a size that is"
        )
        raise ExportFailed(DYNAMO, reason, dims={dim for _, _, dim in fixed})


def write_program(
    program: Any,
    call: ModuleCall,
    axes: Axes,
    opset: int | None,
    path: Path,
    translations: Translations,
) -> None:
    """Translate an ExportedProgram to ONNX, under our names of inputs, outputs and dimensions."""
    torch = importlib.import_module("torch")
    try:
        with quiet(), torch.no_grad():
            made = torch.onnx.export(
                program,
                dynamo=True,
                input_names=call.inputs,
                output_names=list(call.outputs),
                opset_version=opset,
                custom_translation_table=translations.for_dynamo() or None,
            )
            made.save(path, external_data=True)
    except ToolkitError:
        raise
    except Exception as error:  # the translator raises a dozen unrelated classes
        with quiet():
            listed = unsupported(program, translations)
        raise ExportFailed(DYNAMO, listed or reason_of(error), final=bool(listed)) from error
    proto = onnx.load(path, load_external_data=False)
    _name_dimensions(proto, axes)
    _name_values(proto)
    _drop_folders(proto)
    path.write_bytes(proto.SerializeToString())


def _name_values(proto: onnx.ModelProto) -> None:
    """Prefix names with their modules: `linear_3` becomes `encoder.layer.0/linear_3`.

    Weights that the exporter folded and renamed get the prefix of the only module that uses them.
    """
    outputs = {value.name for value in proto.graph.output}
    names: dict[str, str] = {}
    users: dict[str, set[str]] = {}
    for node in proto.graph.node:
        module = origin_of(node).module
        for name in node.input:
            users.setdefault(name, set()).add(module)
        if module:
            node.name = f"{module}/{node.name}"
            names |= {out: f"{module}/{out}" for out in node.output if out and out not in outputs}
    for tensor in proto.graph.initializer:
        (module, *others) = users.get(tensor.name, {""})
        if module and not others and "." not in tensor.name:
            names[tensor.name] = f"{module}/{tensor.name}"
    rename_values(proto.graph, names)


def _drop_folders(proto: onnx.ModelProto) -> None:
    """Reduce stored stacks to the user's frames, without this machine's folders."""
    libraries = library_folders()
    for entry in (entry for node in proto.graph.node for entry in node.metadata_props):
        if entry.key.endswith("stack_trace"):
            frames = re.split(r'(?m)^(?=\s*File ")', entry.value)
            files = (re.search(r'File "([^"]*)"', frame) for frame in frames)
            own = (
                frame
                for frame, file in zip(frames, files, strict=True)
                if file and not file[1].startswith(libraries)
            )
            entry.value = re.sub(r'File "[^"]*[/\\]', 'File "', "".join(own))


def _name_dimensions(proto: onnx.ModelProto, axes: Axes) -> None:
    """Rename torch's symbols to our dimensions, also within expressions such as `2*s17`."""
    symbols: dict[str, str] = {}
    for value in proto.graph.input:
        for axis, dim in axes.get(value.name, {}).items():
            shape = value.type.tensor_type.shape
            if axis < len(shape.dim) and shape.dim[axis].dim_param:
                symbols.setdefault(shape.dim[axis].dim_param, dim)
    if not symbols:
        return
    pattern = re.compile("|".join(rf"\b{re.escape(symbol)}\b" for symbol in symbols))
    pending = [proto.graph]
    while pending:
        graph = pending.pop()
        for value in (*graph.input, *graph.output, *graph.value_info):
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_param:
                    dim.dim_param = pattern.sub(lambda found: symbols[found[0]], dim.dim_param)
        pending += [a.g for node in graph.node for a in node.attribute if a.HasField("g")]


# TorchScript -------------------------------------------------------------------------------------


def write_torchscript(
    call: ModuleCall,
    feed: Feed,
    axes: Axes,
    output_axes: Axes,
    opset: int | None,
    path: Path,
    translations: Translations,
) -> None:
    """Write `path` by tracing; sizes that the model reads as Python numbers become constants."""
    torch = importlib.import_module("torch")
    low, high = _TORCHSCRIPT_OPSETS
    version = min(max(opset or _TORCHSCRIPT_DEFAULT, low), high)
    module, args = _flattened(call), tuple(call.tensors(feed))
    large = external_weights.is_large(module)
    with (
        quiet(),
        evaluating(call.module),
        torch.no_grad(),
        traceable(),
        translations.for_torchscript(version),
    ):
        try:
            torch.onnx.export(
                module,
                args,
                str(path),
                dynamo=False,
                verbose=False,
                opset_version=version,
                input_names=call.inputs,
                output_names=list(call.outputs),
                dynamic_axes={**axes, **output_axes},
                custom_opsets=translations.opsets() or None,
                export_params=not large,
                do_constant_folding=not large,
                keep_initializers_as_inputs=large,
            )
            move_labels(path, module)
            if large:
                external_weights.attach(path, module)
        except Exception as error:  # the exporter raises a dozen unrelated classes
            listed = unsupported_in_trace(module, args, version)
            raise ExportFailed(TORCHSCRIPT, listed or reason_of(error)) from error


def _flattened(call: ModuleCall) -> Any:
    """Wrap the module to take and return plain tensors: tracing supports nothing else."""
    if call.plain:
        return call.module
    torch = importlib.import_module("torch")

    class Flat(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = call.module
            self.training = False

        def forward(self, *tensors: Any) -> Any:
            args, kwargs = call.arguments_with(tensors)
            found = [tensor for _, tensor in tensors_in(self.model(*args, **kwargs))]
            return found[0] if len(found) == 1 else tuple(found)

    return Flat()


# Silence -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def quiet() -> Generator[None]:
    """Mute torch: its exporters print progress and warn about every traced condition."""
    internals: Any = importlib.import_module("torch")._C
    log = internals._jit_onnx_log  # prints whole graphs, bypassing Python's streams
    internals._jit_onnx_log = print
    try:
        with silence():
            yield
    finally:
        internals._jit_onnx_log = log
