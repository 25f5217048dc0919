"""Export the golden models from PyTorch: `python -m tests.golden.make_models [NAME ...]`.

Needs the `export` extra; the tests read the texts that this wrote.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import nn
from torch.nn import functional as F

from tests.golden.text import text_of
from tests.golden.update import path_of
from toolkit.ir.model import Model

Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
"""A module, example inputs, and options of `torch.onnx.export`."""


class EncoderLayer(nn.Module):
    """Token embeddings and one post-norm encoder layer with a padding mask, as in BERT."""

    def __init__(self, width: int = 128, heads: int = 4, words: int = 500) -> None:
        super().__init__()
        self.heads = heads
        self.words, self.positions = nn.Embedding(words, width), nn.Embedding(64, width)
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm0, self.norm1 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)

    def split(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(x.shape[0], x.shape[1], self.heads, -1).transpose(1, 2)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.norm0(self.words(input_ids) + self.positions(places))
        mask = (1.0 - attention_mask[:, None, None, :].to(x.dtype)) * torch.finfo(x.dtype).min
        q, k, v = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        scores = q @ k.transpose(-1, -2) / (x.shape[-1] // self.heads) ** 0.5 + mask
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape)
        x = self.norm1(x + self.out(mixed))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class DecoderLayer(nn.Module):
    """One pre-norm decoder layer: rotary embedding, grouped heads, a cache, SwiGLU; as in Llama."""

    def __init__(self, width: int = 128, heads: int = 4, groups: int = 2) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, groups * self.size, bias=False)
        self.value = nn.Linear(width, groups * self.size, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, 2 * width, bias=False)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.norm1, self.norm2 = nn.Parameter(torch.ones(width)), nn.Parameter(torch.ones(width))
        steps = torch.arange(0, self.size, 2, dtype=torch.float32) / self.size
        self.frequencies: torch.Tensor
        self.register_buffer("frequencies", 1e4**-steps)

    @staticmethod
    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

    @staticmethod
    def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        one, two = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-two, one), dim=-1) * sin

    def repeated(self, x: torch.Tensor) -> torch.Tensor:
        batch, groups, length, size = x.shape
        wide = x[:, :, None].expand(batch, groups, self.heads // groups, length, size)
        return wide.reshape(batch, self.heads, length, size)

    def forward(
        self,
        hidden: torch.Tensor,
        position_ids: torch.Tensor,
        past_key: torch.Tensor,
        past_value: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        batch, length, width = hidden.shape
        x = self.norm(hidden, self.norm1)
        q = self.query(x).view(batch, length, self.heads, self.size).transpose(1, 2)
        k = self.key(x).view(batch, length, self.groups, self.size).transpose(1, 2)
        v = self.value(x).view(batch, length, self.groups, self.size).transpose(1, 2)
        angles = position_ids[:, :, None].float() * self.frequencies
        angles = torch.cat((angles, angles), dim=-1)[:, None]
        cos, sin = angles.cos(), angles.sin()
        q, k = self.rotated(q, cos, sin), self.rotated(k, cos, sin)
        k, v = torch.cat((past_key, k), dim=2), torch.cat((past_value, v), dim=2)
        columns = torch.arange(k.shape[2])
        hides = columns[None, :] > torch.arange(length)[:, None] + past_key.shape[2]
        mask = torch.zeros(length, k.shape[2]).masked_fill(hides, torch.finfo(x.dtype).min)
        scores = q @ self.repeated(k).transpose(2, 3) * self.size**-0.5 + mask
        mixed = scores.softmax(-1) @ self.repeated(v)
        hidden = hidden + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        x = self.norm(hidden, self.norm2)
        return hidden + self.down(F.silu(self.gate(x)) * self.up(x)), k, v


class VisionBlock(nn.Module):
    """Patches, a class token, one pre-norm layer with packed projections, a classifier; as ViT."""

    def __init__(self, width: int = 128, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.patches = nn.Conv2d(3, width, 8, 8)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.zeros(1, 17, width))
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.packed, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.classifier = nn.Linear(width, 10)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        x = self.patches(pixels).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(x.shape[0], -1, -1), x), dim=1) + self.places
        batch, length, width = x.shape
        packed = self.packed(self.norm1(x)).reshape(batch, length, 3, self.heads, -1)
        q, k, v = packed.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        x = x + self.out(mixed.reshape(batch, length, width))
        x = x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return self.classifier(x[:, 0])


class ConvBlock(nn.Module):
    """Convolution, batch norm and SiLU, with squeeze-and-excite and a residual; a classifier."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.stem, self.norm0 = nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width)
        self.expand = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(4 * width)
        self.depth = nn.Conv2d(4 * width, 4 * width, 3, 1, 1, groups=4 * width, bias=False)
        self.norm2 = nn.BatchNorm2d(4 * width)
        self.squeeze = nn.Conv2d(4 * width, width, 1)
        self.excite = nn.Conv2d(width, 4 * width, 1)
        self.project, self.norm3 = nn.Conv2d(4 * width, width, 1), nn.BatchNorm2d(width)
        self.classifier = nn.Linear(width, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = F.silu(self.norm0(self.stem(image)))
        y = F.silu(self.norm1(self.expand(x)))
        y = F.hardswish(self.norm2(self.depth(y)))
        scale = self.excite(F.silu(self.squeeze(y.mean((2, 3), keepdim=True))))
        x = x + self.norm3(self.project(y * torch.sigmoid(scale)))
        return self.classifier(F.adaptive_avg_pool2d(x, 1).flatten(1))


class DetectorHead(nn.Module):
    """Space to depth by slices, an upsampled neighbor, boxes decoded on a grid; as in YOLO."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.focus = nn.Conv2d(12, width, 3, 1, 1)
        self.lower = nn.Conv2d(width, 2 * width, 3, 2, 1)
        self.merge = nn.Conv2d(3 * width, width, 3, 1, 1)
        self.boxes, self.scores = nn.Conv2d(width, 4, 1), nn.Conv2d(width, 5, 1)

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        corners = (image[..., i::2, j::2] for i in (0, 1) for j in (0, 1))
        fine = F.leaky_relu(self.focus(torch.cat(tuple(corners), 1)), 0.1)
        coarse = F.relu(self.lower(fine))
        wide = F.interpolate(coarse, scale_factor=2.0, mode="nearest")
        x = F.relu(self.merge(torch.cat((fine, wide), 1)))
        found = torch.cat((self.boxes(x), self.scores(x).sigmoid()), 1).flatten(2).transpose(1, 2)
        rows, columns = torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij")
        grid = torch.stack((columns, rows), 2).view(1, -1, 2).to(found.dtype)
        centers, sizes = (found[..., :2] + grid) * 2, found[..., 2:4].exp() * 2
        boxes = torch.cat((centers - sizes / 2, centers + sizes / 2), 2)
        return boxes, found[..., 4:5] * found[..., 5:]


class Recurrent(nn.Module):
    """A bidirectional LSTM and a GRU over frames, the mean of which is classified."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first = nn.LSTM(32, width, batch_first=True, bidirectional=True)
        self.second = nn.GRU(2 * width, width, batch_first=True)
        self.classifier = nn.Linear(width, 12)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        x, _ = self.first(frames)
        x, _ = self.second(F.relu(x))
        return self.classifier(x.mean(1)).log_softmax(-1)


class ControlFlow(nn.Module):
    """A branch by the data and a loop by a count, both with layers and captures inside."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first, self.step = nn.Linear(width, width), nn.Linear(width, width)
        self.large, self.small = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        first = self.first(x)
        state = first
        for _ in range(int(count)):
            state = torch.tanh(self.step(state) + first * 1.0)
        if bool(x.sum() > 0):
            out = torch.relu(self.large(state)) + first
        else:
            out = F.gelu(self.small(state)) - first
        return out.sigmoid()


class FakeQuantized(nn.Module):
    """Linear and convolutional layers trained with quantization: exported with Q/DQ pairs."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, width, 3, 1, 1), nn.BatchNorm2d(width)
        self.next, self.linear = nn.Conv2d(width, width, 1), nn.Linear(width, 10)

    @staticmethod
    def tensor(x: torch.Tensor, scale: float, zero: int = 128) -> torch.Tensor:
        return torch.fake_quantize_per_tensor_affine(x, scale, zero, 0, 255)

    def weight(self, layer: Any) -> torch.Tensor:
        return torch.fake_quantize_per_tensor_affine(layer.weight, 0.015, 0, -128, 127)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.tensor(image, 0.03)
        x = F.conv2d(x, self.weight(self.conv), self.conv.bias, padding=1)
        x = self.tensor(F.relu(self.norm(x)), 0.04, 0)
        y = self.tensor(F.conv2d(x, self.weight(self.next), self.next.bias), 0.05)
        x = self.tensor(F.relu(x + y), 0.04, 0)
        x = self.tensor(F.adaptive_avg_pool2d(x, 1), 0.02, 0).flatten(1)
        return F.linear(x, self.weight(self.linear), self.linear.bias)


def encoder_layer() -> Built:
    ids = torch.randint(0, 500, (2, 7))
    names = ["input_ids", "attention_mask"]
    axes = {name: {0: "batch", 1: "sequence"} for name in names}
    options = {"input_names": names, "output_names": ["hidden"], "dynamic_axes": axes}
    return EncoderLayer(), (ids, torch.ones_like(ids)), {**options, "dynamo": False}


def decoder_layer() -> Built:
    hidden, places = torch.randn(2, 3, 128), torch.arange(5, 8).repeat(2, 1)
    past = torch.randn(2, 2, 5, 32)
    batch, length, old = (torch.export.Dim(name) for name in ("batch", "sequence", "past"))
    cache = {0: batch, 2: old}
    shapes = ({0: batch, 1: length}, {0: batch, 1: length}, cache, cache)
    options = {
        "input_names": ["hidden", "position_ids", "past_key", "past_value"],
        "output_names": ["out", "key", "value"],
        "dynamic_shapes": shapes,
    }
    return DecoderLayer(), (hidden, places, past, past + 1), options


def vision_block() -> Built:
    shapes = ({0: torch.export.Dim("batch")},)
    options = {"input_names": ["pixels"], "output_names": ["logits"], "dynamic_shapes": shapes}
    return VisionBlock(), (torch.randn(2, 3, 32, 32),), options


def conv_block() -> Built:
    shapes = ({0: torch.export.Dim("batch")},)
    options = {"input_names": ["image"], "output_names": ["logits"], "dynamic_shapes": shapes}
    return ConvBlock(), (torch.randn(2, 3, 32, 32),), {**options, "optimize": False}


def detector_head() -> Built:
    options = {
        "input_names": ["image"],
        "output_names": ["boxes", "scores"],
        "dynamic_axes": {name: {0: "batch"} for name in ("image", "boxes", "scores")},
    }
    return DetectorHead(), (torch.randn(2, 3, 32, 32),), {**options, "dynamo": False}


def recurrent() -> Built:
    options = {
        "input_names": ["frames"],
        "output_names": ["scores"],
        "dynamic_axes": {"frames": {0: "batch", 1: "time"}},
    }
    return Recurrent(), (torch.randn(2, 9, 32),), {**options, "dynamo": False}


def control_flow() -> Built:
    options = {
        "input_names": ["x", "count"],
        "output_names": ["y"],
        "dynamic_axes": {"x": {0: "batch"}},
    }
    scripted = torch.jit.script(ControlFlow().eval())
    return scripted, (torch.randn(2, 64), torch.tensor(3)), {**options, "dynamo": False}


def qdq() -> Built:
    options = {
        "input_names": ["image"],
        "output_names": ["logits"],
        "dynamic_axes": {"image": {0: "batch"}},
        "training": torch.onnx.TrainingMode.PRESERVE,
    }
    return FakeQuantized(), (torch.randn(2, 3, 16, 16),), {**options, "dynamo": False}


BUILDERS: dict[str, Callable[[], Built]] = {
    build.__name__: build
    for build in (
        encoder_layer,
        decoder_layer,
        vision_block,
        conv_block,
        detector_head,
        recurrent,
        control_flow,
        qdq,
    )
}


def exported(build: Callable[[], Built]) -> onnx.ModelProto:
    torch.manual_seed(0)
    module, example, options = build()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.onnx")
        torch.onnx.export(module.eval(), example, path, verbose=False, **options)
        return onnx.load(path)


def main(names: list[str]) -> None:
    for name in names or BUILDERS:
        path = path_of(name, "before")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text_of(Model.from_proto(exported(BUILDERS[name]))), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
