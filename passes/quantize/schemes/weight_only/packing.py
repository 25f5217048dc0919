"""Layouts of block-quantized codes: that of MatMulNBits, and that of the float weight.

    MatMulNBits   uint8 [outputs, blocks, block * bits / 8], inputs in order; zero points
                  [outputs, ceil(blocks * bits / 8)]
    float weight  signed integers q - 2^(bits - 1), in the shape of the weight; ONNX packs pairs of
                  int4 into bytes, across rows

The first code of a pair has the low bits of its byte. Large results are mapped to files.
"""

from __future__ import annotations

import numpy as np

from toolkit.ir.graph import Array
from toolkit.quantization.number_format import UINT4, NumberFormat
from toolkit.storage.spill import allocate

_CHUNK = 1 << 22
"""Codes to pack at a time; an even number."""


def pack(codes: Array, fmt: NumberFormat) -> Array:
    """Pack 4-bit codes in pairs along the last axis, padded with 0; return 8-bit codes as is."""
    if fmt.bits == 8:
        return codes
    if codes.shape[-1] % 2:
        codes = np.concatenate([codes, np.zeros_like(codes[..., :1])], axis=-1)
    return codes[..., 0::2] | codes[..., 1::2] << 4


class NBitsCodes:
    """Codes in the layout of MatMulNBits, written piece by piece."""

    def __init__(self, outputs: int, blocks: int, block: int, fmt: NumberFormat) -> None:
        self._format = fmt
        self._packed = allocate((outputs, blocks, block * fmt.bits // 8), np.uint8)

    def put(self, outputs: slice, blocks: slice, codes: Array) -> None:
        """Write codes [outputs, blocks, block]."""
        self._packed[outputs, blocks] = pack(codes, self._format)

    def done(self) -> Array:
        self._packed.flags.writeable = False
        return self._packed


class SignedCodes:
    """Signed codes in the layout of the float weight, written piece by piece; packed when done."""

    def __init__(self, shape: tuple[int, int], turned: bool, block: int, fmt: NumberFormat) -> None:
        self._block, self._format = block, fmt
        self._codes = allocate(shape, np.uint8)
        self._by_output: Array = self._codes if turned else np.transpose(self._codes)

    def put(self, outputs: slice, blocks: slice, codes: Array) -> None:
        """Write codes [outputs, blocks, block]."""
        # In two's complement q - 2^(bits - 1) is q with its highest bit flipped.
        flat = codes.reshape(len(codes), -1) ^ np.uint8(self._format.middle)
        inputs = slice(blocks.start * self._block, blocks.stop * self._block)
        into = self._by_output[outputs, inputs]
        into[...] = flat[:, : into.shape[1]]

    def done(self) -> Array:
        """Return int8 in the shape of the weight, or packed int4."""
        if self._format != UINT4:
            found = self._codes.view(np.int8)
        else:
            flat = self._codes.reshape(-1)
            found = allocate((-(-flat.size // 2),), np.uint8)
            for start in range(0, flat.size, _CHUNK):
                piece = pack(flat[start : start + _CHUNK], UINT4)
                found[start // 2 : start // 2 + piece.size] = piece
        found.flags.writeable = False
        return found
