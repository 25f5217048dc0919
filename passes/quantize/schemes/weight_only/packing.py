"""The layout of codes: for `MatMulNBits`, or that of the float weight.

    MatMulNBits   uint8 [outputs, blocks, block * bits / 8], inputs in order; zero points
                  [outputs, ceil(blocks * bits / 8)]
    as stored     signed integers q - 2^(bits - 1), in the shape of the float weight; ONNX packs two
                  int4 into a byte, over all elements

The first of two codes has the low bits of a byte. Large results are mapped to files.
"""

from __future__ import annotations

import numpy as np

from passes.quantize.schemes.weight_only.blocks import Bits
from toolkit.ir.graph import Array
from toolkit.storage.spill import allocate

_CHUNK = 1 << 22


def pack(codes: Array, bits: Bits) -> Array:
    """Pack 4-bit codes in pairs along the last axis, padded with 0; keep 8-bit codes."""
    if bits == 8:
        return codes
    if codes.shape[-1] % 2:
        codes = np.concatenate([codes, np.zeros_like(codes[..., :1])], axis=-1)
    return codes[..., 0::2] | codes[..., 1::2] << 4


class Blob:
    """A sink with the layout of `MatMulNBits`."""

    def __init__(self, outputs: int, blocks: int, block: int, bits: Bits) -> None:
        self._bits: Bits = bits
        self._packed = allocate((outputs, blocks, block * bits // 8), np.uint8)

    def put(self, outputs: slice, blocks: slice, codes: Array) -> None:
        """Take codes [outputs, blocks, block]."""
        self._packed[outputs, blocks] = pack(codes, self._bits)

    def done(self) -> Array:
        self._packed.flags.writeable = False
        return self._packed


class AsStored:
    """A sink with signed codes in the layout of the float weight; int4 is packed at the end."""

    def __init__(self, shape: tuple[int, int], turned: bool, block: int, bits: Bits) -> None:
        self._turned, self._block, self._bits = turned, block, bits
        self._codes = allocate(shape, np.uint8)

    def put(self, outputs: slice, blocks: slice, codes: Array) -> None:
        """Take codes [outputs, blocks, block]."""
        # Two's complement: flip the highest bit of q.
        flat = codes.reshape(len(codes), -1) ^ np.uint8(1 << (self._bits - 1))
        inputs = slice(blocks.start * self._block, blocks.stop * self._block)
        if self._turned:
            into = self._codes[outputs, inputs]
            into[...] = flat[:, : into.shape[1]]
        else:
            into = self._codes[inputs, outputs]
            into[...] = flat[:, : into.shape[0]].T

    def done(self) -> Array:
        """Return int8 in the shape of the weight, or packed int4."""
        if self._bits == 8:
            found = self._codes.view(np.int8)
        else:
            flat = self._codes.reshape(-1)
            found = allocate((-(-flat.size // 2),), np.uint8)
            for start in range(0, flat.size, _CHUNK):
                piece = pack(flat[start : start + _CHUNK], 4)
                found[start // 2 : start // 2 + piece.size] = piece
        found.flags.writeable = False
        return found
