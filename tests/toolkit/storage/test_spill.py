"""Large arrays in files, and sessions that map them: memory does not grow with new weights."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from tests.checks import model, parse
from toolkit.ir.model import Model
from toolkit.runtime.session import Session
from toolkit.storage import spill
from toolkit.storage.spill import allocate, file_range

on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def anonymous_megabytes() -> float:
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) / 1000


def test_small_arrays_are_plain_memory():
    assert file_range(allocate((3,), np.float32)) is None
    assert file_range(np.zeros(1 << 20)) is None


def test_large_arrays_are_in_files_where_they_say():
    small, large = allocate((200, 200), np.float32), allocate((5000, 5000), np.int8)
    small[:], large[:] = 1.5, 7
    large[4000:] = 8
    for array in (small, small[10:], large, large[4000:], large.reshape(-1).view(np.uint8)):
        place = file_range(array)
        assert place is not None
        raw = place.path.read_bytes()[place.offset : place.offset + array.nbytes]
        assert raw == array.tobytes()
    assert file_range(large[:, 1:]) is None, "not in one piece"


def test_small_arrays_share_a_file_and_do_not_overlap():
    arrays = [allocate((100, 1000 + size), np.int8) for size in range(20)]
    for value, array in enumerate(arrays):
        array[:] = value
    assert all((array == value).all() for value, array in enumerate(arrays))
    assert len({place.path for array in arrays if (place := file_range(array))}) <= 2


def test_a_file_goes_with_its_last_array():
    array = allocate((5000, 5000), np.int8)
    part, place = array[:10], file_range(array)
    assert place is not None
    del array
    gc.collect()
    assert place.path.exists()
    del part
    gc.collect()
    assert not place.path.exists()


def test_a_full_file_is_followed_by_another(monkeypatch):
    monkeypatch.setattr(spill, "_SHARED", 1 << 18)
    arrays = [allocate((70_000,), np.int8) for _ in range(8)]
    for value, array in enumerate(arrays):
        array[:] = value
    assert all((array == value).all() for value, array in enumerate(arrays))


# Sessions ----------------------------------------------------------------------------------------


def with_weight(made: Model, weight: np.ndarray) -> Model:
    """y = x W, for a model that is y = Neg(x)."""
    g = made.graph
    (node,) = g.nodes
    weight.flags.writeable = False
    g.replace(node.output[0], g.op("MatMul", node.input[0], g.constant(weight, "w")))
    g.prune(node)
    return made


def random_weight(rows: int, columns: int) -> np.ndarray:
    weight = allocate((rows, columns), np.float32)
    weight[:] = np.random.default_rng(rows).standard_normal(weight.shape, dtype=np.float32)
    return weight


@on_linux
@pytest.mark.parametrize("optimize", [False, True])
def test_a_session_maps_what_passes_have_made(optimize):
    weight = random_weight(3000, 3000)
    made = with_weight(model("g (float[N,3000] x) => (float[N,3000] y) { y = Neg(x) }"), weight)
    x = np.ones((2, 3000), np.float32)
    Session(model("g (float[2] x) => (float[2] y) { y = Neg(x) }"))  # loads the library
    before = anonymous_megabytes()
    (y,) = Session(made, optimize).run({"x": x})
    assert anonymous_megabytes() - before < 15, "36 MB of weights were copied"
    np.testing.assert_allclose(y[0], weight.sum(axis=0), rtol=1e-3, atol=1e-3)


@on_linux
def test_packed_weights_are_mapped_too():
    made = model("g (float[1] x) => (float[1] y) { y = Neg(x) }")
    g = made.graph
    packed = allocate((1 << 24,), np.uint8)
    packed[:] = 0x21
    dims = (1 << 12, 1 << 13)
    g.put_initializer(made.weights.put_packed("codes", TensorProto.INT4, dims, packed))
    half = g.op("DequantizeLinear", "codes", g.constant(np.array(0.5, np.float32)))
    total = g.op("ReduceMax", half, keepdims=0)
    node = g.nodes[0]
    g.replace(node.output[0], g.op("Add", node.input[0], total))
    before = anonymous_megabytes()
    session = Session(made)
    assert anonymous_megabytes() - before < 10, "17 MB of codes were copied"
    (y,) = session.run({"x": np.zeros(1, np.float32)})
    assert y[0] == 1.0  # 2 steps of 0.5


def test_files_of_the_model_and_scratch_files_go_together(tmp_path):
    first, second = random_weight(200, 200), random_weight(201, 200)[:200]
    proto = parse("g (float[N,200] x) => (float[N,200] z) { y = MatMul(x, v) z = Neg(y) }")
    proto.graph.initializer.append(onnx.numpy_helper.from_array(first, "v"))
    (tmp_path / "sub").mkdir()
    onnx.save(proto, tmp_path / "m.onnx", save_as_external_data=True, location="sub/v.bin")
    made = Model.load(tmp_path / "m.onnx")
    g, node = made.graph, made.graph.nodes[1]
    second.flags.writeable = False
    g.replace(node.output[0], g.op("MatMul", node.input[0], g.constant(second, "w")))
    g.prune(node)
    x = np.ones((1, 200), np.float32)
    (z,) = Session(made).run({"x": x})
    np.testing.assert_allclose(z, x @ first @ second, rtol=1e-3, atol=1e-3)


def test_an_array_in_memory_is_lent():
    weight = np.random.default_rng(0).standard_normal((300, 300), dtype=np.float32)
    made = with_weight(model("g (float[N,300] x) => (float[N,300] y) { y = Neg(x) }"), weight)
    (y,) = Session(made).run({"x": np.ones((1, 300), np.float32)})
    np.testing.assert_allclose(y[0], weight.sum(axis=0), rtol=1e-3, atol=1e-3)
