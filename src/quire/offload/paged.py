"""An arena whose pages have their bytes in a file, for a cache whose heads have different lengths under retention.

Pages keep their addresses. The arena is address space for the whole cache. Only the pages that a micro-batch uses in a
layer need memory. So the table, retention and the kernels work as on an arena in memory, page by page:

    for each layer and micro-batch:  load the blocks of its pages that are not in memory | compute | release them

Steps visit the same blocks in the same order. So once the memory is full, the most recently used block is needed last,
and is evicted first; earlier blocks stay. The open chunks of a step stay.

Without retention whole chunks move, which are contiguous in the file: see `offload.table`.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from quire.cache.arena import Arena
from quire.cache.arrays import Bools, Bytes, Int32s, Int64s
from quire.cache.counts import POSITIONS_BYTES
from quire.cache.ledger import PAGE_TOKENS, UNIT
from quire.errors import ConfigError, QuireError
from quire.offload.mover import NOTHING, IoRequest, IoTicket, Mover
from quire.stores.direct import BLOCK_BYTES, padded

if TYPE_CHECKING:
    from quire.attention.rows import RowSlice
    from quire.cache.table import ChunkTable

SPARE = 8
"""A step begins with 1/8 of the memory free, so that its first loads need not wait."""

Blocks = Int64s
"""Numbers of blocks of 4 KiB of an arena, increasing."""


class PagedArena(Arena):
    """See Arena. Blocks have memory while they are used, and afterwards as long as the memory is not full.

    budget  bytes of blocks in memory above which unused blocks are evicted
    """

    copy_bytes = 1 << 20

    def __init__(self, num_bytes: int, budget: int, mover: Mover) -> None:
        """Raises ConfigError if the system does not grant the address space."""
        self.num_bytes, self.device = num_bytes, torch.device("cpu")
        self.mover = mover
        self._map = _address_space(padded(num_bytes))
        self.data = torch.frombuffer(self._map, dtype=torch.uint8)
        count = len(self.data) // BLOCK_BYTES
        self._most = budget // BLOCK_BYTES
        self._is_resident = np.zeros(count, bool)
        self._is_stored = np.zeros(count, bool)
        self._is_changed = np.zeros(count, bool)  # since it was stored
        self._is_storing = np.zeros(count, bool)
        self._users = np.zeros(count, np.int16)
        self._used = np.zeros(count, np.int32)  # the step that used it last
        self._step = 0
        self._loading: list[tuple[IoTicket, Blocks]] = []
        self._storing: list[tuple[IoTicket, Blocks]] = []
        self.num_requested = self.num_missed = 0
        """Blocks that steps requested, and how many of them had to be read."""
        self._lost: QuireError | None = None
        self.num_resident = 0
        """Blocks that have memory."""

    # ---- by blocks -------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begins a step; the last one may have failed. Frees memory of blocks that the last step did not use.

        Raises QuireError if pages could not be read between two steps, because changes of them are lost.
        """
        if self._lost is not None:
            raise QuireError(f"the offloaded cache has lost pages: {self._lost}") from self._lost
        self.mover.settle()
        self._wait_for_loads()
        self._finish()
        self._users[:] = 0
        self._step += 1
        excess = self.num_resident - (self._most - self._most // SPARE)
        if excess > 0:
            idle = np.flatnonzero(self._is_resident & (self._used < self._step - 1))
            oldest = np.argsort(self._used[idle], kind="stable")[:excess]
            self._store_blocks(np.sort(idle[oldest]))

    def discard_blocks(self, starts: Int64s, sizes: Int64s) -> None:
        """Discards the stored bytes of some pages, given by their starts: whole blocks of them are not read again."""
        is_whole = (starts % BLOCK_BYTES == 0) & (sizes % BLOCK_BYTES == 0)
        self._is_stored[blocks_of(starts[is_whole], sizes[is_whole])] = False

    def load_blocks(self, blocks: Blocks) -> IoTicket:
        """Starts to read the blocks that are not in memory. All stay there until `release_blocks`."""
        self._finish()
        self._users[blocks] += 1
        self._used[blocks] = self._step
        missing = blocks[~self._is_resident[blocks]]
        self._is_resident[missing] = True
        self.num_resident += len(missing)
        stored = missing[self._is_stored[missing]]
        self.num_requested, self.num_missed = self.num_requested + len(blocks), self.num_missed + len(stored)
        if not len(stored):
            return NOTHING
        ticket = self.mover.read(self._parts(stored))
        self._loading.append((ticket, stored))
        return ticket

    def release_blocks(self, blocks: Blocks, changed: Blocks, keep: Blocks) -> IoTicket:
        """Ends a use of blocks. If the memory is full, starts to store and free those that have no other user.

        changed  the blocks among them whose bytes have changed
        keep     the blocks among them that must stay in memory
        """
        self._users[blocks] -= 1
        self._is_changed[changed] = True
        self._finish()
        excess = self.num_resident - sum(len(each) for _, each in self._storing) - self._most
        if excess <= 0:
            return NOTHING
        can_free = (self._users[blocks] == 0) & ~self._is_storing[blocks]
        can_free[np.searchsorted(blocks, keep)] = False
        return self._store_blocks(blocks[can_free][-excess:])

    def _wait_for_loads(self) -> None:
        """Waits for reads that a failed step has left. Blocks that could not be read are then not in memory."""
        for ticket, blocks in self._loading:
            ticket.done.wait()
            if ticket.error is not None:
                self._drop(blocks[self._is_resident[blocks]])
        self._loading.clear()

    def _store_blocks(self, blocks: Blocks) -> IoTicket:
        changed = blocks[self._is_changed[blocks]]
        ticket = self.mover.write(self._parts(changed))
        self._is_changed[changed], self._is_stored[changed] = False, True
        self._is_storing[blocks] = True
        self._storing.append((ticket, blocks))
        self._finish()
        return ticket

    def _finish(self) -> None:
        """Frees blocks that have been stored, unless they are used again."""
        left = []
        for ticket, blocks in self._storing:
            if not ticket.done.is_set():
                left.append((ticket, blocks))
                continue
            self._is_storing[blocks] = False
            if ticket.error is not None:
                self._is_changed[blocks] = True
            self._drop(blocks[(self._users[blocks] == 0) & ~self._is_changed[blocks] & self._is_resident[blocks]])
        self._storing = left

    def _drop(self, blocks: Blocks) -> None:
        for first, count in _runs(blocks):
            self._map.madvise(mmap.MADV_DONTNEED, first * BLOCK_BYTES, count * BLOCK_BYTES)
        self._is_resident[blocks] = False
        self.num_resident -= len(blocks)

    def _parts(self, blocks: Blocks) -> Iterator[IoRequest]:
        for first, count in _runs(blocks):
            start = first * BLOCK_BYTES
            yield IoRequest(start, self.data[start : start + count * BLOCK_BYTES])

    # ---- by pages, between steps -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def held(self, ids: Int32s, sizes: Int64s | int, *, changes: bool) -> Iterator[None]:
        """See Arena. Raises QuireError if the pages cannot be read. A sequence may then be partly changed, so no
        further step begins.
        """
        blocks = blocks_of(ids.astype(np.int64) * UNIT, sizes)
        self._wait_for_loads()
        try:
            self.load_blocks(blocks).wait()
        except QuireError as error:
            self._lost = error
            raise
        try:
            yield
        finally:
            # Blocks that cannot be stored stay in memory.
            self.release_blocks(blocks, blocks if changes else blocks[:0], blocks[:0]).done.wait()

    def read(self, start: int, num_bytes: int) -> Bytes:
        """Not called: no tier is used with this arena."""
        raise AssertionError("bytes of a paged arena that are not held")

    def write(self, start: int, given: Bytes) -> None:
        """Not called, as `read`."""
        raise AssertionError("bytes of a paged arena that are not held")

    def images(self, ids: Int32s, page_bytes: int) -> Bytes:
        """See Arena."""
        with self.held(ids, page_bytes, changes=False):
            return super().images(ids, page_bytes)

    def store(self, ids: Int32s, page_bytes: int, images: torch.Tensor | Bytes) -> None:
        """See Arena."""
        with self.held(ids, page_bytes, changes=True):
            super().store(ids, page_bytes, images)


def _address_space(num_bytes: int) -> mmap.mmap:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    try:
        memory = mmap.mmap(-1, num_bytes, flags=flags)
    except OSError as error:
        raise ConfigError(f"the system does not give {num_bytes} bytes of address space: {error.strerror}") from None
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without large pages
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memory


def blocks_of(starts: Int64s, sizes: Int64s | int) -> Blocks:
    """The blocks that contain some ranges of bytes, given their starts [n] and sizes."""
    first = starts // BLOCK_BYTES
    counts = (starts + sizes - 1) // BLOCK_BYTES - first + 1
    ends = np.cumsum(counts)
    within = np.arange(int(counts.sum())) - np.repeat(ends - counts, counts)
    return np.unique(np.repeat(first, counts) + within)


def _runs(blocks: Blocks) -> Iterator[tuple[int, int]]:
    """Consecutive blocks: the first one, and their number."""
    if not len(blocks):
        return
    firsts = np.flatnonzero(np.append(True, blocks[1:] != blocks[:-1] + 1))
    yield from zip(blocks[firsts].tolist(), np.diff(np.append(firsts, len(blocks))).tolist(), strict=True)


@dataclass
class WorkingSet:
    """The rows of the table that a micro-batch uses.

    rows     int32 [n], all of them
    changed  rows that it writes to
    fresh    rows without contents so far
    kept     rows that stay in memory: open chunks
    blocks   by layer, the blocks that were loaded
    """

    rows: Int32s
    changed: Int32s
    fresh: Int32s
    kept: Int32s
    blocks: dict[int, Blocks] = field(default_factory=dict)


class Pager:
    """Loads and releases the pages of a step's micro-batches. `OffloadedTable` has the same methods.

    table       a chunk table over a paged arena
    max_batch_chunks  most chunks of a micro-batch
    """

    def __init__(self, table: ChunkTable, arena: PagedArena, max_batch_chunks: int) -> None:
        self.table, self.arena = table, arena
        self.max_batch_chunks = max_batch_chunks
        self._paths: list[Int32s] = []

    def place(self, batches: Sequence[Sequence[RowSlice]]) -> tuple[list[WorkingSet], None]:
        """Begins a step of some micro-batches, given by their slices."""
        self.arena.begin()
        self._paths = [piece.chunks for slices in batches for piece in slices]
        return [self._working(slices) for slices in batches], None

    def _working(self, slices: Sequence[RowSlice]) -> WorkingSet:
        parts: tuple[list[Int32s], ...] = [], [], [], []
        rows, changed, fresh, kept = parts
        for piece in slices:
            end = piece.start + piece.num_rows
            begun = piece.start // PAGE_TOKENS - piece.num_dropped
            chunks = piece.chunks[: -(-end // PAGE_TOKENS) - piece.num_dropped]
            filled = chunks[:0] if piece.filled < 0 else np.array([piece.filled], np.int32)
            sums = chunks[:0] if piece.profiled is None else piece.profiled.sums[: len(chunks)]
            rows += [chunks, filled, sums]
            # Writes to the filled chunk are not needed after the step, and are repeated if the step fails.
            changed += [chunks[begun:], sums]
            has_tokens = piece.start % PAGE_TOKENS > 0 and piece.filled < 0
            fresh.append(chunks[begun + has_tokens :])
            kept.append(chunks[-1:] if end % PAGE_TOKENS else chunks[:0])
        found = [np.unique(np.concatenate(part)) for part in parts]
        return WorkingSet(found[0], found[1], found[2], found[3])

    def load(self, layer: int, batch: int, num_batches: int, placed: WorkingSet, *after: IoTicket) -> IoTicket:
        """Starts to load the pages that a micro-batch uses in a layer."""
        table = self.table
        held = table.masks[placed.fresh, layer] > 0
        sizes = table.sizes[table.kinds[placed.fresh], layer][held].astype(np.int64)
        self.arena.discard_blocks(table.pages[placed.fresh, layer][held].astype(np.int64) * UNIT, sizes)
        found = placed.blocks[layer] = self._blocks(placed.rows, [layer])
        return self.arena.load_blocks(found)

    def load_shared(self, layer: int, placed: None) -> IoTicket:
        """Does nothing: a block that several micro-batches use is in memory once."""
        return NOTHING

    def begin_batch(self, layer: int, batch: int, num_batches: int, placed: WorkingSet) -> Int32s:
        """Does nothing: no chunk changes its place."""
        return placed.rows[:0]

    def store(self, layer: int, batch: int, num_batches: int, placed: WorkingSet) -> IoTicket:
        """Releases the pages that a micro-batch used in a layer, and starts to store those that must leave memory."""
        changed, kept = (self._blocks(rows, [layer]) for rows in (placed.changed, placed.kept))
        return self.arena.release_blocks(placed.blocks.pop(layer), changed, kept)

    @contextlib.contextmanager
    def loaded_path(self, slice_index: int) -> Iterator[None]:
        """A context in which all layers of a slice's path are in memory."""
        blocks = self._blocks(self._paths[slice_index], range(self.table.shape[0]))
        self.arena.load_blocks(blocks).wait()
        try:
            yield
        finally:
            self.arena.release_blocks(blocks, blocks[:0], blocks[:0])

    def stats(self) -> dict[str, float]:
        """See `LLM.stats`."""
        arena, mover = self.arena, self.arena.mover
        return {
            "cache_near": 1 - arena.num_missed / max(1, arena.num_requested),
            "cache_bytes_read": mover.bytes_read,
            "cache_bytes_written": mover.bytes_written,
        }

    def _blocks(self, rows: Int32s, layers: Sequence[int]) -> Blocks:
        """The blocks of some layers of rows: pages, positions and sidecars."""
        table = self.table
        starts, sizes = [], []
        for layer in layers:
            held: Bools = table.masks[rows, layer] > 0
            starts.append(table.pages[rows, layer][held].astype(np.int64) * UNIT)
            sizes.append(table.sizes[table.kinds[rows], layer][held])
            positions = table.positions[rows, layer]
            placed = positions[positions >= 0].astype(np.int64)
            starts.append(placed * UNIT)
            sizes.append(np.full(len(placed), POSITIONS_BYTES))
            if table.sinks is not None:
                beside = table.sidecars[rows]
                beside = beside[beside >= 0].astype(np.int64)
                starts.append(beside * UNIT + layer * table.sinks.layer_bytes)
                sizes.append(np.full(len(beside), table.sinks.layer_bytes))
        return blocks_of(np.concatenate(starts), np.concatenate(sizes).astype(np.int64))
