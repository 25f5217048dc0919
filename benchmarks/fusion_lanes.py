"""Run all tools on one export: the timed ones on one core, the others on another."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from corpus import Entry
from fusion_peers import TOOLS
from fusion_results import KINDS, Row
from fusion_workers import Worker

REPEATS = 3
"""Number of runs of a tool whose best time is compared."""


class Lanes:
    """The processes of all tools, and of the examiners of their results."""

    def __init__(self, tools: Sequence[str], passes: str, clock: str, timeout: float) -> None:
        self.clock = clock
        self.workers = {
            tool: Worker("fusion_peers.py", (tool, passes), _core(tool), timeout) for tool in tools
        }
        self._examiners = [Worker("fusion_examiner.py", (), core, timeout) for core in (0, 1)]
        self._racer = Worker("fusion_examiner.py", (), 0, timeout=900)
        self._pool = ThreadPoolExecutor(2)

    def run(self, entry: Entry, architecture: str, folder: Path) -> list[Row]:
        """Run all tools and return a row for each; results are written to `target_of`."""
        lanes = [[tool for tool in self.workers if _core(tool) == core] for core in (0, 1)]
        working = [self._pool.submit(self._work, t, entry, architecture, folder) for t in lanes]
        rows = [row for lane in working for row in lane.result()]
        halves = zip((rows[::2], rows[1::2]), self._examiners, strict=True)
        looking = [self._pool.submit(_examine, half, entry, folder, by) for half, by in halves]
        for half in looking:
            half.result()
        order = list(self.workers)
        return sorted(rows, key=lambda row: order.index(row.tool))

    def race(self, entry: Entry, rows: Sequence[Row], folder: Path, rounds: int) -> dict[str, Any]:
        """Measure the latencies of the original and of all correct results, without other load."""
        return self._racer.ask(
            {
                "kind": "race",
                "source": str(entry.path),
                "results": {r.tool: str(target_of(r.tool, folder)) for r in rows if r.agrees},
                "inputs": [asdict(each) for each in entry.inputs],
                "rounds": rounds,
                "clock": self.clock,
            }
        )

    def close(self) -> None:
        for worker in (*self.workers.values(), *self._examiners, self._racer):
            worker.close()
        self._pool.shutdown()

    def _work(
        self, tools: Sequence[str], entry: Entry, architecture: str, folder: Path
    ) -> list[Row]:
        rows: list[Row] = []
        for tool in tools:
            target = target_of(tool, folder)
            target.parent.mkdir()
            answer = self.workers[tool].ask(
                {
                    "source": str(entry.path),
                    "target": str(target),
                    "architecture": architecture,
                    "clock": self.clock,
                    "repeats": REPEATS if TOOLS[tool].repeated else 1,
                }
            )
            seconds, reason = answer.get("seconds", 0), answer.get("error", "")
            rows.append(Row(entry.name, tool, seconds, reason=reason))
        return rows


def target_of(tool: str, folder: Path) -> Path:
    """Return the path of a tool's result."""
    return folder / tool / "model.onnx"


def _core(tool: str) -> int:
    return 0 if TOOLS[tool].repeated else 1


def _examine(rows: Sequence[Row], entry: Entry, folder: Path, examiner: Worker) -> None:
    """Examine the results and fill in the rows."""
    for row in rows:
        if row.reason:
            continue
        answer = examiner.ask(
            {
                "kind": "examine",
                "source": str(entry.path),
                "target": str(target_of(row.tool, folder)),
                "inputs": [asdict(each) for each in entry.inputs],
            }
        )
        if "nodes" not in answer:
            row.reason = answer["error"]
            continue
        row.nodes, row.agrees, row.error = answer["nodes"], answer["agrees"], answer["error"]
        row.found = {kind: answer[kind] for kind in KINDS}
        row.foreign, row.reason = answer["foreign"], answer["reason"]
