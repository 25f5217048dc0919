"""Transposes pushed together and cancelled.

A group of operators that do not care about the order of dimensions can work on the operands as
they were before a Transpose. That pays when more Transposes end at the group than start from it:
`region` finds such groups and counts, `operators` knows how each operator changes.
"""

from passes.motion.sink_transposes.sink_transposes import Layout

__all__ = ["Layout"]
