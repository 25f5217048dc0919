# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Models in files: ExportedProgram (.pt2), TorchScript (.pt, .ts), and weights for a factory.

Nothing is unpickled: TorchScript and .pt2 are archives with formats of their own, and weights are
read with `weights_only=True`.
"""

from __future__ import annotations

import importlib
import os
import zipfile
from pathlib import Path
from typing import Any

from toolkit.errors import UsageError, one_line, summarize
from toolkit.extras import require
from toolkit.frontends.pytorch.exporters import quiet

PROGRAM = (".pt2",)
ARCHIVES = (".pt", ".ts", ".pth", ".torchscript", ".jit")
WEIGHTS = (".safetensors", ".bin", ".ckpt")
SUFFIXES = (*PROGRAM, *ARCHIVES, *WEIGHTS)


def load_source(path: Path) -> Any:
    """The ExportedProgram or the ScriptModule in a file."""
    torch = importlib.import_module("torch")
    if path.suffix in WEIGHTS:
        raise _only_weights(path)
    if path.suffix in PROGRAM:
        try:
            with quiet():
                return torch.export.load(path)
        except Exception as error:  # a damaged archive raises anything
            message = f"'{path}' is no ExportedProgram: {_short(error)}"
            raise UsageError(f"{message}; torch.export.save writes one") from error
    if not _is_script(path):
        raise _only_weights(path)
    try:
        with quiet():
            return torch.jit.load(str(path), map_location="cpu")
    except Exception as error:  # as above
        raise UsageError(f"'{path}' is no TorchScript archive: {_short(error)}") from error


def _is_script(path: Path) -> bool:
    """Whether a file is a TorchScript archive: a zip with code in it, where a pickle has none."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (OSError, zipfile.BadZipFile):
        return False
    return any("/code/" in name or name.endswith("constants.pkl") for name in names)


def _only_weights(path: Path) -> UsageError:
    safe = path.suffix == ".safetensors"
    holds = "weights" if safe else "weights or a pickled object"
    danger = "" if safe else " a pickle runs code and is not opened;"
    return UsageError(
        f"'{path}' holds {holds}, and no graph:{danger} name the factory that builds the model, "
        f"with --weights {path.name}"
    )


def load_weights(module: Any, given: str | os.PathLike[str]) -> None:
    """Put the weights of a file into a module; every name must fit."""
    path = Path(given)
    if not path.is_file():
        raise UsageError(f"weights '{path}' do not exist")
    state = _state(path)
    try:
        module.load_state_dict(state, strict=True)
    except Exception as error:
        message = one_line(str(error).split("\n", 1)[-1], 300)
        raise UsageError(f"weights '{path}' do not fit the model: {message}") from error


def _state(path: Path) -> dict[str, Any]:
    torch = importlib.import_module("torch")
    if path.suffix == ".safetensors":
        loader = require("safetensors.torch", "export", f"'{path}' needs safetensors")
        try:
            return loader.load_file(path)
        except Exception as error:
            raise UsageError(f"'{path}' is no safetensors file: {summarize(error)}") from error
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=_may_map(path))
    except Exception as error:
        raise UsageError(
            f"'{path}' holds more than weights, or is damaged: pickles run code and are not "
            "opened; save the model's state_dict()"
        ) from error
    for key in ("state_dict", "model_state_dict", "model"):
        if isinstance(loaded, dict) and isinstance(loaded.get(key), dict):
            loaded = loaded[key]
    if not isinstance(loaded, dict) or not all(torch.is_tensor(v) for v in loaded.values()):
        raise UsageError(f"'{path}' is no state_dict: a dict of tensors by name was expected")
    return loaded


def _may_map(path: Path) -> bool:
    return zipfile.is_zipfile(path)


def _short(error: Exception) -> str:
    return one_line(summarize(error).split(" Exception raised")[0], 160)
