# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Load model files: ExportedProgram (.pt2), TorchScript (.pt, .ts), and weights for a factory.

Pickles are never executed: TorchScript and .pt2 are archives with formats of their own, and weights
are loaded with `weights_only=True`.
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
    """Load the ExportedProgram or the ScriptModule in a file."""
    torch = importlib.import_module("torch")
    if path.suffix in WEIGHTS:
        raise _only_weights(path)
    if path.suffix in PROGRAM:
        try:
            with quiet():
                return torch.export.load(path)
        except Exception as error:  # a damaged archive raises anything
            raise UsageError(
                f"'{path}' is not an ExportedProgram: {_short(error)}; write one with "
                "torch.export.save"
            ) from error
    if not _is_script(path):
        raise _only_weights(path)
    try:
        with quiet():
            return torch.jit.load(str(path), map_location="cpu")
    except Exception as error:  # as above
        raise UsageError(f"'{path}' is not a TorchScript archive: {_short(error)}") from error


def _is_script(path: Path) -> bool:
    """Return whether a file is a TorchScript archive: a zip that contains code."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (OSError, zipfile.BadZipFile):
        return False
    return any("/code/" in name or name.endswith("constants.pkl") for name in names)


def _only_weights(path: Path) -> UsageError:
    danger = "" if path.suffix == ".safetensors" else " (a pickle runs code and is not opened)"
    return UsageError(
        f"'{path}' contains weights but no model{danger}: name the factory that builds the model, "
        f"and add --weights {path.name}"
    )


def load_weights(module: Any, given: str | os.PathLike[str]) -> None:
    """Load a file of weights into a module; raise UsageError unless all names and shapes match."""
    path = Path(given)
    if not path.is_file():
        raise UsageError(f"--weights '{path}' does not exist: name a file of weights")
    state = _state(path)
    try:
        module.load_state_dict(state, strict=True)
    except Exception as error:
        message = one_line(str(error).split("\n", 1)[-1], 300)
        raise UsageError(f"the weights in '{path}' do not fit the model: {message}") from error


def _state(path: Path) -> dict[str, Any]:
    torch = importlib.import_module("torch")
    if path.suffix == ".safetensors":
        loader = require("safetensors.torch", "export", f"'{path}' needs safetensors")
        try:
            return loader.load_file(path)
        except Exception as error:
            raise UsageError(f"'{path}' is not a safetensors file: {summarize(error)}") from error
    try:
        loaded = torch.load(
            path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
        )
    except Exception as error:
        raise UsageError(
            f"'{path}' is damaged or a pickle, which runs code and is not opened: save the model's "
            "state_dict()"
        ) from error
    for key in ("state_dict", "model_state_dict", "model"):
        if isinstance(loaded, dict) and isinstance(loaded.get(key), dict):
            loaded = loaded[key]
    if not isinstance(loaded, dict) or not all(torch.is_tensor(v) for v in loaded.values()):
        raise UsageError(f"'{path}' is not a state_dict, a dict of tensors by name")
    return loaded


def _short(error: Exception) -> str:
    return one_line(summarize(error).split(" Exception raised")[0], 160)
