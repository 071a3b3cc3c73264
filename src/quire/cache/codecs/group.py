"""Group codes: four bits a number, and a range for every 64 channels of a vector. Needs no calibration.

    value of a token:         low + code * step, low and step of its own for each group of channels
    key of a token:           bias + low + code * step, bias that of the head's key projection, zero where it has none

A page (P = 64 slots, D channels, all little-endian; docs/reference/page-format.md has it byte by byte):

    key codes | value codes | key ranges | value ranges

Source: FlexGen, arXiv 2303.06865, section 4: asymmetric minimum and maximum, groups along the head. What differs: keys
are not rotated, so that pages are read like those of other codecs, and lack the constant that all keys of a head share;
the step is stored and not its inverse, which has no finite float16 for a small range; codes are fitted to the range as
it is stored; the last group is shorter and not padded; a constant group divides by nothing.
"""

from __future__ import annotations

import torch

from quire.cache.codecs import CodecInputs
from quire.cache.codecs.packing import from_half, to_half
from quire.cache.codecs.slots import RUN, SlottedPages
from quire.cache.ledger import PAGE_TOKENS, UNIT

GROUP_CHANNELS = 64
TOP_CODE = 15


class GroupCodec(SlottedPages):
    """Asymmetric codes of 4 bits in groups of 64 channels; the last group of a head has what is left.

    head_dim  D, even
    key_bias  float32 [L, H, D], what the model adds to all keys of a head, if anything: keys are stored less it. A few
              of Qwen2's channels have biases in the hundreds, and would take the whole range of their group
    """

    name = "g4"
    kernel_id = 4  # GROUP in kernels/common.h

    def __init__(self, head_dim: int, key_bias: torch.Tensor | None = None) -> None:
        self.head_dim = head_dim
        self.key_bias = None if key_bias is None else key_bias.float().contiguous()
        # Two rows of codes of a token; then of every group of keys, and of values, low and step, float16 each.
        sizes = [head_dim // 2] * 2 + [2] * 4 * -(-head_dim // GROUP_CHANNELS)
        self.page_bytes = PAGE_TOKENS * sum(sizes)
        assert self.page_bytes % UNIT == 0
        super().__init__([[(RUN, size) for size in sizes]])

    @classmethod
    def of(cls, inputs: CodecInputs) -> GroupCodec:
        """The codec of a model's heads."""
        return cls(inputs.head_dim, inputs.key_bias)

    def encode(self, layer: int, head: int, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Keys, not rotated, and values, [n, P, D] each, as page images; layer and head say which bias is taken off."""
        codes, ranges = [], []
        for part in torch.stack((k.float() - self._bias(layer, head, k), v.float()), 1).split(GROUP_CHANNELS, -1):
            # Never minus zero: which of two zeros is the smaller is nobody's promise.
            low = to_half(part.amin(-1) + 0.0)
            step = to_half((part.amax(-1) - low.float()).clamp_min(0) * (1.0 / TOP_CODE) + 0.0)
            wide = step.float()[..., None]
            scaled = (part - low.float()[..., None]) / torch.where(wide > 0, wide, 1.0)
            codes.append(scaled.clamp(0, TOP_CODE).round().to(torch.uint8))
            ranges += [low, step]
        low_half, high_half = torch.cat(codes, -1).chunk(2, -1)
        pairs, halves = low_half | high_half << 4, torch.stack(ranges, 2)
        return torch.cat((pairs.flatten(1), halves.flatten(1).view(torch.uint8)), 1)

    def decode(self, layer: int, head: int, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Page images uint8 [n, page_bytes] as keys, not rotated, and values, float32 [n, P, D] each."""
        pairs, ranges = pages.tensor_split((PAGE_TOKENS * self.head_dim,), 1)
        pairs = pairs.unflatten(1, (2, PAGE_TOKENS, -1))
        codes = torch.cat((pairs & TOP_CODE, pairs >> 4), -1).float()
        groups = from_half(ranges).unflatten(1, (2, -1, 2, PAGE_TOKENS))
        low, step = groups.repeat_interleave(GROUP_CHANNELS, 2)[:, :, : self.head_dim].permute(3, 0, 1, 4, 2)
        k, v = (low + codes * step).unbind(1)
        return k + self._bias(layer, head, k), v

    def _bias(self, layer: int, head: int, k: torch.Tensor) -> torch.Tensor | float:
        return 0.0 if self.key_bias is None else self.key_bias[layer, head].to(k.device)
