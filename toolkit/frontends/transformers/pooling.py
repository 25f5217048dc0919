"""Reduce hidden states to one vector per text: pooling, dense layers, normalization.

sentence-transformers lists these modules in `modules.json`, and the settings of each in a folder of
its own. `PoolingHead` computes the same from hidden states h and mask m, for instance
mean = sum(h * m) / max(sum(m), 1e-9), then v / |v|.
"""

# pyright may run without torch, so its types are not checked.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from toolkit.errors import UsageError, summarize
from toolkit.frontends.transformers.checkpoint import read_json

_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Pooling modes by their flags in 1_Pooling/config.json, in the order of concatenation."""


def pool(mode: str, states: Tensor, mask: Tensor) -> Tensor:
    """Reduce (batch, sequence, width) with a mask (batch, sequence) to (batch, width)."""
    if mode == "cls":
        return states[:, 0]
    weights = mask.unsqueeze(-1).to(states.dtype)
    if mode == "max":
        return states.masked_fill(weights == 0, -1e9).amax(1)
    if mode == "lasttoken":
        # the last unmasked position
        places = torch.arange(mask.shape[1], device=mask.device)[None] * (mask != 0)
        last = places.amax(1)[:, None, None].expand(-1, 1, states.shape[-1])
        return states.gather(1, last)[:, 0] * (weights.amax(1) > 0)
    if mode == "weightedmean":
        weights = weights * (torch.arange(states.shape[1], device=states.device) + 1)[None, :, None]
    total = (states * weights).sum(1)
    count = weights.sum(1).clamp(min=1e-9)
    return total / (count.sqrt() if mode == "mean_sqrt_len_tokens" else count)


class Pooling(nn.Module):
    """One or more pooling modes, concatenated."""

    def __init__(self, modes: tuple[str, ...]) -> None:
        super().__init__()
        self.modes = modes

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        pooled = [pool(mode, states, mask) for mode in self.modes]
        return pooled[0] if len(pooled) == 1 else torch.cat(pooled, 1)


class Normalize(nn.Module):
    """v / |v|"""

    def forward(self, vectors: Tensor) -> Tensor:
        return functional.normalize(vectors, p=2, dim=1)


class PoolingHead(nn.Module):
    """Pooling and the modules after it."""

    def __init__(self, pooling: Pooling, after: list[nn.Module]) -> None:
        super().__init__()
        self.pooling, self.after = pooling, nn.Sequential(*after)

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        return self.after(self.pooling(states, mask))


def head_of(folder: Path | None) -> tuple[PoolingHead, str]:
    """Return the checkpoint's pooling head, and a note on it."""
    listed = folder / "modules.json" if folder is not None else None
    if folder is None or listed is None or not listed.is_file():
        return PoolingHead(Pooling(("mean",)), []), "mean pooling: the checkpoint declares none"
    pooling: Pooling | None = None
    after: list[nn.Module] = []
    for module in read_json(listed, list):
        kind, place = str(module.get("type", "")).rpartition(".")[2], str(module.get("path", ""))
        if kind == "Transformer":
            continue
        if kind == "Pooling":
            pooling = Pooling(_modes(folder / place / "config.json"))
        elif kind == "Normalize":
            after.append(Normalize())
        elif kind == "Dense":
            after.append(_dense(folder / place))
        elif kind != "Dropout":
            raise UsageError(f"'{listed}': module {kind} is not supported; use --task default")
    if pooling is None:
        raise UsageError(f"'{listed}' has no Pooling module: use --task default")
    names = [*pooling.modes, *(type(each).__name__.lower() for each in after)]
    return PoolingHead(pooling, after).eval(), f"pooling from the checkpoint: {', '.join(names)}"


def _modes(path: Path) -> tuple[str, ...]:
    settings = read_json(path)
    given = settings.get("pooling_mode")
    if given:
        modes = (given,) if isinstance(given, str) else tuple(given)
    else:
        modes = tuple(mode for flag, mode in _FLAGS.items() if settings.get(flag))
    unknown = set(modes) - set(_FLAGS.values())
    if unknown or not modes:
        raise UsageError(
            f"'{path}': pooling mode {', '.join(sorted(unknown)) or 'none'} is not supported"
        )
    return modes


class DenseLayer(nn.Module):
    """activation(x W + b)"""

    def __init__(self, linear: nn.Linear, activation: nn.Module) -> None:
        super().__init__()
        self.linear, self.activation = linear, activation

    def forward(self, vectors: Tensor) -> Tensor:
        return self.activation(self.linear(vectors))


def _dense(folder: Path) -> DenseLayer:
    settings = read_json(folder / "config.json")
    bias = bool(settings.get("bias", True))
    linear = nn.Linear(settings["in_features"], settings["out_features"], bias=bias)
    name = str(settings.get("activation_function", "torch.nn.modules.activation.Tanh"))
    activation = getattr(nn, name.rpartition(".")[2], None)
    if not name.startswith("torch.nn.") or activation is None:
        raise UsageError(f"'{folder / 'config.json'}': activation {name} is not in torch.nn")
    try:
        if (folder / "model.safetensors").is_file():
            load = import_module("safetensors.torch").load_file
            weights = load(str(folder / "model.safetensors"))
        else:
            weights = torch.load(str(folder / "pytorch_model.bin"), weights_only=True)
        linear.load_state_dict({k.removeprefix("linear."): v.float() for k, v in weights.items()})
    except Exception as error:  # a missing, damaged or unrelated file
        raise UsageError(
            f"the weights in '{folder}' cannot be loaded: {summarize(error)}"
        ) from error
    return DenseLayer(linear, activation())
