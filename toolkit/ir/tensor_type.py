"""The type of a value: element type and symbolic shape."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
from onnx import TensorProto, TypeProto, helper

from toolkit.symbolic import Dim, Expr, parse, symbol, unknown

Shape = tuple[Dim, ...]

FLOATS = frozenset(
    (TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.FLOAT, TensorProto.DOUBLE)
)
"""The element types that models compute in."""

FLOATS_OF_8_BITS = frozenset(
    (
        *(TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT8E4M3FNUZ),
        *(TensorProto.FLOAT8E5M2, TensorProto.FLOAT8E5M2FNUZ),
    )
)
"""The 8-bit element types of quantized weights and activations."""

_NAMELESS = re.compile(r"\W*|-?\d+|none|unk|unknown|any|dynamic", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class TensorType:
    """A tensor's element type (TensorProto enum, 0 = unknown) and shape (None = unknown rank)."""

    dtype: int
    shape: Shape | None

    @property
    def rank(self) -> int | None:
        return None if self.shape is None else len(self.shape)

    @property
    def static(self) -> tuple[int, ...] | None:
        """The shape if every dimension is a number, else None."""
        if self.shape is None:
            return None
        sizes = tuple(d for d in self.shape if isinstance(d, int))
        return sizes if len(sizes) == len(self.shape) else None


def is_nameless(text: str) -> bool:
    """Return whether a dim_param is an exporter's placeholder for an unknown size ("?", "None").

    Two dimensions with the same placeholder may differ.
    """
    return _NAMELESS.fullmatch(text) is not None


@cache
def dtype_name(dtype: int) -> str:
    """Return the name of an element type: `float32` for TensorProto.FLOAT."""
    if dtype == TensorProto.STRING:
        return "string"
    return str(np.dtype(helper.tensor_dtype_to_np_dtype(dtype))) if dtype else "unknown"


def from_proto(proto: TypeProto) -> TensorType | None:
    """Return the tensor type in `proto`; None for sequences, maps, optionals, sparse tensors."""
    if proto.WhichOneof("value") != "tensor_type":
        return None
    tensor = proto.tensor_type
    if not tensor.HasField("shape"):
        return TensorType(tensor.elem_type, None)
    dims: list[Dim] = []
    for dim in tensor.shape.dim:
        kind = dim.WhichOneof("value")
        if kind == "dim_value" and dim.dim_value >= 0:
            dims.append(dim.dim_value)
        elif kind == "dim_param" and not is_nameless(dim.dim_param):
            dims.append(_named(dim.dim_param))
        else:
            dims.append(unknown(nonneg=True))
    return TensorType(tensor.elem_type, tuple(dims))


def _named(text: str) -> Expr:
    parsed = parse(text)
    return parsed if isinstance(parsed, Expr) else symbol(text)  # a number in a dim_param is a name


def to_proto(
    type_: TensorType,
    proto: TypeProto | None = None,
    spell: Callable[[Expr], str] = lambda size: "" if size.anonymous else size.text,
) -> TypeProto:
    """Write `type_` as a TypeProto; `spell` names its dynamic sizes, by default all named ones."""
    proto = proto if proto is not None else TypeProto()
    tensor = proto.tensor_type
    tensor.elem_type = type_.dtype
    if type_.shape is not None:
        tensor.shape.SetInParent()
        for size in type_.shape:
            dim = tensor.shape.dim.add()
            if isinstance(size, Expr):
                name = spell(size)
                if name:
                    dim.dim_param = name
            else:
                dim.dim_value = size
    return proto
