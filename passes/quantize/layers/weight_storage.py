"""Weights as a model stores them: type checks, shared int8 copies, removal of dead constants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from onnx import TensorProto

from passes.quantize.layers.int8_weights import limit_of, quantize
from toolkit.ir import node as nd
from toolkit.ir.graph import Array, Graph
from toolkit.ir.tensor_type import FLOATS
from toolkit.quantization.plan import Entry
from toolkit.quantization.qparams import QParams, QTensor
from toolkit.rewriting.match_failure import MatchFailure

Quantizer = Callable[[Array, int | None, int, bool], QTensor]
"""Quantizes weights, given the axis of the scales, the largest code, and whether to transpose."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredWeight:
    """An int8 weight: its graph, the name of its codes, and its parameters."""

    graph: Graph
    codes: str
    params: QParams


@dataclass(slots=True, eq=False)
class WeightStore:
    """The int8 weights of a model; a weight with several users is stored once."""

    _weights: dict[tuple[object, ...], StoredWeight] = field(
        default_factory=dict[tuple[object, ...], StoredWeight]
    )
    _constants: dict[tuple[object, ...], str] = field(default_factory=dict[tuple[object, ...], str])

    def weight(
        self,
        g: Graph,
        name: str,
        entry: Entry,
        axis: int | None,
        transpose: bool = False,
        quantizer: Quantizer = quantize,
    ) -> StoredWeight:
        """Quantize the weight `name` with scales along `axis`. Raises Unfit."""
        scope, floats = g.scope_of(name), g.const(name)
        assert scope is not None, name
        assert floats is not None, name
        key = id(scope), name, axis, entry.reduce_range, transpose
        if key not in self._weights:
            found = quantizer(floats, axis, limit_of(entry.reduce_range), transpose)
            codes = scope.constant(found.codes, f"{name}_int8")
            self._weights[key] = StoredWeight(scope, codes, found.params)
        return self._weights[key]

    def scale(self, weight: StoredWeight, scale: Array | None = None) -> str:
        """Return the name of a weight's scales, or of `scale` in their place."""
        return self._constant(weight, weight.params.scale if scale is None else scale, "scale")

    def zero_point(self, weight: StoredWeight) -> str:
        """Return the name of a weight's zero points."""
        return self._constant(weight, weight.params.zero_point, "zero")

    def _constant(self, weight: StoredWeight, array: Array, what: str) -> str:
        key = weight.codes, what, array.shape, array.tobytes()
        if key not in self._constants:
            self._constants[key] = weight.graph.constant(array, f"{weight.codes}_{what}")
        return self._constants[key]


def float_weights(g: Graph, name: str, rank: int, what: str) -> tuple[int, ...] | None:
    """Return the shape of constant float32 weights, None if they are computed or quantized.

    Raise MatchFailure for other floats, for other ranks unless `rank` is 0, and for empty weights.
    """
    tensor = g.tensor(name) if name else None
    if tensor is None or tensor.data_type not in FLOATS:
        return None
    require_float32(tensor)
    if rank and len(tensor.dims) != rank:
        raise MatchFailure(f"weights that are no {what}")
    if not all(tensor.dims):
        raise MatchFailure("no weights at all")
    return tuple(tensor.dims)


def require_float32(tensor: TensorProto) -> None:
    """Raise MatchFailure for weights of any other type."""
    if tensor.data_type != TensorProto.FLOAT:
        kind = TensorProto.DataType.Name(tensor.data_type).lower()
        remedy = "; run the pass fp32 first" if kind.endswith("float16") else ""
        raise MatchFailure(f"weights of {kind}, and only 32-bit floats are quantized{remedy}")


def drop_unused(g: Graph, name: str) -> None:
    """Remove an unused constant, and the DequantizeLinear that produced it.

    Graph inputs and pinned tensors stay.
    """
    scope = g.scope_of(name)
    if scope is None or not scope.is_unused(name):
        return
    producer = scope.producer(name)
    operands = nd.inputs_of(producer) if producer is not None else []
    if producer is not None:
        scope.prune(producer)
    for stored in (name, *operands):
        unused = stored in scope.initializers and scope.is_unused(stored)
        if unused and not scope.is_pinned(stored) and not scope.is_input(stored):
            scope.drop_initializer(stored)
