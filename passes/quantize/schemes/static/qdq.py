"""Static layers as QuantizeLinear and DequantizeLinear around operators of floats.

    x -> Q -> DQ -> Conv -> [Relu] -> Q -> DQ -> y
    W (int8) -> DQ -^   ^- DQ <- b (int32)

A runtime fuses the pairs with what is between them into a kernel on integers; one that does not
computes the same in floats. A tensor has one Q and one DQ in a graph, whoever reads it there; equal
scales and zero points are stored once, and a weight that several layers read as well.

Where the result of a layer is in 8 bits, everybody reads it behind its DQ: one reader of the raw
floats would keep the runtime from fusing. A tensor that is made in floats stays so for those who
compute in floats.

A body (of an If, say) reads weights of the graphs around it as integers, by DQs of its own: the
runtime fuses what is in one graph. Tensors it reads as floats, with pairs of its own: on the same
grid the same integers come out. A Q that bodies alone read is beyond the runtime: it aborts on one
behind a DQ, with nothing in between but what it removes, and of int8 it makes the unsigned bytes
that some processors need only where a Q and its DQ are in one graph.

Behind what only moves a tensor, onnxruntime puts a pair of its own. From opset 21 on it forgets a
type in one of int8 (microsoft/onnxruntime#25526), and in front of a body that reads the tensor from
around it, it does not find the place and takes the process down. So a pair is written there first.
It is on the same grid, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from onnx import NodeProto, TensorProto

from passes.analysis.operands import given
from passes.quantize.layers.layers import is_fused
from passes.quantize.layers.weight_storage import drop_unused
from passes.quantize.schemes.static.qparams import Grid
from passes.quantize.schemes.static.quantizable_ops import Site
from passes.quantize.schemes.static.weights import Coded, Weight, encode
from toolkit.ir import node as nd
from toolkit.ir.graph import Array, Graph
from toolkit.quantization.plan import Entry

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
    _moved: dict[str, Grid] = field(default_factory=dict[str, Grid])
    """What is moved behind a DQ, and what it can hold."""
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

    def carry(self, g: Graph) -> None:
        """Put pairs behind what only moves tensors, where the runtime would and could not.

        Graphs come before those in them: of a body that always runs the runtime makes a part of the
        graph around it, first of all.
        """
        for node in list(g.nodes):
            moves = nd.is_op(node, *_MOVES)
            if not moves and not _is_removed(node):
                continue
            result = node.output[0]
            grid = self.views.get(node.input[0]) or self._moved.get(node.input[0])
            if grid is None:
                continue
            self._moved[result] = grid
            rule = "carry-captured" if _is_read_by_bodies(g, result) else ""
            if not rule and moves and grid.dtype == "int8" and g.opset() >= OUTPUT_TYPES:
                rule = "" if _read_by_quantizers(g, result) else "carry-signed"
            if rule and g.begin(rule, node):
                self._store(g, result, grid)

    # -- activations

    def _operand(self, site: Site, slot: int, made: Sequence[str]) -> str:
        g, value = site.graph, site.node.input[slot]
        if value in self.views:  # on the same grid, in a body: the same integers again
            return value if g.is_defined(value) else self._view(g, value, self.views[value])
        known = g.const(value)
        if known is None:
            return self._view(g, value, self.grids[value])
        like = self.grids[made[0]]
        grid = like if nd.is_op(site.node, "Concat") else _around(known, like)
        return self._constant_view(g, value, known, grid)

    def _view(self, g: Graph, value: str, grid: Grid) -> str:
        """A tensor behind a Q and a DQ of this graph."""
        key = ("view", id(g), value)
        if key not in self._constants:
            codes = self._quantizer(g, value, grid).output[0]
            self._constants[key] = self._dequantizer(g, codes, value, grid).output[0]
        return self._constants[key]

    def _store(self, g: Graph, value: str, grid: Grid) -> None:
        """Everybody reads a result behind its Q and DQ."""
        maker = g.producer(value)
        assert maker is not None, value
        slot = list(maker.output).index(value)
        quantizer = self._quantizer(g, value, grid)
        view = self._dequantizer(g, quantizer.output[0], value, grid)
        behind = g.replace(value, view.output[0])
        g.set_input(quantizer, 0, maker.output[slot])
        self.views[behind] = grid

    def _quantizer(self, g: Graph, value: str, grid: Grid) -> NodeProto:
        inputs = [value, *self.parameters(g, grid)]
        return g.add("QuantizeLinear", inputs, [g.fresh(f"{_short(value)}_q")])

    def _dequantizer(self, g: Graph, codes: str, value: str, grid: Grid) -> NodeProto:
        inputs = [codes, *self.parameters(g, grid)]
        view = g.add("DequantizeLinear", inputs, [g.fresh(f"{_short(value)}_dq")])
        self.views[view.output[0]] = grid
        return view

    def _constant_view(self, g: Graph, value: str, known: Array, grid: Grid) -> str:
        key = ("operand", id(g), id(g.scope_of(value)), value, grid)
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
        elif not g.is_defined(node.input[1]):
            g.set_input(node, 1, self._stored_view(g, node.input[1]))
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
        if is_fused(node):  # weights and scales have taken in what it does beside
            g.set_op(node, "MatMul")
            for name in nd.attrs(node):
                g.del_attr(node, name)
        for name in floats:
            drop_unused(g, name)

    def _weight_view(self, weight: Weight, entry: Entry, coded: Coded) -> str:
        """The integers are stored where the weights are, once for all graphs that read them."""
        g, values, axis = weight.graph, coded.values, entry.axis
        scope = g.scope_of(weight.name)
        assert values is not None
        assert scope is not None
        key = ("weight", id(scope), weight.name, entry.weight, entry.axis, coded.zero,
               entry.reduce_range, coded.scale.tobytes(), weight.turned)  # fmt: skip
        if weight.turned:
            values = np.ascontiguousarray(np.transpose(values))
            axis = None if axis is None else 1 - axis
        if key not in self._constants:
            self._constants[key] = scope.constant(values, f"{_short(weight.name)}_int8")
        view = (*key, id(g))
        if view not in self._constants:
            zeros = np.full(coded.scale.shape, coded.zero, values.dtype)
            scale = self.constant(scope, coded.scale, "scale")
            inputs = (self._constants[key], scale, self.constant(scope, zeros, "zero"))
            axis = axis if coded.scale.ndim else None
            self._constants[view] = g.op("DequantizeLinear", *inputs, axis=axis)
        return self._constants[view]

    def _stored_view(self, g: Graph, value: str) -> str:
        """Weights that a graph around this one dequantizes, by a DQ of this one."""
        key = ("stored", id(g), value)
        if key not in self._constants:
            scope = g.scope_of(value)
            maker = scope.producer(value) if scope is not None else None
            assert maker is not None, value
            self._constants[key] = g.op("DequantizeLinear", *maker.input, **nd.attrs(maker))
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


def _is_removed(node: NodeProto) -> bool:
    """Whether the runtime takes a node for nothing, and what it reads for what it makes."""
    if nd.is_op(node, "Cast"):
        return nd.attr(node, "to") == TensorProto.FLOAT
    return nd.is_op(node, "Identity", "Dropout")


def _is_read_by_bodies(g: Graph, value: str) -> bool:
    """Whether bodies read a value from around them, or the result of an If that gives it."""
    if g.is_captured(value):
        return True
    if g.parent is None or g.owner is None or not nd.is_op(g.owner, "If"):
        return False
    made = zip(g.outputs, g.owner.output, strict=False)
    return any(_is_read_by_bodies(g.parent, name) for inner, name in made if inner == value)


def _read_by_quantizers(g: Graph, value: str) -> bool:
    """Whether Qs read a value, and nothing else does."""
    quantizers = [user for user in g.users(value) if nd.is_op(user, "QuantizeLinear")]
    return 0 < g.use_count(value) == len(quantizers)


def _around(known: Array, like: Grid) -> Grid:
    """The grid for a constant: by its own range, in the type of the others."""
    if not known.size:
        return like
    return Grid.of(float(known.min()), float(known.max()), like.dtype)


def _short(name: str) -> str:
    return name if len(name) <= _MOST_NAME else "tensor"
