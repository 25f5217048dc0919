"""Quantize one model with the toolkit or a peer, in a separate process.

    python benchmarks/quantization_tools.py TOOL MODEL CALIB TARGET

CALIB is a folder of .npz feeds. Prints one line of JSON: the seconds and the notes.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import json
import logging
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

CHANNELS_FROM, LIFTED = 13, 17


def ours(
    passes: str, with_data: bool, model: Path, calib: Path, target: Path, **options: Any
) -> list[str]:
    """Run the toolkit as from the command line."""
    import toolkit

    data = toolkit.Calib(calib) if with_data else None
    result = toolkit.optimize(model, passes, calib=data, **options)
    result.save(target)
    return [result.proof, *(note for done in result.passes for note in done.notes)]


def ort_dynamic(by_channel: bool, model: Path, calib: Path, target: Path) -> list[str]:
    """Run onnxruntime's quantize_dynamic with signed weights, the best choice on x86."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    linear = ["MatMul", "Gemm", "Attention", "LSTM", "Gather", "EmbedLayerNormalization"]
    quantize_dynamic(
        model,
        target,
        op_types_to_quantize=linear,  # its dynamic Conv is 5 to 15 times slower than floats
        per_channel=by_channel,
        weight_type=QuantType.QInt8,
    )
    return []


def ort_static(method: str, model: Path, calib: Path, target: Path) -> list[str]:
    """Run onnxruntime's quantize_static: QDQ, U8S8, per channel, after its own preprocessing."""
    from onnxruntime.quantization import (
        CalibrationDataReader,
        CalibrationMethod,
        QuantFormat,
        QuantType,
        quantize_static,
    )
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.files = iter(sorted(calib.glob("*.npz")))

        def get_next(self) -> Any:
            path = next(self.files, None)
            return None if path is None else dict(np.load(path))

    with tempfile.TemporaryDirectory() as folder:
        prepared = Path(folder) / "prepared.onnx"
        try:
            lifted = _lifted(model, Path(folder))
            quant_pre_process(str(lifted), str(prepared), skip_symbolic_shape=True)
            notes = []
        except Exception as problem:
            prepared, notes = model, [f"not prepared: {str(problem).splitlines()[0][:60]}"]
        quantize_static(
            prepared,
            target,
            Reader(),
            quant_format=QuantFormat.QDQ,
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            calibrate_method=CalibrationMethod[method],
        )
    return notes


def _lifted(model: Path, folder: Path) -> Path:
    """Convert the model to an opset with per-channel scales, as a careful user would."""
    import onnx
    from onnx import version_converter

    loaded = onnx.load(model, load_external_data=False)
    if next(o.version for o in loaded.opset_import if not o.domain) >= CHANNELS_FROM:
        return model
    path = folder / "lifted.onnx"
    onnx.save(version_converter.convert_version(onnx.load(model), LIFTED), path)
    return path


def nncf_quantize(model: Path, calib: Path, target: Path) -> list[str]:
    """Run NNCF's post-training quantization of ONNX models."""
    import nncf
    import onnx

    files = sorted(calib.glob("*.npz"))
    dataset = nncf.Dataset(files, lambda path: dict(np.load(path)))
    with tempfile.TemporaryDirectory() as folder:
        loaded = onnx.load(_lifted(model, Path(folder)))
    text = any(n.op_type == "Softmax" for n in loaded.graph.node)
    kind = nncf.ModelType.TRANSFORMER if text else None
    quantized = nncf.quantize(loaded, dataset, subset_size=len(files), model_type=kind)
    onnx.save(quantized, target)
    return []


TOOLS: dict[str, Callable[[Path, Path, Path], list[str]]] = {
    "toolkit": partial(ours, "fuse,quantize", True),
    "toolkit-no-data": partial(ours, "fuse,quantize", False),
    "ort-dynamic": partial(ort_dynamic, True),
    # A little faster, and less exact.
    "ort-dynamic-tensor": partial(ort_dynamic, False),
    "ort-minmax": partial(ort_static, "MinMax"),
    "ort-percentile": partial(ort_static, "Percentile"),
    "ort-entropy": partial(ort_static, "Entropy"),
    "nncf": nncf_quantize,
}
MASKED = "toolkit-masked"
EXTRA = {
    # For encoders whose tokens are pooled by the mask, outside of the model.
    MASKED: partial(ours, "mask-outputs,fuse,quantize", True),
    "toolkit-size": partial(ours, "fuse,quantize", False, prefer="size"),
    # The weights are random, and 4 bits change their answers more than a budget allows.
    "toolkit-int4": partial(
        ours, "fuse,quantize:mode=weight_only:weights=int4", False, max_drop="off"
    ),
}
"""Tools for single subjects and for the memory figures."""


def main() -> int:
    tool, model, calib, target = sys.argv[1:5]
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    start = time.perf_counter()
    notes = {**TOOLS, **EXTRA}[tool](Path(model), Path(calib), Path(target))
    answer = {"seconds": time.perf_counter() - start, "notes": notes}
    print(f"\n{json.dumps(answer)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
