"""Large tensors leave the protobuf, and come back on their own or in a sidecar."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, numpy_helper

from tests.toolkit.storage.large_models import everywhere, large, tensors_of
from toolkit.errors import SaveError
from toolkit.storage import serialize
from toolkit.storage.serialize import inflate, save, strip_proto
from toolkit.storage.weights import Weights, is_external, reference


def stripped() -> tuple[ModelProto, Weights]:
    weights = Weights()
    return strip_proto(everywhere(), weights), weights


def by_name(proto: ModelProto) -> dict[str, TensorProto]:
    return {tensor.name: tensor for tensor in tensors_of(proto)}


def test_large_tensors_become_references_wherever_they_are() -> None:
    proto, weights = stripped()
    outside = {name for name, tensor in by_name(proto).items() if is_external(tensor)}
    assert outside == {"w", "c", "p", "q", "k"}
    assert by_name(proto).keys() - outside == {"small", "words"}
    for tensor in tensors_of(everywhere()):
        np.testing.assert_array_equal(
            weights.array(by_name(proto)[tensor.name]), numpy_helper.to_array(tensor)
        )


def test_inflate_reverses_strip() -> None:
    proto, weights = stripped()
    assert ModelProto.FromString(b"".join(inflate(proto, weights))) == everywhere()
    assert by_name(proto)["w"].external_data, "the stripped model itself stays as it is"


def test_a_model_without_references_is_serialized_as_it_is() -> None:
    assert b"".join(inflate(everywhere(), Weights())) == everywhere().SerializeToString()


def test_known_tensors_are_not_stored_again() -> None:
    proto, weights = stripped()
    changed = everywhere()
    changed.graph.initializer[0].CopyFrom(large("w", 7))
    again = by_name(strip_proto(changed, weights, tensors_of(proto)))
    before = by_name(proto)
    same = [n for n in ("w", "c", "p", "q", "k") if reference(again[n]) == reference(before[n])]
    assert same == ["c", "p", "q", "k"]
    assert weights.array(again["w"])[0, 0] == 7


@pytest.mark.parametrize("field", ["data_type", "dims"])
def test_equal_bytes_of_another_type_or_shape_are_another_tensor(field: str) -> None:
    weights = Weights()
    proto = strip_proto(everywhere(), weights)
    changed = everywhere()
    [first, *_] = changed.graph.initializer
    if field == "dims":
        first.dims[:] = [20, 80]
    else:
        first.data_type = TensorProto.INT32
    again = by_name(strip_proto(changed, weights, tensors_of(proto)))["w"]
    assert reference(again) != reference(by_name(proto)["w"])
    array = weights.array(again)
    assert (array.shape, array.dtype) == (
        ((20, 80), np.float32) if field == "dims" else ((40, 40), np.int32)
    )


def test_tensors_of_a_sidecar_begin_on_pages(tmp_path: Path) -> None:
    proto, weights = stripped()
    assert save(proto, weights, tmp_path / "m.onnx", external_data=True) == tmp_path / "m.onnx"
    written = onnx.load(tmp_path / "m.onnx", load_external_data=False)
    links = [reference(tensor) for tensor in tensors_of(written) if is_external(tensor)]
    assert {location for location, _, _ in links} == {"m.onnx.data"}
    assert sorted(offset for _, offset, _ in links) == [0, 8192, 16384, 24576, 32768]
    assert (tmp_path / "m.onnx.data").stat().st_size == 32768 + 6400
    assert onnx.load(tmp_path / "m.onnx").graph.initializer[0].raw_data == large("w", 1).raw_data


def test_a_model_above_the_limit_of_protobuf_gets_a_sidecar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proto, weights = stripped()
    save(proto, weights, tmp_path / "small.onnx", external_data=False)
    size = (tmp_path / "small.onnx").stat().st_size
    for limit, files in ((size + 1, {"m.onnx"}), (size, {"m.onnx", "m.onnx.data"})):
        monkeypatch.setattr(serialize, "PROTOBUF_LIMIT", limit)
        folder = tmp_path / str(limit)
        folder.mkdir()
        save(proto, weights, folder / "m.onnx", external_data=False)
        assert {path.name for path in folder.iterdir()} == files


def test_a_sidecar_must_not_replace_a_file_that_is_read(tmp_path: Path) -> None:
    proto, weights = stripped()
    save(proto, weights, tmp_path / "m.onnx", external_data=True)
    read = ModelProto.FromString((tmp_path / "m.onnx").read_bytes())
    mapped = Weights(tmp_path)
    mapped.array(read.graph.initializer[0])
    (tmp_path / "m.onnx").unlink()
    with pytest.raises(SaveError, match=r"m\.onnx\.data': the model is read from it"):
        save(read, mapped, tmp_path / "m.onnx", external_data=True)
    assert {path.name for path in tmp_path.iterdir()} == {"m.onnx.data"}
