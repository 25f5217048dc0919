"""The graphs of a checkpoint: a wrapper and its interface for each.

Most tasks are one graph. An encoder-decoder is three: the encoder, the decoder's first step from
the encoder's output, and its later steps from the cache. Shapes of caches and hidden states are
taken from a run, because configs all name them differently.
"""

# pyright may run without torch and transformers, so their types are not checked.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from toolkit.errors import UsageError, summarize
from toolkit.frontends.transformers import inputs as fed, wrappers
from toolkit.frontends.transformers.checkpoint import Checkpoint
from toolkit.frontends.transformers.inputs import GraphInterface, Input, Setting, Vocabulary
from toolkit.frontends.transformers.pooling import head_of
from toolkit.frontends.transformers.tasks import Outputs


@dataclass(frozen=True)
class Blueprint:
    """One graph to export: the module to trace, its inputs, and notes for the report."""

    name: str
    wrapper: wrappers.Wrapper
    interface: GraphInterface
    notes: tuple[str, ...] = ()


def blueprints(checkpoint: Checkpoint) -> list[Blueprint]:
    """Return the graphs of the checkpoint's task; raise UsageError if the model does not run."""
    form = checkpoint.choice.head.form
    if form == "encoder-decoder":
        return _encoder_decoder(checkpoint)
    if form == "cached":
        return [_cached(checkpoint)]
    return [_single(checkpoint)]


def run(wrapper: wrappers.Wrapper, interface: GraphInterface, setting: Setting) -> list[Any]:
    """Return the wrapper's outputs on a feed of this setting."""
    feed = interface.feed(setting)
    with torch.no_grad():
        return list(wrapper(*(torch.from_numpy(feed[name]) for name in wrapper.inputs)))


# One graph ---------------------------------------------------------------------------------------


def _single(checkpoint: Checkpoint) -> Blueprint:
    model, head = checkpoint.model, checkpoint.choice.head
    interface = _interface(checkpoint, model)
    fixed = {"use_cache": False} if "use_cache" in fed.parameters_of(model) else {}
    notes: list[str] = []
    wrapper: wrappers.Wrapper
    if head.form == "pooled":
        pooling, note = head_of(checkpoint.folder)
        notes.append(note)
        wrapper = wrappers.Pooled(model, pooling, interface.names, head.outputs, **fixed)
    else:
        wrapper = wrappers.Plain(model, interface.names, head.outputs, **fixed)
    wrapper.eval()
    try:
        run(wrapper, interface, interface.settings[0])
    except Exception as error:  # a model may raise anything
        encoder = _encoder_only(checkpoint, wrapper)
        if encoder is None:
            raise UsageError(_why_it_fails(checkpoint, interface, error)) from error
        wrapper, interface = encoder
        notes.append("only the encoder is exported: the whole model requires decoder inputs")
    interface, note = _with_fixed_sizes(wrapper, interface)
    return Blueprint("model", wrapper, interface, tuple(filter(None, [*notes, note])))


def _interface(checkpoint: Checkpoint, model: Any) -> GraphInterface:
    """Return the interface by the kind of input: text, images, audio, or text with images."""
    main = str(getattr(model, "main_input_name", "input_ids"))
    if "image_embeds" in checkpoint.choice.head.outputs:
        return _pair(checkpoint, model)
    if main.startswith("pixel"):
        return _images(checkpoint, model)
    if main in ("input_values", "input_features"):
        return _audio(checkpoint, model)
    words = fed.words_of(model, checkpoint.tokenizer)
    given = fed.text_inputs(model, checkpoint.tokenizer)
    return GraphInterface(given, fed.text_settings(words, model), words)


_NO_TEXT = Vocabulary(2, 0)


def _images(checkpoint: Checkpoint, model: Any) -> GraphInterface:
    rows, columns = fed.image_size(model, checkpoint.settings)
    pixels = fed.image_input(model)
    settings = tuple(
        Setting({"batch": batch, "height": height, "width": width})
        for batch, (height, width) in zip((2, 1, 5, 2, 1), _image_sizes(rows, columns), strict=True)
    )
    return GraphInterface((pixels,), settings, _NO_TEXT, frozenset({"height", "width"}))


def _image_sizes(rows: int, columns: int) -> list[tuple[int, int]]:
    """Return the model's own size three times, then two other sizes."""
    step = 32 if rows % 32 == 0 and rows > 32 else max(1, rows // 2)
    return [(rows, columns)] * 3 + [(rows + step, columns + 2 * step), (rows + step, columns)]


def _audio(checkpoint: Checkpoint, model: Any) -> GraphInterface:
    given, length = fed.audio_inputs(model, checkpoint.settings)
    dim = next(d for d in given[0].shape if isinstance(d, str) and d != "batch")
    masked = len(given) > 1
    lengths = (length, length // 2 + 1, length, 2 * length + 3, length)
    settings = tuple(
        Setting({"batch": batch, dim: size}, "right" if masked and batch > 1 else "none")
        for batch, size in zip((2, 1, 5, 2, 1), lengths, strict=True)
    )
    return GraphInterface(given, settings, _NO_TEXT, frozenset({dim}))


def _pair(checkpoint: Checkpoint, model: Any) -> GraphInterface:
    words = fed.words_of(model, checkpoint.tokenizer)
    text = fed.text_inputs(model, checkpoint.tokenizer, "text_batch")
    pixels = fed.image_input(model, "image_batch")
    sizes = _image_sizes(*fed.image_size(model, checkpoint.settings))
    settings = tuple(
        Setting(
            {**of_text.sizes, "image_batch": batch, "height": rows, "width": columns},
            # the model searches for the end of the text, which must not be padded on the left
            "right" if of_text.padding == "left" else of_text.padding,
        )
        for of_text, batch, (rows, columns) in zip(
            fed.text_settings(words, model, "text_batch"), (3, 1, 2, 5, 1), sizes, strict=True
        )
    )
    return GraphInterface((*text, pixels), settings, words, frozenset({"height", "width"}))


def _encoder_only(
    checkpoint: Checkpoint, whole: wrappers.Wrapper
) -> tuple[wrappers.Wrapper, GraphInterface] | None:
    """Return the same task on the encoder, for models such as T5 that require decoder inputs."""
    model = checkpoint.model
    wanted = "last_hidden_state" in whole.outputs or isinstance(whole, wrappers.Pooled)
    if not wanted or not getattr(model.config, "is_encoder_decoder", False):
        return None
    encoder = model.get_encoder()
    interface = _interface(checkpoint, encoder)
    if isinstance(whole, wrappers.Pooled):
        made = wrappers.Pooled(encoder, whole.head, interface.names, whole.outputs)
    else:
        made = wrappers.Plain(encoder, interface.names, whole.outputs)
    try:
        run(made.eval(), interface, interface.settings[0])
    except Exception:  # the error of the whole model is more informative
        return None
    return made, interface


def _why_it_fails(checkpoint: Checkpoint, interface: GraphInterface, error: Exception) -> str:
    name = type(checkpoint.model).__name__
    if isinstance(error, KeyError):
        return f"{name} has no output {error}, as task '{checkpoint.choice.task}' requires"
    given = ", ".join(interface.names)
    return f"{name} does not run on {given} alone: {summarize(error)}"


def _with_fixed_sizes(
    wrapper: wrappers.Wrapper, interface: GraphInterface
) -> tuple[GraphInterface, str]:
    """Fix the optional dimensions if the model supports one size only; return a note on them."""
    first = interface.settings[0].sizes
    for setting in interface.settings:
        if all(setting.sizes[dim] == first[dim] for dim in interface.optional):
            continue
        try:
            run(wrapper, interface, setting)
        except Exception:  # a model may raise anything
            sizes = " and ".join(f"{dim} {first[dim]}" for dim in sorted(interface.optional))
            note = f"fixed at {sizes}: the model supports no other size"
            return with_fixed(interface, interface.optional), note
    return interface, ""


def with_fixed(interface: GraphInterface, dims: frozenset[str]) -> GraphInterface:
    """Fix these dimensions at the sizes of the first setting."""
    sizes = {dim: interface.settings[0].sizes[dim] for dim in dims}

    settings: list[Setting] = []
    for setting in interface.settings:
        kept = {dim: size for dim, size in setting.sizes.items() if dim not in dims}
        made = replace(setting, sizes=kept)
        if made not in settings:
            settings.append(made)
    return replace(
        interface,
        inputs=tuple(
            replace(each, shape=tuple(sizes.get(str(d), d) for d in each.shape))
            for each in interface.inputs
        ),
        settings=tuple(settings),
        optional=interface.optional - dims,
    )


# Caches ------------------------------------------------------------------------------------------

_SUPPORTED_LAYERS = ("DynamicLayer", "DynamicSlidingWindowLayer")
"""Cache layers that hold the keys and values of all tokens so far."""


def _cached(checkpoint: Checkpoint) -> Blueprint:
    model, words = checkpoint.model, fed.words_of(checkpoint.model, checkpoint.tokenizer)
    plain = fed.text_inputs(model, None)
    if "attention_mask" not in {each.name for each in plain}:
        raise UsageError(
            f"{type(model).__name__} has no attention mask: use --task text-generation"
        )
    past: list[Input] = []
    outputs: dict[str, dict[int, str]] = {"logits": {0: "batch", 1: "sequence"}}
    for layer, shapes in enumerate(_cache_shapes(checkpoint)):
        for kind, (heads, width) in zip(("key", "value"), shapes, strict=True):
            name = f"past_key_values.{layer}.{kind}"
            past.append(Input(name, ("batch", heads, "past", width), "noise"))
            outputs[f"present.{layer}.{kind}"] = {0: "batch", 2: "total"}
    interface = GraphInterface(
        inputs=(
            Input("input_ids", ("batch", "sequence"), "ids"),
            Input("attention_mask", ("batch", "total"), "mask"),
            *past,
        ),
        settings=tuple(_cache_settings(fed.long_text(words, model))),
        words=replace(words, last=None),
    )
    wrapper = wrappers.Cached(
        model, interface.names, outputs, positions="position_ids" in fed.parameters_of(model)
    )
    return Blueprint("model", wrapper.eval(), interface)


def _cache_settings(long: int) -> list[Setting]:
    """Return settings of one token and several, after a cache of zero, few and many tokens."""

    def at(batch: int, sequence: int, past: int, padding: fed.Padding = "none") -> Setting:
        sizes = {"batch": batch, "sequence": sequence, "past": past, "total": past + sequence}
        return Setting(sizes, padding)

    return [
        at(2, 4, min(7, long - 4), "left"),
        at(1, min(6, long), 0),
        at(5, 1, min(6, long - 1), "left"),
        at(2, 1, long - 1),
        at(2, min(9, long), 0, "left"),
        at(1, 1, 0),
    ]


def _cache_shapes(checkpoint: Checkpoint) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return the heads and width of the keys and of the values of every layer."""
    model = checkpoint.model
    ids = torch.ones(1, 2, dtype=torch.int64)
    try:
        with torch.no_grad():
            given = model(input_ids=ids, use_cache=True, return_dict=True)
    except Exception as error:  # a model may raise anything
        raise UsageError(f"{type(model).__name__} does not run: {summarize(error)}") from error
    cache = getattr(given, "past_key_values", None)
    layers: Sequence[Any] = getattr(cache, "layers", None) or []
    if not layers or any(type(layer).__name__ not in _SUPPORTED_LAYERS for layer in layers):
        raise UsageError(
            f"{type(model).__name__} does not cache keys and values in every layer: use --task "
            "text-generation"
        )
    return [(_heads(layer.keys), _heads(layer.values)) for layer in layers]


def keeps_cache(checkpoint: Checkpoint) -> bool:
    """Return whether a graph of plain text generation could be exported with a cache."""
    if checkpoint.choice.task != "text-generation":
        return False
    try:
        return bool(_cache_shapes(checkpoint))
    except UsageError:
        return False


def _heads(tensor: Any) -> tuple[int, int]:
    return int(tensor.shape[1]), int(tensor.shape[3])


# Encoder and decoder -----------------------------------------------------------------------------


def _encoder_decoder(checkpoint: Checkpoint) -> list[Blueprint]:
    model = checkpoint.model
    encoder = _encoder(checkpoint)
    states = run(encoder.wrapper, encoder.interface, encoder.interface.settings[0])[0]
    masked = {"attention_mask", "input_ids"} <= set(encoder.interface.names)
    words = fed.words_of(model, checkpoint.tokenizer)
    first = _decoder(model, int(states.shape[-1]), masked, words)
    try:
        made = run(first.wrapper, first.interface, first.interface.settings[0])
    except Exception as error:  # a model may raise anything
        raise UsageError(
            f"the decoder of {type(model).__name__} does not run: {summarize(error)}"
        ) from error
    caches = made[1:]
    if not caches or len(caches) % 4:
        raise UsageError(f"{type(model).__name__} does not cache keys and values in every layer")
    outputs: dict[str, Mapping[int, str]] = {"logits": {0: "batch", 1: "sequence"}}
    for name in _cache_names(len(caches) // 4):
        length = "source" if ".encoder." in name else "sequence"
        outputs[f"present{name}"] = {0: "batch", 2: length}
    first.wrapper.outputs = outputs
    later = _decoder_with_past(model, caches, int(states.shape[-1]), masked, words)
    return [encoder, first, later]


def _cache_names(layers: int) -> list[str]:
    parts = (("decoder", "key"), ("decoder", "value"), ("encoder", "key"), ("encoder", "value"))
    return [f".{layer}.{part}.{kind}" for layer in range(layers) for part, kind in parts]


def _encoder(checkpoint: Checkpoint) -> Blueprint:
    part = checkpoint.model.get_encoder()
    interface = _interface(checkpoint, part)
    outputs: Outputs = {"last_hidden_state": {0: "batch", 1: "sequence"}}
    wrapper = wrappers.Encoder(part, interface.names, outputs).eval()
    try:
        run(wrapper, interface, interface.settings[0])
    except Exception as error:  # a model may raise anything
        raise UsageError(_why_it_fails(checkpoint, interface, error)) from error
    interface, note = _with_fixed_sizes(wrapper, interface)
    return Blueprint("encoder", wrapper, interface, (note,) if note else ())


def _decoder(model: Any, width: int, masked: bool, words: Vocabulary) -> Blueprint:
    given = [
        Input("input_ids", ("batch", "sequence"), "ids"),
        Input("encoder_hidden_states", ("batch", "source", width), "noise"),
    ]
    if masked:
        given.insert(1, Input("encoder_attention_mask", ("batch", "source"), "mask"))
    pad: fed.Padding = "right" if masked else "none"
    settings = tuple(
        Setting({"batch": batch, "sequence": sequence, "source": source}, pad)
        for batch, sequence, source in ((2, 4, 11), (1, 1, 3), (5, 3, 7), (2, 6, 41))
    )
    interface = GraphInterface(tuple(given), settings, replace(words, last=None))
    wrapper = wrappers.Decoder(model, interface.names, {}).eval()
    return Blueprint("decoder", wrapper, interface)


_LATER_STEPS = ((2, 3, 5, 11), (1, 1, 1, 3), (5, 1, 4, 7), (2, 1, 12, 41))
"""Test sizes of batch, sequence, past and source."""


def _decoder_with_past(
    model: Any, caches: Sequence[Any], width: int, masked: bool, words: Vocabulary
) -> Blueprint:
    given = [Input("input_ids", ("batch", "sequence"), "ids")]
    if masked:
        given.append(Input("encoder_attention_mask", ("batch", "source"), "mask"))
    outputs: dict[str, dict[int, str]] = {"logits": {0: "batch", 1: "sequence"}}
    for name, tensor in zip(_cache_names(len(caches) // 4), caches, strict=True):
        heads, size = _heads(tensor)
        length = "source" if ".encoder." in name else "past"
        given.append(Input(f"past_key_values{name}", ("batch", heads, length, size), "noise"))
        if ".decoder." in name:
            outputs[f"present{name}"] = {0: "batch", 2: "total"}
    pad: fed.Padding = "right" if masked else "none"
    settings = tuple(
        Setting({"batch": batch, "sequence": sequence, "past": past, "source": source}, pad)
        for batch, sequence, past, source in _LATER_STEPS
    )
    interface = GraphInterface(tuple(given), settings, replace(words, last=None))
    wrapper = wrappers.DecoderWithPast(model, interface.names, outputs, width).eval()
    return Blueprint("decoder_with_past", wrapper, interface)
