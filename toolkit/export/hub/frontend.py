"""The transformers front end: a checkpoint folder, a .gguf file, a model, or (model, tokenizer).

load for a task -> wrappers with declared inputs and outputs -> ways to export each
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from toolkit.errors import UsageError
from toolkit.export.draft import Plan
from toolkit.export.hub.checkpoint import is_checkpoint, load
from toolkit.export.hub.tasks import WITH_PAST
from toolkit.export.request import Request
from toolkit.extras import install


@dataclass(frozen=True, slots=True)
class Hub:
    """Exports what transformers can load."""

    name: str = "transformers"
    answers: tuple[str, ...] = ("task", "exporter", "translations")

    def takes(self, source: object) -> bool:
        return is_checkpoint(source)

    def plan(self, source: Any, request: Request, scratch: Path) -> Plan:
        """The graphs of the task that is asked for, or of the one that the config tells."""
        _require_installed()
        request.progress("loading the checkpoint")
        checkpoint = load(
            source, request.task, scratch, trust_remote_code=request.trust_remote_code
        )
        from toolkit.export.hub.graphs import blueprints, keeps_cache
        from toolkit.export.hub.heads import require_weights
        from toolkit.export.hub.texts import feeds_for
        from toolkit.export.hub.ways import HubPart
        from toolkit.export.pytorch.writers import quiet

        with quiet():
            graphs = blueprints(checkpoint)
            require_weights(checkpoint, graphs)
            texts = {graph.name: feeds_for(graph, checkpoint, request.example) for graph in graphs}
            cached = request.task is None and keeps_cache(checkpoint)
        parts = [HubPart(graph, request, scratch, texts[graph.name]) for graph in graphs]
        task = "" if request.task else f"task {checkpoint.choice.task}, by the config"
        more = f"it has no cache: --task {WITH_PAST} exports one with it" if cached else ""
        notes = tuple(filter(None, [task, more, *checkpoint.notes]))
        return Plan(parts, checkpoint.companions, notes)


def _require_installed() -> None:
    missing = [name for name in ("torch", "transformers") if find_spec(name) is None]
    if missing:
        raise UsageError(
            f"a checkpoint of transformers needs {' and '.join(missing)}: {install('export')}"
        )


FRONT_END = Hub()
