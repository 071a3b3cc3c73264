"""Numbers as quantized pages hold them: codes of 1 to 5 bits in 64-byte lines, as a vector register unpacks them, and
float16.

A line is 32 little-endian 16-bit lanes. Codes come as fields of 32, one for each lane. A code of b bits is cut by the
powers of two that make up b, the largest first: 5 = 4 + 1, 3 = 2 + 1. The part of w bits of 16 / w consecutive fields
lies in one line, the first field lowest, so no code crosses a lane, and one shift and one mask unpack 32 codes.

    3 bits, 16 fields:  2 lines of the upper two bits (fields 0-7, 8-15), then 1 line of the lowest bit
"""

from __future__ import annotations

import torch

LANES = 32
"""Codes of a field: 16-bit lanes of a 64-byte line."""

LINE_BYTES = 64
LANE_BITS = 16
MAX_BITS = 5
"""Widest code: 32 centroids of 16 bits are one register to look up in."""


def parts(bits: int) -> tuple[tuple[int, int], ...]:
    """(width, place of its lowest bit in the code) of every part of a code, in the order of their lines."""
    found = []
    for width in (4, 2, 1):
        if bits & width:
            bits -= width
            found.append((width, bits))
    return tuple(found)


def num_lines(fields: int, bits: int) -> int:
    """Lines that so many fields take; fields is a multiple of 16."""
    return fields * bits // LANE_BITS


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes below 2^bits, uint8 [n, F, 32] with F a multiple of 16, as lines, uint8 [n, F * bits * 4]."""
    n, fields, _ = codes.shape
    wide = codes.to(torch.int32)
    lines = []
    for width, place in parts(bits):
        per_line = LANE_BITS // width
        part = (wide >> place) & ((1 << width) - 1)
        shifts = torch.arange(per_line, dtype=torch.int32, device=codes.device) * width
        words = (part.view(n, fields // per_line, per_line, LANES) << shifts[:, None]).sum(2, dtype=torch.int32)
        low_high = torch.stack((words & 0xFF, words >> 8), -1)  # little-endian
        lines.append(low_high.to(torch.uint8).reshape(n, -1))
    return torch.cat(lines, 1) if lines else codes.new_empty(n, 0)


def unpack(lines: torch.Tensor, fields: int, bits: int) -> torch.Tensor:
    """The codes of `pack`, int64 [n, F, 32]."""
    n = len(lines)
    codes = torch.zeros(n, fields, LANES, dtype=torch.int64, device=lines.device)
    start = 0
    for width, place in parts(bits):
        per_line = LANE_BITS // width
        end = start + num_lines(fields, width) * LINE_BYTES
        pairs = lines[:, start:end].reshape(n, -1, LANES, 2).to(torch.int64)
        words = pairs[..., 0] | pairs[..., 1] << 8  # [n, lines, lanes]
        shifts = torch.arange(per_line, device=lines.device) * width
        part = (words[:, :, None, :] >> shifts[:, None]) & ((1 << width) - 1)
        codes |= part.reshape(n, fields, LANES) << place
        start = end
    return codes


def to_half(x: torch.Tensor) -> torch.Tensor:
    """The nearest finite float16."""
    return x.clamp(-65504.0, 65504.0).half()
