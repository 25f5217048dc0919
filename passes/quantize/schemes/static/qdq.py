"""Write static layers as float operators between QuantizeLinear and DequantizeLinear.

    x -> Q -> DQ -> Conv -> [Relu] -> Q -> DQ -> y
    W (int8) -> DQ -^   ^- DQ <- b (int32)

A runtime fuses the Q/DQ pairs and the operator between them into an integer kernel, or computes the
same in float. A tensor has one Q and one DQ per graph. Equal scales, equal zero points and a weight
with several users are stored once.

All users of an int8 layer's result follow its DQ: a user of the float result itself would prevent
fusion. A tensor from a float layer stays float for its float users.

A subgraph dequantizes captured weights itself, because onnxruntime fuses within one graph. It
captures activations as floats and quantizes them with the same parameters, which gives the same
codes. A captured Q would fail: onnxruntime aborts on one after a DQ, and converts int8 to uint8,
which some processors need, only if Q and DQ are in one graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from onnx import NodeProto

from passes.analysis.operands import given
from passes.quantize.layers.layers import is_fused
from passes.quantize.layers.weight_storage import drop_unused
from passes.quantize.schemes.static.quantizable_ops import Int8Site
from passes.quantize.schemes.static.weights import LayerWeight, QLayer, encode
from toolkit.ir import Array, Graph, node as nd
from toolkit.quantization.plan import Entry
from toolkit.quantization.qparams import QParams, QTensor

_MOST_NAME = 40
"""Longer value names are not repeated in derived names."""


@dataclass(slots=True, eq=False)
class QdqWriter:
    """Writes sites in graph order."""

    qparams: Mapping[str, QParams]
    views: dict[str, QParams] = field(default_factory=dict[str, QParams])
    """Dequantized values, with their parameters."""
    _constants: dict[tuple[object, ...], str] = field(default_factory=dict[tuple[object, ...], str])

    def write(
        self, site: Int8Site, entry: Entry, results: Sequence[str], mean: Array | None = None
    ) -> bool:
        """Write a site whose `results` are stored in 8 bits; return False if vetoed.

        `mean` holds the channel means of its input, if known. Raises Unfit.
        """
        g, node = site.graph, site.node
        if not g.begin("quantize-static", node):
            return False
        x = self.views.get(node.input[0]) or self.qparams.get(node.input[0])
        coded = None
        if site.weight is not None and x is not None:  # raises Unfit before any change
            coded = encode(site.weight, entry, float(x.scale), mean)
        for slot in site.operands:
            g.set_input(node, slot, self._operand(site, slot, results))
        if site.weight is not None and coded is not None:
            self._layer(g, node, site.weight, entry, coded)
        for name in results:
            self.store(g, name, self.qparams[name])
        return True

    # -- activations

    def _operand(self, site: Int8Site, slot: int, results: Sequence[str]) -> str:
        g, value = site.graph, site.node.input[slot]
        if value in self.views:  # equal parameters give equal codes in a subgraph, too
            return value if g.is_defined(value) else self._view(g, value, self.views[value])
        known = g.const(value)
        if known is None:
            return self._view(g, value, self.qparams[value])
        like = self.qparams[results[0]]
        params = like if nd.is_op(site.node, "Concat") else _params_of_constant(known, like)
        return self._constant_view(g, value, known, params)

    def _view(self, g: Graph, value: str, params: QParams) -> str:
        """Return a tensor after its Q/DQ pair in this graph."""
        key = ("view", id(g), value)
        if key not in self._constants:
            codes = self._quantizer(g, value, params).output[0]
            self._constants[key] = self._dequantizer(g, codes, value, params).output[0]
        return self._constants[key]

    def store(self, g: Graph, value: str, params: QParams) -> None:
        """Insert a Q/DQ pair between a result and all its users."""
        producer = g.producer(value)
        assert producer is not None, value
        slot = list(producer.output).index(value)
        quantizer = self._quantizer(g, value, params)
        view = self._dequantizer(g, quantizer.output[0], value, params)
        replaced = g.replace(value, view.output[0])
        g.set_input(quantizer, 0, producer.output[slot])
        self.views[replaced] = params

    def _quantizer(self, g: Graph, value: str, params: QParams) -> NodeProto:
        inputs = [value, *self.parameters(g, params)]
        return g.add("QuantizeLinear", inputs, [g.fresh(f"{_short(value)}_q")])

    def _dequantizer(self, g: Graph, codes: str, value: str, params: QParams) -> NodeProto:
        inputs = [codes, *self.parameters(g, params)]
        view = g.add("DequantizeLinear", inputs, [g.fresh(f"{_short(value)}_dq")])
        self.views[view.output[0]] = params
        return view

    def _constant_view(self, g: Graph, value: str, known: Array, params: QParams) -> str:
        key = ("operand", id(g), id(g.scope_of(value)), value, params)
        if key not in self._constants:
            stored = self.constant(g, params.quantize(known), _short(value))
            scale, zero = self.parameters(g, params)
            self._constants[key] = g.op("DequantizeLinear", stored, scale, zero)
            self.views[self._constants[key]] = params
        return self._constants[key]

    # -- weights

    def _layer(
        self, g: Graph, node: NodeProto, weight: LayerWeight, entry: Entry, coded: QLayer
    ) -> None:
        floats = [node.input[1]]
        if not coded.is_stored:
            g.set_input(node, 1, self._weight_view(weight, entry, coded.weight))
        elif not g.is_defined(node.input[1]):
            g.set_input(node, 1, self._stored_view(g, node.input[1]))
        if coded.bias is not None:
            floats += [given(node, 2)] if given(node, 2) else []
            name = self.constant(g, coded.bias.codes, "bias")
            scale = self.constant(g, coded.bias.params.scale, "scale")
            bias = g.op("DequantizeLinear", name, scale, at=node, axis=coded.bias.params.axis)
            g.set_inputs(node, [*node.input[:2], bias])
        elif given(node, 2):
            g.set_inputs(node, list(node.input)[:2])  # a bias of zeros, by beta = 0
        for name in ("alpha", "beta"):
            if nd.attr(node, name, 1.0) != 1 and nd.is_op(node, "Gemm"):
                g.del_attr(node, name)
        if is_fused(node):  # weights and scales include its factor and transposes
            g.set_op(node, "MatMul")
            for name in nd.attrs(node):
                g.del_attr(node, name)
        for name in floats:
            drop_unused(g, name)

    def _weight_view(self, weight: LayerWeight, entry: Entry, found: QTensor) -> str:
        """Return the dequantized weight; its graph stores the codes once for all users."""
        g, params = weight.graph, found.params
        scope = g.scope_of(weight.kernel.name)
        assert scope is not None
        key = ("weight", id(scope), weight.kernel.name, params, entry.reduce_range, weight.turned)
        if key not in self._constants:
            self._constants[key] = scope.constant(found.codes, f"{_short(weight.kernel.name)}_int8")
        view = (*key, id(g))
        if view not in self._constants:
            inputs = (self._constants[key], *self.parameters(scope, params))
            self._constants[view] = g.op("DequantizeLinear", *inputs, axis=params.axis)
        return self._constants[view]

    def _stored_view(self, g: Graph, value: str) -> str:
        """Return a weight that an outer graph dequantizes, by a DQ of this graph."""
        key = ("stored", id(g), value)
        if key not in self._constants:
            scope = g.scope_of(value)
            producer = scope.producer(value) if scope is not None else None
            assert producer is not None, value
            self._constants[key] = g.op("DequantizeLinear", *producer.input, **nd.attrs(producer))
        return self._constants[key]

    # -- constants

    def parameters(self, g: Graph, params: QParams) -> tuple[str, str]:
        """Return the names of scale and zero point."""
        scale = self.constant(g, params.scale, "scale")
        return scale, self.constant(g, params.zero_point, "zero")

    def constant(self, g: Graph, array: Array, hint: str) -> str:
        """Return the name of a constant, which is stored once."""
        key = (id(g), str(array.dtype), array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = g.constant(array, hint)
        return self._constants[key]

    def drop_unused_constants(self, g: Graph) -> None:
        """Remove constants that later rewrites left unused."""
        for name in dict.fromkeys(self._constants.values()):
            if name in g.initializers and g.is_unused(name):
                g.drop_initializer(name)


def _params_of_constant(known: Array, like: QParams) -> QParams:
    """Return the parameters of a constant operand: its own range, in the format of `like`."""
    if not known.size:
        return like
    return QParams.from_range(float(known.min()), float(known.max()), like.format)


def _short(name: str) -> str:
    return name if len(name) <= _MOST_NAME else "tensor"
