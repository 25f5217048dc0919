"""The temporary folder that exporters write into; it lives as long as its files are in use."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from pathlib import Path


class Scratch:
    """A temporary folder, deleted with the last reference to this object or at program exit."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="toolkit-export-"))
        self._remove = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)

    def remove(self) -> None:
        """Delete the folder now."""
        self._remove()
