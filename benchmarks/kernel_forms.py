"""Measures the spellings that lowering and quantization choose from, and writes what ships.

    python benchmarks/spellings.py                      # print, and write results/spellings-X.md
    python benchmarks/spellings.py --write              # and passes/lower/data/X.json
    python benchmarks/spellings.py --only mish attention --seconds 10
    python benchmarks/spellings.py --int8 --threads 1   # int8 kernels against floats; int8-X.md

X is who made the processor: amd, intel or other.

The spellings are in passes/lower/spellings.py and passes/quantize/choice/int8_kernels.py, the
measuring is in passes/lower/measure.py, which `toolkit tune` uses too. What the runtime ran for
each spelling is part of the table: a spelling that it undid at load time is marked. With `--only`
what is written takes the place of these computations in the table, which must be of the same
runtime and processor.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from passes.lower.candidates import COMPUTATIONS
from passes.lower.cost_query import SHIPPED
from passes.lower.measure import measure
from passes.quantize.search.costs import INT8_SHIPPED
from passes.quantize.search.int8_kernels import INT8_COMPUTATIONS
from toolkit.runtime.cost_table import Costs, Regime, cpu_name, shipped_path

RESULTS = Path(__file__).resolve().parent / "results"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--int8", action="store_true", help="int8 kernels in place of spellings")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these computations alone")
    parser.add_argument("--seconds", type=float, default=240.0, help="time for all of it, about")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--write", action="store_true", help="replace the table that ships")
    given = parser.parse_args()
    computations = INT8_COMPUTATIONS if given.int8 else COMPUTATIONS
    folder, result = (INT8_SHIPPED, "int8") if given.int8 else (SHIPPED, "spellings")
    shipped = shipped_path(folder, cpu_name())
    unknown = sorted(set(given.only or ()) - {c.name for c in computations})
    if unknown:
        parser.error(f"'{unknown[0]}' is none of {', '.join(c.name for c in computations)}")
    chosen = [c for c in computations if not given.only or c.name in given.only]
    costs = measure(_show, given.seconds, given.threads, chosen)
    if given.only:
        if not given.write:
            print(as_markdown(costs))
            return 0
        before = Costs.load(shipped)
        if (before.runtime, before.cpu) != (costs.runtime, costs.cpu):
            parser.error(f"the table is of onnxruntime {before.runtime} on {before.cpu}")
        known = {**before.computations, **costs.computations}
        order = [c.name for c in computations if c.name in known]
        costs = replace(costs, computations={name: known[name] for name in order})
    text = as_markdown(costs)
    print(text)
    (RESULTS / f"{result}-{shipped.stem}.md").write_text(text, encoding="utf-8")
    if given.write:
        costs.save(shipped)
    return 0


def as_markdown(costs: Costs) -> str:
    """A table for each computation: microseconds of the usual spelling, and how much faster."""
    lines = [
        "# What spellings cost",
        "",
        f"onnxruntime {costs.runtime}, {costs.cpu}; default session options; by {costs.script}.",
        "The usual spelling comes first, in microseconds; the others as how many times faster they",
        "are. A column is tokens x width @ threads.",
    ]
    for name, spellings in costs.computations.items():
        regimes: list[Regime] = sorted(
            spellings[0].cost, key=lambda r: (r.threads, r.tokens, r.width)
        )
        lines += ["", f"## {name}", ""]
        lines.append("| spelling | runs as | " + " | ".join(map(str, regimes)) + " |")
        lines.append("|---|---|" + "---:|" * len(regimes))
        for index, spelling in enumerate(spellings):
            cells = [
                f"{spelling.microseconds[r]:.1f} us"
                if not index
                else f"{1 / spelling.cost[r]:.2f}x"
                for r in regimes
            ]
            runs = ", ".join(run.removeprefix("com.microsoft") for run in spelling.runs)
            mark = " (undone)" if spelling.undone else ""
            lines.append(f"| {spelling.name}{mark} | {runs} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _show(done: int, total: int, what: str) -> None:
    print(f"\r{done}/{total} {what:<50}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
