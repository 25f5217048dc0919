"""A selection of rows moved towards the inputs: rows that nobody reads are not computed.

    Gather(LayerNorm(x + f(x)), 0)  =  LayerNorm(x[0] + f(x[0]))

A classifier reads the first token of its encoder, a reranker the last one: the last layer's norms,
linear maps, residuals and the query side of its attention need only those rows. `reading` finds
where rows are selected, `selection` selects the same ones elsewhere, `operators` tells how an
operator computes those alone, and `region` how far up that goes.
"""

from passes.motion.sink_slices.sink_slices import Rows

__all__ = ["Rows"]
