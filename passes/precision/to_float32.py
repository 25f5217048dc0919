"""A model of 16-bit floats in 32 bits: as a CPU computes them best, and as they can be quantized.

Every 16-bit value of the model becomes one of 32 bits: stored tensors, the types that attributes
and declarations name, and with them all that is computed. At the model's own inputs and outputs
casts stand instead, so that its callers see no difference. Nothing is rounded in between any more:
what the 32 bits give is what the 16 bits come close to.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from onnx import AttributeProto, NodeProto, TensorProto, TypeProto, ValueInfoProto

from passes.precision.half_writer import converted
from passes.simplify.inline import InlineFunctions
from toolkit.ir import node as nd
from toolkit.ir.graph import Graph
from toolkit.ir.model import Model
from toolkit.ir.tensor_type import TensorType
from toolkit.verification.tolerance import FLOAT, Tolerance

if TYPE_CHECKING:
    from toolkit.pass_manager.protocol import Context

_NARROW = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
_NAMES_A_TYPE = frozenset(
    (
        *("to", "dtype", "output_dtype", "output_datatype"),
        *("stash_type", "softmax_precision", "precision"),
    )
)
"""Attributes that hold the type of a result, or of what is computed on the way to it."""
_READS_BITS = ("BitCast",)


@dataclass(frozen=True, slots=True)
class Float32:
    """Compute in 32-bit floats what a model computes in 16 bits."""

    name: ClassVar[str] = "fp32"
    tolerance: ClassVar[Tolerance] = FLOAT
    io: Literal["keep", "fp32"] = field(
        default="keep", metadata={"help": "fp32: inputs and outputs too, with --validate off."}
    )

    @property
    def incomparable(self) -> str:
        """Why its result cannot be compared with the original; empty where it can."""
        return "io=fp32 changes the types of inputs and outputs" if self.io == "fp32" else ""

    def run(self, model: Model, ctx: Context) -> None:
        InlineFunctions().run(model, ctx)
        ends = _narrow_ends(model.graph) if self.io == "keep" else {}
        cast = frozenset(name for name in ends if _is_cast(model.graph, name))
        site = _first_narrow(model, ends, cast)
        if site is None:
            return
        reason = _obstacle(model)
        if reason:
            ctx.note(f"the model stays as it is: {reason}")
        elif model.graph.begin("fp32", site):
            _widen(model, ends, cast)


def _obstacle(model: Model) -> str:
    """What keeps a model from being widened."""
    if model.functions:
        return "it has functions that could not be inlined"
    for g in model.graphs():
        if g.has_sparse:
            return "it has sparse tensors"
        for declared in (*g.interface_inputs(), *g.interface_outputs()):
            if not _is_tensor(declared.type):
                return f"'{declared.name}' is no tensor"
        for node in g.nodes:
            if nd.is_op(node, *_READS_BITS):
                return f"{nd.label(node)} reads the bits of numbers"
            if any(a.type == AttributeProto.TYPE_PROTO for a in node.attribute):
                return f"{nd.label(node)} makes what is no tensor"
    return ""


def _is_tensor(type_: TypeProto) -> bool:
    return type_.WhichOneof("value") in (None, "tensor_type")


# -- the ends


def _narrow_ends(g: Graph) -> dict[str, int]:
    """The inputs and outputs of 16 bits, with their types."""
    ends = (*g.interface_inputs(), *g.interface_outputs())
    kinds = ((v.name, v.type.tensor_type.elem_type) for v in ends)
    return {name: kind for name, kind in kinds if kind in _NARROW}


def _is_cast(g: Graph, end: str) -> bool:
    """Whether only casts read an input, or a Cast gives an output that nobody else reads."""
    maker, users = g.producer(end), g.users(end)
    if maker is None:
        return all(nd.is_op(user, "Cast") for user in users)
    return nd.is_op(maker, "Cast") and not users


def _cast_ends(g: Graph, ends: Iterable[tuple[str, int]]) -> dict[str, str]:
    """Casts behind inputs and in front of outputs; the names of the wide values, by the narrow."""
    renamed: dict[str, str] = {}
    for name, kind in ends:
        maker = g.producer(name)
        wide = renamed[name] = g.fresh(name)
        g.learn_type(wide, TensorType(TensorProto.FLOAT, g.shape(name)))
        if maker is None:
            g.add("Cast", [name], [wide], {"to": TensorProto.FLOAT})
        else:
            g.set_outputs(maker, [wide if made == name else made for made in maker.output])
            g.add("Cast", [wide], [name], {"to": kind}, at=maker)
    return renamed


def _read_wide(g: Graph, main: Graph, renamed: dict[str, str]) -> None:
    """Let nodes, and subgraphs that hand on what is around them, read the wide values."""

    def read(name: str) -> str:
        return renamed[name] if name in renamed and g.scope_of(name) is main else name

    for node in g.nodes:
        is_end = nd.is_op(node, "Cast") and renamed.get(node.input[0]) == node.output[0]
        if not is_end:
            g.set_inputs(node, [read(name) for name in node.input])
    if g is not main and any(read(name) != name for name in g.outputs):
        g.set_interface(outputs=[_renamed(v, read(v.name)) for v in g.interface_outputs()])


def _renamed(value: ValueInfoProto, name: str) -> ValueInfoProto:
    copy = ValueInfoProto()
    copy.CopyFrom(value)
    copy.name = name
    return copy


# -- what is inside


def _first_narrow(model: Model, ends: Container[str], cast: frozenset[str]) -> NodeProto | None:
    """The first node with anything of 16 bits about it; None where the casts are in place."""
    for g in model.graphs():
        main = g is model.graph
        stored = any(t.data_type in _NARROW for n, t in g.initializers.items() if n not in ends)
        declared = (*g.interface_inputs(), *g.interface_outputs())
        there = [v.name for v in declared if v.type.tensor_type.elem_type in _NARROW]
        if stored or any(not main or name not in cast for name in there):
            return next(iter(g.nodes), None)
        for node in g.nodes:
            if any(map(_is_narrow, node.attribute)) and not _gives(g, node, cast):
                return node
    return None


def _is_narrow(attribute: AttributeProto) -> bool:
    if attribute.type == AttributeProto.TENSOR:
        return attribute.t.data_type in _NARROW
    is_type = attribute.name in _NAMES_A_TYPE and attribute.type == AttributeProto.INT
    return is_type and attribute.i in _NARROW


def _gives(g: Graph, node: NodeProto, cast: Container[str]) -> bool:
    """Whether it is the Cast in front of an output."""
    return g.parent is None and bool(node.output) and node.output[0] in cast


def _widen(model: Model, ends: dict[str, int], cast: frozenset[str]) -> None:
    main = model.graph
    for g in model.graphs():
        kept = ends if g is main else {}
        for name, tensor in list(g.initializers.items()):
            if tensor.data_type in _NARROW and name not in kept:
                g.put_initializer(_wide(g, name, tensor))
        for node in g.nodes:
            if not _gives(g, node, cast):
                _widen_attributes(g, node)
        _widen_types(g, kept)
    renamed = _cast_ends(main, [(name, kind) for name, kind in ends.items() if name not in cast])
    for g in model.graphs():
        _read_wide(g, main, renamed)


def _widen_attributes(g: Graph, node: NodeProto) -> None:
    for attribute in filter(_is_narrow, list(node.attribute)):
        is_tensor = attribute.type == AttributeProto.TENSOR
        wide = _wide(g, attribute.t.name, attribute.t) if is_tensor else TensorProto.FLOAT
        g.set_attr(node, attribute.name, wide)


def _wide(g: Graph, name: str, tensor: TensorProto) -> TensorProto:
    return g.model.weights.put(name, converted(g.model.weights.array(tensor), np.float32))


def _widen_types(g: Graph, kept: Container[str]) -> None:
    """What is declared, and known, of the values of a graph."""
    g.set_interface(
        inputs=[v if v.name in kept else _widened(v) for v in g.interface_inputs()],
        outputs=[v if v.name in kept else _widened(v) for v in g.interface_outputs()],
    )
    for name in _values(g):
        known = g.type(name)
        if known is not None and known.dtype in _NARROW and name not in kept:
            g.set_type(name, TensorType(TensorProto.FLOAT, known.shape))


def _values(g: Graph) -> Iterator[str]:
    yield from g.inputs
    for node in g.nodes:
        yield from nd.outputs_of(node)


def _widened(value: ValueInfoProto) -> ValueInfoProto:
    if value.type.tensor_type.elem_type not in _NARROW:
        return value
    copy = _renamed(value, value.name)
    copy.type.tensor_type.elem_type = TensorProto.FLOAT
    return copy
