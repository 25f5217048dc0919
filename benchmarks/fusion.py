"""Compare `--passes fuse` with its peers on transformers, by exporter and attention implementation.

    python benchmarks/fusion.py [--models PATTERN ...] [--peers NAME ...] [--rounds N]
                                [--cache DIR] [--passes PASSES] [--quick]

Every tool is one process that handles one export after another. Tools whose time is compared have
one core to themselves, the others share another one; latencies are measured while nothing else
runs. Tables go to the console and to `benchmarks/results/fusion.md`, the data to
`fusion.json`. Exit code 1 when a claim fails.
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import corpus
from claims import Claim
from compare import census
from fusion_claims import OURS, OURS_STANDARD, claims
from fusion_lanes import Lanes
from fusion_peers import TOOLS
from fusion_results import KINDS, REGIMES, Case, Run
from fusion_tables import markdown
from fusion_workers import CLOCKS
from publishing import RESULTS, progress, publish, setting

# No transformers: there is little to fuse, and nothing may get worse.
OTHER_NETWORKS = ("resnet50", "mobilenet-v2", "convnext", "unet", "tagger")
QUICK = ("bert-sdpa-*", "gpt2-eager-dynamo", "llama-sdpa-torchscript", "mobilenet-v2-torchscript")
DEPTH_REPEATS = 5


def run_model(run: Run, name: str, lanes: Lanes, options: argparse.Namespace) -> None:
    """Measure all tools on one export, and add its case and rows to the run."""
    entry = corpus.ensure(name, options.cache)
    nodes = 0 if entry.reason else census(entry.path).total()
    architecture, expected = _expected(name)
    run.cases[name] = Case(name, architecture, expected, nodes, entry.reason)
    if entry.reason:
        progress(f"{name}: {entry.reason}")
        return
    with tempfile.TemporaryDirectory(dir=options.cache, prefix="output-") as output:
        rows = lanes.run(entry, architecture, Path(output))
        raced = lanes.race(entry, rows, Path(output), options.rounds) if options.rounds else {}
    if "error" in raced:
        progress(f"{name}: no latencies: {raced['error']}")
    races = {regime: raced[regime] for regime in REGIMES if regime in raced}
    run.original[name] = {regime: seconds["original"] for regime, seconds in races.items()}
    for row in rows:
        run.rows[name, row.tool] = row
        row.latency = {r: seconds[row.tool] for r, seconds in races.items() if row.tool in seconds}
        if row.tool in raced.get("failed", {}):
            row.reason, row.agrees = raced["failed"][row.tool], False
        found = " ".join(str(row.found.get(kind, 0)) for kind in KINDS)
        progress(
            f"{name:34} {row.tool:17} {found:9} {row.nodes:5} nodes {row.seconds:6.2f} s "
            f"{run.speedup(name, row.tool, 'plain') or 0:5.2f}x  {row.reason[:100]}"
        )


def run_depths(run: Run, lanes: Lanes, options: argparse.Namespace) -> None:
    """Measure the time of `fuse` on the same encoder at several depths."""
    from architectures import DEEP, DEPTHS

    entries = {
        layers: corpus.ensure(f"{name}-sdpa-torchscript", options.cache)
        for layers, name in zip(DEPTHS, DEEP, strict=True)
    }
    for layers, entry in entries.items():
        with tempfile.TemporaryDirectory(dir=options.cache, prefix="output-") as output:
            target = Path(output) / "model.onnx"
            request = {"source": str(entry.path), "target": str(target)}
            request |= {"architecture": "bert", "clock": lanes.clock, "repeats": DEPTH_REPEATS}
            answer = lanes.workers[OURS_STANDARD].ask(request)
            if "seconds" in answer:
                nodes = census(target).total()
                run.depths[layers] = {"seconds": answer["seconds"], "nodes": nodes}
        progress(f"{layers} layers: {answer}")


def _expected(name: str) -> tuple[str, dict[str, int]]:
    """Return the architecture of an export and its number of layers of each kind."""
    from architectures import ARCHITECTURES

    network = name.rpartition("-")[0]
    architecture = network.rpartition("-")[0]
    known = ARCHITECTURES.get(architecture)
    if known is None:
        return network, {}
    return architecture, {kind: getattr(known, kind) for kind in KINDS}


def model_names() -> list[str]:
    """Return the names of all exports of the benchmark."""
    others = [f"{network}-{e}" for network in OTHER_NETWORKS for e in corpus.EXPORTERS]
    return [*corpus.transformers(), *others]


def write(run: Run, judged: Sequence[Claim], options: argparse.Namespace) -> str:
    """Write JSON and Markdown; return the Markdown."""
    packages = ("onnx", "onnxruntime", "torch", "transformers", "onnxscript", "onnxslim", "onnxsim")
    how = f"passes `{options.passes}`, {options.rounds} round(s) of latency, {options.clock} clock"
    measured_on = setting(how, packages)
    text = markdown(run, judged, measured_on)
    publish(options.results, "fusion", text, measured_on, judged, run.to_json())
    return text


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", metavar="PATTERN", help="shell patterns of names")
    parser.add_argument("--peers", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--rounds", type=int, default=9, help="of latency; 0 for none")
    parser.add_argument("--cache", type=Path, default=corpus.DEFAULT_CACHE)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--passes", default="fuse", help="what the toolkit runs")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: on a busy machine")
    parser.add_argument("--timeout", type=float, default=120, help="seconds for one tool's run")
    parser.add_argument("--no-depth", action="store_true", help="skip the check of depths")
    parser.add_argument("--quick", action="store_true", help="a few exports, few rounds")
    options = parser.parse_args()
    if options.quick:
        options.rounds = min(options.rounds, 5)
    patterns = options.models or (QUICK if options.quick else ["*"])
    options.names = [n for n in model_names() if any(fnmatch.fnmatch(n, p) for p in patterns)]
    if not options.names:
        parser.error(f"no export matches {' '.join(patterns)}")
    return options


def main() -> int:
    options = parse_arguments()
    options.cache.mkdir(parents=True, exist_ok=True)
    run = Run(options.peers)
    lanes = Lanes(options.peers, options.passes, options.clock, options.timeout)
    judged: list[Claim] = []
    try:
        for name in options.names:
            run_model(run, name, lanes, options)
            # After every export, so that an interrupted run has shown something.
            judged = claims(run)
            write(run, judged, options)
        if {OURS, OURS_STANDARD} <= set(options.peers) and not options.no_depth:
            run_depths(run, lanes, options)
    finally:
        lanes.close()
    judged = claims(run)
    print(write(run, judged, options))
    return int(any(claim.holds is False for claim in judged))


if __name__ == "__main__":
    sys.exit(main())
