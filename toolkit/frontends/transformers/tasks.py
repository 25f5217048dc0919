"""Tasks of transformers architectures: the model classes for each, and the outputs of its graph.

A task has one or more heads: an auto class of transformers, the table of transformers that lists
its architectures, and the outputs of its graph. The tasks of an architecture are looked up in these
tables, which cover every architecture of the installed version.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

from toolkit.errors import UsageError

Form = Literal["plain", "pooled", "cached", "encoder-decoder"]
"""The wrapper of the model: none, pooling on top, its key/value cache as inputs and outputs, or one
graph for the encoder and two for the decoder."""

Outputs = Mapping[str, Mapping[int, str]]
"""The outputs in order, with the names of their dynamic axes."""

_TOKENS = {0: "batch", 1: "sequence"}
_BATCH = {0: "batch"}


@dataclass(frozen=True, slots=True)
class TaskHead:
    """One model class for a task. `table` is a constant of transformers' `modeling_auto`."""

    auto: str
    table: str
    outputs: Outputs
    form: Form = "plain"


def _head(auto: str, table: str, outputs: Outputs, form: Form = "plain") -> TaskHead:
    return TaskHead(f"AutoModelFor{auto}", f"MODEL_FOR_{table}_MAPPING_NAMES", outputs, form)


_BASE = "MODEL_MAPPING_NAMES"
_LOGITS: Outputs = {"logits": _BATCH}
_TOKEN_LOGITS: Outputs = {"logits": _TOKENS}
_MASKS = {0: "batch", 2: "rows", 3: "columns"}
_STATES = TaskHead("AutoModel", _BASE, {"last_hidden_state": _TOKENS})
_CLASSIFIER = _head("SequenceClassification", "SEQUENCE_CLASSIFICATION", _LOGITS)
_PAIR = TaskHead(
    "AutoModel",
    "MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    {
        "logits_per_image": {0: "image_batch", 1: "text_batch"},
        "logits_per_text": {0: "text_batch", 1: "image_batch"},
        "text_embeds": {0: "text_batch"},
        "image_embeds": {0: "image_batch"},
    },
)

WITH_PAST = "text-generation-with-past"

TASKS: Mapping[str, tuple[TaskHead, ...]] = {
    "default": (_STATES,),
    "pooling": (TaskHead("AutoModel", _BASE, {"embeddings": _BATCH}, "pooled"),),
    "feature-extraction": (_PAIR, _STATES),
    "question-answering": (
        _head(
            "QuestionAnswering",
            "QUESTION_ANSWERING",
            {"start_logits": _TOKENS, "end_logits": _TOKENS},
        ),
    ),
    "text-classification": (_CLASSIFIER,),
    "zero-shot-classification": (_CLASSIFIER,),
    "token-classification": (_head("TokenClassification", "TOKEN_CLASSIFICATION", _TOKEN_LOGITS),),
    "fill-mask": (_head("MaskedLM", "MASKED_LM", _TOKEN_LOGITS),),
    "text-generation": (_head("CausalLM", "CAUSAL_LM", _TOKEN_LOGITS),),
    WITH_PAST: (_head("CausalLM", "CAUSAL_LM", _TOKEN_LOGITS, "cached"),),
    "text2text-generation": (
        _head("Seq2SeqLM", "SEQ_TO_SEQ_CAUSAL_LM", _TOKEN_LOGITS, "encoder-decoder"),
    ),
    "image-to-text": (
        _head("ImageTextToText", "IMAGE_TEXT_TO_TEXT", _TOKEN_LOGITS, "encoder-decoder"),
    ),
    "image-classification": (_head("ImageClassification", "IMAGE_CLASSIFICATION", _LOGITS),),
    "object-detection": (
        _head("ObjectDetection", "OBJECT_DETECTION", {"logits": _BATCH, "pred_boxes": _BATCH}),
    ),
    "semantic-segmentation": (
        _head("SemanticSegmentation", "SEMANTIC_SEGMENTATION", {"logits": _MASKS}),
        _head(
            "UniversalSegmentation",
            "UNIVERSAL_SEGMENTATION",
            {"class_queries_logits": _BATCH, "masks_queries_logits": _MASKS},
        ),
    ),
    "image-feature-extraction": (_STATES,),
    "audio-classification": (_head("AudioClassification", "AUDIO_CLASSIFICATION", _LOGITS),),
    "automatic-speech-recognition": (
        _head("CTC", "CTC", {"logits": {0: "batch", 1: "frames"}}),
        _head("SpeechSeq2Seq", "SPEECH_SEQ_2_SEQ", _TOKEN_LOGITS, "encoder-decoder"),
    ),
}

_ALIASES = {
    "zero-shot-image-classification": "feature-extraction",
    "sentence-similarity": "pooling",
    "sequence-classification": "text-classification",
    "sentiment-analysis": "text-classification",
    "ner": "token-classification",
    "masked-lm": "fill-mask",
    "causal-lm": "text-generation",
    "summarization": "text2text-generation",
    "translation": "text2text-generation",
    "text2text-generation-with-past": "text2text-generation",
    "automatic-speech-recognition-with-past": "automatic-speech-recognition",
    "image-to-text-with-past": "image-to-text",
    "vision2seq-lm": "image-to-text",
    "image-segmentation": "semantic-segmentation",
}
"""Other common names of the same tasks."""

_MOST_SPECIFIC_FIRST = (
    "question-answering",
    "text-classification",
    "token-classification",
    "fill-mask",
    "object-detection",
    "semantic-segmentation",
    "image-classification",
    "automatic-speech-recognition",
    "audio-classification",
    "text2text-generation",
    "image-to-text",
    "text-generation",
)
"""Tasks to infer from a class name, in order of precedence."""


@dataclass(frozen=True, slots=True)
class TaskChoice:
    """A task of an architecture, and the head for it."""

    task: str
    head: TaskHead


def canonical(task: str) -> str:
    """Resolve aliases of a task; raise UsageError for an unknown name."""
    task = _ALIASES.get(task, task)
    if task not in TASKS:
        raise UsageError(f"no task '{task}'; tasks: {', '.join(TASKS)}")
    return task


def tasks_of(config: Any) -> list[str]:
    """Return the tasks of an architecture, given its config."""
    return [task for task in TASKS if head_of(task, config) is not None]


def head_of(task: str, config: Any) -> TaskHead | None:
    """Return the architecture's head for a task, or None."""
    fits = (head for head in TASKS[task] if class_names(head, config))
    return next((head for head in fits if _sensible(task, head, config)), None)


def choose(task: str | None, config: Any, *, sentences: bool = False) -> TaskChoice:
    """Return the requested task, or the one that the config implies.

    `sentences`: the checkpoint declares its pooling. Raise UsageError, with the possible tasks, if
    the architecture does not have the task.
    """
    if task is None:
        task = infer(config, sentences=sentences)
    task = canonical(task)
    head = head_of(task, config)
    if head is None:
        have = ", ".join(tasks_of(config))
        kind = getattr(config, "model_type", "") or type(config).__name__
        raise UsageError(
            f"architecture '{kind}' has no task '{task}'; "
            + (f"it has: {have}" if have else "it has no supported task")
        )
    return TaskChoice(task, head)


def infer(config: Any, *, sentences: bool = False) -> str:
    """Return the task of the class that a checkpoint was saved from."""
    if sentences:
        return "pooling"
    named: list[str] = list(getattr(config, "architectures", None) or [])
    for task in _MOST_SPECIFIC_FIRST:
        for head in TASKS[task]:
            if set(named) & set(class_names(head, config)) and _sensible(task, head, config):
                return task
    if class_names(_PAIR, config):
        return "feature-extraction"
    modality = modality_of(config)
    if modality == "image" and head_of("image-feature-extraction", config):
        return "image-feature-extraction"
    if class_names(TASKS["default"][0], config):
        return "default"
    have = tasks_of(config)
    if have:
        return have[0]
    shown = ", ".join(named) or getattr(config, "model_type", "") or "none named"
    raise UsageError(f"this architecture has no supported task ({shown})")


def class_names(head: TaskHead, config: Any) -> list[str]:
    """Return the classes of a head for this architecture, including those of remote code."""
    remote: Mapping[str, Any] = getattr(config, "auto_map", None) or {}
    found = list(_names(_tables().__dict__.get(head.table, {}).get(_model_type(config), ())))
    if head.auto in remote:
        found += [str(each).rpartition(".")[2] for each in _names(remote[head.auto])]
    return found


def modality_of(config: Any) -> Literal["text", "image", "audio", "pair"]:
    """Return the kind of input of the architecture's base model."""
    if class_names(_PAIR, config):
        return "pair"
    names = class_names(TASKS["default"][0], config)
    base = getattr(import_module("transformers"), names[0], None) if names else None
    main = str(getattr(base, "main_input_name", "input_ids"))
    if main.startswith("pixel"):
        return "image"
    return "audio" if main in ("input_values", "input_features") else "text"


def _sensible(task: str, head: TaskHead, config: Any) -> bool:
    """Return whether a head listed in the tables makes sense for the architecture."""
    if task == "pooling":
        return modality_of(config) == "text"
    if task == "image-feature-extraction":
        return modality_of(config) == "image"
    if task == "image-to-text":
        # others in the table process images and text in a single decoder
        return bool(getattr(config, "is_encoder_decoder", False))
    if head.table == _BASE:
        return modality_of(config) != "pair"
    if task.startswith("text-generation"):
        # encoders such as BERT are listed, but generate text only if configured as decoders
        encoder = _model_type(config) in _tables().__dict__["MODEL_FOR_MASKED_LM_MAPPING_NAMES"]
        both = getattr(config, "is_encoder_decoder", False)
        return getattr(config, "is_decoder", False) or not (encoder or both)
    return True


def _model_type(config: Any) -> str:
    return str(getattr(config, "model_type", ""))


def _tables() -> Any:
    return import_module("transformers.models.auto.modeling_auto")


def _names(found: str | Iterable[str]) -> Iterator[str]:
    if isinstance(found, str):
        yield found
    else:
        yield from (each for each in found if each)
