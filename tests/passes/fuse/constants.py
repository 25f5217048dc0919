"""Helpers for the tests of linear fusions: models as text with random weights."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import printer, shape_inference

from tests.checks import check, parse
from toolkit.ir.model import Model

OPSET = '<ir_version: 10, opset_import: ["" : 23]>\n'


def floats(name: str, *shape: int, seed: int = 0, low: float = -1, high: float = 1) -> str:
    """Return an initializer as text, with random numbers between `low` and `high`."""
    numbers = np.random.default_rng([seed, *map(ord, name)]).uniform(low, high, shape)
    return stored(name, numbers)


def stored(name: str, numbers: Any, kind: str = "float") -> str:
    array = np.asarray(numbers)
    if kind == "float16":  # ONNX text writes these as bits
        array = array.astype(np.float16).view(np.uint16)
    sizes = f"[{', '.join(map(str, array.shape))}]" if array.ndim else ""
    return f"{kind}{sizes} {name} = {{{', '.join(f'{n:.7g}' for n in array.reshape(-1))}}}"


def batch_norm(channels: int, prefix: str = "") -> str:
    """Return the parameters of a BatchNormalization as text."""
    one = [floats(prefix + name, channels) for name in ("gamma", "beta", "mean")]
    return ", ".join([*one, floats(f"{prefix}variance", channels, low=0.5, high=2)])


def typed(signature: str, constants: str, nodes: str, opset: int = 23) -> str:
    """Return the model as text, with the inferred types of its values."""
    header = OPSET.replace("23", str(opset))
    stored_text = f" <{constants}>" if constants else ""
    text = f"{header}{signature}{stored_text} {{ {nodes} }}"
    return printer.to_text(shape_inference.infer_shapes(parse(text)))


def becomes(
    rules: Any, signature: str, constants: str, nodes: str, operators: str, **options: Any
) -> Model:
    """Check that the model is rewritten with these operators, in order, and is equivalent."""
    opset = options.pop("opset", 23)
    changed = check(rules, typed(signature, constants, nodes, opset), **options)
    assert " ".join(node.op_type for node in changed.graph.nodes) == operators
    return changed


def stays(rules: Any, signature: str, constants: str, nodes: str, **options: Any) -> None:
    opset = options.pop("opset", 23)
    check(rules, typed(signature, constants, nodes, opset), near_miss=True, **options)
