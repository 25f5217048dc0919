"""Sink row selections towards the inputs, so that only the selected rows are computed.

    Gather(LayerNorm(x + f(x)), 0)  =  LayerNorm(x[0] + f(x[0]))

A classifier uses the first token of its encoder, a reranker the last one: the last layer's norms,
linear maps, residuals and the query side of its attention need only those rows. `find_slices` finds
selections, `row_selection` repeats them on other values, `operators` plans how an operator computes
selected rows, `region` collects the operators that a selection can move above, and `partial_linear`
splits a linear map when rows are selected from only some of its parts.
"""

from passes.motion.sink_slices.sink_slices import Rows

__all__ = ["Rows"]
