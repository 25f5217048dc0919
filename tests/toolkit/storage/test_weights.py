"""Tensors as arrays, and back."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from toolkit.storage.weights import Weights


def test_bytes_of_strings_survive() -> None:
    """They need not be UTF-8, and numpy's own text would lose zeros at the end."""
    stored = [b"\xff\xfe", "\u00e9".encode(), b"zero\0", b""]
    tensor = TensorProto(name="s", data_type=TensorProto.STRING, dims=[2, 2], string_data=stored)
    array = Weights().array(tensor)
    assert array.shape == (2, 2)
    assert array[0, 1] == "\u00e9"
    assert Weights().put("s", array) == tensor


def test_text_of_any_kind_can_be_stored() -> None:
    for array in (np.array(["a", "bc"]), np.array([b"a", b"bc"])):
        assert list(Weights().put("s", array).string_data) == [b"a", b"bc"]
