"""Numbers as quantized pages hold them: codes of 1 to 5 bits in 64-byte lines, as a vector register unpacks them, and
float16.

A line is 32 little-endian 16-bit lanes. Codes come as fields of 32, one for each lane. A code of b bits is cut by the
powers of two that make up b, the largest first: 5 = 4 + 1, 3 = 2 + 1. The part of w bits of 16 / w consecutive fields
lies in one line, the first field lowest, so no code crosses a lane, and one shift and one mask unpack 32 codes.

    3 bits, 16 fields:  2 lines of the upper two bits (fields 0-7, 8-15), then 1 line of the lowest bit
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from quire.cache.arrays import Int32s

LANES = 32
"""Codes of a field: 16-bit lanes of a 64-byte line."""

LINE_BYTES = 64
LANE_BITS = 16
MAX_BITS = 5
"""Widest code: 32 centroids of 16 bits are one register to look up in."""


def parts(bits: int) -> list[tuple[int, int]]:
    """(width, place of its lowest bit in the code) of every part of a code, in the order of their lines."""
    return [(width, bits & (width - 1)) for width in (4, 2, 1) if bits & width]


class Lines:
    """Lines of blocks of codes, one block behind the other.

    numbers  int32 [B * F * 32] in any shape, each number once: whose code the lanes of F fields of B blocks have; F a
             multiple of 16
    widths   of each block the bits of its codes
    """

    def __init__(self, numbers: Int32s, widths: Sequence[int]) -> None:
        self._count = numbers.size
        bits = 8 * numbers.reshape(len(widths), -1, 1) + np.arange(8, dtype=np.int32)
        found = [
            block[:, lowest : lowest + width].reshape(-1, LANE_BITS // width, LANES, width).swapaxes(1, 2).ravel()
            for block, of_block in zip(bits, widths, strict=True)
            for width, lowest in parts(of_block)
        ]
        # For each bit of the lines, its index among the bits of the codes.
        self._order = np.concatenate([bits[:0].ravel(), *found])

    def pack(self, codes: torch.Tensor) -> torch.Tensor:
        """Codes [n, ...], `numbers` of each n and below 2^bits, as lines, uint8 [n, bytes]."""
        bits = np.unpackbits(codes.flatten(1).numpy().astype(np.uint8), 1, bitorder="little")
        return torch.from_numpy(np.packbits(bits[:, self._order], 1, "little"))

    def unpack(self, lines: torch.Tensor) -> torch.Tensor:
        """The codes of `pack`, int64 [n, numbers]."""
        bits = np.zeros((len(lines), 8 * self._count), np.uint8)
        bits[:, self._order] = np.unpackbits(lines.numpy(), 1, bitorder="little")
        return torch.from_numpy(np.packbits(bits, 1, "little")).long()


def to_half(x: torch.Tensor) -> torch.Tensor:
    """The nearest finite float16."""
    return x.clamp(-65504.0, 65504.0).half()


def from_half(pages: torch.Tensor) -> torch.Tensor:
    """Bytes uint8 [..., 2 * m] as float16 has them, float32 [..., m]."""
    return pages.contiguous().view(torch.float16).float()
