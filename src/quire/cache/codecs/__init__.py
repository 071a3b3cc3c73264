"""How 64 tokens of one head become page bytes, and back."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray


class Codec(Protocol):
    """Bytes of a page <-> keys and values. Nobody above a codec sees its bits.

    Fast backends know a codec by `kernel_id` and carry their own inline load-K and load-V for it; `encode` and `decode`
    are the definition. Keys are taken and given as pages hold them: whoever reads a page of an engine whose sealed
    codec encodes rotates them.
    """

    name: str
    kernel_id: int

    @property
    def page_bytes(self) -> int | NDArray[np.int32]:
        """Bytes of one page: 64 slots of one head of one layer, a multiple of 128. [L, H] where they differ."""
        ...

    def encode(self, layer: int, head: int, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Keys and values [n, P, D] of a head as page images, uint8 [n, page_bytes]."""
        ...

    def decode(self, layer: int, head: int, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Page images uint8 [n, page_bytes] as keys and values, float32 [n, P, D] each."""
        ...
