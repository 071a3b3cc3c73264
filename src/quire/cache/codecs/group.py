"""Group codes: four bits a number, and a range for every 64 channels of a vector. Needs no calibration.

    value of a token:         low + code * step, low and step of its own for each group of channels
    key of a token:           bias + low + code * step, bias that of the head's key projection, zero where it has none

A page (P = 64 slots, D channels, all little-endian; docs/page-format.md has it byte by byte):

    key codes | value codes | key ranges | value ranges

Source: FlexGen, arXiv 2303.06865, section 4: asymmetric minimum and maximum, groups along the head. What differs: keys
are not rotated, so that pages are read like those of other codecs, and lack the constant that all keys of a head share;
the step is stored and not its inverse, which has no
finite float16 for a small range; codes are fitted to the range as it is stored; the last group is shorter and not
padded; a constant group divides by nothing.
"""

from __future__ import annotations

import torch

from quire.cache.codecs import Moves
from quire.cache.codecs.packing import to_half
from quire.cache.codecs.slots import RUN, SlotMap
from quire.cache.ledger import PAGE_TOKENS, UNIT
from quire.errors import ConfigError

KERNEL_ID = 4
"""GROUP in kernels/common.h."""

GROUP_CHANNELS = 64
TOP_CODE = 15
_RANGE_BYTES = 4 * PAGE_TOKENS
"""Of one group of every vector: low, then step, float16 each."""


def check_head_dim(head_dim: int) -> None:
    """Raises ConfigError for a head size that the codec cannot store."""
    if head_dim % 2 or head_dim > 256:
        raise ConfigError(f"g4 stores heads of an even size up to 256, not {head_dim}; use cache.codec dense")


class GroupCodec:
    """Asymmetric codes of 4 bits in groups of 64 channels; the last group of a head has what is left.

    head_dim  D
    key_bias  float32 [L, H, D], what the model adds to all keys of a head, if anything: keys are stored less it. A few
              of Qwen2's channels have biases in the hundreds, and would take the whole range of their group
    Raises ConfigError for one that is odd or above 256.
    """

    name = "g4"
    kernel_id = KERNEL_ID

    def __init__(self, head_dim: int, key_bias: torch.Tensor | None = None) -> None:
        check_head_dim(head_dim)
        self.head_dim = head_dim
        self.key_bias = None if key_bias is None else key_bias.float().contiguous()
        self._starts = range(0, head_dim, GROUP_CHANNELS)
        self.page_bytes = PAGE_TOKENS * head_dim + 2 * _RANGE_BYTES * len(self._starts)
        assert self.page_bytes % UNIT == 0
        row = head_dim // 2
        ranges = range(PAGE_TOKENS * head_dim, self.page_bytes, 2 * PAGE_TOKENS)
        self.slots = SlotMap([[(RUN, 0, row), (RUN, PAGE_TOKENS * row, row), *((RUN, start, 2) for start in ranges)]])

    def encode(self, layer: int, head: int, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Keys, not rotated, and values, [n, P, D] each, as page images; layer and head say which bias is taken off."""
        k = k.float()
        key_codes, key_ranges = self._encode(k if self.key_bias is None else k - self._bias(layer, head, k))
        value_codes, value_ranges = self._encode(v.float())
        return torch.cat((key_codes, value_codes, key_ranges, value_ranges), 1)

    def decode(self, layer: int, head: int, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Page images uint8 [n, page_bytes] as keys, not rotated, and values, float32 [n, P, D] each."""
        codes = pages[:, : PAGE_TOKENS * self.head_dim].view(len(pages), 2, PAGE_TOKENS, -1)
        ranges = pages[:, PAGE_TOKENS * self.head_dim :].contiguous().view(torch.float16).float()
        ranges = ranges.view(len(pages), 2, len(self._starts), 2, PAGE_TOKENS)
        k = self._decode(codes[:, 0], ranges[:, 0])
        return k if self.key_bias is None else k + self._bias(layer, head, k), self._decode(codes[:, 1], ranges[:, 1])

    def move(self, arena: torch.Tensor, moves: Moves) -> None:
        """Overwrites slots of pages with other ones; see Codec."""
        self.slots.move(arena, moves)

    def _bias(self, layer: int, head: int, k: torch.Tensor) -> torch.Tensor:
        assert self.key_bias is not None
        return self.key_bias[layer, head].to(k.device)

    def _encode(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and ranges of vectors [n, P, D], as bytes [n, -1] each."""
        codes, ranges = [], []
        for start in self._starts:
            part = x[..., start : start + GROUP_CHANNELS]
            # Never minus zero: which of two zeros is the smaller is nobody's promise.
            low = to_half(part.amin(-1) + 0.0)
            step = to_half((part.amax(-1) - low.float()).clamp_min(0) * (1.0 / TOP_CODE) + 0.0)
            wide = step.float()[..., None]
            scaled = (part - low.float()[..., None]) / torch.where(wide > 0, wide, 1.0)
            codes.append(scaled.clamp(0, TOP_CODE).round().to(torch.uint8))
            ranges += [low, step]
        low_half, high_half = torch.cat(codes, -1).chunk(2, -1)
        return (low_half | high_half << 4).flatten(1), torch.cat(ranges, 1).view(torch.uint8)

    def _decode(self, pairs: torch.Tensor, ranges: torch.Tensor) -> torch.Tensor:
        """Vectors [n, P, D] of code pairs [n, P, D / 2] and ranges [n, groups, 2, P]."""
        codes = torch.cat((pairs & TOP_CODE, pairs >> 4), -1).float()
        of_channel = torch.arange(self.head_dim, device=codes.device) // GROUP_CHANNELS
        low, step = ranges[:, of_channel].permute(2, 0, 3, 1).unbind()  # [n, P, D] each
        return low + codes * step
