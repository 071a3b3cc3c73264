"""Attention sinks: the first tokens of a sequence, stored exactly in a sidecar of the encoded chunk that has their
slots.

A sidecar is one stretch of the arena for a whole chunk: rows T [L, H, 2, n, D], keys (not rotated) then values, in the
type of open chunks. Only chunks at the start of a sequence have one.

Source: KVQuant, arXiv 2401.18079, section 3.5. Ours differs: in the encoded page, the slots of these tokens hold the
codes of zeros, and their keys are rotated on read like all others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.cache.arena import Arena
from quire.cache.ledger import UNIT


@dataclass(frozen=True)
class Sinks:
    """The number of exact tokens, and their layout.

    num_tokens  n, at most the slots of a page
    dtype       type of their keys and values
    """

    num_tokens: int
    num_layers: int
    num_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def layer_bytes(self) -> int:
        """Bytes of the rows of one layer."""
        return self.num_heads * 2 * self.num_tokens * self.head_dim * self.dtype.itemsize

    @property
    def sidecar_bytes(self) -> int:
        """Bytes of a chunk's sidecar, a multiple of 128."""
        return -(-self.num_layers * self.layer_bytes // UNIT) * UNIT

    def rows(self, arena: Arena, sidecar: int, layer: int) -> tuple[torch.Tensor, ...]:
        """The rows of one layer of a sidecar, by its page id: keys and values [H, n, D], as views of the arena."""
        start = sidecar * UNIT + layer * self.layer_bytes
        found = arena.data[start : start + self.layer_bytes].view(self.dtype)
        return found.view(self.num_heads, 2, self.num_tokens, self.head_dim).unbind(1)
