"""Specialize a model before the passes run: fix dimensions, freeze inputs.

    specialize(model, fix={"batch": 1, "image:2": 320}, freeze={"sr": 16000})

A fixed dimension becomes a number in the declared types of all graphs, wherever its symbol occurs.
A frozen input becomes an initializer and leaves the interface; if its shape has symbols, the value
fixes them too. Passes fold the consequences.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, TensorProto, TypeProto, ValueInfoProto

from toolkit.calibrate.readers.fit import convert
from toolkit.errors import ModelError, RuntimeRefused, UsageError
from toolkit.feeds.user_samples import describe, require_shape
from toolkit.ir import node as nd
from toolkit.ir.model import Model
from toolkit.ir.tensor_type import TensorType, from_proto
from toolkit.messages import suggestion
from toolkit.symbolic import Dim, Expr, substitute, symbol
from toolkit.verification.reference import Reference
from toolkit.verification.structure import check_output, strictest_level

if TYPE_CHECKING:
    from toolkit.settings import Settings
    from toolkit.verification.validator import Validator

Array = NDArray[Any]

_LARGEST_SIZE = 2**63 - 1
"""The largest size of a dimension in the protobuf."""
_MOST_SHOWN = 4
"""Reports show frozen values of up to this many elements."""


def specialize(model: Model, fix: Mapping[str, Any], freeze: Mapping[str, Any]) -> str:
    """Specialize `model` in place; return the choices in words: `batch=1, sr=16000`.

    The keys of `fix` are dimension names, or `input:axis`; the values of `freeze` are arrays,
    numbers, lists or their text. Raises UsageError if the model does not allow a choice.
    """
    resolved = _Resolved(model)
    for name in freeze:
        resolved.require_input(name, "freeze")
    for name, size in fix.items():
        resolved.fix(name, _size(name, size), freeze)
    for name, value in freeze.items():
        resolved.freeze(name, value)
    proto = model.to_proto()
    resolved.apply(proto)
    chosen = ", ".join(
        [*(f"{name}={size}" for name, size in fix.items()), *resolved.frozen_texts()]
    )
    model.replace(proto)
    model.frozen = resolved.frozen
    model.commit()
    return chosen


def specialized(model: Model, fix: Mapping[str, Any], freeze: Mapping[str, Any]) -> Model:
    """Return a specialized copy, or the model itself without choices."""
    if not (fix or freeze):
        return model
    copy = model.copy()
    specialize(copy, fix, freeze)
    return copy


def require_valid(model: Model, chosen: str, original: Model) -> None:
    """Raise UsageError if the choices make a valid model invalid.

    Branches that are never taken may be invalid: remove them first.
    """
    try:
        check_output(model, strictest_level(original))
    except ModelError as error:
        raise UsageError(f"the model is not valid with {chosen}: {error}") from error


def require_runs(validator: Validator, chosen: str, original: Model, settings: Settings) -> None:
    """Raise UsageError if the original runs, but its specialization does not."""
    if len(validator.feeds) or not validator.feeds.refusal:
        return
    try:
        free = Reference.of(original, seed=settings.seed, custom_ops=settings.custom_ops)
    except RuntimeRefused:
        return
    if len(free.feeds):
        hint = "if it does on real inputs, give them as a sample"
        raise UsageError(
            f"the model does not run with {chosen} ({hint}): {validator.feeds.refusal}"
        )


def narrow_outputs(model: Model) -> None:
    """Declare the sizes of outputs that passes have inferred from the choices."""
    outputs: list[ValueInfoProto] = []
    for value in model.graph.interface_outputs():
        narrowed = ValueInfoProto()
        narrowed.CopyFrom(value)
        shape = model.graph.shape(value.name) or ()
        for declared, size in zip(narrowed.type.tensor_type.shape.dim, shape, strict=False):
            if isinstance(size, int):
                declared.dim_value = size
        outputs.append(narrowed)
    model.graph.set_interface(outputs=outputs)
    model.commit()


@dataclass(slots=True)
class _Resolved:
    """The choices in terms of the model: sizes of symbols and nameless axes, arrays of inputs."""

    model: Model
    types: dict[str, TensorType | None] = field(init=False)
    """The types of the inputs, without those that are weights by their IR version."""
    sizes: dict[str, int] = field(default_factory=dict[str, int])
    axes: dict[tuple[str, int], int] = field(default_factory=dict[tuple[str, int], int])
    frozen: dict[str, Array] = field(default_factory=dict[str, "Array"])

    def __post_init__(self) -> None:
        inputs = self.model.graph.interface_inputs(feeds_only=self.model.ir_version < 4)
        self.types = {value.name: from_proto(value.type) for value in inputs}

    # -- fix

    def fix(self, name: str, size: int, freeze: Mapping[str, Any]) -> None:
        """Fix a dimension by its name, or as `input:axis`."""
        if name in self._symbols():
            self._set(self.sizes, name, size, name)
            return
        value, colon, text = name.rpartition(":")
        if not colon:
            raise UsageError(self._unknown("fix", "dimension", name, sorted(self._symbols())))
        self.require_input(value, f"fix {name}")
        if value in freeze:
            raise UsageError(f"fix {name}={size}: '{value}' is frozen, which fixes its shape")
        axis, dim = self._axis(name, value, text)
        if isinstance(dim, int):
            if dim != size:
                raise UsageError(f"fix {name}={size}: this dimension is {dim} in the model")
        elif dim.anonymous:
            self._set(self.axes, (value, axis), size, name)
        elif (known := _symbol_name(dim)) is not None:
            self._set(self.sizes, known, size, known)
        else:
            listed = ", ".join(sorted(dim.symbols))
            raise UsageError(f"fix {name}={size}: this dimension is {dim}; fix {listed} instead")

    def _symbols(self) -> set[str]:
        dims = [dim for type_ in self.types.values() if type_ for dim in type_.shape or ()]
        return {name for dim in dims if isinstance(dim, Expr) for name in dim.symbols}

    def _axis(self, name: str, value: str, text: str) -> tuple[int, Dim]:
        declared = self.types[value]
        shape = declared.shape if declared is not None else None
        if shape is None:
            raise UsageError(f"fix {name}: input '{value}' declares no shape")
        try:
            axis = int(text)
            return axis % len(shape), shape[axis]
        except ValueError as error:
            raise UsageError(f"fix {name}: '{text}' is not an axis: write a number") from error
        except (IndexError, ZeroDivisionError) as error:
            raise UsageError(f"fix {name}: '{value}' is {describe(declared)}") from error

    def _set(self, table: dict[Any, int], key: Any, size: int, name: str) -> None:
        known = table.setdefault(key, size)
        if known != size:
            raise UsageError(f"fix: dimension '{name}' is given two sizes, {known} and {size}")

    # -- freeze

    def require_input(self, name: str, what: str) -> None:
        """Raise UsageError unless the model has an input of this name."""
        if name not in self.types:
            raise UsageError(self._unknown(what, "input", name, list(self.types)))

    def freeze(self, name: str, value: Any) -> None:
        """Convert the value to the type of the input, and fix the symbols in its shape."""
        declared = self.types[name]
        where = f"freeze: the value of '{name}'"
        if declared is None:
            raise UsageError(f"freeze: input '{name}' is not a tensor")
        array = _array(value, declared, where)
        shape = declared.shape
        if shape is not None:
            shape = tuple(substitute(dim, self.sizes) for dim in shape)
            declared = TensorType(declared.dtype, shape)
            if array.size == 1 and all(dim == 1 for dim in shape):
                array = array.reshape((1,) * len(shape))
            require_shape(array.shape, declared, where)
            for dim, size in zip(shape, array.shape, strict=True):
                known = _symbol_name(dim)
                if known is not None:
                    self.sizes[known] = size
        converted = convert(array, declared, where)
        if converted.dtype.kind == "f" and np.isinf(converted).sum() != np.isinf(array).sum():
            raise UsageError(f"{where} exceeds the range of {converted.dtype}")
        self.frozen[name] = converted

    def frozen_texts(self) -> Iterator[str]:
        """Yield the frozen inputs with their values, or with the types of large ones."""
        for name, array in self.frozen.items():
            large = f"{array.dtype}{list(array.shape)}"
            yield f"{name}={array.tolist() if array.size <= _MOST_SHOWN else large}"

    def _unknown(self, what: str, kind: str, name: str, known: list[str]) -> str:
        listed = ", ".join(f"{value} {describe(type_)}" for value, type_ in self.types.items())
        hint = suggestion(name, known) or ";"
        return f"{what}: the model has no {kind} '{name}'{hint} its inputs are {listed or 'none'}"

    # -- the edit

    def apply(self, proto: ModelProto) -> None:
        """Rewrite the declared types, and turn the frozen inputs into initializers."""
        graph = proto.graph
        for value in graph.input:
            for (name, axis), size in self.axes.items():
                if value.name == name:
                    value.type.tensor_type.shape.dim[axis].dim_value = size
        if self.sizes:
            _substitute(graph, self.sizes)
        stored = {tensor.name: tensor for tensor in graph.initializer}
        for name, array in self.frozen.items():
            tensor = stored.get(name)
            tensor = graph.initializer.add() if tensor is None else tensor
            tensor.CopyFrom(self.model.weights.put(name, array))
        if proto.ir_version >= 4:  # before, initializers have to be inputs
            kept = [value for value in graph.input if value.name not in self.frozen]
            del graph.input[:]
            graph.input.extend(kept)


def _substitute(graph: GraphProto, sizes: Mapping[str, int]) -> None:
    """Replace symbols in the declared types of a graph and its subgraphs."""
    for value in (*graph.input, *graph.output, *graph.value_info):
        for kind in _tensor_types(value.type):
            known = from_proto(kind)
            dims = kind.tensor_type.shape.dim
            for declared, dim in zip(dims, known.shape or () if known else (), strict=False):
                if not isinstance(dim, Expr) or dim.symbols.isdisjoint(sizes):
                    continue
                size = substitute(dim, sizes)
                if isinstance(size, Expr):
                    declared.dim_param = size.text
                elif size < 0:
                    raise UsageError(f"fix: dimension '{dim}' of '{value.name}' would be {size}")
                else:
                    declared.dim_value = size
    for node in graph.node:
        for inner in nd.graphs_of(node):
            _substitute(inner, sizes)


def _tensor_types(kind: TypeProto) -> Iterator[TypeProto]:
    """Yield the tensor types in a tensor, a sequence or an optional."""
    match kind.WhichOneof("value"):
        case "tensor_type":
            yield kind
        case "sequence_type":
            yield from _tensor_types(kind.sequence_type.elem_type)
        case "optional_type":
            yield from _tensor_types(kind.optional_type.elem_type)
        case _:
            return


def _symbol_name(dim: Dim) -> str | None:
    """Return the name of a dimension that is a single symbol."""
    if isinstance(dim, int) or len(dim.symbols) != 1:
        return None
    [name] = dim.symbols
    return name if dim == symbol(name) else None


def _size(name: str, size: Any) -> int:
    try:
        number = int(size) if isinstance(size, str) else operator.index(size)
    except (TypeError, ValueError):
        number = 0
    if not 1 <= number <= _LARGEST_SIZE or isinstance(size, bool):
        raise UsageError(f"fix {name}={size}: a size is an integer, 1 or more")
    return number


def _array(value: Any, declared: TensorType, where: str) -> Array:
    """Return the array of a value, which may be text: `16000`, `[1, 2]`, `1,2`, `true`."""
    text = value if isinstance(value, str) else ""
    strings = declared.dtype == TensorProto.STRING
    if text.startswith("[") or (text and not strings):
        bare_list = "," in text and not text.startswith("[")
        try:
            value = json.loads(f"[{text}]" if bare_list else text)
        except (ValueError, RecursionError) as error:
            raise UsageError(
                f"{where} is '{text[:60]}'; the model takes {describe(declared)}"
            ) from error
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise UsageError(f"{where} is not an array: {error}") from error
    texts = strings and all(isinstance(item, (str, bytes)) for item in array.reshape(-1).tolist())
    if not texts and array.dtype.kind not in ("" if strings else "iubfV"):
        raise UsageError(f"{where} is {value!r}; the model takes {describe(declared)}")
    return array
