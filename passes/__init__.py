"""The library of passes: each name and where its class lives.

The registry reads CATALOGUE through the entry point `toolkit.passes`, the same door as a third
party's, and imports a module only when its pass is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
    "opset": "passes.opset:Opset",
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
    "lower": "passes.lower:Lower",
    "smooth": "passes.quantize.rescale.smooth:Smooth",
    "equalize": "passes.quantize.rescale.equalize:Equalize",
    "clip-weights": "passes.quantize.clip_weights:ClipWeights",
    "quantize": "passes.quantize.quantize:Quantize",
    "quantize-dynamic": "passes.quantize.schemes.dynamic.quantize_dynamic:QuantizeDynamic",
    "quantize-static": "passes.quantize.schemes.static.quantize_static:QuantizeStatic",
    "quantize-weights": "passes.quantize.schemes.weight_only.quantize_weights:QuantizeWeights",
    "fp16": "passes.precision:Float16",
    "fp32": "passes.precision.to_float32:Float32",
    "correct-bias": "passes.quantize.bias_correction.correct_bias:CorrectBias",
    "onnxsim": "passes.external.optimizers:OnnxSim",
    "onnxruntime": "passes.external.optimizers:OrtOptimizer",
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
