"""Optional packages."""

from __future__ import annotations

import json

import pytest

from toolkit.errors import UsageError
from toolkit.extras import require


def test_an_installed_package_is_imported() -> None:
    assert require("json", "calibrate", "samples need json") is json


def test_a_missing_package_is_an_error_that_names_the_extra() -> None:
    wanted = "^samples need it: pip install 'onnx-toolkit-passes\\[calibrate\\]'$"
    with pytest.raises(UsageError, match=wanted):
        require("no_such_package.inner", "calibrate", "samples need it")
