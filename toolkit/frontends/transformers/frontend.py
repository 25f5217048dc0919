"""The transformers front end: a checkpoint folder, a .gguf file, a model, or (model, tokenizer).

The checkpoint is loaded for a task, wrapped into modules with declared inputs and outputs, and each
of these is exported by one of several strategies.
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
    """Exports models and checkpoints of transformers."""

    name: str = "transformers"
    supports: tuple[str, ...] = ("task", "exporter", "translations")

    def takes(self, source: object) -> bool:
        return is_checkpoint(source)

    def plan(self, source: Any, request: Request, scratch: Path) -> ExportPlan:
        """Plan the graphs of the requested task, or of the one that the config implies."""
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
        plans = [CheckpointGraphPlan(g, request, scratch, texts[g.name]) for g in graphs]
        task = "" if request.task else f"task {checkpoint.choice.task}, from the config"
        more = f"exported without a cache: --task {WITH_PAST} exports it with one" if cached else ""
        notes = tuple(filter(None, [task, more, *checkpoint.notes]))
        return ExportPlan(plans, checkpoint.companions, notes)


def _require_installed() -> None:
    missing = [name for name in ("torch", "transformers") if find_spec(name) is None]
    if missing:
        raise UsageError(
            f"transformers checkpoints need {' and '.join(missing)}: {install('export')}"
        )


FRONT_END = TransformersFrontEnd()
