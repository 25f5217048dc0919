"""Models in text with weights that are made up: what the tests of linear fusions share."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import printer, shape_inference

from tests.checks import check, parse
from toolkit.ir.model import Model

OPSET = '<ir_version: 10, opset_import: ["" : 23]>\n'


def floats(name: str, *shape: int, seed: int = 0, low: float = -1, high: float = 1) -> str:
    """An initializer of this name and shape, in text, of numbers between `low` and `high`."""
    numbers = np.random.default_rng([seed, *map(ord, name)]).uniform(low, high, shape)
    return stored(name, numbers)


def stored(name: str, numbers: Any, kind: str = "float") -> str:
    array = np.asarray(numbers)
    if kind == "float16":  # ONNX's text has these as their bits
        array = array.astype(np.float16).view(np.uint16)
    sizes = f"[{', '.join(map(str, array.shape))}]" if array.ndim else ""
    return f"{kind}{sizes} {name} = {{{', '.join(f'{n:.7g}' for n in array.reshape(-1))}}}"


def batch_norm(channels: int, prefix: str = "") -> str:
    """Scale, bias, mean and variance of a BatchNormalization, as initializers in text."""
    one = [floats(prefix + name, channels) for name in ("gamma", "beta", "mean")]
    return ", ".join([*one, floats(f"{prefix}variance", channels, low=0.5, high=2)])


def typed(signature: str, constants: str, nodes: str, opset: int = 23) -> str:
    """The model as text, with the types of its values between input and output written down."""
    header = OPSET.replace("23", str(opset))
    stored_text = f" <{constants}>" if constants else ""
    text = f"{header}{signature}{stored_text} {{ {nodes} }}"
    return printer.to_text(shape_inference.infer_shapes(parse(text)))


def becomes(
    rules: Any, signature: str, constants: str, nodes: str, operators: str, **options: Any
) -> Model:
    """Check that the model ends up with these operators, in their order, and computes the same."""
    opset = options.pop("opset", 23)
    changed = check(rules, typed(signature, constants, nodes, opset), **options)
    assert " ".join(node.op_type for node in changed.graph.nodes) == operators
    return changed


def stays(rules: Any, signature: str, constants: str, nodes: str, **options: Any) -> None:
    opset = options.pop("opset", 23)
    check(rules, typed(signature, constants, nodes, opset), near_miss=True, **options)
