"""Parse --example: arrays in a file, or types and shapes to draw random values for.

--example inputs.npz            arrays by parameter name; `arr_0`, `arr_1`, ... by position
--example float32[1,3,224,224]  one positional argument of random values
--example ids=int64[1,16]       one keyword argument of random values
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.errors import UsageError

_SPEC = re.compile(r"^(?:([A-Za-z_]\w*)=)?([a-z]+\d*)\[([\d,\s]*)\]$")
_LARGEST_ID = 9
"""The largest integer drawn: a valid token id in any vocabulary."""


def read_examples(texts: Sequence[str], seed: int = 0) -> Any:
    """Return the example that the texts describe: a tuple, a dict, or None if there are none."""
    random = np.random.default_rng(seed)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for text in texts:
        found = _SPEC.match(text.strip())
        if found is None:
            arrays = _load(text)
            if all(re.fullmatch(r"arr_\d+", name) for name in arrays):
                args += arrays.values()
            else:
                kwargs |= arrays
        elif found[1]:
            kwargs[found[1]] = _draw(text, found[2], found[3], random)
        else:
            args.append(_draw(text, found[2], found[3], random))
    if args and kwargs:
        raise UsageError("--example: give all arguments by name, or all by position")
    return tuple(args) if args else kwargs or None


def _draw(text: str, dtype: str, sizes: str, random: np.random.Generator) -> NDArray[Any]:
    try:
        kind = np.dtype(dtype)
    except TypeError as error:
        raise UsageError(f"--example '{text}': unknown type '{dtype}'") from error
    shape = [int(size) for size in sizes.split(",") if size.strip()]
    if kind.kind == "f":
        return np.asarray(random.standard_normal(shape)).astype(kind)
    if kind.kind == "b":
        return np.asarray(random.integers(0, 2, shape) == 1)
    if kind.kind in "iu":
        return np.asarray(random.integers(0, _LARGEST_ID, shape, endpoint=True)).astype(kind)
    raise UsageError(f"--example '{text}': cannot draw {dtype} values, give an .npz file")


def _load(text: str) -> dict[str, Any]:
    path = Path(text)
    if not path.is_file():
        raise UsageError(
            f"--example '{text}' does not exist: name an .npz file, or write float32[1,3,224,224]"
        )
    try:
        loaded: Any = np.load(path, allow_pickle=False)
        if not isinstance(loaded, np.lib.npyio.NpzFile):
            return {"arr_0": loaded}
        with loaded:
            names: list[str] = loaded.files
            return {name: loaded[name] for name in names}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise UsageError(f"--example '{text}' is not an .npz file of plain arrays") from error
