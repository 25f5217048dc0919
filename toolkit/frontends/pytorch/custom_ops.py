# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
"""The user's translations of PyTorch operators, custom or built-in.

A table maps an operator (`"mylib::scale"`, or `torch.ops.mylib.scale.default`) to an onnxscript
function, a callable that emits onnxscript operators, or a `CustomOp`: an operator of a custom
domain with the inputs and attributes of the PyTorch operator's schema. onnxruntime runs it from the
user's library (`--custom-ops`).
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from onnx import defs

from toolkit.errors import UsageError

_TENSORS = ("Tensor", "Tensor?", "Optional[Tensor]")


class _AttributeType(NamedTuple):
    """The Python type, the ONNX type and the TorchScript codes of an attribute."""

    python: Any
    onnx: str
    suffix: str
    """The suffix of the attribute's name in TorchScript."""
    reader: str
    """The code of the value's type in `torch.onnx.symbolic_helper.parse_args`."""


_ATTRIBUTES = {
    "int": _AttributeType(int, "INT", "i", "i"),
    "SymInt": _AttributeType(int, "INT", "i", "i"),
    "bool": _AttributeType(bool, "INT", "i", "b"),
    "float": _AttributeType(float, "FLOAT", "f", "f"),
    "str": _AttributeType(str, "STRING", "s", "s"),
    "List[int]": _AttributeType(list[int], "INTS", "i", "is"),
    "List[float]": _AttributeType(list[float], "FLOATS", "f", "fs"),
}


@dataclass(frozen=True, slots=True)
class CustomOp:
    """An operator of a custom domain.

    The tensors of the PyTorch schema are its inputs, numbers and strings its attributes; the table
    `attributes` renames them.
    """

    domain: str
    name: str
    version: int = 1
    attributes: Mapping[str, str] | None = None

    def renamed(self, name: str) -> str:
        return (self.attributes or {}).get(name, name)


@dataclass(frozen=True, slots=True)
class Translations:
    """The user's table with its operators resolved."""

    table: Mapping[Any, Any]
    """OpOverload to a callable or a CustomOp."""

    def covers(self, target: Any) -> bool:
        return target in self.table

    def for_dynamo(self) -> dict[Any, Any]:
        """Return the `custom_translation_table` of `torch.onnx.export`."""
        return {
            op: _as_function(op, how) if isinstance(how, CustomOp) else how
            for op, how in self.table.items()
        }

    def opsets(self) -> dict[str, int]:
        """Return the versions of the custom domains."""
        return {how.domain: how.version for how in self.table.values() if isinstance(how, CustomOp)}

    @contextlib.contextmanager
    def for_torchscript(self, opset: int) -> Generator[None]:
        """Register the table with the TorchScript exporter for the context."""
        onnx = importlib.import_module("torch.onnx")
        names: list[str] = []
        try:
            for op, how in self.table.items():
                name = op._schema.name
                symbolic = _symbolic(op, how) if isinstance(how, CustomOp) else _traced(how)
                onnx.register_custom_op_symbolic(name, symbolic, opset)
                names.append(name)
            yield
        finally:
            for name in names:
                onnx.unregister_custom_op_symbolic(name, opset)


def translations_of(table: Mapping[Any, Any]) -> Translations:
    """Resolve every operator of a table; raise UsageError for one that is not registered."""
    found: dict[Any, Any] = {}
    for key, how in table.items():
        if not callable(how) and not isinstance(how, CustomOp):
            kind = type(how).__name__
            raise UsageError(f"translation of {key} is a {kind}: give a function or a CustomOp")
        for overload in _overloads(key):
            found[overload] = how
    return Translations(found)


def _overloads(key: Any) -> list[Any]:
    torch = importlib.import_module("torch")
    if isinstance(key, str):
        namespace, _, rest = key.partition("::")
        name, _, overload = rest.partition(".")
        packet = getattr(getattr(torch.ops, namespace, None), name, None) if rest else None
        if packet is None:
            raise UsageError(
                f"translation of '{key}': no such operator; write namespace::name, and import the "
                "module that registers it"
            )
        if overload and not hasattr(packet, overload):
            raise UsageError(f"translation of '{key}': it has no overload '{overload}'")
        return [getattr(packet, overload)] if overload else _overloads(packet)
    if hasattr(key, "overloads"):
        return [getattr(key, each) for each in key.overloads()]
    if hasattr(key, "_schema"):
        return [key]
    if hasattr(key, "_opoverload"):  # the result of torch.library.custom_op
        return [key._opoverload]
    raise UsageError(f"translation of {key!r}: name an operator, as in 'mylib::scale'")


# A CustomOp in each exporter ---------------------------------------------------------------------


def _arguments(op: Any, how: CustomOp) -> list[tuple[str, str]]:
    """Return the schema's arguments with their types; raise UsageError if ONNX lacks a type."""
    found: list[tuple[str, str]] = []
    for argument in op._schema.arguments:
        kind = str(argument.type)
        if kind not in _TENSORS and kind not in _ATTRIBUTES:
            raise UsageError(
                f"{op}: argument '{argument.name}' is a {kind}, which cannot be an input or an "
                f"attribute of {how.domain}::{how.name}: write a translation function"
            )
        found.append((argument.name, kind))
    return found


def declared_schema(op: Any, how: CustomOp) -> Any:
    """Derive the ONNX schema of a CustomOp from the PyTorch operator's schema."""
    schema = defs.OpSchema
    arguments = _arguments(op, how)
    optional = {a.name for a in op._schema.arguments if a.has_default_value()}
    tensors = [(name, kind) for name, kind in arguments if kind in _TENSORS]
    option = schema.FormalParameterOption
    results = [f"result_{index}" for index in range(len(op._schema.returns))]
    every = sorted(defs.get_schema("Identity", 13).type_constraints[0].allowed_type_strs)
    letters = [f"T_{name}" for name in (*(name for name, _ in tensors), *results)]
    return schema(
        how.name,
        how.domain,
        how.version,
        inputs=[
            schema.FormalParameter(
                name,
                f"T_{name}",
                param_option=option.Single if kind == "Tensor" else option.Optional,
            )
            for name, kind in tensors
        ],
        outputs=[schema.FormalParameter(name, f"T_{name}") for name in results],
        type_constraints=[(letter, every, "any tensor") for letter in letters],
        attributes=[
            schema.Attribute(
                how.renamed(name),
                getattr(schema.AttrType, _ATTRIBUTES[kind].onnx),
                required=name not in optional,
            )
            for name, kind in arguments
            if kind not in _TENSORS
        ],
    )


def _as_function(op: Any, how: CustomOp) -> Callable[..., Any]:
    """Return a function whose signature shows dynamo's translator which arguments are inputs."""
    values = importlib.import_module("onnxscript").values
    opset = values.Opset(how.domain, how.version)
    operator = values.Op(opset, how.name, declared_schema(op, how))
    arguments = _arguments(op, how)
    defaults = {a.name: a.default_value for a in op._schema.arguments if a.has_default_value()}

    def translate(*given: Any, **named: Any) -> Any:
        found = {name: value for (name, _), value in zip(arguments, given, strict=False)}
        found |= named
        inputs = [found.get(name) for name, kind in arguments if kind in _TENSORS]
        attributes = {
            how.renamed(name): int(value) if kind == "bool" else value
            for name, kind in arguments
            if kind not in _TENSORS and (value := found.get(name, defaults.get(name))) is not None
        }
        return operator(*inputs, **attributes)

    parameters = [
        inspect.Parameter(
            name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=defaults.get(name, inspect.Parameter.empty),
            annotation=Any if kind in _TENSORS else _ATTRIBUTES[kind].python,
        )
        for name, kind in arguments
    ]
    function = cast("Any", translate)
    function.__signature__ = inspect.Signature(parameters)
    function.__annotations__ = {p.name: p.annotation for p in parameters if p.annotation is not Any}
    function.__name__ = how.name
    return translate


def _symbolic(op: Any, how: CustomOp) -> Callable[..., Any]:
    """Return a symbolic function for the TorchScript exporter."""
    helper = importlib.import_module("torch.onnx.symbolic_helper")
    arguments = _arguments(op, how)
    outputs = len(op._schema.returns)

    def symbolic(g: Any, *values: Any) -> Any:
        inputs: list[Any] = []
        attributes: dict[str, Any] = {}
        for (name, kind), value in zip(arguments, values, strict=False):
            if kind in _TENSORS:
                inputs.append(value)
                continue
            constant = helper._maybe_get_const(value, _ATTRIBUTES[kind].reader)
            if constant is not None:
                key = f"{how.renamed(name)}_{_ATTRIBUTES[kind].suffix}"
                attributes[key] = int(constant) if kind == "bool" else constant
        return g.op(f"{how.domain}::{how.name}", *inputs, **attributes, outputs=outputs)

    return symbolic


def _traced(function: Any) -> Callable[..., Any]:
    """Return a symbolic function for TorchScript: an onnxscript function is wrapped as one."""
    if not hasattr(function, "to_function_proto"):
        return function

    def symbolic(g: Any, *values: Any) -> Any:
        return g.onnxscript_op(function, *values)

    return symbolic
