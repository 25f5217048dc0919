"""Results for older releases of onnxruntime load there and compute the same.

Needs environments with one release each, below the folder RUNTIMES: `make test-runtimes`.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

import toolkit
from tests.golden import update
from tests.golden.text import read_model
from toolkit.cli.demo_model import build
from toolkit.feeds import make_feeds
from toolkit.ir.model import Model
from toolkit.runtime.session import Session
from toolkit.targets.releases import find_release, oldest_release, releases

pytestmark = pytest.mark.runtimes

FOLDER = Path(os.environ.get("RUNTIMES", ""))
VERSIONS = sorted(path.name for path in FOLDER.iterdir()) if FOLDER.name else []

STAGES = {
    "fuse": 2e-5,
    "fuse,quantize:reduce_range=false": 0.05,
    "fuse,quantize:mode=weight_only": 0.05,
    "fuse,quantize-weights:weights=int4": 0.5,
    "fuse,fp16": 0.05,
}
"""Passes -> the largest error, relative to the largest output."""

_SIZES = 3
"""The number of feeds, which differ in their batch and other dynamic sizes."""

MODELS = ("demo", *update.names())


def subject(name: str) -> Model:
    if name == "demo":
        return Model.from_proto(build())
    return read_model(update.path_of(name, "before"))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("version", VERSIONS)
def test_results_load_and_agree(version: str, name: str, tmp_path: Path) -> None:
    python = FOLDER / version / "bin" / "python"
    release = releases()[-1].version if version == "newest" else find_release(version).version
    original = subject(name)
    feeds = make_feeds(original, count=8).feeds
    samples = [tmp_path / f"{number}.npz" for number in range(_SIZES)]
    session = Session(original)
    for data, feed in zip(samples, feeds, strict=False):
        arrays = {f"in.{key}": value for key, value in feed.items()}
        outputs = zip(original.graph.outputs, session.run(feed), strict=True)
        np.savez(data, **arrays, **{f"out.{name}": value for name, value in outputs})
    written: dict[str, Path] = {}
    for number, passes in enumerate(STAGES):
        with update.one_machine():
            result = toolkit.optimize(
                original, passes, runtime=release, calib=_calib(passes, feeds),
                max_drop=_budget(passes), measure=False, validate="final",
            )  # fmt: skip
        oldest = oldest_release(result.model)
        assert oldest is not None
        assert oldest.number <= find_release(release).number
        written[passes] = result.save(tmp_path / f"{number}.onnx")
    tried = [(passes, path, data) for passes, path in written.items() for data in samples]
    done = subprocess.run(
        [python, Path(__file__).parent / "run_models.py"],
        input="".join(f"{path} {data}\n" for _, path, data in tried),
        capture_output=True,
        text=True,
        check=True,
    )
    answers = zip(tried, done.stdout.splitlines(), strict=True)
    loosest = STAGES["fuse,quantize:reduce_range=false"] if name == "qdq" else 0.0  # rounds itself
    failed = [
        (passes, answer)
        for (passes, *_), answer in answers
        if not _within(answer, max(STAGES[passes], loosest))
    ]
    assert not failed


def _calib(passes: str, feeds):
    return feeds if "reduce_range" in passes else None


def _budget(passes: str) -> str | None:
    return "off" if "quantize" in passes else None


def _within(answer: str, largest: float) -> bool:
    try:
        return float(answer) <= largest
    except ValueError:
        return False
