"""The bytes of large tensors, kept outside the protobuf: mapped from files, or in an overlay.

A large TensorProto contains a reference in ONNX's external-data form instead of data. Its location
is a file beside the model (the .onnx file itself for a single-file model), or an entry of the
overlay for tensors that passes made. Large new tensors are written to a scratch file and mapped, so
that anonymous memory does not grow with the weights.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from toolkit.errors import ModelError
from toolkit.storage.spill import Array, allocate

INLINE_LIMIT = 4096
"""The largest tensor, in bytes, that stays in the protobuf, as shapes and axes must."""

_OVERLAY = "\x7ftoolkit-overlay/"
"""The prefix of the locations of overlaid tensors."""
_PACKED_BITS: dict[int, int] = {
    TensorProto.INT4: 4,
    TensorProto.UINT4: 4,
    TensorProto.FLOAT4E2M1: 4,
    TensorProto.INT2: 2,
    TensorProto.UINT2: 2,
}
"""Bits per element of types that are packed into bytes."""


def nbytes(tensor: TensorProto) -> int:
    """Return the size of a tensor's raw data in bytes."""
    if tensor.data_type == TensorProto.STRING:
        return sum(map(len, tensor.string_data))
    elements = math.prod(tensor.dims)
    bits = _PACKED_BITS.get(tensor.data_type)
    if bits is not None:
        return -(-elements * bits // 8)
    return elements * helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize


def is_external(tensor: TensorProto) -> bool:
    """Return whether a tensor is a reference."""
    return tensor.data_location == TensorProto.EXTERNAL


def reference(tensor: TensorProto) -> tuple[str, int, int]:
    """Return location, offset and length of an external tensor."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    try:
        offset = int(entries.get("offset", 0))
        length = int(entries.get("length", nbytes(tensor)))
    except ValueError as error:
        raise ModelError(
            f"tensor '{tensor.name}': offset or length of its external data is not a number"
        ) from error
    return entries.get("location", ""), offset, length


def set_reference(tensor: TensorProto, location: str, offset: int, length: int) -> None:
    """Turn `tensor` into a reference, and drop its data."""
    clear_data(tensor)
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", str(offset)), ("length", str(length))):
        entry = tensor.external_data.add()
        entry.key, entry.value = key, value


def clear_data(tensor: TensorProto) -> None:
    """Drop the data or the reference of a tensor."""
    for name in ("raw", "float", "int32", "int64", "double", "uint64", "string", "external"):
        tensor.ClearField(f"{name}_data")
    tensor.ClearField("data_location")


class Weights:
    """The bytes behind a model's external tensors."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._maps: dict[str, memoryview] = {}
        self._overlay: dict[str, Array] = {}
        self._owners: list[object] = []

    def depend_on(self, owner: object) -> None:
        """Keep alive an object that the files need, such as the owner of a temporary folder."""
        self._owners.append(owner)

    def fork(self) -> Weights:
        """Return the same weights with an overlay of their own, which is freed with them."""
        other = Weights(self.folder)
        other._maps = self._maps
        other._overlay = dict(self._overlay)
        return other

    # -- reading

    def array(self, tensor: TensorProto) -> Array:
        """Return the contents of a tensor; a read-only view unless the encoding requires a copy."""
        if is_external(tensor):
            location, _, _ = reference(tensor)
            overlaid = self._overlay.get(location)
            if overlaid is not None and not _is_packed(tensor, overlaid):
                return overlaid
            return _decode(tensor, self.raw(tensor))
        if tensor.HasField("raw_data"):
            return _decode(tensor, tensor.raw_data)
        if tensor.data_type == TensorProto.STRING:
            array = _strings(tensor)
        else:
            array = np.asarray(numpy_helper.to_array(tensor))
        array.flags.writeable = False
        return array

    def raw(self, tensor: TensorProto) -> memoryview:
        """Return the bytes of an external tensor, encoded as in `raw_data`."""
        location, offset, length = reference(tensor)
        overlaid = self._overlay.get(location)
        if overlaid is not None:
            return _encode(tensor, overlaid)
        return self._file(tensor, location)[offset : offset + length]

    def overlaid(self, tensor: TensorProto) -> Array | None:
        """Return the overlay's array of a tensor, or None."""
        return self._overlay.get(reference(tensor)[0]) if is_external(tensor) else None

    def check(self, tensor: TensorProto) -> None:
        """Raise ModelError unless a reference lies inside the model's folder and its file."""
        location, offset, length = reference(tensor)
        if location in self._overlay:
            return
        size = len(self._file(tensor, location))
        if offset < 0 or length < 0 or offset + length > size:
            raise ModelError(
                f"tensor '{tensor.name}': external data at {offset}+{length} lies past the end of "
                f"'{location}' ({size} bytes); the data file is truncated or not this model's"
            )
        if length != nbytes(tensor):
            raise ModelError(
                f"tensor '{tensor.name}': {length} bytes of external data for a tensor of "
                f"{nbytes(tensor)} bytes"
            )

    def files(self) -> list[Path]:
        """Return the mapped files, which a save must not overwrite."""
        if self.folder is None:
            return []
        return [self.folder / location for location in self._maps]

    # -- writing

    def put(self, name: str, array: Array) -> TensorProto:
        """Make a tensor with these contents; large ones go to the overlay."""
        if array.dtype.kind in "OSU":
            return _string_tensor(name, array)
        array = np.asarray(array)
        if array.nbytes <= INLINE_LIMIT:
            return numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), name)
        data_type = helper.np_dtype_to_tensor_dtype(array.dtype)
        return self._overlay_tensor(TensorProto(name=name, data_type=data_type), array.shape, array)

    def put_packed(self, name: str, data_type: int, dims: Sequence[int], raw: Array) -> TensorProto:
        """Make a tensor of a type below a byte from the bytes of its `raw_data`."""
        tensor = TensorProto(name=name, data_type=data_type, dims=dims)
        if raw.nbytes != nbytes(tensor) or raw.dtype != np.uint8:
            raise ValueError(f"'{name}': {raw.nbytes} bytes for a tensor of {nbytes(tensor)}")
        if raw.nbytes <= INLINE_LIMIT:
            tensor.raw_data = raw.tobytes()
            return tensor
        return self._overlay_tensor(tensor, (), raw)

    def _overlay_tensor(
        self, tensor: TensorProto, dims: Sequence[int], array: Array
    ) -> TensorProto:
        tensor.dims.extend(dims)
        location = f"{_OVERLAY}{len(self._overlay)}"
        self._overlay[location] = self.keep(array)
        set_reference(tensor, location, 0, nbytes(tensor))
        return tensor

    def map_file(self, location: str, view: memoryview) -> None:
        """Use `view` as the mapped file `location` of the model's folder."""
        self._maps[location] = view

    def keep(self, array: Array) -> Array:
        """Return a read-only array with these contents; large ones are mapped."""
        if not array.flags.writeable and array.flags.c_contiguous:
            return array  # shared, as a view of a mapped file
        if array.dtype.kind in "OSU":
            kept = np.array(array, order="C")
        else:
            kept = allocate(array.shape, array.dtype)
            np.copyto(kept, array)
        kept.flags.writeable = False
        return kept

    def _file(self, tensor: TensorProto, location: str) -> memoryview:
        view = self._maps.get(location)
        if view is None:
            view = self._maps[location] = map_readonly(self._contained(tensor, location))
        return view

    def _contained(self, tensor: TensorProto, location: str) -> Path:
        what = f"tensor '{tensor.name}': external data '{location}'"
        if self.folder is None:
            raise ModelError(f"{what}: an in-memory model has no folder; load it from its file")
        if not location or "\0" in location or Path(location).is_absolute():
            raise ModelError(f"{what}: the location must be a path relative to the model's folder")
        path = self.folder / location
        if not path.resolve().is_relative_to(self.folder.resolve()):
            raise ModelError(f"{what} lies outside the model's folder; move it beside the model")
        if not path.is_file():
            raise ModelError(f"{what} is missing; put it beside the model")
        return path


def map_readonly(path: Path) -> memoryview:
    """Map a file; an empty file gives an empty view."""
    with path.open("rb") as file:
        if not path.stat().st_size:
            return memoryview(b"")
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


_TEXT = ("utf-8", "surrogateescape")
"""Encoding and error handler that preserve all bytes: ONNX strings need not be UTF-8."""


def _strings(tensor: TensorProto) -> Array:
    texts = [item.decode(*_TEXT) for item in tensor.string_data]
    return np.array(texts, dtype=object).reshape(tuple(tensor.dims))


def _string_tensor(name: str, array: Array) -> TensorProto:
    tensor = TensorProto(name=name, data_type=TensorProto.STRING, dims=array.shape)
    items: list[str | bytes] = array.reshape(-1).tolist()
    tensor.string_data.extend(t.encode(*_TEXT) if isinstance(t, str) else t for t in items)
    return tensor


def _decode(tensor: TensorProto, raw: bytes | memoryview) -> Array:
    dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    if tensor.data_type in _PACKED_BITS:
        inline = TensorProto(data_type=tensor.data_type, dims=tensor.dims, raw_data=bytes(raw))
        return np.asarray(numpy_helper.to_array(inline))
    return np.frombuffer(raw, dtype=dtype).reshape(tuple(tensor.dims))


def _is_packed(tensor: TensorProto, array: Array) -> bool:
    """Return whether the array holds the packed bytes of a tensor below a byte per element."""
    return tensor.data_type in _PACKED_BITS and array.dtype == np.uint8


def _encode(tensor: TensorProto, array: Array) -> memoryview:
    if tensor.data_type in _PACKED_BITS and not _is_packed(tensor, array):
        return memoryview(numpy_helper.from_array(array).raw_data)
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(np.uint8).data if flat.size else memoryview(b"")
