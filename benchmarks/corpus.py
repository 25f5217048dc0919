"""Write the benchmark models to a cache folder, each as `<cache>/<name>/model.onnx`.

    python benchmarks/corpus.py [--cache DIR] [--models PATTERN ...] [--list]

Every network of `networks.py` is exported twice: `<network>-dynamo` by torch.export (the default
opset, weights in a sidecar, as torch writes it) and `<network>-torchscript` by the older exporter
(opset 17, one file). `synthetic.py` adds the models of the growth claims.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import io
import json
import logging
import shutil
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inputs import EXPORTED, Input, random_feed

if TYPE_CHECKING:
    from networks import Network

DEFAULT_CACHE = Path(__file__).resolve().parent.parent / ".cache" / "benchmarks"
TORCHSCRIPT_OPSET = 17
EXPORTERS = ("dynamo", "torchscript")
EXPORTED_NETWORKS = (
    "bert",
    "gpt2",
    "llama",
    "t5-encoder",
    "tagger",
    "vit",
    "clip-vision",
    "swin",
    "whisper-encoder",
    "resnet50",
    "mobilenet-v2",
    "convnext",
    "unet",
)
MLP_WIDTHS = {"mlp-200mb": 2048, "mlp-3gb": 8192}
BIG_DECODER = "decoder-3gb"
CHAIN_NODES = {"chain-20k": 20_000, "chain-40k": 40_000}
# Too big to stay on disk after its measurement.
PASSING = frozenset({"mlp-3gb", BIG_DECODER})

MODELS = (
    *(f"{network}-{exporter}" for network in EXPORTED_NETWORKS for exporter in EXPORTERS),
    *MLP_WIDTHS,
    *CHAIN_NODES,
)
QUICK = (
    "tagger-dynamo",
    "tagger-torchscript",
    "mobilenet-v2-dynamo",
    "mobilenet-v2-torchscript",
    "unet-torchscript",
)


@dataclass(frozen=True, slots=True)
class Entry:
    """A model file of the corpus; `reason` is set if it could not be exported."""

    name: str
    path: Path
    inputs: tuple[Input, ...]
    reason: str = ""
    files: tuple[Path, ...] = field(default=())

    @property
    def bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)

    @property
    def exported(self) -> bool:
        """Whether an exporter wrote it, not `synthetic.py`."""
        return self.name not in (*MLP_WIDTHS, *CHAIN_NODES, BIG_DECODER)


def select(patterns: Sequence[str]) -> list[str]:
    """Return the models that match any of the shell patterns, in the order of the corpus."""
    return [name for name in MODELS if any(fnmatch.fnmatch(name, p) for p in patterns)]


def transformers() -> list[str]:
    """Return the names of all architectures, with each attention and each exporter."""
    from architectures import ARCHITECTURES

    return [
        f"{name}-{attention}-{exporter}"
        for name, architecture in ARCHITECTURES.items()
        for attention in architecture.attentions
        for exporter in EXPORTERS
    ]


def ensure(name: str, cache: Path) -> Entry:
    """Return a model of the cache; write it if it is missing."""
    folder = cache / name
    note = folder / "entry.json"
    if not note.exists():
        folder.mkdir(parents=True, exist_ok=True)
        inputs, reason = _write(name, folder / "model.onnx")
        note.write_text(json.dumps({"inputs": [asdict(i) for i in inputs], "reason": reason}))
    stored = json.loads(note.read_text())
    return Entry(
        name,
        folder / "model.onnx",
        tuple(Input(i["name"], tuple(i["shape"]), i["below"]) for i in stored["inputs"]),
        stored["reason"],
        tuple(sorted(folder.glob("model.onnx*"))),
    )


def discard(name: str, cache: Path) -> None:
    shutil.rmtree(cache / name, ignore_errors=True)


def _write(name: str, path: Path) -> tuple[tuple[Input, ...], str]:
    if width := MLP_WIDTHS.get(name):
        from synthetic import mlp_inputs, write_mlp

        write_mlp(path, width)
        return mlp_inputs(width), ""
    if name == BIG_DECODER:
        from synthetic import Decoder, decoder_inputs, write_decoder

        write_decoder(path, Decoder())
        return decoder_inputs(Decoder()), ""
    if nodes := CHAIN_NODES.get(name):
        from synthetic import chain_inputs, write_chain

        write_chain(path, nodes)
        return chain_inputs(), ""
    built, _, exporter = name.rpartition("-")
    network = _network(built)
    inputs = network.inputs
    try:
        _export(network, exporter == "dynamo", path)
    # An exporter may raise anything, and a model that it cannot write is a row of the table.
    except Exception as error:
        for file in path.parent.glob("model.onnx*"):
            file.unlink()
        return inputs, f"export: {type(error).__name__}: {str(error).splitlines()[0]}"
    return inputs, ""


def _network(name: str) -> Network:
    """Return a network by its name, or an architecture with its attention: `bert`, `bert-sdpa`."""
    from networks import NETWORKS

    if name in NETWORKS:
        return NETWORKS[name]
    from architectures import ARCHITECTURES, DEEP

    architecture, _, attention = name.rpartition("-")
    return {**ARCHITECTURES, **DEEP}[architecture].network(attention)


def _export(network: Network, dynamo: bool, path: Path) -> None:
    import torch

    module, inputs = network.build(), network.inputs
    feed = random_feed(inputs, EXPORTED)
    axes = {i.name: {k: d for k, d in enumerate(i.shape) if isinstance(d, str)} for i in inputs}
    names: dict[str, Any] = {"input_names": list(feed), "output_names": ["output"]}
    arguments = tuple(torch.from_numpy(value) for value in feed.values())
    with _quiet(), torch.no_grad():
        if dynamo:
            dims = {d: torch.export.Dim(d) for dims in axes.values() for d in dims.values()}
            shapes = tuple({k: dims[d] for k, d in axes[name].items()} for name in feed)
            # A forward of *args takes one tuple of shapes for all of them.
            packed = (shapes,) if hasattr(module, "names") else shapes
            torch.onnx.export(module, arguments, path, dynamo=True, dynamic_shapes=packed, **names)
        else:
            torch.onnx.export(
                module,
                arguments,
                str(path),
                dynamo=False,
                opset_version=TORCHSCRIPT_OPSET,
                dynamic_axes=axes,
                **names,
            )


@contextlib.contextmanager
def _quiet():
    """Silence exporters, which print progress and warn about every traced condition."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the benchmark models.")
    parser.add_argument("--cache", type=Path, default=DEFAULT_CACHE)
    parser.add_argument("--models", nargs="+", default=["*"], metavar="PATTERN")
    parser.add_argument("--list", action="store_true", help="only print their names")
    arguments = parser.parse_args()
    for name in select(arguments.models):
        if arguments.list:
            print(name)
            continue
        entry = ensure(name, arguments.cache)
        print(f"{name:26} {entry.bytes / 1e6:8.1f} MB  {entry.reason or entry.path}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
