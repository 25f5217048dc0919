"""Load a transformers model from a folder, a .gguf file, or objects in memory.

Nothing is downloaded, and code of a checkpoint runs only with --trust-remote-code. Weights that the
checkpoint lacks would be random: their names are kept in `missing`.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from toolkit.errors import UsageError, one_line, summarize
from toolkit.frontends.pytorch.exporters import quiet
from toolkit.frontends.transformers.tasks import TaskChoice, choose, class_names

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tokenizer.model",
    "source.spm",
    "target.spm",
)
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "image_processor.json")
_COPIED = (
    "config.json",
    "generation_config.json",
    *TOKENIZER_FILES,
    *PROCESSOR_FILES,
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.*",
    "normalizer.json",
    "*.tiktoken",
    "bpe.codes",
    "entity_vocab.json",
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "*_Pooling/config.json",
    "*_Dense/config.json",
    "*_Normalize/config.json",
)
_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model loaded for a task, with its tokenizer and companion files."""

    model: Any
    choice: TaskChoice
    tokenizer: Any = None
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Settings of the image processor or feature extractor: sizes, sampling rate."""
    folder: Path | None = None
    missing: tuple[str, ...] = ()
    """Parameters without weights in the checkpoint."""
    companions: Mapping[str, Path] = field(default_factory=dict[str, Path])
    notes: tuple[str, ...] = ()


def is_checkpoint(source: object) -> bool:
    """Return whether a source looks like a transformers model; imports nothing."""
    if isinstance(source, Path):
        if source.suffix == ".gguf":
            return source.is_file()
        return source.is_dir() and ((source / "config.json").is_file() or bool(_ggufs(source)))
    if isinstance(source, tuple):
        parts = cast("tuple[Any, ...]", source)
        return len(parts) == 2 and _is_model(parts[0])
    return _is_model(source)


def is_sentence_model(folder: Path | None) -> bool:
    """Return whether a checkpoint declares its pooling."""
    return folder is not None and (folder / "modules.json").is_file()


def _is_model(source: object) -> bool:
    mro = type(source).__mro__
    return any(
        c.__name__ == "PreTrainedModel" and c.__module__.startswith("transformers") for c in mro
    )


def load(source: Any, task: str | None, scratch: Path, *, trust_remote_code: bool) -> Checkpoint:
    """Load a folder or a .gguf file, or take a model or a (model, tokenizer) pair."""
    if isinstance(source, Path):
        with quiet():
            return _from_folder(source, task, scratch, trust_remote_code)
    pair = cast("tuple[Any, Any]", source if isinstance(source, tuple) else (source, None))
    return _from_memory(*pair, task, scratch)


# Folders -----------------------------------------------------------------------------------------


def _from_folder(source: Path, task: str | None, scratch: Path, trust: bool) -> Checkpoint:
    folder, gguf = (source.parent, source.name) if source.is_file() else (source, None)
    if gguf is None and not (folder / "config.json").is_file():
        gguf = next(iter(_ggufs(folder)), None)
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": trust}
    if gguf is not None:
        options["gguf_file"] = gguf
    config = _config(folder, options, trust)
    choice = choose(task, config, sentences=is_sentence_model(folder))
    tokenizer, note = _tokenizer(folder, options)
    model, missing = _model(folder, choice, config, options)
    loaded = Checkpoint(
        model=model,
        choice=choice,
        tokenizer=tokenizer,
        settings=_settings(folder),
        folder=folder,
        missing=missing,
        companions=dict(_companions(folder)) if gguf is None else {},
        notes=tuple(filter(None, [note, _precision_note(config)])),
    )
    if gguf is not None:
        loaded = replace(loaded, companions=dict(_saved(model, tokenizer, scratch)))
    return _with_tokenizer_note(loaded)


def _config(folder: Path, options: Mapping[str, Any], trust: bool) -> Any:
    if "gguf_file" not in options:
        raw = read_json(folder / "config.json")
        remote = raw.get("auto_map")
        known = raw.get("model_type") in import_module("transformers").CONFIG_MAPPING
        if remote and not known and not trust:
            raise UsageError(
                f"'{folder}' needs its own code ({_files_of(remote)}), which is not run by "
                "default: review it, then add --trust-remote-code"
            )
        if "model_type" not in raw and "architectures" not in raw:
            raise UsageError(
                f"'{folder / 'config.json'}' is not a transformers config: it has no model_type"
            )
    try:
        return import_module("transformers").AutoConfig.from_pretrained(str(folder), **options)
    except Exception as error:  # transformers may raise anything for an unknown config
        raise UsageError(f"'{folder}' cannot be read as a checkpoint: {_short(error)}") from error


def _model(
    folder: Path, choice: TaskChoice, config: Any, options: Mapping[str, Any]
) -> tuple[Any, tuple[str, ...]]:
    if not _any(folder, _WEIGHTS):
        raise UsageError(f"'{folder}' has no weights: add a .safetensors, .bin or .gguf file")
    transformers, torch = import_module("transformers"), import_module("torch")
    auto = getattr(transformers, choice.head.auto)
    try:
        model, info = auto.from_pretrained(
            str(folder), config=config, dtype=torch.float32, output_loading_info=True, **options
        )
    except Exception as error:  # from a truncated file to mismatched shapes
        raise UsageError(f"the weights in '{folder}' cannot be loaded: {_short(error)}") from error
    return model.eval(), tuple(sorted(info.get("missing_keys", ())))


def _tokenizer(folder: Path, options: Mapping[str, Any]) -> tuple[Any, str]:
    """Return the folder's tokenizer, or None and perhaps a note."""
    if "gguf_file" not in options and not _any(folder, TOKENIZER_FILES):
        return None, ""
    try:
        auto = import_module("transformers").AutoTokenizer
        return auto.from_pretrained(str(folder), **options), ""
    except ImportError as error:
        return None, f"the tokenizer is copied, but not used for the proof: {_short(error)}"
    except Exception as error:  # the tokenizers library raises plain Exception
        raise UsageError(f"the tokenizer in '{folder}' cannot be read: {_short(error)}") from error


def _settings(folder: Path) -> dict[str, Any]:
    """Merge the settings of image processors and feature extractors."""
    found: dict[str, Any] = {}
    for name in PROCESSOR_FILES:
        if (folder / name).is_file():
            read = read_json(folder / name)
            for part in (read, *(read.get(k) for k in ("image_processor", "feature_extractor"))):
                if isinstance(part, dict):
                    found.update(cast("dict[str, Any]", part))
    return found


def _companions(folder: Path) -> Iterator[tuple[str, Path]]:
    for pattern in _COPIED:
        for file in sorted(folder.glob(pattern)):
            yield file.relative_to(folder).as_posix(), file


def _precision_note(config: Any) -> str:
    stored = str(getattr(config, "dtype", None) or "float32").rpartition(".")[2]
    return "" if stored == "float32" else f"weights converted from {stored} to float32"


# Objects -----------------------------------------------------------------------------------------


def _from_memory(model: Any, tokenizer: Any, task: str | None, scratch: Path) -> Checkpoint:
    config = model.config
    name = type(model).__name__
    if task is None:
        if not getattr(config, "architectures", None):
            config.architectures = [name]
        config = copy.copy(config)
        config.architectures = [name]  # as if saved from this class
    choice = choose(task, config)
    served = class_names(choice.head, config)
    if name not in served:
        base = getattr(model, "base_model", model)
        if choice.head.auto != "AutoModel" or type(base).__name__ not in served:
            raise UsageError(
                f"a {name} does not support task '{choice.task}': load the checkpoint with "
                f"{choice.head.auto}"
            )
        model = base
    notes: list[str] = []
    if model.training:
        notes.append("the model was in training mode: it is exported, and left, in eval mode")
    if str(model.dtype) != "torch.float32":
        notes.append(f"weights converted from {str(model.dtype).rpartition('.')[2]} to float32")
        model = copy.deepcopy(model).float()
    with quiet():
        companions = dict(_saved(model, tokenizer, scratch))
    text = getattr(tokenizer, "tokenizer", tokenizer)  # a processor contains one
    loaded = Checkpoint(
        model=model.eval(),
        choice=choice,
        tokenizer=text if hasattr(text, "get_vocab") else None,
        settings=_settings(scratch / "companions"),
        companions=companions,
        notes=tuple(notes),
    )
    return _with_tokenizer_note(loaded)


def _saved(model: Any, tokenizer: Any, scratch: Path) -> Iterable[tuple[str, Path]]:
    folder = scratch / "companions"
    folder.mkdir()
    model.config.save_pretrained(str(folder))
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        generation.save_pretrained(str(folder))
    if tokenizer is not None:
        tokenizer.save_pretrained(str(folder))
    files = (file for file in sorted(folder.rglob("*")) if file.is_file())
    return [(file.relative_to(folder).as_posix(), file) for file in files]


# -------------------------------------------------------------------------------------------------


def _with_tokenizer_note(loaded: Checkpoint) -> Checkpoint:
    """Add a note if no tokenizer or processor is copied beside the model."""
    beside = {Path(name).name for name in loaded.companions}
    if beside & {*TOKENIZER_FILES, *PROCESSOR_FILES}:
        return loaded
    note = "no tokenizer or processor was copied: the checkpoint has none"
    return replace(loaded, notes=(*loaded.notes, note))


def _ggufs(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.glob("*.gguf"))


def _any(folder: Path, patterns: Iterable[str]) -> bool:
    return any(True for pattern in patterns for _ in folder.glob(pattern))


def read_json(path: Path, kind: type = dict) -> Any:
    """Load a JSON file whose top level is an object, or a value of another `kind`."""
    try:
        read: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"'{path}' cannot be read: {summarize(error)}") from error
    if not isinstance(read, kind):
        raise UsageError(f"'{path}' is not a JSON {'object' if kind is dict else kind.__name__}")
    return read


def _files_of(remote: Any) -> str:
    listed = cast("dict[str, Any]", remote) if isinstance(remote, dict) else {"": remote}
    names = {f"{each.split('.')[0]}.py" for each in listed.values() if isinstance(each, str)}
    return ", ".join(sorted(names)) or "auto_map in config.json"


def _short(error: BaseException) -> str:
    """Return the start of an error message of transformers, which may have many lines."""
    return one_line(summarize(error), 240)
