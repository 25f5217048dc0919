"""Export many architectures and write a table of the results.

    python benchmarks/export.py [--cache DIR] [--rows PATTERN ...] [--exporters NAME ...]
                                [--again] [--timeout SECONDS]

Every row of `export_models.py` is saved as a checkpoint and exported twice, with dynamo and with
TorchScript, each in a separate process. Results stay in the cache, so that an interrupted run
continues where it stopped; the table is `benchmarks/results/export.md`. Failures are rows, too.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import argparse
import fnmatch
import importlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from export_models import ROWS, Row

HERE = Path(__file__).resolve().parent
DEFAULT_CACHE = HERE.parent / ".cache" / "export"
RESULTS = HERE / "results" / "export.md"
EXPORTERS = ("dynamo", "torchscript")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cache", type=Path, default=DEFAULT_CACHE)
    parser.add_argument("--rows", nargs="+", default=["*"], metavar="PATTERN")
    parser.add_argument("--exporters", nargs="+", default=EXPORTERS, choices=EXPORTERS)
    parser.add_argument("--again", action="store_true", help="do not take results from the cache")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one row")
    arguments = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    _import()
    arguments.cache.mkdir(parents=True, exist_ok=True)
    for row in ROWS:
        if any(fnmatch.fnmatch(row.name, pattern) for pattern in arguments.rows):
            for exporter in arguments.exporters:
                note = arguments.cache / f"{row.name}-{exporter}.json"
                if arguments.again or not note.exists():
                    note.write_text(json.dumps(isolated(row, exporter, arguments.timeout)))
                result = json.loads(note.read_text())
                print(f"{row.name:48} {result['asked']:12} {shown(result)}", flush=True)
    RESULTS.write_text(table(arguments.cache), encoding="utf-8")
    return 0


def isolated(row: Row, exporter: str, timeout: float) -> dict[str, Any]:
    """Measure a row in a forked child, which inherits all imports."""
    context = multiprocessing.get_context("fork")
    given, taken = context.Pipe(duplex=False)
    child = context.Process(target=lambda: taken.send(measure(row, exporter)))
    child.start()
    taken.close()
    try:
        if not given.poll(timeout):
            return _failed(exporter, f"not done after {timeout:.0f} s")
        return given.recv()
    except EOFError:
        child.join()
        return _failed(exporter, f"the exporting process died (exit code {child.exitcode})")
    finally:
        child.kill()
        child.join()


def _import() -> None:
    """Import the packages that every child needs, once before forking."""
    for name in (
        "onnxruntime",
        "onnxscript",
        "torch.onnx",
        "torch.export",
        "torch._dynamo",
        "transformers.modeling_utils",
        "transformers.models.auto.modeling_auto",
        "toolkit.frontends.transformers.strategies",
    ):
        importlib.import_module(name)


def measure(row: Row, exporter: str) -> dict[str, Any]:
    """Save the checkpoint, then export it; runs in the child."""
    with tempfile.TemporaryDirectory() as folder:
        row.save(Path(folder))
        return _export(Path(folder), row.task, exporter)


def _export(folder: Path, task: str, exporter: Any) -> dict[str, Any]:
    from toolkit import export
    from toolkit.errors import ToolkitError

    started = time.process_time()
    try:
        exported = export(folder, task=task, exporter=exporter)
    except ToolkitError as error:
        return {**_failed(exporter, str(error)), "seconds": time.process_time() - started}
    graphs = list(exported.graphs.values())
    notes = [note for graph in graphs for note in graph.notes if "fixed" in note or "eager" in note]
    return {
        "asked": exporter,
        "nodes": [graph.model.node_count() for graph in graphs],
        "parity": max(graph.proof.error for graph in graphs),
        "inputs": sum(len(graph.proof.runs) for graph in graphs),
        "seconds": time.process_time() - started,
        "reason": "",
        "notes": list(dict.fromkeys(notes)),
    }


def _failed(exporter: str, reason: str) -> dict[str, Any]:
    line = " ".join(reason.split())
    return {"asked": exporter, "nodes": [], "parity": None, "reason": line[:300], "seconds": 0.0}


def shown(result: dict[str, Any]) -> str:
    if result["reason"]:
        return f"failed: {result['reason']}"
    nodes = " + ".join(map(str, result["nodes"]))
    return f"{nodes:>16} nodes  {result['parity']:.1e}  {result['seconds']:.1f} s"


def table(cache: Path) -> str:
    """Return all rows with results as Markdown."""
    lines = [
        "# Exports of transformers architectures",
        "",
        "Written by `benchmarks/export.py`: checkpoints of random weights, two layers of real"
        " width, exported by task and proven against PyTorch at batch 1, 2 and 5, short and long,"
        " with padding."
        " Parity is the largest difference relative to the output's scale, over all graphs and"
        " inputs; seconds are of one core, for export and proof.",
        "",
        "| architecture | task | exporter | nodes | parity | seconds | remarks |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in ROWS:
        for exporter in EXPORTERS:
            note = cache / f"{row.name}-{exporter}.json"
            if note.exists():
                lines.append(_line(row, json.loads(note.read_text())))
    return "\n".join(lines) + "\n"


def _line(row: Row, result: dict[str, Any]) -> str:
    nodes = " + ".join(map(str, result["nodes"])) or "-"
    parity = "-" if result["parity"] is None else f"{result['parity']:.1e}"
    remarks = result["reason"] and f"failed: {result['reason']}"
    remarks = remarks or "; ".join(result.get("notes", ()))
    cells = (
        row.architecture,
        row.task,
        result["asked"],
        nodes,
        parity,
        f"{result['seconds']:.1f}",
        remarks.replace("|", "\\|"),
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
