"""Reject checkpoints that lack weights of the task, which would be random.

Unused missing weights, such as those of a pooler, are allowed: gradients show which ones are used.
"""

# pyright may run without torch, so its types are not checked.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from toolkit.errors import UsageError
from toolkit.frontends.transformers.blueprints import Blueprint
from toolkit.frontends.transformers.checkpoint import Checkpoint, is_sentence_model
from toolkit.frontends.transformers.tasks import infer
from toolkit.messages import first_of


def require_weights(checkpoint: Checkpoint, graphs: Sequence[Blueprint]) -> None:
    """Raise UsageError if an output of any graph depends on missing weights."""
    named = dict(checkpoint.model.named_parameters())
    missing = {name: named[name] for name in checkpoint.missing if name in named}
    if not missing:
        return
    used: list[str] = []
    for graph in graphs:
        used += [name for name in _used(graph, missing) if name not in used]
    if used:
        own = infer(checkpoint.model.config, sentences=is_sentence_model(checkpoint.folder))
        raise UsageError(
            f"the checkpoint has no weights for task '{checkpoint.choice.task}': "
            f"{first_of(used)} would be random; its own task is '{own}'"
        )


def _used(graph: Blueprint, missing: dict[str, torch.nn.Parameter]) -> list[str]:
    """Return the names of those parameters on which the graph's outputs depend."""
    parameters = list(graph.wrapper.parameters())
    before = [each.requires_grad for each in parameters]
    feed = graph.interface.feed(graph.interface.settings[0])
    try:
        for each in parameters:
            each.requires_grad_(False)
        for each in missing.values():
            each.requires_grad_(True)
        with torch.enable_grad():
            outputs = graph.wrapper(*(torch.from_numpy(feed[n]) for n in graph.wrapper.inputs))
            total: Any = sum(out.float().sum() for out in outputs)
            if not isinstance(total, torch.Tensor) or not total.requires_grad:
                return []
            found = torch.autograd.grad(total, list(missing.values()), allow_unused=True)
    finally:
        for each, flag in zip(parameters, before, strict=True):
            each.requires_grad_(flag)
    return [name for name, slope in zip(missing, found, strict=True) if slope is not None]
