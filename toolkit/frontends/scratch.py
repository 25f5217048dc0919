"""The folder that exporters write into: there as long as somebody needs a file of it."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from pathlib import Path


class Scratch:
    """A new folder that goes when the last object that holds this one goes, or the program ends."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="toolkit-export-"))
        self._remove = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)

    def remove(self) -> None:
        """Take it away at once."""
        self._remove()
