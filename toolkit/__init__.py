"""Optimize and quantize ONNX models, with a proof behind every step.

The public names, loaded on first use: the command line's help must not wait for onnx.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolkit.api import load, optimize
    from toolkit.calibrate.data import Calib
    from toolkit.errors import ModelError, NotProven, SaveError, ToolkitError, UsageError
    from toolkit.frontends.export import export
    from toolkit.frontends.exported import Exported
    from toolkit.ir.graph import Graph
    from toolkit.ir.model import Model
    from toolkit.ir.tensor_type import TensorType
    from toolkit.pass_manager.pipeline import Pipeline
    from toolkit.pass_manager.protocol import Context, Pass
    from toolkit.pass_manager.result import PassResult, Result
    from toolkit.pattern import const, maybe_cast, number, op, optional, product, total, var
    from toolkit.rewriting.rule import MatchFailure, Miss, Rule, Rules, explain, rewrite
    from toolkit.verification.models import verify
    from toolkit.verification.tolerance import EXACT, FLOAT, QUANT, Tolerance

__version__ = "0.2.0"

_HOMES = {
    "toolkit.api": ("load", "optimize"),
    "toolkit.calibrate.data": ("Calib",),
    "toolkit.pass_manager.protocol": ("Context", "Pass"),
    "toolkit.errors": ("ModelError", "NotProven", "SaveError", "ToolkitError", "UsageError"),
    "toolkit.frontends.export": ("export",),
    "toolkit.frontends.exported": ("Exported",),
    "toolkit.ir.graph": ("Graph",),
    "toolkit.ir.model": ("Model",),
    "toolkit.pattern": (
        "const",
        "maybe_cast",
        "number",
        "op",
        "optional",
        "product",
        "total",
        "var",
    ),
    "toolkit.pass_manager.pipeline": ("Pipeline",),
    "toolkit.pass_manager.result": ("PassResult", "Result"),
    "toolkit.rewriting.rule": ("MatchFailure", "Miss", "Rule", "Rules", "explain", "rewrite"),
    "toolkit.verification.tolerance": ("EXACT", "FLOAT", "QUANT", "Tolerance"),
    "toolkit.ir.tensor_type": ("TensorType",),
    "toolkit.verification.models": ("verify",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "EXACT",
    "FLOAT",
    "QUANT",
    "Calib",
    "Context",
    "Exported",
    "Graph",
    "MatchFailure",
    "Miss",
    "Model",
    "ModelError",
    "NotProven",
    "Pass",
    "PassResult",
    "Pipeline",
    "Result",
    "Rule",
    "Rules",
    "SaveError",
    "TensorType",
    "Tolerance",
    "ToolkitError",
    "UsageError",
    "const",
    "explain",
    "export",
    "load",
    "maybe_cast",
    "number",
    "op",
    "optimize",
    "optional",
    "product",
    "rewrite",
    "total",
    "var",
    "verify",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'toolkit' has no attribute '{name}'")
    value = globals()[name] = getattr(import_module(home), name)
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
