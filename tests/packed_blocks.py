"""Random blocks of every type that products read without dequantizing."""

from __future__ import annotations

import torch

from quire.models.gguf_file import BLOCKS
from quire.models.quants import GROUP_CODES, Blocks, group_codes

KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", GROUP_CODES)

_SIZES = {name: (size, num_bytes) for name, size, num_bytes in BLOCKS.values()}
_HALVES = {"Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,), "Q6_K": (208,)}
"""Where a block's halves are; those of others are its first two."""


def random_blocks(
    kind: str, outputs: int, inputs: int, seed: int = 0, halves: tuple[float, float] | None = None
) -> Blocks:
    """A matrix [outputs, inputs] of random bytes. Its halves are small, or those that are given: scale, minimum."""
    generator = torch.Generator().manual_seed(seed)
    if kind == GROUP_CODES:
        found = group_codes(torch.randn(outputs, inputs, generator=generator))
        size, num_bytes = 64, 36
        raw = found.raw.reshape(-1, num_bytes)
    else:
        size, num_bytes = _SIZES[kind]
        raw = torch.randint(0, 256, (outputs * inputs // size, num_bytes), dtype=torch.uint8, generator=generator)
    if kind != GROUP_CODES or halves is not None:
        for number, byte in enumerate(_HALVES.get(kind, (0, 2))):
            numbers = 0.1 * torch.randn(len(raw), generator=generator)
            if halves is not None:
                numbers = torch.full((len(raw),), halves[number])
            raw[:, byte : byte + 2] = numbers.half().view(torch.uint8).view(-1, 2)
    return Blocks(kind, raw.reshape(outputs, -1), inputs)
