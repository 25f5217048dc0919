"""The PyTorch networks of the benchmark corpus: random weights, nothing downloaded.

A `Network` builds a module and lists its inputs. Sizes are those of small published models, or
smaller to keep the corpus below a few gigabytes; depth and structure, which determine the exported
graph, are kept. Every input has a dynamic batch, text a dynamic length.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from inputs import Input
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Network:
    """A module factory and the inputs of its forward, in order."""

    make: Callable[[], nn.Module]
    inputs: tuple[Input, ...]

    def build(self) -> nn.Module:
        """Return the module with random parameters: no bias is 0, no scale 1, all layers differ.

        In a fresh module, a simplifier would remove operators that trained models need.
        """
        torch.manual_seed(0)
        module = self.make().eval()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.02)
            for part in module.modules():
                if isinstance(part, nn.BatchNorm2d):
                    part.get_buffer("running_mean").normal_(std=0.1)
                    part.get_buffer("running_var").uniform_(0.5, 1.5)
        return module


TOKENS = ("batch", "length")


def text(vocabulary: int) -> tuple[Input, ...]:
    return (
        Input("input_ids", TOKENS, below=vocabulary),
        Input("attention_mask", TOKENS, below=2),
    )


def image(size: int) -> tuple[Input, ...]:
    return (Input("pixel_values", ("batch", 3, size, size)),)


class FirstOutput(nn.Module):
    """Call a transformers model with keyword inputs; return its first output."""

    def __init__(self, model: nn.Module, names: tuple[str, ...], **fixed: Any) -> None:
        super().__init__()
        self.model, self.names, self.fixed = model, names, fixed

    def forward(self, *values: Tensor) -> Tensor:
        named = dict(zip(self.names, values, strict=True))
        return self.model(**named, **self.fixed, return_dict=False)[0]


class MeanOfTokens(FirstOutput):
    """Return the mean of the first output over the tokens selected by the last input, the mask."""

    def forward(self, *values: Tensor) -> Tensor:
        hidden = super().forward(*values)
        weight = values[-1].unsqueeze(-1).expand(hidden.size()).to(hidden.dtype)
        return (hidden * weight).sum(1) / weight.sum(1).clamp(min=1e-9)


class ConvBlock(nn.Sequential):
    """Conv, BatchNorm, SiLU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.SiLU(),
        )


class UNet(nn.Module):
    """A U-Net that interpolates to the size of its skip connections: shape arithmetic in a CNN."""

    def __init__(self, width: int = 32, levels: int = 4) -> None:
        super().__init__()
        widths = [width << level for level in range(levels)]
        self.stem = ConvBlock(3, width)
        self.down = nn.ModuleList(ConvBlock(a, b) for a, b in itertools.pairwise(widths))
        self.up = nn.ModuleList(ConvBlock(a + b, a) for a, b in itertools.pairwise(widths))
        self.head = nn.Conv2d(width, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = [self.stem(x)]
        for block in self.down:
            skips.append(block(nn.functional.max_pool2d(skips[-1], 2)))
        x = skips.pop()
        for block in reversed(self.up):
            skip = skips.pop()
            x = nn.functional.interpolate(x, size=skip.shape[-2:], mode="bilinear")
            x = block(torch.cat([x, skip], dim=1))
        return self.head(x)


class Tagger(nn.Module):
    """PyTorch's nn.TransformerEncoder between an embedding and a classifier.

    Its length is fixed: the TorchScript exporter makes it a constant anyway.
    """

    def __init__(self, vocabulary: int = 8000, width: int = 256) -> None:
        super().__init__()
        # The fused inference kernel has no ONNX form in the TorchScript exporter.
        torch.backends.mha.set_fastpath_enabled(False)
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True, norm_first=True)
        self.embed = nn.Embedding(vocabulary, width)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(width, 17)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(input_ids)))


class MobileNet(nn.Module):
    """MobileNetV2 in PyTorch, like torchvision's: inverted residuals, ReLU6."""

    # (expansion, channels, repeats, stride) of the paper's table 2.
    STAGES = (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    )

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        channels = 32
        layers: list[nn.Module] = [relu6_conv(3, channels, 3, 2)]
        for expansion, width, repeats, stride in self.STAGES:
            for repeat in range(repeats):
                layers.append(InvertedResidual(channels, width, expansion, 1 if repeat else stride))
                channels = width
        layers.append(relu6_conv(channels, 1280, 1))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, classes))

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.classifier(self.features(pixel_values).mean([2, 3]))


class InvertedResidual(nn.Module):
    def __init__(self, inputs: int, outputs: int, expansion: int, stride: int) -> None:
        super().__init__()
        hidden = inputs * expansion
        self.residual = stride == 1 and inputs == outputs
        self.body = nn.Sequential(
            relu6_conv(inputs, hidden, 1) if expansion > 1 else nn.Identity(),
            relu6_conv(hidden, hidden, 3, stride, groups=hidden),
            nn.Conv2d(hidden, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.residual else self.body(x)


def relu6_conv(
    inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1
) -> nn.Sequential:
    padding = kernel // 2
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, padding, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU6(),
    )


def transformers_model(
    model: str,
    inputs: tuple[Input, ...],
    config: dict[str, Any],
    *,
    eager: bool = False,
    **fixed: Any,
) -> Network:
    """Return the network of a transformers class, built from its declared config class.

    `eager` attention is for models whose SDPA the dynamo exporter cannot decompose with a dynamic
    batch.
    """

    def build() -> nn.Module:
        import transformers

        model_class = getattr(transformers, model)
        built = model_class(model_class.config_class(**config))
        if eager:
            built.set_attn_implementation("eager")
        return FirstOutput(built, tuple(i.name for i in inputs), **fixed)

    return Network(build, inputs)


def whisper_encoder() -> nn.Module:
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    config = WhisperConfig(
        d_model=384,
        encoder_layers=4,
        encoder_attention_heads=6,
        encoder_ffn_dim=1536,
        max_source_positions=300,
    )
    return FirstOutput(WhisperEncoder(config), ("input_features",))


NETWORKS: dict[str, Network] = {
    # 12 layers, 210 MB of fp32: the model of the memory claim.
    "bert": transformers_model(
        "BertModel",
        text(8192),
        {
            "hidden_size": 576,
            "num_hidden_layers": 12,
            "num_attention_heads": 9,
            "intermediate_size": 2304,
            "vocab_size": 8192,
        },
    ),
    "gpt2": transformers_model(
        "GPT2LMHeadModel",
        text(16384),
        {"n_layer": 4, "n_embd": 512, "n_head": 8, "vocab_size": 16384, "n_positions": 256},
        use_cache=False,
    ),
    "t5-encoder": transformers_model(
        "T5EncoderModel",
        text(8192),
        {
            "d_model": 512,
            "d_ff": 1024,
            "d_kv": 64,
            "num_layers": 6,
            "num_heads": 8,
            "vocab_size": 8192,
        },
        eager=True,
    ),
    "llama": transformers_model(
        "LlamaForCausalLM",
        text(16384),
        {
            "hidden_size": 512,
            "intermediate_size": 1376,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "vocab_size": 16384,
        },
        use_cache=False,
    ),
    "vit": transformers_model(
        "ViTForImageClassification",
        image(224),
        {
            "hidden_size": 384,
            "num_hidden_layers": 12,
            "num_attention_heads": 6,
            "intermediate_size": 1536,
            "num_labels": 1000,
        },
    ),
    "clip-vision": transformers_model(
        "CLIPVisionModel",
        image(224),
        {
            "hidden_size": 512,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "intermediate_size": 2048,
            "patch_size": 32,
        },
    ),
    "swin": transformers_model(
        "SwinModel",
        image(224),
        {"embed_dim": 48, "depths": [2, 2, 2, 2], "num_heads": [2, 4, 8, 16]},
        eager=True,
    ),
    "whisper-encoder": Network(whisper_encoder, (Input("input_features", ("batch", 80, 600)),)),
    "resnet50": transformers_model(
        "ResNetForImageClassification", image(224), {"num_labels": 1000}
    ),
    "convnext": transformers_model(
        "ConvNextModel",
        image(224),
        {"depths": [3, 3, 9, 3], "hidden_sizes": [48, 96, 192, 384]},
    ),
    "mobilenet-v2": Network(MobileNet, image(224)),
    "efficientnet-b0": transformers_model(
        "EfficientNetForImageClassification",
        image(224),
        {"width_coefficient": 1.0, "depth_coefficient": 1.0, "hidden_dim": 1280},
    ),
    "unet": Network(UNet, (Input("image", ("batch", 3, "height", "width")),)),
    "tagger": Network(Tagger, (Input("input_ids", ("batch", 64), below=8000),)),
}
