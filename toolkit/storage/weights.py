"""Tensor bytes, kept outside the protobuf: mapped from files, overlaid, streamed out.

A large TensorProto holds no data, only a reference in ONNX's own external-data form. Its location
is a file beside the model (for a single-file model: the .onnx itself), or an entry of the overlay
for tensors that passes made. Large new tensors are spilled to a scratch file and mapped back, so
anonymous memory does not grow with the weights.
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
"""Tensors up to this many bytes stay in the protobuf; runtimes read shapes and axes from there."""

_OVERLAY = "\x7ftoolkit-overlay/"
_PACKED_BITS: dict[int, int] = {
    TensorProto.INT4: 4,
    TensorProto.UINT4: 4,
    TensorProto.FLOAT4E2M1: 4,
    TensorProto.INT2: 2,
    TensorProto.UINT2: 2,
}


def nbytes(tensor: TensorProto) -> int:
    """Bytes of the tensor's contents in raw form."""
    if tensor.data_type == TensorProto.STRING:
        return sum(map(len, tensor.string_data))
    elements = math.prod(tensor.dims)
    bits = _PACKED_BITS.get(tensor.data_type)
    if bits is not None:
        return -(-elements * bits // 8)
    return elements * helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize


def is_external(tensor: TensorProto) -> bool:
    return tensor.data_location == TensorProto.EXTERNAL


def reference(tensor: TensorProto) -> tuple[str, int, int]:
    """(location, offset, length) of an external tensor."""
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
    """Make `tensor` refer to bytes elsewhere, and drop whatever data it holds."""
    clear_data(tensor)
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", str(offset)), ("length", str(length))):
        entry = tensor.external_data.add()
        entry.key, entry.value = key, value


def clear_data(tensor: TensorProto) -> None:
    for name in ("raw_data", "float_data", "int32_data", "int64_data", "double_data"):
        tensor.ClearField(name)
    for name in ("uint64_data", "string_data", "external_data", "data_location"):
        tensor.ClearField(name)


class Weights:
    """The bytes behind a model's external tensors."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._maps: dict[str, memoryview] = {}
        self._overlay: dict[str, Array] = {}
        self._owners: list[object] = []

    def depend_on(self, owner: object) -> None:
        """Hold on to what the files need to be there, as the owner of a temporary folder."""
        self._owners.append(owner)

    def fork(self) -> Weights:
        """The same weights for a draft: what is put there goes with it."""
        other = Weights(self.folder)
        other._maps = self._maps
        other._overlay = dict(self._overlay)
        return other

    # -- reading

    def array(self, tensor: TensorProto) -> Array:
        """The tensor's contents; a read-only view without a copy wherever the encoding allows."""
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
        """The bytes of an external tensor, little-endian and packed as in `raw_data`."""
        location, offset, length = reference(tensor)
        overlaid = self._overlay.get(location)
        if overlaid is not None:
            return _encode(tensor, overlaid)
        return self._file(tensor, location)[offset : offset + length]

    def overlaid(self, tensor: TensorProto) -> Array | None:
        """The in-memory array of a tensor that no file of the model's folder holds."""
        return self._overlay.get(reference(tensor)[0]) if is_external(tensor) else None

    def check(self, tensor: TensorProto) -> None:
        """Raise ModelError unless an external reference lies inside the model's folder and file."""
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
        """The files that are mapped: a save must not overwrite one of them."""
        if self.folder is None:
            return []
        return [self.folder / location for location in self._maps]

    # -- writing

    def put(self, name: str, array: Array) -> TensorProto:
        """A new tensor with these contents; large ones go to the overlay, read-only ones as is."""
        # The element type comes from the array, which for ml_dtypes covers bf16, fp8 and int4.
        if array.dtype.kind in "OSU":
            return _string_tensor(name, array)
        array = np.asarray(array)
        if array.nbytes <= INLINE_LIMIT:
            return numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), name)
        tensor = TensorProto()
        tensor.name = name
        tensor.data_type = helper.np_dtype_to_tensor_dtype(array.dtype)
        tensor.dims.extend(array.shape)
        location = f"{_OVERLAY}{len(self._overlay)}"
        self._overlay[location] = self.keep(array)
        set_reference(tensor, location, 0, nbytes(tensor))
        return tensor

    def put_packed(self, name: str, data_type: int, dims: Sequence[int], raw: Array) -> TensorProto:
        """A new tensor of elements below a byte, from the bytes that `raw_data` would hold."""
        tensor = TensorProto(name=name, data_type=data_type, dims=dims)
        if raw.nbytes != nbytes(tensor) or raw.dtype != np.uint8:
            raise ValueError(f"'{name}': {raw.nbytes} bytes for a tensor of {nbytes(tensor)}")
        if raw.nbytes <= INLINE_LIMIT:
            tensor.raw_data = raw.tobytes()
            return tensor
        location = f"{_OVERLAY}{len(self._overlay)}"
        self._overlay[location] = self.keep(raw)
        set_reference(tensor, location, 0, raw.nbytes)
        return tensor

    def map_file(self, location: str, view: memoryview) -> None:
        """Use `view` for the file `location` of the model's folder (already mapped by the load)."""
        self._maps[location] = view

    def keep(self, array: Array) -> Array:
        """A read-only array with these contents that costs little memory, however large it is."""
        if not array.flags.writeable and array.flags.c_contiguous:
            return array  # a view of a mapped file: its bytes are shared, not copied
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
    """The file's bytes, mapped; an empty file gives an empty view."""
    with path.open("rb") as file:
        if not path.stat().st_size:
            return memoryview(b"")
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


_TEXT = ("utf-8", "surrogateescape")
"""How bytes become text and come back as they were: ONNX does not ask strings to be UTF-8."""


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
    """Whether the array holds the tensor's bytes, several elements in each."""
    return tensor.data_type in _PACKED_BITS and array.dtype == np.uint8


def _encode(tensor: TensorProto, array: Array) -> memoryview:
    if tensor.data_type in _PACKED_BITS and not _is_packed(tensor, array):
        return memoryview(numpy_helper.from_array(array).raw_data)
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(np.uint8).data if flat.size else memoryview(b"")
