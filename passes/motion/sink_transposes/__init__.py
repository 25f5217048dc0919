"""Sink and hoist Transposes until they cancel.

A region of operators that do not depend on the order of axes can compute on the operands of a
Transpose. This pays if more Transposes end at the region than start from it: `region` grows regions
and counts, `operators` plans how each operator changes.
"""

from passes.motion.sink_transposes.sink_transposes import Layout

__all__ = ["Layout"]
