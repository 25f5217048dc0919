"""Test inputs of real text, by the checkpoint's tokenizer, and the user's example.

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
    """Return feeds by label; raise UsageError if the example does not fit the graph."""
    found: dict[str, Feed] = {}
    names = graph.interface.names
    is_text = checkpoint.tokenizer is not None and (
        set(names) <= {"input_ids", "attention_mask", "token_type_ids"}
    )
    if is_text:
        try:
            found["real text"] = _encoded(checkpoint, names, list(_TEXTS))
        except Exception:  # without a padding token, say: tokenizers may raise anything
            found["real text"] = _encoded(checkpoint, names, list(_TEXTS[:1]))
    if example is None:
        return found
    if isinstance(example, Mapping):
        given = cast("Mapping[str, Any]", example)
        if set(given) != set(names):
            raise UsageError(
                f"the example has {', '.join(given)}, but the inputs of the {graph.name} are "
                f"{', '.join(names)}"
            )
        found["the example"] = {name: np.asarray(given[name]) for name in names}
        return found
    texts: list[Any] = [example] if isinstance(example, str) else list(example)
    if not is_text or not all(isinstance(t, str) for t in texts):
        raise UsageError(
            f"the example for the {graph.name} must be a dict of arrays ({', '.join(names)})"
            + (", or text" if is_text else "")
        )
    try:
        found["the example"] = _encoded(checkpoint, names, texts)
    except Exception as error:  # as above
        raise UsageError(f"the tokenizer fails on the example: {summarize(error)}") from error
    return found


def _encoded(checkpoint: Checkpoint, names: tuple[str, ...], texts: list[str]) -> Feed:
    """Tokenize texts, padded to a common length if there are several."""
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
