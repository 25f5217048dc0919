"""Rewrite the tensors in the wire format of a ModelProto without parsing the rest.

Protobuf parses a message as a whole and copies every byte of it, and a model is a few hundred
kilobytes of structure around gigabytes of weights. `rewrite` walks the nested messages that can
contain a TensorProto, passes each wanted tensor to a function, and returns the message as chunks in
which all other bytes are views of the original.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5

Chunk = bytes | memoryview


class WireError(ValueError):
    """The bytes are not a well-formed protobuf message."""


@dataclass(slots=True)
class Message:
    """The fields of a message that contain tensors, by number."""

    fields: dict[int, Message] = field(default_factory=dict[int, "Message"])


TENSOR = Message()
_SPARSE = Message({1: TENSOR, 2: TENSOR})
_GRAPH = Message()
_ATTRIBUTE = Message({5: TENSOR, 6: _GRAPH, 10: TENSOR, 11: _GRAPH, 22: _SPARSE, 23: _SPARSE})
_NODE = Message({5: _ATTRIBUTE})
_GRAPH.fields.update({1: _NODE, 5: TENSOR, 15: _SPARSE})
_FUNCTION = Message({7: _NODE, 11: _ATTRIBUTE})
_TRAINING = Message({1: _GRAPH, 2: _GRAPH})
MODEL = Message({7: _GRAPH, 20: _TRAINING, 25: _FUNCTION})


def encode_varint(value: int) -> bytes:
    """Encode a number as a base-128 varint."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(buffer: memoryview, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end and shift < 70:
        byte = buffer[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise WireError("a varint runs past the end of its message")


def fields(buffer: memoryview, start: int, end: int) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield (number, wire type, start of the field, start of its payload, end) for each field."""
    at = start
    while at < end:
        begin = at
        tag = buffer[at]
        at += 1
        if tag >= 0x80:
            tag, at = _read_varint(buffer, begin, end)
        kind = tag & 7
        if kind == LENGTH:
            if at >= end:
                raise WireError("a field has no length")
            size = buffer[at]
            at += 1
            if size >= 0x80:
                size, at = _read_varint(buffer, at - 1, end)
            stop = at + size
        elif kind == VARINT:
            stop = _read_varint(buffer, at, end)[1]
        elif kind == FIXED32:
            stop = at + 4
        elif kind == FIXED64:
            stop = at + 8
        else:
            raise WireError(f"wire type {kind} is not part of ONNX")
        if stop > end or tag < 8:
            raise WireError("a field runs past the end of its message")
        yield tag >> 3, kind, begin, at, stop
        at = stop


def rewrite(
    buffer: memoryview,
    start: int,
    end: int,
    message: Message,
    wanted: Callable[[int, int], bool],
    tensor: Callable[[int, int], Sequence[Chunk] | None],
) -> list[Chunk] | None:
    """Return the message at [start, end) with tensors replaced, or None if unchanged.

    Submessages for which `wanted(start, end)` is False are skipped. `tensor(start, end)` returns
    the chunks of a TensorProto, or None to keep it.
    """
    if message is TENSOR:
        replaced = tensor(start, end)
        return None if replaced is None else list(replaced)
    chunks: list[Chunk] = []
    copied = start
    for number, kind, begin, at, stop in fields(buffer, start, end):
        inner = message.fields.get(number) if kind == LENGTH else None
        if inner is None or not wanted(at, stop):
            continue
        contents = rewrite(buffer, at, stop, inner, wanted, tensor)
        if contents is None:
            continue
        if copied < begin:
            chunks.append(buffer[copied:begin])
        chunks.append(encode_varint(number << 3 | LENGTH) + encode_varint(size_of(contents)))
        chunks.extend(contents)
        copied = stop
    if copied == start:
        return None
    if copied < end:
        chunks.append(buffer[copied:end])
    return chunks


def size_of(chunks: Sequence[Chunk]) -> int:
    """Return the total size of chunks in bytes."""
    return sum(map(len, chunks))
