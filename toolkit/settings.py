"""What a run lets the user choose from, for the command line and for Python alike. No onnx here."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, get_args

from toolkit.errors import UsageError

Target = Literal["ort-cpu", "onnx"]
"""What a model is made for: onnxruntime on a CPU, or any runtime of standard operators."""

Validate = Literal["each", "final", "off"]
"""When a model is proven: after each pass, once at the end, or not at all."""

Prefer = Literal["speed", "size"]
"""What a model is quantized for: with size, layers may be slower than in floats."""

OpsetLimit: TypeAlias = int | Literal["keep"] | None
"""How far a model may be lifted: to this opset, not at all, or as far as the passes need."""


def require_choice(what: str, value: str, choices: Any) -> None:
    """Raise unless `value` is one of the Literal `choices`."""
    known = get_args(choices)
    if value not in known:
        raise UsageError(f"unknown {what} '{value}': choose one of {', '.join(known)}")
