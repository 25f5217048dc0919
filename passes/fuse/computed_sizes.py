"""Write Reshapes and Expands to sizes that are only known at run time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from onnx import NodeProto

from passes.analysis.operands import int_vector, reshape, reshape_target
from passes.fuse.typed_op import typed_op
from toolkit.ir import Graph, Shape, TensorType
from toolkit.rewriting.match_failure import MatchFailure

SizeSource = int | tuple[str, int]
"""A size: a number, or a value and the axis whose size is read at run time."""


def size_vector(g: Graph, sizes: Sequence[SizeSource], at: NodeProto) -> str:
    """Write a vector of sizes with one Shape for each run of consecutive axes of a value."""

    def run_of(index: int) -> tuple[str, int]:
        size = sizes[index]
        return ("", 0) if isinstance(size, int) else (size[0], size[1] - index)

    parts: list[str] = []
    for (value, offset), run in groupby(range(len(sizes)), run_of):
        indices = list(run)
        if value:
            start, end = indices[0] + offset, indices[-1] + offset + 1
            parts.append(g.op("Shape", value, at=at, start=start, end=end))
        else:
            numbers = [size for i in indices if isinstance(size := sizes[i], int)]
            parts.append(int_vector(g, numbers, "sizes"))
    return parts[0] if len(parts) == 1 else g.op("Concat", *parts, at=at, axis=0)


def reshape_to(g: Graph, value: str, shape: Shape, at: NodeProto) -> str:
    """Reshape a value; sizes that no constant target can express are read from its own axes."""
    before = g.shape(value) or ()
    target = reshape_target(before, shape)
    if target is not None:
        return reshape(g, value, target, at=at, shape=shape)
    sizes: list[SizeSource] = []
    for size in shape:
        read = (value, before.index(size)) if size in before else -1
        sizes.append(size if isinstance(size, int) else read)
    if sizes.count(-1) > 1:
        raise MatchFailure(f"the sizes of '{value}' do not determine the reshaped ones")
    known = TensorType(g.dtype(value), shape)
    return typed_op(g, known, "Reshape", value, size_vector(g, sizes, at), at=at)
