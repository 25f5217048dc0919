"""The targets on a console, for `toolkit targets`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from toolkit.report.console import line
from toolkit.targets.releases import releases, runtime_version

if TYPE_CHECKING:
    from toolkit.targets import Target


def print_targets(out: Console, targets: Sequence[Target]) -> None:
    """Print the capabilities of each target, and the known releases of onnxruntime."""
    for target in targets:
        missing = target.missing()
        measured = "with its own cost model" if target.has_costs else "without a cost model"
        line(out, target.name, target.summary)
        line(out, "  loads", f"up to opset {target.max_opset}, IR {target.max_ir}")
        line(out, "  domains", ", ".join(domain or "ai.onnx" for domain in target.domains))
        line(out, "  numbers", ", ".join(target.number_formats))
        line(out, "  here", f"not: {missing}" if missing else f"runs and is timed, {measured}")
        out.print()
    known = ", ".join(release.version for release in releases())
    line(out, "--runtime", f"{known} (onnxruntime {runtime_version()} is installed)")
