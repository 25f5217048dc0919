"""Export a wrapper by dynamo with transformers' patches; declare the output shapes of a trace.

transformers ships patches and translations for its own ONNX exporter. They make more architectures
traceable but add nodes, so they are used only if an export fails without them.
"""

# pyright may run without torch and transformers, so their types are not checked.
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import onnx

from toolkit.feeds.user_samples import Feed
from toolkit.frontends.protocol import ExportFailed
from toolkit.frontends.pytorch import exporters
from toolkit.frontends.pytorch.call_signature import ModuleCall
from toolkit.frontends.pytorch.custom_ops import Translations
from toolkit.frontends.request import Axes


def write_patched(
    call: ModuleCall,
    feed: Feed,
    axes: Axes,
    opset: int | None,
    path: Path,
    translations: Translations,
) -> None:
    """Call `write_dynamo` with transformers' patches and translations applied."""
    with _patches() as table:
        both = Translations({**table, **translations.table})
        exporters.write_dynamo(call, feed, axes, opset, path, both)


def declare_outputs(path: Path, shapes: Mapping[str, Sequence[int | str]]) -> None:
    """Declare these output shapes: TorchScript makes up names for sizes it cannot infer."""
    proto = onnx.load(path, load_external_data=False)
    for value in proto.graph.output:
        del value.type.tensor_type.shape.dim[:]
        for size in shapes[value.name]:
            dim = value.type.tensor_type.shape.dim.add()
            if isinstance(size, int):
                dim.dim_value = size
            else:
                dim.dim_param = size
    path.write_bytes(proto.SerializeToString())


@contextlib.contextmanager
def _patches() -> Iterator[dict]:
    try:
        # importing them registers the patches
        from transformers.exporters import exporter_dynamo, exporter_onnx
        from transformers.exporters.utils import apply_patches

        table = exporter_onnx._ONNX_TRANSLATION_TABLE
        del exporter_dynamo
    except (ImportError, AttributeError) as error:
        raise ExportFailed(
            exporters.DYNAMO, f"this version of transformers has no patches: {error}"
        ) from error
    with apply_patches("dynamo"), apply_patches("onnx"):
        yield table
