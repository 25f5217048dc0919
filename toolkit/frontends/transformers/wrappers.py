"""Modules around transformers models that take and give exactly what a graph declares.

    graph inputs, by position  ->  Wrapper  ->  graph outputs, by position

Key/value caches come in and go out as single tensors: `past_key_values.N.key` and `.value`, and
`present.N.key` and `.value`. Of an encoder-decoder, self- and cross-attention have caches of their
own, `past_key_values.N.decoder.key` and `past_key_values.N.encoder.key`.
"""

# Runs only where torch and transformers are; types end at their border.
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
    """The model's own outputs, by name; `fixed` are arguments that are no inputs."""

    def __init__(self, model: Any, inputs: Sequence[str], outputs: Outputs, **fixed: Any) -> None:
        super().__init__(model, inputs, outputs)
        self.fixed = fixed

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        given = self.model(**self.named(values), **self.fixed, return_dict=True)
        return tuple(given[name] for name in self.outputs)


class Pooled(Wrapper):
    """One vector for each sequence: what `head` makes of the hidden states and the mask."""

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
    """A decoder that goes on from a cache, which may be empty.

    Positions follow from the attention mask, as in transformers' generate(): padding on the left
    is not counted. Every layer keeps all keys; where attention is local, the mask says so.
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
    """Where each token stands: counted from the first one that is not padding."""
    past = mask.shape[1] - ids.shape[1]
    padding = (mask.cumsum(1) == 0).to(torch.int64).sum(1, keepdim=True)
    return ((torch.arange(ids.shape[1], device=ids.device) + past)[None] - padding).clamp(min=0)


def cache_of(tensors: Sequence[Tensor]) -> DynamicCache:
    """A cache that holds key, value, key, value, ... layer by layer."""
    cache = DynamicCache()
    for layer in range(len(tensors) // 2):
        cache.update(tensors[2 * layer], tensors[2 * layer + 1], layer)
    return cache


def tensors_of(cache: Any) -> list[Tensor]:
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


# Encoder-decoders --------------------------------------------------------------------------------


class Encoder(Wrapper):
    """The encoder alone: hidden states of the source."""

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        return (self.model(**self.named(values), return_dict=True)[0],)


class Decoder(Wrapper):
    """The first step: no cache yet, the encoder's hidden states are read."""

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        named = self.named(values)
        given = self.model(
            encoder_outputs=_states(named["encoder_hidden_states"]),
            attention_mask=named.get("encoder_attention_mask"),
            decoder_input_ids=named["input_ids"],
            use_cache=True,
            return_dict=True,
        )
        return (given.logits, *both_tensors_of(given.past_key_values))


class DecoderWithPast(Wrapper):
    """Every later step: keys and values of the source come from the cache, for good."""

    def __init__(self, model: Any, inputs: Sequence[str], outputs: Outputs, width: int) -> None:
        super().__init__(model, inputs, outputs)
        self.width = width

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        named = self.named(values)
        past = [v for n, v in named.items() if n.startswith("past_key_values")]
        own = [v for i, v in enumerate(past) if i % 4 < 2]
        cross = [v for i, v in enumerate(past) if i % 4 >= 2]
        cache = EncoderDecoderCache(cache_of(own), cache_of(cross))
        # Only the shape of the source is still asked for.
        source = cross[0].new_zeros(1, 1, self.width)
        given = self.model(
            encoder_outputs=_states(source.expand(cross[0].shape[0], cross[0].shape[2], -1)),
            attention_mask=named.get("encoder_attention_mask"),
            decoder_input_ids=named["input_ids"],
            past_key_values=cache,
            use_cache=True,
            return_dict=True,
        )
        return (given.logits, *tensors_of(given.past_key_values.self_attention_cache))


def _states(hidden: Any) -> BaseModelOutput:
    return BaseModelOutput(last_hidden_state=hidden)


def both_tensors_of(cache: Any) -> list[Tensor]:
    """Key and value of self-attention, then of cross-attention, layer by layer."""
    own, cross = tensors_of(cache.self_attention_cache), tensors_of(cache.cross_attention_cache)
    layers = range(len(own) // 2)
    return [t for i in layers for t in (*own[2 * i : 2 * i + 2], *cross[2 * i : 2 * i + 2])]
