"""The inputs of a model, and feeds of any size for them.

Names come from the model's forward and its tokenizer, sizes from the processor or else the config.
A shape mixes sizes with names of dynamic dimensions; `content` is the meaning of the numbers. Texts
end with the config's end token and are padded as by a tokenizer: zeros in the mask, padding ids.
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

_IMAGE_SIZE = 224
"""Height and width if neither config nor processor declares them."""
_MAX_POSITIONS = 320
"""The longest text to test on, in tokens."""
_FEATURE_FRAMES = 97
_RAW_SAMPLES = 8000
"""Length of the traced audio: half a second at 16 kHz."""


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
    """The token ids of a model: `last` is the end token, `types` the number of token types."""

    count: int
    pad: int
    last: int | None = None
    longest: int = _MAX_POSITIONS
    types: int = 1


@dataclass(frozen=True, slots=True)
class Setting:
    """Sizes of the dynamic dimensions, and the side on which texts are padded."""

    sizes: Sizes
    padding: Padding = "none"

    @property
    def label(self) -> str:
        return "" if self.padding == "none" else f"padded on the {self.padding}"


@dataclass(frozen=True, slots=True)
class GraphInterface:
    """All inputs of one graph, and the settings to test it in; the first is traced.

    `optional` dimensions, those of images and audio, are fixed if no exporter keeps them dynamic.
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
        """Rename dynamic dimensions."""
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
        """Return seeded values for every input, at the setting's sizes."""
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
    """Return a mask: the first row unpadded, the others with at least a quarter of the tokens."""
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
    """Return random token ids, with the end token exactly at the end of each text."""
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
    """Return the vocabulary declared by the model's embedding, its config and the tokenizer."""
    config = text_config(model.config)
    count = _first(config, ("vocab_size",)) or 0
    table = _embedding(model)
    if table is not None:
        count = min(count, table) if count else table
    pad = _id(config, "pad_token_id")
    if pad is None and tokenizer is not None:
        pad = _id(tokenizer, "pad_token_id")
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
    """Return `input_ids`, and the mask, token types and boxes if model and tokenizer have them."""
    accepted = parameters_of(model)
    given: set[str] = set(getattr(tokenizer, "model_input_names", None) or [""])
    if tokenizer is None:
        given = {"attention_mask"}
        if words_of(model, None).types > 1:
            given.add("token_type_ids")
    found = [Input("input_ids", (batch, "sequence"), "ids")]
    if "attention_mask" in accepted & given:
        found.append(Input("attention_mask", (batch, "sequence"), "mask"))
    if "token_type_ids" in accepted & given:
        found.append(Input("token_type_ids", (batch, "sequence"), "types"))
    if "bbox" in accepted:
        found.append(Input("bbox", (batch, "sequence", 4), "boxes"))
    return tuple(found)


def text_settings(words: Vocabulary, model: Any, batch: str = "batch") -> tuple[Setting, ...]:
    """Return settings of batch 1, 2 and 5, short and long, unpadded and padded on either side."""
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
    """Return a length beyond the window of local attention, within the position embeddings."""
    config = text_config(model.config)
    windows = (_first(config, (name,)) for name in ("sliding_window", "local_attention"))
    window = max((w for w in windows if w), default=0)
    wanted = window + 9 if window and window + 9 <= _MAX_POSITIONS else 41
    return max(2, min(wanted, words.longest))


def text_config(config: Any) -> Any:
    """Return the config of the text model."""
    get = getattr(config, "get_text_config", None)
    return get() if get is not None else config


def _longest(config: Any) -> int:
    names = ("max_position_embeddings", "n_positions", "max_length_positions", "n_ctx")
    positions = _first(config, names)
    # RoBERTa and its descendants start counting after the padding id
    return max(2, min(_MAX_POSITIONS, positions - 4)) if positions else _MAX_POSITIONS


def _embedding(model: Any) -> int | None:
    try:
        return int(model.get_input_embeddings().num_embeddings)
    except (AttributeError, NotImplementedError, TypeError):
        return None


# Images ------------------------------------------------------------------------------------------


def image_input(model: Any, batch: str = "batch") -> Input:
    """Return `pixel_values` of dynamic height and width."""
    channels = _first(_image_config(model.config), ("num_channels", "in_channels")) or 3
    return Input("pixel_values", (batch, channels, "height", "width"), "noise")


def image_size(model: Any, settings: Mapping[str, Any]) -> tuple[int, int]:
    """Return the height and width in the config, else in the processor's settings."""
    for given in (
        getattr(_image_config(model.config), "image_size", None),
        settings.get("crop_size") if settings.get("do_center_crop", True) else None,
        settings.get("size"),
    ):
        found = _height_and_width(given)
        if found is not None:
            return found
    return _IMAGE_SIZE, _IMAGE_SIZE


def _image_config(config: Any) -> Any:
    for name in ("vision_config", "image_config", "backbone_config"):
        part = getattr(config, name, None)
        if part is not None and not isinstance(part, dict) and not hasattr(config, "image_size"):
            return part
    return config


def _height_and_width(given: Any) -> tuple[int, int] | None:
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
    """Return the inputs of an audio model, raw samples or frames of features, and their length.

    The dynamic dimension is `samples` or `frames`.
    """
    config, accepted = model.config, parameters_of(model)
    main = str(getattr(model, "main_input_name", "input_values"))
    bins = _first(config, ("num_mel_bins", "feature_size"))
    positions = _first(config, ("max_source_positions",))
    per_channel = _first(config, ("input_feat_per_channel",))
    if main == "input_features" and positions and bins and not per_channel:
        # Whisper pads everything to one length
        return (Input(main, ("batch", bins, "frames"), "noise"),), 2 * positions
    if main == "input_values" and bins and hasattr(config, "max_length"):  # a spectrogram
        return (Input(main, ("batch", "frames", bins), "noise"),), int(config.max_length)
    if main == "input_features":
        encoder = getattr(config, "encoder_config", config)
        names = ("feature_projection_input_dim", "num_mel_bins", "input_dim", "hidden_size")
        width = _first(config, names) or _first(encoder, names) or 80
        if per_channel:
            width = per_channel * (_first(config, ("input_channels",)) or 1)
        found = [Input(main, ("batch", "frames", width), "noise")]
        if "attention_mask" in accepted:
            found.append(Input("attention_mask", ("batch", "frames"), "mask"))
        return tuple(found), _FEATURE_FRAMES
    found = [Input(main, ("batch", "samples"), "noise")]
    masked = settings.get(
        "return_attention_mask", getattr(config, "feat_extract_norm", "") == "layer"
    )
    if "attention_mask" in accepted and masked:
        found.append(Input("attention_mask", ("batch", "samples"), "mask"))
    return tuple(found), _RAW_SAMPLES


# -------------------------------------------------------------------------------------------------


def parameters_of(model: Any) -> set[str]:
    """Return the parameter names of the model's forward."""
    return set(inspect.signature(model.forward).parameters)


def _first(config: Any, names: Sequence[str]) -> int | None:
    """Return the first of these fields that is a positive integer."""
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _id(config: Any, name: str) -> int | None:
    """Return a token id, the first if there are several."""
    value = getattr(config, name, None)
    if isinstance(value, (list, tuple)):
        listed = cast("Sequence[Any]", value)
        value = listed[0] if listed else None
    return value if isinstance(value, int) and value >= 0 else None
