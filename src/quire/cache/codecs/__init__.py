"""How 64 tokens of one head become page bytes, and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch


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


@dataclass(frozen=True)
class Moves:
    """Token slots that other slots are overwritten with, int32 [m] each. Pages are named by their ids, and are pages of
    one codec: of the same layer and head where these differ.

    No slot is named twice among those written, and none of them is read.
    """

    layers: NDArray[np.int32]
    heads: NDArray[np.int32]
    from_pages: NDArray[np.int32]
    from_slots: NDArray[np.int32]
    to_pages: NDArray[np.int32]
    to_slots: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.from_pages)


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
