"""Write the expected models: `python -m tests.golden.update [NAME ...]`, then see `git diff`."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import toolkit
from tests.golden.text import MODELS, read_model, text_of, value_names
from toolkit.feeds import make_feeds
from toolkit.runtime import cost_table

PIPELINES = {
    "simplify": "simplify",
    "fuse": "fuse",
    # With `auto` the processor that runs the tests would decide.
    "quantize": "fuse,quantize:reduce_range=false",
}
"""File name -> passes."""


def names() -> list[str]:
    return sorted(folder.name for folder in MODELS.iterdir())


def path_of(name: str, stage: str) -> Path:
    return MODELS / name / f"{stage}.onnxtxt"


def optimized(name: str, stage: str) -> str:
    """Return the model after the passes of a pipeline, as text."""
    model = read_model(path_of(name, "before"))
    given = value_names(model)
    feeds = make_feeds(model, count=8).feeds
    with one_machine():
        # Without an error budget the exact results of a processor decide nothing.
        result = toolkit.optimize(
            model, PIPELINES[stage], calib=feeds, max_drop="off", measure=False, validate="final"
        )
    return text_of(result.model, digits=2 if stage == "quantize" else 4, given=given)


@contextmanager
def one_machine() -> Generator[None]:
    """Choose by the shipped costs of one processor with one core, whatever this machine is."""
    with (
        TemporaryDirectory() as cache,
        mock.patch.dict(os.environ, {"XDG_CACHE_HOME": cache}),
        mock.patch.object(cost_table, "cpu_name", return_value="AMD EPYC, avx512-vnni"),
        mock.patch.object(os, "sched_getaffinity", create=True, return_value={0}),
    ):
        yield


def main(chosen: list[str]) -> None:
    for name in chosen or names():
        for stage in PIPELINES:
            path_of(name, stage).write_text(optimized(name, stage), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
