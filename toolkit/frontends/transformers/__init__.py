"""Export transformers checkpoints, by task."""

from __future__ import annotations

from toolkit.frontends.transformers.frontend import FRONT_END

__all__ = ["FRONT_END"]
