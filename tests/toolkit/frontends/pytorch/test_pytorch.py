"""PyTorch modules: examples, names, opsets, dynamic axes, modes."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import NamedTuple

import numpy as np
import onnx
import pytest

import toolkit
from toolkit.errors import UsageError

torch = pytest.importorskip("torch")
nn = torch.nn
pytestmark = pytest.mark.export


class TargetMLP(nn.Module):
    """As the export guides write it."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, x):
        return self.net(x)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def small():
    return nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 5))


def run(exported, **feed):
    from toolkit.runtime.session import Session

    return Session(exported.model).run(feed)


# The guides' examples ----------------------------------------------------------------------------


def test_the_mlp_of_the_guide_is_not_locked_to_its_batch(tmp_path):
    model = TargetMLP().eval()
    exported = toolkit.export(
        model, torch.randn(1, 784), opset=12, input_names=["input"], output_names=["output"]
    )
    assert exported.model.opsets == {"": 12}
    x = np.random.default_rng(0).standard_normal((32, 784)).astype(np.float32)
    (y,) = run(exported, input=x)
    with torch.no_grad():
        np.testing.assert_allclose(y, model(torch.from_numpy(x)).numpy(), rtol=1e-4, atol=1e-5)
    assert exported.model.graph.shape("output")[1] == 10
    assert str(exported.model.graph.shape("output")[0]) == "batch"
    assert exported.only.proof.sizes == {"batch": [1, 2, 5]}


@pytest.mark.parametrize("opset", [11, 13, 17, 18, 21, 24])
def test_the_opset_is_the_one_asked_for(opset):
    exported = toolkit.export(small(), torch.randn(1, 10), opset=opset)
    assert exported.model.opsets == {"": opset}
    assert exported.only.dynamic == {"input": {0: "batch"}}


def test_an_opset_that_has_not_what_the_model_needs():
    model = nn.Sequential(nn.Linear(10, 20), nn.GELU())
    with pytest.raises(UsageError, match="opset 7 may be too old for it, try 18") as caught:
        toolkit.export(model, torch.randn(1, 10), opset=7, exporter="torchscript")
    assert "Erf" in str(caught.value)


def test_a_trace_is_lifted_to_an_opset_that_its_exporter_does_not_know():
    exported = toolkit.export(small(), torch.randn(1, 10), opset=23, exporter="torchscript")
    assert exported.model.opsets == {"": 23}


def test_a_model_of_half_precision():
    exported = toolkit.export(small().half(), torch.randn(1, 10).half())
    assert exported.only.proof.ok


def test_no_folder_of_this_machine_is_in_the_file():
    content = toolkit.export(TargetMLP(), torch.randn(1, 784)).to_bytes()
    assert b"test_pytorch.py" in content
    assert os.path.dirname(__file__).encode() not in content


def test_dynamo_is_first_and_torchscript_says_why_it_took_over():
    usual = toolkit.export(small(), torch.randn(1, 10)).only
    assert (usual.exporter, usual.failures) == ("dynamo", ())
    lowered = toolkit.export(small(), torch.randn(1, 10), opset=13).only
    assert (lowered.exporter, lowered.model.opsets[""]) == ("dynamo", 13)
    old = toolkit.export(small(), torch.randn(1, 10), opset=8).only
    assert old.exporter == "torchscript"
    assert [f.exporter for f in old.failures] == ["dynamo"]
    assert "opset" in old.failures[0].reason


def test_an_image_with_dynamic_axes_as_the_guide_names_them():
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
    axes = {"input": {0: "batch_size"}}
    exported = toolkit.export(
        model, torch.randn(1, 3, 16, 16), opset=11, input_names=["input"], dynamic=axes
    )
    assert [str(d) for d in exported.model.graph.shape("input")] == ["batch_size", "3", "16", "16"]


# Examples and names ------------------------------------------------------------------------------


class Many(nn.Module):
    """Arguments by name, nested ones, a constant; outputs in a dict."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(10, 20)

    def forward(self, x, y=None, *, flag=True, extra):
        h = torch.relu(self.a(x))
        if y is not None:
            h = h + y
        if not flag:
            h = h - 1
        return {"out": h, "other": (extra["k"][0] * 2, h.double().sum(1))}


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_nested_arguments_and_outputs(exporter):
    example = {
        "x": torch.randn(2, 10),
        "y": torch.randn(2, 20),
        "flag": False,
        "extra": {"k": [torch.randn(3, 4)]},
    }
    graph = toolkit.export(Many(), example, exporter=exporter).only
    assert list(graph.model.graph.feeds) == ["x", "y", "extra_k_0"]
    assert list(graph.model.graph.outputs) == ["out", "other_0", "other_1"]
    assert graph.dynamic == {"x": {0: "batch"}, "y": {0: "batch"}}


class Pair(NamedTuple):
    left: object
    right: object


class Positional(nn.Module):
    def forward(self, *tensors):
        return Pair(tensors[0] + tensors[1], tensors[0] - tensors[1])


def test_any_number_of_arguments_and_a_named_tuple():
    exported = toolkit.export(Positional(), (torch.randn(2, 3), torch.randn(2, 3)))
    assert list(exported.model.graph.feeds) == ["tensors_0", "tensors_1"]
    assert list(exported.model.graph.outputs) == ["left", "right"]


class Keywords(nn.Module):
    def forward(self, x, **others):
        return x * others["scale"]


def test_open_keywords():
    example = {"x": torch.randn(2, 3), "scale": torch.randn(2, 3)}
    exported = toolkit.export(Keywords(), example)
    assert exported.only.dynamic == {
        "x": {0: "batch"},
        "others_scale": {0: "batch"},
    }


def test_arrays_will_do_as_an_example():
    exported = toolkit.export(small(), np.zeros((1, 10), np.float32))
    assert exported.only.proof.ok


class Types(nn.Module):
    def forward(self, ids, half, flags):
        return ids.float() + 1, half * 2, flags.logical_not()


def test_types_stay_what_they_are():
    example = (torch.randint(0, 9, (2, 3)), torch.randn(2, 3).double(), torch.ones(2, 3) > 0)
    graph = toolkit.export(Types(), example).only.model.graph
    names = [*graph.feeds, *graph.outputs]
    kinds = [onnx_name(graph.dtype(name)) for name in names]
    assert kinds == ["int64", "float64", "bool", "float32", "float64", "bool"]


def onnx_name(kind):
    from toolkit.ir.tensor_type import dtype_name

    return dtype_name(kind)


@pytest.mark.parametrize(
    ("example", "message"),
    [
        (None, "needs an example"),
        ((torch.randn(1, 11),), "does not run on the example: RuntimeError: mat1 and mat2"),
        ((torch.randn(1, 10), 3), r"does not fit forward\(input\): too many positional"),
        ({"input": torch.randn(1, 10), "y": 1}, r"does not fit forward\(input\)"),
        ({"y": torch.randn(1, 10)}, r"does not fit forward\(input\): it names y; as one arg"),
        ((3,), "contains no tensor"),
    ],
)
def test_examples_that_do_not_fit(example, message):
    with pytest.raises(UsageError, match=message):
        toolkit.export(small(), example)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dynamic": "x:0=batch"}, "dynamic axes of 'x': no such input; inputs: input"),
        ({"dynamic": "input:2=batch"}, "it has 2 axes"),
        ({"input_names": ["a", "b"]}, "2 input names are given, but there are 1"),
        ({"output_names": ["a", "b"]}, "2 output names are given, but there are 1"),
    ],
)
def test_names_that_do_not_fit(options, message):
    with pytest.raises(UsageError, match=message):
        toolkit.export(small(), torch.randn(1, 10), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "pooling"}, "--task selects the task of a transformers checkpoint"),
        ({"framework": "export_onnx", "exporter": "dynamo"}, "no front end accepts"),
    ],
)
def test_what_the_front_end_would_pass_over(options, message):
    with pytest.raises(UsageError, match=message):
        toolkit.export(small(), torch.randn(1, 10), **options)


# Dynamic axes ------------------------------------------------------------------------------------


class Tokens(nn.Module):
    """Ids and a mask, as text models take them."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, ids, mask):
        states = self.encoder(self.table(ids), src_key_padding_mask=mask == 0)
        weights = mask.unsqueeze(-1).float()
        return (states * weights).sum(1) / weights.sum(1).clamp(min=1)


def test_batch_and_sequence_are_found():
    ids = torch.randint(0, 50, (2, 7))
    mask = torch.ones(2, 7, dtype=torch.int64)
    graph = toolkit.export(Tokens(), (ids, mask)).only
    both = {0: "batch", 1: "sequence"}
    assert graph.dynamic == {"ids": both, "mask": both}
    assert graph.proof.sizes == {"batch": [1, 2, 5], "sequence": [1, 3, 7, 15]}


class OneAtATime(nn.Module):
    def forward(self, x):
        if x.shape[0] != 1:
            raise ValueError("one at a time")
        return x * 2


def test_an_axis_that_the_model_itself_fixes():
    exported = toolkit.export(OneAtATime(), torch.randn(1, 4))
    assert exported.only.dynamic == {}
    assert exported.notes == ("axis 0 is fixed, the model supports no other size: 'x' at 1",)


class Table(nn.Module):
    """The second input is no batch, though it has as many rows."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Parameter(torch.randn(3, 4))

    def forward(self, x, weights):
        return x @ (self.rows + weights).T


def test_an_input_whose_rows_only_look_like_a_batch():
    exported = toolkit.export(Table(), (torch.randn(3, 4), torch.randn(3, 4)))
    assert exported.only.dynamic == {"x": {0: "batch"}}
    assert "'weights' at 3" in exported.notes[0]


def test_axes_by_name():
    lstm = nn.LSTM(4, 6, batch_first=True)
    graph = toolkit.export(lstm, torch.randn(2, 5, 4), dynamic=["input:0=batch,1=time"]).only
    assert graph.dynamic == {"input": {0: "batch", 1: "time"}}
    assert graph.proof.sizes["time"] == [1, 2, 5, 11]


def test_no_axes_on_request():
    exported = toolkit.export(small(), torch.randn(3, 10), dynamic={})
    assert exported.only.dynamic == {}
    assert exported.model.graph.shape("input") == (3, 10)


# Modes -------------------------------------------------------------------------------------------


def test_eval_mode_is_enforced_and_the_users_mode_restored():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    model[3].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    exported = toolkit.export(model, torch.randn(3, 4))
    assert [part.training for part in model] == [True, True, True, False]
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    (note,) = exported.notes
    assert "1 (BatchNorm1d), 2 (Dropout)" in note


def test_nothing_to_say_of_a_module_without_training_state():
    assert toolkit.export(small().train(), torch.randn(1, 10)).notes == ()


def test_the_optimizer_goes_on_from_there():
    exported = toolkit.export(
        TargetMLP(), torch.randn(1, 784), passes="fuse,quantize-dynamic", opset=18
    )
    ops = exported.only.optimized.after.ops
    assert ops["MatMulInteger"] == 1
    assert exported.model.opsets[""] == 18


class Unused(nn.Module):
    def forward(self, x, y):
        return x * 2


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_an_input_that_nobody_reads(exporter):
    graph = toolkit.export(Unused(), (torch.randn(2, 3), torch.randn(2, 3)), exporter=exporter).only
    assert set(graph.dynamic) == set(graph.model.graph.feeds)


def test_attention_in_operators_that_have_a_translation():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    fastpath = torch.backends.mha.get_fastpath_enabled()
    graph = toolkit.export(layer, torch.randn(2, 3, 8), exporter="torchscript").only
    assert graph.proof.ok
    assert torch.backends.mha.get_fastpath_enabled() == fastpath


# Memory ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model",
    [
        nn.LSTM(4, 6, batch_first=True),
        nn.Sequential(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), nn.GELU()),
        Tokens(),
        Many(),
    ],
    ids=["lstm", "conv", "tokens", "nested"],
)
def test_weights_that_stay_outside_a_trace(monkeypatch, model):
    from toolkit.frontends.pytorch import external_weights

    monkeypatch.setattr(external_weights, "LARGE", 0)
    ids = torch.randint(0, 9, (2, 5))
    example = {
        nn.LSTM: torch.randn(2, 5, 4),
        nn.Sequential: torch.randn(2, 3, 8),
        Tokens: (ids, torch.ones_like(ids)),
        Many: {"x": torch.randn(2, 10), "extra": {"k": [torch.randn(3, 4)]}},
    }[type(model)]
    exported = toolkit.export(model, example, exporter="torchscript")
    assert exported.only.proof.ok
    assert len(list(exported.model.weights.folder.glob("*.onnx.data"))) == 1
    assert onnx.load_from_string(exported.to_bytes()).graph.initializer


MEMORY = """
import threading, time
import torch, toolkit

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

exporter = {exporter!r}
toolkit.export(torch.nn.Linear(4, 4), torch.randn(1, 4), exporter=exporter)
model = torch.nn.Sequential(*(torch.nn.Linear(3000, 3000) for _ in range(9)))
weights = sum(p.nbytes for p in model.parameters())
before = peak = anonymous()
running = True

def watch():
    global peak
    while running:
        peak = max(peak, anonymous())
        time.sleep(0.005)

watcher = threading.Thread(target=watch)
watcher.start()
exported = toolkit.export(model, torch.randn(1, 3000), exporter=exporter)
exported.save({path!r})
running = False
watcher.join()
print((peak - before) / weights)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_no_second_copy_of_the_weights(tmp_path, exporter):
    script = MEMORY.format(exporter=exporter, path=str(tmp_path / "large.onnx"))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) < 0.3
