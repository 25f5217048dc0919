"""Padding is not computed: the rows of a batch that a mask takes out are left out.

    pooled(f(x), mask)  =  pooled(back(f(real rows of x)), mask)

Texts of a batch are filled up to one length, and a mask says which tokens are real. No attention
reads a key that is masked, and a mean over the real tokens, or the first token alone, reads no row
that is padding: norms, linear maps and activations between need only the real rows of all texts,
one behind the other. `padding` tells what values are where the mask is zero (by `places`, which is
where, and `intervals`, which is what), `free` which values may be anything there, `region` what is
computed for the other rows alone, and `packing` which rows those are. Where an output has all rows,
`mask-outputs` makes those of padding 0, for whoever does not read them.
"""

from passes.motion.remove_padding.remove_padding import Unpad

__all__ = ["Unpad"]
