"""Packages that come with an extra of this one: imported where they are needed, by name."""

from __future__ import annotations

import importlib
from typing import Any

from toolkit.errors import UsageError


def require(module: str, extra: str, needed: str) -> Any:
    """The module, or a UsageError: what is needed (`images need Pillow`), and how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(f"{needed}: {install(extra)}") from error


def install(extra: str) -> str:
    """The command that brings the packages of an extra."""
    return f"pip install 'onnx-toolkit-passes[{extra}]'"
