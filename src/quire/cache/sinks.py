"""Attention sinks: the first tokens of a sequence, stored exactly in a sidecar of the encoded chunk that has their
slots.

A sidecar is one stretch of the arena for a whole chunk: rows T [L, H, 2, n, D], keys (not rotated) then values, in the
type of open chunks. Only chunks at the start of a sequence have one.

Source: KVQuant, arXiv 2401.18079, section 3.5. Ours differs: in the encoded page, the slots of these tokens hold the
codes of zeros, and their keys are rotated on read like all others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from quire.cache.arena import Arena
from quire.cache.arrays import Int32s
from quire.cache.ledger import UNIT


class Sidecars(Protocol):
    """The chunk table, as far as sinks need it."""

    sidecars: Int32s

    @property
    def arena(self) -> Arena:
        """The bytes of its pages."""
        ...


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
    def head_bytes(self) -> int:
        """Bytes of one head of one layer."""
        return 2 * self.num_tokens * self.head_dim * self.dtype.itemsize

    @property
    def sidecar_bytes(self) -> int:
        """Bytes of a chunk's sidecar, a multiple of 128."""
        return -(-self.num_layers * self.num_heads * self.head_bytes // UNIT) * UNIT

    def rows(self, table: Sidecars, chunk: int, layer: int) -> torch.Tensor:
        """The rows of one layer, [H, 2, n, D], as a view of the arena."""
        start = int(table.sidecars[chunk]) * UNIT + layer * self.num_heads * self.head_bytes
        found = table.arena.data[start : start + self.num_heads * self.head_bytes]
        return found.view(self.dtype).view(self.num_heads, 2, self.num_tokens, self.head_dim)

    def store(self, table: Sidecars, chunk: int, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Copies the first tokens of keys and values [H, P, D] into the chunk's sidecar."""
        rows = self.rows(table, chunk, layer)
        rows[:, 0] = k[:, : self.num_tokens]
        rows[:, 1] = v[:, : self.num_tokens]

    def load(self, table: Sidecars, chunk: int, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Overwrites the first tokens of keys and values [H, P, D] with those of the sidecar."""
        rows = self.rows(table, chunk, layer)
        k[:, : self.num_tokens] = rows[:, 0]
        v[:, : self.num_tokens] = rows[:, 1]
