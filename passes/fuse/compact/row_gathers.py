"""Replace chains of data movement that permute whole rows with one Gather of rows.

    Reshape, Slice, Concat, Reshape, Transpose, Reshape (x)  =  Reshape(Gather(x, rows))

Swin cuts, shifts and merges the windows of an image like this. The chain treats all images of the
batch alike and keeps rows of the last axis together. Both are checked by evaluating the chain on
element numbers, for one image and for three, which also yields the order of the rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto

from passes.analysis.const_eval import evaluate
from passes.analysis.operands import int_vector, reshape
from toolkit.ir import Array, Graph, Shape, node as nd
from toolkit.symbolic import floordiv

_MOVES = ("Reshape", "Transpose", "Slice", "Concat", "Squeeze", "Unsqueeze", "Gather")
_MAX_NODES = 24
_IMAGES = 3
_MAX_ELEMENTS = 1 << 21
"""Largest image, in elements, on which a chain is evaluated."""


@dataclass(frozen=True, slots=True, eq=False)
class MovementChain:
    """The nodes, in graph order, that compute `root` from `source` alone."""

    source: str
    nodes: tuple[NodeProto, ...]
    root: NodeProto


def chains(g: Graph) -> list[MovementChain]:
    """Return all maximal chains of data movement."""
    order = {id(node): index for index, node in enumerate(g.nodes)}
    found: list[MovementChain] = []
    taken: set[int] = set()
    for node in reversed(g.nodes):
        if id(node) in taken or not _is_move(g, node):
            continue
        chain = _chain(g, node, order)
        if chain is not None:
            taken.update(map(id, chain.nodes))
            found.append(chain)
    return found


def _is_move(g: Graph, node: NodeProto) -> bool:
    if not nd.is_op(node, *_MOVES):
        return False
    return nd.is_op(node, "Concat") or all(map(g.is_const, nd.inputs_of(node)[1:]))


def _chain(g: Graph, root: NodeProto, order: dict[int, int]) -> MovementChain | None:
    inside = {id(root): root}
    pending = _operands(root)
    sources: list[str] = []
    while pending:
        # The latest first: then all users of a value are visited before its producer.
        pending.sort(key=lambda name: order.get(id(g.producer(name)), -1))
        value = pending.pop()
        if value in pending:
            continue
        producer = g.producer(value)
        own = not g.is_output(value) and all(id(user) in inside for user in g.users(value))
        if producer is not None and own and _is_move(g, producer) and len(inside) < _MAX_NODES:
            inside[id(producer)] = producer
            pending.extend(_operands(producer))
        elif value not in sources:
            sources.append(value)
    if len(sources) != 1 or len(inside) < 3:
        return None
    nodes = sorted(inside.values(), key=lambda node: order[id(node)])
    return MovementChain(sources[0], tuple(nodes), root)


def _operands(node: NodeProto) -> list[str]:
    return list(node.input) if nd.is_op(node, "Concat") else [node.input[0]]


def write(g: Graph, chain: MovementChain) -> bool:
    """Replace a chain with a Gather if that has fewer nodes; return whether it was replaced."""
    shape, result = g.shape(chain.source), g.shape(chain.root.output[0])
    if shape is None or len(shape) < 3 or result is None:
        return False
    pieces, sizes, final = _pieces(shape, result), _numbers(shape[1:]), _target(result)
    if pieces is None or final is None or len(sizes) != len(shape) - 1:
        return False
    rows = _rows(g, chain, pieces, sizes)
    if rows is None:
        return False
    count, width = pieces * math.prod(sizes[:-1]), sizes[-1]
    gathered = not np.array_equal(rows, np.arange(count))
    before = gathered and (len(shape), pieces) != (3, 1)
    after = not gathered or final != [-1, len(rows), width]
    if before + gathered + after >= len(chain.nodes) or not g.begin("rows-moved", chain.root):
        return False
    at, value = chain.root, chain.source
    if before:
        value = reshape(g, value, (-1, count, width), at=at)
    if gathered:
        value = g.op("Gather", value, int_vector(g, rows.tolist(), "rows"), at=at, axis=1)
    if after:
        value = reshape(g, value, final, at=at)
    g.replace(chain.root.output[0], value)
    g.prune(chain.root)
    return True


def _pieces(shape: Shape, result: Shape) -> int | None:
    """Return how many entries of the source's first axis form one image; None if that varies."""
    own, other = shape[0], result[0] if result else 0
    if isinstance(own, int) or isinstance(other, int):
        return None
    pieces = floordiv(own, other)
    if isinstance(pieces, int) and pieces > 0 and pieces * other == own:
        return pieces
    times = floordiv(other, own)
    return 1 if isinstance(times, int) and times * own == other else None


def _target(result: Shape) -> list[int] | None:
    """Return the result's shape as the target of a Reshape: only its first size may vary."""
    sizes = _numbers(result[1:])
    if len(sizes) != len(result) - 1 or not all(sizes):
        return None
    return [-1, *sizes]


def _numbers(shape: Shape) -> list[int]:
    return [size for size in shape if isinstance(size, int)]


def _rows(g: Graph, chain: MovementChain, pieces: int, sizes: list[int]) -> Array | None:
    """Return the source row of each row of the result, for one image."""
    count, width = pieces * math.prod(sizes), sizes[-1]
    if not 0 < count <= _MAX_ELEMENTS or width < 2:
        return None
    one, more = (_moved(g, chain, images * pieces, sizes) for images in (1, _IMAGES))
    if one is None or more is None or one.size % width or more.size != _IMAGES * one.size:
        return None
    first = one.reshape(-1)
    if not np.array_equal(more.reshape(_IMAGES, -1), first + count * np.arange(_IMAGES)[:, None]):
        return None
    rows = first.reshape(-1, width)
    starts = rows[:, :1]
    if (starts % width).any() or not np.array_equal(rows, starts + np.arange(width)):
        return None
    return starts[:, 0] // width


def _moved(g: Graph, chain: MovementChain, lead: int, sizes: list[int]) -> Array | None:
    """Return the element numbers of the source, moved by the chain."""
    start: Array = np.arange(lead * math.prod(sizes), dtype=np.int64).reshape(lead, *sizes)
    known: dict[str, Array] = {chain.source: start}
    for node in chain.nodes:
        arrays = [known.get(name, g.const(name)) if name else None for name in node.input]
        results = evaluate(node, arrays, g.opset())
        if results is None:
            return None
        known[node.output[0]] = np.asarray(results[0])
    return known[chain.root.output[0]]
