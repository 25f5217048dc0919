"""Where a command writes: looked at before the work starts, so that none of it is for nothing."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from toolkit.errors import SaveError, UsageError
from toolkit.storage.atomic_write import (
    is_special,
    require_writable,
    same_file,
    sidecar_of,
    staged_text,
)


@dataclass(frozen=True, slots=True)
class OutputFile:
    """A file that a command writes; `label` is what its errors call it."""

    label: str
    path: Path

    def __str__(self) -> str:
        return f"{self.label} '{self.path}'"


def output_file(given: str | None, model: Path) -> Path:
    """What `-o` names; by default `model.opt.onnx` beside `model.onnx`."""
    if given is None:
        return model.parent / f"{model.name.removesuffix('.onnx')}.opt.onnx"
    if given == "-":
        raise UsageError("-o - is not possible: a model is written to a file")
    return _file(given)


def _file(given: str) -> Path:
    """The path, unless it is spelled as a folder: `Path` would drop the slash at its end."""
    if given.endswith(("/", os.sep)):
        raise SaveError(f"cannot write '{given}': it is a folder; name a file")
    return Path(given)


@dataclass(frozen=True, slots=True)
class JsonReport:
    """Where `--json` goes: a file, standard output (`-`), or nowhere."""

    destination: str | None

    @property
    def on_stdout(self) -> bool:
        return self.destination == "-"

    @property
    def files(self) -> list[OutputFile]:
        if self.destination is None or self.on_stdout:
            return []
        return [OutputFile("--json", _file(self.destination))]

    def require(self, output: Path | None = None) -> None:
        """Raise unless it can be written, apart from the model that is written to `output`."""
        for file in self.files:
            others = [] if output is None else [output, sidecar_of(output)]
            if any(same_file(file.path, other) for other in others):
                raise UsageError(f"{file} is where the model goes: name another file")
            if not is_special(file.path):
                require_writable(file.path)

    @contextmanager
    def staged(self, data: dict[str, Any]) -> Generator[None]:
        """Write the report, and let it appear if the body succeeds; printed ones come first."""
        if self.destination is None:
            yield
            return
        content = json.dumps(data, indent=2, allow_nan=False)
        if self.on_stdout:
            _print_now(content)
        staging = [staged_text(file.path, f"{content}\n") for file in self.files]
        with staging[0] if staging else nullcontext():
            yield

    def write(self, data: dict[str, Any]) -> None:
        with self.staged(data):
            pass


@dataclass(frozen=True, slots=True)
class SideFile:
    """A text that a command writes beside the model: to a file, or nowhere."""

    label: str
    path: Path | None

    @classmethod
    def of(cls, label: str, given: str | None) -> SideFile:
        """Raises unless it can be written."""
        if given is None:
            return cls(label, None)
        path = _file(given)
        require_writable(path)
        return cls(label, path)

    @property
    def files(self) -> list[OutputFile]:
        return [] if self.path is None else [OutputFile(self.label, self.path)]

    def require_apart(self, others: Sequence[OutputFile]) -> None:
        """Raise when it is one of the files that the command writes besides."""
        for file in self.files:
            for other in others:
                if same_file(file.path, other.path):
                    raise UsageError(f"{file} is {other.label} too: name another file")

    @contextmanager
    def staged(self, content: Callable[[], str | None]) -> Generator[None]:
        """Write what is asked for only now, and let it appear if the body succeeds."""
        text = content() if self.path is not None else None
        if self.path is None or text is None:
            yield
            return
        with staged_text(self.path, text):
            yield


def joined(plans: Sequence[str]) -> str | None:
    """One plan of several: their lists, one behind the other; None of none."""
    if len(plans) < 2:
        return plans[0] if plans else None
    whole: dict[str, Any] = {}
    for plan in plans:
        for key, value in json.loads(plan).items():
            together = isinstance(value, list) and key in whole
            whole[key] = whole[key] + value if together else value
    return json.dumps(whole, indent=1) + "\n"


def _print_now(content: str) -> None:
    try:
        typer.echo(content)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise SaveError(f"cannot write to standard output: {error.strerror}") from error
