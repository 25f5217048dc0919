"""Example inputs on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from toolkit.errors import UsageError
from toolkit.frontends.examples import read_examples


@pytest.mark.parametrize(
    ("text", "dtype", "shape"),
    [
        ("float32[1,3,4]", "float32", (1, 3, 4)),
        (" float16[ 2, 3 ] ", "float16", (2, 3)),
        ("int64[5]", "int64", (5,)),
        ("uint8[0]", "uint8", (0,)),
        ("bool[7]", "bool", (7,)),
        ("float64[]", "float64", ()),
    ],
)
def test_one_positional_argument(text: str, dtype: str, shape: tuple[int, ...]) -> None:
    (array,) = read_examples([text])
    assert (array.dtype, array.shape) == (np.dtype(dtype), shape)


def test_integers_are_ids_of_any_vocabulary() -> None:
    (array,) = read_examples(["int64[1000]"])
    assert set(array.tolist()) == set(range(10))


def test_arguments_by_position_and_by_name() -> None:
    first, second = read_examples(["float32[2]", "int32[3]"])
    assert (first.shape, second.shape) == ((2,), (3,))
    named: Any = read_examples(["ids=int64[2]", "mask=bool[2]"])
    assert list(named) == ["ids", "mask"]
    assert read_examples([]) is None


def test_values_are_the_same_for_one_seed() -> None:
    (one,), (same,), (other,) = (read_examples(["float32[9]"], seed) for seed in (0, 0, 1))
    assert one.tolist() == same.tolist() != other.tolist()


def test_arrays_of_a_file_by_name_or_by_position(tmp_path: Path) -> None:
    ids, mask = np.arange(3), np.ones(2, bool)
    np.savez(tmp_path / "named.npz", ids=ids, mask=mask)
    np.savez(tmp_path / "placed.npz", ids, mask)
    np.save(tmp_path / "one.npy", ids)
    named: Any = read_examples([str(tmp_path / "named.npz"), "more=int64[4]"])
    assert list(named) == ["ids", "mask", "more"]
    first, second = read_examples([str(tmp_path / "placed.npz")])
    assert (first.tolist(), second.tolist()) == ([0, 1, 2], [True, True])
    (sole,) = read_examples([str(tmp_path / "one.npy")])
    assert sole.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["float32[2]", "ids=int64[2]"], "all arguments by name, or all by position"),
        (["float31[2]"], "unknown type 'float31'"),
        (["complex64[2]"], "cannot draw complex64 values"),
        (["float32[-1]"], "float32[-1]"),
        (["gone.npz"], "gone.npz"),
    ],
)
def test_examples_that_cannot_be_read(
    tmp_path: Path, monkeypatch: Any, texts: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as caught:
        read_examples(texts)
    assert message in str(caught.value)
    assert str(caught.value).startswith("--example")


def test_files_without_plain_arrays(tmp_path: Path) -> None:
    (tmp_path / "text.npz").write_text("no archive")
    np.savez(tmp_path / "objects.npz", x=np.array([{}], dtype=object))
    for name in ("text.npz", "objects.npz"):
        with pytest.raises(UsageError, match=r"is not an \.npz file of plain arrays"):
            read_examples([str(tmp_path / name)])
