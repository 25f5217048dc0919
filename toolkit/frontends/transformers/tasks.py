"""What transformers architectures can do: tasks, the model classes that serve them, their outputs.

A task has one or more heads: an auto class of transformers, the table of transformers that says
which architectures have it, and the outputs that its graph gives. Which tasks an architecture has
is read from these tables, so that it is true for every architecture of the installed version.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

from toolkit.errors import UsageError

Form = Literal["plain", "pooled", "cached", "encoder-decoder"]
"""How the model is wrapped: as it is, with pooling on top, with its key/value cache as inputs and
outputs, or as one graph for the encoder and two for the decoder."""

Outputs = Mapping[str, Mapping[int, str]]
"""The outputs in order, with the names of their dynamic dimensions."""

_TOKENS = {0: "batch", 1: "sequence"}
_BATCH = {0: "batch"}


@dataclass(frozen=True, slots=True)
class TaskHead:
    """One way to serve a task. `table` is a constant of transformers' `modeling_auto`."""

    auto: str
    table: str
    outputs: Outputs
    form: Form = "plain"


_BASE = "MODEL_MAPPING_NAMES"
_PAIRS = "MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES"
_STATES: Outputs = {"last_hidden_state": {0: "batch", 1: "sequence"}}
_CLASSIFIER = TaskHead(
    "AutoModelForSequenceClassification",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    {"logits": _BATCH},
)
_GENERATOR = ("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", {"logits": _TOKENS})
_PAIR = TaskHead(
    "AutoModel",
    _PAIRS,
    {
        "logits_per_image": {0: "image_batch", 1: "text_batch"},
        "logits_per_text": {0: "text_batch", 1: "image_batch"},
        "text_embeds": {0: "text_batch"},
        "image_embeds": {0: "image_batch"},
    },
)

WITH_PAST = "text-generation-with-past"

TASKS: Mapping[str, tuple[TaskHead, ...]] = {
    "default": (TaskHead("AutoModel", _BASE, _STATES),),
    "pooling": (TaskHead("AutoModel", _BASE, {"embeddings": _BATCH}, "pooled"),),
    "feature-extraction": (_PAIR, TaskHead("AutoModel", _BASE, _STATES)),
    "question-answering": (
        TaskHead(
            "AutoModelForQuestionAnswering",
            "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
            {"start_logits": _TOKENS, "end_logits": _TOKENS},
        ),
    ),
    "text-classification": (_CLASSIFIER,),
    "zero-shot-classification": (_CLASSIFIER,),
    "token-classification": (
        TaskHead(
            "AutoModelForTokenClassification",
            "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
            {"logits": _TOKENS},
        ),
    ),
    "fill-mask": (
        TaskHead("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING_NAMES", {"logits": _TOKENS}),
    ),
    "text-generation": (TaskHead(*_GENERATOR),),
    WITH_PAST: (TaskHead(*_GENERATOR, "cached"),),
    "text2text-generation": (
        TaskHead(
            "AutoModelForSeq2SeqLM",
            "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
            {"logits": _TOKENS},
            "encoder-decoder",
        ),
    ),
    "image-to-text": (
        TaskHead(
            "AutoModelForImageTextToText",
            "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
            {"logits": _TOKENS},
            "encoder-decoder",
        ),
    ),
    "image-classification": (
        TaskHead(
            "AutoModelForImageClassification",
            "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
            {"logits": _BATCH},
        ),
    ),
    "object-detection": (
        TaskHead(
            "AutoModelForObjectDetection",
            "MODEL_FOR_OBJECT_DETECTION_MAPPING_NAMES",
            {"logits": _BATCH, "pred_boxes": _BATCH},
        ),
    ),
    "semantic-segmentation": (
        TaskHead(
            "AutoModelForSemanticSegmentation",
            "MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES",
            {"logits": {0: "batch", 2: "rows", 3: "columns"}},
        ),
        TaskHead(
            "AutoModelForUniversalSegmentation",
            "MODEL_FOR_UNIVERSAL_SEGMENTATION_MAPPING_NAMES",
            {
                "class_queries_logits": _BATCH,
                "masks_queries_logits": {0: "batch", 2: "rows", 3: "columns"},
            },
        ),
    ),
    "image-feature-extraction": (TaskHead("AutoModel", _BASE, _STATES),),
    "audio-classification": (
        TaskHead(
            "AutoModelForAudioClassification",
            "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
            {"logits": _BATCH},
        ),
    ),
    "automatic-speech-recognition": (
        TaskHead(
            "AutoModelForCTC",
            "MODEL_FOR_CTC_MAPPING_NAMES",
            {"logits": {0: "batch", 1: "frames"}},
        ),
        TaskHead(
            "AutoModelForSpeechSeq2Seq",
            "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
            {"logits": _TOKENS},
            "encoder-decoder",
        ),
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
"""Other names that people know the same tasks by."""

# From the most telling head to the least: the first that an architecture's name fits is its task.
_TELLING = (
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


@dataclass(frozen=True, slots=True)
class TaskChoice:
    """A task that an architecture has, and the head that serves it."""

    task: str
    head: TaskHead


def canonical(task: str) -> str:
    """The task's own name; raises UsageError for a name that is no task at all."""
    task = _ALIASES.get(task, task)
    if task not in TASKS:
        raise UsageError(f"there is no task '{task}'; tasks: {', '.join(TASKS)}")
    return task


def tasks_of(config: Any) -> list[str]:
    """The tasks that an architecture has, by its config."""
    return [task for task in TASKS if head_of(task, config) is not None]


def head_of(task: str, config: Any) -> TaskHead | None:
    """The head of the architecture that serves the task; None when it has none."""
    fits = (head for head in TASKS[task] if class_names(head, config))
    return next((head for head in fits if _sensible(task, head, config)), None)


def choose(task: str | None, config: Any, *, sentences: bool = False) -> TaskChoice:
    """The task that is asked for, or the one that the config tells.

    `sentences`: the checkpoint says how it pools. Raises UsageError with the tasks that there are.
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
            + (f"it has: {have}" if have else "none of the tasks is known for it")
        )
    return TaskChoice(task, head)


def infer(config: Any, *, sentences: bool = False) -> str:
    """The task that a checkpoint was saved for, by the architectures that its config names."""
    if sentences:
        return "pooling"
    named: list[str] = list(getattr(config, "architectures", None) or [])
    for task in _TELLING:
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
    raise UsageError(f"no task is known for this architecture ({shown})")


def class_names(head: TaskHead, config: Any) -> list[str]:
    """The classes that serve the head for this architecture; of remote code too."""
    remote: Mapping[str, Any] = getattr(config, "auto_map", None) or {}
    found = list(_names(_tables().__dict__.get(head.table, {}).get(_model_type(config), ())))
    if head.auto in remote:
        found += [str(each).rpartition(".")[2] for each in _names(remote[head.auto])]
    return found


def modality_of(config: Any) -> Literal["text", "image", "audio", "pair"]:
    """What the architecture's base model takes."""
    if class_names(_PAIR, config):
        return "pair"
    names = class_names(TASKS["default"][0], config)
    base = getattr(import_module("transformers"), names[0], None) if names else None
    main = str(getattr(base, "main_input_name", "input_ids"))
    if main.startswith("pixel"):
        return "image"
    return "audio" if main in ("input_values", "input_features") else "text"


def _sensible(task: str, head: TaskHead, config: Any) -> bool:
    """Whether a head that the tables know is one that a user would want."""
    if task == "pooling":
        return modality_of(config) == "text"
    if task == "image-feature-extraction":
        return modality_of(config) == "image"
    if task == "image-to-text":
        # others in the table read images and text with one and the same decoder
        return bool(getattr(config, "is_encoder_decoder", False))
    if head.table == _BASE:
        return modality_of(config) != "pair"
    if task.startswith("text-generation"):
        # BERT and its kin are listed, but generate only when they were made decoders
        encoder = _knows("MODEL_FOR_MASKED_LM_MAPPING_NAMES", config)
        both = getattr(config, "is_encoder_decoder", False)
        return getattr(config, "is_decoder", False) or not (encoder or both)
    return True


def _knows(table: str, config: Any) -> bool:
    return _model_type(config) in _tables().__dict__.get(table, {})


def _model_type(config: Any) -> str:
    return str(getattr(config, "model_type", ""))


def _tables() -> Any:
    return import_module("transformers.models.auto.modeling_auto")


def _names(found: str | Iterable[str]) -> Iterator[str]:
    if isinstance(found, str):
        yield found
    else:
        yield from (each for each in found if each)
