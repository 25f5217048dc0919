"""Padding removal: compute the real tokens of a padded batch alone.

    pooled(f(x), mask)  =  pooled(unpack(f(pack(x))), mask)

The texts of a batch are padded to one length, and a mask says which tokens are real. No attention
reads a masked key, and a mean over the real tokens, or the first token alone, does not depend on
padding: norms, linear maps and activations in between need only the real rows of all texts, packed
one after the other. `masked_values` bounds values where the mask is zero (`mask_axes` follows the
mask through operators), `dont_care` finds the values that may be anything there, `region` collects
the operators to compute on packed rows, and `packing` adds the nodes that pack and unpack. Where an
output has all rows, the pass `mask-outputs` zeroes those of padding, if the user asks for it.
"""

from passes.motion.remove_padding.remove_padding import Unpad

__all__ = ["Unpad"]
