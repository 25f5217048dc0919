"""The intermediate representation: an indexed, journaled graph on the ONNX protobuf.

Passes import its main types from here. They load on first use: modules that this package imports
import parts of it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolkit.ir.graph import Array, Graph
    from toolkit.ir.model import Model
    from toolkit.ir.tensor_type import FLOATS, Shape, TensorType, from_proto, to_proto

__all__ = ["FLOATS", "Array", "Graph", "Model", "Shape", "TensorType", "from_proto", "to_proto"]

_HOMES = {
    "toolkit.ir.graph": ("Array", "Graph"),
    "toolkit.ir.model": ("Model",),
    "toolkit.ir.tensor_type": ("FLOATS", "Shape", "TensorType", "from_proto", "to_proto"),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            value = globals()[name] = getattr(import_module(home), name)
            return value
    raise AttributeError(f"module 'toolkit.ir' has no attribute '{name}'")
