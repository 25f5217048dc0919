"""Optimize and quantize ONNX models, with a proof behind every step.

The public names, loaded on first use: the command line's help must not wait for onnx.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolkit.api import load, optimize
    from toolkit.calibrate.data import Calib
    from toolkit.context import Context, Pass
    from toolkit.errors import ModelError, NotProven, SaveError, ToolkitError, UsageError
    from toolkit.export import Exported, export
    from toolkit.graph import Graph
    from toolkit.model import Model
    from toolkit.pattern import const, maybe_cast, number, op, optional, product, total, var
    from toolkit.pipeline import Pipeline
    from toolkit.result import PassResult, Result
    from toolkit.rules import Miss, Rule, Rules, explain, rewrite
    from toolkit.tolerance import EXACT, FLOAT, QUANT, Tolerance
    from toolkit.types import TensorType
    from toolkit.verification import verify

__version__ = "0.1.0"

_HOMES = {
    "toolkit.api": ("load", "optimize"),
    "toolkit.calibrate.data": ("Calib",),
    "toolkit.context": ("Context", "Pass"),
    "toolkit.errors": ("ModelError", "NotProven", "SaveError", "ToolkitError", "UsageError"),
    "toolkit.export": ("Exported",),
    "toolkit.graph": ("Graph",),
    "toolkit.model": ("Model",),
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
    "toolkit.pipeline": ("Pipeline",),
    "toolkit.result": ("PassResult", "Result"),
    "toolkit.rules": ("Miss", "Rule", "Rules", "explain", "rewrite"),
    "toolkit.tolerance": ("EXACT", "FLOAT", "QUANT", "Tolerance"),
    "toolkit.types": ("TensorType",),
    "toolkit.verification": ("verify",),
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
    if name == "export":  # the package is the function: importing it binds the name here
        return import_module("toolkit.export")
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'toolkit' has no attribute '{name}'")
    value = globals()[name] = getattr(import_module(home), name)
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
