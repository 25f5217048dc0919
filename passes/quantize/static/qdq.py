"""Static layers as QuantizeLinear and DequantizeLinear around operators of floats.

    x -> Q -> DQ -> Conv -> [Relu] -> Q -> DQ -> y
    W (int8) -> DQ -^   ^- DQ <- b (int32)

A runtime fuses the pairs with what is between them into a kernel on integers; one that does not
computes the same in floats. A tensor has one Q and one DQ, whoever reads it; equal scales and
zero points are stored once, and a weight that several layers read as well.

Where the result of a layer is in 8 bits, everybody reads it behind its DQ: one reader of the raw
floats would keep the runtime from fusing. A tensor that is made in floats stays so for those who
compute in floats.

From opset 21 on, onnxruntime fails on int8 behind which a tensor is only moved: it puts a pair of
its own there, and forgets a type in it (microsoft/onnxruntime#25526). So a pair is written there
first. It is on the same grid, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from onnx import NodeProto

from passes.operands import given
from passes.quantize.plan import Entry
from passes.quantize.static.ranges import Grid
from passes.quantize.static.sites import Site
from passes.quantize.static.weights import Coded, Weight, encode
from passes.quantize.stored import drop_unused
from toolkit import nodes as nd
from toolkit.graph import Array, Graph

_MOST_NAME = 40
"""Longer names are not repeated in new ones."""

_MOVES = ("MaxPool", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Slice")
OUTPUT_TYPES = 21
"""What onnxruntime moves a DQ behind, and the first opset whose Q may name its type."""


@dataclass(slots=True, eq=False)
class QdqWriter:
    """Writes sites one by one, makers before readers."""

    grids: Mapping[str, Grid]
    views: dict[str, Grid] = field(default_factory=dict[str, Grid])
    """The values behind a DQ, and what they can hold."""
    _read: dict[str, str] = field(default_factory=dict[str, str])
    _constants: dict[tuple[object, ...], str] = field(default_factory=dict[tuple[object, ...], str])

    def write(
        self, site: Site, entry: Entry, made: Sequence[str], mean: Array | None = None
    ) -> bool:
        """Write a site whose results `made` are stored in 8 bits; False if vetoed. Raises Unfit.

        `mean` is that of what it reads, by channel, where it is known.
        """
        g, node = site.graph, site.node
        if not g.begin("quantize-static", node):
            return False
        x = self.views.get(node.input[0]) or self.grids.get(node.input[0])
        coded = None
        if site.weight is not None and x is not None:  # what is unfit, before anything is changed
            coded = encode(site.weight, node, entry, x.scale, mean)
        for slot in site.operands:
            g.set_input(node, slot, self._operand(site, slot, made))
        if site.weight is not None and coded is not None:
            self._layer(g, node, site.weight, entry, coded)
        for name in made:
            self._store(g, name, self.grids[name])
        return True

    def carry_signed(self, g: Graph) -> None:
        """Put a pair behind whatever only moves a tensor of int8, unless a Q alone reads it."""
        if g.opset() < OUTPUT_TYPES:
            return
        for node in list(g.nodes):
            grid = self.views.get(node.input[0]) if nd.is_op(node, *_MOVES) else None
            if grid is None or grid.dtype != "int8":
                continue
            users = g.users(node.output[0])
            quantizers = [user for user in users if nd.is_op(user, "QuantizeLinear")]
            is_kept = 0 < g.use_count(node.output[0]) == len(quantizers)
            if not is_kept and g.begin("carry-signed", node):
                self._store(g, node.output[0], grid)

    # -- activations

    def _operand(self, site: Site, slot: int, made: Sequence[str]) -> str:
        g, value = site.graph, site.node.input[slot]
        if value in self.views:
            return value
        known = g.const(value)
        if known is None:
            return self._view(g, value)
        like = self.grids[made[0]]
        grid = like if nd.is_op(site.node, "Concat") else _around(known, like)
        return self._constant_view(g, value, known, grid)

    def _view(self, g: Graph, value: str) -> str:
        """A tensor that is made in floats, behind its Q and DQ."""
        if value not in self._read:
            self._read[value] = self._pair(g, value, self.grids[value])[1].output[0]
        return self._read[value]

    def _store(self, g: Graph, value: str, grid: Grid) -> None:
        """Everybody reads a result behind its Q and DQ."""
        maker = g.producer(value)
        assert maker is not None, value
        slot = list(maker.output).index(value)
        quantizer, view = self._pair(g, value, grid)
        behind = g.replace(value, view.output[0])
        g.set_input(quantizer, 0, maker.output[slot])
        self.views[behind] = grid

    def _pair(self, g: Graph, value: str, grid: Grid) -> tuple[NodeProto, NodeProto]:
        scale, zero = self.parameters(g, grid)
        base = _short(value)
        outputs = [g.fresh(f"{base}_q"), g.fresh(f"{base}_dq")]
        quantizer = g.add("QuantizeLinear", [value, scale, zero], outputs[:1])
        view = g.add("DequantizeLinear", [outputs[0], scale, zero], outputs[1:])
        self.views[outputs[1]] = grid
        return quantizer, view

    def _constant_view(self, g: Graph, value: str, known: Array, grid: Grid) -> str:
        key = ("operand", id(g.scope_of(value)), value, grid)
        if key not in self._constants:
            stored = self.constant(g, grid.quantize(known), _short(value))
            scale, zero = self.parameters(g, grid)
            self._constants[key] = g.op("DequantizeLinear", stored, scale, zero)
            self.views[self._constants[key]] = grid
        return self._constants[key]

    # -- weights

    def _layer(self, g: Graph, node: NodeProto, weight: Weight, entry: Entry, coded: Coded) -> None:
        floats = [node.input[1]]
        if coded.values is not None:
            g.set_input(node, 1, self._weight_view(weight, entry, coded))
        if coded.bias is not None:
            floats += [given(node, 2)] if given(node, 2) else []
            name = self.constant(g, coded.bias, "bias")
            scale = self.constant(g, coded.bias_scale, "scale")
            axis = 0 if coded.bias_scale.ndim else None
            bias = g.op("DequantizeLinear", name, scale, at=node, axis=axis)
            g.set_inputs(node, [*node.input[:2], bias])
        elif given(node, 2):
            g.set_inputs(node, list(node.input)[:2])  # a bias of zeros, by beta = 0
        for name in ("alpha", "beta"):
            if nd.attr(node, name, 1.0) != 1 and nd.is_op(node, "Gemm"):
                g.del_attr(node, name)
        for name in floats:
            drop_unused(g, name)

    def _weight_view(self, weight: Weight, entry: Entry, coded: Coded) -> str:
        g, values = weight.graph, coded.values
        assert values is not None
        key = ("weight", id(g), weight.name, entry.weight, entry.axis, coded.zero,
               entry.reduce_range, coded.scale.tobytes())  # fmt: skip
        if key not in self._constants:
            stored = g.constant(values, f"{_short(weight.name)}_int8")
            scale = self.constant(g, coded.scale, "scale")
            zeros = np.full(coded.scale.shape, coded.zero, values.dtype)
            axis = entry.axis if coded.scale.ndim else None
            inputs = (stored, scale, self.constant(g, zeros, "zero"))
            self._constants[key] = g.op("DequantizeLinear", *inputs, axis=axis)
        return self._constants[key]

    # -- constants

    def parameters(self, g: Graph, grid: Grid) -> tuple[str, str]:
        """Names of a grid's scale and zero point."""
        scale = self.constant(g, np.asarray(grid.scale, np.float32), "scale")
        return scale, self.constant(g, np.asarray(grid.zero, grid.dtype), "zero")

    def constant(self, g: Graph, array: Array, hint: str) -> str:
        """A constant, stored once however often it is asked for."""
        key = (id(g), str(array.dtype), array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = g.constant(array, hint)
        return self._constants[key]

    def drop_unread(self, g: Graph) -> None:
        """Remove constants of which a later rewrite has made something else."""
        for name in dict.fromkeys(self._constants.values()):
            if name in g.initializers and g.is_unused(name):
                g.drop_initializer(name)


def _around(known: Array, like: Grid) -> Grid:
    """The grid for a constant: by its own range, in the type of the others."""
    if not known.size:
        return like
    return Grid.of(float(known.min()), float(known.max()), like.dtype)


def _short(name: str) -> str:
    return name if len(name) <= _MOST_NAME else "tensor"
