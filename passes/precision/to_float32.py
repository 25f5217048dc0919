"""Convert a 16-bit model to float32, which CPUs compute faster and which can be quantized.

All stored tensors, type attributes and declarations of 16 bits become float32. Casts at the inputs
and outputs keep the interface. The result is more precise than the original: intermediate values
are not rounded to 16 bits.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from onnx import AttributeProto, NodeProto, TensorProto, ValueInfoProto

from passes.precision.half_writer import converted, retyped
from passes.simplify.inline import InlineFunctions
from toolkit.ir import Graph, Model, TensorType, node as nd
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
"""Attributes that set the type of a result or of the computation."""
_READS_BITS = ("BitCast",)
"""Operators whose result depends on the encoding of numbers."""


@dataclass(frozen=True, slots=True)
class Float32:
    """Convert a 16-bit model to 32-bit floats."""

    name: ClassVar[str] = "fp32"
    tolerance: ClassVar[Tolerance] = FLOAT
    io: Literal["keep", "fp32"] = field(
        default="keep", metadata={"help": "fp32: inputs and outputs too, with --validate off."}
    )

    @property
    def incomparable(self) -> str:
        """The reason why the result cannot be compared with the original, or blank."""
        return "io=fp32 changes the types of inputs and outputs" if self.io == "fp32" else ""

    def run(self, model: Model, ctx: Context) -> None:
        InlineFunctions().run(model, ctx)
        interface = _narrow_interface(model.graph) if self.io == "keep" else {}
        cast = frozenset(name for name in interface if _is_cast(model.graph, name))
        site = _first_narrow(model, interface, cast)
        if site is None:
            return
        reason = _obstacle(model)
        if reason:
            ctx.note(f"not converted: {reason}")
        elif model.graph.begin("fp32", site):
            _widen(model, interface, cast)


def _obstacle(model: Model) -> str:
    """Return why the model cannot be converted, or blank."""
    if model.functions:
        return "it has functions that could not be inlined"
    for g in model.graphs():
        if g.has_sparse:
            return "it has sparse tensors"
        for declared in (*g.interface_inputs(), *g.interface_outputs()):
            if declared.type.WhichOneof("value") not in (None, "tensor_type"):
                return f"'{declared.name}' is not a tensor"
        for node in g.nodes:
            if nd.is_op(node, *_READS_BITS):
                return f"{nd.label(node)} depends on the encoding of numbers"
            if any(a.type == AttributeProto.TYPE_PROTO for a in node.attribute):
                return f"the result of {nd.label(node)} is not a tensor"
    return ""


# -- inputs and outputs


def _narrow_interface(g: Graph) -> dict[str, int]:
    """Return the 16-bit inputs and outputs with their types."""
    declared = (*g.interface_inputs(), *g.interface_outputs())
    kinds = ((v.name, v.type.tensor_type.elem_type) for v in declared)
    return {name: kind for name, kind in kinds if kind in _NARROW}


def _is_cast(g: Graph, name: str) -> bool:
    """Whether an input is used by Casts only, or an unused output is produced by a Cast."""
    producer, users = g.producer(name), g.users(name)
    if producer is None:
        return all(nd.is_op(user, "Cast") for user in users)
    return nd.is_op(producer, "Cast") and not users


def _cast_interface(g: Graph, interface: Iterable[tuple[str, int]]) -> dict[str, str]:
    """Insert Casts after inputs and before outputs; map old names to float32 names."""
    renamed: dict[str, str] = {}
    for name, kind in interface:
        producer = g.producer(name)
        wide = renamed[name] = g.fresh(name)
        g.learn_type(wide, TensorType(TensorProto.FLOAT, g.shape(name)))
        if producer is None:
            g.add("Cast", [name], [wide], {"to": TensorProto.FLOAT})
        else:
            g.set_outputs(producer, [wide if out == name else out for out in producer.output])
            g.add("Cast", [wide], [name], {"to": kind}, at=producer)
    return renamed


def _use_wide(g: Graph, main: Graph, renamed: dict[str, str]) -> None:
    """Replace narrow values with wide ones as operands, and as outputs of subgraphs."""

    def wide(name: str) -> str:
        return renamed[name] if name in renamed and g.scope_of(name) is main else name

    for node in g.nodes:
        is_input_cast = nd.is_op(node, "Cast") and renamed.get(node.input[0]) == node.output[0]
        if not is_input_cast:
            g.set_inputs(node, [wide(name) for name in node.input])
    if g is not main and any(wide(name) != name for name in g.outputs):
        outputs = [retyped(v, v.type.tensor_type.elem_type) for v in g.interface_outputs()]
        for value in outputs:
            value.name = wide(value.name)
        g.set_interface(outputs=outputs)


# -- everything else


def _first_narrow(
    model: Model, interface: Container[str], cast: frozenset[str]
) -> NodeProto | None:
    """Return the first node to convert; None if all are Casts at inputs and outputs."""
    for g in model.graphs():
        main = g is model.graph
        stored = any(
            t.data_type in _NARROW for n, t in g.initializers.items() if n not in interface
        )
        declared = (*g.interface_inputs(), *g.interface_outputs())
        narrow = [v.name for v in declared if v.type.tensor_type.elem_type in _NARROW]
        if stored or any(not main or name not in cast for name in narrow):
            return next(iter(g.nodes), None)
        for node in g.nodes:
            if any(map(_is_narrow, node.attribute)) and not _is_output_cast(g, node, cast):
                return node
    return None


def _is_narrow(attribute: AttributeProto) -> bool:
    if attribute.type == AttributeProto.TENSOR:
        return attribute.t.data_type in _NARROW
    is_type = attribute.name in _NAMES_A_TYPE and attribute.type == AttributeProto.INT
    return is_type and attribute.i in _NARROW


def _is_output_cast(g: Graph, node: NodeProto, cast: Container[str]) -> bool:
    """Whether `node` is the Cast before an output."""
    return g.parent is None and bool(node.output) and node.output[0] in cast


def _widen(model: Model, interface: dict[str, int], cast: frozenset[str]) -> None:
    main = model.graph
    for g in model.graphs():
        kept = interface if g is main else {}
        for name, tensor in list(g.initializers.items()):
            if tensor.data_type in _NARROW and name not in kept:
                g.put_initializer(_wide(g, name, tensor))
        for node in g.nodes:
            if not _is_output_cast(g, node, cast):
                _widen_attributes(g, node)
        _widen_types(g, kept)
    renamed = _cast_interface(
        main, [(name, kind) for name, kind in interface.items() if name not in cast]
    )
    for g in model.graphs():
        _use_wide(g, main, renamed)


def _widen_attributes(g: Graph, node: NodeProto) -> None:
    for attribute in filter(_is_narrow, list(node.attribute)):
        is_tensor = attribute.type == AttributeProto.TENSOR
        wide = _wide(g, attribute.t.name, attribute.t) if is_tensor else TensorProto.FLOAT
        g.set_attr(node, attribute.name, wide)


def _wide(g: Graph, name: str, tensor: TensorProto) -> TensorProto:
    return g.model.weights.put(name, converted(g.model.weights.array(tensor), np.float32))


def _widen_types(g: Graph, kept: Container[str]) -> None:
    """Make the declared and inferred types of a graph float32."""
    g.set_interface(
        inputs=[v if v.name in kept else _widened(v) for v in g.interface_inputs()],
        outputs=[v if v.name in kept else _widened(v) for v in g.interface_outputs()],
    )
    results = (name for node in g.nodes for name in nd.outputs_of(node))
    for name in (*g.inputs, *results):
        known = g.type(name)
        if known is not None and known.dtype in _NARROW and name not in kept:
            g.set_type(name, TensorType(TensorProto.FLOAT, known.shape))


def _widened(value: ValueInfoProto) -> ValueInfoProto:
    is_narrow = value.type.tensor_type.elem_type in _NARROW
    return retyped(value, TensorProto.FLOAT) if is_narrow else value
