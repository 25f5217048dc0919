"""What exporters would bake in or get wrong, put so that they follow; and where nodes come from."""

from __future__ import annotations

import pytest

import toolkit
from toolkit.errors import NotProven
from toolkit.frontends.operator_map import map_operators
from toolkit.frontends.pytorch.errors import user_line
from toolkit.frontends.pytorch.tracing import traceable

torch = pytest.importorskip("torch")
nn = torch.nn
pytestmark = pytest.mark.export


class Repeated(nn.Module):
    def forward(self, x):
        return torch.repeat_interleave(x, repeats=x.shape[1] % 4 + 2, dim=-1)


class Permuted(nn.Module):
    def forward(self, x):
        return x.unsqueeze(-1).permute(0, -1, 1), torch.permute(x, (-1, 0))


class Windows(nn.Module):
    """Neighbours side by side, as windows over memory."""

    def forward(self, x):
        return x.as_strided((x.shape[0], x.shape[1] - 1, 2), (x.stride(0), 1, 1))


class WindowsOfTransposed(nn.Module):
    def forward(self, x):
        y = (2 * x).transpose(0, 1)
        size = (x.shape[1] - 1, 2, x.shape[0])
        return y.as_strided(size, (y.stride(0), y.stride(0), y.stride(1)))


@pytest.mark.parametrize(
    ("module", "exporter"),
    [
        (Repeated, "dynamo"),
        (Repeated, "torchscript"),
        (Permuted, "torchscript"),
        (Windows, "torchscript"),
        (WindowsOfTransposed, "torchscript"),
    ],
)
def test_sizes_follow(module, exporter):
    axes = "x:0=rows,1=columns"
    exported = toolkit.export(module(), torch.randn(2, 7), exporter=exporter, dynamic=axes)
    assert exported.only.proof.error == 0
    assert exported.only.proof.sizes["columns"] == [1, 3, 7, 15]


class WindowsWithGaps(nn.Module):
    """Over a slice, which is not all of the memory that it lies in."""

    def forward(self, x):
        y = (2 * x)[:, 1:-1]
        return y.as_strided((x.shape[0], 3), (y.stride(0), 1))


def test_memory_with_gaps_is_not_taken_for_one_without():
    with pytest.raises(NotProven):
        toolkit.export(WindowsWithGaps(), torch.randn(2, 7), exporter="torchscript")


def test_torch_is_left_as_it_was():
    before = [torch.repeat_interleave, torch.Tensor.stride, nn.functional.relu]
    x = torch.arange(6.0).reshape(2, 3)
    with traceable():
        assert torch.Tensor.stride is not before[1]
        assert x.stride() == (3, 1)
        assert x.T.stride() == (1, 3)
        assert x[:, :2].stride(0) == 3
        assert torch.repeat_interleave(x, 2, dim=0).shape == (4, 3)
        assert torch.repeat_interleave(torch.tensor([1, 2])).tolist() == [0, 1, 1]
        assert x.repeat_interleave(torch.tensor([1, 2]), dim=0).shape == (3, 3)
        assert x.T.as_strided((3,), (1,), 2).tolist() == [2, 3, 4]
    assert before == [torch.repeat_interleave, torch.Tensor.stride, nn.functional.relu]
    assert "stride" not in vars(torch.Tensor)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.SiLU())

    def forward(self, x):
        return self.layers(x) + x


def test_a_trace_tells_operators_modules_and_lines():
    exported = toolkit.export(Block(), torch.randn(2, 4), exporter="torchscript")
    found = {(row.module, row.operator): row for row in map_operators(exported.model).rows}
    silu = found["layers.1", "aten.silu"]
    assert (silu.kind, silu.calls, silu.how) == ("SiLU", 1, "decomposed")
    assert silu.nodes == {"Sigmoid": 1, "Mul": 1}
    assert found["layers.0", "aten.linear"].kind == "Linear"
    assert found["", "aten.add"].source.startswith("test_tracing.py:")
    attributes = [each.name for node in exported.model.graph.nodes for each in node.attribute]
    assert not any(name.startswith("toolkit") for name in attributes)


def test_the_line_of_a_traced_stack():
    stack = f"{torch.nn.__file__}(9): forward\n/home/my models/net.py(7): forward\n"
    assert user_line(stack) == "net.py:7"
    assert user_line("") == ""
