"""The options `--fix` and `--freeze`: sizes of dimensions, values of inputs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from toolkit.errors import UsageError

Fix = Annotated[
    list[str] | None,
    typer.Option(
        "--fix",
        metavar="DIM=N",
        help="Fix a dimension, as in batch=1,height=320 or image:2=320. Repeatable.",
    ),
]
Freeze = Annotated[
    list[str] | None,
    typer.Option(
        "--freeze",
        metavar="INPUT=VALUE",
        help="Turn an input into a constant, as in sr=16000, scale=[1,2] or mask=@mask.npy. "
        "Repeatable.",
    ),
]

_NEXT_ITEM = re.compile(r",(?=[^,\[\]]+=)")
"""The comma before an item such as `sr=16000`, rather than within a list."""


def sizes(given: Iterable[str] | None) -> dict[str, str]:
    """Parse --fix."""
    return _items("--fix", "batch=1", [item for text in given or () for item in text.split(",")])


def values(given: Iterable[str] | None) -> dict[str, Any]:
    """Parse --freeze; `@FILE` is read, and other values stay text."""
    return {name: _value(name, text) for name, text in _texts(given).items()}


def files(given: Iterable[str] | None) -> list[Path]:
    """Return the files that --freeze reads."""
    return [_path(text) for text in _texts(given).values() if text.startswith("@")]


def _texts(given: Iterable[str] | None) -> dict[str, str]:
    items = [item for text in given or () for item in _NEXT_ITEM.split(text)]
    return _items("--freeze", "sr=16000", items)


def _items(option: str, example: str, items: Iterable[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for item in items:
        name, equals, value = (part.strip() for part in item.partition("="))
        if not (name and equals and value):
            raise UsageError(f"{option} '{item}' is not valid: write {option} {example}")
        if found.setdefault(name, value) != value:
            raise UsageError(f"{option}: '{name}' is given twice, {found[name]} and {value}")
    return found


def _value(name: str, text: str) -> Any:
    if not text.startswith("@"):
        return text
    import numpy as np

    path = _path(text)
    try:
        loaded: Any = np.load(path, allow_pickle=False)
    except OSError as error:
        raise UsageError(f"--freeze {name}: '{path}' cannot be read: {error.strerror}") from error
    except (ValueError, EOFError) as error:
        raise UsageError(f"--freeze {name}: '{path}' is not an .npy file") from error
    if isinstance(loaded, np.lib.npyio.NpzFile):
        raise UsageError(f"--freeze {name}: '{path}' holds several arrays; save it by numpy.save")
    return loaded


def _path(text: str) -> Path:
    return Path(text[1:]).expanduser()
