"""Checkpoints of a few kilobytes, one for every task."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

WORDS = 60
TEXT: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
}
DECODER: dict[str, Any] = {
    **TEXT,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SEQ2SEQ: dict[str, Any] = {
    "vocab_size": WORDS,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
T5: dict[str, Any] = {
    "vocab_size": WORDS,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 1,
    "num_decoder_layers": 1,
    "num_heads": 2,
    "decoder_start_token_id": 0,
}
VISION: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "image_size": 32,
    "patch_size": 16,
}
RESNET: dict[str, Any] = {
    "embedding_size": 8,
    "hidden_sizes": [8, 16],
    "depths": [1, 1],
    "layer_type": "basic",
}
SPEECH: dict[str, Any] = {
    "vocab_size": 12,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "conv_dim": [8, 8],
    "conv_kernel": [10, 3],
    "conv_stride": [160, 2],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "feat_extract_norm": "layer",
    "classifier_proj_size": 8,
}
WHISPER: dict[str, Any] = {**SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 10}


def build(name: str, parts: dict[str, tuple[str, dict[str, Any]]] | None = None, **settings: Any):
    """A model of transformers by its class, from its configuration, with seeded weights."""
    import torch
    import transformers

    torch.manual_seed(0)
    kind = getattr(transformers, name)
    made = {key: getattr(transformers, c)(**s) for key, (c, s) in (parts or {}).items()}
    model = kind(kind.config_class(**settings, **made)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def clip():
    text = {**TEXT, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "projection_dim": 8}
    parts = {
        "text_config": ("CLIPTextConfig", text),
        "vision_config": ("CLIPVisionConfig", {**VISION, "projection_dim": 8}),
    }
    return build("CLIPModel", parts, projection_dim=8)


def reader():
    """A decoder that reads what an encoder of images saw, as TrOCR does."""
    decoder = {
        "vocab_size": WORDS,
        "d_model": 16,
        "decoder_layers": 1,
        "decoder_attention_heads": 2,
        "decoder_ffn_dim": 32,
        "cross_attention_hidden_size": 16,
    }
    parts = {"encoder": ("ViTConfig", VISION), "decoder": ("TrOCRConfig", decoder)}
    return build("VisionEncoderDecoderModel", parts)


def detr():
    backbone = {**RESNET, "out_features": ["stage2"]}
    return build(
        "DetrForObjectDetection",
        {"backbone_config": ("ResNetConfig", backbone)},
        use_timm_backbone=False,
        backbone=None,
        use_pretrained_backbone=False,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        num_queries=3,
        num_labels=3,
    )


def tokenizer(folder: Path | None = None):
    """A word tokenizer of the same vocabulary, with [CLS] and [SEP] around."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    names = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", *(f"w{i}" for i in range(4, WORDS))]
    words = Tokenizer(models.WordLevel({n: i for i, n in enumerate(names)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    made = PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )
    if folder is not None:
        made.save_pretrained(folder)
    return made


def sentences(folder: Path, modules: list[str], pooling: dict[str, Any]) -> Path:
    """A checkpoint as sentence-transformers writes it."""
    build("BertModel", **TEXT).save_pretrained(folder)
    listed = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
    ]
    for place, kind in enumerate(modules, 1):
        (folder / f"{place}_{kind}").mkdir()
        path, name = f"{place}_{kind}", f"sentence_transformers.models.{kind}"
        listed.append({"idx": place, "name": str(place), "path": path, "type": name})
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder
