"""Every task exports from a checkpoint folder, with the names and dimensions that it declares."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoints as tiny

from toolkit import Exported, export

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("onnxscript")

pytestmark = pytest.mark.export

TEXT_INPUTS = ["input_ids", "attention_mask", "token_type_ids"]
B, S = "batch", "sequence"


def exported(folder: Path, model: Any, task: str | None, exporter: Any = "torchscript") -> Exported:
    model.save_pretrained(folder)
    done = export(folder, task=task, exporter=exporter)
    for graph in done.graphs.values():
        assert graph.proof.ok
        assert graph.proof.error <= 1e-4
        assert graph.exporter == exporter
    return done


def shapes(done: Exported, name: str = "model") -> tuple[dict[str, Any], dict[str, Any]]:
    """Inputs and outputs with their shapes, dynamic dimensions by name."""
    graph = done.graphs[name].model.graph

    def shape(value: str) -> list[Any]:
        return [d if isinstance(d, int) else str(d) for d in graph.shape(value) or ()]

    return {n: shape(n) for n in graph.feeds}, {n: shape(n) for n in graph.outputs}


@pytest.mark.parametrize(
    ("model", "settings", "task", "outputs"),
    [
        ("BertModel", {}, "default", {"last_hidden_state": [B, S, 16]}),
        ("BertModel", {}, "pooling", {"embeddings": [B, 16]}),
        (
            "BertForQuestionAnswering",
            {},
            "question-answering",
            {"start_logits": [B, S], "end_logits": [B, S]},
        ),
        (
            "BertForSequenceClassification",
            {"num_labels": 3},
            "text-classification",
            {"logits": [B, 3]},
        ),
        (
            "BertForSequenceClassification",
            {"num_labels": 3},
            "zero-shot-classification",
            {"logits": [B, 3]},
        ),
        (
            "BertForTokenClassification",
            {"num_labels": 4},
            "token-classification",
            {"logits": [B, S, 4]},
        ),
        ("BertForMaskedLM", {}, "fill-mask", {"logits": [B, S, tiny.WORDS]}),
    ],
)
def test_text(
    tmp_path: Path, model: str, settings: dict[str, Any], task: str, outputs: dict[str, Any]
) -> None:
    done = exported(tmp_path, tiny.build(model, **tiny.TEXT, **settings), task)
    found, given = shapes(done)
    assert found == {name: [B, S] for name in TEXT_INPUTS}
    assert given == outputs
    sizes = done.only.proof.sizes
    assert sizes["batch"] == [1, 2, 5]
    assert max(sizes["sequence"]) > 3 * min(sizes["sequence"])
    assert {run.label for run in done.only.proof.runs} >= {
        "padded on the left",
        "padded on the right",
    }


def test_inferred_from_the_architecture(tmp_path: Path) -> None:
    done = exported(tmp_path, tiny.build("BertForQuestionAnswering", **tiny.TEXT), None)
    assert list(done.only.model.graph.outputs) == ["start_logits", "end_logits"]
    assert any("question-answering" in note for note in done.notes)
    assert any("no tokenizer or processor was copied" in note for note in done.notes)


def test_text_generation(tmp_path: Path) -> None:
    done = exported(tmp_path, tiny.build("LlamaForCausalLM", **tiny.DECODER), None)
    found, given = shapes(done)
    assert found == {"input_ids": [B, S], "attention_mask": [B, S]}
    assert given == {"logits": [B, S, tiny.WORDS]}
    assert any("--task text-generation-with-past exports it with one" in n for n in done.notes)


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        # windows over memory, at lengths that are no multiple of the window
        ("LongformerModel", {**tiny.TEXT, "max_position_embeddings": 80, "attention_window": 4}),
        # a count of repetitions that follows from the length
        ("CanineModel", {**tiny.TEXT, "num_hash_buckets": 16, "num_hash_functions": 2}),
    ],
)
def test_lengths_that_are_computed_with(
    tmp_path: Path, model: str, settings: dict[str, Any]
) -> None:
    done = exported(tmp_path, tiny.build(model, **settings), "default")
    assert len(done.only.proof.sizes[S]) > 1


def test_image_to_text(tmp_path: Path) -> None:
    done = exported(tmp_path, tiny.reader(), None)
    assert list(done.graphs) == ["encoder", "decoder", "decoder_with_past"]
    assert shapes(done, "encoder")[0] == {"pixel_values": [B, 3, 32, 32]}
    assert list(shapes(done, "decoder")[0]) == ["input_ids", "encoder_hidden_states"]
    assert any("image-to-text" in note for note in done.notes)


def test_text2text_generation(tmp_path: Path) -> None:
    done = exported(tmp_path, tiny.build("T5ForConditionalGeneration", **tiny.T5), None)
    assert list(done.graphs) == ["encoder", "decoder", "decoder_with_past"]
    found, given = shapes(done, "encoder")
    assert found == {"input_ids": [B, S], "attention_mask": [B, S]}
    assert given == {"last_hidden_state": [B, S, 16]}
    found, given = shapes(done, "decoder")
    assert list(found) == ["input_ids", "encoder_attention_mask", "encoder_hidden_states"]
    assert given == {
        "logits": [B, S, tiny.WORDS],
        "present.0.decoder.key": [B, 2, S, 8],
        "present.0.decoder.value": [B, 2, S, 8],
        "present.0.encoder.key": [B, 2, "source", 8],
        "present.0.encoder.value": [B, 2, "source", 8],
    }
    found, given = shapes(done, "decoder_with_past")
    assert found["past_key_values.0.decoder.key"] == [B, 2, "past", 8]
    assert found["past_key_values.0.encoder.value"] == [B, 2, "source", 8]
    assert list(given) == ["logits", "present.0.decoder.key", "present.0.decoder.value"]


def test_image_classification_of_one_size(tmp_path: Path) -> None:
    done = exported(tmp_path, tiny.build("ViTForImageClassification", **tiny.VISION), None)
    found, given = shapes(done)
    assert found == {"pixel_values": [B, 3, 32, 32]}
    assert given == {"logits": [B, 2]}
    assert any("the model supports no other" in note for note in done.only.notes)


def test_image_classification_of_any_size(tmp_path: Path) -> None:
    done = exported(tmp_path, tiny.build("ResNetForImageClassification", **tiny.RESNET), None)
    found, _ = shapes(done)
    assert found == {"pixel_values": [B, 3, "height", "width"]}
    assert len(done.only.proof.sizes["width"]) > 1


def test_object_detection(tmp_path: Path) -> None:
    done = exported(tmp_path, tiny.detr(), None)
    _, given = shapes(done)
    assert given == {"logits": [B, 3, 4], "pred_boxes": [B, 3, 4]}


def test_semantic_segmentation(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "num_encoder_blocks": 2,
        "depths": [1, 1],
        "sr_ratios": [2, 1],
        "num_labels": 3,
    }
    settings |= {"hidden_sizes": [8, 16], "num_attention_heads": [1, 2], "patch_sizes": [7, 3]}
    settings |= {
        "strides": [4, 2],
        "mlp_ratios": [2, 2],
        "decoder_hidden_size": 16,
        "num_labels": 3,
    }
    done = exported(tmp_path, tiny.build("SegformerForSemanticSegmentation", **settings), None)
    _, given = shapes(done)
    assert given["logits"][:2] == [B, 3]


def test_image_feature_extraction(tmp_path: Path) -> None:
    done = exported(tmp_path, tiny.build("ViTModel", **tiny.VISION), None)
    assert shapes(done)[1] == {"last_hidden_state": [B, 5, 16]}


def test_audio_classification(tmp_path: Path) -> None:
    done = exported(tmp_path, tiny.build("Wav2Vec2ForSequenceClassification", **tiny.SPEECH), None)
    found, given = shapes(done)
    assert found == {"input_values": [B, "samples"], "attention_mask": [B, "samples"]}
    assert given == {"logits": [B, 2]}


def test_speech_recognition_by_ctc(tmp_path: Path) -> None:
    settings: dict[str, Any] = {**tiny.SPEECH, "feat_extract_norm": "group"}
    done = exported(tmp_path, tiny.build("Wav2Vec2ForCTC", **settings), None)
    found, given = shapes(done)
    assert found == {"input_values": [B, "samples"]}
    assert given == {"logits": [B, "frames", 12]}


def test_speech_recognition_by_generation(tmp_path: Path) -> None:
    done = exported(tmp_path, tiny.build("WhisperForConditionalGeneration", **tiny.WHISPER), None)
    assert list(done.graphs) == ["encoder", "decoder", "decoder_with_past"]
    assert shapes(done, "encoder")[0] == {"input_features": [B, 8, 20]}
    assert "encoder_attention_mask" not in shapes(done, "decoder")[0]


def test_vision_text_pairs(tmp_path: Path) -> None:
    done = exported(tmp_path, tiny.clip(), None)
    found, given = shapes(done)
    assert found == {
        "input_ids": ["text_batch", S],
        "attention_mask": ["text_batch", S],
        "pixel_values": ["image_batch", 3, 32, 32],
    }
    assert given == {
        "logits_per_image": ["image_batch", "text_batch"],
        "logits_per_text": ["text_batch", "image_batch"],
        "text_embeds": ["text_batch", 8],
        "image_embeds": ["image_batch", 8],
    }


@pytest.mark.parametrize(
    ("model", "settings", "task"),
    [
        ("BertModel", tiny.TEXT, "pooling"),
        ("LlamaForCausalLM", tiny.DECODER, "text-generation-with-past"),
        ("ResNetForImageClassification", tiny.RESNET, "image-classification"),
    ],
)
def test_dynamo(tmp_path: Path, model: str, settings: dict[str, Any], task: str) -> None:
    done = exported(tmp_path, tiny.build(model, **settings), task, "dynamo")
    assert done.only.proof.sizes["batch"] == [1, 2, 5]
    assert not done.only.failures
