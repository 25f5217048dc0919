"""Opsets 2 to 7: attributes of the first years that became defaults, integers or broadcasting."""

from __future__ import annotations

from onnx import TensorProto

from passes.opset.adapter_context import CannotLift, Site


def drop_consumed_inputs(site: Site) -> None:
    """A hint for reusing memory, without meaning."""
    site.take("consumed_inputs")


def drop_output_sequence(site: Site) -> None:
    """Recurrent ops said whether Y is wanted; now an output that is named is wanted."""
    site.take("output_sequence")


def drop_broadcast(site: Site) -> None:
    """Gemm's C broadcasts to the product, as `broadcast=1` said; with 0 it had its shape."""
    site.take("broadcast")


def integer_p(site: Site) -> None:
    """LpPool, GlobalLpPool: the norm's p is an integer."""
    p = site.attr("p", 2.0)
    if p != int(p):
        raise CannotLift(f"p={p} is no integer")
    if site.node.op_type == "LpPool" and site.attr("kernel_shape") is None:
        raise CannotLift("it has no kernel_shape")
    site.set(p=int(p))


def concat_axis(site: Site) -> None:
    """The default axis, 1, must be written."""
    site.set(axis=site.attr("axis", 1))


def cast_to_number(site: Site) -> None:
    """`to` is the number of an element type instead of its name."""
    name: str = site.attr("to")
    try:
        site.set(to=TensorProto.DataType.Value(name.upper()))
    except ValueError as error:
        raise CannotLift(f"'{name}' is no element type") from error


def selu_constants(site: Site) -> None:
    """The defaults became more precise: write the old ones."""
    site.take("consumed_inputs")
    site.set(alpha=site.attr("alpha", 1.6732), gamma=site.attr("gamma", 1.0507))


def split_lengths_as_attribute(site: Site) -> None:
    """The lengths, an attribute or an input, are an attribute only (until opset 13)."""
    lengths = site.input(1)
    if lengths:
        values = site.graph.const(lengths)
        if values is None:
            raise CannotLift("the lengths of the parts are computed")
        site.set(split=[int(v) for v in values])
        site.set_inputs(site.input(0))


def tile_repeats(site: Site) -> None:
    """Number of tiles and axis become one number of repeats per axis."""
    tiles, axis = (site.graph.const(site.input(i)) for i in (1, 2))
    rank = site.rank(site.input(0))
    if tiles is None or axis is None or rank is None:
        raise CannotLift("tiles, axis or the rank of the input is not constant")
    repeats = [1] * rank
    repeats[int(axis.item())] = int(tiles.item())
    site.set_inputs(site.input(0), site.constant(repeats, hint="repeats"))


def align_broadcast(site: Site) -> None:
    """`axis` said where B's dimensions lie in A; now they are the last ones.

    A of shape (2, 3, 4, 5) and B of shape (3, 4) at axis 1: B becomes (3, 4, 1).
    """
    axis, broadcast = site.take("axis"), site.take("broadcast", 0)
    if not broadcast or axis is None:
        return
    rank_a, rank_b = site.rank(site.input(0)), site.rank(site.input(1))
    if rank_a is None or rank_b is None:
        raise CannotLift(f"axis={axis} cannot be placed: the ranks of its inputs are unknown")
    _append_dimensions(site, rank_b, rank_a - rank_b - (axis if axis >= 0 else axis + rank_a))


def prelu_slope(site: Site) -> None:
    """A vector of slopes meant one per channel; now it is broadcast like everything else."""
    slope = site.sizes(site.input(1))
    if slope is None:
        raise CannotLift("the shape of its slope is unknown")
    if len(slope) != 1 or slope[0] == 1:
        return
    rank = site.rank(site.input(0))
    if rank is None:
        raise CannotLift("the rank of its input is unknown")
    _append_dimensions(site, 1, rank - 2)


def _append_dimensions(site: Site, rank: int, count: int) -> None:
    """The second input, of this rank, gets `count` more dimensions of size 1 at its end."""
    if count > 0:
        axes = list(range(rank, rank + count))
        site.set_inputs(site.input(0), site.op("Unsqueeze", site.input(1), axes=axes))
