"""The files that a command writes, all checked before the work starts."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from toolkit.errors import SaveError, UsageError
from toolkit.storage.atomic_write import (
    is_special,
    require_writable,
    same_file,
    sidecar_of,
    staged_text,
)

if TYPE_CHECKING:
    from toolkit.ir.model import Model
    from toolkit.pass_manager.result import Result

_MAY_NEED_A_SIDECAR = 1 << 30
"""Above this size in bytes, a model may outgrow a single file (2 GiB) and need a data file."""


@dataclass(frozen=True, slots=True)
class OutputFile:
    """A file that a command writes, with its name in error messages."""

    label: str
    path: Path

    def __str__(self) -> str:
        return f"{self.label} '{self.path}'"


def model_path(given: str | None, model: Path) -> Path:
    """Return the path that -o names; by default `model.opt.onnx` beside `model.onnx`."""
    if given is None:
        return model.parent / f"{model.name.removesuffix('.onnx')}.opt.onnx"
    if given == "-":
        raise UsageError("-o - is not possible: a model is written to a file")
    if given.endswith(".ort"):
        raise UsageError(
            f"'{given}' cannot be written: write an .onnx file, and convert it by "
            "`python -m onnxruntime.tools.convert_onnx_models_to_ort`"
        )
    return _file_path(given)


def model_files(path: Path, sidecar: bool) -> list[OutputFile]:
    """Return the file of a model, and the data file beside it."""
    data = [OutputFile("the output's data file", sidecar_of(path))] if sidecar else []
    return [OutputFile("the output", path), *data]


def _file_path(given: str) -> Path:
    if given.endswith(("/", os.sep)):  # `Path` would drop the slash
        raise SaveError(f"cannot write '{given}': it is a folder; name a file")
    return Path(given)


@dataclass(frozen=True, slots=True)
class SideFile:
    """An optional text file that a command writes besides the model."""

    label: str
    given: str | None

    @property
    def files(self) -> list[OutputFile]:
        return [] if self.given is None else [OutputFile(self.label, _file_path(self.given))]

    def require(self, others: Sequence[OutputFile] = ()) -> None:
        """Raise unless the file can be written and differs from the other outputs."""
        for file in self.files:
            for other in others:
                if same_file(file.path, other.path):
                    raise UsageError(f"{file} is {other.label} too: name another file")
            if self.label != "--json" or not is_special(file.path):
                require_writable(file.path)

    @contextmanager
    def staged(self, content: Callable[[], str | None]) -> Generator[None]:
        """Write the content, if there is any, and publish it once the block succeeds."""
        text = None if self.given is None else content()
        if text is None:
            yield
            return
        with staged_text(self.files[0].path, text):
            yield


@dataclass(frozen=True, slots=True)
class JsonReport:
    """The report of `--json`: to a file, to standard output (`-`), or none."""

    destination: str | None

    @property
    def on_stdout(self) -> bool:
        return self.destination == "-"

    @property
    def side_file(self) -> SideFile:
        return SideFile("--json", None if self.on_stdout else self.destination)

    @property
    def files(self) -> list[OutputFile]:
        return self.side_file.files

    @contextmanager
    def staged(self, data: dict[str, Any]) -> Generator[None]:
        """Print the report, or write it and publish it once the block succeeds."""
        content = "" if self.destination is None else json.dumps(data, indent=2, allow_nan=False)
        if self.on_stdout:
            _print_now(content)
        with self.side_file.staged(lambda: f"{content}\n"):
            yield

    def write(self, data: dict[str, Any]) -> None:
        with self.staged(data):
            pass


@dataclass(frozen=True, slots=True)
class Destinations:
    """Everything that `toolkit optimize` writes: the model, the reports and the plan."""

    model: Path
    external_data: bool
    report: JsonReport
    plan: SideFile
    page: SideFile

    def require(self) -> None:
        """Raise unless all files can be written and are distinct."""
        taken = model_files(self.model, self.external_data)
        for file in taken:
            require_writable(file.path)
        self.report.side_file.require(model_files(self.model, sidecar=True))
        for side in (self.report.side_file, self.plan, self.page):
            side.require(taken)
            taken += side.files

    def files(self, loaded: Model) -> list[OutputFile]:
        """Return the files that may be written for this model."""
        sidecar = self.external_data or loaded.nbytes() >= _MAY_NEED_A_SIDECAR
        sides = (self.report, self.plan, self.page)
        return model_files(self.model, sidecar) + [file for side in sides for file in side.files]

    def write(
        self, result: Result, data: dict[str, Any], opsets: tuple[int | None, int | None]
    ) -> None:
        """Write the model and its reports; the model comes last, when nothing else can fail."""
        from toolkit.report.html import page

        with (
            self.plan.staged(lambda: _merged(result.plans)),
            self.page.staged(lambda: page(data, opsets)),
            self.report.staged(data),
        ):
            result.save(self.model, self.external_data)

    def write_failure(self, data: dict[str, Any]) -> None:
        """Write the reports of a run that wrote no model."""
        from toolkit.report.html import page

        with self.page.staged(lambda: page(data)):
            self.report.write(data)


def _merged(plans: Sequence[str]) -> str | None:
    """Merge plans into one by concatenating their lists; None if there are none."""
    if len(plans) < 2:
        return plans[0] if plans else None
    whole: dict[str, Any] = {}
    for plan in plans:
        for key, value in json.loads(plan).items():
            concatenate = isinstance(value, list) and key in whole
            whole[key] = whole[key] + value if concatenate else value
    return json.dumps(whole, indent=1) + "\n"


def _print_now(content: str) -> None:
    try:
        typer.echo(content)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise SaveError(f"cannot write to standard output: {error.strerror}") from error
