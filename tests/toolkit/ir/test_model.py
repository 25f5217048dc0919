"""Load and save: nothing lost, nothing copied, nothing half written."""

import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper, parser

from toolkit.errors import ModelError, SaveError
from toolkit.ir.model import Model
from toolkit.runtime.session import Session

BIG = (64, 64)


def weights_of(*tensors: TensorProto) -> ModelProto:
    nodes = [helper.make_node("Identity", [t.name], [f"out_{t.name}"]) for t in tensors]
    outputs = [
        helper.make_tensor_value_info(n.output[0], t.data_type, None)
        for n, t in zip(nodes, tensors, strict=True)
    ]
    graph = helper.make_graph(nodes, "g", [], outputs, list(tensors))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)


def every_encoding() -> list[TensorProto]:
    rng = np.random.default_rng(0)
    floats = rng.standard_normal(BIG)
    tensors = [
        numpy_helper.from_array(floats.astype(d), f"raw_{np.dtype(d)}")
        for d in (
            np.float32,
            np.float64,
            np.float16,
            ml_dtypes.bfloat16,
            ml_dtypes.float8_e4m3fn,
            ml_dtypes.float8_e5m2,
            np.int8,
            np.uint16,
            np.int64,
            np.bool_,
            np.complex64,
        )
    ]
    fours = rng.integers(-8, 8, (100, 101)).astype(ml_dtypes.int4)
    tensors.append(numpy_helper.from_array(fours, "int4"))
    flat = floats.reshape(-1)
    tensors.append(helper.make_tensor("float_data", TensorProto.FLOAT, BIG, flat))
    tensors.append(helper.make_tensor("double_data", TensorProto.DOUBLE, BIG, flat))
    tensors.append(helper.make_tensor("int64_data", TensorProto.INT64, BIG, range(64 * 64)))
    tensors.append(helper.make_tensor("int32_data", TensorProto.INT8, BIG, [1] * 64 * 64))
    tensors.append(helper.make_tensor("fp16_data", TensorProto.FLOAT16, BIG, flat))
    tensors.append(helper.make_tensor("uint64_data", TensorProto.UINT64, BIG, range(64 * 64)))
    words: Any = [f"word{i}".encode() for i in range(2000)]
    tensors.append(helper.make_tensor("strings", TensorProto.STRING, [2000], words))
    tensors.append(helper.make_tensor("empty", TensorProto.FLOAT, [0, 5], []))
    tensors.append(numpy_helper.from_array(np.float32(3.5).reshape(()), "scalar"))
    return tensors


@pytest.mark.parametrize("external", [False, True])
@pytest.mark.parametrize("tensor", every_encoding(), ids=lambda t: t.name)
def test_every_encoding_survives(tmp_path: Path, tensor: TensorProto, external: bool) -> None:
    source = tmp_path / "a.onnx"
    onnx.save(weights_of(tensor), source)
    model = Model.load(source)
    expected = numpy_helper.to_array(tensor)
    stored = model.graph.initializers[tensor.name]
    np.testing.assert_array_equal(model.weights.array(stored), expected)
    saved = model.save(tmp_path / "b.onnx", external_data=external)
    [again] = onnx.load(saved).graph.initializer
    np.testing.assert_array_equal(numpy_helper.to_array(again), expected)
    np.testing.assert_array_equal(Model.load(saved).graph.const(tensor.name), expected)


def test_loading_copies_no_weights(tmp_path: Path) -> None:
    array = np.ones((512, 512), np.float32)
    onnx.save(weights_of(numpy_helper.from_array(array, "w")), tmp_path / "m.onnx")
    model = Model.load(tmp_path / "m.onnx")
    assert model.to_proto().ByteSize() < 500
    assert not model.graph.const("w").flags.owndata


def test_structure_is_kept_as_it_came(tmp_path: Path) -> None:
    proto = parser.parse_model("""
        <ir_version: 9, opset_import: ["" : 18, "my.ops" : 1], producer_name: "someone",
         doc_string: "a doc", metadata_props: ["k" : "v"]>
        main (float[N, 4] x, bool c) => (float[N, 4] y)
        <float[4] b = {1, 2, 3, 4}>
        {
          z = my.ops.double (x)
          y = If (c) <
            then_branch = yes () => (float[N, 4] t) { t = Add(z, b) },
            else_branch = no () => (float[N, 4] e) { e = Sub(z, b) }
          >
        }
        <domain: "my.ops", opset_import: ["" : 18]> double (a) => (r) { r = Add(a, a) }
    """)
    proto.training_info.add().algorithm.name = "algorithm"
    sparse = proto.graph.sparse_initializer.add()
    sparse.values.CopyFrom(numpy_helper.from_array(np.ones(2, np.float32), "sp"))
    sparse.indices.CopyFrom(numpy_helper.from_array(np.array([1, 3], np.int64)))
    sparse.dims.extend([5])
    onnx.save(proto, tmp_path / "m.onnx")
    model = Model.load(tmp_path / "m.onnx")
    model.graph.verify()
    model.save(tmp_path / "n.onnx")
    assert onnx.load(tmp_path / "n.onnx") == onnx.load(tmp_path / "m.onnx")


def test_large_constant_node_and_subgraph_tensor(tmp_path: Path) -> None:
    big = numpy_helper.from_array(np.arange(4096, dtype=np.float32))
    inner = helper.make_graph(
        [helper.make_node("Constant", [], ["t"], value=big)],
        "b",
        [],
        [helper.make_tensor_value_info("t", 1, [4096])],
    )
    nodes = [
        helper.make_node("Constant", [], ["k"], value=big),
        helper.make_node("If", ["c"], ["i"], then_branch=inner, else_branch=inner),
        helper.make_node("Add", ["k", "i"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("c", TensorProto.BOOL, [])],
        [helper.make_tensor_value_info("y", 1, [4096])],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(proto, tmp_path / "m.onnx")
    model = Model.load(tmp_path / "m.onnx")
    assert model.to_proto().ByteSize() < 1000
    assert model.inlined_proto() == proto
    assert model.nbytes() == 3 * 4096 * 4


def test_from_proto_leaves_the_proto_alone() -> None:
    proto = weights_of(numpy_helper.from_array(np.ones(BIG, np.float32), "w"))
    before = proto.SerializeToString()
    model = Model.from_proto(proto)
    model.graph.constant(np.zeros(3))
    assert proto.SerializeToString() == before
    assert model.to_proto().ByteSize() < 1000


def test_sidecar_models_load_and_save(tmp_path: Path) -> None:
    array = np.random.default_rng(0).standard_normal((100, 100)).astype(np.float32)
    proto = weights_of(numpy_helper.from_array(array, "w"))
    onnx.save(proto, tmp_path / "m.onnx", save_as_external_data=True, size_threshold=0)
    model = Model.load(tmp_path / "m.onnx")
    model.save(tmp_path / "one.onnx")
    model.save(tmp_path / "two.onnx", external_data=True)
    for name in ("one", "two"):
        [tensor] = onnx.load(tmp_path / f"{name}.onnx").graph.initializer
        np.testing.assert_array_equal(numpy_helper.to_array(tensor), array)
    assert (tmp_path / "two.onnx.data").stat().st_size == array.nbytes


def reference_model(location: str, offset: int = 0, length: int | None = None) -> ModelProto:
    tensor = TensorProto(name="w", data_type=1, dims=[16], data_location=TensorProto.EXTERNAL)
    entries = {"location": location, "offset": str(offset), "length": str(length or 64)}
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=value)
    return weights_of(tensor)


@pytest.mark.parametrize(
    ("location", "offset", "length", "message"),
    [
        ("gone.bin", 0, 64, "missing"),
        ("../w.bin", 0, 64, "outside"),
        ("sub/../../w.bin", 0, 64, "outside"),
        ("/etc/hostname", 0, 64, "relative"),
        ("link.bin", 0, 64, "outside"),
        ("w.bin", 8, 64, "past the end"),
        ("w.bin", -8, 64, "past the end"),
        ("w.bin", 0, 32, "32 bytes"),
        ("", 0, 64, "relative"),
    ],
)
def test_external_data_is_contained(
    tmp_path: Path, location: str, offset: int, length: int, message: str
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "w.bin").write_bytes(bytes(64))
    (folder / "w.bin").write_bytes(bytes(64))
    (folder / "link.bin").symlink_to(tmp_path / "w.bin")
    (folder / "m.onnx").write_bytes(reference_model(location, offset, length).SerializeToString())
    model = Model.load(folder / "m.onnx")
    with pytest.raises(ModelError, match=message):
        model.weights.check(model.graph.initializers["w"])


def test_save_never_touches_the_input(tmp_path: Path) -> None:
    source = tmp_path / "m.onnx"
    onnx.save(weights_of(numpy_helper.from_array(np.ones(BIG, np.float32), "w")), source)
    os.link(source, tmp_path / "hard.onnx")
    (tmp_path / "soft.onnx").symlink_to(source)
    model = Model.load(source)
    before = source.read_bytes()
    for name in ("m.onnx", "hard.onnx", "soft.onnx"):
        with pytest.raises(SaveError, match="read from it"):
            model.save(tmp_path / name)
    with pytest.raises(SaveError, match="does not exist"):
        model.save(tmp_path / "nowhere" / "m.onnx")
    with pytest.raises(SaveError, match="folder"):
        model.save(tmp_path)
    assert source.read_bytes() == before
    assert {p.name for p in tmp_path.iterdir()} == {"m.onnx", "hard.onnx", "soft.onnx"}


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proto = weights_of(numpy_helper.from_array(np.ones(BIG, np.float32), "w"))
    (tmp_path / "out.onnx").write_bytes(b"old")
    model = Model.from_proto(proto)

    def no_space(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(SaveError, match="No space left"):
        model.save(tmp_path / "out.onnx")
    assert [p.name for p in tmp_path.iterdir()] == ["out.onnx"]
    assert (tmp_path / "out.onnx").read_bytes() == b"old"


@pytest.mark.parametrize("external_data", [False, True])
def test_a_tensor_of_many_pieces_is_written_whole(tmp_path: Path, external_data: bool) -> None:
    array = np.arange(700_001, dtype=np.float32)  # 2.7 MB: two pieces and a rest
    onnx.save(weights_of(numpy_helper.from_array(array, "w")), tmp_path / "m.onnx")
    Model.load(tmp_path / "m.onnx").save(tmp_path / "out.onnx", external_data)
    written = onnx.load(tmp_path / "out.onnx")
    np.testing.assert_array_equal(numpy_helper.to_array(written.graph.initializer[0]), array)


def test_replacing_a_model_waits_for_its_new_sidecar_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model.from_proto(weights_of(numpy_helper.from_array(np.ones(BIG, np.float32), "w")))
    waits: list[int] = []
    monkeypatch.setattr(os, "fsync", waits.append)
    model.save(tmp_path / "new.onnx", external_data=True)
    assert not waits
    (tmp_path / "old.onnx").write_bytes(b"old")
    model.save(tmp_path / "old.onnx", external_data=True)
    assert len(waits) == 2


@pytest.mark.parametrize(
    "content", [b"", b"hello world, this is text", b"\x00" * 100, b"PK\x03\x04"]
)
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.onnx").write_bytes(content)
    with pytest.raises(ModelError):
        Model.load(tmp_path / "m.onnx")


def test_overlay_tensors_are_shared_with_their_source(tmp_path: Path) -> None:
    array = np.arange(10_000, dtype=np.float32).reshape(100, 100)
    onnx.save(weights_of(numpy_helper.from_array(array, "w")), tmp_path / "m.onnx")
    model = Model.load(tmp_path / "m.onnx")
    view = model.graph.const("w").reshape(50, 200)
    name = model.graph.constant(view)
    kept = model.graph.const(name)
    assert np.shares_memory(kept, model.graph.const("w"))
    transposed = model.graph.constant(array.T)
    np.testing.assert_array_equal(model.graph.const(transposed), array.T)


def test_replace_is_one_edit(tmp_path: Path) -> None:
    array = np.arange(10_000, dtype=np.float32)
    onnx.save(weights_of(numpy_helper.from_array(array, "w")), tmp_path / "m.onnx")
    model = Model.load(tmp_path / "m.onnx")
    before = model.to_proto()
    changed = model.inlined_proto()
    changed.graph.node[0].op_type = "Neg"
    model.replace(changed)
    assert model.graph.nodes[0].op_type == "Neg"
    assert model.weights.overlaid(model.graph.initializers["w"]) is None  # same bytes, same place
    model.graph.verify()
    model.rollback()
    assert model.to_proto() == before


def test_a_model_behind_a_link_runs(tmp_path):
    """As in a hub's cache, where every file is a link to another folder."""
    weight = np.random.default_rng(0).standard_normal((300, 300), np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 300])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 300])],
        [numpy_helper.from_array(weight, "w")],
    )
    opsets = [helper.make_opsetid("", 17)]
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    onnx.save(helper.make_model(graph, ir_version=8, opset_imports=opsets), tmp_path / "blobs/1f")
    link = tmp_path / "snapshot" / "model.onnx"
    link.symlink_to("../blobs/1f")
    model = Model.load(link)
    (found,) = Session(model).run({"x": np.ones((1, 300), np.float32)})
    np.testing.assert_allclose(found[0], weight.sum(0), atol=1e-3)
