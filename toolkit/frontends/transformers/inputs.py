"""What a model takes, and feeds of any size for it.

Names come from the model's forward and its tokenizer, sizes from the processor or else the config.
A shape mixes sizes with the names of dynamic dimensions; `content` says what the numbers mean.
Texts begin and end as the config says and are padded for real: a mask of zeros, ids of padding.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

Content = Literal["ids", "mask", "types", "boxes", "noise"]
Padding = Literal["none", "right", "left"]
Sizes = Mapping[str, int]

_IMAGE = 224
_MOST_POSITIONS = 320
_RAW_SAMPLES = 8000


@dataclass(frozen=True, slots=True)
class Input:
    """One graph input."""

    name: str
    shape: tuple[int | str, ...]
    content: Content

    @property
    def axes(self) -> dict[int, str]:
        return {axis: dim for axis, dim in enumerate(self.shape) if isinstance(dim, str)}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The token ids that a model knows."""

    count: int
    pad: int
    last: int | None = None
    longest: int = _MOST_POSITIONS
    types: int = 1


@dataclass(frozen=True, slots=True)
class Setting:
    """Sizes of the dynamic dimensions, and on which side texts are padded."""

    sizes: Sizes
    padding: Padding = "none"

    @property
    def label(self) -> str:
        return "" if self.padding == "none" else f"padded on the {self.padding}"


@dataclass(frozen=True, slots=True)
class GraphInterface:
    """All inputs of one graph, and the settings that it is to be proven in; the first is traced.

    `optional` dimensions are given up when no exporter keeps them: those of images and audio.
    """

    inputs: tuple[Input, ...]
    settings: tuple[Setting, ...]
    words: Vocabulary
    optional: frozenset[str] = field(default_factory=frozenset[str])

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(each.name for each in self.inputs)

    def axes(self) -> dict[str, dict[int, str]]:
        return {each.name: each.axes for each in self.inputs if each.axes}

    def renamed(self, names: Mapping[str, str]) -> GraphInterface:
        """The same with other names for the dynamic dimensions."""
        inputs = tuple(
            replace(each, shape=tuple(names.get(str(d), d) for d in each.shape))
            for each in self.inputs
        )
        settings = tuple(
            replace(each, sizes={names.get(d, d): size for d, size in each.sizes.items()})
            for each in self.settings
        )
        return replace(self, inputs=inputs, settings=settings)

    def feed(self, setting: Setting, seed: int = 0) -> dict[str, NDArray[Any]]:
        """Seeded values for every input, at the setting's sizes."""
        random = np.random.default_rng(seed)
        made: dict[str, NDArray[Any]] = {}
        masks = [i for i in self.inputs if i.content == "mask"]
        for each in (*masks, *(i for i in self.inputs if i.content != "mask")):
            shape = [d if isinstance(d, int) else setting.sizes[d] for d in each.shape]
            made[each.name] = _values(each, shape, setting.padding, self.words, made, random)
        return {each.name: made[each.name] for each in self.inputs}


def _values(
    wanted: Input,
    shape: list[int],
    padding: Padding,
    words: Vocabulary,
    made: Mapping[str, NDArray[Any]],
    random: np.random.Generator,
) -> NDArray[Any]:
    if wanted.content == "mask":
        return _mask(shape, padding, random)
    if wanted.content == "noise":
        return random.standard_normal(shape, dtype=np.float32)
    if wanted.content == "boxes":
        corners = np.sort(random.integers(0, 1000, (*shape[:-1], 2, 2)), axis=-2)
        return corners.reshape(shape).astype(np.int64)
    if wanted.content == "types":
        half = np.arange(shape[1]) >= (shape[1] + 1) // 2
        return np.broadcast_to(half & (words.types > 1), shape).astype(np.int64)
    return _ids(shape, words, made.get("attention_mask"), random)


def _mask(shape: list[int], padding: Padding, random: np.random.Generator) -> NDArray[Any]:
    """Rows of ones; the first keeps all of its tokens, the others between a quarter and most."""
    rows, length = shape
    if padding == "none":
        return np.ones(shape, dtype=np.int64)
    kept = random.integers(max(1, length // 4), max(2, length), (rows, 1))
    if rows > 1:
        kept[0] = length
    places = np.arange(length)
    real = places < kept if padding == "right" else places >= length - kept
    return real.astype(np.int64)


def _ids(
    shape: list[int], words: Vocabulary, mask: NDArray[Any] | None, random: np.random.Generator
) -> NDArray[Any]:
    """Random words; the last real one ends the text, and stands nowhere else."""
    ids = random.integers(0, words.count, shape, dtype=np.int64)
    plain = next((i for i in range(words.count) if i not in (words.pad, words.last)), 0)
    ids[(ids == words.pad) | (ids == words.last)] = plain
    real = np.ones(shape, dtype=bool) if mask is None else mask[:, -shape[1] :] != 0
    if words.last is not None:
        ends = shape[1] - 1 - np.argmax(real[:, ::-1], axis=1)
        ids[np.arange(shape[0]), ends] = words.last
    return np.where(real, ids, words.pad)


# Texts -------------------------------------------------------------------------------------------


def words_of(model: Any, tokenizer: Any) -> Vocabulary:
    """What the model's embedding and config say about token ids and lengths."""
    config = text_config(model.config)
    count = _first(config, ("vocab_size",)) or 0
    table = _embedding(model)
    if table is not None:
        count = min(count, table) if count else table
    pad = _id(config, "pad_token_id")
    if pad is None and tokenizer is not None:
        pad = _known_id(tokenizer, "pad_token_id")
    last = _id(config, "eos_token_id")
    count = max(count, 2)
    return Vocabulary(
        count=count,
        pad=pad if pad is not None and pad < count else 0,
        last=last if last is not None and last < count else None,
        longest=_longest(config),
        types=_first(config, ("type_vocab_size",)) or 1,
    )


def text_inputs(model: Any, tokenizer: Any, batch: str = "batch") -> tuple[Input, ...]:
    """`input_ids`, and of mask, token types and boxes those that model and tokenizer know."""
    taken = parameters_of(model)
    fed: set[str] = set(getattr(tokenizer, "model_input_names", None) or [""])
    types = words_of(model, tokenizer).types > 1
    asked = {
        "attention_mask": "attention_mask" in fed or tokenizer is None,
        "token_type_ids": "token_type_ids" in fed if tokenizer is not None else types,
    }
    found = [Input("input_ids", (batch, "sequence"), "ids")]
    if "attention_mask" in taken and asked["attention_mask"]:
        found.append(Input("attention_mask", (batch, "sequence"), "mask"))
    if "token_type_ids" in taken and asked["token_type_ids"]:
        found.append(Input("token_type_ids", (batch, "sequence"), "types"))
    if "bbox" in taken:
        found.append(Input("bbox", (batch, "sequence", 4), "boxes"))
    return tuple(found)


def text_settings(words: Vocabulary, model: Any, batch: str = "batch") -> tuple[Setting, ...]:
    """Batch 1, 2 and 5, short and long, without padding and with it on either side."""
    long = long_text(words, model)
    middle, short = min(11, long), min(3, long)
    return (
        Setting({batch: 2, "sequence": middle}, "right"),
        Setting({batch: 1, "sequence": short}),
        Setting({batch: 5, "sequence": min(7, long)}, "right"),
        Setting({batch: 2, "sequence": long}, "left"),
        Setting({batch: 1, "sequence": long}),
    )


def long_text(words: Vocabulary, model: Any) -> int:
    """Beyond the window of local attention where there is one, within what positions allow."""
    config = text_config(model.config)
    windows = (_first(config, (name,)) for name in ("sliding_window", "local_attention"))
    window = max((w for w in windows if w), default=0)
    wanted = window + 9 if window and window + 9 <= _MOST_POSITIONS else 41
    return max(2, min(wanted, words.longest))


def text_config(config: Any) -> Any:
    """The config of the part that reads text."""
    get = getattr(config, "get_text_config", None)
    return get() if get is not None else config


def _longest(config: Any) -> int:
    names = ("max_position_embeddings", "n_positions", "max_length_positions", "n_ctx")
    positions = _first(config, names)
    # RoBERTa and its kin count from the padding id on
    return max(2, min(_MOST_POSITIONS, positions - 4)) if positions else _MOST_POSITIONS


def _embedding(model: Any) -> int | None:
    try:
        return int(model.get_input_embeddings().num_embeddings)
    except (AttributeError, NotImplementedError, TypeError):
        return None


# Images ------------------------------------------------------------------------------------------


def image_input(model: Any, settings: Mapping[str, Any], batch: str = "batch") -> Input:
    """`pixel_values` of any height and width; `image_size` says which the model is made for."""
    channels = _first(_image_config(model.config), ("num_channels", "in_channels")) or 3
    return Input("pixel_values", (batch, channels, "height", "width"), "noise")


def image_size(model: Any, settings: Mapping[str, Any]) -> tuple[int, int]:
    """Height and width: of the config, else of the processor."""
    for given in (
        getattr(_image_config(model.config), "image_size", None),
        settings.get("crop_size") if settings.get("do_center_crop", True) else None,
        settings.get("size"),
    ):
        found = _pair(given)
        if found is not None:
            return found
    return _IMAGE, _IMAGE


def _image_config(config: Any) -> Any:
    for name in ("vision_config", "image_config", "backbone_config"):
        part = getattr(config, name, None)
        if part is not None and not isinstance(part, dict) and not hasattr(config, "image_size"):
            return part
    return config


def _pair(given: Any) -> tuple[int, int] | None:
    if isinstance(given, int):
        return given, given
    if isinstance(given, (list, tuple)) and len(cast("Sequence[Any]", given)) == 2:
        rows, columns = cast("Sequence[Any]", given)
        return int(rows), int(columns)
    if isinstance(given, dict):
        sizes = cast("dict[str, Any]", given)
        if "height" in sizes and "width" in sizes:
            return int(sizes["height"]), int(sizes["width"])
        if "shortest_edge" in sizes:
            edge = min(int(sizes["shortest_edge"]), 384)
            return edge, edge
    return None


# Audio -------------------------------------------------------------------------------------------


def audio_inputs(model: Any, settings: Mapping[str, Any]) -> tuple[tuple[Input, ...], int]:
    """Raw samples or frames of features, and how many the model is made for.

    The length is dynamic under the name `samples` or `frames` where the model has no fixed one.
    """
    config, taken = model.config, parameters_of(model)
    main = str(getattr(model, "main_input_name", "input_values"))
    bins = _first(config, ("num_mel_bins", "feature_size"))
    positions = _first(config, ("max_source_positions",))
    if main == "input_features" and positions and bins and not _per_channel(config):
        # Whisper: one length, which everything is padded to
        return (Input(main, ("batch", bins, "frames"), "noise"),), 2 * positions
    if main == "input_values" and bins and hasattr(config, "max_length"):  # a spectrogram
        return (Input(main, ("batch", "frames", bins), "noise"),), int(config.max_length)
    if main == "input_features":
        width = _feature_width(config)
        found = [Input(main, ("batch", "frames", width), "noise")]
        if "attention_mask" in taken:
            found.append(Input("attention_mask", ("batch", "frames"), "mask"))
        return tuple(found), 97
    found = [Input(main, ("batch", "samples"), "noise")]
    masked = settings.get(
        "return_attention_mask", getattr(config, "feat_extract_norm", "") == "layer"
    )
    if "attention_mask" in taken and masked:
        found.append(Input("attention_mask", ("batch", "samples"), "mask"))
    return tuple(found), _RAW_SAMPLES


def _per_channel(config: Any) -> int | None:
    return _first(config, ("input_feat_per_channel",))


def _feature_width(config: Any) -> int:
    per_channel = _per_channel(config)
    if per_channel:
        return per_channel * (_first(config, ("input_channels",)) or 1)
    encoder = getattr(config, "encoder_config", config)
    names = ("feature_projection_input_dim", "num_mel_bins", "input_dim", "hidden_size")
    return _first(config, names) or _first(encoder, names) or 80


# -------------------------------------------------------------------------------------------------


def parameters_of(model: Any) -> set[str]:
    """The names that the model's forward takes."""
    return set(inspect.signature(model.forward).parameters)


def _first(config: Any, names: Sequence[str]) -> int | None:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _id(config: Any, name: str) -> int | None:
    value = getattr(config, name, None)
    if isinstance(value, (list, tuple)):
        listed = cast("Sequence[Any]", value)
        value = listed[0] if listed else None
    return value if isinstance(value, int) and value >= 0 else None


def _known_id(tokenizer: Any, name: str) -> int | None:
    value = getattr(tokenizer, name, None)
    return value if isinstance(value, int) else None
