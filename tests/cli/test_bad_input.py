"""What a user can have wrong: one clear line, exit 2, no traceback, nothing written."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.cli.models import TEXT, graph_with, listing, parse, with_external
from toolkit.cli import demo_model

COMMANDS = ["optimize", "inspect"]


def node(op_type, inputs, outputs, **attributes):
    return helper.make_node(op_type, inputs, outputs, **attributes)


def weight(name="w", data_type: int = TensorProto.FLOAT) -> TensorProto:
    tensor = numpy_helper.from_array(np.ones(2, np.float32), name)
    tensor.data_type = data_type
    return tensor


def with_weights(*tensors) -> onnx.ModelProto:
    """Relu of an initializer `w`."""
    return graph_with([node("Relu", ["w"], ["y"])], [], tensors)


def floats(dims, **data) -> TensorProto:
    return TensorProto(name="w", data_type=TensorProto.FLOAT, dims=dims, **data)


# Files that are no models ------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (b"\x00" * 64, "not an ONNX model"),
        (b"PK\x03\x04 a zip archive, not a model", "not an ONNX model"),
        (b'{"a": "json file"}', "not an ONNX model"),
        (b"\xff" * 500, "not an ONNX model"),
        (b"\x08\x08", "not an ONNX model"),  # IR version 8 and nothing else
        ("text in UTF-8: Übung".encode(), "not an ONNX model"),
    ],
)
def test_not_a_model(refused, tmp_path, command, content, reason):
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    refused(command, path, says=(reason, "model.onnx"))


@pytest.mark.parametrize("command", COMMANDS)
def test_random_bytes(refused, tmp_path, command):
    random = np.random.default_rng(0)
    path = tmp_path / "model.onnx"
    for _ in range(40):
        path.write_bytes(random.bytes(int(random.integers(1, 300))))
        refused(command, path)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_and_a_missing_file(refused, tmp_path, command):
    refused(command, tmp_path, says="is a folder")
    refused(command, tmp_path / "gone.onnx", says=("gone.onnx", "does not exist"))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_is_not_waited_for(refused, tmp_path):
    os.mkfifo(tmp_path / "pipe.onnx")
    refused("optimize", tmp_path / "pipe.onnx", says="pipe.onnx")


def test_cut_anywhere(refused, tmp_path):
    whole = demo_model.build().SerializeToString()
    path = tmp_path / "cut.onnx"
    ends = [*range(1, 48), *range(48, len(whole), 1499), *range(len(whole) - 24, len(whole))]
    for end in ends:
        path.write_bytes(whole[:end])
        refused("optimize", path)


def test_bytes_flipped_never_end_in_a_traceback(run, tmp_path):
    """A damaged file may by chance still be a model; it must not break the toolkit."""
    whole = parse(TEXT).SerializeToString()
    random = np.random.default_rng(1)
    path = tmp_path / "damaged.onnx"
    for _ in range(150):
        damaged = bytearray(whole)
        for _ in range(int(random.integers(1, 4))):
            damaged[int(random.integers(len(whole)))] = int(random.integers(256))
        path.write_bytes(bytes(damaged))
        done = run("optimize", path, "--quiet")
        assert done.code in (0, 1, 2), done.err
        assert done.err.count("\n") == (done.code != 0)


# External data -----------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("location", "offset", "length", "reason"),
    [
        ("gone.bin", 0, 64, "gone.bin"),
        ("../outside.bin", 0, 64, "outside"),
        ("inner/../../outside.bin", 0, 64, "outside"),
        ("/etc/hostname", 0, 64, "/etc/hostname"),
        ("link.bin", 0, 64, "outside"),
        ("linked/outside.bin", 0, 64, "outside"),
        ("", 0, 64, "location"),
        (".", 0, 64, "external data"),
        ("weights.bin", 1, 64, "past the end"),
        ("weights.bin", 1 << 62, 64, "past the end"),
        ("weights.bin", -8, 64, "weights.bin"),
        ("weights.bin", 0, -64, "64"),
        ("weights.bin", 0, 32, "32 bytes"),
        ("weights.bin", "many", 64, "not a number"),
    ],
)
def test_external_data(refused, tmp_path, command, location, offset, length, reason):
    folder = tmp_path / "model"
    (folder / "inner").mkdir(parents=True)
    for path in (folder / "weights.bin", tmp_path / "outside.bin"):
        path.write_bytes(bytes(64))
    (folder / "link.bin").symlink_to(tmp_path / "outside.bin")
    (folder / "linked").symlink_to(tmp_path, target_is_directory=True)
    onnx.save(with_external(location, offset, length), folder / "model.onnx")
    refused(command, folder / "model.onnx", says=("'w'", reason))


# Graphs that cannot be ---------------------------------------------------------------------------

BROKEN = {
    "cycle": (
        graph_with(
            [node("Abs", ["b"], ["a"]), node("Abs", ["a"], ["b"]), node("Abs", ["b"], ["y"])]
        ),
        "cycle",
    ),
    "self loop": (graph_with([node("Relu", ["y"], ["y"])]), "cycle"),
    "value defined twice": (
        graph_with([node("Relu", ["x"], ["y"]), node("Abs", ["x"], ["y"])], ["x"]),
        "'y'",
    ),
    "two inputs of one name": (graph_with([node("Relu", ["x"], ["y"])], ["x", "x"]), "'x'"),
    "two initializers of one name": (
        with_weights(weight(), weight()),
        "'w'",
    ),
    "input that nothing defines": (graph_with([node("Relu", ["nobody"], ["y"])]), "'nobody'"),
    "output that nothing defines": (graph_with([node("Relu", ["x"], ["z"])], ["x"]), "'y'"),
    "no outputs": (graph_with([node("Relu", ["x"], ["y"])], ["x"], outputs=()), "output"),
    "opset of the future": (graph_with([node("Relu", ["x"], ["y"])], ["x"], opset=9999), "9999"),
    "opset 0": (graph_with([node("Relu", ["x"], ["y"])], ["x"], opset=0), "opset"),
    "domain that is not imported": (
        graph_with([node("Relu", ["x"], ["y"], domain="acme")], ["x"]),
        "acme",
    ),
    "data type that does not exist": (with_weights(weight(data_type=99)), "'w'"),
    "data of another type": (with_weights(floats([2], int64_data=[1, 2])), "'w'"),
    "more dimensions than data": (with_weights(floats([3], raw_data=bytes(8))), "'w'"),
    "negative dimension": (with_weights(floats([-2], raw_data=bytes(8))), "'w'"),
    "no data at all": (with_weights(floats([2])), "'w'"),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("what", BROKEN)
def test_broken_graph(refused, tmp_path, command, what):
    model, reason = BROKEN[what]
    path = tmp_path / "broken.onnx"
    path.write_bytes(model.SerializeToString())
    refused(command, path, says=reason)


def test_verify_takes_no_broken_models_either(refused, tmp_path, tiny):
    path = tmp_path / "broken.onnx"
    path.write_bytes(b"nonsense")
    refused("verify", tiny, path, says="broken.onnx")
    refused("verify", path, tiny, says="broken.onnx")
    refused("verify", tiny, tmp_path / "gone.onnx", says="gone.onnx")
    path.write_bytes(BROKEN["cycle"][0].SerializeToString())
    refused("verify", tiny, path, says=("broken.onnx", "cycle"))


def test_messages_are_in_our_own_words(refused, tiny):
    message = refused("optimize", tiny, "--target", "gpu", says="choose one of ort-cpu, onnx")
    assert "Value error" not in message
    message = refused("optimize", tiny, "--seed", "x", says="a valid integer")
    assert "parse" not in message


# Outputs -----------------------------------------------------------------------------------------


def test_the_output_is_the_input(refused, tmp_path, tiny, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "symlink.onnx").symlink_to(tiny)
    os.link(tiny, tmp_path / "hardlink.onnx")
    for output in (
        tiny,
        "tiny.onnx",
        "./tiny.onnx",
        "folder/../tiny.onnx",
        "symlink.onnx",
        "hardlink.onnx",
    ):
        refused("optimize", tiny, "-o", output, says="is the input")
        refused("optimize", "tiny.onnx", "-o", output, says="is the input")
    refused("optimize", "symlink.onnx", "-o", tiny, says="is the input")


def test_the_output_is_one_of_the_inputs_data_files(refused, tmp_path):
    (tmp_path / "weights.bin").write_bytes(bytes(64))
    onnx.save(with_external("weights.bin"), tmp_path / "model.onnx")
    refused("optimize", tmp_path / "model.onnx", "-o", tmp_path / "weights.bin", says="weights.bin")


def test_the_sidecar_is_the_input(refused, tmp_path, tiny):
    data = tmp_path / "out.onnx.data"
    tiny.rename(data)
    refused("optimize", data, "-o", tmp_path / "out.onnx", "--external-data", says="is the input")


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ("no/such/folder/out.onnx", "does not exist"),
        (".", "is a folder"),
        ("tiny.onnx/out.onnx", "tiny.onnx"),
        ("/proc/out.onnx", "cannot write"),
        ("/dev/null", "not a regular file"),
        (f"{'x' * 300}.onnx", "too long"),
    ],
)
def test_unwritable_output(refused, tmp_path, tiny, monkeypatch, output, reason):
    monkeypatch.chdir(tmp_path)
    refused("optimize", tiny, "-o", output, says=reason)
    if output != "/dev/null":
        refused("optimize", tiny, "--json", output, says=reason)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root writes everywhere")
def test_read_only_folder(refused, tmp_path, tiny):
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o500)
    refused("optimize", tiny, "-o", folder / "out.onnx", says="cannot write")


def test_the_report_is_a_file_of_the_command(refused, tmp_path, tiny):
    refused("optimize", tiny, "--json", tiny, says="--json")
    refused("optimize", tiny, "-o", tmp_path / "o", "--json", tmp_path / "o", says="--json")
    refused("inspect", tiny, "--json", tiny, says="--json")


def test_nothing_that_is_read_is_written_over(refused, tmp_path, tiny, sample, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "b.onnx.data").write_bytes(np.eye(4, dtype=np.float32).tobytes())
    onnx.save(with_external("b.onnx.data"), "b.onnx")
    (tmp_path / "helper_of_p.py").write_text("")
    (tmp_path / "p.py").write_text(
        "import helper_of_p\nfrom passes.simplify.cse import CommonSubexpressions as x\n"
    )
    (tmp_path / "link").symlink_to("b.onnx.data")
    os.link("p.py", "hard.py")
    data, code = "a data file of the input", "Python code"
    refused("inspect", "b.onnx", "--json", "b.onnx.data", says=("--json", data))
    refused("inspect", "b.onnx", "--json", "link", says=data)
    refused("verify", tiny, "b.onnx", "--json", "b.onnx.data", says=data)
    refused("verify", tiny, "b.onnx", "--json", "b.onnx", says="the input")
    refused("optimize", "b.onnx", "--json", "link", says=data)
    refused("optimize", tiny, "--sample", sample, "--json", sample, says="a sample")
    refused("optimize", tiny, "--sample", sample, "-o", sample, says="a sample")
    refused("verify", tiny, tiny, "--sample", sample, "--json", sample, says="a sample")
    for file in ("p.py", "hard.py", "helper_of_p.py"):
        refused("optimize", tiny, "--passes", "./p.py:x", "-o", file, says=code)
        refused("optimize", tiny, "--passes", "./p.py:x", "--json", file, says=code)
    os.rename(sample, "o.onnx.data")
    taken = ("--sample", "o.onnx.data", "-o", "o.onnx")
    refused("optimize", tiny, *taken, "--external-data", says="a sample")


def test_outputs_that_are_no_files(refused, tmp_path, tiny, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused("optimize", tiny, "-o", "new/", says="is a folder")
    refused("optimize", tiny, "--json", "new/", says="is a folder")
    refused("optimize", tiny, "-o", "-", says="-o -")
    refused("optimize", tiny, "-o", "model.ort", says="convert_onnx_models_to_ort")
    refused("optimize", tiny, "-o", "", says="is a folder")
    refused("optimize", "", says="is a folder")


def test_the_output_is_looked_at_before_the_work(refused, tmp_path):
    """The input does not even have to be a model."""
    (tmp_path / "junk.onnx").write_bytes(b"junk")
    output = tmp_path / "no" / "out.onnx"
    refused("optimize", tmp_path / "junk.onnx", "-o", output, says="does not exist")


# Passes, options, samples ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("passes", "reason"),
    [
        ("fodl", "did you mean 'fold'?"),
        ("simplfy", "did you mean 'simplify'?"),
        ("fold:max_byte=4", "did you mean 'max_bytes'?"),
        ("fold:max_bytes=much", "max_bytes=much"),
        ("fold:max_bytes", "max_bytes"),
        ("fold:4096", "write fold:max_bytes=4096"),
        ("simplify:4096", "its options: "),
        ("cse:4096", "cse has none"),
        ("FOLD", "did you mean 'fold'?"),
        ("fold,,cleanup", "empty item"),
        ("", "name a pass"),
        ("./gone.py:Rule", "gone.py"),
        ("./rules.py:Rul", "did you mean 'Rule'?"),
        ("./rules.py", "does not name an object"),
        ("./broken.py:Rule", "broken.py:2"),
        ("onnxruntime:level=extreme", "choose one of basic, extended, all"),
    ],
)
def test_passes(refused, tmp_path, tiny, monkeypatch, passes, reason):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rules.py").write_text("class Rule:\n    pass\n")
    (tmp_path / "broken.py").write_text("import os\nimport no_such_module\n")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    refused("optimize", tiny, "--passes", passes, says=reason)


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        (["--target", "gpu"], "'gpu'"),
        (["--validate", "maybe"], "'maybe'"),
        (["--seed", "x"], "--seed"),
        (["--seed", "-1"], "greater than or equal to 0"),
        (["--sample", "gone.npz"], "gone.npz"),
        (["--custom-ops", "gone.so"], "gone.so"),
        (["--pases", "fold"], "--pases"),
        (["a second model"], "a second model"),
    ],
)
def test_options(refused, tiny, tmp_path, monkeypatch, option, reason):
    monkeypatch.chdir(tmp_path)
    refused("optimize", tiny, *option, says=reason)


@pytest.mark.parametrize("command", ["optimize", "verify"])
def test_samples(refused, tmp_path, tiny, command):
    content: dict[str, Any]
    models = [tiny] if command == "optimize" else [tiny, tiny]
    path = tmp_path / "sample.npz"
    for content, reason in [
        ({"z": np.zeros((2, 4), np.float32)}, "x"),
        ({"x": np.zeros((2, 4), np.float64)}, "float64"),
        ({"x": np.zeros((2, 5), np.float32)}, "[2, 5]"),
        ({"x": np.zeros((2, 4), np.float32), "z": np.zeros(1)}, "'z'"),
        ({"x": np.array([object()])}, "sample.npz"),
    ]:
        np.savez(path, **content)
        refused(command, *models, "--sample", path, says=("sample.npz", reason))
    path.write_bytes(b"no archive")
    refused(command, *models, "--sample", path, says="sample.npz")


@pytest.mark.parametrize("command", ["optimize", "verify", "inspect"])
def test_a_custom_operator_library_that_is_none(refused, tmp_path, tiny, command):
    models = [tiny, tiny] if command == "verify" else [tiny]
    path = tmp_path / "lib.so"
    path.write_bytes(b"not a library")
    refused(command, *models, "--custom-ops", path, says="lib.so")


def test_a_library_without_custom_operators(refused, tiny):
    """It loads, being numpy's own, and still brings nothing."""
    library = sys.modules["numpy._core._multiarray_umath"].__file__
    refused("optimize", tiny, "--custom-ops", library, says="RegisterCustomOps")


def test_from_the_shell(tmp_path):
    """The same through a real process."""
    path = tmp_path / "model.onnx"
    path.write_bytes(b"junk")
    before = listing(tmp_path)
    command = [sys.executable, "-m", "toolkit.cli.main", "optimize", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert listing(tmp_path) == before
