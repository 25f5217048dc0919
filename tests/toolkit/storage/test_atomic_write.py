"""Files appear whole or not at all, and nothing else is left behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from toolkit.errors import SaveError
from toolkit.storage.atomic_write import (
    cache_folder,
    is_special,
    require_writable,
    same_file,
    sidecar_of,
    staged_text,
    write_files,
)


def test_all_files_are_replaced_together(tmp_path: Path) -> None:
    one, other = tmp_path / "m.onnx", sidecar_of(tmp_path / "m.onnx")
    one.write_bytes(b"old")
    write_files({other: [b"w" * 3_000_000, memoryview(b"!")], one: [b"new"]})
    assert one.read_bytes() == b"new"
    assert other.read_bytes() == b"w" * 3_000_000 + b"!"
    assert sorted(os.listdir(tmp_path)) == ["m.onnx", "m.onnx.data"]


def test_a_failure_midway_keeps_the_old_files(tmp_path: Path) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"half"
        raise RuntimeError("no more")

    one, other = tmp_path / "one", tmp_path / "other"
    one.write_bytes(b"old")
    with pytest.raises(RuntimeError, match="no more"):
        write_files({one: [b"new"], other: chunks()})
    assert one.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["one"]


def test_staged_text_is_renamed_only_when_the_block_succeeds(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    with pytest.raises(KeyError), staged_text(path, "{}"):
        raise KeyError
    assert os.listdir(tmp_path) == []
    with staged_text(path, "{}"):
        assert not path.exists()
    assert path.read_text() == "{}"


def test_paths_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    for path, reason in (
        (tmp_path, "it is a folder"),
        (tmp_path / "no" / "m.onnx", "does not exist"),
        (Path(os.devnull), "not a regular file"),
    ):
        with pytest.raises(SaveError, match=reason):
            require_writable(path)
    require_writable(tmp_path / "m.onnx")
    assert os.listdir(tmp_path) == []
    assert is_special(Path(os.devnull))
    assert not is_special(tmp_path)


def test_one_file_by_several_names(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    assert same_file(path, tmp_path / "." / "m.onnx")
    path.write_bytes(b"")
    (tmp_path / "link").symlink_to(path)
    assert same_file(path, tmp_path / "link")
    assert not same_file(path, tmp_path / "other")


def test_the_cache_folder_is_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder().is_absolute()
