"""Compare `--passes fuse,quantize` with its peers: size, speed, accuracy and memory.

    python benchmarks/quantization.py [--subjects PATTERN ...] [--tools NAME ...] [--assets DIR]
                                      [--cache DIR] [--rounds N] [--no-memory] [--keep]

Every tool runs on every subject in a separate process, with the same calibration data. Then all
results are scored on the same test data, and their latencies and that of the float model are
measured in turn, with onnxruntime's defaults and one thread. `--assets` is a folder with `models/`
and `data/` for the subjects that no package ships. Tables go to the console and to
`benchmarks/results/quantization.md`, the data to `quantization.json`; `--keep` keeps results of
earlier runs. Exit code 1 when a claim fails.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import argparse
import fnmatch
import json
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import corpus
import numpy as np
from claims import Claim
from fusion_workers import CLOCKS
from measure import MEGABYTE, anonymous_bytes, child_environment
from publishing import RESULTS, progress, publish, setting
from quantization_claims import claims
from quantization_results import FLOAT, Row, Run, markdown
from quantization_scores import SCORES, noise, open_session, pooled, run as run_model
from quantization_subjects import SUBJECTS, Missing, Subject, load_feeds, transformer
from quantization_tools import TOOLS

HERE = Path(__file__).resolve().parent
TIMED_SECONDS, WARM_UPS = 1.0, 3
MEMORY_SAMPLES = (16, 1024)
BIG = ("mlp-3gb", corpus.BIG_DECODER)
BIG_TOOLS = ("toolkit-no-data", "toolkit-size", "toolkit-int4")


def all_subjects() -> list[Subject]:
    """Return the subjects with a task, and the transformers of the fusion benchmark."""
    exports = [
        Subject(name, partial(transformer, name), "agreement", "transformer")
        for name in corpus.transformers()
    ]
    return [*SUBJECTS, *exports]


def quantize(tool: str, model: Path, calib: Path, target: Path, timeout: float) -> dict[str, Any]:
    """Run a tool in a separate process and sample its memory; the answer may hold an error."""
    command = [sys.executable, str(HERE / "quantization_tools.py"), tool]
    command += [str(model), str(calib), str(target)]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as log:
        child = subprocess.Popen(command, stdout=out, stderr=log, env=child_environment(2))
        start, peak = time.perf_counter(), 0
        while child.poll() is None:
            peak = max(peak, anonymous_bytes(child.pid))
            time.sleep(0.005)
            if time.perf_counter() - start > timeout:
                child.kill()
                child.wait()
                return {"error": f"more than {timeout:.0f} s", "peak_mb": peak / MEGABYTE}
        out.seek(0)
        log.seek(0)
        lines = out.read().decode(errors="replace").strip().splitlines()
        if child.returncode:
            said = log.read().decode(errors="replace").strip().splitlines()
            reason = said[-1][:200] if said else f"exit code {child.returncode}"
            return {"error": reason, "peak_mb": peak / MEGABYTE}
    return {**json.loads(lines[-1]), "peak_mb": peak / MEGABYTE}


def run_subject(run: Run, subject: Subject, options: argparse.Namespace) -> None:
    """Quantize, score and time one subject with all tools."""
    try:
        folder = subject.prepare(options.cache, options.assets)
    except Missing as missing:
        run.missing[subject.name] = str(missing)
        progress(f"{subject.name}: {missing}")
        return
    model = folder / "model.onnx"
    tests = load_feeds(folder / "test")
    labels = np.load(folder / "labels.npy") if (folder / "labels.npy").exists() else None
    reference = outputs_of(subject, model, tests)
    score = SCORES[subject.score]
    base = score(reference, reference, labels)
    files = {FLOAT: model}
    run.add(Row(subject.name, subject.kind, FLOAT, bytes=size_of(model), score=base))
    with tempfile.TemporaryDirectory(dir=options.cache, prefix="output-") as output:
        for tool in (*options.tools, *subject.tools):
            target = Path(output) / f"{tool}.onnx"
            answer = quantize(tool, model, folder / "calib", target, options.timeout)
            row = Row(subject.name, subject.kind, tool, peak_mb=answer["peak_mb"])
            run.add(row)
            row.reason = answer.get("error", "")
            if not row.reason:
                row.seconds, row.notes = answer["seconds"], answer["notes"]
                row.bytes = size_of(target)
                try:
                    found = outputs_of(subject, target, tests)
                # onnxruntime raises its own family of exceptions.
                except Exception as problem:
                    row.reason = f"does not run: {str(problem).splitlines()[0][:150]}"
                else:
                    row.score, row.decibels = (
                        score(found, reference, labels),
                        noise(reference, found),
                    )
                    files[tool] = target
            progress(row.line(base))
        for path in sorted((folder / "timed").glob("*.npz")):
            seconds = race(files, dict(np.load(path)), options.rounds, options.clock)
            for tool, times in seconds.items():
                ratios = [a / b for a, b in zip(seconds[FLOAT], times, strict=True)]
                run.row(subject.name, tool).speed[path.stem] = median(ratios)
                run.row(subject.name, tool).milliseconds[path.stem] = 1e3 * median(times)
    for row in run.of(subject.name):
        progress(
            f"{row.subject:20} {row.tool:16} "
            + " ".join(f"{regime} {ratio:.2f}x" for regime, ratio in row.speed.items())
        )


def outputs_of(subject: Subject, model: Path, tests: list[Any]) -> list[dict[str, Any]]:
    found = run_model(model, tests, subject.carry)
    if subject.score != "similarity":
        return found
    return [pooled(o, f["attention_mask"]) for o, f in zip(found, tests, strict=True)]


def race(
    files: dict[str, Path], feed: dict[str, Any], rounds: int, clock: str
) -> dict[str, list[float]]:
    """Return the seconds per round of each model, run in turn."""
    read = CLOCKS[clock]
    sessions = {tool: open_session(path) for tool, path in files.items()}
    repeats: dict[str, int] = {}
    for tool, session in sessions.items():
        for _ in range(WARM_UPS):
            start = time.perf_counter()
            session.run(None, feed)
            spent = time.perf_counter() - start
        repeats[tool] = max(1, min(200, int(TIMED_SECONDS / rounds / max(spent, 1e-6))))
    seconds: dict[str, list[float]] = {tool: [] for tool in files}
    for _ in range(rounds):
        for tool, session in sessions.items():
            start = read()
            for _ in range(repeats[tool]):
                session.run(None, feed)
            seconds[tool].append((read() - start) / repeats[tool])
    return seconds


def measure_memory(run: Run, options: argparse.Namespace) -> None:
    """Measure peak memory with few and many calibration samples, and with models of 3 GB."""
    with tempfile.TemporaryDirectory(dir=options.cache, prefix="memory-") as output:
        folder = next(s for s in SUBJECTS if s.name == "digits").prepare(options.cache, None)
        feeds = load_feeds(folder / "calib")
        for count in MEMORY_SAMPLES:
            calib = Path(output) / f"calib-{count}"
            calib.mkdir()
            for index in range(count):
                np.savez(calib / f"{index:05}.npz", allow_pickle=False, **feeds[index % len(feeds)])
            target = Path(output) / "model.onnx"
            run.memory[f"calibration, {count} samples"] = quantize(
                "toolkit", folder / "model.onnx", calib, target, options.timeout
            )
        for name in BIG:
            entry = corpus.ensure(name, options.cache)
            for tool in BIG_TOOLS:
                target = Path(output) / "big.onnx"
                answer = quantize(tool, entry.path, Path(output), target, 10 * options.timeout)
                run.memory[f"{name}, {entry.bytes / 1e9:.1f} GB, {tool}"] = answer
            corpus.discard(name, options.cache)
    for what, answer in run.memory.items():
        progress(f"{what}: {answer}")


def size_of(path: Path) -> int:
    """Return the bytes of the model with its data file."""
    data = path.with_name(path.name + ".data")
    return path.stat().st_size + (data.stat().st_size if data.exists() else 0)


def write(run: Run, judged: list[Claim], options: argparse.Namespace) -> str:
    how = f"{options.rounds} rounds of latency, {options.clock} clock, one thread"
    if options.keep:
        how += ", in parts: some rows are of an earlier run"
    measured_on = setting(how, ("onnx", "onnxruntime", "torch", "transformers", "nncf"))
    text = markdown(run, judged, measured_on)
    publish(options.results, "quantization", text, measured_on, judged, run.to_json())
    return text


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--subjects", nargs="+", default=["*"], metavar="PATTERN")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--assets", type=Path, help="a folder with models/ and data/")
    parser.add_argument("--cache", type=Path, default=corpus.DEFAULT_CACHE)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: on a busy machine")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one tool's run")
    parser.add_argument("--no-memory", action="store_true", help="skip the memory figures")
    parser.add_argument("--keep", action="store_true", help="earlier figures stay beside new ones")
    options = parser.parse_args()
    options.chosen = [
        s for s in all_subjects() if any(fnmatch.fnmatch(s.name, p) for p in options.subjects)
    ]
    if not options.chosen:
        parser.error(f"no subject matches {' '.join(options.subjects)}")
    return options


def main() -> int:
    options = parse_arguments()
    options.cache.mkdir(parents=True, exist_ok=True)
    subjects = all_subjects() if options.keep else options.chosen
    extra = dict.fromkeys(tool for subject in subjects for tool in subject.tools)
    run = Run([*(TOOLS if options.keep else options.tools), *extra])
    earlier = options.results / "quantization.json"
    if options.keep and earlier.exists():
        run.keep(json.loads(earlier.read_text()))
    judged: list[Claim] = []
    for subject in options.chosen:
        run_subject(run, subject, options)
        judged = claims(run)
        write(run, judged, options)  # so that an interrupted run has shown something
    if not options.no_memory:
        measure_memory(run, options)
        judged = claims(run)
    print(write(run, judged, options))
    return int(any(claim.holds is False for claim in judged))


if __name__ == "__main__":
    sys.exit(main())
