"""Compare the toolkit with its peers on models of both PyTorch exporters.

    python benchmarks/engine.py [--models PATTERN ...] [--peers NAME ...] [--rounds N]
                                [--cache DIR] [--quick]

Every peer runs on every model in a fresh process, in rounds, so that a busy minute of the machine
affects all of them alike. Tables go to the console and to
`benchmarks/results/engine.md`, the data to `engine.json`. Exit code 1 when a claim fails.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import corpus
from claims import Claim, claims
from compare import Examination, census, examine
from measure import Measurement, measure
from peers import PEERS
from publishing import RESULTS, progress, publish, setting
from results import Case, Run, row
from tables import markdown

EXAMINE_TIMEOUT = 900


def run_model(run: Run, name: str, options: argparse.Namespace) -> None:
    """Measure all peers on one model, and add its case and rows to the run."""
    entry = corpus.ensure(name, options.cache)
    nodes = 0 if entry.reason else census(entry.path).total()
    run.cases[name] = Case(name, entry.bytes, nodes, entry.exported, entry.reason)
    if entry.reason:
        progress(f"{name}: {entry.reason}")
        return
    rounds: dict[str, list[Measurement]] = {peer: [] for peer in run.peers}
    examined: dict[str, Examination] = {}
    for _ in range(options.rounds):
        for peer in run.peers:
            # A peer that failed on this model would only fail again.
            if any(done.error for done in rounds[peer]):
                continue
            with tempfile.TemporaryDirectory(dir=options.cache, prefix="output-") as output:
                target = Path(output) / "model.onnx"
                measured = measure(peer, entry.path, target, options.cores, options.timeout)
                rounds[peer].append(measured)
                if not measured.error and peer not in examined:
                    examined[peer] = examine(entry.path, target, entry.inputs, EXAMINE_TIMEOUT)
    for peer in run.peers:
        added = row(name, peer, rounds[peer], examined.get(peer))
        run.rows[name, peer] = added
        progress(
            f"{name:28} {peer:13} {added.nodes:6} nodes {added.seconds:8.2f} s "
            f"{added.peak_mb:7.0f} MB  {added.reason[:120]}"
        )
    if name in corpus.PASSING and not options.keep:
        corpus.discard(name, options.cache)


def write(run: Run, judged: Sequence[Claim], options: argparse.Namespace) -> str:
    """Write JSON and Markdown; return the Markdown."""
    packages = ("numpy", "onnx", *(p for peer in PEERS.values() for p in peer.packages))
    measured_on = setting(f"{options.cores} core(s), {options.rounds} round(s)", packages)
    text = markdown(run, judged, measured_on)
    data = {
        "models": [asdict(case) for case in run.cases.values()],
        "rows": [asdict(each) for each in run.rows.values()],
    }
    publish(options.results, "engine", text, measured_on, judged, data)
    return text


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", metavar="PATTERN", help="shell patterns of names")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cache", type=Path, default=corpus.DEFAULT_CACHE)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--cores", type=int, default=1, help="cores that a peer may use")
    parser.add_argument("--timeout", type=float, default=150, help="seconds for one peer's run")
    parser.add_argument("--keep", action="store_true", help="keep the 3 GB model afterwards")
    parser.add_argument("--quick", action="store_true", help="a few small models, one round")
    options = parser.parse_args()
    if options.quick:
        options.rounds = 1
    patterns = options.models or (corpus.QUICK if options.quick else ["*"])
    options.names = corpus.select(patterns)
    if not options.names:
        parser.error(f"no model matches {' '.join(patterns)}")
    return options


def main() -> int:
    options = parse_arguments()
    run = Run(options.peers)
    judged: list[Claim] = []
    for name in options.names:
        run_model(run, name, options)
        # After every model, so that an interrupted run has shown something.
        judged = claims(run)
        write(run, judged, options)
    print(write(run, judged, options))
    return int(any(claim.holds is False for claim in judged))


if __name__ == "__main__":
    sys.exit(main())
