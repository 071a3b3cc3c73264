"""How 64 tokens of one head become page bytes, and back."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from quire.cache.codecs.slots import Moves


class PageFormat(Protocol):
    """What pages hold, as far as the chunk table has to know.

    name       what messages call it
    kernel_id  what fast backends know it by
    """

    name: str
    kernel_id: int

    @property
    def page_bytes(self) -> int | NDArray[np.int32]:
        """Bytes of one page: 64 slots of one head of one layer, a multiple of 128. [L, H] where they differ."""
        ...


@runtime_checkable
class Codec(PageFormat, Protocol):
    """Bytes of a page <-> keys and values. Nobody above a codec sees its bits.

    Fast backends know a codec by `kernel_id` and carry their own inline load-K and load-V for it; `encode` and `decode`
    are the definition. Keys are taken and given as pages hold them: whoever reads a page of an engine whose sealed
    codec encodes rotates them.
    """

    def encode(self, layer: int, head: int, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Keys and values [n, P, D] of a head as page images, uint8 [n, page_bytes]."""
        ...

    def decode(self, layer: int, head: int, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Page images uint8 [n, page_bytes] as keys and values, float32 [n, P, D] each."""
        ...

    def move(self, arena: torch.Tensor, moves: Moves) -> None:
        """Overwrites token slots of pages in an arena, uint8 [bytes], with other ones, in place: bit for bit what
        encoding these tokens in their new slots would give. On a GPU, enqueued on the current stream.
        """
        ...
