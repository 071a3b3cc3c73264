"""How 64 tokens of one head become page bytes, and back."""

from __future__ import annotations

from typing import Protocol

import torch


class Codec(Protocol):
    """Bytes of a page <-> keys and values. Nobody above a codec sees its bits.

    Fast backends know a codec by `kernel_id` and carry their own inline load-K and load-V for it; `encode` and `decode`
    are the definition.
    """

    name: str
    kernel_id: int
    page_bytes: int
    """Bytes of one page: 64 slots of one head of one layer, a multiple of 128."""

    def encode(self, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Keys and values [n, P, D] at positions int64 [n, P] as page images, uint8 [n, page_bytes]."""
        ...

    def decode(self, pages: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Page images uint8 [n, page_bytes] as rotated keys and values, float32 [n, P, D] each."""
        ...
