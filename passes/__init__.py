"""The catalogue of passes: the module and class of each, and the groups of them.

The registry reads CATALOGUE through the entry point `toolkit.passes`, as it does for third-party
passes. Both the registry and `from passes import Cleanup` import a module on first use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

CATALOGUE: Mapping[str, str | Sequence[str]] = {
    "inline": "passes.simplify.inline:InlineFunctions",
    "constants": "passes.simplify.lift_constants:LiftConstants",
    "shapes": "passes.analysis.shapes:Shapes",
    "fold": "passes.simplify.fold:Fold",
    "branches": "passes.simplify.control_flow.branches:InlineBranches",
    "reshape": "passes.simplify.shape_arithmetic:Reshape",
    "layout": "passes.motion.sink_transposes:Layout",
    "cleanup": "passes.simplify.canonicalize.cleanup:Cleanup",
    "cse": "passes.simplify.cse:CommonSubexpressions",
    "share": "passes.simplify.dedup_initializers:ShareInitializers",
    "dead": "passes.simplify.dce:RemoveDead",
    "opset": "passes.opset.opset:Opset",
    "minimize-opset": "passes.opset.minimize:MinimizeOpset",
    "fuse-activations": "passes.fuse.activation.fuse_activations:FuseActivations",
    "fuse-norms": "passes.fuse.norm.fuse_norms:FuseNorms",
    "fuse-arithmetic": "passes.fuse.arithmetic.fuse_arithmetic:FuseArithmetic",
    "fuse-conv": "passes.fuse.conv.fuse_conv:FuseConv",
    "fuse-linear": "passes.fuse.linear.fuse_linear:FuseLinear",
    "fuse-rotary": "passes.fuse.rotary.fuse_rotary:FuseRotary",
    "fuse-attention": "passes.fuse.attention.fuse_attention:FuseAttention",
    "mask-outputs": "passes.motion.remove_padding.mask_outputs:MaskOutputs",
    "rows": "passes.motion.sink_slices:Rows",
    "unpad": "passes.motion.remove_padding:Unpad",
    "compact": "passes.fuse.compact.compact:Compact",
    "lower": "passes.lower.lower:Lower",
    "legalize": "passes.lower.legalize:Legalize",
    "smooth": "passes.quantize.rescale.smooth:Smooth",
    "equalize": "passes.quantize.rescale.equalize:Equalize",
    "clip-weights": "passes.quantize.clip_weights:ClipWeights",
    "quantize": "passes.quantize.quantize:Quantize",
    "quantize-dynamic": "passes.quantize.schemes.dynamic.quantize_dynamic:QuantizeDynamic",
    "quantize-static": "passes.quantize.schemes.static.quantize_static:QuantizeStatic",
    "quantize-weights": "passes.quantize.schemes.weight_only.quantize_weights:QuantizeWeights",
    "fp16": "passes.precision.to_float16:Float16",
    "fp32": "passes.precision.to_float32:Float32",
    "correct-bias": "passes.quantize.bias_correction.correct_bias:CorrectBias",
    "onnxsim": "passes.external.optimizers:OnnxSim",
    "onnxruntime": "passes.external.optimizers:OrtOptimizer",
    # `dead` comes first because dead users block rewrites; `branches` before `fold`, which need not
    # fold dead branches then, and after it, for conditions that it computes.
    "simplify": (
        "inline",
        "constants",
        "dead",
        "share",
        "shapes:annotate=false",
        "branches",
        "fold",
        "branches",
        "tidy",
    ),
    # The part of simplify for a flat graph, repeated after passes that change it.
    "tidy": (
        "shapes:annotate=false",
        "reshape",
        "fold",
        "layout",
        "cleanup",
        "share",
        "cse",
        "dead",
    ),
    # Activations and norms before conv and linear, which would absorb their constants.
    "fuse": (
        "opset:temporary=true",
        "simplify",
        "fuse-activations",
        "fuse-arithmetic",
        "fuse-rotary",
        "fuse-attention",
        "shapes:annotate=false",  # after `reshape`, for fuse-norms
        "fuse-norms",
        "fuse-conv",
        "fuse-linear",
        "tidy",
        "rows",
        "unpad",
        "lower",
        "fuse-linear",  # folds the factors that `lower` leaves beside a MatMul
        "compact",
        "cse",
        "dead",
    ),
}

_MODULES = {
    class_name: module
    for offer in CATALOGUE.values()
    if isinstance(offer, str)
    for module, class_name in [offer.split(":")]
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'passes' has no attribute '{name}'")
    found = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return found


def __dir__() -> list[str]:
    return ["CATALOGUE", *_MODULES]
