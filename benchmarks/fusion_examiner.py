"""Examine the results of tools: fused operators, agreement with the original, latency.

    python benchmarks/fusion_examiner.py CORE        (started by `fusion_workers.Worker`)

Two kinds of request. `examine` counts the operators of a result and compares its outputs with the
original's at several sizes, in onnxruntime with its optimizations off. `race` runs the original and
all results in turn, with the optimizations on and one thread, and returns the seconds of every
round.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from compare import TOLERANCE, census, difference, session_as_written
from fusion_workers import serve, timed
from inputs import EXPORTED, FED, Input, random_feed

ATTENTION = frozenset(
    {
        "Attention",
        "DecoderMaskedMultiHeadAttention",
        "GroupQueryAttention",
        "MultiHeadAttention",
        "PackedAttention",
        "PackedMultiHeadAttention",
        "SparseAttention",
    }
)
NORMS = frozenset(
    {
        "EmbedLayerNormalization",
        "GroupNorm",
        "GroupNormalization",
        "InstanceNormalization",
        "LayerNormalization",
        "RMSNormalization",
        "SimplifiedLayerNormalization",
        "SkipGroupNorm",
        "SkipLayerNormalization",
        "SkipSimplifiedLayerNormalization",
    }
)
GELUS = frozenset({"BiasGelu", "BiasSplitGelu", "FastGelu", "Gelu"})
QUICK_GELU_ALPHA = 1.7

# Larger than the sizes of the export, and ragged.
SIZES = (*FED, {"batch": 2, "length": 48, "source": 37, "height": 64, "width": 64})
PLAIN = {"batch": 1, "source": 64, "height": 128, "width": 128}
PADDED = {"batch": 4, "length": 32, "source": 32, "height": 64, "width": 64}
LENGTHS = (128, 64)
ENOUGH_SECONDS, MOST_ROUNDS = 0.15, 60


class Examiner:
    """Answer requests; cache the outputs of the original for the following results."""

    def __init__(self) -> None:
        self._reference: tuple[str, list[dict[str, Any]], list[str], list[list[Any]]] | None = None

    def handle(self, request: dict[str, Any]) -> dict[str, Any]:
        inputs = [Input(i["name"], tuple(i["shape"]), i["below"]) for i in request["inputs"]]
        source = Path(request["source"])
        if request["kind"] == "race":
            files = {name: Path(file) for name, file in request["results"].items()}
            return race(source, files, inputs, request["rounds"], request["clock"])
        return self._examine(source, Path(request["target"]), inputs)

    def _examine(self, source: Path, target: Path, inputs: Sequence[Input]) -> dict[str, Any]:
        counts = census(target)
        answer = {"nodes": counts.total(), **found(target, counts), "agrees": False, "error": None}
        feeds, names, wanted = self._wanted(source, inputs)
        if not feeds:
            return {**answer, "reason": "the original does not run"}
        try:
            runner = session_as_written(target)
            got = [list(runner.run(names, feed)) for feed in feeds]
        # onnxruntime raises its own family of exceptions, and ValueError for names and shapes.
        except Exception as problem:
            reason = f"the result does not run: {str(problem).splitlines()[0]}"
            return {**answer, "reason": reason}
        error, reason = difference(names, wanted, got)
        return {**answer, "agrees": not reason, "error": error, "reason": reason}

    def _wanted(
        self, source: Path, inputs: Sequence[Input]
    ) -> tuple[list[dict[str, Any]], list[str], list[list[Any]]]:
        """Return feeds that the original accepts, its output names, and its outputs."""
        if self._reference is None or self._reference[0] != str(source):
            runner = session_as_written(source)
            names = [output.name for output in runner.get_outputs()]
            feeds, wanted = [], []
            for seed, sizes in enumerate((*SIZES, EXPORTED)):
                feed = random_feed(inputs, sizes, seed)
                try:
                    wanted.append(list(runner.run(names, feed)))
                # An exporter may have written the sizes of its example into the graph.
                except Exception:
                    continue
                feeds.append(feed)
            self._reference = str(source), feeds, names, wanted
        return self._reference[1:]


def found(path: Path, counts: Mapping[tuple[str, str], int]) -> dict[str, Any]:
    """Return the number of operators of each kind, and the operators outside standard ONNX."""
    import onnx

    from toolkit.ir import node as nd

    def total(ops: frozenset[str]) -> int:
        return sum(count for (_, op), count in counts.items() if op in ops)

    quick = 0
    if any(op == "QuickGelu" for _, op in counts):
        nodes = onnx.load(path, load_external_data=False).graph.node
        alphas = (nd.attr(n, "alpha", 1.702) for n in nodes if n.op_type == "QuickGelu")
        quick = sum(alpha > QUICK_GELU_ALPHA for alpha in alphas)  # with alpha 1 it is SiLU
    return {
        "attention": total(ATTENTION),
        "norms": total(NORMS),
        "gelus": total(GELUS) + quick,
        "foreign": sorted({op for domain, op in counts if domain not in ("", "ai.onnx.ml")}),
    }


def race(
    source: Path, results: Mapping[str, Path], inputs: Sequence[Input], rounds: int, clock: str
) -> dict[str, Any]:
    """Return seconds per round of the original and each result, by regime of inputs."""
    sessions: dict[str, Any] = {}
    failed: dict[str, str] = {}
    for name, path in {"original": source, **results}.items():
        try:
            sessions[name] = _deployed(path)
        except Exception as problem:
            failed[name] = str(problem).splitlines()[0]
    answer: dict[str, Any] = {"failed": failed}
    for regime, feeds in _regimes(inputs).items():
        feed = next((f for f in feeds if _runs(sessions["original"], f)), None)
        if feed is None:
            continue
        wanted = sessions["original"].run(None, feed)
        names = [output.name for output in sessions["original"].get_outputs()]
        racing = dict(sessions)
        for name, session in sessions.items():
            try:
                _, reason = difference(names, [wanted], [session.run(names, feed)])
            except Exception as problem:
                reason = str(problem).splitlines()[0]
            if reason:
                failed[name] = f"as deployed, {regime}: {reason} (allowed {TOLERANCE:.0e})"
                del racing[name]
        if "original" not in racing:
            continue
        answer[regime] = _rounds(racing, feed, rounds, clock)
    return answer


def _rounds(
    sessions: Mapping[str, Any], feed: Any, rounds: int, clock: str
) -> dict[str, list[float]]:
    """Run each session once per round, in rotating order; fast models have more rounds."""
    names = list(sessions)
    once = timed(partial(sessions["original"].run, None, feed), clock)[1]
    rounds = max(rounds, min(MOST_ROUNDS, int(ENOUGH_SECONDS / max(once, 1e-6))))
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        start = turn % len(names)
        for name in (*names[start:], *names[:start]):
            seconds[name].append(timed(partial(sessions[name].run, None, feed), clock)[1])
    return seconds


def _regimes(inputs: Sequence[Input]) -> dict[str, list[dict[str, Any]]]:
    """Return feeds to try in order: a full input, and padded ones if there is a mask.

    Not every model accepts long inputs.
    """
    plain = [random_feed(inputs, {**PLAIN, "length": length}, seed=1) for length in LENGTHS]
    plain.append(random_feed(inputs, EXPORTED, seed=1))
    masks = [each.name for each in inputs if each.below == 2]
    for feed in plain:
        for mask in masks:
            feed[mask][:] = 1
    regimes = {"plain": plain}
    if masks:
        regimes["padded"] = [random_feed(inputs, sizes, seed=2) for sizes in (PADDED, EXPORTED)]
    return regimes


def _runs(session: Any, feed: dict[str, Any]) -> bool:
    try:
        session.run(None, feed)
    except Exception:
        return False
    return True


def _deployed(path: Path) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


if __name__ == "__main__":
    serve(int(sys.argv[1]), Examiner().handle)
