"""Infer the domain of an input from the uses of its values.

An integer that indexes a table is an id below the table's number of rows; one that is compared with
constants is a choice among them; `(1 - m) * -1e4` is a mask; the sequence lengths of an RNN are
lengths. Names only break ties.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from onnx import TensorProto

from toolkit.feeds.domains import (
    Anything,
    Domain,
    Ids,
    Length,
    Mask,
    OneOf,
    Parameter,
    Pattern,
    Positive,
)
from toolkit.feeds.input_uses import Use, scalar, uses_of
from toolkit.ir import node as nd
from toolkit.ir.graph import Graph
from toolkit.ir.op_traits import INDICES, PADDING_MASKS, RECURRENT
from toolkit.ir.tensor_type import FLOATS, FLOATS_OF_8_BITS
from toolkit.symbolic import Dim

_BOOLEAN, _STRING = TensorProto.BOOL, TensorProto.STRING
_INTEGERS = (TensorProto.INT32, TensorProto.INT64)
_POSITIVE: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("Sqrt", "Log", "Pow", "Reciprocal", "Bernoulli"), (0,)),
    **dict.fromkeys(("Asin", "Acos", "Atanh"), (0,)),
    **dict.fromkeys(("Div", "Mod", "QuantizeLinear", "DequantizeLinear"), (1,)),
    "BatchNormalization": (4,),
    "NonMaxSuppression": (3, 4),
    **dict.fromkeys(("QLinearMatMul", "QLinearConv"), (1, 4, 6)),
}
"""Operands that must be above 0 (some also at most 1), by operator."""

_PARAMETERS: dict[tuple[str, int], Pattern] = {
    ("Reshape", 1): "reshape",
    **dict.fromkeys([("Expand", 1), ("TopK", 1), ("Range", 2), ("Slice", 4)], "ones"),
    ("Trilu", 1): "ones",
    **dict.fromkeys([("Upsample", 1), ("Resize", 2)], "twos"),
    **dict.fromkeys([("ConstantOfShape", 0), ("Tile", 1), ("Pad", 1), ("BitShift", 1)], "small"),
    **dict.fromkeys([("AffineGrid", 1), ("CenterCropPad", 1), ("Loop", 0)], "small"),
    **dict.fromkeys([("Slice", 1), ("Range", 0), ("CumSum", 1), ("SequenceAt", 1)], "zeros"),
    **dict.fromkeys([("SequenceErase", 1), ("SequenceInsert", 2), ("Dropout", 1)], "zeros"),
    **dict.fromkeys([("Dropout", 2), ("CumProd", 1), ("DFT", 2), ("TensorScatter", 2)], "zeros"),
    **dict.fromkeys([("Slice", 3), ("Pad", 3), ("Squeeze", 1), ("Unsqueeze", 1)], "axes"),
    **dict.fromkeys([("Resize", 3), ("OneHot", 1), ("Range", 1), ("HannWindow", 0)], "size"),
    ("NonMaxSuppression", 2): "size",
    **dict.fromkeys([("HammingWindow", 0), ("BlackmanWindow", 0), ("DFT", 1)], "size"),
}

_COMPARISONS = ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual")


def infer_domain(graph: Graph, name: str) -> Domain:
    """Return the domain of the graph's input `name`."""
    uses = uses_of(graph, name)
    dtype, rank = graph.dtype(name), graph.rank(name)
    if dtype == _STRING:
        return Anything()
    parameter = _first(uses, _parameter)
    if dtype == _BOOLEAN:
        return parameter or _boolean(uses, name, rank)
    if dtype in FLOATS | FLOATS_OF_8_BITS:
        if _is_mask(uses, name, integer=False):
            return Mask()
        return parameter or _first(uses, _positive) or Anything()
    compared = _compared_constants(uses)
    ids = [found for found in map(_ids, uses) if found is not None]
    if ids:
        return _narrowest(ids, compared)
    found = _first(uses, _length) or parameter
    if found is not None:
        return found
    single = graph.shape(name) in ((), (1,))
    if compared and (single or not {0, 1}.issuperset(compared)):
        return OneOf((*compared, *_unlike(compared)))
    if _is_mask(uses, name, integer=True) or compared:
        return OneOf((1, 0)) if single else Mask()
    return _first(uses, _positive) or Anything()


def _first(uses: Sequence[Use], rule: Callable[[Use], Domain | None]) -> Domain | None:
    return next((found for found in map(rule, uses) if found is not None), None)


# -- ids


def _ids(use: Use) -> Ids | None:
    """Return the ids of the table that the values index, or None."""
    indexed = INDICES.get(nd.qualified(use.node), {}).get(use.slot)
    if indexed is not None:
        return Ids(_size(use, *indexed), use.offset)
    if use.is_op("Gather", "GatherElements", "ScatterElements", "Scatter") and use.slot == 1:
        return Ids(_size(use, 0, int(nd.attr(use.node, "axis", 0))), use.offset)
    if use.is_op("GatherND", "ScatterND") and use.slot == 1:
        return Ids(_smallest_size(use, int(nd.attr(use.node, "batch_dims", 0))), use.offset)
    if use.is_op("OneHot") and use.slot == 0:
        depth = scalar(use.graph, use.node.input[1])
        return Ids(int(depth) if depth else None, use.offset)
    if use.is_op("Equal") and use.slot in (0, 1):
        return _one_hot(use)
    return None


def _one_hot(use: Use) -> Ids | None:
    """Return the ids of a one-hot encoding, written as a comparison with 0, 1, 2, ..."""
    tensor = use.graph.tensor(use.other())
    if tensor is None or tensor.data_type not in _INTEGERS or max(tensor.dims, default=0) < 2:
        return None
    numbers = use.graph.model.weights.array(tensor).reshape(-1)
    counting = bool((numbers == np.arange(numbers.size)).all())
    return Ids(int(numbers.size), use.offset) if counting else None


def _narrowest(found: list[Ids], compared: Sequence[int]) -> Ids:
    """Return the ids that fit every table; a constant compared with them is the padding id."""
    fixed = [ids for ids in found if isinstance(ids.rows, int)]
    chosen = min(fixed, key=lambda ids: int(str(ids.rows)) - ids.offset) if fixed else found[0]
    rows = chosen.rows if isinstance(chosen.rows, int) else 0
    inside = [value for value in compared if 0 <= value + chosen.offset < rows]
    return Ids(chosen.rows, chosen.offset, inside[0] if inside else None)


def _size(use: Use, slot: int, axis: int) -> Dim | None:
    """Return the size of another operand along an axis."""
    if slot >= len(use.node.input):
        return None
    shape = use.graph.shape(use.node.input[slot])
    return shape[axis] if shape is not None and -len(shape) <= axis < len(shape) else None


def _smallest_size(use: Use, from_axis: int) -> Dim | None:
    shape = use.graph.shape(use.node.input[0]) or ()
    sizes = [size for size in shape[from_axis:] if isinstance(size, int)]
    return min(sizes, default=None)


# -- choices


def _compared_constants(uses: Sequence[Use]) -> tuple[int, ...]:
    """Return the integers that uses compare the input with, less the offsets added to it."""
    found: list[int] = []
    for use in uses:
        if use.is_op(*_COMPARISONS):
            constant = scalar(use.graph, use.other())
            if constant is not None and constant == int(constant) and abs(constant) < 1 << 31:
                found.append(int(constant) - use.offset)
    return tuple(dict.fromkeys(found))


def _unlike(compared: Sequence[int]) -> tuple[int, ...]:
    """Return values outside the constants: above the largest and below the smallest."""
    below = min(compared) - 1
    return (max(compared) + 1, below) if below > 0 else (max(compared) + 1,)


def _boolean(uses: Sequence[Use], name: str, rank: int | None) -> Domain:
    if not rank or any(use.is_op("If") for use in uses):
        return OneOf((True, False))
    if rank > 1 and "mask" in name.lower():
        return Mask()
    return Anything()


# -- masks, lengths, parameters, positive numbers


def _is_mask(uses: Sequence[Use], name: str, integer: bool) -> bool:
    """Return whether the values are a mask; floats only if all uses agree."""
    named = "mask" in name.lower()
    for use in uses:
        if PADDING_MASKS.get(nd.qualified(use.node)) == use.slot:
            return integer
        logical = use.is_op("Not", "And", "Or", "Xor") or (use.is_op("Where") and use.slot == 0)
        if logical or (use.is_op("Cast") and nd.attr(use.node, "to") == _BOOLEAN):
            return True
        if _inverts(use) and (integer or named or _scaled_hugely(use)):
            return True
        if integer and use.is_op("Mul") and abs(scalar(use.graph, use.other()) or 0) >= 1e3:
            return True
        if named and integer and use.is_op("ReduceSum", "CumSum", "Mul", "Sub", "ReduceMean"):
            return True
    return False


def _inverts(use: Use) -> bool:
    """Return whether the use is 1 - m."""
    return use.is_op("Sub") and use.slot == 1 and scalar(use.graph, use.other()) == 1


def _scaled_hugely(use: Use) -> bool:
    """Return whether the result is multiplied by a large negative number, such as -10000."""
    for user in use.graph.users(use.node.output[0]):
        if nd.is_op(user, "Mul"):
            numbers = (scalar(use.graph, name) for name in user.input)
            if any(n is not None and n <= -1e3 for n in numbers):
                return True
    return False


def _length(use: Use) -> Length | None:
    node = use.node
    if use.is_op(*RECURRENT) and use.slot == 4:
        return Length(_size(use, 0, 1 if nd.attr(node, "layout", 0) else 0))
    if use.is_op("ReverseSequence") and use.slot == 1:
        return Length(_size(use, 0, int(nd.attr(node, "time_axis", 0))))
    if use.is_op("Attention") and use.slot == 6:
        return Length(_size(use, 1, -2))
    if use.is_op("Slice") and use.slot == 2:
        return Length(None)
    against_values = use.is_op(*_COMPARISONS) and scalar(use.graph, use.other()) is None
    if against_values and not use.is_op("Equal"):
        return Length(None)
    return None


def _parameter(use: Use) -> Parameter | None:
    if use.node.domain not in nd.STANDARD_DOMAINS:
        return None
    pattern = _PARAMETERS.get((use.node.op_type, use.slot))
    if pattern is None and use.node.op_type.startswith("Reduce") and use.slot == 1:
        pattern = "axes"
    if pattern == "reshape" and use.joined:
        pattern = "ones"
    return Parameter(pattern) if pattern is not None else None


def _positive(use: Use) -> Positive | None:
    if use.is_op("Acosh"):
        return Positive(1.1, 2.0)
    if use.is_op("Pow"):
        exponent = scalar(use.graph, use.node.input[1])
        if exponent is not None and exponent == int(exponent):
            return None
    return Positive() if use.slot in _POSITIVE.get(use.node.op_type, ()) else None
