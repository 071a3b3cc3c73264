"""Exports: sequences that another engine continues. Their chunks stay until they are fetched or given up."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from quire.cache.eviction import Eviction
from quire.cache.holder import Holder
from quire.cache.keys import ChunkKeys
from quire.cache.path import Path, SwappedPath
from quire.cache.run import HeldPages, RunIdentity
from quire.cache.table import ChunkTable


@dataclass(frozen=True, eq=False)
class ExportedSequence:
    """A sequence that has left its engine. Its pages no longer change, so any thread may pack them until it is ended.

    Its parts are its shared chunks, one part each by index, and then its own chunks together, if it has any.

    keys     keys of its chunks
    path     its chunks, still locked
    swapped  the path that the other engine needs besides the bytes of the chunks
    shared   the pages of its shared chunks, under a hold; None: it has none
    own      the pages of its own chunks, under a hold; None: it has none
    """

    keys: ChunkKeys
    path: Path
    swapped: SwappedPath
    shared: HeldPages | None
    own: HeldPages | None

    @property
    def parts(self) -> frozenset[int]:
        """The indices of all parts."""
        return frozenset(range(self.swapped.num_shared + (self.own is not None)))

    def pages(self, group: Collection[int]) -> HeldPages:
        """The pages of some parts, either shared chunks or the sequence's own. Raises ValueError for a mixture."""
        num_shared = self.swapped.num_shared
        if self.own is not None and set(group) == {num_shared}:
            return self.own
        if self.shared is None or not group or not set(group) <= set(range(num_shared)):
            raise ValueError(f"parts {sorted(group)} of {len(self.parts)} do not go together")
        return self.shared.part(np.isin(np.arange(num_shared), list(group)))


class Exports:
    """The exports of one engine. For its other sequences they are occupied memory.

    held  exports that have not been ended
    """

    def __init__(self, eviction: Eviction) -> None:
        self.eviction = eviction
        self.held: set[ExportedSequence] = set()

    def add(self, holder: Holder) -> ExportedSequence:
        """Takes the chunks of a sequence whose tokens are all computed."""
        path = holder.path
        assert path.transfer is None and path.reservation.filled < 0, "the sequence is in the middle of a step"
        rows, shared, own = np.concatenate((path.private, path.retention.sums)), None, None
        if path.num_shared:
            shared = shared_pages(self.eviction.pages, holder.keys, path, list(range(path.num_shared)))
        if len(rows):
            identity, num_attached = RunIdentity((os.urandom(16),)), len(path.retention.sums)
            own = HeldPages(self.eviction.pages, identity, rows, attached=num_attached)
        swapped = SwappedPath.of(path, None if own is None else own.run)
        export = ExportedSequence(holder.keys, path, swapped, shared, own)
        self.held.add(export)
        return export

    def end(self, export: ExportedSequence) -> None:
        """Frees the chunks of an export. Its shared chunks stay cached."""
        self.held.remove(export)
        for pages in (export.shared, export.own):
            if pages is not None:
                pages.release()
        self.eviction.table.free(self.eviction.tree.release(export.path))


def shared_pages(table: ChunkTable, keys: ChunkKeys, path: Path, chunks: list[int]) -> HeldPages:
    """The pages of some shared chunks of a path, by rising index."""
    count = path.num_shared
    whole = RunIdentity(tuple(keys.first(count)), keys.tokens(0, count), keys.namespace)
    return HeldPages(table, whole.subset(chunks), path.chunks[chunks])
