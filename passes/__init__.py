"""The library of passes: each name and where its class lives.

The registry reads CATALOGUE through the entry point `toolkit.passes`, the same door as a third
party's, and imports a module only when its pass is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

CATALOGUE: Mapping[str, str | Sequence[str]] = {
    "inline": "passes.inline:InlineFunctions",
    "constants": "passes.constants:LiftConstants",
    "shapes": "passes.shapes:Shapes",
    "fold": "passes.fold:Fold",
    "branches": "passes.branches:InlineBranches",
    "reshape": "passes.reshape:Reshape",
    "layout": "passes.layout:Layout",
    "cleanup": "passes.cleanup:Cleanup",
    "cse": "passes.cse:CommonSubexpressions",
    "share": "passes.share:ShareInitializers",
    "dead": "passes.dead:RemoveDead",
    "opset": "passes.opset:Opset",
    "fuse-activations": "passes.fuse.activations:FuseActivations",
    "fuse-norms": "passes.fuse.norms:FuseNorms",
    "fuse-arithmetic": "passes.fuse.arithmetic:FuseArithmetic",
    "fuse-conv": "passes.fuse.conv:FuseConv",
    "fuse-linear": "passes.fuse.linear:FuseLinear",
    "fuse-rotary": "passes.fuse.rotary:FuseRotary",
    "fuse-attention": "passes.fuse.attention:FuseAttention",
    "mask-outputs": "passes.unpad.mask_outputs:MaskOutputs",
    "rows": "passes.rows:Rows",
    "unpad": "passes.unpad:Unpad",
    "compact": "passes.fuse.compact:Compact",
    "lower": "passes.lower:Lower",
    "smooth": "passes.quantize.factors.smooth:Smooth",
    "equalize": "passes.quantize.factors.equalize:Equalize",
    "clip-weights": "passes.quantize.clip:ClipWeights",
    "quantize": "passes.quantize.auto:Quantize",
    "quantize-dynamic": "passes.quantize.dynamic:QuantizeDynamic",
    "quantize-static": "passes.quantize.static:QuantizeStatic",
    "quantize-weights": "passes.quantize.weight_only:QuantizeWeights",
    "fp16": "passes.precision:Float16",
    "fp32": "passes.precision.widening:Float32",
    "correct-bias": "passes.quantize.correct:CorrectBias",
    "onnxsim": "passes.external:OnnxSim",
    "onnxruntime": "passes.external:OrtOptimizer",
    # `dead` first, because dead readers keep values from being rewritten; `fold` before `branches`
    # for conditions that are computed, and `branches` again for those inside of a branch (skipped
    # when the first brought nothing).
    "simplify": (
        "inline",
        "constants",
        "dead",
        "share",
        "shapes:annotate=false",
        "fold",
        "branches",
        "shapes:annotate=false",
        "branches",
        "tidy",
    ),
    # What simplify does once the graph is flat: again after other passes have changed it.
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
    # Constants around activations and norms belong to these, so they come before conv and linear.
    "fuse": (
        "opset",
        "simplify",
        "fuse-activations",
        "fuse-arithmetic",
        "fuse-rotary",
        "fuse-attention",
        "shapes:annotate=false",  # of what `reshape` has made known; attention needs no more
        "fuse-norms",
        "fuse-conv",
        "fuse-linear",
        "tidy",
        "rows",
        "unpad",
        "lower",
        "fuse-linear",  # for factors that a spelling has left beside a MatMul
        "compact",
        "cse",
        "dead",
    ),
}
