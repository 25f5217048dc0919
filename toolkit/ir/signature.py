"""The interface of a model: names, types and shapes of inputs and outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from onnx import TypeProto, ValueInfoProto

from toolkit.ir.model import Model
from toolkit.ir.tensor_type import dtype_name, from_proto
from toolkit.symbolic import Expr


@dataclass(frozen=True, slots=True)
class Interface:
    """The declared inputs and outputs of a model, in order."""

    inputs: tuple[ValueInfoProto, ...]
    outputs: tuple[ValueInfoProto, ...]
    feeds_only: bool
    """Whether to ignore inputs with an initializer: before IR 4, every initializer has an input."""

    @classmethod
    def of(cls, model: Model) -> Interface:
        """Return the interface of a model."""
        feeds_only = model.ir_version < 4
        inputs = tuple(map(_copy, model.graph.interface_inputs(feeds_only)))
        return cls(inputs, tuple(map(_copy, model.graph.interface_outputs())), feeds_only)

    def broken_by(self, model: Model) -> str:
        """Return the first difference of `model` in one line, or an empty string."""
        inputs = model.graph.interface_inputs(self.feeds_only)
        outputs = model.graph.interface_outputs()
        for kind, old, new in (("input", self.inputs, inputs), ("output", self.outputs, outputs)):
            if [v.name for v in old] != [v.name for v in new]:
                return f"the {kind}s are {_names(new)} instead of {_names(old)}"
            for before, after in zip(old, new, strict=True):
                problem = type_change(before.type, after.type, may_narrow=kind == "output")
                if problem:
                    return f"{kind} '{before.name}' {problem}"
        return ""


def type_change(old: TypeProto, new: TypeProto, may_narrow: bool) -> str:
    """Return how a type has changed; `may_narrow` allows a dynamic dimension to become fixed."""
    kinds = old.WhichOneof("value"), new.WhichOneof("value")
    if kinds[0] != kinds[1]:
        return "is no longer of the same kind (tensor, sequence, ...)"
    before, after = from_proto(old), from_proto(new)
    if before is None or after is None:
        return ""
    if before.dtype and after.dtype != before.dtype:
        return "has another element type"
    if before.shape is None or after.shape is None:
        return ""
    if len(before.shape) != len(after.shape):
        return f"has rank {len(after.shape)} instead of {len(before.shape)}"
    for a, b in zip(before.shape, after.shape, strict=True):
        if isinstance(a, int) and isinstance(b, int) and a != b:
            return f"has a dimension of {b} instead of {a}"
        if isinstance(a, Expr) and isinstance(b, int) and not may_narrow:
            return f"has a dimension fixed at {b}, which was dynamic"
    return ""


def describe_value(model: Model, name: str) -> dict[str, Any]:
    """Return the name, type and shape of a value; type None if it is not a tensor."""
    declared = model.graph.type(name)
    if declared is None:
        return {"name": name, "type": None, "shape": None}
    shape = None
    if declared.shape is not None:
        shape = [size if isinstance(size, int) else str(size) for size in declared.shape]
    return {"name": name, "type": dtype_name(declared.dtype), "shape": shape}


def _copy(value: ValueInfoProto) -> ValueInfoProto:
    copy = ValueInfoProto()
    copy.CopyFrom(value)
    return copy


def _names(values: Sequence[ValueInfoProto]) -> str:
    return ", ".join(value.name for value in values) or "none"
