"""The transformers front end: a checkpoint folder, a .gguf file, a model, or (model, tokenizer).

load for a task -> wrappers with declared inputs and outputs -> ways to export each
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from toolkit.errors import UsageError
from toolkit.extras import install
from toolkit.frontends.protocol import ExportPlan
from toolkit.frontends.request import Request
from toolkit.frontends.transformers.checkpoint import is_checkpoint, load
from toolkit.frontends.transformers.tasks import WITH_PAST


@dataclass(frozen=True, slots=True)
class TransformersFrontEnd:
    """Exports what transformers can load."""

    name: str = "transformers"
    supports: tuple[str, ...] = ("task", "exporter", "translations")

    def takes(self, source: object) -> bool:
        return is_checkpoint(source)

    def plan(self, source: Any, request: Request, scratch: Path) -> ExportPlan:
        """The graphs of the task that is asked for, or of the one that the config tells."""
        _require_installed()
        request.progress("loading the checkpoint")
        checkpoint = load(
            source, request.task, scratch, trust_remote_code=request.trust_remote_code
        )
        from toolkit.frontends.pytorch.exporters import quiet
        from toolkit.frontends.transformers.blueprints import blueprints, keeps_cache
        from toolkit.frontends.transformers.missing_weights import require_weights
        from toolkit.frontends.transformers.sample_text import feeds_for
        from toolkit.frontends.transformers.strategies import CheckpointGraphPlan

        with quiet():
            graphs = blueprints(checkpoint)
            require_weights(checkpoint, graphs)
            texts = {graph.name: feeds_for(graph, checkpoint, request.example) for graph in graphs}
            cached = request.task is None and keeps_cache(checkpoint)
        parts = [
            CheckpointGraphPlan(graph, request, scratch, texts[graph.name]) for graph in graphs
        ]
        task = "" if request.task else f"task {checkpoint.choice.task}, by the config"
        more = f"it has no cache: --task {WITH_PAST} exports one with it" if cached else ""
        notes = tuple(filter(None, [task, more, *checkpoint.notes]))
        return ExportPlan(parts, checkpoint.companions, notes)


def _require_installed() -> None:
    missing = [name for name in ("torch", "transformers") if find_spec(name) is None]
    if missing:
        raise UsageError(
            f"a checkpoint of transformers needs {' and '.join(missing)}: {install('export')}"
        )


FRONT_END = TransformersFrontEnd()
