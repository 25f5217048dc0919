"""Replace float operators between DQs and a Q by integer operators.

    DQ, DQ -> Conv -> [Relu] -> Q     becomes     QLinearConv

A Relu or Clip is dropped if the range of the result's codes makes it a no-op. Otherwise, and if no
integer operator exists, the Q/DQ pairs stay and compute the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from onnx import NodeProto, TensorProto

from passes.analysis.operands import given
from passes.quantize.schemes.static.quantizable_ops import Int8Site, bounds_of
from toolkit.ir import node as nd
from toolkit.ir.graph import Graph
from toolkit.quantization.number_format import FORMATS
from toolkit.quantization.qparams import QParams

_MICROSOFT = "com.microsoft"
_BINARY = ("Add", "Mul")
_UNARY = ("Sigmoid", "LeakyRelu", "AveragePool", "GlobalAveragePool", "Softmax")
_SLACK = 1e-6
"""Tolerance, relative to the range, for a code's value outside a bound: rounding of the scale."""


@dataclass(frozen=True, slots=True)
class _CodesNames:
    """The names of a tensor's codes, scale and zero point."""

    values: str
    scale: str
    zero: str

    @property
    def names(self) -> tuple[str, str, str]:
        return self.values, self.scale, self.zero


@dataclass(frozen=True, slots=True, eq=False)
class _QdqOperator:
    """A float operator with the codes of its operands and the quantizers of its results."""

    g: Graph
    node: NodeProto
    operands: tuple[_CodesNames, ...]
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
    """Replace sites in Q/DQ form by integer operators, with `standard` only by those of ONNX."""
    for site in sites:
        found = _qdq_operator(site)
        if found is not None and site.graph.begin("quantized-operator", site.node):
            _write(site, found, standard)


def _write(site: Int8Site, found: _QdqOperator, standard: bool) -> None:
    g, node, op = found.g, found.node, found.node.op_type
    attributes = nd.attrs(node)
    xs = found.operands
    if site.kind == "carry" or (op == "Concat" and _has_one_scale(found)):
        _carry(found, attributes)
    elif op == "Conv" and found.quantizers:
        bias = [_codes_behind(g, node.input[2]).values] if given(node, 2) else []
        names = (*xs[0].names, *xs[1].names, *found.result, *bias)
        found.put("QLinearConv", names, **attributes)
    elif op == "MatMul" and found.quantizers:
        found.put("QLinearMatMul", (*xs[0].names, *xs[1].names, *found.result))
    elif op == "MatMul" and not standard:
        (a, b) = xs
        names = (a.values, b.values, a.scale, b.scale, a.zero, b.zero)
        found.put("MatMulIntegerToFloat", names, _MICROSOFT)
    elif op == "MatMul":
        _matmul_integer(found)
    elif standard:
        return
    elif op == "Gemm":
        bias = _codes_behind(g, node.input[2]).values if given(node, 2) else ""
        result = found.result if found.quantizers else ()
        names = nd.without_blanks((*xs[0].names, *xs[1].names, bias, *result))
        found.put("QGemm", names, _MICROSOFT, transB=nd.attr(node, "transB", 0))
    elif op in _BINARY:
        found.put(f"QLinear{op}", (*xs[0].names, *xs[1].names, *found.result), _MICROSOFT)
    elif op in _UNARY:
        if op == "Softmax":
            attributes = {"axis": nd.attr(node, "axis", -1), "opset": g.opset()}
        if any(step != 1 for step in attributes.pop("dilations", ())):
            return
        found.put(f"QLinear{op}", (*xs[0].names, *found.result), _MICROSOFT, **attributes)
    elif op == "Concat":
        names = (*found.result, *(name for x in xs for name in x.names))
        found.put("QLinearConcat", names, _MICROSOFT, **attributes)


def _carry(found: _QdqOperator, attributes: dict[str, Any]) -> None:
    """Apply a data movement to the codes."""
    node = found.node
    values = [x.values for x in found.operands]
    inputs = [*values, *list(node.input)[len(values) :]]
    if nd.is_op(node, "Pad") and attributes.get("mode", "constant") == "constant":
        inputs = [*inputs, ""][:3]
        inputs[2] = found.operands[0].zero
        inputs += list(node.input)[3:]
    found.put(node.op_type, inputs, **attributes)


def _matmul_integer(found: _QdqOperator) -> None:
    """Write a MatMul with a float result in standard operators."""
    g, node = found.g, found.node
    (a, b) = found.operands
    exact = g.op("MatMulInteger", a.values, b.values, a.zero, b.zero, at=node)
    floats = g.op("Cast", exact, at=node, to=TensorProto.FLOAT)
    factor = g.op("Mul", a.scale, b.scale, at=node)
    found.put("Mul", (floats, factor))


def _qdq_operator(site: Int8Site) -> _QdqOperator | None:
    """Return the operator of a site; None without all DQs and Qs, or if a Clip has an effect."""
    g, node = site.graph, site.node
    slots = (*site.operands, 1) if site.weight is not None else site.operands
    operands: list[_CodesNames] = []
    for slot in slots:
        if not nd.is_op(g.producer(node.input[slot]), "DequantizeLinear"):
            return None
        operands.append(_codes_behind(g, node.input[slot]))
    quantizers: list[NodeProto] = []
    for output in nd.outputs_of(node):
        found = _quantizer(g, output)
        if found is not None:
            quantizers.append(found)
    if not quantizers and nd.is_op(node, "MatMul", "Gemm"):
        return _QdqOperator(g, node, tuple(operands), ())
    if len(quantizers) != len(nd.outputs_of(node)):
        return None
    return _QdqOperator(g, node, tuple(operands), tuple(quantizers))


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


def _codes_behind(g: Graph, view: str) -> _CodesNames:
    """Return the operands of a DQ, in this graph or an outer one; a bias has no zero point."""
    scope = g.scope_of(view)
    producer = scope.producer(view) if scope is not None else None
    assert producer is not None, view
    return _CodesNames(producer.input[0], producer.input[1], given(producer, 2))


def _has_one_scale(found: _QdqOperator) -> bool:
    return all((x.scale, x.zero) == found.result for x in found.operands)
