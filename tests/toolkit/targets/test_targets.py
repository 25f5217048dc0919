"""The registry of targets and the capabilities of each."""

from __future__ import annotations

import subprocess
import sys

import pytest
from onnx import defs

from toolkit.errors import UsageError
from toolkit.targets import CONTRIB, DEFAULT_TARGET, find_target, target_names


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
def test_lost_kernels_are_standard_operators_within_the_opset_ceiling(name: str) -> None:
    target = find_target(name)
    for opset, ops in target.lost_kernels.items():
        assert opset <= target.max_opset
        assert all(defs.has(op) for op in ops)


def test_targets_are_listed_without_importing_onnx() -> None:
    code = "import sys, toolkit.targets as t; t.target_names(); print('onnx' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "False"
