"""Accessors of NodeProto: attributes, operands, results, subgraphs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from onnx import AttributeProto, GraphProto, NodeProto, helper

STANDARD_DOMAINS = ("", "ai.onnx")


def plain_domain(text: str) -> str:
    """Normalize the name of an operator domain: `ai.onnx` is ONNX's own, the empty string."""
    return "" if text == "ai.onnx" else text


def domain_of(node: NodeProto) -> str:
    """Return the normalized operator domain of a node."""
    return plain_domain(node.domain)


def qualified(node: NodeProto) -> str:
    """Return the operator as `domain::Op`, or as `Op` for ONNX's own domain."""
    domain = node.domain
    return node.op_type if domain in STANDARD_DOMAINS else f"{domain}::{node.op_type}"


def is_op(node: NodeProto | None, *op_types: str) -> bool:
    """Return whether `node` is one of these operators of ONNX's own domain."""
    return node is not None and node.op_type in op_types and node.domain in STANDARD_DOMAINS


def attr(node: NodeProto, name: str, default: Any = None) -> Any:
    """Return the decoded value of an attribute (strings as str), or `default`."""
    for attribute in node.attribute:
        if attribute.name == name:
            return _decode(attribute)
    return default


def attrs(node: NodeProto) -> dict[str, Any]:
    """Return all attributes, decoded: strings as str, lists as lists."""
    return {attribute.name: _decode(attribute) for attribute in node.attribute}


def _decode(attribute: AttributeProto) -> Any:
    value = helper.get_attribute_value(attribute)
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if attribute.type == AttributeProto.STRINGS:
        return [item.decode("utf-8", "replace") for item in value]
    single = (AttributeProto.SPARSE_TENSOR, AttributeProto.TYPE_PROTO)
    is_list = attribute.type >= AttributeProto.FLOATS and attribute.type not in single
    return list(value) if is_list else value


def make_node(
    op_type: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    attributes: Mapping[str, Any] | None = None,
    domain: str = "",
    name: str = "",
) -> NodeProto:
    """Make a NodeProto; attributes that are None are omitted."""
    node = NodeProto(op_type=op_type, domain=domain, name=name)
    node.input.extend(inputs)
    node.output.extend(outputs)
    for key, value in (attributes or {}).items():
        if value is not None:
            node.attribute.append(helper.make_attribute(key, value))
    return node


def graphs_of(node: NodeProto) -> Iterator[GraphProto]:
    """Yield the subgraphs among the attributes of a node."""
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield attribute.g
        elif attribute.type == AttributeProto.GRAPHS:
            yield from attribute.graphs


def inputs_of(node: NodeProto) -> list[str]:
    """Return the operands of a node, without omitted optional ones."""
    return [name for name in node.input if name]


def outputs_of(node: NodeProto) -> list[str]:
    """Return the results of a node, without omitted ones."""
    return [name for name in node.output if name]


def without_blanks(names: Iterable[str]) -> list[str]:
    """Return the names without the blanks at the end, which stand for omitted operands."""
    kept = list(names)
    while kept and not kept[-1]:
        kept.pop()
    return kept


def label(node: NodeProto) -> str:
    """Return the name of a node for messages."""
    where = node.name or next((name for name in node.output if name), "")
    return f"{node.op_type} '{where}'" if where else node.op_type
