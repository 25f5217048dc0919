"""Wrap transformers models into modules with exactly the inputs and outputs of a graph.

    graph inputs, by position  ->  Wrapper  ->  graph outputs, by position

Key/value caches are single tensors: `past_key_values.N.key` and `.value` as inputs,
`present.N.key` and `.value` as outputs. In an encoder-decoder, self- and cross-attention have
separate caches, `past_key_values.N.decoder.key` and `past_key_values.N.encoder.key`.
"""

# pyright may run without torch and transformers, so their types are not checked.
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from toolkit.frontends.transformers.tasks import Outputs


class Wrapper(nn.Module):
    """A model with named inputs and outputs."""

    def __init__(self, model: nn.Module, inputs: Sequence[str], outputs: Outputs) -> None:
        super().__init__()
        self.model, self.inputs, self.outputs = model, tuple(inputs), dict(outputs)

    def named(self, values: Sequence[Tensor]) -> dict[str, Tensor]:
        return dict(zip(self.inputs, values, strict=True))

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        raise NotImplementedError


class Plain(Wrapper):
    """The model's own outputs by name; `fixed` are constant arguments."""

    def __init__(self, model: Any, inputs: Sequence[str], outputs: Outputs, **fixed: Any) -> None:
        super().__init__(model, inputs, outputs)
        self.fixed = fixed

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        given = self.model(**self.named(values), **self.fixed, return_dict=True)
        return tuple(given[name] for name in self.outputs)


class Pooled(Wrapper):
    """One vector per sequence, computed by `head` from the hidden states and the mask."""

    def __init__(
        self, model: Any, head: nn.Module, inputs: Sequence[str], outputs: Outputs, **fixed: Any
    ) -> None:
        super().__init__(model, inputs, outputs)
        self.head, self.fixed = head, fixed

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        named = self.named(values)
        states = self.model(**named, **self.fixed, return_dict=True)[0]
        mask = named.get("attention_mask")
        if mask is None:
            mask = torch.ones_like(states[:, :, 0], dtype=torch.int64)
        return (self.head(states, mask),)


class Cached(Wrapper):
    """A decoder that continues from a cache, which may be empty.

    Positions are derived from the attention mask, as in transformers' generate(): padding on the
    left is not counted. Every layer keeps all keys; local attention is applied by its mask.
    """

    def __init__(
        self, model: Any, inputs: Sequence[str], outputs: Outputs, *, positions: bool
    ) -> None:
        super().__init__(model, inputs, outputs)
        self.positions = positions

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        named = self.named(values)
        ids, mask = named["input_ids"], named["attention_mask"]
        more = {"position_ids": positions(ids, mask)} if self.positions else {}
        given = self.model(
            input_ids=ids,
            attention_mask=mask,
            past_key_values=cache_of([v for n, v in named.items() if n.startswith("past_key")]),
            use_cache=True,
            return_dict=True,
            **more,
        )
        return (given.logits, *tensors_of(given.past_key_values))


def positions(ids: Tensor, mask: Tensor) -> Tensor:
    """Return the position of each token, counted from the first that is not padding."""
    past = mask.shape[1] - ids.shape[1]
    padding = (mask.cumsum(1) == 0).to(torch.int64).sum(1, keepdim=True)
    return ((torch.arange(ids.shape[1], device=ids.device) + past)[None] - padding).clamp(min=0)


def cache_of(tensors: Sequence[Tensor]) -> DynamicCache:
    """Return a cache of these tensors: key, value, key, value, ... by layer."""
    cache = DynamicCache()
    for layer in range(len(tensors) // 2):
        cache.update(tensors[2 * layer], tensors[2 * layer + 1], layer)
    return cache


def tensors_of(cache: Any) -> list[Tensor]:
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


# Encoder-decoders --------------------------------------------------------------------------------


class Encoder(Wrapper):
    """The encoder: hidden states of the source sequence."""

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        return (self.model(**self.named(values), return_dict=True)[0],)


class Decoder(Wrapper):
    """The decoder's first step: computes the caches from the encoder's hidden states."""

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        named = self.named(values)
        given = self.model(
            encoder_outputs=_encoded(named["encoder_hidden_states"]),
            attention_mask=named.get("encoder_attention_mask"),
            decoder_input_ids=named["input_ids"],
            use_cache=True,
            return_dict=True,
        )
        return (given.logits, *both_tensors_of(given.past_key_values))


class DecoderWithPast(Wrapper):
    """Every later step: keys and values of the source sequence come from the cache."""

    def __init__(self, model: Any, inputs: Sequence[str], outputs: Outputs, width: int) -> None:
        super().__init__(model, inputs, outputs)
        self.width = width

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        named = self.named(values)
        past = [v for n, v in named.items() if n.startswith("past_key_values")]
        own = [v for i, v in enumerate(past) if i % 4 < 2]
        cross = [v for i, v in enumerate(past) if i % 4 >= 2]
        cache = EncoderDecoderCache(cache_of(own), cache_of(cross))
        # only the shape of the source is used
        source = cross[0].new_zeros(1, 1, self.width)
        source = source.expand(cross[0].shape[0], cross[0].shape[2], -1)
        given = self.model(
            encoder_outputs=_encoded(source),
            attention_mask=named.get("encoder_attention_mask"),
            decoder_input_ids=named["input_ids"],
            past_key_values=cache,
            use_cache=True,
            return_dict=True,
        )
        return (given.logits, *tensors_of(given.past_key_values.self_attention_cache))


def _encoded(states: Any) -> BaseModelOutput:
    return BaseModelOutput(last_hidden_state=states)


def both_tensors_of(cache: Any) -> list[Tensor]:
    """Return keys and values of self-attention, then of cross-attention, by layer."""
    own, cross = tensors_of(cache.self_attention_cache), tensors_of(cache.cross_attention_cache)
    layers = range(len(own) // 2)
    return [t for i in layers for t in (*own[2 * i : 2 * i + 2], *cross[2 * i : 2 * i + 2])]
