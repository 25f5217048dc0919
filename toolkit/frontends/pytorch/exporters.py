# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
"""torch's two exporters: dynamo (torch.export, then a translation) and TorchScript (tracing).

Each writes one .onnx file at the sizes of the feed that it is given, with `axes` left open, and
raises ExportFailed with what the exporter had to say in a line.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import logging
import re
import warnings
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
    exporters_homes,
    reason_of,
    unsupported,
    unsupported_in_trace,
)
from toolkit.frontends.pytorch.tracing import capturable, move_labels, traceable
from toolkit.frontends.request import Axes
from toolkit.frontends.signature import rename_values

DYNAMO, TORCHSCRIPT = "dynamo", "torchscript"
_TORCHSCRIPT_OPSETS = (7, 20)
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
    """The ExportedProgram of a call, with the axes left open."""
    torch = importlib.import_module("torch")
    args, kwargs = call.arranged(call.tensors(feed))
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
        _require_open(program, call, axes, feed)
        return program
    raise ExportFailed(DYNAMO, reason_of(errors[0])) from errors[0]


def _dynamic_shapes(call: ModuleCall, feed: Feed, axes: Axes) -> dict[str, Any]:
    """What torch.export is told of every argument: which axes may change."""
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
    for name, value in call.placed(call.tensors(feed)).items():
        if call.kinds[name] is inspect.Parameter.VAR_KEYWORD:
            made |= {key: spec(each, name, (key,)) for key, each in value.items()}
        else:
            made[name] = spec(value, name, ())
    return made


def open_axes(program: Any) -> dict[str, dict[int, str]]:
    """The axes that a program leaves open, by its own input names, as torch's symbols."""
    found: dict[str, dict[int, str]] = {}
    wanted = set(program.graph_signature.user_inputs)
    for node in program.graph.nodes:
        if node.op != "placeholder" or node.name not in wanted:
            continue
        sizes: Any = getattr(node.meta.get("val"), "shape", ())
        for axis, size in enumerate(sizes):
            if not isinstance(size, int):
                found.setdefault(node.name, {})[axis] = str(size)
    return found


def tensor_inputs(program: Any) -> list[str]:
    """The names of a program's tensor inputs, in order."""
    torch = importlib.import_module("torch")
    wanted = set(program.graph_signature.user_inputs)
    nodes = [n for n in program.graph.nodes if n.op == "placeholder" and n.name in wanted]
    return [node.name for node in nodes if isinstance(node.meta.get("val"), torch.Tensor)]


def _require_open(program: Any, call: ModuleCall, axes: Axes, feed: Feed) -> None:
    """Raise when torch.export has fixed a size that was to stay open."""
    own = dict(zip(call.inputs, tensor_inputs(program), strict=False))
    left = open_axes(program)
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
            f"dimension '{dim}' (axis {axis} of '{name}') is fixed at {size} by the model's own "
            "code, or tied to a fixed size"
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
    """Translate an ExportedProgram to ONNX, with our names of inputs, outputs and dimensions."""
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
    """Names that lead back to modules: `linear_3` becomes `encoder.layer.0/linear_3`.

    So do weights that the exporter has folded, and named anew, if one module alone reads them.
    """
    outputs = {value.name for value in proto.graph.output}
    names: dict[str, str] = {}
    readers: dict[str, set[str]] = {}
    for node in proto.graph.node:
        module = origin_of(node).module
        for name in node.input:
            readers.setdefault(name, set()).add(module)
        if module:
            node.name = f"{module}/{node.name}"
            names |= {out: f"{module}/{out}" for out in node.output if out and out not in outputs}
    for tensor in proto.graph.initializer:
        (module, *others) = readers.get(tensor.name, {""})
        if module and not others and "." not in tensor.name:
            names[tensor.name] = f"{module}/{tensor.name}"
    rename_values(proto.graph, names)


def _drop_folders(proto: onnx.ModelProto) -> None:
    """Leave the model's own files and lines in the stacks that torch stores.

    Not where they are on this machine; nor torch's lines and ours, which are on every way.
    """
    for node in proto.graph.node:
        for entry in node.metadata_props:
            if entry.key.endswith("stack_trace"):
                entry.value = re.sub(r'File "[^"]*[/\\]', 'File "', _own_frames(entry.value))


def _own_frames(trace: str) -> str:
    frames = re.split(r'(?m)^(?=\s*File ")', trace)
    files = [re.search(r'File "([^"]*)"', frame) for frame in frames]
    homes = exporters_homes()
    own = (
        frame for frame, at in zip(frames, files, strict=True) if at and not at[1].startswith(homes)
    )
    return "".join(own)


def _name_dimensions(proto: onnx.ModelProto, axes: Axes) -> None:
    """Put our names in place of torch's symbols, also inside of expressions as `2*s17`."""
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
    """Write `path` by tracing; a size that the trace read as a number is baked in."""
    torch = importlib.import_module("torch")
    low, high = _TORCHSCRIPT_OPSETS
    version = min(max(opset or _TORCHSCRIPT_DEFAULT, low), high)
    module, args = _flat(call, feed)
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


def _flat(call: ModuleCall, feed: Feed) -> tuple[Any, tuple[Any, ...]]:
    """The module as one of plain tensors: tracing takes no other arguments, and no dataclasses."""
    tensors = call.tensors(feed)
    return (call.module if call.plain else _flat_class()(call)), tuple(tensors)


def _flat_class() -> Any:
    """A module class, made where torch is: a subclass cannot be written without it."""
    torch = importlib.import_module("torch")

    class Flat(torch.nn.Module):
        def __init__(self, call: ModuleCall) -> None:
            super().__init__()
            self.model = call.module
            self._call = call
            self.training = False

        def forward(self, *tensors: Any) -> Any:
            args, kwargs = self._call.arranged(tensors)
            found = [tensor for _, tensor in tensors_in(self.model(*args, **kwargs))]
            return found[0] if len(found) == 1 else tuple(found)

    return Flat


# Silence -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def quiet() -> Generator[None]:
    """Exporters print progress and warn about every traced condition: the proof says more."""
    internals: Any = importlib.import_module("torch")._C
    log = internals._jit_onnx_log  # prints whole graphs, past Python's streams
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    sink = io.StringIO()
    try:
        internals._jit_onnx_log = print  # into the sink
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(sink),
            contextlib.redirect_stderr(sink),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        internals._jit_onnx_log = log
        logging.disable(before)
