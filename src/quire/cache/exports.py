"""Exports: sequences that another engine goes on with. Their chunks stay until they are taken or given up."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from quire.cache.arrays import Int32s
from quire.cache.holder import Holder
from quire.cache.keys import ChunkKeys
from quire.cache.path import Path, Swapped
from quire.cache.paths import Paths
from quire.cache.run import Origin, Pages, run_of
from quire.cache.table import ChunkTable


@dataclass(frozen=True, eq=False)
class Export:
    """A sequence that left.

    Its parts are its shared chunks, by index, and then, if it has any, its own chunks together.

    keys     of its chunks
    path     its chunks, locked as when it ran
    swapped  what the other engine needs beside their bytes
    """

    keys: ChunkKeys
    path: Path
    swapped: Swapped

    @property
    def parts(self) -> frozenset[int]:
        """All parts."""
        return frozenset(range(self.swapped.num_shared + (self.swapped.run is not None)))


class Exports:
    """The exports of one engine. To the others they are occupied memory.

    held  exports that nobody has ended
    """

    def __init__(self, paths: Paths) -> None:
        self.paths = paths
        self.held: set[Export] = set()

    def add(self, holder: Holder) -> Export:
        """Takes the chunks of a sequence whose tokens are all computed. To the manager, it ends."""
        path, paths = holder.path, self.paths
        assert path.transfer is None and path.filled < 0, "the sequence is in the middle of a step"
        rows = _own(path)
        run = None
        if len(rows):
            run = run_of(self._table, Origin((os.urandom(16),)), rows, attached=len(path.sums))
        export = Export(holder.keys, path, Swapped.of(path, run))
        paths.retention.leave(holder)
        paths.room.forget(holder)
        holder.path = Path()
        self.held.add(export)
        return export

    def pages(self, export: Export, parts: Collection[int]) -> list[Pages]:
        """The pages of some parts, under holds: first those of shared chunks, in order, then the sequence's own."""
        path, keys, run, found = export.path, export.keys, export.swapped.run, list[Pages]()
        chunks = sorted(part for part in parts if part < path.num_shared)
        if chunks:
            found.append(shared_pages(self._table, keys, path, chunks))
        if run is not None and path.num_shared in parts:
            found.append(Pages(self._table, run, _own(path)))
        return found

    def end(self, export: Export) -> None:
        """Frees what a sequence left. Its shared chunks stay cached."""
        self.held.remove(export)
        self.paths.give_back(export.path)

    @property
    def _table(self) -> ChunkTable:
        assert isinstance(self.paths.table, ChunkTable), "a table without pages"
        return self.paths.table


def shared_pages(table: ChunkTable, keys: ChunkKeys, path: Path, chunks: list[int]) -> Pages:
    """The pages of some shared chunks of a path, by rising index."""
    names = keys.first(path.num_shared)
    tokens = np.concatenate([keys.tokens(chunk, chunk + 1) for chunk in chunks])
    parent = names[chunks[0] - 1] if chunks[0] else b""
    origin = Origin(tuple(names[chunk] for chunk in chunks), tokens, keys.namespace, chunks[0], parent)
    return Pages.of(table, origin, path.chunks[chunks])


def _own(path: Path) -> Int32s:
    """The rows that no tree has."""
    return np.concatenate((path.private, path.sums))
