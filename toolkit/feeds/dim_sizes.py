"""Candidate sizes for dynamic dimensions.

Each symbol gets several sizes, and different symbols different ones: nothing fits by accident. Many
graphs accept only some sizes (multiples of 32, squares, constants of an exporter), which only a run
shows: `first_sizes` yields candidates until one is accepted, the most natural ones first, and
`more_sizes` yields variations of accepted sizes.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from onnx import TensorProto

from toolkit.ir import node as nd
from toolkit.ir.graph import Graph
from toolkit.ir.op_traits import ELEMENTWISE, RECURRENT
from toolkit.symbolic import Dim, Expr

Sizes = dict[str, int]

_MAX_SUMS = 30


class Role(enum.Enum):
    """The likely meaning of a dimension."""

    BATCH = "batch"
    SEQUENCE = "sequence"
    SPATIAL = "spatial"


@dataclass(frozen=True, slots=True)
class Numbers:
    """The size of a role's first symbol in each variation, and the step to the next symbol."""

    first: tuple[int, ...]
    step: tuple[int, ...]

    def at(self, variation: int, index: int) -> int:
        return self.first[variation % len(self.first)] + index * self.step[variation % 3]


_NATURAL = {
    Role.BATCH: Numbers((2, 1, 3), (1, 0, 1)),
    Role.SEQUENCE: Numbers((8, 5, 16), (3, 3, 3)),
    Role.SPATIAL: Numbers((64, 96, 128), (32, 64, 64)),
}
_LADDER = {
    Role.BATCH: (1,),
    Role.SEQUENCE: (1, 4, 32, 64, 77, 128, 256, 512, 1024, 3000, 4096, 16000),
    Role.SPATIAL: (32, 224, 256, 320, 416, 512, 640, 28, 16, 8, 1),
}
"""Sizes for graphs that fail at natural ones: typical training sizes, tried in order."""


def find_symbols(shapes: Mapping[str, Sequence[Dim]], graph: Graph) -> dict[str, Role]:
    """Return the symbols in the inputs' shapes, in order, with their roles."""
    roles: dict[str, Role] = {}
    for name, shape in shapes.items():
        image = graph.dtype(name) in (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.UINT8)
        for axis, dim in enumerate(shape):
            if isinstance(dim, Expr):
                for symbol in sorted(dim.symbols):
                    roles.setdefault(symbol, _role(symbol, shape, axis, image))
    return roles


def _role(symbol: str, shape: Sequence[Dim], axis: int, image: bool) -> Role:
    text = symbol.lower()
    if "batch" in text:
        return Role.BATCH
    if re.search(r"seq|len|past|time|frame|sample|token", text):
        return Role.SEQUENCE
    if re.search(r"height|width|\b[hw]\b", text):
        return Role.SPATIAL
    rank = len(shape)
    if axis == 0 and rank > 1:
        return Role.BATCH
    if rank == 3 and axis == 1 and isinstance(shape[0], int) and isinstance(shape[2], int):
        return Role.BATCH  # a recurrent state: layers x batch x hidden
    channels_last = rank == 4 and axis in (1, 2) and shape[3] in (1, 3, 4)
    if image and rank >= 4 and (channels_last or (axis >= 2 and isinstance(shape[-1], Expr))):
        return Role.SPATIAL
    return Role.SEQUENCE


def first_sizes(roles: Mapping[str, Role], fixed: Mapping[str, int]) -> Iterator[Sizes]:
    """Yield sizes to try on a graph, the most natural ones first."""
    if not roles:
        yield {}
        return
    yield _complete(_natural(roles, 0), fixed)
    yield _complete(_natural(roles, 0, tied=True), fixed)
    yield _complete(_natural(roles, 1), fixed)
    yield _complete(_natural(roles, 1, tied=True), fixed)
    yield from (_complete(sizes, fixed) for sizes in islice(_sums(roles, 0), _MAX_SUMS))
    steps = max(len(_LADDER[role]) for role in roles.values())
    for step in range(steps):
        sizes = {s: _LADDER[role][step % len(_LADDER[role])] for s, role in roles.items()}
        yield _complete(sizes, fixed)


def more_sizes(
    roles: Mapping[str, Role], fixed: Mapping[str, int], taken: Mapping[str, int], variation: int
) -> Iterator[Sizes]:
    """Yield variations of the accepted sizes `taken`: all changed first, then only some."""
    natural = _natural(roles, variation)
    tied = _natural(roles, variation, tied=True)
    batches = {s: size for s, size in tied.items() if roles[s] is Role.BATCH}
    others = [s for s, role in roles.items() if role is not Role.BATCH]
    yield _complete(natural, fixed)
    yield _complete(tied, fixed)
    for sizes, other in zip(_sums(roles, 0), _sums(roles, variation), strict=True):
        if {s: taken[s] for s in others} == {s: sizes[s] for s in others}:
            yield _complete(other, fixed)  # the same sum
    for changed in (
        {s: 2 * taken[s] for s in others},
        {s: _slightly_more(taken[s]) for s in others},
        {s: max(1, taken[s] // 2) for s in others},
    ):
        yield _complete({**batches, **changed}, fixed)
    yield _complete({**taken, **batches}, fixed)
    if len(set(taken.values())) < len(taken):
        # equal sizes may be broadcast: one of them can be 1
        for symbol in taken:
            yield _complete({**taken, symbol: 1}, fixed)
    for symbol in others:
        yield _complete({**taken, symbol: natural[symbol]}, fixed)
        yield _complete({**taken, symbol: _slightly_more(taken[symbol])}, fixed)
    yield dict(taken)


def _natural(roles: Mapping[str, Role], variation: int, tied: bool = False) -> Sizes:
    """Return the natural sizes; `tied` gives all symbols of a role the same size."""
    sizes: Sizes = {}
    for role, numbers in _NATURAL.items():
        members = [symbol for symbol, found in roles.items() if found is role]
        for index, symbol in enumerate(members):
            sizes[symbol] = numbers.at(variation, 0 if tied else index)
    return {symbol: sizes[symbol] for symbol in roles}


def _sums(roles: Mapping[str, Role], variation: int) -> Iterator[Sizes]:
    """Yield sizes in which one is the sum of two: a decoder's mask covers its cache and its input.

    All symbols of the cache, often one for each tensor, get the same size. The input may be one
    token, whose length is a constant.
    """
    lengths = [symbol for symbol, role in roles.items() if role is Role.SEQUENCE]
    tied = _natural(roles, variation, tied=True)
    numbers = _NATURAL[Role.SEQUENCE]
    if len(lengths) == 2:
        for total in reversed(lengths):
            old = numbers.at(variation, 0)
            yield {**tied, **dict.fromkeys(lengths, old), total: old + 1}
    if len(lengths) < 3:
        return
    for total in lengths:
        for part in lengths:
            if part != total:
                new, old = numbers.at(variation, 0), numbers.at(variation, 1)
                cache = dict.fromkeys(lengths, old)
                yield {**tied, **cache, part: new, total: new + old}


def _slightly_more(size: int) -> int:
    return size + (32 if size >= 32 else 1)


def _complete(sizes: Mapping[str, int], fixed: Mapping[str, int]) -> Sizes:
    """Apply the sizes fixed by weights, and totals that are sums by their names."""
    complete = {**sizes, **{s: size for s, size in fixed.items() if s in sizes}}
    for symbol in complete:
        part = symbol.removeprefix("total_")
        if part != symbol and {part, f"past_{part}"} <= complete.keys():
            complete[symbol] = complete[part] + complete[f"past_{part}"]
    return complete


# -- sizes fixed by weights


def sizes_from_weights(graph: Graph, name: str) -> tuple[int | None, dict[int, int]]:
    """Return (rank, {axis: size}) of an input, where the weights of its users determine them.

    Axes may be negative. Values are followed through element-wise operators only.
    """
    rank: int | None = None
    found: dict[int, int] = {}
    value = name
    for _ in range(8):
        users = graph.users(value)
        for node in users:
            if value not in node.input:  # captured by a subgraph
                continue
            node_rank, axes = _fixed_by(graph, node, list(node.input).index(value))
            rank = rank if rank is not None else node_rank
            found = {**axes, **found}
        elementwise = [n for n in users if nd.is_op(n, *_SAME_SIZES)]
        if found or len(elementwise) != 1:
            break
        value = elementwise[0].output[0]
    return rank, found


_SAME_SIZES = ELEMENTWISE | {"Dropout", "Add", "Sub", "Mul", "Div", "Pow"}
"""Operators whose result usually has the shape of their operand."""


def _fixed_by(graph: Graph, node: nd.NodeProto, slot: int) -> tuple[int | None, dict[int, int]]:
    def static(index: int) -> list[int]:
        shape = graph.shape(node.input[index]) if index < len(node.input) else None
        sizes = [size for size in shape or () if isinstance(size, int)]
        return sizes if shape is not None and len(sizes) == len(shape) else []

    weight = static(1)
    if nd.is_op(node, "Conv", "ConvInteger") and slot == 0 and weight:
        return len(weight), {1: weight[1] * int(nd.attr(node, "group", 1))}
    if nd.is_op(node, "ConvTranspose") and slot == 0 and weight:
        return len(weight), {1: weight[0]}
    if nd.is_op(node, "MatMul", "MatMulInteger") and slot == 0 and len(weight) > 1:
        return None, {-1: weight[-2]}
    if nd.is_op(node, "Gemm") and slot == 0 and weight:
        inner = weight[1] if nd.attr(node, "transB", 0) else weight[0]
        return 2, {0 if nd.attr(node, "transA", 0) else 1: inner}
    if nd.is_op(node, "BatchNormalization", "InstanceNormalization") and slot == 0 and weight:
        return None, {1: weight[0]}
    if nd.is_op(node, *RECURRENT) and weight:
        if slot == 0:
            return 3, {2: weight[2]}
        if slot in (5, 6) and len(static(2)) == 3:
            return 3, {0: weight[0], 2: static(2)[2]}
    if nd.is_op(node, "Add", "Sub", "Mul", "Div") and graph.is_const(node.input[1 - slot]):
        sizes = static(1 - slot)
        return None, {i - len(sizes): size for i, size in enumerate(sizes) if size > 1}
    return None, {}
