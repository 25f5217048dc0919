"""Where codes go: as `MatMulNBits` reads them, or as the weight itself was stored.

    MatMulNBits   uint8 [outputs, blocks, block * bits / 8], the inputs of an output in order; zeros
                  [outputs, ceil(blocks * bits / 8)]
    as stored     signed integers q - 2^(bits - 1), in the shape of the float weight; ONNX packs two
                  of 4 bits to a byte, over all elements

Of two codes in a byte, the first has the low bits. Large results are mapped to files.
"""

from __future__ import annotations

import numpy as np

from passes.quantize.schemes.weight_only.blocks import Bits
from toolkit.ir.graph import Array
from toolkit.storage.spill import allocate

_CHUNK = 1 << 22


def pack(codes: Array, bits: Bits) -> Array:
    """Codes of 8 bits as they are; those of 4 in pairs along the last axis, an odd one with 0."""
    if bits == 8:
        return codes
    if codes.shape[-1] % 2:
        codes = np.concatenate([codes, np.zeros_like(codes[..., :1])], axis=-1)
    return codes[..., 0::2] | codes[..., 1::2] << 4


class Blob:
    """Codes as `MatMulNBits` reads them."""

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
    """Codes as signed integers in the layout of the float weight; 4 bits are packed at the end."""

    def __init__(self, shape: tuple[int, int], turned: bool, block: int, bits: Bits) -> None:
        self._turned, self._block, self._bits = turned, block, bits
        self._codes = allocate(shape, np.uint8)

    def put(self, outputs: slice, blocks: slice, codes: Array) -> None:
        """Take codes [outputs, blocks, block]."""
        # Two's complement: the highest bit of q, turned over.
        flat = codes.reshape(len(codes), -1) ^ np.uint8(1 << (self._bits - 1))
        inputs = slice(blocks.start * self._block, blocks.stop * self._block)
        if self._turned:
            into = self._codes[outputs, inputs]
            into[...] = flat[:, : into.shape[1]]
        else:
            into = self._codes[inputs, outputs]
            into[...] = flat[:, : into.shape[0]].T

    def done(self) -> Array:
        """Int8 in the shape of the weight, or the bytes of all nibbles."""
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
