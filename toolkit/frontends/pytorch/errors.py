# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
"""One-line reasons for the errors of torch's exporters, and lists of unsupported operators."""

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
"""The largest number of characters quoted from a message of torch."""
_ENDS = (
    "\n\nThe above exception",
    "\n\nUser code:",
    "\nFrom user code",
    "\n\nfrom user code",
    "\n\n(Refer to the full stack",
    "\n\nSet TORCH",
    "Traceback (most recent",
)
"""Beginnings of the stacks and hints that torch appends to its messages."""


def reason_of(error: BaseException) -> str:
    """Return the innermost cause of an exporter's error in one line, without torch's hints."""
    chain = [error]
    while chain[-1].__cause__ is not None and len(chain) < 10:
        chain.append(chain[-1].__cause__)
    for each in reversed(chain):
        if re.search("GuardOnDataDependent|[Dd]ata-dependent", f"{type(each).__name__}: {each}"):
            return (
                "the model's control flow depends on input values, which a traced graph cannot "
                f"express (use torch.cond, torch.where or torch.while_loop){_user_place(str(each))}"
            )
    innermost = next((e for e in reversed(chain) if str(e).strip()), error)
    text = str(innermost)
    for end in _ENDS:
        text = text.split(end, maxsplit=1)[0]
    text = one_line(re.sub(r"\x1b\[[0-9;]*m", "", text), _LIMIT)
    return one_line(f"{type(innermost).__name__}: {text}" if text else type(innermost).__name__)


def user_line(trace: str) -> str:
    """Return the innermost line of a stack outside torch and this package, as `model.py:7`.

    Python lists frames as `File "model.py", line 7`, the innermost last; TorchScript lists them as
    `model.py(7): forward`, the innermost first.
    """
    python = re.findall(r'File "([^"]+)", line (\d+)', trace)
    frames = reversed(python) if python else re.findall(r"(?m)^(\S.*?)\((\d+)\):", trace)
    own = (f"{Path(file).name}:{n}" for file, n in frames if not file.startswith(library_folders()))
    return next(own, "")


def _user_place(trace: str) -> str:
    """Return the innermost line of the user's code, as ` (model.py, line 7)`."""
    file, _, line = user_line(trace).rpartition(":")
    return f" ({file}, line {line})" if file else ""


def library_folders() -> tuple[str, ...]:
    """Return the folders of torch and of this package, whose frames every stack contains."""
    files = (importlib.import_module(name).__file__ for name in ("torch", "toolkit"))
    return tuple(str(Path(file).parent) for file in files if file)


# Operators without a translation -----------------------------------------------------------------


def unsupported(program: Any, translations: Translations) -> str:
    """Describe a program's operators without a translation to ONNX; empty if there are none.

    Operators that PyTorch can decompose are decomposed first, as by the exporter.
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
            paths = [entry[0] for entry in (node.meta.get("nn_module_stack") or {}).values()]
            place = _user_place(node.meta.get("stack_trace") or "")
            module = paths[-1] if paths else ""
            found.setdefault(str(node.target), []).append(f"{module or 'the model'}{place}")
    return _without_translation(found)


def unsupported_in_trace(module: Any, args: tuple[Any, ...], opset: int) -> str:
    """Describe the operators that the TorchScript exporter cannot translate; empty if none."""
    found: dict[str, list[str]] = {}
    with contextlib.suppress(Exception):  # as above
        utils = importlib.import_module("torch.onnx.utils")
        try:
            utils._setup_trace_module_map(module, False)  # records the module of each node
            graph, missing = utils.unconvertible_ops(module, args, opset_version=opset)
        finally:
            utils._reset_trace_module_map()
        for node in graph.nodes():
            if node.kind() in missing:
                scopes = re.sub(r"[^/]*::", "", node.scopeName()).split("/")
                inside = module_path(list(filter(None, scopes))) or "the model"
                place = f"{inside}{_user_place(node.sourceRange())}"
                found.setdefault(node.kind(), []).append(place)
    return _without_translation(found)


def _without_translation(found: dict[str, list[str]]) -> str:
    if not found:
        return ""
    listed = "; ".join(f"{op} at {first_of(places, 1)}" for op, places in found.items())
    count, them = (
        ("1 operator has", "it") if len(found) == 1 else (f"{len(found)} operators have", "them")
    )
    return (
        f"{count} no translation to ONNX, and PyTorch does not decompose {them}: {listed}; give a "
        "function or a CustomOp for each with --translate module:table, or register a decomposition"
    )
