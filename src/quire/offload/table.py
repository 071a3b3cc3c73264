"""A chunk table whose cache is larger than its memory: chunks that a step does not use are in a file.

Memory consists of a few frames, which hold whole chunks, and buffers, which hold one layer of the chunks of a
micro-batch. For a chunk without a frame, the table has the address of every layer in a buffer, and the layer's bytes
are loaded there before it is computed. So kernels and plans read the table like any other.

    frames     open chunks, and the share `near` of the sealed ones
    own        two buffers, used in turn: the chunks that only one micro-batch reads or fills
    shared     two buffers, used in turn by layers: chunks that several micro-batches read, each once a step. If not all
               of them fit, each micro-batch loads the others on its own
    sidecars   the sidecars of first chunks; they stay in memory

On a GPU, the host's memory replaces the file. The host can read pages in place: decode rows attend to far chunks on the
host (`offload.attended`), and only the rows of prompts load them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import Tensor

from quire.attention.pages import PageTable
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
from quire.offload.chunk_frames import ChunkFrames, FramePool
from quire.offload.chunk_slots import ChunkSlots, SlotRange
from quire.offload.host import HostMemory
from quire.offload.memory_plan import FrameLayout, MemoryPlan
from quire.offload.mover import IoRequest, IoTicket, Mover
from quire.offload.step_chunks import FarChunks, StepChunks, distinct, path_of
from quire.offload.units import ALL, Share
from quire.stores.direct import padded


class LayerBuffers:
    """The offsets of buffers in the arena.

    shared     int64 [L]; the buffer of shared chunks in each layer
    num_bytes  bytes of all buffers
    """

    def __init__(self, plan: MemoryPlan, num_layers: int) -> None:
        self._layers = np.arange(num_layers)
        self._own = (0, plan.own_bytes)
        self.shared: Int64s = 2 * plan.own_bytes + self._layers % 2 * plan.shared_bytes
        self.num_bytes = 2 * (plan.own_bytes + plan.shared_bytes)

    def own(self, layer: int, batch: int, num_batches: int) -> int:
        """The buffer of a micro-batch in a layer."""
        return self._own[(layer * num_batches + batch) % 2]

    def own_of_layers(self, batch: int, num_batches: int) -> Int64s:
        """The buffer of a micro-batch in each layer, int64 [L]."""
        return np.array([self.own(layer, batch, num_batches) for layer in self._layers.tolist()])


class HostArena(Arena):
    """The host's memory as an arena."""

    def __init__(self, memory: Tensor) -> None:
        self.num_bytes, self.device, self.data = len(memory), memory.device, memory


class HostPages(PageTable):
    """The chunks of an `OffloadedTable` in the host's memory. Only chunks with a slot have bytes there."""

    def __init__(self, table: OffloadedTable, memory: HostMemory) -> None:
        self.memory = memory
        self.arena = HostArena(memory.memory)
        assert table.slots.pages is not None
        self.pages = table.slots.pages
        self.sidecars = np.full_like(table.sidecars, -1)
        self.kinds, self.masks, self.positions, self.bases = table.kinds, table.masks, table.positions, table.bases
        self.sums, self.sinks, self.encodes = None, table.sinks, table.encodes
        self.open_codec, self.sealed_codec, self.codecs = table.open_codec, table.sealed_codec, table.codecs
        self.shape, self.capacity, self.takes, self.num_moved_pages = table.shape, table.capacity, table.takes, 0
        self._table = table

    @property
    def has_gaps(self) -> bool:
        """See PageTable: near chunks are read elsewhere."""
        return True

    def page_sizes(self, codec: PageFormat) -> Int32s:
        """See PageTable."""
        return self._table.page_sizes(codec)

    def chunk_bytes(self, codec: PageFormat) -> int:
        """See PageTable."""
        return self._table.chunk_bytes(codec)


class OffloadedTable(ChunkCounts, PageTable):
    """See the module. Chunks are not retained, transferred or shared by page.

    Invariant between steps: a taken row has a frame, or all its bytes are in its slot, or it has no bytes yet.

    near        share of the sealed chunks that stay in memory, if there are enough frames
    frames, slots  the chunks with all layers in memory, and the chunks in the file
    num_layers_loaded, num_layers_stored  layers of chunks that were moved
    arena, pages, positions, bases, masks  as in `ChunkTable`, for kernels
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
        """backing: a mover of chunks to a file; or a device that has the arena, whose chunks move to the host's memory.

        attends  whether decode rows attend to far chunks in place, on the host
        """
        super().__init__(ledger, num_layers, num_heads, open_codec, *sealed_codecs, sinks=sinks)
        self.memory_plan, self.near, self.attends = memory_plan, near, attends
        self.sealed = FrameLayout(self.page_sizes(self.sealed_codec))
        open_layout = FrameLayout(self.page_sizes(open_codec)) if self.encodes else self.sealed
        self.buffers = LayerBuffers(memory_plan, num_layers)
        self.frames = ChunkFrames(
            self.buffers.num_bytes, (open_layout, self.sealed), (memory_plan.num_open, memory_plan.num_near),
            self.kinds, self.sealed_codec.kernel_id,
        )  # fmt: skip
        self.slots = ChunkSlots(self.capacity, self.sealed, has_pages=isinstance(backing, torch.device))
        num_sidecars = self.capacity if sinks is not None else 0
        self._sidecars = FramePool(self.frames.near.end, max(UNIT, self.sidecar_bytes), num_sidecars)
        # The system does not back memory that is never touched.
        device = backing if isinstance(backing, torch.device) else torch.device("cpu")
        self.arena = Arena(padded(max(self._sidecars.end, UNIT)), device)
        self.pages = np.zeros((self.capacity, *self.shape), np.int32)
        self.positions = np.full(self.pages.shape, -1, np.int32)
        self.bases = np.full(self.capacity, -1, np.int32)
        self.masks = np.full((self.capacity if attends else 0, *self.shape), ALL_SLOTS)
        self._step = 0
        self._filled: list[int] = []  # chunks in frames that the last step filled
        self.num_layers_loaded = self.num_layers_stored = 0
        self.takes = np.zeros(self.capacity, np.int64)
        self.num_moved_pages = 0
        self.host: HostPages | None = None
        self.mover: Mover | HostMemory
        if isinstance(backing, torch.device):
            self.mover = HostMemory(self.slots.num_bytes + self.capacity * self.sidecar_bytes, backing)
            self.host = HostPages(self, self.mover)
        else:
            assert not attends, "a file cannot be attended to"
            self.mover = backing

    # ---- rows ------------------------------------------------------------------------------------------------------

    def _take(self, count: int, codec: PageFormat, sidecar: bool, demand: Demand) -> Int32s:
        chunks = super()._take(count, codec, sidecar, demand)
        if sidecar:
            row = int(chunks[0])
            self.sidecars[row] = self._sidecars.take() // UNIT
            if self.host is not None:
                self.host.sidecars[row] = (self.slots.num_bytes + row * self.sidecar_bytes) // UNIT
        self.takes[chunks] += 1
        return chunks

    def free(self, chunks: Int32s) -> None:
        """Gives chunks back, with their frames and slots."""
        for row in chunks[self.sidecars[chunks] >= 0].tolist() if self.sinks is not None else ():
            self._sidecars.free(int(self.sidecars[row]) * UNIT)
        for row in chunks[self.frames.starts[chunks] >= 0].tolist():
            self.frames.free(row)
        self.frames.is_sealed[chunks] = False
        self.slots.free(chunks)
        self._filled = [row for row in self._filled if not (chunks == row).any()]
        self.bases[chunks] = -1
        if self.host is not None:
            self.host.sidecars[chunks] = -1
        super().free(chunks)

    def copy(self, source: int, target: int) -> None:
        """Copies the bytes of a whole chunk to another one of the same codec."""
        frames = self.frames
        self.mover.settle()
        assert frames.starts[target] < 0 and not self.slots.is_stored[target], "the target has bytes"
        self._step += 1
        frames.used[[source, target]] = self._step
        self._take_frame(target)
        if frames.starts[source] >= 0:
            self._frame(target)[:] = self._frame(source)
        else:
            self._load_frame(source, target)

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
        frames, is_sealed = self.frames, self.frames.is_sealed
        is_sealed[[row for row in self._filled if frames.starts[row] >= 0]] = True
        step = StepChunks.of(batches, self.attends)
        paths: list[Int32s] = []
        for piece in (piece for slices in batches for piece in slices) if self.attends else ():
            chunks = path_of(piece)
            self.bases[chunks] = np.arange(len(chunks)) * PAGE_TOKENS
            paths.append(piece.chunks)
        used = distinct([*step.reads, *step.fills, *paths, np.array(step.whole, np.int32)])
        frames.used[used] = self._step
        is_sealed[step.whole] = False
        self._retire()
        for row in dict.fromkeys(step.whole):
            if frames.starts[row] < 0:
                self._bring(row)
        for row in (row for rows in step.fills for row in rows.tolist()):
            if frames.starts[row] < 0 and not is_sealed[row]:
                self._begin(row)
                is_sealed[row] = True
        is_sealed[used] = True
        is_sealed[step.whole] = False
        self._filled = step.full
        frames.count_step()
        return self._place_far(step)

    @property
    def has_gaps(self) -> bool:
        """See PageTable: a decode row attends to near and far chunks separately."""
        return self.attends

    def is_far(self, chunks: Int32s) -> Bools:
        """Whether each of some sealed chunks has no frame."""
        found: Bools = self.frames.starts[chunks] < 0
        return found

    def load(self, layer: int, batch: int, num_batches: int, placed: FarChunks, *after: IoTicket) -> IoTicket:
        """Starts to load a layer of the far chunks of a micro-batch."""
        buffer = self.arena.data[self.buffers.own(layer, batch, num_batches) :]
        return self.mover.read(self.slots.layer_parts(layer, buffer, placed.loads), *after)

    def store(self, layer: int, batch: int, num_batches: int, placed: FarChunks) -> IoTicket:
        """Starts to store the chunks that a micro-batch has filled in a layer."""
        buffer = self.arena.data[self.buffers.own(layer, batch, num_batches) :]
        parts = [*self.slots.layer_parts(layer, buffer, placed.stores)]
        if self.host is not None and self.sinks is not None:
            filled = [row for run in placed.stores for row in placed.rows[run.first : run.first + run.length].tolist()]
            parts += self._sidecar_parts(filled, layer * self.sinks.layer_bytes, self.sinks.layer_bytes)
        return self.mover.write(parts)

    def load_shared(self, layer: int, placed: FarChunks, *after: IoTicket) -> IoTicket:
        """Starts to load a layer of the chunks that several micro-batches read."""
        buffer = self.arena.data[self.buffers.shared[layer] :]
        return self.mover.read(self.slots.layer_parts(layer, buffer, placed.loads), *after)

    def begin_batch(self, layer: int, batch: int, num_batches: int, placed: FarChunks) -> Int32s:
        """Sets the page ids of chunks that other micro-batches load too. Returns these chunks. Call it before a
        micro-batch is computed in a layer.
        """
        renamed = placed.rows[placed.repeated]
        if len(renamed):
            starts = self.buffers.own(layer, batch, num_batches) + placed.repeated * self.sealed.layer_bytes[layer]
            self.pages[renamed, layer] = (starts[:, None] + self.sealed.heads[layer]) // UNIT
            self.takes[renamed] += 1
        return renamed

    def loaded_path(self, slice_index: int) -> AbstractContextManager[None]:
        """Not called: nothing is retained."""
        raise AssertionError("chunks of this table are not retained")

    def stats(self) -> dict[str, float]:
        """See `LLM.stats`."""
        found = {
            "cache_near": self.frames.near_share,
            "cache_bytes_read": self.mover.bytes_read,
            "cache_bytes_written": self.mover.bytes_written,
        }
        return found | ({} if self.host is None else {"cache_bytes_crossed": self.host.memory.bytes_crossed})

    def check(self) -> None:
        """See ChunkCounts.check. Also proves that frames, slots and sidecars have one owner each."""
        super().check()
        self.frames.check(self._is_taken())
        self.slots.check(self._is_taken())
        lost = self.frames.is_sealed & (self.frames.starts < 0) & ~self.slots.is_stored
        assert not lost.any(), f"{int(lost.sum())} chunks have lost their bytes"

    # ---- frames ----------------------------------------------------------------------------------------------------

    def _take_frame(self, row: int) -> None:
        """Gives a row a frame. If none is free, moves the least recently used sealed chunk out of its frame."""
        pool = self.frames.pool(row)
        if not pool.num_free:
            other = self.frames.least_recently_used(self._step)
            if pool is not self.frames.near or other is None:
                raise CacheFullError("the offloaded cache has no frame left for an open chunk; raise cache.memory")
            self._spill([other])
        self.pages[row] = self.frames.take(row)
        self.takes[row] += 1

    def _bring(self, row: int) -> None:
        """Gives a frame to a chunk that must have one, with its bytes if it has any."""
        self._take_frame(row)
        if self.slots.is_stored[row]:
            self._load_frame(row, row)
            self.slots.is_stored[row] = False  # its tokens will change

    def _begin(self, row: int) -> None:
        """Gives a new sealed chunk a frame if the share of near chunks allows it, else a slot."""
        frames = self.frames
        # Frames that open chunks may still need.
        num_reserved = 0 if self.encodes else max(0, self.memory_plan.num_open - frames.num_open)
        if frames.near.num_free > num_reserved and frames.num_near + 1 <= self.near * (frames.num_sealed + 1):
            self._take_frame(row)
        elif self.slots.ids[row] < 0:
            self.slots.take([row])

    def _retire(self) -> None:
        """Stores newly sealed chunks and frees their frames, to keep the share of near chunks."""
        if self.encodes:
            return  # open and sealed chunks have different rows
        frames = self.frames
        excess = frames.num_near - min(int(self.near * frames.num_sealed), self.memory_plan.num_near)
        if excess > 0:
            self._spill(frames.near_by_use()[:excess])

    def _spill(self, rows: list[int]) -> None:
        """Stores chunks and gives their frames back."""
        self.slots.take([row for row in rows if self.slots.ids[row] < 0])
        parts = [part for row in rows for part in self.slots.chunk_parts(row, self._frame(row))]
        self.num_layers_stored += len(parts)
        if self.host is not None and self.sinks is not None:
            parts += self._sidecar_parts(rows, 0, self.sidecar_bytes)
        self.mover.write(parts).wait()
        self.slots.is_stored[rows] = True
        for row in rows:
            self.frames.free(row)

    def _frame(self, row: int) -> Tensor:
        """The bytes of a chunk in its frame."""
        start = int(self.frames.starts[row])
        return self.arena.data[start : start + self.sealed.num_bytes]

    def _load_frame(self, source: int, target: int) -> None:
        """Fills the frame of row `target` with the bytes in the slot of row `source`."""
        self.num_layers_loaded += self.shape[0]
        self.mover.read(self.slots.chunk_parts(source, self._frame(target))).wait()

    # ---- the file --------------------------------------------------------------------------------------------------

    def _sidecar_parts(self, rows: Iterable[int], start: int, num_bytes: int) -> list[IoRequest]:
        """A range of bytes of these rows' sidecars. Rows without a sidecar are skipped."""
        found = []
        for row in rows:
            if self.sidecars[row] >= 0:
                at = int(self.sidecars[row]) * UNIT + start
                there = self.slots.num_bytes + row * self.sidecar_bytes + start
                found.append(IoRequest(there, self.arena.data[at : at + num_bytes]))
        return found

    # ---- far chunks ------------------------------------------------------------------------------------------------

    def _place_far(self, step: StepChunks) -> tuple[list[FarChunks], FarChunks]:
        """Assigns the places of far chunks in the buffers."""
        starts, slots, num_layers = self.frames.starts, self.slots, self.shape[0]
        far = [rows[starts[rows] < 0] for rows in step.reads]
        rows, times = np.unique(np.concatenate(far), return_counts=True)
        several = rows[times > 1]
        often = np.argsort(-times[times > 1], kind="stable")
        common = slots.in_order(several[often[: self.memory_plan.shared_bytes // self.sealed.largest]])
        shared = FarChunks(common, slots.runs(common), [], np.empty(0, np.int64))
        self._name(common, self.buffers.shared)
        found = []
        for batch, (read, fill) in enumerate(zip(far, step.fills, strict=True)):
            own = slots.in_order(np.setdiff1d(read, common))
            new = slots.in_order(fill[starts[fill] < 0])
            assert len(own) + len(new) <= self.max_batch_chunks, (
                f"{len(own)} and {len(new)} chunks, room {self.max_batch_chunks}"
            )
            both = np.concatenate((own, new))
            stores = [SlotRange(first + len(own), slot, count) for first, slot, count in slots.runs(new)]
            found.append(FarChunks(both, slots.runs(own), stores, np.flatnonzero(np.isin(own, several))))
            self._name(both, self.buffers.own_of_layers(batch, len(far)))
            slots.is_stored[new] = True  # by the end of the step
            self.num_layers_loaded += num_layers * len(own)
            self.num_layers_stored += num_layers * len(new)
        self.num_layers_loaded += num_layers * len(common)
        return found, shared

    def _name(self, rows: Int32s, starts: Int64s) -> None:
        """Sets the page ids of rows to consecutive places in the buffers that start at `starts`, [L]."""
        places = np.arange(len(rows))[:, None] * self.sealed.layer_bytes + starts
        self.pages[rows] = (places[:, :, None] + self.sealed.heads) // UNIT
        self.takes[rows] += 1
