"""Shared by the tests of dynamic int8: models before and after, and as the runtime has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort

from passes.quantize.schemes.dynamic.quantize_dynamic import QuantizeDynamic
from tests.checks import check, parse
from tests.passes.fuse.constants import typed
from toolkit.ir.model import Model
from toolkit.pass_manager.protocol import Context

ALL = QuantizeDynamic(min_elements=1)
X_Y = "g (float[N, S, 16] x) => (float[N, S, 8] y)"
ROWS = "g (float[N, 16] x) => (float[N, 8] y)"
LAYER = "DynamicQuantizeLinear MatMulInteger Mul Cast Mul"
COARSE = 0.1


def quantized(
    signature: str, constants: str, nodes: str, operators: str, item: Any = ALL, **options: Any
) -> Model:
    """Check that the model ends up with these operators, about the same, and without its floats."""
    changed = check(
        item, typed(signature, constants, nodes, options.pop("opset", 21)), atol=COARSE, **options
    )
    found = sorted(node.op_type for node in changed.graph.nodes)
    assert found == sorted(operators.split())
    return changed


def stays(signature: str, constants: str, nodes: str, item: Any = ALL, **options: Any) -> list[str]:
    """Check that nothing changes; what the pass has to say about it."""
    text = typed(signature, constants, nodes, options.pop("opset", 21))
    check(item, text, near_miss=True, **options)
    ctx = Context()
    item.run(Model.from_proto(parse(text)), ctx)
    return ctx.notes


def matrices(model: Model) -> dict[str, int]:
    """Element types of the stored tensors with more than one dimension."""
    return {n: t.data_type for n, t in model.graph.initializers.items() if len(t.dims) > 1}


def fused_by_runtime(model: Model, folder: Path) -> list[str]:
    """The operators that onnxruntime runs once it has loaded the model."""
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    options.log_severity_level = 4
    data = model.inlined_proto().SerializeToString()
    ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    return [node.op_type for node in onnx.load(options.optimized_model_filepath).graph.node]
