"""Transport of page images between engines, by pull: the receiver asks for what it lacks. It moves bytes and keys,
never their meaning.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from quire.cache.segment import ChunkTable


@dataclass(frozen=True)
class Offer:
    """One chunk a sender holds: the key both sides know it by, and its chunk id at the sender."""

    key: Hashable
    chunk: int


class Transport(Protocol):
    """What a receiver asks of a sender."""

    def offer(self, offers: Sequence[Offer]) -> list[Hashable]:
        """Announces chunks; returns the keys the receiver lacks. The sender keeps their pages until `ack`."""
        ...

    def pull(self, key: Hashable, layer: int, heads: slice) -> torch.Tensor:
        """Page images of one layer's heads of an offered chunk, all of one size, uint8 [n, page_bytes]. Raises KeyError
        if it is not on offer.
        """
        ...

    def ack(self, keys: Sequence[Hashable]) -> None:
        """The receiver has the chunks: the sender may free them."""
        ...


class LocalTransport:
    """Between two caches of one process: a pull is a copy out of the sender's arena.

    sender    the table offered chunks live in
    resident  keys the receiver has already
    """

    def __init__(self, sender: ChunkTable, resident: set[Hashable]) -> None:
        self.sender = sender
        self.resident = resident
        self.on_offer: dict[Hashable, int] = {}

    def offer(self, offers: Sequence[Offer]) -> list[Hashable]:
        """See Transport."""
        lacking = [offer for offer in offers if offer.key not in self.resident]
        self.on_offer.update((offer.key, offer.chunk) for offer in lacking)
        return [offer.key for offer in lacking]

    def pull(self, key: Hashable, layer: int, heads: slice) -> torch.Tensor:
        """See Transport."""
        chunk = self.on_offer[key]
        codec = self.sender.codecs[int(self.sender.kinds[chunk])]
        ids = self.sender.pages[chunk, layer, heads]
        sizes = {self.sender.page_bytes(codec, layer, head) for head in range(self.sender.pages.shape[2])[heads]}
        assert len(sizes) == 1, f"pages of {sizes} bytes in heads {heads} of layer {layer}: pull them apart"
        return self.sender.pool.load(ids, *sizes)

    def ack(self, keys: Sequence[Hashable]) -> None:
        """See Transport."""
        for key in keys:
            del self.on_offer[key]
            self.resident.add(key)
