"""The inputs of a command: loading models, and the check that no input is overwritten."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.cli.outputs import OutputFile
from toolkit.errors import ModelError, UsageError
from toolkit.storage.atomic_write import same_file
from toolkit.user_code import running_files

if TYPE_CHECKING:
    from toolkit.ir.model import Model


def read_model(path: Path) -> Model:
    """Load a model and check its structure; errors name the file."""
    from toolkit.api import load
    from toolkit.verification.structure import check_input

    _require_text(path)
    try:
        model = load(path)
        check_input(model)
    except ModelError as error:
        if f"'{path}'" in str(error):
            raise
        raise ModelError(f"'{path}': {error}") from error
    return model


def _require_text(path: Path) -> None:
    """Raise if the folder's name is not valid text, as onnxruntime requires."""
    try:
        str(path.parent.resolve()).encode()
    except UnicodeEncodeError as error:
        reason = "its folder's name is not text in this locale; set PYTHONUTF8=1, or rename it"
        raise ModelError(f"'{path}' cannot be read: {reason}") from error


def require_apart(
    written: Iterable[OutputFile],
    models: Iterable[Model],
    samples: Iterable[Path] | None,
    libraries: Iterable[Path] | None,
) -> None:
    """Raise if a file to write is one that the command reads, also through links.

    Inputs are the models with their data files, the samples, the custom-operator libraries, and
    all Python files that run: the user's passes and their imports.
    """
    existing = [file for file in written if file.path.exists()]
    if not existing:
        return
    read = [
        *(found for model in models for found in _files_of(model)),
        *(("a sample", path) for path in samples or ()),
        *(("a custom-operator library", path) for path in libraries or ()),
        *(("Python code that runs here", path) for path in running_files()),
    ]
    for file in existing:
        for what, path in read:
            if same_file(file.path, path):
                raise UsageError(f"{file} is {what}: name another file to write")


def _files_of(model: Model) -> Iterator[tuple[str, Path]]:
    from toolkit.storage.weights import is_external, reference

    if model.path is not None:
        yield "the input", model.path
    folder = model.weights.folder or Path()
    for location in {reference(tensor)[0] for tensor in model.tensors() if is_external(tensor)}:
        yield "a data file of the input", folder / location
