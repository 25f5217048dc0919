"""Facts from the operator schemas of ONNX, cached."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from onnx import NodeProto, defs

from toolkit.ir import node as nd
from toolkit.ir.graph import Graph

_OPTIONAL = defs.OpSchema.FormalParameterOption.Optional


@dataclass(frozen=True, slots=True)
class OpFacts:
    """The schema of an operator at one opset, as far as passes need it."""

    optional_outputs: frozenset[int]
    defaults: Mapping[str, bytes]
    """Attribute name -> default value, as a serialized AttributeProto."""


def facts_of(graph: Graph, node: NodeProto) -> OpFacts | None:
    """Return the facts of a node's operator at the model's opset; None without a schema."""
    domain = nd.domain_of(node)
    return _lookup(node.op_type, graph.opset(domain), domain)


@lru_cache(maxsize=1024)
def schema_of(op_type: str, version: int, domain: str) -> defs.OpSchema | None:
    """Return the schema of an operator at an opset, or None if ONNX has none."""
    known = defs.has(op_type, version, domain)
    return defs.get_schema(op_type, version, domain) if known else None


@lru_cache(maxsize=1024)
def _lookup(op_type: str, version: int, domain: str) -> OpFacts | None:
    schema = schema_of(op_type, version, domain)
    if schema is None:
        return None
    attributes = schema.attributes.items()
    defaults = {n: a.default_value for n, a in attributes if a.default_value.name}
    return OpFacts(
        optional_outputs=frozenset(
            i for i, output in enumerate(schema.outputs) if output.option == _OPTIONAL
        ),
        defaults={n: d.SerializeToString(deterministic=True) for n, d in defaults.items()},
    )
