"""Optional packages, which an extra of this distribution installs."""

from __future__ import annotations

import importlib
from typing import Any

from toolkit.errors import UsageError


def require(module: str, extra: str, needed: str) -> Any:
    """Import a module; raise UsageError with `needed` ("images need Pillow") and the command."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(f"{needed}: {install(extra)}") from error


def install(extra: str) -> str:
    """Return the command that installs an extra."""
    return f"pip install 'onnx-toolkit-passes[{extra}]'"
