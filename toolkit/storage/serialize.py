"""Separate weights from a protobuf and reunite them: strip, inflate, save.

`strip` works on the wire format of a file, without parsing or copying weights, and `strip_proto` on
a protobuf in memory. `save` streams the weights into the same file or into a sidecar.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from onnx import ModelProto, TensorProto, numpy_helper

from toolkit.errors import SaveError
from toolkit.storage import wire
from toolkit.storage.atomic_write import require_writable, same_file, sidecar_of, write_files
from toolkit.storage.weights import (
    INLINE_LIMIT,
    Weights,
    clear_data,
    is_external,
    nbytes,
    reference,
    set_reference,
)
from toolkit.storage.wire import Chunk, size_of

__all__ = ["PROTOBUF_LIMIT", "inflate", "save", "size_of", "strip", "strip_proto"]

PROTOBUF_LIMIT = (1 << 31) - 1
"""The largest protobuf message in bytes."""
_ALIGNMENT = 4096
"""The alignment of sidecar offsets: runtimes map whole pages."""

_DATA_TYPE, _FLOAT_DATA, _RAW_DATA, _DOUBLE_DATA = 2, 4, 9, 10
_DATA_FIELDS = (4, 5, 6, 7, 9, 10, 11)
"""The field numbers of TensorProto that hold data."""

_Store = Callable[[TensorProto], tuple[TensorProto, memoryview | None]]
"""Returns the TensorProto to write for a tensor, and its raw data if that is part of it."""


def strip(view: memoryview, location: str) -> bytes:
    """Replace each large tensor of the ModelProto in `view` by a reference into `location`."""

    def tensor(start: int, end: int) -> Sequence[Chunk] | None:
        all_fields = list(wire.fields(view, start, end))
        payloads = [f for f in all_fields if f[0] in _DATA_FIELDS]
        if len(payloads) != 1 or payloads[0][1] != wire.LENGTH:
            return None  # unpacked, absent or split: left to protobuf
        number, _, begin, at, stop = payloads[0]
        kinds = [view[f[3]] for f in all_fields if f[0] == _DATA_TYPE]
        if stop - at <= INLINE_LIMIT or len(kinds) != 1 or not _is_mappable(number, kinds[0]):
            return None
        link = TensorProto()
        set_reference(link, location, at, stop - at)
        return [view[start:begin], view[stop:end], link.SerializeToString()]

    chunks = wire.rewrite(view, 0, len(view), wire.MODEL, _may_be_large, tensor)
    return b"".join(chunks) if chunks is not None else bytes(view)


def _may_be_large(start: int, end: int) -> bool:
    """Return whether these bytes may contain a tensor over the limit."""
    return end - start > INLINE_LIMIT


def _is_mappable(field: int, dtype: int) -> bool:
    """Return whether the wire form of this field is the little-endian contents of the tensor."""
    if field == _FLOAT_DATA:
        return dtype in (TensorProto.FLOAT, TensorProto.COMPLEX64)
    if field == _DOUBLE_DATA:
        return dtype in (TensorProto.DOUBLE, TensorProto.COMPLEX128)
    return field == _RAW_DATA


def strip_proto(
    proto: ModelProto, weights: Weights, known: Iterable[TensorProto] = ()
) -> ModelProto:
    """Return a copy of `proto` with its large tensors in the overlay of `weights`.

    A tensor that equals one of the same name in `known` becomes a reference to the same bytes.
    """
    known_by_name = {t.name: t for t in known if is_external(t) and t.name}
    buffer = memoryview(proto.SerializeToString())

    def tensor(start: int, end: int) -> Sequence[Chunk] | None:
        parsed = TensorProto.FromString(bytes(buffer[start:end]))
        if is_external(parsed) or parsed.data_type == TensorProto.STRING:
            return None
        if nbytes(parsed) <= INLINE_LIMIT:
            return None
        array = numpy_helper.to_array(parsed)
        twin = known_by_name.get(parsed.name)
        if twin is not None and _same(weights, twin, parsed):
            link = reference(twin)
        else:
            link = reference(weights.put(parsed.name, array))
        set_reference(parsed, *link)
        return [parsed.SerializeToString()]

    chunks = wire.rewrite(buffer, 0, len(buffer), wire.MODEL, _may_be_large, tensor)
    return ModelProto.FromString(b"".join(chunks) if chunks is not None else bytes(buffer))


def _same(weights: Weights, kept: TensorProto, other: TensorProto) -> bool:
    if kept.data_type != other.data_type or list(kept.dims) != list(other.dims):
        return False
    return weights.raw(kept) == memoryview(other.raw_data)


def inflate(proto: ModelProto, weights: Weights) -> list[Chunk]:
    """Serialize the model with every reference replaced by its bytes."""

    def raw(tensor: TensorProto) -> tuple[TensorProto, memoryview]:
        contents = weights.raw(tensor)
        clear_data(tensor)
        return tensor, contents

    return _with_tensors(proto, raw)


def _with_tensors(proto: ModelProto, store: _Store) -> list[Chunk]:
    """Serialize the model with its external tensors as `store` returns them."""
    buffer = memoryview(proto.SerializeToString())
    spots = _reference_spots(bytes(buffer))

    def wanted(start: int, end: int) -> bool:
        index = bisect_left(spots, start)
        return index < len(spots) and spots[index] < end

    def tensor(start: int, end: int) -> Sequence[Chunk] | None:
        parsed = TensorProto.FromString(bytes(buffer[start:end]))
        if not is_external(parsed):
            return None
        stored, contents = store(parsed)
        head = stored.SerializeToString()
        if contents is None:
            return [head]
        key = wire.encode_varint(_RAW_DATA << 3 | wire.LENGTH)
        return [head, key + wire.encode_varint(len(contents)), contents]

    chunks = wire.rewrite(buffer, 0, len(buffer), wire.MODEL, wanted, tensor)
    return chunks if chunks is not None else [buffer]


def _reference_spots(serialized: bytes) -> list[int]:
    """Return the offsets of the bytes that every external reference begins with."""
    key = b"\x0a\x08location"
    return [match.start() for match in re.finditer(re.escape(key), serialized)]


def save(proto: ModelProto, weights: Weights, path: Path, external_data: bool) -> Path:
    """Write the model atomically to `path`, with a sidecar if asked or over 2 GiB."""
    require_writable(path)
    _require_apart(path, weights)
    chunks = inflate(proto, weights)
    if not external_data and size_of(chunks) < PROTOBUF_LIMIT:
        write_files({path: chunks})
        return path
    sidecar = sidecar_of(path)
    require_writable(sidecar)
    _require_apart(sidecar, weights)
    contents: list[Chunk] = []
    written = 0

    def aside(tensor: TensorProto) -> tuple[TensorProto, None]:
        nonlocal written
        data = weights.raw(tensor)
        padding = -written % _ALIGNMENT
        contents.extend((b"\0" * padding, data))
        set_reference(tensor, sidecar.name, written + padding, len(data))
        written += padding + len(data)
        return tensor, None

    structure = _with_tensors(proto, aside)
    # The weights come first: the model is useless without them.
    write_files({sidecar: contents, path: structure})
    return path


def _require_apart(path: Path, weights: Weights) -> None:
    if any(same_file(path, source) for source in weights.files()):
        raise SaveError(f"cannot write '{path}': the model is read from it; name another file")
