"""Write layers with weights quantized by blocks; they compute in float.

For onnxruntime, one operator:

    y = MatMulNBits(x, codes, s, z, b)         without z if blocks are symmetric

for other targets a standard operator in front of the layer:

    W = DequantizeLinear(q, s, z)              int4 or int8, block_size along the inputs (opset 21)

Tables dequantize only the gathered rows. A table shares the codes of a tied MatMulNBits projection;
in the standard form both use int8 with a scale per row, since no standard operator gathers int4.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
from onnx import NodeProto, TensorProto, helper

from passes.analysis.operands import int_vector, unsqueeze
from passes.quantize.layers.layers import Linear, Table, WeightMatrix
from passes.quantize.layers.weight_storage import drop_unused
from passes.quantize.schemes.dynamic.int8_writer import (
    DynamicWriter,
    as_vector,
    bias_behind,
    bias_of,
    put,
)
from passes.quantize.schemes.weight_only.blocks import Bits, Grid
from passes.quantize.schemes.weight_only.packing import AsStored, Blob, pack
from passes.quantize.schemes.weight_only.streaming import (
    Coded,
    CodeSink,
    Compensated,
    Method,
    quantize_blocks,
)
from toolkit.ir import node as nd
from toolkit.ir.graph import Array, Graph
from toolkit.quantization.plan import Entry

Form: TypeAlias = Literal["nbits", "qdq"]

Known: TypeAlias = dict[tuple[object, ...], Coded]
"""Codes by weight and parameters, shared by all candidates of one model."""

_BITS: dict[str, Bits] = {"int4": 4, "int8": 8}


@dataclass(frozen=True, slots=True, eq=False)
class _BlockCodes:
    """A quantized weight: name of its codes, scales [outputs, blocks], name of zero points."""

    codes: str
    scale: Array
    zero: str


@dataclass(slots=True, eq=False)
class BlockWriter:
    """Writes layers; a weight with several users is quantized and stored once.

    Methods choose the codes that are not `known`.
    """

    form: Form
    accuracy_level: int
    known: Known = field(default_factory=dict[tuple[object, ...], Coded])
    _rows: DynamicWriter = field(default_factory=DynamicWriter)
    _stored: dict[tuple[object, ...], _BlockCodes] = field(
        default_factory=dict[tuple[object, ...], _BlockCodes]
    )
    _scales: dict[tuple[str, float], str] = field(default_factory=dict[tuple[str, float], str])
    _dequantized: dict[tuple[object, ...], str] = field(
        default_factory=dict[tuple[object, ...], str]
    )

    def linear(self, g: Graph, layer: Linear, entry: Entry, method: Method | None) -> None:
        """Write a linear layer. Raises Unfit for weights that cannot be quantized."""
        if not g.begin("quantize-weights", layer.node):
            return
        if entry.block_size is None:
            self._dequantize(g, layer, self._by_rows(layer.weight, entry))
        elif self.form == "nbits":
            self._nbits(g, layer, entry, method)
        else:
            self._dequantize(g, layer, self._by_blocks(layer.weight, entry, method))
        drop_unused(layer.weight.graph, layer.weight.name)

    def table(self, g: Graph, layer: Table, entry: Entry, method: Method | None) -> None:
        """Write a table. Raises Unfit for one that cannot be quantized."""
        if entry.block_size is None:
            self._rows.table(g, layer, entry)
            return
        node, weight = layer.node, layer.weight
        if not g.begin("quantize-table", node):
            return
        found = self._blob(weight, True, entry, method)
        scale = self._scale(weight.graph, found)
        codes = g.op("Gather", found.codes, layer.indices, at=node)
        steps = g.op("Gather", scale, layer.indices, at=node)
        bits = _BITS[entry.weight]
        if bits == 4:
            codes = _unpacked(g, codes, node)
        exact = g.op("Cast", codes, at=node, to=TensorProto.FLOAT)
        middle = g.constant(np.array(1 << (bits - 1), np.float32), "zero")
        steps = unsqueeze(g, steps, [-1] if bits == 8 else [-2, -1], node)
        values = g.op("Mul", g.op("Sub", exact, middle, at=node), steps, at=node)
        width = found.scale.shape[1] * entry.block_size
        sizes = g.op("Shape", layer.indices, at=node)
        shape = g.op("Concat", sizes, int_vector(g, [width]), at=node, axis=0)
        result = g.op("Reshape", values, shape, at=node)
        if width != weight.shape[1]:
            ends = [int_vector(g, [n]) for n in (0, weight.shape[1], -1)]
            result = g.op("Slice", result, *ends, at=node)
        put(g, node, result)
        drop_unused(weight.graph, weight.name)

    def knows(self, layer: Linear | Table, entry: Entry) -> bool:
        """Whether the codes of a layer are known already."""
        turned = isinstance(layer, Table) or layer.weight.turned
        return self._chosen_as(layer.weight, turned, entry) in self.known

    def _chosen_as(self, weight: WeightMatrix, turned: bool, entry: Entry) -> tuple[object, ...]:
        how = (entry.weight, entry.block_size, entry.symmetric, entry.method)
        return (self.form, weight.name, turned, *how)

    def _coded(
        self,
        weight: WeightMatrix,
        turned: bool,
        entry: Entry,
        grid: Grid,
        method: Method | None,
        sink: CodeSink,
    ) -> Coded:
        """Return the known codes, or those that the method writes to `sink`."""
        key = self._chosen_as(weight, turned, entry)
        if key in self.known:
            return self.known[key]
        floats = weight.graph.const(weight.name)
        assert floats is not None, weight.name
        assert entry.block_size is not None, entry.label
        assert method is not None, entry.label
        scales = quantize_blocks(floats, turned, entry.block_size, grid, method, sink)
        made = Coded(sink.done(), scales)
        # The replacement of gptq is noted each time; and two subgraphs may use one name.
        as_asked = entry.method != "gptq" or isinstance(method, Compensated)
        if as_asked and weight.graph.parent is None:
            self.known[key] = made
        return made

    # -- MatMulNBits

    def _nbits(self, g: Graph, layer: Linear, entry: Entry, method: Method | None) -> None:
        node, weight = layer.node, layer.weight
        found = self._blob(weight, weight.turned, entry, method)
        inputs = [layer.x, found.codes, self._scale(weight.graph, found, layer.alpha)]
        bias = ""
        if layer.bias:
            bias = bias_of(g, layer)
            vector = g.const(bias)
            if vector is not None and vector.shape == (layer.outputs,):
                inputs, bias = _with_bias(inputs, found.zero, bias), ""
            elif found.zero:
                inputs.append(found.zero)
        elif found.zero:
            inputs.append(found.zero)
        attributes = {
            "K": weight.shape[1 if weight.turned else 0],
            "N": layer.outputs,
            "bits": _BITS[entry.weight],
            "block_size": entry.block_size,
            "accuracy_level": self.accuracy_level or None,
        }
        made = g.add("MatMulNBits", inputs, 1, attributes, domain="com.microsoft", at=node)
        result = made.output[0]
        if bias:
            result = g.op("Add", result, bias, at=node)
        result = put(g, node, result)
        if not layer.bias:
            _take_bias(g, made, result, layer.outputs)

    def _scale(self, g: Graph, found: _BlockCodes, factor: float = 1.0) -> str:
        """Return the name of a weight's scales, multiplied by the layer's factor."""
        key = found.codes, factor
        if key not in self._scales:
            numbers = found.scale if factor == 1 else found.scale * np.float32(factor)
            self._scales[key] = g.constant(numbers, f"{found.codes}_scale")
        return self._scales[key]

    def _blob(
        self, weight: WeightMatrix, turned: bool, entry: Entry, method: Method | None
    ) -> _BlockCodes:
        """Store a weight for MatMulNBits; outputs are the rows of a `turned` one."""
        block, grid = entry.block_size, Grid(_BITS[entry.weight], entry.symmetric)
        assert block is not None
        key = ("nbits", *weight.key, turned, block, grid)
        if key not in self._stored:
            inputs, outputs = weight.shape[::-1] if turned else weight.shape
            sink = Blob(outputs, -(-inputs // block), block, grid.bits)
            found = self._coded(weight, turned, entry, grid, method, sink)
            name = weight.graph.constant(found.codes, f"{weight.name}_{entry.weight}")
            zero = ""
            if not grid.symmetric:
                zero = weight.graph.constant(pack(found.scales.zero, grid.bits), f"{name}_zero")
            self._stored[key] = _BlockCodes(name, found.scales.scale, zero)
        return self._stored[key]

    # -- DequantizeLinear

    def _dequantize(self, g: Graph, layer: Linear, value: str) -> None:
        """Replace the weight operand of a layer."""
        node, weight = layer.node, layer.weight
        if weight.turned != bool(nd.attr(node, "transB", 0)):  # it reads through a Transpose
            value = g.op("Transpose", value, at=node, perm=[1, 0])
        before = g.producer(node.input[1])
        g.set_input(node, 1, value)
        if before is not None:
            g.prune(before)

    def _by_blocks(self, weight: WeightMatrix, entry: Entry, method: Method | None) -> str:
        block = entry.block_size
        grid = Grid(_BITS[entry.weight], entry.symmetric, positive=True)
        assert block is not None
        key = ("qdq", *weight.key, weight.turned, block, grid)
        if key in self._dequantized:
            return self._dequantized[key]
        g, turned = weight.graph, weight.turned
        sink = AsStored(weight.shape, turned, block, grid.bits)
        found = self._coded(weight, turned, entry, grid, method, sink)
        codes, scales = _put_codes(g, weight, found.codes, entry), found.scales
        inputs = [codes, g.constant(_laid_out(scales.scale, turned), f"{codes}_scale")]
        if not grid.symmetric:
            signed = _laid_out(scales.zero, turned).astype(np.int16) - grid.middle
            kind = TensorProto.INT4 if grid.bits == 4 else TensorProto.INT8
            zero = signed.astype(helper.tensor_dtype_to_np_dtype(kind))
            inputs.append(g.constant(zero, f"{codes}_zero"))
        axis = 1 if turned else 0
        made = g.op("DequantizeLinear", *inputs, axis=axis, block_size=block)
        self._dequantized[key] = made
        return made

    def _by_rows(self, weight: WeightMatrix, entry: Entry) -> str:
        """Return the dequantized table, with a scale per row."""
        key = ("rows", *weight.key)
        if key not in self._dequantized:
            stored = self._rows.stored(weight, entry, by_rows=True)
            scale = self._rows.store.scale(stored)
            made = weight.graph.op("DequantizeLinear", stored.codes, scale, axis=0)
            self._dequantized[key] = made
        return self._dequantized[key]


def _put_codes(g: Graph, weight: WeightMatrix, codes: Array, entry: Entry) -> str:
    hint = f"{weight.name}_{entry.weight}"
    if entry.weight == "int8":
        return g.constant(codes, hint)
    name = g.fresh(hint)
    g.put_initializer(g.model.weights.put_packed(name, TensorProto.INT4, weight.shape, codes))
    return name


def _laid_out(numbers: Array, turned: bool) -> Array:
    """Transpose [outputs, blocks] to the layout of the weight."""
    return numbers if turned else np.ascontiguousarray(np.transpose(numbers))


def _with_bias(inputs: list[str], zero: str, bias: str) -> list[str]:
    """Return the inputs of MatMulNBits: codes, scales, zero points, no order, bias."""
    return [*inputs[:3], zero, "", bias]


def _take_bias(g: Graph, made: NodeProto, result: str, count: int) -> None:
    """Fold the Add of a vector behind a layer into its bias."""
    found = bias_behind(g, result, count)
    if found is None:
        return
    adding, bias = found
    vector = as_vector(g, bias, result)
    if vector is None:
        return
    zero = made.input[3] if len(made.input) > 3 else ""
    g.set_inputs(made, _with_bias(list(made.input), zero, vector))
    put(g, adding, result)


def _unpacked(g: Graph, codes: str, at: NodeProto) -> str:
    """Unpack two codes per byte along a new last axis."""
    four = g.constant(np.array(4, np.uint8), "bits")
    left = g.op("BitShift", codes, four, at=at, direction="LEFT")
    halves = [g.op("BitShift", side, four, at=at, direction="RIGHT") for side in (left, codes)]
    return g.op("Concat", *(unsqueeze(g, half, [-1], at) for half in halves), at=at, axis=-1)
