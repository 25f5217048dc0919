"""Write layers that compute in float with weights quantized by blocks.

onnxruntime has one operator for the layer:

    y = MatMulNBits(x, codes, s, z, b)         without z if blocks are symmetric

Other targets have a standard operator before the layer:

    W = DequantizeLinear(q, s, z)              int4 or int8, block_size along the inputs (opset 21)

Tables dequantize only the gathered rows. A table shares the codes of a tied MatMulNBits projection.
In the standard form both use int8 with a scale per row: no standard operator gathers int4.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
from onnx import NodeProto, TensorProto

from passes.analysis.operands import given, int_vector, unsqueeze
from passes.quantize.layers.layers import Linear, MatrixLayer, Table, WeightMatrix
from passes.quantize.layers.weight_storage import drop_unused
from passes.quantize.schemes.dynamic.int8_writer import DynamicWriter, bias_behind, bias_of, put
from passes.quantize.schemes.weight_only.blocks import Grid
from passes.quantize.schemes.weight_only.gptq import Solver
from passes.quantize.schemes.weight_only.packing import NBitsCodes, SignedCodes, pack
from passes.quantize.schemes.weight_only.streaming import (
    BlockCodes,
    CodeMethod,
    CodeSink,
    quantize_blocks,
)
from toolkit.ir import Array, Graph, node as nd
from toolkit.quantization.number_format import FORMATS, INT4, UINT4, UINT8
from toolkit.quantization.plan import Entry
from toolkit.targets import CONTRIB, Target
from toolkit.targets.releases import Use

Form: TypeAlias = Literal["nbits", "qdq"]

Known: TypeAlias = dict[tuple[object, ...], BlockCodes]
"""Codes by weight and parameters, shared by all candidates of one model."""

_CODES = {"int4": UINT4, "int8": UINT8}
"""The unsigned format of codes, by signed format; codes differ by the lowest signed one."""


def form_on(target: Target, bits: int) -> Form:
    """Return the form for which the target has kernels with weights of `bits` bits."""
    blocks = Use("MatMulNBits", CONTRIB, 1, ("float32",), attributes=frozenset({("bits", bits)}))
    return "qdq" if target.obstacle(blocks) else "nbits"


def obstacle_to_blocks(target: Target, opset: int) -> str:
    """Return why the target cannot dequantize blocks in the standard form, or an empty string."""
    blocks = frozenset({("block_size", 32)})
    return target.obstacle(Use("DequantizeLinear", "", opset, ("int8",), attributes=blocks))


@dataclass(slots=True, eq=False)
class BlockWriter:
    """Writes layers; a weight with several users is quantized and stored once.

    Unknown codes come from the layer's method.
    """

    form: Form
    accuracy_level: int
    known: Known = field(default_factory=dict[tuple[object, ...], BlockCodes])
    _by_row: DynamicWriter = field(default_factory=DynamicWriter)
    _stored: dict[tuple[object, ...], tuple[str, Array, str]] = field(
        default_factory=dict[tuple[object, ...], tuple[str, Array, str]]
    )
    _scales: dict[tuple[str, float], str] = field(default_factory=dict[tuple[str, float], str])
    _dequantized: dict[tuple[object, ...], str] = field(
        default_factory=dict[tuple[object, ...], str]
    )

    def write(self, g: Graph, layer: MatrixLayer, entry: Entry, method: CodeMethod | None) -> None:
        """Write a layer. Raises Unfit for weights that cannot be quantized."""
        weight = layer.weight
        if isinstance(layer, Table) and entry.block_size is None:
            self._by_row.write(g, layer, entry)
            return
        rule = layer.rule if isinstance(layer, Table) else "quantize-weights"
        if not g.begin(rule, layer.node):
            return
        if isinstance(layer, Table):
            self._table(g, layer, entry, method)
        elif entry.block_size is None:
            self._dequantize(g, layer, self._by_rows(weight, entry))
        elif self.form == "nbits" and isinstance(layer, Linear):
            self._nbits(g, layer, entry, method)
        else:
            self._dequantize(g, layer, self._by_blocks(weight, entry, method))
        drop_unused(weight.graph, weight.name)

    def _table(self, g: Graph, layer: Table, entry: Entry, method: CodeMethod | None) -> None:
        node, weight = layer.node, layer.weight
        assert entry.block_size is not None, entry.label
        codes, scales, _ = self._nbits_weight(weight, True, entry, method)
        scale = self._scale(weight.graph, codes, scales)
        codes = g.op("Gather", codes, layer.indices, at=node)
        steps = g.op("Gather", scale, layer.indices, at=node)
        fmt = _CODES[entry.weight]
        if fmt == UINT4:
            codes = _unpacked(g, codes, node)
        exact = g.op("Cast", codes, at=node, to=TensorProto.FLOAT)
        middle = g.constant(np.array(fmt.middle, np.float32), "zero")
        steps = unsqueeze(g, steps, [-2, -1] if fmt == UINT4 else [-1], node)
        values = g.op("Mul", g.op("Sub", exact, middle, at=node), steps, at=node)
        width = scales.shape[1] * entry.block_size
        sizes = g.op("Shape", layer.indices, at=node)
        shape = g.op("Concat", sizes, int_vector(g, [width]), at=node, axis=0)
        result = g.op("Reshape", values, shape, at=node)
        if width != weight.shape[1]:
            ends = [int_vector(g, [n]) for n in (0, weight.shape[1], -1)]
            result = g.op("Slice", result, *ends, at=node)
        put(g, node, result)

    def knows(self, layer: MatrixLayer, entry: Entry) -> bool:
        """Whether the codes of a layer are known already."""
        turned = isinstance(layer, Table) or layer.weight.turned
        return self._known_key(layer.weight, turned, entry) in self.known

    def _known_key(self, weight: WeightMatrix, turned: bool, entry: Entry) -> tuple[object, ...]:
        fields = (entry.weight, entry.block_size, entry.symmetric, entry.method)
        return (self.form, weight.name, turned, *fields)

    def _codes_of(
        self,
        weight: WeightMatrix,
        turned: bool,
        entry: Entry,
        grid: Grid,
        method: CodeMethod | None,
        sink: CodeSink,
    ) -> BlockCodes:
        """Return the known codes, or those that the method writes to `sink`."""
        key = self._known_key(weight, turned, entry)
        if key in self.known:
            return self.known[key]
        floats = weight.graph.const(weight.name)
        assert floats is not None, weight.name
        assert entry.block_size is not None, entry.label
        assert method is not None, entry.label
        fit = quantize_blocks(floats, turned, entry.block_size, grid, method, sink)
        made = BlockCodes(sink.done(), fit)
        # Not cached: every candidate notes a replaced gptq, and subgraphs may share a name.
        replaced = entry.method == "gptq" and not isinstance(method, Solver)
        if not replaced and weight.graph.parent is None:
            self.known[key] = made
        return made

    # -- MatMulNBits

    def _nbits(self, g: Graph, layer: Linear, entry: Entry, method: CodeMethod | None) -> None:
        node, weight = layer.node, layer.weight
        codes, scales, zero = self._nbits_weight(weight, weight.turned, entry, method)
        scale = self._scale(weight.graph, codes, scales, layer.alpha)
        bias = bias_of(g, layer)
        known = g.const(bias) if bias else None
        own = bias if known is not None and known.shape == (layer.outputs,) else ""
        inputs = nd.without_blanks((layer.x, codes, scale, zero, "", own))
        attributes = {
            "K": weight.shape[1 if weight.turned else 0],
            "N": layer.outputs,
            "bits": _CODES[entry.weight].bits,
            "block_size": entry.block_size,
            "accuracy_level": self.accuracy_level or None,
        }
        made = g.add("MatMulNBits", inputs, 1, attributes, domain="com.microsoft", at=node)
        result = made.output[0]
        if bias != own:
            result = g.op("Add", result, bias, at=node)
        result = put(g, node, result)
        if not bias:
            _take_bias(g, made, result, layer.outputs)

    def _scale(self, g: Graph, codes: str, scales: Array, factor: float = 1.0) -> str:
        """Return the name of a weight's scales, multiplied by the layer's factor."""
        key = codes, factor
        if key not in self._scales:
            numbers = scales if factor == 1 else scales * np.float32(factor)
            self._scales[key] = g.constant(numbers, f"{codes}_scale")
        return self._scales[key]

    def _nbits_weight(
        self, weight: WeightMatrix, turned: bool, entry: Entry, method: CodeMethod | None
    ) -> tuple[str, Array, str]:
        """Store a weight in the layout of MatMulNBits; rows of a `turned` one are outputs.

        Return the name of its codes, its scales [outputs, blocks], and the name of its zeros.
        """
        block, grid = entry.block_size, Grid(_CODES[entry.weight], entry.symmetric)
        assert block is not None
        key = ("nbits", *weight.key, turned, block, grid)
        if key not in self._stored:
            inputs, outputs = weight.shape[::-1] if turned else weight.shape
            sink = NBitsCodes(outputs, -(-inputs // block), block, grid.format)
            found = self._codes_of(weight, turned, entry, grid, method, sink)
            name = weight.graph.constant(found.codes, f"{weight.name}_{entry.weight}")
            zero = ""
            if not grid.symmetric:
                zero = weight.graph.constant(pack(found.fit.zero, grid.format), f"{name}_zero")
            self._stored[key] = name, found.fit.scale, zero
        return self._stored[key]

    # -- DequantizeLinear

    def _dequantize(self, g: Graph, layer: MatrixLayer, value: str) -> None:
        """Replace the weight operand of a layer."""
        node, weight = layer.node, layer.weight
        if weight.turned != bool(nd.attr(node, "transB", 0)):  # a Transpose is in between
            value = g.op("Transpose", value, at=node, perm=[1, 0])
        before = g.producer(node.input[1])
        g.set_input(node, 1, value)
        if before is not None:
            g.prune(before)

    def _by_blocks(self, weight: WeightMatrix, entry: Entry, method: CodeMethod | None) -> str:
        block = entry.block_size
        grid = Grid(_CODES[entry.weight], entry.symmetric, positive=True)
        assert block is not None
        key = ("qdq", *weight.key, weight.turned, block, grid)
        if key in self._dequantized:
            return self._dequantized[key]
        g, turned = weight.graph, weight.turned
        sink = SignedCodes(weight.shape, turned, block, grid.format)
        found = self._codes_of(weight, turned, entry, grid, method, sink)
        codes = _put_codes(g, weight, found.codes, entry)
        inputs = [codes, g.constant(_laid_out(found.fit.scale, turned), f"{codes}_scale")]
        if not grid.symmetric:
            zero = _laid_out(found.fit.zero, turned).astype(np.int16) - grid.format.middle
            inputs.append(g.constant(zero.astype(FORMATS[entry.weight].dtype), f"{codes}_zero"))
        made = g.op("DequantizeLinear", *inputs, axis=1 if turned else 0, block_size=block)
        self._dequantized[key] = made
        return made

    def _by_rows(self, weight: WeightMatrix, entry: Entry) -> str:
        """Return the dequantized table, with a scale per row."""
        key = ("rows", *weight.key)
        if key not in self._dequantized:
            stored = self._by_row.stored(weight, entry, by_rows=True)
            scale = self._by_row.scale(stored)
            made = weight.graph.op("DequantizeLinear", stored.codes, scale, axis=0)
            self._dequantized[key] = made
        return self._dequantized[key]


def _put_codes(g: Graph, weight: WeightMatrix, codes: Array, entry: Entry) -> str:
    hint = f"{weight.name}_{entry.weight}"
    if entry.weight != INT4.name:
        return g.constant(codes, hint)
    name = g.fresh(hint)
    g.put_initializer(g.model.weights.put_packed(name, INT4.data_type, weight.shape, codes))
    return name


def _laid_out(numbers: Array, turned: bool) -> Array:
    """Return numbers [outputs, blocks] in the layout of the weight."""
    return numbers if turned else np.ascontiguousarray(np.transpose(numbers))


def _take_bias(g: Graph, made: NodeProto, result: str, count: int) -> None:
    """Fold the Add of a vector after a layer into its bias."""
    adding, _, vector = bias_behind(g, result, count)
    if adding is None or not vector:
        return
    g.set_inputs(made, [*made.input[:3], given(made, 3), "", vector])
    put(g, adding, result)


def _unpacked(g: Graph, codes: str, at: NodeProto) -> str:
    """Unpack two codes per byte along a new last axis."""
    four = g.constant(np.array(4, np.uint8), "bits")
    left = g.op("BitShift", codes, four, at=at, direction="LEFT")
    halves = [g.op("BitShift", side, four, at=at, direction="RIGHT") for side in (left, codes)]
    return g.op("Concat", *(unsqueeze(g, half, [-1], at) for half in halves), at=at, axis=-1)
