"""What tracing bakes in is found by running, and named."""

from __future__ import annotations

import pytest

import toolkit
from toolkit.errors import NotProven, ToolkitError, UsageError

torch = pytest.importorskip("torch")
nn = torch.nn
pytestmark = pytest.mark.export


class Branch(nn.Module):
    def forward(self, x):
        if x.sum() > 0:
            return x * 2
        return x - 1


def test_a_branch_on_values_is_found_by_other_values():
    with pytest.raises(NotProven, match="differs for other values") as caught:
        toolkit.export(Branch(), torch.ones(1, 4))
    message = str(caught.value)
    assert "dynamo: the model's control flow depends on input values" in message
    assert "all negative" in message
    assert "test_baked_values.py, line" in message


def test_dynamo_alone_refuses_the_branch():
    with pytest.raises(UsageError, match=r"torch\.cond"):
        toolkit.export(Branch(), torch.ones(1, 4), exporter="dynamo")


class Scripted(nn.Module):
    def forward(self, x):
        return x * 2 if bool(x.sum() > 0) else x - 1


def test_a_scripted_branch_is_kept():
    model = torch.jit.script(Scripted())
    graph = toolkit.export(model, torch.ones(1, 4)).only
    assert graph.exporter == "torchscript"
    assert graph.proof.ok


class Cond(nn.Module):
    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x - 1, (x,))


def test_a_branch_that_is_said_with_torch_cond_is_kept():
    graph = toolkit.export(Cond(), torch.ones(1, 4)).only
    assert graph.exporter == "dynamo"
    assert graph.proof.ok


class Long(nn.Module):
    """Takes another way for long inputs: a guard for torch.export, nothing in the graph."""

    def forward(self, x):
        return x * 2 if x.shape[1] <= 12 else x * 3


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_a_branch_on_a_size_is_named_with_the_sizes(exporter):
    with pytest.raises(NotProven) as caught:
        toolkit.export(Long(), torch.ones(1, 8), dynamic="x:1=length", exporter=exporter)
    assert "dimension 'length': it differs from size 17 on, and is correct up to 8" in str(
        caught.value
    )


class Numbers(nn.Module):
    """Writes down its batch as a number when it is looked at by an exporter."""

    def forward(self, x):
        looked_at = torch.compiler.is_exporting() or torch.jit.is_tracing()
        return x.reshape(3 if looked_at else x.shape[0], -1) + 1


def test_a_size_that_was_baked_in_is_fixed_and_reported():
    graph = toolkit.export(Numbers(), torch.ones(3, 4)).only
    assert graph.dynamic == {}
    assert graph.notes == (
        "dimension 'batch' is fixed at the example's size: no exporter keeps it dynamic",
    )
    assert {f.exporter for f in graph.failures} == {"dynamo", "torchscript"}
    assert "dimension 'batch': it fails for any size but 3" in graph.failures[-1].reason


def test_a_baked_size_that_was_asked_for_is_not_written():
    with pytest.raises(NotProven, match="dimension 'rows'"):
        toolkit.export(Numbers(), torch.ones(3, 4), dynamic="x:0=rows", exporter="torchscript")


class Flattened(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 2)

    def forward(self, x):
        return self.linear(x.flatten())


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_an_axis_that_the_weights_fix(exporter):
    with pytest.raises(ToolkitError, match="dimension 'rows'"):
        toolkit.export(Flattened(), torch.ones(4, 4), dynamic="x:0=rows", exporter=exporter)
