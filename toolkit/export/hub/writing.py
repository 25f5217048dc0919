"""torch's two exporters on a wrapper; dynamo also with transformers' own patches.

transformers ships patches and translations for an ONNX exporter of its own. They make more
architectures traceable, and cost some nodes: they are for what does not export without them.
"""

# Runs only where torch and transformers are; types end at their border.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from toolkit.export.draft import ExportFailed
from toolkit.export.pytorch import writers
from toolkit.export.pytorch.calling import Call
from toolkit.export.pytorch.customops import Translations
from toolkit.export.request import Axes
from toolkit.feeds.samples import Feed


def write_patched(
    call: Call, feed: Feed, axes: Axes, opset: int | None, path: Path, translations: Translations
) -> None:
    """As `writers.write_dynamo`, with transformers' patches as long as it lasts."""
    with _patches() as table:
        both = Translations({**table, **translations.table})
        writers.write_dynamo(call, feed, axes, opset, path, both)


@contextlib.contextmanager
def _patches() -> Iterator[dict]:
    try:
        # both register patches when they are imported
        from transformers.exporters import exporter_dynamo, exporter_onnx
        from transformers.exporters.utils import apply_patches

        table = exporter_onnx._ONNX_TRANSLATION_TABLE
        del exporter_dynamo
    except (ImportError, AttributeError) as error:
        raise ExportFailed(writers.DYNAMO, f"transformers has no patches: {error}") from error
    with apply_patches("dynamo"), apply_patches("onnx"):
        yield table
