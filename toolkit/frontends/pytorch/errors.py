# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
"""What torch's exporters say, in one line; and all operators that have no translation, at once."""

from __future__ import annotations

import contextlib
import importlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.errors import one_line
from toolkit.frontends.operator_map import module_path
from toolkit.messages import first_of

if TYPE_CHECKING:
    from toolkit.frontends.pytorch.custom_ops import Translations

_LIMIT = 300
_DATA_DEPENDENT = (
    "the model's control flow depends on values of its inputs, which no graph keeps "
    "(torch.cond, torch.where or torch.while_loop would say it)"
)
_ENDS = (
    "\n\nThe above exception",
    "\n\nUser code:",
    "\nFrom user code",
    "\n\nfrom user code",
    "\n\n(Refer to the full stack",
    "\n\nSet TORCH",
    "Traceback (most recent",
)
"""Where torch's messages go on with stacks and hints."""
_SIGNS = {
    "GuardOnDataDependent": _DATA_DEPENDENT,
    "data-dependent": _DATA_DEPENDENT,
    "Data-dependent": _DATA_DEPENDENT,
}


def reason_of(error: BaseException) -> str:
    """The innermost thing that an exporter had to say, without its boxes and hints."""
    chain = [error]
    while chain[-1].__cause__ is not None and len(chain) < 10:
        chain.append(chain[-1].__cause__)
    for each in reversed(chain):
        for sign, meaning in _SIGNS.items():
            if sign in f"{type(each).__name__}: {each}":
                place = _user_place(str(each))
                return f"{meaning}{place}"
    innermost = next((e for e in reversed(chain) if str(e).strip()), error)
    text = _cleaned(str(innermost))
    return one_line(f"{type(innermost).__name__}: {text}" if text else type(innermost).__name__)


def _cleaned(text: str) -> str:
    """The first sentences of a message: what follows are stacks and instructions to torch's own."""
    for end in _ENDS:
        text = text.split(end, maxsplit=1)[0]
    return one_line(re.sub(r"\x1b\[[0-9;]*m", "", text), _LIMIT)


def _user_place(text: str) -> str:
    """` (model.py, line 7)`: the model's innermost line that a message of torch names."""
    found = re.findall(r'File "([^"]+)", line (\d+)', text)
    own = [each for each in found if not each[0].startswith(exporters_homes())]
    return f" ({Path(own[-1][0]).name}, line {own[-1][1]})" if own else ""


def exporters_homes() -> tuple[str, ...]:
    """The folders of torch and of this package: lines in them are on the way of every model."""
    files = (importlib.import_module(name).__file__ for name in ("torch", "toolkit"))
    return tuple(str(Path(file).parent) for file in files if file)


# Operators without a translation -----------------------------------------------------------------


def unsupported(program: Any, translations: Translations) -> str:
    """All operators of a program that do not map to ONNX, with where they are; empty if none.

    What PyTorch can decompose is decomposed first, as the exporter does.
    """
    found: dict[str, list[str]] = {}
    with contextlib.suppress(Exception):  # private parts of torch: without them, its own message
        registration = importlib.import_module("torch.onnx._internal.exporter._registration")
        passes = importlib.import_module("torch.onnx._internal.exporter._fx_passes")
        registry = registration.ONNXRegistry.from_torchlib()
        decomposed = passes.decompose_with_registry(program, registry)
        passes.remove_assertion_nodes(decomposed.graph_module)
        for node in decomposed.graph.nodes:
            if node.op != "call_function" or not hasattr(node.target, "_schema"):
                continue
            if registry.is_registered(node.target) or translations.covers(node.target):
                continue
            found.setdefault(str(node.target), []).append(_place_of(node))
    return _without_translation(found)


def unsupported_in_trace(module: Any, args: tuple[Any, ...], opset: int) -> str:
    """The same for what the TorchScript exporter traces."""
    found: dict[str, list[str]] = {}
    with contextlib.suppress(Exception):  # as above
        utils = importlib.import_module("torch.onnx.utils")
        try:
            utils._setup_trace_module_map(module, False)  # else nodes do not know their module
            graph, missing = utils.unconvertible_ops(module, args, opset_version=opset)
        finally:
            utils._reset_trace_module_map()
        for node in graph.nodes():
            if node.kind() in missing:
                scopes = re.sub(r"[^/]*::", "", node.scopeName()).split("/")
                inside = module_path(list(filter(None, scopes))) or "the model"
                place = f"{inside}{_user_place(_as_trace(node.sourceRange()))}"
                found.setdefault(node.kind(), []).append(place)
    return _without_translation(found)


def _as_trace(source: str) -> str:
    """Where a traced node is in the user's code, in the form of a stack: the innermost last."""
    lines = reversed(re.findall(r"(?m)^(\S+?)\((\d+)\):", source))
    return "\n".join(f'File "{file}", line {line}' for file, line in lines)


def _without_translation(found: dict[str, list[str]]) -> str:
    if not found:
        return ""
    listed = "; ".join(f"{op} at {first_of(places, 1)}" for op, places in found.items())
    return (
        f"{'1 operator has' if len(found) == 1 else f'{len(found)} operators have'} no translation "
        f"to ONNX, and PyTorch does not decompose {'it' if len(found) == 1 else 'them'}: {listed}; "
        "give a function or a CustomOp for each with --translate module:table, or register a "
        "decomposition"
    )


def _place_of(node: Any) -> str:
    """`encoder.layer (model.py, line 7)`"""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [entry[0] for entry in stack.values()]
    module = paths[-1] if paths and paths[-1] else "the model"
    return f"{module}{_user_place(node.meta.get('stack_trace') or '')}"
