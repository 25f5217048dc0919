"""The tools of the fusion benchmark, each a process that handles one model after another.

    python benchmarks/fusion_peers.py CORE TOOL PASSES      (started by `fusion_workers.Worker`)

A request is a `Job` and its number of `repeats`; the answer has `seconds`, the best time of the
tool's main call, without reading and writing files where the tool separates these.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fusion_workers import serve, timed


@dataclass(frozen=True, slots=True)
class Job:
    """A model to optimize; `architecture` is for tools that require it."""

    source: str
    target: str
    architecture: str
    clock: str

    @property
    def has_sidecar(self) -> bool:
        return Path(self.source + ".data").exists()


Work = Callable[[Job], float]
"""Runs a job and returns the seconds of its main call."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool; `prepare` is called with the passes that the toolkit runs.

    Tools whose time a claim compares are `repeated`.
    """

    prepare: Callable[[str], Work]
    packages: tuple[str, ...] = ()
    ours: bool = False
    simplifier: bool = False
    repeated: bool = False


def _toolkit(named: str, target: str) -> Work:
    import onnxruntime  # noqa: F401

    from toolkit import optimize
    from toolkit.pass_manager.registry import parse_passes

    passes = parse_passes(named)  # imported lazily: now, as the other tools do on import

    def work(job: Job) -> float:
        call = partial(optimize, job.source, passes, target, validate="off")
        result, seconds = timed(call, job.clock)
        result.save(job.target)
        return seconds

    return work


def _ort_transformers() -> Work:
    from onnxruntime.transformers.optimizer import optimize_model

    def work(job: Job) -> float:
        kind, heads, width = _ORT_SETTINGS.get(job.architecture, ("bert", 0, 0))
        call = partial(optimize_model, job.source, kind, heads, width)
        made, seconds = timed(call, job.clock)
        made.save_model_to_file(job.target)
        return seconds

    return work


# Model type, heads and width: the optimizer finds the latter two by itself only for BERT.
_ORT_SETTINGS: dict[str, tuple[str, int, int]] = {
    "bart-encoder": ("bart", 12, 768),
    "bart-decoder": ("bart", 12, 768),
    "t5-encoder": ("t5", 8, 512),
    "t5-decoder": ("t5", 8, 512),
    "gpt2": ("gpt2", 12, 768),
    "llama": ("gpt2", 8, 512),
    "mistral": ("gpt2", 8, 512),
    "gemma": ("gpt2", 8, 512),
    "opt": ("gpt2", 12, 768),
    "gptj": ("gpt2", 8, 512),
    "bloom": ("gpt2", 8, 512),
    "qwen3": ("qwen3", 8, 512),
    "phi": ("phi", 8, 512),
    "gpt-neox": ("gpt_neox", 8, 512),
    "vit": ("vit", 12, 768),
    "dinov2": ("vit", 12, 768),
    "beit": ("vit", 12, 768),
    "clip-text": ("clip", 8, 512),
    "clip-vision": ("clip", 12, 768),
    "swin": ("swin", 0, 0),
    "whisper-encoder": ("bart", 6, 384),
    "whisper-decoder": ("bart", 6, 384),
}


def _onnxscript() -> Work:
    import onnx_ir
    import onnxscript.optimizer
    import onnxscript.version_converter
    from onnxscript.rewriter.ort_fusions import optimize_for_ort

    def work(job: Job) -> float:
        model = onnx_ir.load(job.source)
        # Its fusions expect a model that its optimizer has seen; dynamo's exports have.
        onnxscript.optimizer.optimize(model)
        (fused, _), seconds = timed(partial(optimize_for_ort, model), job.clock)
        sidecar = Path(job.target).name + ".data" if job.has_sidecar else None
        onnx_ir.save(fused, job.target, external_data=sidecar)
        return seconds

    return work


def _onnxslim() -> Work:
    import onnxruntime  # noqa: F401
    import onnxslim

    return lambda job: timed(partial(onnxslim.slim, job.source, job.target), job.clock)[1]


def _onnxsim() -> Work:
    import onnxruntime  # noqa: F401
    import onnxsim

    def work(job: Job) -> float:
        return timed(partial(onnxsim.simplify, job.source, output_path=job.target), job.clock)[1]

    return work


TOOLS: dict[str, Tool] = {
    "toolkit": Tool(lambda passes: _toolkit(passes, "ort-cpu"), ours=True, repeated=True),
    "toolkit-onnx": Tool(lambda passes: _toolkit(passes, "onnx"), ours=True, repeated=True),
    "onnxscript": Tool(lambda _: _onnxscript(), ("onnxscript", "onnx-ir"), repeated=True),
    "ort-transformers": Tool(lambda _: _ort_transformers(), ("onnxruntime",)),
    "onnxslim": Tool(lambda _: _onnxslim(), ("onnxslim",), simplifier=True),
    "onnxsim": Tool(lambda _: _onnxsim(), ("onnxsim",), simplifier=True),
}


def main(core: int, name: str, passes: str) -> None:
    work = TOOLS[name].prepare(passes)

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        repeats = request.pop("repeats")
        job = Job(**request)
        return {"seconds": min(work(job) for _ in range(repeats))}

    serve(core, handle)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
