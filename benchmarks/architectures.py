"""The transformer architectures of the fusion benchmark: two layers of real width, random weights.

Every architecture is built from its transformers configuration with a given attention
implementation (`sdpa` or `eager`), since that determines the exported graph. Vocabularies are
small, because embedding tables have nothing to fuse.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from inputs import Input
from networks import TOKENS, FirstOutput, Network, image, text
from torch import Tensor, nn

VOCABULARY = 1000
LAYERS = 2
ATTENTIONS = ("sdpa", "eager")
EAGER = ("eager",)
IDS = Input("input_ids", TOKENS, below=VOCABULARY)
WORDS = text(VOCABULARY)


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model to build with either attention, and the number of fusions expected in it.

    `attention`, `norms` and `gelus` count the layers of each kind that the first output depends on:
    layers used only by a pooler are not exported. `attentions` lists the implementations.
    """

    build: Callable[[str], nn.Module]
    inputs: tuple[Input, ...]
    attention: int
    norms: int
    gelus: int
    attentions: tuple[str, ...] = ATTENTIONS

    def network(self, attention: str) -> Network:
        """Return the network with one attention implementation."""
        return Network(lambda: self.build(attention), self.inputs)


def _hugging_face(
    model: str,
    inputs: tuple[Input, ...],
    counts: tuple[int, int, int],
    part: Callable[[Any], nn.Module] = lambda model: model,
    fixed: Mapping[str, Any] | None = None,
    attentions: tuple[str, ...] = ATTENTIONS,
    **settings: Any,
) -> Architecture:
    """Return the architecture of a transformers class, built from its declared config class."""

    def build(implementation: str) -> nn.Module:
        model_class = getattr(transformers, model)
        config = model_class.config_class(**settings)
        config._attn_implementation = implementation
        names = tuple(each.name for each in inputs)
        return FirstOutput(part(model_class(config)), names, **(fixed or {}))

    return Architecture(build, inputs, *counts, attentions)


class SelfAttention(nn.Module):
    """PyTorch's nn.MultiheadAttention as self-attention."""

    def __init__(self, width: int = 256, heads: int = 8) -> None:
        super().__init__()
        torch.backends.mha.set_fastpath_enabled(False)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


def _encoder_layer() -> nn.Module:
    torch.backends.mha.set_fastpath_enabled(False)
    layer = nn.TransformerEncoderLayer(256, 8, 1024, activation="gelu", batch_first=True)
    return nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)


def _deep_bert(layers: int) -> Architecture:
    """A narrow BERT of any depth, to measure how the time of `fuse` grows with the graph."""
    counts = layers, 2 * layers + 1, layers
    sizes: dict[str, Any] = {**_BERT, "num_hidden_layers": layers}
    sizes |= {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
    return _hugging_face("BertModel", WORDS, counts, **sizes)


def _states(width: int) -> Input:
    return Input("encoder_hidden_states", ("batch", "source", width))


_BERT: dict[str, Any] = {"vocab_size": VOCABULARY, "num_hidden_layers": LAYERS}
_LLAMA: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "num_hidden_layers": LAYERS,
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
_BART: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 768,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": 12,
    "decoder_attention_heads": 12,
}
_T5: dict[str, Any] = {"vocab_size": VOCABULARY, "num_layers": LAYERS, "num_decoder_layers": LAYERS}
_WHISPER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 384,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": 6,
    "decoder_attention_heads": 6,
    "encoder_ffn_dim": 1536,
    "decoder_ffn_dim": 1536,
    "max_source_positions": 200,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}

NO_CACHE = {"use_cache": False}


def _encoder(model: Any) -> nn.Module:
    return model.get_encoder()


def _decoder(model: Any) -> nn.Module:
    return model.get_decoder()


ARCHITECTURES: dict[str, Architecture] = {
    "bert": _hugging_face("BertModel", WORDS, (2, 5, 2), **_BERT),
    "roberta": _hugging_face("RobertaModel", WORDS, (2, 5, 2), **_BERT),
    "distilbert": _hugging_face(
        "DistilBertModel", WORDS, (2, 5, 2), vocab_size=VOCABULARY, n_layers=LAYERS
    ),
    "electra": _hugging_face("ElectraModel", WORDS, (2, 5, 2), **_BERT),
    "albert": _hugging_face(
        "AlbertModel",
        WORDS,
        (2, 5, 2),
        hidden_size=768,
        num_attention_heads=12,
        intermediate_size=3072,
        **_BERT,
    ),
    "bart-encoder": _hugging_face("BartModel", WORDS, (2, 5, 2), _encoder, **_BART),
    "bart-decoder": _hugging_face(
        "BartModel", (IDS, _states(768)), (4, 7, 2), _decoder, NO_CACHE, **_BART
    ),
    "t5-encoder": _hugging_face("T5EncoderModel", WORDS, (2, 5, 0), **_T5),
    "t5-decoder": _hugging_face(
        "T5Model", (IDS, _states(512)), (4, 7, 0), _decoder, NO_CACHE, **_T5
    ),
    "gpt2": _hugging_face(
        "GPT2Model", WORDS, (2, 5, 2), fixed=NO_CACHE, vocab_size=VOCABULARY, n_layer=LAYERS
    ),
    "llama": _hugging_face("LlamaModel", WORDS, (2, 5, 0), fixed=NO_CACHE, **_LLAMA),
    "qwen3": _hugging_face("Qwen3Model", WORDS, (2, 9, 0), fixed=NO_CACHE, head_dim=64, **_LLAMA),
    "gemma": _hugging_face("GemmaModel", WORDS, (2, 5, 2), fixed=NO_CACHE, head_dim=64, **_LLAMA),
    "modernbert": _hugging_face(
        "ModernBertModel",
        WORDS,
        (2, 5, 2),
        vocab_size=VOCABULARY,
        num_hidden_layers=LAYERS,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
        **dict.fromkeys(("cls_token_id", "sep_token_id"), 1),
    ),
    "vit": _hugging_face("ViTModel", image(224), (2, 5, 2), num_hidden_layers=LAYERS),
    # CLIP's gelu is the quick one, x * sigmoid(1.702 x), for which there is no standard operator.
    "clip-text": _hugging_face(
        "CLIPTextModel",
        WORDS,
        (2, 5, 0),
        vocab_size=VOCABULARY,
        num_hidden_layers=LAYERS,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "clip-vision": _hugging_face(
        "CLIPVisionModel", image(224), (2, 5, 0), num_hidden_layers=LAYERS
    ),
    "whisper-encoder": _hugging_face(
        "WhisperModel",
        (Input("input_features", ("batch", 80, 400)),),
        (2, 5, 4),
        _encoder,
        **_WHISPER,
    ),
    "whisper-decoder": _hugging_face(
        "WhisperModel", (IDS, _states(384)), (4, 7, 2), _decoder, NO_CACHE, **_WHISPER
    ),
    "torch-encoder": Architecture(
        lambda _: _encoder_layer(),
        (Input("x", ("batch", "length", 256)),),
        *(2, 4, 2),
        attentions=("sdpa",),
    ),
    "torch-attention": Architecture(
        lambda _: SelfAttention(),
        (Input("x", ("batch", "length", 256)),),
        *(1, 0, 0),
        attentions=("sdpa",),
    ),
    # Not named by anybody's fusion list: what was learned above has to carry over.
    "mpnet": _hugging_face("MPNetModel", WORDS, (2, 5, 2), attentions=EAGER, **_BERT),
    "swin": _hugging_face(
        "SwinModel",
        image(224),
        (4, 11, 4),
        depths=[2, 2],
        num_heads=[3, 6],
        embed_dim=96,
    ),
    "segformer": _hugging_face(
        "SegformerModel",
        image(128),
        (4, 19, 4),
        depths=[1, 1, 1, 1],
        hidden_sizes=[32, 64, 160, 256],
    ),
    "wav2vec2": _hugging_face(
        "Wav2Vec2Model",
        (Input("input_values", ("batch", 8000)),),
        (2, 7, 10),
        num_hidden_layers=LAYERS,
    ),
    "deberta": _hugging_face(
        "DebertaV2Model",
        WORDS,
        (2, 5, 2),
        attentions=EAGER,
        **{**_BERT, "num_attention_heads": 12},
        hidden_size=768,
        intermediate_size=3072,
        relative_attention=True,
        position_buckets=32,
        pos_att_type=["p2c", "c2p"],
    ),
    "dinov2": _hugging_face("Dinov2Model", image(224), (2, 5, 2), num_hidden_layers=LAYERS),
    "beit": _hugging_face("BeitModel", image(224), (2, 4, 2), num_hidden_layers=LAYERS),
    "mistral": _hugging_face("MistralModel", WORDS, (2, 5, 0), fixed=NO_CACHE, **_LLAMA),
    "phi": _hugging_face(
        "PhiModel", WORDS, (2, 3, 2), fixed=NO_CACHE, **{**_LLAMA, "num_key_value_heads": 8}
    ),
    "gpt-neox": _hugging_face(
        "GPTNeoXModel",
        WORDS,
        (2, 5, 2),
        fixed=NO_CACHE,
        **_BERT,
        hidden_size=512,
        num_attention_heads=8,
        intermediate_size=2048,
    ),
    "gptj": _hugging_face(
        "GPTJModel",
        WORDS,
        (2, 3, 2),
        fixed=NO_CACHE,
        attentions=EAGER,
        vocab_size=VOCABULARY,
        n_layer=LAYERS,
        n_embd=512,
        n_head=8,
        rotary_dim=32,
    ),
    "opt": _hugging_face(
        "OPTModel",
        WORDS,
        (2, 5, 0),
        fixed=NO_CACHE,
        **_BERT,
        hidden_size=768,
        num_attention_heads=12,
        ffn_dim=3072,
    ),
    "bloom": _hugging_face(
        "BloomModel",
        WORDS,
        (2, 6, 2),
        fixed=NO_CACHE,
        attentions=EAGER,
        vocab_size=VOCABULARY,
        n_layer=LAYERS,
        hidden_size=512,
        n_head=8,
    ),
}

DEPTHS = (2, 12, 24, 48)
DEEP = {f"bert-{layers}-layers": _deep_bert(layers) for layers in DEPTHS}
