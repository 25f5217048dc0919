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
    "onnxsim": "passes.external:OnnxSim",
    "onnxruntime": "passes.external:OrtOptimizer",
    # `dead` first, because dead readers keep values from being rewritten; `shapes` again for what
    # `branches` brought in (skipped when it brought nothing); `share` again for what `fold` made.
    "simplify": (
        "inline",
        "constants",
        "dead",
        "share",
        "shapes:annotate=false",
        "branches",
        "shapes:annotate=false",
        "reshape",
        "fold",
        "layout",
        "cleanup",
        "share",
        "cse",
        "dead",
    ),
}
