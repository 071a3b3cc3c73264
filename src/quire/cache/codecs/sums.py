"""Pages of column sums: the attention that the tokens of a chunk got, a float32 for each slot. No keys, no values.

A row of the chunk table with such pages stands beside a chunk and holds, for each layer and head, what `attention/`
adds up while a prompt is computed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.cache.ledger import PAGE_TOKENS

if TYPE_CHECKING:
    import torch

    from quire.cache.codecs import SlotMoves


class SumsCodec:
    """A page is float32 [P], little-endian."""

    name = "sums"
    kernel_id = 5  # SUMS in kernels/common.h
    page_bytes = 4 * PAGE_TOKENS

    def move(self, arena: torch.Tensor, moves: SlotMoves) -> None:
        """Overwrites slots of pages with other ones; see Codec."""
        from quire.cache.codecs.slots import RUN, SlottedPages

        SlottedPages([[(RUN, 4)]]).move(arena, moves)
