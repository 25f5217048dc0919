"""The registry of targets and the capabilities of each."""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import EntryPoint

import pytest

from toolkit import targets
from toolkit.errors import UsageError
from toolkit.targets import CONTRIB, DEFAULT_TARGET, find_target, target_names
from toolkit.targets.releases import find_release

TOASTER = replace(find_target("ort-cpu"), name="toaster")


def test_every_target_is_found_by_its_name() -> None:
    assert target_names() == [DEFAULT_TARGET, "onnx"]
    assert [find_target(name).name for name in target_names()] == target_names()


def test_an_unknown_target_names_the_known_ones() -> None:
    with pytest.raises(UsageError, match="unknown target 'abacus': choose one of ort-cpu, onnx"):
        find_target("abacus")


def test_contrib_operators_run_on_onnxruntime_alone() -> None:
    assert find_target("ort-cpu").runs(CONTRIB)
    assert not find_target("onnx").runs(CONTRIB)
    assert find_target("onnx").standard_only


@pytest.mark.parametrize("name", target_names())
def test_a_kernel_is_lost_where_the_next_opset_has_none(name: str) -> None:
    target = find_target(name)
    assert target.loses_kernel("RoiAlign", 22)
    assert not target.loses_kernel("RoiAlign", 21)
    assert not target.loses_kernel("Relu", 14)


def test_a_kernel_is_needed_in_the_oldest_release_and_in_the_installed_one() -> None:
    target = replace(find_target("ort-cpu"), release=find_release("1.18"))
    assert (target.max_opset, target.max_ir) == (21, 10)
    assert not target.has_kernel("Attention", 23)
    assert target.has_kernel("MultiHeadAttention", 1, CONTRIB, ["float32"])
    assert find_target("ort-cpu").has_kernel("Attention", 23)
    assert not target.has_kernel("Round", 23, inputs=["bfloat16"])
    assert not find_target("onnx").has_kernel("Gelu", 1, CONTRIB)


def _offer(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    entry = EntryPoint("toaster", value, targets.GROUP)
    monkeypatch.setattr(targets, "entry_points", lambda group: [entry])
    targets._targets.cache_clear()


@pytest.fixture
def clean() -> Iterator[None]:
    yield
    targets._targets.cache_clear()


@pytest.mark.usefixtures("clean")
def test_other_distributions_offer_targets_by_entry_points(monkeypatch) -> None:
    _offer(monkeypatch, f"{__name__}:TOASTER")
    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__, types.ModuleType("t")))
    monkeypatch.setattr(sys.modules[__name__], "TOASTER", TOASTER, raising=False)
    assert find_target("toaster") is TOASTER


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("value", ["json:loads", "no.such.module:X", "json:nothing"])
def test_a_target_that_cannot_be_loaded_is_named_in_one_line(monkeypatch, value) -> None:
    _offer(monkeypatch, value)
    with pytest.raises(UsageError, match="target 'toaster'"):
        target_names()


def test_targets_are_listed_without_importing_onnx() -> None:
    code = "import sys, toolkit.targets as t; t.target_names(); print('onnx' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "False"
