"""The tables of lowering adapters match the schemas of onnx."""

from __future__ import annotations

from typing import Any

from onnx import defs

from passes.opset.lowering_table import DECOMPOSITIONS, LOWERING, LOWEST
from passes.opset.relabel import NEW_VALUES
from tests.passes.opset.test_adapter_table import schemas, transitions

SAME_MEANING = {
    11: "AveragePool Conv ConvTranspose If Loop LpPool MaxPool MaxUnpool NonMaxSuppression Scan",
    13: "NegativeLogLikelihoodLoss",
    15: "BatchNormalization",
}
"""Opset -> operators of which only the text of the specification changed, reviewed one by one."""

WITHOUT_OLDER_FORM = {
    26: "BitCast CumProd",
    24: "TensorScatter",
    20: "ImageDecoder RegexFullMatch StringConcat StringSplit",
    19: "DeformConv",
    18: "BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Col2Im",
    17: "DFT MelWeightMatrix STFT",
    16: "GridSample",
    15: "Optional OptionalGetElement OptionalHasElement",
    12: "Einsum",
    11: "BitShift ConcatFromSequence CumSum Det GatherElements GatherND Round ScatterND SequenceAt "
    "SequenceConstruct SequenceEmpty SequenceErase SequenceInsert SequenceLength SplitToSequence "
    "Unique",
    10: "ConvInteger DequantizeLinear IsInf MatMulInteger Mod NonMaxSuppression QLinearConv "
    "QLinearMatMul QuantizeLinear ReverseSequence RoiAlign StringNormalizer",
}
"""Opset -> operators that came with it and cannot be expressed before."""


def listed(table: dict[int, str]) -> set[tuple[str, int]]:
    return {(op, version) for version, ops in table.items() for op in ops.split()}


def adapted() -> set[tuple[str, int]]:
    return {(op, v) for table in (LOWERING, DECOMPOSITIONS) for v in table for op in table[v]}


def visible(old: defs.OpSchema, new: defs.OpSchema) -> bool:
    """Return whether the schemas show that `new` allows more than `old`."""
    added = set(new.attributes) - set(old.attributes)
    wider = any(
        set(b.types) - set(a.types)
        for before, after in ((old.inputs, new.inputs), (old.outputs, new.outputs))
        for a, b in zip(before, after, strict=False)
    )
    longer = len(new.inputs) > len(old.inputs) or len(new.outputs) > len(old.outputs)
    optional = [a.option for a in old.inputs] != [b.option for b in new.inputs]
    return bool(added) or wider or longer or optional


def test_changes_that_schemas_do_not_show_have_adapters_or_were_reviewed() -> None:
    table = schemas()
    values = {(op, version) for version, op, _ in NEW_VALUES}
    hidden: set[tuple[str, int]] = set()
    for op, version in transitions():
        if version <= LOWEST:
            continue
        old = table[op][max(v for v in table[op] if v < version)]
        new = table[op][version]
        if not visible(old, new) and not new.deprecated:
            hidden.add((op, version))
    assert hidden - adapted() - values == listed(SAME_MEANING)


def test_attributes_that_became_inputs_have_adapters() -> None:
    table = schemas()
    for op, version in transitions():
        old = table[op][max(v for v in table[op] if v < version)]
        moved = set(old.attributes) - set(table[op][version].attributes)
        if version > LOWEST and moved and not table[op][version].deprecated:
            assert (op, version) in adapted(), (op, version, moved)


def test_defaults_that_changed_are_written_by_an_adapter() -> None:
    """`relabel` writes a changed default; where it also changed its meaning, an adapter does."""
    table = schemas()
    for op, version in transitions():
        old = table[op][max(v for v in table[op] if v < version)]
        new = table[op][version]
        for name, attribute in new.attributes.items():
            if version <= LOWEST or name not in old.attributes:
                continue
            if attribute.default_value != old.attributes[name].default_value:
                assert (op, version) in adapted(), (op, version, name)


def test_new_operators_have_an_older_form_or_are_listed() -> None:
    without: set[tuple[str, int]] = set()
    for op, versions in schemas().items():
        first = min(versions)
        schema: Any = versions[first]  # its stubs lack these members
        body = schema.has_function or schema.has_context_dependent_function
        if first > LOWEST and not body and (op, first) not in adapted():
            without.add((op, first))
    assert without == listed(WITHOUT_OLDER_FORM)


def test_every_adapter_belongs_to_a_change() -> None:
    table = schemas()
    for op, version in adapted():
        assert version in table[op], (op, version)
    for version, op, name in NEW_VALUES:
        assert version in table[op]
        assert name in table[op][version].attributes
