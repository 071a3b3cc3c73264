"""Demotion: copies chunks of the tree to a store, before their eviction if there is time."""

from __future__ import annotations

import sys

from quire.cache.arrays import Int32s
from quire.cache.counts import ChunkCounts
from quire.cache.run import RUN_BYTES, RUN_CHUNKS, RunIdentity
from quire.cache.segment import Segment
from quire.cache.store import Store, put_rows
from quire.cache.table import ChunkTable
from quire.cache.tree import DroppedChunks

COPY_SPEED = 200e6
"""Bytes a second that are copied beside running requests: at 3 GB/s, 7 % of the time of the engine's thread, and three
times as much as prefill on two cores makes."""

MOST_AHEAD = 4 << 20
"""Bytes that may be copied after one long step. With 16 MiB the step after a prompt took twice as long as others, which
the 99th percentile of the time per token showed."""


class Demotion:
    """Offers chunks to a store. Demotion removes nothing from the tree; it makes a later eviction free. Chunks with a
    `cache_lifetime` are never offered.

    is_on     whether there is a store that keeps chunks
    num_lost  evicted chunks that the store did not take
    """

    def __init__(self, table: ChunkCounts, store: Store) -> None:
        self.table = table
        self.store = store
        self.is_on = store.keeps
        self.num_lost = 0
        self._most = max(1, min(RUN_CHUNKS, RUN_BYTES // max(1, table.chunk_bytes(table.sealed_codec))))
        self._waiting: dict[Segment, None] = {}
        self._allowed = 0.0
        self._now = 0.0

    @property
    def is_waiting(self) -> bool:
        """Whether chunks wait to be offered."""
        return bool(self._waiting)

    def note(self, segment: Segment | None) -> None:
        """Queues a segment with new chunks or a new attachment for demotion."""
        if self.is_on and segment is not None and segment.lifetime is None:
            if len(self._waiting) > 2 * self.table.num_taken + 64:
                # A store that takes nothing would collect evicted segments here for ever.
                self._waiting = {each: None for each in self._waiting if not each.is_dropped}
            self._waiting[segment] = None

    def use(self, names: list[bytes], tip: Segment | None) -> None:
        """Notes that a sequence reads these chunks of the tree, up to the end of a segment. The store counts this as a
        use, because it does not see reads from the arena. Chunks that the store has lost are offered again.
        """
        if any(self.store.wants(names)):
            self.note(tip)

    def tick(self, now: float) -> None:
        """Offers as many bytes as the time since the last call allows."""
        self._allowed = min(self._allowed + max(0.0, now - self._now) * COPY_SPEED, MOST_AHEAD)
        self._now = now
        if self._waiting and self._allowed > 0:
            self._allowed -= self.run(int(self._allowed))

    def run(self, num_bytes: int) -> int:
        """Offers waiting chunks until about `num_bytes` are copied, or the store takes no more. Returns the bytes."""
        done = 0
        while self._waiting and done < num_bytes:
            segment = next(iter(self._waiting))
            if not segment.is_dropped:
                for each in segment.branch:
                    if done >= num_bytes:
                        return done
                    if each.lifetime is not None:
                        continue
                    rows, num_attached = each.rows, len(each.attached)
                    copied, is_all = self.offer(each.identity, rows, num_attached, num_bytes - done)
                    done += copied
                    if not is_all:
                        return done
            del self._waiting[segment]
        return done

    def offer_evicted(self, dropped_chunks: DroppedChunks) -> None:
        """Offers chunks that are being evicted."""
        if dropped_chunks.lifetime is not None:
            return
        identity = dropped_chunks.identity
        _, is_all = self.offer(identity, dropped_chunks.rows, dropped_chunks.num_attached, sys.maxsize)
        if not is_all:
            self.num_lost += sum(self.store.find(name) is None for name in identity.names)

    def offer(self, identity: RunIdentity, rows: Int32s, num_attached: int, num_bytes: int) -> tuple[int, bool]:
        """Puts those chunks into the store that it lacks, as runs. Stops after `num_bytes`. Returns the bytes, and
        whether the store now has all chunks.

        rows  rows of the chunks, then those of the attachment of their end
        """
        store, names, done = self.store, identity.names, 0
        wanted = store.wants(names)
        if num_attached and not wanted[-1]:
            run = store.find(names[-1])
            wanted[-1] = run is not None and not run.ends_with_sums(names[-1])
        first = 0
        while first < len(names):
            if not wanted[first]:
                if store.find(names[first]) is None:
                    return done, False
                first += 1
                continue
            end = first + 1
            while end < len(names) and end - first < self._most and wanted[end]:
                end += 1
            attached = num_attached if end == len(names) else 0
            run_rows = rows[first : end + attached]
            assert isinstance(self.table, ChunkTable), "a table without pages"
            put_rows(store, self.table, identity.part(first, end), run_rows, attached=attached)
            done += self.table.bytes_of(run_rows)
            if store.find(names[first]) is None or (done >= num_bytes and end < len(names)):
                return done, False
            first = end
        return done, True
