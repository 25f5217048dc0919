"""Mute the libraries that an export calls: users read the proof and the report instead."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Generator


@contextlib.contextmanager
def silence() -> Generator[None]:
    """Discard output, warnings and log messages below CRITICAL of Python code."""
    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)
    sink = io.StringIO()
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(sink),
            contextlib.redirect_stderr(sink),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
