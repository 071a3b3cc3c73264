"""Pages of column sums: the attention that the tokens of a chunk got, a float32 for each slot. No keys, no values.

A row of the chunk table with such pages stands beside a chunk and holds, for each layer and head, what `attention/`
adds up while a prompt is computed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from quire.cache.ledger import PAGE_TOKENS

if TYPE_CHECKING:
    import torch

    from quire.cache.arena import Arena
    from quire.cache.arrays import Bools, Floats, Int32s, Words
    from quire.cache.codecs import Moves


class Rows(Protocol):
    """The chunk table, as far as sums need it."""

    pages: Int32s
    masks: Words | None

    @property
    def arena(self) -> Arena:
        """The bytes of its pages."""
        ...


class SumsCodec:
    """A page is float32 [P], little-endian."""

    name = "sums"
    kernel_id = 5  # SUMS in kernels/common.h
    page_bytes = 4 * PAGE_TOKENS

    def load(self, table: Rows, rows: Int32s) -> Floats:
        """The sums in some rows of the table, one after the other, [L, H, n * P]; 0 where a row has no page."""
        held, ids = _held(table, rows)
        found = np.zeros((*held.shape, PAGE_TOKENS), np.float32)
        if len(ids):
            found[held] = table.arena.load(ids, self.page_bytes).cpu().numpy().view(np.float32)
        return found.reshape(*held.shape[:2], -1)

    def store(self, table: Rows, rows: Int32s, sums: Floats) -> None:
        """Overwrites the sums in some rows of the table with [L, H, n * P], where the rows have pages."""
        held, ids = _held(table, rows)
        if len(ids):
            images = sums.reshape(*held.shape, PAGE_TOKENS)[held]
            table.arena.store(ids, self.page_bytes, images.view(np.uint8))

    def move(self, arena: torch.Tensor, moves: Moves) -> None:
        """Overwrites slots of pages with other ones; see Codec."""
        from quire.cache.codecs.slots import RUN, SlottedPages

        SlottedPages([[(RUN, 4)]]).move(arena, moves)


def _held(table: Rows, rows: Int32s) -> tuple[Bools, Int32s]:
    """Of which heads rows have pages, [L, H, n], and these pages' ids."""
    assert table.masks is not None
    held = np.not_equal(table.masks[rows], 0).transpose(1, 2, 0)
    return held, table.pages[rows].transpose(1, 2, 0)[held]
