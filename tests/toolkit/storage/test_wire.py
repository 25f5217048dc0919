"""The wire walker against protobuf itself."""

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, strategies as st
from onnx import ModelProto, TensorProto, helper, numpy_helper

from toolkit.storage import serialize, wire


def small_model(*tensors: TensorProto) -> ModelProto:
    graph = helper.make_graph([], "g", [], [], list(tensors))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


ARRAY = np.arange(2000, dtype=np.float64)
LARGE = small_model(numpy_helper.from_array(ARRAY, "w")).SerializeToString()
HEADER_BYTES = 40
"""Where the structure is; what follows are the tensor's contents."""


@given(st.integers(0, 2**64 - 1))
def test_varints_read_back(value: int) -> None:
    encoded = wire.encode_varint(value)
    tag = bytes([1 << 3])
    [(number, kind, _, at, stop)] = wire.fields(memoryview(tag + encoded), 0, 1 + len(encoded))
    assert (number, kind, stop - at) == (1, wire.VARINT, len(encoded))


def test_small_tensors_stay_inside() -> None:
    model = small_model(numpy_helper.from_array(np.arange(8, dtype=np.float32), "w"))
    data = model.SerializeToString()
    assert serialize.strip(memoryview(data), "model.onnx") == data


@pytest.mark.parametrize("typed", [True, False])
def test_large_tensor_becomes_a_reference(typed: bool) -> None:
    array = np.random.default_rng(0).standard_normal(5000).astype(np.float32)
    if typed:
        tensor = helper.make_tensor("w", TensorProto.FLOAT, [5000], array.tolist())
    else:
        tensor = numpy_helper.from_array(array, "w")
    data = small_model(tensor).SerializeToString()
    stripped = ModelProto.FromString(serialize.strip(memoryview(data), "model.onnx"))
    entry = {e.key: e.value for e in stripped.graph.initializer[0].external_data}
    offset, length = int(entry["offset"]), int(entry["length"])
    assert entry["location"] == "model.onnx"
    np.testing.assert_array_equal(np.frombuffer(data[offset : offset + length], "f4"), array)
    assert stripped.ByteSize() < 300


@given(st.binary(max_size=200))
def test_garbage_is_an_error_or_passes_through(data: bytes) -> None:
    try:
        stripped = serialize.strip(memoryview(data), "x")
    except wire.WireError:
        return
    assert stripped == data, "nothing in it is large enough to be taken out"


@given(st.integers(0, 2**32), st.integers(0, 255))
def test_a_flipped_byte_is_an_error_or_changes_as_little(position: int, byte: int) -> None:
    """Where both the bytes and what is left of them parse, the structure is the same."""
    whole = bytearray(LARGE)
    whole[position % HEADER_BYTES] = byte
    try:
        stripped = ModelProto.FromString(serialize.strip(memoryview(bytes(whole)), "x"))
        wanted = ModelProto.FromString(bytes(whole))
    except (wire.WireError, DecodeError):
        return
    for tensor in (*stripped.graph.initializer, *wanted.graph.initializer):
        for name in ("raw_data", "external_data", "data_location"):
            tensor.ClearField(name)
    assert stripped == wanted


@given(st.integers(0, len(LARGE) - 1))
def test_truncation_never_goes_unnoticed(cut: int) -> None:
    try:
        proto = ModelProto.FromString(serialize.strip(memoryview(LARGE[:cut]), "x"))
    except (wire.WireError, DecodeError):
        return
    assert proto != ModelProto.FromString(LARGE)
    assert not proto.HasField("graph") or not proto.opset_import
