"""Decide from ONNX's schemas whether a node means the same in the version before of its operator.

Most versions of an operator add element types, or optional inputs, outputs and attributes. A node
that uses none of them is valid, with the same meaning, in the version before. Changes of meaning
that schemas do not show are in `NEW_VALUES` and in the adapters of `lowering_table`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache

from onnx import AttributeProto, NodeProto, TensorProto, TypeProto, defs, helper

from passes.opset.adapter_context import AdapterContext, CannotConvert
from toolkit.ir import Model, node as nd
from toolkit.ir.op_schema import schema_of

NEW_VALUES: Mapping[tuple[int, str, str], tuple[str, ...]] = {
    (18, "ScatterElements", "reduction"): ("max", "min"),
    (18, "ScatterND", "reduction"): ("max", "min"),
    (19, "Pad", "mode"): ("wrap",),
    (19, "Resize", "coordinate_transformation_mode"): ("half_pixel_symmetric",),
}
"""(opset, operator, attribute) -> values that it takes from this opset on."""

_REQUIRED = defs.OpSchema.FormalParameterOption.Single
_OF_TYPE_ATTRIBUTES = ("to", "dtype", "output_dtype", "stash_type", "softmax_precision")


def type_text(dtype: int) -> str:
    """Return a tensor type in the notation of schemas: tensor(float)."""
    return f"tensor({TensorProto.DataType.Name(dtype).lower()})"


def occurring_types(model: Model) -> frozenset[str]:
    """Return the types that occur anywhere in a model, in the notation of schemas.

    The type of a value that is unknown is assumed to be one of them: operators other than casts,
    constants and those with one output type pass on the types of their inputs.
    """
    return frozenset(_types_in(model))


def _types_in(model: Model) -> Iterator[str]:
    for graph in model.graphs():
        for declared in (*graph.interface_inputs(), *graph.interface_outputs()):
            yield from _declared_types(declared.type)
        yield from (type_text(tensor.data_type) for tensor in graph.initializers.values())
        for node in graph.nodes:
            yield from (type_text(t) for t in map(graph.dtype, nd.outputs_of(node)) if t)
            for attribute in node.attribute:
                if attribute.name in _OF_TYPE_ATTRIBUTES and attribute.i:
                    yield type_text(attribute.i)
                elif attribute.type == AttributeProto.TENSOR:
                    yield type_text(attribute.t.data_type)
            if not nd.domain_of(node) and defs.has(node.op_type):
                yield from _fixed_types(node.op_type)


def _declared_types(declared: TypeProto) -> Iterator[str]:
    kind = declared.WhichOneof("value")
    if kind == "tensor_type" and declared.tensor_type.elem_type:
        yield type_text(declared.tensor_type.elem_type)
    elif kind in ("sequence_type", "optional_type"):
        yield _SEQUENCES


_SEQUENCES = "seq or optional"
"""Stands for all types other than tensors."""


def _fixed_types(op_type: str) -> Iterator[str]:
    """Yield the output types that an operator has whatever its inputs."""
    if op_type == "QuantizeLinear":
        yield "tensor(uint8)"  # without a zero point
    for output in defs.get_schema(op_type).outputs:
        if len(output.types) == 1:
            yield from (text for text in output.types if text.startswith("tensor"))
        if not any(text.startswith("tensor") for text in output.types):
            yield _SEQUENCES


def relabel(ctx: AdapterContext, version: int, occurring: frozenset[str]) -> None:
    """Make the node valid in the opset before `version`, where its operator changed.

    Removes attributes that state a new default, and writes old defaults that have changed. Raises
    CannotConvert, before the first edit, for a node that uses what `version` added.
    """
    node = ctx.node
    new, old = schema_at(node.op_type, version), schema_at(node.op_type, version - 1)
    if old is None or new is None:
        raise CannotConvert("older opsets do not have this operator")
    if old.deprecated and not new.deprecated:
        raise CannotConvert("its older form is deprecated")
    dropped: list[str] = []
    written: list[AttributeProto] = []
    if not _same_attributes(node.op_type, version):
        dropped, written = _attribute_changes(node, old, new)
    for attribute in node.attribute:
        added = NEW_VALUES.get((version, node.op_type, attribute.name), ())
        if added and _shown(attribute) in added:
            raise CannotConvert(f"{attribute.name}={_shown(attribute)} is new")
    _require_operands(ctx, old, new)
    if may_need_types(node.op_type, version, occurring):
        _require_types(ctx, old, new, occurring)
    for name in dropped:
        ctx.graph.del_attr(node, name)
    for attribute in written:
        ctx.set(**{attribute.name: helper.get_attribute_value(attribute)})
    ctx.set_inputs(*node.input)
    if len(node.output) > old.max_output:
        ctx.graph.set_outputs(node, node.output[: old.max_output])


def schema_at(op_type: str, version: int) -> defs.OpSchema | None:
    """Return the schema of a standard operator at an opset, or None."""
    return schema_of(op_type, version, "")


def changes_at(op_type: str, version: int) -> bool:
    """Return whether an operator is new, or has changed, in this opset."""
    schema = schema_at(op_type, version)
    return schema is not None and schema.since_version == version


def _attribute_changes(
    node: NodeProto, old: defs.OpSchema, new: defs.OpSchema
) -> tuple[list[str], list[AttributeProto]]:
    """Return the attributes to remove, and the defaults to write."""
    dropped: list[str] = []
    written: list[AttributeProto] = []
    present = {a.name: a for a in node.attribute}
    for name, attribute in present.items():
        known = old.attributes.get(name)
        if known is not None:
            continue
        default = new.attributes[name].default_value if name in new.attributes else None
        if default is None or attribute.ref_attr_name or not _equal(attribute, default):
            shown = "" if attribute.ref_attr_name else f"={_shown(attribute)}"
            raise CannotConvert(f"attribute {name}{shown} is new")
        dropped.append(name)
    for name, known in old.attributes.items():
        if name in present:
            continue
        default = new.attributes[name].default_value if name in new.attributes else AttributeProto()
        if default.name and not _equal(default, known.default_value):
            written.append(default)
        elif known.required:
            raise CannotConvert(f"attribute {name} was required, and it has none")
    return dropped, written


def _equal(one: AttributeProto, other: AttributeProto) -> bool:
    if one.type != other.type:
        return False
    return bool(helper.get_attribute_value(one) == helper.get_attribute_value(other))


def _shown(attribute: AttributeProto) -> str:
    value = helper.get_attribute_value(attribute)
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _require_operands(ctx: AdapterContext, old: defs.OpSchema, new: defs.OpSchema) -> None:
    inputs = nd.without_blanks(ctx.node.input)
    if len(inputs) > old.max_input:
        raise CannotConvert(f"input {new.inputs[old.max_input].name} is new")
    for index, formal in enumerate(old.inputs):
        if formal.option == _REQUIRED and not ctx.input(index):
            raise CannotConvert(f"input {formal.name} was required, and it has none")
    if ctx.used_outputs(old.max_output):
        raise CannotConvert(f"output {new.outputs[old.max_output].name} is new")


def _require_types(
    ctx: AdapterContext, old: defs.OpSchema, new: defs.OpSchema, occurring: frozenset[str]
) -> None:
    by_parameter: dict[str, str] = {}
    for value, before, _ in _typed(ctx, old, new):  # one type where now there may be two
        known = value_type(ctx, value)
        if not known or not before.is_homogeneous:
            continue
        if by_parameter.setdefault(before.type_str, known) != known:
            raise CannotConvert(f"'{value}' is a {known}, unlike its other operands")
    for value, before, after in _typed(ctx, old, new):
        added = set(after.types) - set(before.types)
        known = value_type(ctx, value) or by_parameter.get(before.type_str, "")
        if known:
            if known in added:
                raise CannotConvert(f"'{value}' is a {known}, which is new for it")
        elif added & occurring or (_SEQUENCES in occurring and _has_sequences(added)):
            raise CannotConvert(f"the type of '{value}' is unknown")


def _typed(
    ctx: AdapterContext, old: defs.OpSchema, new: defs.OpSchema
) -> Iterator[tuple[str, defs.OpSchema.FormalParameter, defs.OpSchema.FormalParameter]]:
    """Yield each operand and result with its old and new formal parameter."""
    for values, before, after in (
        (ctx.node.input, old.inputs, new.inputs),
        (ctx.node.output, old.outputs, new.outputs),
    ):
        for index, value in enumerate(values):
            if value and before and after:
                yield (
                    value,
                    before[min(index, len(before) - 1)],
                    after[min(index, len(after) - 1)],
                )


def _has_sequences(types: set[str]) -> bool:
    return any(text.startswith(("seq", "optional")) for text in types)


def value_type(ctx: AdapterContext, value: str) -> str:
    """Return the tensor type of a value in the notation of schemas; "" if it is unknown."""
    found = ctx.types.of(ctx.graph, value)
    return type_text(found.dtype) if found is not None and found.dtype else ""


@lru_cache(maxsize=4096)
def may_need_types(op_type: str, version: int, occurring: frozenset[str]) -> bool:
    """Return whether an operator's change concerns types that the model has, somewhere."""
    new, old = schema_at(op_type, version), schema_at(op_type, version - 1)
    if new is None or old is None:
        return True
    pairs = [
        *zip(old.inputs, new.inputs, strict=False),
        *zip(old.outputs, new.outputs, strict=False),
    ]
    if any(a.type_str != b.type_str for a, b in pairs):
        return True
    added = {text for a, b in pairs for text in set(b.types) - set(a.types)}
    return bool(added & occurring) or (_SEQUENCES in occurring and _has_sequences(added))


@lru_cache(maxsize=4096)
def _same_attributes(op_type: str, version: int) -> bool:
    """Return whether an operator has the same attributes and defaults in both opsets."""
    new, old = schema_at(op_type, version), schema_at(op_type, version - 1)
    if new is None or old is None or set(new.attributes) != set(old.attributes):
        return False
    return all(
        a.default_value == old.attributes[name].default_value
        and a.required == old.attributes[name].required
        for name, a in new.attributes.items()
    )
