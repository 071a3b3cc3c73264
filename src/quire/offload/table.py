"""A chunk table whose cache is larger than its memory: the chunks that a step does not compute with lie in a file.

Memory is a few frames, which hold whole chunks, and buffers, which hold one layer of the chunks of a micro-batch. Of a
chunk that has no frame, the table names the place of every layer in a buffer; the layer's bytes are loaded there before
it is computed. So kernels and plans read the same table as ever.

    frames     open chunks, and as many others as `near` says
    own        two buffers, used in turn: the chunks that one micro-batch alone reads or fills
    shared     two buffers, used in turn by layers: chunks that several micro-batches read, each once a step. If not all
               of them fit, each micro-batch loads the others on its own
    sidecars   of first chunks; they stay in memory

In the file, the layers of a chunk lie apart: layer l of all chunks, then layer l + 1. Chunks with neighbouring slots
are read with one request.

If the memory is a device's, the host's memory takes the place of the file. There, pages may be read where they are:
rows that decode attend to far chunks on the host (`offload.attended`), and only the rows of prompts load them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from quire.attention.rows import RowSlice
from quire.cache.arena import Arena
from quire.cache.arrays import Bools, Int32s, Int64s
from quire.cache.codecs import Codec, PageFormat
from quire.cache.codecs.dense import DenseCodec
from quire.cache.counts import ChunkCounts
from quire.cache.ledger import PAGE_TOKENS, UNIT, Demand, PageCounts
from quire.cache.sinks import Sinks
from quire.cache.table import ALL_SLOTS
from quire.errors import CacheFullError
from quire.offload.host import HostMemory
from quire.offload.memory_plan import FrameLayout, MemoryPlan
from quire.offload.mover import IoRequest, IoTicket, Mover
from quire.offload.units import ALL, Share
from quire.stores.direct import padded

NOWHERE = -1


class FramePool:
    """Equal frames in a stretch of an arena."""

    def __init__(self, start: int, num_bytes: int, count: int) -> None:
        self.start, self.num_bytes, self.count = start, num_bytes, count
        self._free = list(range(count - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Frames that nobody has."""
        return len(self._free)

    def take(self) -> int:
        """The offset of a free frame in the arena."""
        return self.start + self._free.pop() * self.num_bytes

    def free(self, offset: int) -> None:
        """Takes a frame back."""
        self._free.append((offset - self.start) // self.num_bytes)


class SlotRange(NamedTuple):
    """Chunks that are moved together: places [first, first + length) of a buffer, slots [slot, slot + length)."""

    first: int
    slot: int
    length: int


@dataclass(frozen=True)
class FarChunks:
    """The far chunks of one micro-batch, or of all that share some.

    rows      int32 [n], in the order of their places in a buffer: those that are read, then those that are filled
    loads     runs that are read
    stores    runs that the step fills, and that are written
    repeated  places of chunks that other micro-batches load too, into other places
    """

    rows: Int32s
    loads: list[SlotRange]
    stores: list[SlotRange]
    repeated: Int64s


class HostPages:
    """The chunks of an `OffloadedTable` in the host's memory, as the CPU's kernels read a table: see `ChunkTable`. Only
    what is in a slot has bytes there.
    """

    def __init__(self, table: OffloadedTable, memory: HostMemory) -> None:
        self.memory = memory
        self.arena = SimpleNamespace(data=memory.memory)
        self.pages = np.zeros_like(table.pages)
        self.sidecars = np.full_like(table.sidecars, -1)
        self.kinds, self.masks, self.positions, self.bases = table.kinds, table.masks, table.positions, table.bases
        self.sums, self.sinks, self.encodes = None, table.sinks, table.encodes
        self.open_codec, self.sealed_codec = table.open_codec, table.sealed_codec


class OffloadedTable(ChunkCounts):
    """See the module. Chunks are not retained, transferred or shared by page.

    Invariant between steps: a taken row has a frame, or all its bytes are in its slot, or it has no bytes yet.

    near        share of the sealed chunks that stay in memory, as far as there are frames
    num_layers_loaded, num_layers_stored  layers of chunks that were moved
    arena, pages, positions, bases, masks  as of `ChunkTable`, for kernels
    """

    def __init__(
        self,
        ledger: PageCounts,
        num_layers: int,
        num_heads: int,
        open_codec: DenseCodec,
        *sealed_codecs: Codec,
        sinks: Sinks | None = None,
        memory_plan: MemoryPlan,
        backing: Mover | torch.device,
        near: Share = ALL,
        attends: bool = False,
    ) -> None:
        """backing: moves chunks to a file. Or a device: the arena is there, and chunks move to the host's memory.

        attends  whether rows that decode attend to far chunks where they are, on the host
        """
        super().__init__(ledger, num_layers, num_heads, open_codec, *sealed_codecs, sinks=sinks)
        self.memory_plan, self.near, self.attends = memory_plan, near, attends
        self.sealed = FrameLayout(self.page_sizes(self.sealed_codec))
        self._open = FrameLayout(self.page_sizes(open_codec)) if self.encodes else self.sealed
        sizes = memory_plan.own_bytes, memory_plan.own_bytes, memory_plan.shared_bytes, memory_plan.shared_bytes
        own, other, shared, last = np.cumsum([0, *sizes])[:4].tolist()
        self._own, self._shared = (own, other), (shared, last)
        at = sum(sizes)
        count = memory_plan.num_open if self.encodes else memory_plan.num_open + memory_plan.num_near
        self._open_frames = FramePool(at, self._open.num_bytes, count)
        at += count * self._open.num_bytes
        self._near_frames = self._open_frames
        if self.encodes:
            self._near_frames = FramePool(at, self.sealed.num_bytes, memory_plan.num_near)
            at += memory_plan.num_near * self.sealed.num_bytes
        self._sidecars = FramePool(at, max(UNIT, self.sidecar_bytes), self.capacity if sinks is not None else 0)
        at += self._sidecars.count * self._sidecars.num_bytes
        # Memory that is never touched is not taken.
        device = backing if isinstance(backing, torch.device) else torch.device("cpu")
        self.arena = Arena(padded(max(at, UNIT)), device)
        self.pages = np.zeros((self.capacity, *self.shape), np.int32)
        self.positions = np.full(self.pages.shape, -1, np.int32)
        self.bases = np.full(self.capacity, -1, np.int32)
        self.masks = np.full((self.capacity if attends else 0, *self.shape), ALL_SLOTS)
        self._frames = np.full(self.capacity, NOWHERE, np.int64)
        self._slots = np.full(self.capacity, NOWHERE, np.int64)
        self._is_slot_free = np.ones(self.capacity, bool)
        self._is_stored = np.zeros(self.capacity, bool)
        self._is_sealed = np.zeros(self.capacity, bool)  # all its tokens are computed
        self._used = np.zeros(self.capacity, np.int64)  # the step that used it last
        self._step = 0
        self._filled: list[int] = []  # chunks in frames that the last step filled
        self._file_starts = self.sealed.starts * self.capacity
        self.num_layers_loaded = self.num_layers_stored = 0
        self.takes = np.zeros(self.capacity, np.int64)
        self.num_moved_pages = 0
        self.host: HostPages | None = None
        self.mover: Mover | HostMemory
        if isinstance(backing, torch.device):
            self._host_sidecars = self.capacity * self.sealed.num_bytes
            self.mover = HostMemory(self._host_sidecars + self.capacity * self.sidecar_bytes, backing)
            self.host = HostPages(self, self.mover)
        else:
            assert not attends, "a file cannot be attended to"
            self.mover = backing
        self._near_so_far = self._sealed_so_far = 0  # chunks, of all steps

    # ---- rows ------------------------------------------------------------------------------------------------------

    def _take(self, count: int, codec: PageFormat, sidecar: bool, demand: Demand) -> Int32s:
        chunks = super()._take(count, codec, sidecar, demand)
        if sidecar:
            row = int(chunks[0])
            self.sidecars[row] = self._sidecars.take() // UNIT
            if self.host is not None:
                self.host.sidecars[row] = (self._host_sidecars + row * self.sidecar_bytes) // UNIT
        self.takes[chunks] += 1
        return chunks

    def free(self, chunks: Int32s) -> None:
        """Gives chunks back, with their frames and slots."""
        for row in chunks[self.sidecars[chunks] >= 0].tolist() if self.sinks is not None else ():
            self._sidecars.free(int(self.sidecars[row]) * UNIT)
        for row in chunks[self._frames[chunks] >= 0].tolist():
            self._give_frame(row)
        slots = self._slots[chunks]
        self._is_slot_free[slots[slots >= 0]] = True
        self._filled = [row for row in self._filled if not (chunks == row).any()]
        self._slots[chunks] = NOWHERE
        self.bases[chunks] = -1
        if self.host is not None:
            self.host.sidecars[chunks] = -1
        self._is_stored[chunks] = self._is_sealed[chunks] = False
        super().free(chunks)

    def copy(self, source: int, target: int) -> None:
        """Copies the bytes of a whole chunk to another one of the same codec."""
        self.mover.settle()
        assert self._frames[target] < 0 and not self._is_stored[target], "the target has bytes"
        self._step += 1
        self._use([source, target])
        self._take_frame(target)
        at = int(self._frames[target])
        if self._frames[source] >= 0:
            start, data = int(self._frames[source]), self.arena.data
            data[at : at + self.sealed.num_bytes] = data[start : start + self.sealed.num_bytes]
        else:
            self._wait_for(self.mover.read(self._frame_parts(at, int(self._slots[source]))))

    # ---- steps -----------------------------------------------------------------------------------------------------

    @property
    def max_batch_chunks(self) -> int:
        """Most far chunks of a micro-batch."""
        return self.memory_plan.own_bytes // self.sealed.largest

    def place(self, batches: Sequence[Sequence[RowSlice]]) -> tuple[list[FarChunks], FarChunks]:
        """Prepares a step of some micro-batches, given by their slices: gives frames to chunks that must have one, and
        decides which others are loaded and stored. Returns the far chunks of each micro-batch, and those of several.
        """
        self.mover.settle()
        self._step += 1
        reads: list[Int32s] = []
        fills: list[Int32s] = []
        whole: list[int] = []  # chunks that must have a frame: open ones, before or after this step
        full: list[int] = []  # of them, those that are full after this step
        self._is_sealed[[row for row in self._filled if self._frames[row] >= 0]] = True
        for slices in batches:
            read, filled = [], []
            for piece in slices:
                end, begun = piece.start + piece.num_rows, piece.start // PAGE_TOKENS
                chunks = piece.chunks[: -(-end // PAGE_TOKENS)]
                if piece.filled >= 0:
                    whole.append(piece.filled)
                elif piece.start % PAGE_TOKENS:
                    whole.append(int(chunks[begun]))
                    begun += 1
                    if end >= begun * PAGE_TOKENS:
                        full.append(whole[-1])
                if end % PAGE_TOKENS:
                    whole.append(int(chunks[-1]))
                if self.attends:
                    self.bases[chunks] = np.arange(len(chunks)) * PAGE_TOKENS
                if not self.attends or piece.num_rows > 1:
                    read.append(chunks[:begun])
                filled.append(chunks[begun:])
            reads.append(_distinct(read))
            fills.append(_distinct(filled))
        paths = [piece.chunks for slices in batches for piece in slices] if self.attends else []
        used = _distinct([*reads, *fills, *paths, np.array(whole, np.int32)])
        self._use(used)
        self._is_sealed[whole] = False
        self._retire()
        for row in dict.fromkeys(whole):
            if self._frames[row] < 0:
                self._bring(row)
        for row in (row for rows in fills for row in rows.tolist()):
            if self._frames[row] < 0 and not self._is_sealed[row]:
                self._begin(row)
                self._is_sealed[row] = True
        self._is_sealed[used] = True
        self._is_sealed[whole] = False
        self._filled = full
        self._near_so_far += self._num_near
        self._sealed_so_far += self._num_sealed
        return self._placed(reads, fills)

    @property
    def has_gaps(self) -> bool:
        """See ChunkTable: a row that decodes attends to near and far chunks apart."""
        return self.attends

    def is_far(self, chunks: Int32s) -> Bools:
        """Of sealed chunks: whether they have no frame."""
        found: Bools = self._frames[chunks] < 0
        return found

    def load(self, layer: int, batch: int, num_batches: int, placed: FarChunks, *after: IoTicket) -> IoTicket:
        """Starts to load a layer of the far chunks of a micro-batch."""
        start = self._own[(layer * num_batches + batch) % 2]
        return self.mover.read(self._parts(layer, start, placed.loads), *after)

    def store(self, layer: int, batch: int, num_batches: int, placed: FarChunks) -> IoTicket:
        """Starts to store the chunks that a micro-batch has filled in a layer."""
        start = self._own[(layer * num_batches + batch) % 2]
        parts = [*self._parts(layer, start, placed.stores)]
        if self.host is not None and self.sinks is not None:
            filled = [row for run in placed.stores for row in placed.rows[run.first : run.first + run.length].tolist()]
            parts += self._sidecar_parts(filled, layer * self.sinks.layer_bytes, self.sinks.layer_bytes)
        return self.mover.write(parts)

    def load_shared(self, layer: int, placed: FarChunks, *after: IoTicket) -> IoTicket:
        """Starts to load a layer of the chunks that several micro-batches read."""
        return self.mover.read(self._parts(layer, self._shared[layer % 2], placed.loads), *after)

    def begin_batch(self, layer: int, batch: int, num_batches: int, placed: FarChunks) -> Int32s:
        """Names the places of chunks that others load too; returns these chunks. To be called before a micro-batch is
        computed in a layer.
        """
        renamed = placed.rows[placed.repeated]
        if len(renamed):
            starts = self._own[(layer * num_batches + batch) % 2] + placed.repeated * self.sealed.layer_bytes[layer]
            self.pages[renamed, layer] = (starts[:, None] + self.sealed.heads[layer]) // UNIT
            self.takes[renamed] += 1
        return renamed

    def loaded_path(self, slice_index: int) -> AbstractContextManager[None]:
        """Not called: nothing is retained."""
        raise AssertionError("chunks of this table are not retained")

    @property
    def near_share(self) -> float:
        """The share of the sealed chunks that had a frame, over all steps."""
        return self._near_so_far / self._sealed_so_far if self._sealed_so_far else 1.0

    def stats(self) -> dict[str, float]:
        """See `LLM.stats`."""
        found = {
            "cache_near": self.near_share,
            "cache_bytes_read": self.mover.bytes_read,
            "cache_bytes_written": self.mover.bytes_written,
        }
        return found | ({} if self.host is None else {"cache_bytes_crossed": self.host.memory.bytes_crossed})

    def check(self) -> None:
        """See ChunkCounts.check. Also proves that frames, slots and sidecars have one owner each."""
        super().check()
        taken = self._is_taken()
        assert (self._frames[~taken] < 0).all() and (self._slots[~taken] < 0).all(), "a free chunk has memory"
        frames, slots = self._frames[self._frames >= 0], self._slots[self._slots >= 0]
        assert len(np.unique(frames)) == len(frames) and len(np.unique(slots)) == len(slots), "two owners"
        pools = {self._open_frames, self._near_frames}
        assert len(frames) == sum(pool.count - pool.num_free for pool in pools), "a frame is lost"
        assert len(slots) == len(self._is_slot_free) - int(self._is_slot_free.sum()), "a slot is lost"
        lost = self._is_sealed & (self._frames < 0) & ~self._is_stored
        assert not lost.any(), f"{int(lost.sum())} chunks have lost their bytes"

    # ---- frames ----------------------------------------------------------------------------------------------------

    def _use(self, rows: Iterable[int] | Int32s) -> None:
        self._used[np.asarray(rows, np.int64)] = self._step

    def _pool(self, row: int) -> FramePool:
        return self._near_frames if self.kinds[row] == self.sealed_codec.kernel_id else self._open_frames

    def _take_frame(self, row: int) -> None:
        """Gives a row a frame. Sealed chunks make room, those that were not used for longest first."""
        pool = self._pool(row)
        if not pool.num_free:
            others = (self._frames >= 0) & (self._is_sealed | (self._used < self._step))
            others &= self.kinds == self.sealed_codec.kernel_id
            if pool is not self._near_frames or not others.any():
                raise CacheFullError("the offloaded cache has no frame left for an open chunk; raise cache.memory")
            self._spill([int(np.flatnonzero(others)[np.argmin(self._used[others])])])
        at = pool.take()
        self._frames[row] = at
        extents = self.sealed if pool is self._near_frames else self._open
        self.pages[row] = (at + extents.starts[:, None] + extents.heads) // UNIT
        self.takes[row] += 1

    def _give_frame(self, row: int) -> None:
        self._pool(row).free(int(self._frames[row]))
        self._frames[row] = NOWHERE

    def _bring(self, row: int) -> None:
        """Gives a frame to a chunk that must have one, with its bytes if it has any."""
        self._take_frame(row)
        if self._is_stored[row]:
            self._wait_for(self.mover.read(self._frame_parts(int(self._frames[row]), int(self._slots[row]))))
            self._is_stored[row] = False  # its tokens will change

    def _begin(self, row: int) -> None:
        """Gives a new sealed chunk a frame if the share of near chunks allows it, else a slot."""
        pool = self._near_frames
        spare = pool.num_free - (0 if self.encodes else self._reserved)
        if spare > 0 and self._num_near + 1 <= self.near * (self._num_sealed + 1):
            self._take_frame(row)
        elif self._slots[row] < 0:
            self._give_slots([row])

    @property
    def _reserved(self) -> int:
        """Frames that open chunks may still ask for."""
        return max(0, self.memory_plan.num_open - int(((self._frames >= 0) & ~self._is_sealed).sum()))

    @property
    def _num_sealed(self) -> int:
        return int(self._is_sealed.sum())

    @property
    def _num_near(self) -> int:
        return int((self._is_sealed & (self._frames >= 0)).sum())

    def _retire(self) -> None:
        """Stores the chunks that were open in frames and are sealed now, as far as the share of near chunks asks."""
        if self.encodes:
            return  # sealed chunks have other rows than open ones
        excess = self._num_near - min(int(self.near * self._num_sealed), self.memory_plan.num_near)
        if excess > 0:
            held = np.flatnonzero(self._is_sealed & (self._frames >= 0))
            held = held[np.argsort(self._used[held], kind="stable")]
            self._spill(held[:excess].tolist())

    def _spill(self, rows: list[int]) -> None:
        """Stores chunks and gives their frames back."""
        self._give_slots([row for row in rows if self._slots[row] < 0])
        parts = [part for row in rows for part in self._frame_parts(int(self._frames[row]), int(self._slots[row]))]
        self.num_layers_stored += len(parts)
        if self.host is not None and self.sinks is not None:
            parts += self._sidecar_parts(rows, 0, self.sidecar_bytes)
        self.mover.write(parts).wait()
        self._is_stored[rows] = True
        for row in rows:
            self._give_frame(row)

    def _wait_for(self, ticket: IoTicket) -> None:
        self.num_layers_loaded += self.shape[0]
        ticket.wait()

    # ---- the file --------------------------------------------------------------------------------------------------

    def _give_slots(self, rows: list[int]) -> None:
        slots = self._slots[rows] = self._free_slots(len(rows))
        if self.host is not None:
            starts = self._file_starts + slots[:, None] * self.sealed.layer_bytes
            self.host.pages[rows] = (starts[:, :, None] + self.sealed.heads) // UNIT

    def _free_slots(self, count: int) -> Int64s:
        """Takes slots, next to each other if there are such."""
        free = np.flatnonzero(self._is_slot_free)
        assert len(free) >= count, "there are more chunks than slots"
        found = free[:count]
        if count > 1:
            together = np.flatnonzero(free[count - 1 :] - free[: len(free) - count + 1] == count - 1)
            if len(together):
                found = free[together[0] : together[0] + count]
        self._is_slot_free[found] = False
        return found

    def _frame_parts(self, frame: int, slot: int) -> Iterator[IoRequest]:
        for layer, size in enumerate(self.sealed.layer_bytes.tolist()):
            at = frame + int(self.sealed.starts[layer])
            yield IoRequest(int(self._file_starts[layer]) + slot * size, self.arena.data[at : at + size])

    def _parts(self, layer: int, start: int, runs: list[SlotRange]) -> Iterator[IoRequest]:
        size, base = int(self.sealed.layer_bytes[layer]), int(self._file_starts[layer])
        for first, slot, count in runs:
            at = start + first * size
            yield IoRequest(base + slot * size, self.arena.data[at : at + count * size])

    def _sidecar_parts(self, rows: Iterable[int], start: int, num_bytes: int) -> list[IoRequest]:
        """A range of the sidecars of those of some rows that have one."""
        found = []
        for row in rows:
            if self.sidecars[row] >= 0:
                at = int(self.sidecars[row]) * UNIT + start
                there = self._host_sidecars + row * self.sidecar_bytes + start
                found.append(IoRequest(there, self.arena.data[at : at + num_bytes]))
        return found

    # ---- far chunks ------------------------------------------------------------------------------------------------

    def _placed(self, reads: list[Int32s], fills: list[Int32s]) -> tuple[list[FarChunks], FarChunks]:
        """Names the places of far chunks in the buffers."""
        far = [rows[self._frames[rows] < 0] for rows in reads]
        every = np.concatenate(far)
        rows, times = np.unique(every, return_counts=True)
        several = rows[times > 1]
        often = np.argsort(-times[times > 1], kind="stable")
        common = self._by_slot(several[often[: self.memory_plan.shared_bytes // self.sealed.largest]])
        layers = np.arange(self.shape[0])
        shared = FarChunks(common, _runs(self._slots[common]), [], np.empty(0, np.int64))
        self._name(common, np.array(self._shared)[layers % 2])
        found = []
        for batch, (read, fill) in enumerate(zip(far, fills, strict=True)):
            own = self._by_slot(np.setdiff1d(read, common))
            new = self._by_slot(fill[self._frames[fill] < 0])
            assert len(own) + len(new) <= self.max_batch_chunks, (
                f"{len(own)} and {len(new)} chunks, room {self.max_batch_chunks}"
            )
            both = np.concatenate((own, new))
            stores = [SlotRange(first + len(own), slot, count) for first, slot, count in _runs(self._slots[new])]
            found.append(FarChunks(both, _runs(self._slots[own]), stores, np.flatnonzero(np.isin(own, several))))
            self._name(both, np.array(self._own)[(layers * len(far) + batch) % 2])
            self._is_stored[new] = True  # by the end of the step
        self.num_layers_loaded += self.shape[0] * (len(common) + sum(len(each.rows) for each in found))
        new_rows = sum(run.length for each in found for run in each.stores)
        self.num_layers_loaded -= self.shape[0] * new_rows
        self.num_layers_stored += self.shape[0] * new_rows
        return found, shared

    def _by_slot(self, rows: Int32s) -> Int32s:
        assert (self._slots[rows] >= 0).all(), "a chunk is neither in memory nor in the file"
        return rows[np.argsort(self._slots[rows])]

    def _name(self, rows: Int32s, starts: Int64s) -> None:
        """Puts the pages of rows at the beginning of the buffers that start at `starts`, [L]."""
        places = np.arange(len(rows))[:, None] * self.sealed.layer_bytes + starts
        self.pages[rows] = (places[:, :, None] + self.sealed.heads) // UNIT
        self.takes[rows] += 1


def _distinct(parts: Sequence[NDArray[np.int32]]) -> Int32s:
    return np.unique(np.concatenate([np.empty(0, np.int32), *parts]))


def _runs(slots: Int64s) -> list[SlotRange]:
    """Rising slots as runs."""
    if not len(slots):
        return []
    begins: Bools = np.append(True, slots[1:] != slots[:-1] + 1)
    first = np.flatnonzero(begins)
    counts = np.diff(np.append(first, len(slots)))
    return [SlotRange(*each) for each in zip(first.tolist(), slots[first].tolist(), counts.tolist(), strict=True)]
