"""The architectures of the export benchmark: two layers of real width where it matters, random.

Every row is a task and an architecture that has it, as a transformers class and its configuration;
nothing is downloaded. Vocabularies are small, to keep embedding tables small.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VOCABULARY = 1000
LABELS = 5


@dataclass(frozen=True, slots=True)
class Row:
    """The specification of a checkpoint; `parts` are sub-configurations by config class."""

    architecture: str
    task: str
    model: str
    settings: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, tuple[str, dict[str, Any]]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.architecture}-{self.task}"

    def save(self, folder: Path) -> None:
        """Build the model with seeded weights and save it as a checkpoint."""
        import torch
        import transformers

        torch.manual_seed(0)
        kind = getattr(transformers, self.model)
        parts = {key: getattr(transformers, name)(**s) for key, (name, s) in self.parts.items()}
        model = kind(kind.config_class(**self.settings, **parts)).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.02)
            for part in model.modules():
                if isinstance(part, torch.nn.BatchNorm2d):
                    part.get_buffer("running_mean").normal_(std=0.1)
                    part.get_buffer("running_var").uniform_(0.5, 1.5)
        model.save_pretrained(folder)


_LAYERS = {
    "num_hidden_layers": 2,
    "hidden_size": 384,
    "num_attention_heads": 6,
    "intermediate_size": 1536,
    "num_labels": LABELS,
}
_BERT = {**_LAYERS, "vocab_size": VOCABULARY, "num_attention_heads": 12}
_DISTIL = {"vocab_size": VOCABULARY, "n_layers": 2, "dim": 384, "hidden_dim": 1536}
_DEBERTA = {
    **_BERT,
    "relative_attention": True,
    "position_buckets": 32,
    "pos_att_type": ["p2c", "c2p"],
}
_MODERN = {
    **_LAYERS,
    "vocab_size": VOCABULARY,
    "num_hidden_layers": 3,
    "intermediate_size": 576,
    "local_attention": 32,
    **dict.fromkeys(("pad_token_id", "bos_token_id"), 0),
    **dict.fromkeys(("cls_token_id", "sep_token_id", "eos_token_id"), 1),
}
_ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_LLAMA = {
    **_LAYERS,
    **_ENDS,
    "vocab_size": VOCABULARY,
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
_GPT2 = {**_ENDS, "vocab_size": VOCABULARY, "n_layer": 2, "n_embd": 384, "n_head": 6}
_WIDE = {"head_dim": 64}
_BART = {
    "vocab_size": VOCABULARY,
    "d_model": 384,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 6,
    "decoder_attention_heads": 6,
    "encoder_ffn_dim": 1536,
    "decoder_ffn_dim": 1536,
}
_MARIAN = {**_BART, "pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0}
_LED = {**_BART, "attention_window": 32, "max_decoder_position_embeddings": 128}
_LED |= {"max_encoder_position_embeddings": 128}
_T5 = {"vocab_size": VOCABULARY, "num_layers": 2, "num_decoder_layers": 2, "d_model": 384}
_T5 |= {"num_heads": 6, "d_kv": 64, "d_ff": 1024, "decoder_start_token_id": 0}
_WHISPER = {**_BART, **_ENDS, "max_source_positions": 200, "decoder_start_token_id": 1}
_TROCR = {
    "vocab_size": VOCABULARY,
    "d_model": 384,
    "decoder_layers": 2,
    "decoder_attention_heads": 6,
    "decoder_ffn_dim": 1536,
    "cross_attention_hidden_size": 384,
}
_RESNET = {"depths": [1, 1, 1, 1], "layer_type": "bottleneck", "num_labels": LABELS}
_BACKBONE = ("ResNetConfig", {**_RESNET, "out_features": ["stage4"]})
_DETR = {
    "use_timm_backbone": False,
    "backbone": None,
    "use_pretrained_backbone": False,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_labels": LABELS,
    "num_queries": 20,
}
_WAV2VEC2 = {**_LAYERS, "vocab_size": 40}
_CLIP_TEXT = {
    **_LAYERS,
    **_ENDS,
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
    "eos_token_id": 999,
}
_CLIP_VISION = {**_LAYERS, "image_size": 224, "patch_size": 32}

_MODELS: dict[str, list[tuple[Any, ...]]] = {
    "default": [
        ("bert", "BertModel", _BERT),
        ("deberta-v2", "DebertaV2Model", _DEBERTA),
        ("modernbert", "ModernBertModel", _MODERN),
        ("longformer", "LongformerModel", {**_BERT, "attention_window": 32}),
    ],
    "pooling": [
        ("xlm-roberta", "XLMRobertaModel", _BERT),
        ("mpnet", "MPNetModel", _BERT),
        ("t5", "T5Model", _T5),
    ],
    "question-answering": [
        ("bert", "BertForQuestionAnswering", {**_BERT, "num_labels": 2}),
        ("distilbert", "DistilBertForQuestionAnswering", _DISTIL),
    ],
    "text-classification": [
        ("roberta", "RobertaForSequenceClassification", _BERT),
        ("albert", "AlbertForSequenceClassification", _BERT),
        ("gpt2", "GPT2ForSequenceClassification", _GPT2),
    ],
    "zero-shot-classification": [
        ("bart", "BartForSequenceClassification", _BART),
        ("deberta-v2", "DebertaV2ForSequenceClassification", _DEBERTA),
    ],
    "token-classification": [
        ("electra", "ElectraForTokenClassification", _BERT),
        ("layoutlm", "LayoutLMForTokenClassification", _BERT),
        ("canine", "CanineForTokenClassification", {**_LAYERS, "num_hash_buckets": 512}),
    ],
    "fill-mask": [
        ("camembert", "CamembertForMaskedLM", _BERT),
        ("modernbert", "ModernBertForMaskedLM", _MODERN),
    ],
    "text-generation": [
        ("bloom", "BloomForCausalLM", {"vocab_size": VOCABULARY, "n_layer": 2}),
        ("qwen2", "Qwen2ForCausalLM", _LLAMA),
        ("mamba", "MambaForCausalLM", {**_BERT, "hidden_size": 256}),
        (
            "mamba2",
            "Mamba2ForCausalLM",
            {**_LAYERS, "vocab_size": VOCABULARY, "num_heads": 12, "head_dim": 64, "n_groups": 2},
        ),
    ],
    "text-generation-with-past": [
        ("gpt2", "GPT2LMHeadModel", _GPT2),
        ("llama", "LlamaForCausalLM", _LLAMA),
        ("qwen3", "Qwen3ForCausalLM", {**_LLAMA, **_WIDE}),
        ("mistral", "MistralForCausalLM", {**_LLAMA, "sliding_window": 16}),
        ("gemma3", "Gemma3ForCausalLM", {**_LLAMA, **_WIDE, "sliding_window": 16}),
        ("mixtral", "MixtralForCausalLM", {**_LLAMA, "num_local_experts": 4}),
        ("phi3", "Phi3ForCausalLM", _LLAMA),
        ("opt", "OPTForCausalLM", {**_BERT, "word_embed_proj_dim": 384}),
        ("gpt-neox", "GPTNeoXForCausalLM", {**_BERT, "num_attention_heads": 6}),
    ],
    "text2text-generation": [
        ("t5", "T5ForConditionalGeneration", _T5),
        ("bart", "BartForConditionalGeneration", _BART),
        ("marian", "MarianMTModel", _MARIAN),
        ("led", "LEDForConditionalGeneration", _LED),
    ],
    "image-to-text": [
        (
            "trocr",
            "VisionEncoderDecoderModel",
            {},
            {"encoder": ("ViTConfig", _LAYERS), "decoder": ("TrOCRConfig", _TROCR)},
        ),
    ],
    "image-classification": [
        ("vit", "ViTForImageClassification", _LAYERS),
        ("resnet", "ResNetForImageClassification", _RESNET),
        (
            "convnext",
            "ConvNextForImageClassification",
            {"depths": [1, 1, 2, 1], "hidden_sizes": [48, 96, 192, 384], "num_labels": LABELS},
        ),
        (
            "swin",
            "SwinForImageClassification",
            {"depths": [2, 2], "num_heads": [3, 6], "embed_dim": 96, "num_labels": LABELS},
        ),
        ("mobilenet-v2", "MobileNetV2ForImageClassification"),
    ],
    "image-feature-extraction": [
        ("dinov2", "Dinov2Model", _LAYERS),
        ("convnext", "ConvNextModel", {"depths": [1, 1, 1, 1]}),
        ("clip-vision", "CLIPVisionModel", _CLIP_VISION),
    ],
    "object-detection": [
        ("detr", "DetrForObjectDetection", _DETR, {"backbone_config": _BACKBONE}),
        (
            "yolos",
            "YolosForObjectDetection",
            {**_LAYERS, "image_size": [224, 288], "num_detection_tokens": 20},
        ),
    ],
    "semantic-segmentation": [
        (
            "segformer",
            "SegformerForSemanticSegmentation",
            {"depths": [1, 1, 1, 1], "hidden_sizes": [32, 64, 160, 256], "num_labels": LABELS},
        ),
        ("mobilevit", "MobileViTForSemanticSegmentation", {"num_labels": LABELS}),
    ],
    "audio-classification": [
        ("wav2vec2", "Wav2Vec2ForSequenceClassification", _WAV2VEC2),
        (
            "audio-spectrogram-transformer",
            "ASTForAudioClassification",
            {**_LAYERS, "max_length": 256},
        ),
    ],
    "automatic-speech-recognition": [
        ("hubert", "HubertForCTC", _WAV2VEC2),
        ("wavlm", "WavLMForCTC", _WAV2VEC2),
        ("wav2vec2", "Wav2Vec2ForCTC", {**_WAV2VEC2, "feat_extract_norm": "layer"}),
        ("whisper", "WhisperForConditionalGeneration", _WHISPER),
    ],
    "feature-extraction": [
        (
            "clip",
            "CLIPModel",
            {},
            {
                "text_config": ("CLIPTextConfig", _CLIP_TEXT),
                "vision_config": ("CLIPVisionConfig", _CLIP_VISION),
            },
        ),
        (
            "siglip",
            "SiglipModel",
            {},
            {
                "text_config": (
                    "SiglipTextConfig",
                    {
                        **_CLIP_TEXT,
                        "hidden_size": 384,
                        "projection_size": 384,
                        "num_attention_heads": 6,
                    },
                ),
                "vision_config": ("SiglipVisionConfig", _CLIP_VISION),
            },
        ),
    ],
}
"""By task: the architecture, the class, its settings and its parts."""

ROWS = tuple(
    Row(architecture, task, *how)
    for task, models in _MODELS.items()
    for architecture, *how in models
)
