"""Taking weights out of a protobuf and putting them back: strip, inflate, save.

Stripping works on the wire format of a file (nothing large is parsed or copied) or on a protobuf
in memory. Saving streams the weights behind the structure, into the same file or into a sidecar.
"""

from __future__ import annotations

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
_ALIGNMENT = 4096
"""Sidecar offsets are page-aligned, so that runtimes can map them."""

_DATA_TYPE, _FLOAT_DATA, _RAW_DATA, _DOUBLE_DATA = 2, 4, 9, 10
_DATA_FIELDS = (4, 5, 6, 7, 9, 10, 11)


_Place = Callable[[TensorProto], tuple[TensorProto, memoryview | None]]
"""Where a tensor's bytes go: the TensorProto to write, and its raw data if that stays inside."""


def strip(view: memoryview, location: str) -> bytes:
    """The ModelProto in `view` with each large tensor turned into a reference into `location`."""

    def tensor(start: int, end: int) -> Sequence[Chunk] | None:
        all_fields = list(wire.fields(view, start, end))
        payloads = [f for f in all_fields if f[0] in _DATA_FIELDS]
        if len(payloads) != 1 or payloads[0][1] != wire.LENGTH:
            return None  # unpacked, absent, or more than one: protobuf parses it
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
    """Whether something between these places may be over the limit, and is worth a look."""
    return end - start > INLINE_LIMIT


def _is_mappable(field: int, dtype: int) -> bool:
    """Whether a tensor's packed wire form in this field is just its little-endian contents."""
    if field == _FLOAT_DATA:
        return dtype in (TensorProto.FLOAT, TensorProto.COMPLEX64)
    if field == _DOUBLE_DATA:
        return dtype in (TensorProto.DOUBLE, TensorProto.COMPLEX128)
    return field == _RAW_DATA


def strip_proto(
    proto: ModelProto, weights: Weights, known: Iterable[TensorProto] = ()
) -> ModelProto:
    """A copy of `proto` with its large tensors in the overlay of `weights`.

    Tensors that equal one of the same name in `known` become a reference to that one's bytes.
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
    """The serialized model as chunks, with every reference replaced by its bytes."""

    def raw(tensor: TensorProto) -> tuple[TensorProto, memoryview]:
        contents = weights.raw(tensor)
        clear_data(tensor)
        return tensor, contents

    return _with_tensors(proto, raw)


def _with_tensors(proto: ModelProto, place: _Place) -> list[Chunk]:
    buffer = memoryview(proto.SerializeToString())
    spots = _reference_spots(bytes(buffer))

    def wanted(start: int, end: int) -> bool:
        index = bisect_left(spots, start)
        return index < len(spots) and spots[index] < end

    def tensor(start: int, end: int) -> Sequence[Chunk] | None:
        parsed = TensorProto.FromString(bytes(buffer[start:end]))
        if not is_external(parsed):
            return None
        stored, contents = place(parsed)
        head = stored.SerializeToString()
        if contents is None:
            return [head]
        key = wire.encode_varint(_RAW_DATA << 3 | wire.LENGTH)
        return [head, key + wire.encode_varint(len(contents)), contents]

    chunks = wire.rewrite(buffer, 0, len(buffer), wire.MODEL, wanted, tensor)
    return chunks if chunks is not None else [buffer]


def _reference_spots(serialized: bytes) -> list[int]:
    """Where external references may be: every place that spells their first key."""
    key = b"\x0a\x08location"
    spots: list[int] = []
    at = serialized.find(key)
    while at >= 0:
        spots.append(at)
        at = serialized.find(key, at + len(key))
    return spots


def save(proto: ModelProto, weights: Weights, path: Path, external_data: bool) -> Path:
    """Write the model to `path` as one file, or with a sidecar when asked or over 2 GiB.

    Files appear under their names only when complete (temporary name, fsync, rename).
    """
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
    # The data first: a model must never be there without it.
    write_files({sidecar: contents, path: structure})
    return path


def _require_apart(path: Path, weights: Weights) -> None:
    if any(same_file(path, source) for source in weights.files()):
        raise SaveError(f"cannot write '{path}': the model is read from it; name another file")
