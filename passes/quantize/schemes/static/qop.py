"""Replace float operators between DQs and a Q by integer operators.

    DQ, DQ -> Conv -> [Relu] -> Q     becomes     QLinearConv

A Relu or Clip is dropped if the range of the result's codes makes it a no-op. Otherwise, or without
an integer operator, the equivalent Q/DQ pairs stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from onnx import NodeProto, TensorProto

from passes.analysis.operands import given
from passes.quantize.schemes.static.quantizable_ops import Int8Site, bounds_of
from toolkit.ir import Graph, node as nd
from toolkit.quantization.number_format import FORMATS
from toolkit.quantization.qparams import QParams

_MICROSOFT = "com.microsoft"
_OWN_RANGE = ("Add", "Mul", "Sigmoid", "LeakyRelu", "AveragePool", "GlobalAveragePool", "Softmax")
"""Operators with a QLinear form that has the operands and the result in this order."""
_SLACK = 1e-6
"""Tolerance relative to the range for codes outside a bound, from rounding of the scale."""


_Codes: TypeAlias = tuple[str, str, str]
"""The names of a tensor's codes, scale and zero point."""


@dataclass(frozen=True, slots=True, eq=False)
class _QdqOperator:
    """A float operator with the codes of its operands and the quantizers of its results."""

    g: Graph
    node: NodeProto
    operands: tuple[_Codes, ...]
    quantizers: tuple[NodeProto, ...]
    """One Q per output; empty if the result stays float."""

    @property
    def result(self) -> tuple[str, str]:
        """Scale and zero point of the result."""
        return self.quantizers[0].input[1], self.quantizers[0].input[2]

    def put(self, op: str, inputs: Sequence[str], domain: str = "", **attributes: Any) -> None:
        """Write an operator that replaces the Qs, or the float node if there are none."""
        g, node = self.g, self.node
        if not self.quantizers:
            made = g.add(op, inputs, 1, attributes, domain, at=node)
            g.replace(node.output[0], made.output[0])
            g.prune(node)
            return
        names = [quantizer.output[0] for quantizer in self.quantizers]
        for quantizer in self.quantizers:
            g.set_outputs(quantizer, [g.fresh("unused")])
        g.add(op, inputs, names, attributes, domain, node.name and g.fresh(node.name), node)
        for quantizer in self.quantizers:
            g.prune(quantizer)


def write_operators(sites: Sequence[Int8Site], standard: bool) -> None:
    """Replace sites in Q/DQ form by integer operators; `standard`: only by those of ONNX."""
    for site in sites:
        found = _qdq_operator(site)
        if found is not None and site.graph.begin("quantized-operator", site.node):
            _write(site, found, standard)


def _write(site: Int8Site, found: _QdqOperator, standard: bool) -> None:
    g, node, op = found.g, found.node, found.node.op_type
    attributes = nd.attrs(node)
    operands = [name for codes in found.operands for name in codes]
    has_bias = site.weight is not None and given(node, 2)
    bias = [_codes_behind(g, node.input[2])[0]] if has_bias else []
    has_one_scale = found.quantizers and all(x[1:] == found.result for x in found.operands)
    if site.kind == "carry" or (op == "Concat" and has_one_scale):
        _carry(found, attributes)
    elif op == "MatMul" and not found.quantizers:
        _float_product(found, standard)
    elif op in ("Conv", "MatMul"):
        found.put(f"QLinear{op}", (*operands, *found.result, *bias), **attributes)
    elif standard:
        return
    elif op == "Gemm":
        result = found.result if found.quantizers else ()
        names = nd.without_blanks((*operands, *(bias or [""]), *result))
        found.put("QGemm", names, _MICROSOFT, transB=nd.attr(node, "transB", 0))
    elif op == "Concat":
        found.put("QLinearConcat", (*found.result, *operands), _MICROSOFT, **attributes)
    elif op in _OWN_RANGE:
        if op == "Softmax":
            attributes = {"axis": nd.attr(node, "axis", -1), "opset": g.opset()}
        if all(step == 1 for step in attributes.pop("dilations", ())):
            found.put(f"QLinear{op}", (*operands, *found.result), _MICROSOFT, **attributes)


def _carry(found: _QdqOperator, attributes: dict[str, Any]) -> None:
    """Apply a data movement to the codes."""
    node = found.node
    values = [codes for codes, _, _ in found.operands]
    inputs = [*values, *list(node.input)[len(values) :]]
    if nd.is_op(node, "Pad") and attributes.get("mode", "constant") == "constant":
        inputs = [*inputs, ""][:3]
        inputs[2] = found.operands[0][2]
        inputs += list(node.input)[3:]
    found.put(node.op_type, inputs, **attributes)


def _float_product(found: _QdqOperator, standard: bool) -> None:
    """Write a MatMul with a float result; `standard`: in standard operators."""
    g, node = found.g, found.node
    ((a, a_scale, a_zero), (b, b_scale, b_zero)) = found.operands
    if not standard:
        names = (a, b, a_scale, b_scale, a_zero, b_zero)
        found.put("MatMulIntegerToFloat", names, _MICROSOFT)
        return
    exact = g.op("MatMulInteger", a, b, a_zero, b_zero, at=node)
    floats = g.op("Cast", exact, at=node, to=TensorProto.FLOAT)
    factor = g.op("Mul", a_scale, b_scale, at=node)
    found.put("Mul", (floats, factor))


def _qdq_operator(site: Int8Site) -> _QdqOperator | None:
    """Return the operator of a site; None without all DQs and Qs, or if a Clip has an effect."""
    g, node = site.graph, site.node
    slots = (*site.operands, 1) if site.weight is not None else site.operands
    operands: list[_Codes] = []
    for slot in slots:
        if not nd.is_op(g.producer(node.input[slot]), "DequantizeLinear"):
            return None
        operands.append(_codes_behind(g, node.input[slot]))
    found = [_quantizer(g, output) for output in nd.outputs_of(node)]
    quantizers = tuple(quantizer for quantizer in found if quantizer is not None)
    is_float = not quantizers and nd.is_op(node, "MatMul", "Gemm")
    complete = is_float or len(quantizers) == len(found)
    return _QdqOperator(g, node, tuple(operands), quantizers) if complete else None


def _quantizer(g: Graph, value: str) -> NodeProto | None:
    """Return the Q that is the sole user of a value, or of the no-op Relu or Clip after it."""
    user = g.sole_user(value)
    if user is None or nd.is_op(user, "QuantizeLinear"):
        return user
    bounds = bounds_of(g, user)
    quantizer = g.sole_user(user.output[0]) if bounds is not None else None
    if bounds is None or quantizer is None or not nd.is_op(quantizer, "QuantizeLinear"):
        return None
    scale, zero = g.const(quantizer.input[1]), g.const(quantizer.input[2])
    assert scale is not None
    assert zero is not None
    codes = QParams(scale, zero, FORMATS[str(zero.dtype)])
    slack = _SLACK * (codes.high - codes.low)
    no_op = bounds[0] - slack <= codes.low and codes.high <= bounds[1] + slack
    return quantizer if no_op else None


def _codes_behind(g: Graph, view: str) -> _Codes:
    """Return the operands of a DQ, in this graph or an outer one; a bias has no zero point."""
    scope = g.scope_of(view)
    producer = scope.producer(view) if scope is not None else None
    assert producer is not None, view
    return producer.input[0], producer.input[1], given(producer, 2)
