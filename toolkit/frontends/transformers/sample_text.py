"""Feeds of real text, by the checkpoint's own tokenizer, and the user's own example.

The example is a text, a list of texts, or arrays by input name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from toolkit.errors import UsageError, summarize
from toolkit.feeds.user_samples import Feed
from toolkit.frontends.transformers.checkpoint import Checkpoint

if TYPE_CHECKING:
    from toolkit.frontends.transformers.blueprints import Blueprint

_TEXTS = (
    "Where did the ship go after the storm?",
    "It went on.",
    "The harbour was closed for three days in March 2019, and no ship came in or went out.",
)


def feeds_for(graph: Blueprint, checkpoint: Checkpoint, example: Any) -> dict[str, Feed]:
    """Feeds by what is special about them; the example must fit, a tokenizer may not."""
    found: dict[str, Feed] = {}
    names = graph.interface.names
    written = set(names) <= {"input_ids", "attention_mask", "token_type_ids"}
    if checkpoint.tokenizer is not None and written:
        try:
            found["real text"] = _encoded(checkpoint, names, list(_TEXTS))
        except Exception:  # tokenizers raise anything, as without a padding token: then one text
            found["real text"] = _encoded(checkpoint, names, list(_TEXTS[:1]))
    if example is None:
        return found
    if isinstance(example, Mapping):
        given = cast("Mapping[str, Any]", example)
        if set(given) != set(names):
            raise UsageError(
                f"the example has {', '.join(given)}, but the {graph.name} takes {', '.join(names)}"
            )
        found["the example"] = {name: np.asarray(given[name]) for name in names}
        return found
    texts: list[Any] = [example] if isinstance(example, str) else list(example)
    if checkpoint.tokenizer is None or not written or not all(isinstance(t, str) for t in texts):
        raise UsageError(
            f"an example for the {graph.name} is a dict of arrays ({', '.join(names)})"
            + (", or text" if written and checkpoint.tokenizer is not None else "")
        )
    try:
        found["the example"] = _encoded(checkpoint, names, texts)
    except Exception as error:  # as above
        raise UsageError(f"the tokenizer refuses the example: {summarize(error)}") from error
    return found


def _encoded(checkpoint: Checkpoint, names: tuple[str, ...], texts: list[str]) -> Feed:
    """Texts as the tokenizer writes them; several are padded to one length."""
    from toolkit.frontends.transformers.inputs import words_of

    longest = words_of(checkpoint.model, checkpoint.tokenizer).longest
    made = checkpoint.tokenizer(
        texts,
        padding=len(texts) > 1,
        truncation=True,
        max_length=longest,
        return_tensors="np",
    )
    return {name: np.asarray(made[name], dtype=np.int64) for name in names}
