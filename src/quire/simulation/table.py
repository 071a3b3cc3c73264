"""A chunk table with pages but without their bytes. Its ledger gives out the same pages as an engine's."""

from __future__ import annotations

import numpy as np
import torch

from quire.cache.arena import Arena
from quire.cache.arrays import Bytes, Int32s
from quire.cache.codecs import Codec, SlotMoves
from quire.cache.codecs.sums import SumsCodec
from quire.cache.ledger import PageLedger
from quire.cache.table import ChunkTable
from quire.engine.control_plane import ChunkFormats


class NoBytes(Arena):
    """An arena that forgets what is written and reads zeros."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.device = torch.device("cpu")
        self.data = torch.empty(0, dtype=torch.uint8)

    def images(self, ids: Int32s, page_bytes: int) -> Bytes:
        """Zeros."""
        return np.zeros((len(ids), page_bytes), np.uint8)

    def store(self, ids: Int32s, page_bytes: int, images: torch.Tensor | Bytes) -> None:
        """Does nothing."""

    def copy(self, before: Int32s, after: Int32s, page_bytes: int) -> None:
        """Does nothing."""

    def read(self, start: int, num_bytes: int) -> Bytes:
        """Zeros."""
        return np.zeros(num_bytes, np.uint8)

    def write(self, start: int, given: Bytes) -> None:
        """Does nothing."""


class PagesOnly(ChunkTable):
    """A chunk table over `NoBytes`."""

    def __init__(self, ledger: PageLedger, shape: tuple[int, int], formats: ChunkFormats) -> None:
        super().__init__(
            ledger, *shape, *formats.codecs, sinks=formats.sinks, sums=formats.sums, arena=NoBytes(ledger.num_bytes)
        )

    def move(self, codec: Codec | SumsCodec, moves: SlotMoves) -> None:
        """Does nothing: slots have no bytes."""
