"""Files to write: whether one can be put there, and put there whole or not at all."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from toolkit.errors import SaveError

_PIECE = 1 << 20
"""Bytes to write at once: of a mapped file the kernel first brings in all that one write covers,
and what fits the processor's cache is still there when it is copied. Measured with the file in
memory: half the time of a whole tensor at once, and no slower than `sendfile`."""


def cache_folder() -> Path:
    """Where programs keep what they could compute again, for this user."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    if given and Path(given).is_absolute():
        return Path(given)
    if sys.platform == "win32":
        local = cast("str | None", os.environ.get("LOCALAPPDATA"))
        return Path(local) if local else Path.home() / "AppData" / "Local"
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")


def sidecar_of(path: Path) -> Path:
    """The file beside a model that holds its weights: `model.onnx.data`."""
    return path.with_name(path.name + ".data")


def is_special(path: Path) -> bool:
    """Something to write into, as /dev/stdout or a pipe, rather than a file to replace."""
    if not path.exists() or path.is_dir():
        return False
    # /dev/stdout and its like look like a regular file when they are redirected to one
    folder = os.path.realpath(path.parent)
    return not path.is_file() or folder == "/dev" or folder.startswith("/proc/")


def same_file(one: Path, other: Path) -> bool:
    """Whether two paths name one file, also through links and before one of them exists."""
    try:
        return one.samefile(other)
    except OSError:
        return os.path.realpath(one) == os.path.realpath(other)


def require_writable(path: Path) -> None:
    """Raise unless a file can be put there; finds out by making a nameless one in the folder."""
    try:
        if path.is_dir():
            raise SaveError(f"cannot write '{path}': it is a folder; name a file")
        if is_special(path):
            raise SaveError(f"cannot write '{path}': it is not a regular file; name another one")
        if not path.parent.is_dir():
            raise SaveError(f"cannot write '{path}': the folder '{path.parent}' does not exist")
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise SaveError(f"cannot write '{path}': {error.strerror}") from error


def write_files(files: Mapping[Path, Iterable[bytes | memoryview]]) -> None:
    """Write all files, in order; each appears under its name only when all are complete."""
    with _staged(files):
        pass


@contextmanager
def staged_text(path: Path, text: str) -> Generator[None]:
    """Write a file under a temporary name; it gets its own name if the body succeeds.

    Into a pipe and the like it is written at once, before the body runs.
    """
    if is_special(path):
        with _explained(path):
            path.write_text(text, encoding="utf-8")
        yield
        return
    with _staged({path: [text.encode()]}):
        yield


@contextmanager
def _staged(files: Mapping[Path, Iterable[bytes | memoryview]]) -> Generator[None]:
    first = next(iter(files))
    temporary = {path: path.with_name(f".{path.name}.{os.getpid()}.tmp") for path in files}
    replaces = any(path.exists() for path in files)
    try:
        with _explained(first):
            for path, chunks in files.items():
                with temporary[path].open("xb") as file:
                    file.writelines(_pieces(chunks))
                    file.flush()
                    if replaces:
                        # An old file must not be given up before all of the new ones are on the
                        # disk. New names have nothing to lose by not waiting: what a power failure
                        # takes can be made again, since the input is never touched.
                        os.fsync(file.fileno())
        yield
        with _explained(first):
            for path, scratch in temporary.items():
                scratch.replace(path)
    finally:
        for scratch in temporary.values():
            scratch.unlink(missing_ok=True)


def _pieces(chunks: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """The same bytes, nothing longer than a piece; slices of a view copy nothing."""
    for chunk in chunks:
        if len(chunk) <= _PIECE:
            yield chunk
            continue
        whole = memoryview(chunk)
        yield from (whole[at : at + _PIECE] for at in range(0, len(whole), _PIECE))


@contextmanager
def _explained(path: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise SaveError(f"cannot write '{path}': {error.strerror}") from error
