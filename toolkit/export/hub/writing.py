"""The two exporters of torch, on a wrapper: `dynamo` (torch.export) and `torchscript` (a trace).

`patched` runs dynamo with the patches that transformers ships for its own ONNX exporter: they make
more architectures traceable, and cost some nodes.
"""

# Runs only where torch is; types end at its border.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from toolkit.errors import summarize
from toolkit.export.draft import ExportFailed
from toolkit.export.hub.quiet import quiet
from toolkit.export.hub.wrappers import Wrapper
from toolkit.export.request import Axes

TORCHSCRIPT_OPSET = 17
TORCHSCRIPT_NEWEST = 20


def write_dynamo(
    wrapper: Wrapper,
    feed: Mapping[str, Any],
    axes: Axes,
    path: Path,
    *,
    opset: int | None,
    patched: bool,
    translations: Mapping[Any, Any],
) -> None:
    """One symbolic trace; dynamic dimensions keep their names."""
    values, shapes = _arguments(wrapper, feed), tuple(dict(axes.get(n, {})) for n in wrapper.inputs)
    with quiet(), torch.no_grad(), _patches(patched) as table:
        try:
            torch.onnx.export(
                wrapper,
                values,
                str(path),
                dynamo=True,
                opset_version=opset,
                input_names=list(wrapper.inputs),
                output_names=list(wrapper.outputs),
                # a forward of *values takes one tuple of shapes for all of them
                dynamic_shapes=(shapes,) if any(shapes) else None,
                custom_translation_table={**table, **translations} or None,
                verbose=False,
            )
        except Exception as error:  # an exporter may raise anything
            raise ExportFailed("dynamo", _reason(error)) from error


def write_torchscript(
    wrapper: Wrapper, feed: Mapping[str, Any], axes: Axes, path: Path, *, opset: int | None
) -> None:
    """A trace of one run; `axes` names the dynamic dimensions of outputs too."""
    if opset is not None and opset > TORCHSCRIPT_NEWEST:
        opset = TORCHSCRIPT_NEWEST
    with quiet(), torch.no_grad():
        try:
            torch.onnx.export(
                wrapper,
                _arguments(wrapper, feed),
                str(path),
                dynamo=False,
                opset_version=opset or TORCHSCRIPT_OPSET,
                input_names=list(wrapper.inputs),
                output_names=list(wrapper.outputs),
                dynamic_axes={name: dict(dims) for name, dims in axes.items()},
            )
        except Exception as error:  # an exporter may raise anything
            raise ExportFailed("torchscript", _reason(error)) from error


def _arguments(wrapper: Wrapper, feed: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(torch.from_numpy(feed[name]) for name in wrapper.inputs)


@contextlib.contextmanager
def _patches(wanted: bool) -> Iterator[Mapping[Any, Any]]:
    """transformers' patches and translations, as long as this lasts."""
    if not wanted:
        yield {}
        return
    try:
        from transformers.exporters import exporter_dynamo, exporter_onnx
        from transformers.exporters.utils import apply_patches

        table = exporter_onnx._ONNX_TRANSLATION_TABLE
    except (ImportError, AttributeError) as error:
        raise ExportFailed("dynamo", f"transformers has no patches: {error}") from error
    del exporter_dynamo  # imported for what it registers
    with apply_patches("dynamo"), apply_patches("onnx"):
        yield table


def _reason(error: BaseException) -> str:
    """What went wrong: exporters wrap the cause in pages of advice."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = summarize(error)
    return text if len(text) <= 200 else text[:197] + "..."
