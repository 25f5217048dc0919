"""Measure the operator forms that `lower` and `quantize` choose from, for their cost tables.

    python benchmarks/kernel_forms.py                      # print, write results/kernel-forms-X.md
    python benchmarks/kernel_forms.py --write              # and passes/lower/data/X.json
    python benchmarks/kernel_forms.py --only mish attention --seconds 10
    python benchmarks/kernel_forms.py --int8 --threads 1   # int8 kernels against float; int8-X.md

X is the vendor of the processor: amd, intel or other.

The forms are in passes/lower/candidates.py and passes/quantize/search/int8_kernels.py, the timing
is in passes/lower/measure.py, which `toolkit tune` uses as well. The table lists the operators that
onnxruntime executed for each form, and marks a form that it replaced at load time. With `--only`
and `--write`, only these computations of the shipped table are replaced; it must be of the same
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
    parser.add_argument("--int8", action="store_true", help="measure int8 kernels")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="measure only these computations")
    parser.add_argument("--seconds", type=float, default=240.0, help="approximate total time")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--write", action="store_true", help="replace the shipped table")
    given = parser.parse_args()
    computations = INT8_COMPUTATIONS if given.int8 else COMPUTATIONS
    folder, result = (INT8_SHIPPED, "int8") if given.int8 else (SHIPPED, "kernel-forms")
    shipped = shipped_path(folder, cpu_name())
    unknown = sorted(set(given.only or ()) - {c.name for c in computations})
    if unknown:
        parser.error(f"'{unknown[0]}' is not one of {', '.join(c.name for c in computations)}")
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
    """Return one table per computation: the time of the usual form, and the speedup of others."""
    lines = [
        "# Cost of operator forms",
        "",
        f"onnxruntime {costs.runtime}, {costs.cpu}; default session options; by {costs.script}.",
        "The usual form comes first, in microseconds; the other rows are speedups over it.",
        "Columns are tokens x width @ threads.",
    ]
    for name, forms in costs.computations.items():
        regimes: list[Regime] = sorted(forms[0].cost, key=lambda r: (r.threads, r.tokens, r.width))
        lines += ["", f"## {name}", ""]
        lines.append("| form | runs as | " + " | ".join(map(str, regimes)) + " |")
        lines.append("|---|---|" + "---:|" * len(regimes))
        for index, form in enumerate(forms):
            cells = [
                f"{form.microseconds[r]:.1f} us" if not index else f"{1 / form.cost[r]:.2f}x"
                for r in regimes
            ]
            runs = ", ".join(run.removeprefix("com.microsoft") for run in form.runs)
            mark = " (replaced)" if form.undone else ""
            lines.append(f"| {form.name}{mark} | {runs} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _show(done: int, total: int, what: str) -> None:
    print(f"\r{done}/{total} {what:<50}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
