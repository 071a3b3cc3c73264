"""A cache on the disk without a model: steps of made-up sequences, and kernels that only compare and write bytes."""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from quire.attention.rows import RowSlice
from quire.cache.arrays import Int32s
from quire.cache.codecs import Codec
from quire.cache.codecs.dense import DenseCodec
from quire.cache.ledger import PAGE_TOKENS, UNIT, PageCounts
from quire.cache.sinks import Sinks
from quire.offload.blocks import BlockAttention, run
from quire.offload.hidden import HiddenStates
from quire.offload.memory_plan import FrameLayout, MemoryPlan, MemoryRequirements
from quire.offload.mover import IoTicket, Mover
from quire.offload.step_chunks import FarChunks
from quire.offload.table import OffloadedTable
from quire.offload.units import ALL, Share
from quire.stores.direct import DirectFile
from quire.stores.throttle import Throttle

POISON = 0xFF


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Overwrites a buffer as soon as it may be filled, and a frame when it is given back."""
    load, load_shared, spill, free = (
        OffloadedTable.load, OffloadedTable.load_shared, OffloadedTable._spill, OffloadedTable.free
    )  # fmt: skip

    def spoiling(
        self: OffloadedTable, layer: int, batch: int, count: int, placed: FarChunks, *after: IoTicket
    ) -> IoTicket:
        for ticket in after:
            ticket.wait()
        start = self.buffers.own(layer, batch, count)
        self.arena.data[start : start + self.memory_plan.own_bytes] = POISON
        return load(self, layer, batch, count, placed, *after)

    def spoiling_shared(self: OffloadedTable, layer: int, placed: FarChunks, *after: IoTicket) -> IoTicket:
        start = self.buffers.shared[layer]
        self.arena.data[start : start + self.memory_plan.shared_bytes] = POISON
        return load_shared(self, layer, placed, *after)

    def spoil(table: OffloadedTable, frames: list[tuple[int, int]]) -> None:
        for start, num_bytes in frames:
            table.arena.data[start : start + num_bytes] = POISON

    def frames_of(table: OffloadedTable, rows: Sequence[int]) -> list[tuple[int, int]]:
        frames = table.frames
        return [(int(frames.starts[row]), frames.pool(row).num_bytes) for row in rows if frames.starts[row] >= 0]

    def spoiling_spill(self: OffloadedTable, rows: list[int]) -> None:
        frames = frames_of(self, rows)
        spill(self, rows)
        spoil(self, frames)

    def spoiling_free(self: OffloadedTable, chunks: Int32s) -> None:
        spoil(self, frames_of(self, chunks.tolist()))
        free(self, chunks)

    with patched(OffloadedTable, load=spoiling, load_shared=spoiling_shared, _spill=spoiling_spill, free=spoiling_free):
        yield


@contextlib.contextmanager
def delayed(seed: object, seconds: float) -> Iterator[None]:
    """Every read and write takes up to `seconds` longer, before and after its bytes move."""
    # Threads draw from a generator of their own, so that what a test draws from its own stays the same.
    read, write, generator = DirectFile.read, DirectFile.write, random.Random(str(seed))

    def late(move: Callable[..., None]) -> Callable[..., None]:
        def moved(*arguments: Any) -> None:
            time.sleep(generator.random() * seconds / 2)
            move(*arguments)
            time.sleep(generator.random() * seconds / 2)

        return moved

    with patched(DirectFile, read=late(read), write=late(write)):
        yield


@contextlib.contextmanager
def patched(owner: Any, **changes: Any) -> Iterator[None]:
    """Replaces attributes for a while."""
    before = {name: getattr(owner, name) for name in changes}
    for name, value in changes.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@dataclass(eq=False)
class FakeSequence:
    """A made-up sequence.

    chunks      its rows of the table; the first `num_shared` are of the cache
    num_tokens  committed tokens
    filled      see RowSlice
    """

    chunks: list[int]
    num_shared: int
    num_tokens: int
    filled: int = -1


class Machine:
    """A table and a dictionary: row -> the bytes of its pages, by layer.

    take, give  called as `blocks.run` does for the weights of a layer
    left        layers of micro-batches that are computed until one fails; None: none fails
    """

    def __init__(
        self,
        folder: Path,
        generator: random.Random,
        open_codec: DenseCodec,
        *sealed: Codec,
        shape: tuple[int, int] = (3, 2),
        sinks: Sinks | None = None,
        memory: float = 1.0,
        near: Share = ALL,
        far_states: Share = ALL,
        max_running: int = 4,
        max_chunks: int = 4,
        micro_batch: int = 2,
        num_chunks: int = 40,
        num_shared: int | None = None,
        overlaps: bool = True,
    ) -> None:
        """memory: times the least that a room needs. num_shared: chunks of a shared buffer; None: as the room says."""
        self.generator, self.overlaps = generator, overlaps
        self.take: Callable[[int], None] = lambda layer: None
        self.give: Callable[[int], None] = lambda layer: None
        self.left: int | None = None
        self.max_running, self.max_chunks = max_running, max_chunks
        self.mover = Mover(folder, Throttle(None))
        sizes = [
            FrameLayout(np.broadcast_to(codec.page_bytes, shape).astype(np.int32)) for codec in (open_codec, *sealed)
        ]
        needs = MemoryRequirements(sizes[-1], sizes[0] if sealed else None, max_running, max_chunks, micro_batch)
        memory_plan = MemoryPlan.of(int(needs.min_bytes * memory), needs)
        if num_shared is not None:
            memory_plan = replace(memory_plan, shared_bytes=num_shared * sizes[-1].largest)
        bytes_of = max(int(np.broadcast_to(codec.page_bytes, shape).sum()) for codec in (open_codec, *sealed))
        self.table = OffloadedTable(
            PageCounts(num_chunks * bytes_of, slab_bytes=4096),
            *shape,
            open_codec,
            *sealed,
            sinks=sinks,
            memory_plan=memory_plan,
            backing=self.mover,
            near=near,
        )
        self.table.arena.data.fill_(POISON)
        self.states_mover = Mover(folder, Throttle(None))
        self.states = HiddenStates(self.states_mover, far_states)
        # Kernels read a copy of the table, which learns of changes as a GPU's does.
        self.pages, self.seen = np.full_like(self.table.pages, -1), np.zeros_like(self.table.takes)
        fake: Any = SimpleNamespace(plan=self._plan, clone=lambda: fake, refresh=self._refresh)
        self.blocks = BlockAttention(fake, micro_batch, self.table)
        self.bytes: dict[int, dict[int, list[np.ndarray]]] = {}
        self.live: list[FakeSequence] = []
        self.cached: list[list[int]] = []
        self.owners: Counter[int] = Counter()
        self.reads: Counter[tuple[int, int]] = Counter()

    def _plan(self, slices: Sequence[RowSlice], *more: Any) -> list[RowSlice]:
        for piece in slices:
            self._refresh(np.append(piece.chunks, piece.filled) if piece.filled >= 0 else piece.chunks)
        return list(slices)

    def _refresh(self, rows: np.ndarray) -> None:
        changed = rows[self.seen[rows] != self.table.takes[rows]]
        self.pages[changed], self.seen[changed] = self.table.pages[changed], self.table.takes[changed]

    # ---- sequences ---------------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Rows that are left, as a sequence's longest path takes them."""
        return self.table.capacity - self.table.num_taken

    def begin(self, num_cached: int = 0, chain: Sequence[int] = ()) -> FakeSequence:
        """A new sequence over the first chunks of a chain of the cache."""
        made = FakeSequence(list(chain[:num_cached]), num_cached, num_cached * PAGE_TOKENS)
        self.owners.update(made.chunks)
        self.live.append(made)
        return made

    def copy(self, chain: Sequence[int], count: int) -> FakeSequence:
        """A new sequence over `count` cached chunks, of which it has a copy of the last one."""
        made = self.begin(count - 1, chain)
        target = int(self.table.take(1, self.table.sealed_codec, sidecar=count == 1)[0])
        self._own(made, target)
        self.table.copy(chain[count - 1], target)
        self.bytes[target] = {layer: [*pages] for layer, pages in self.bytes[chain[count - 1]].items()}
        made.num_tokens = count * PAGE_TOKENS - 1
        return made

    def end(self, made: FakeSequence, is_cached: bool) -> None:
        """Ends a sequence. Its sealed chunks may stay in the cache."""
        self.live.remove(made)
        num_sealed = made.num_tokens // PAGE_TOKENS
        if is_cached and num_sealed > made.num_shared:
            chain = made.chunks[:num_sealed]
            self.cached.append(chain)
            self.owners.update(chain)
        self._give(made.chunks + ([made.filled] if made.filled >= 0 else []))

    def evict(self) -> None:
        """Drops the oldest chain of the cache."""
        self._give(self.cached.pop(0))

    def _give(self, rows: list[int]) -> None:
        self.owners.subtract(rows)
        gone = [row for row in dict.fromkeys(rows) if not self.owners[row]]
        for row in gone:
            del self.owners[row]
            self.bytes.pop(row, None)
        self.table.free(np.array(gone, np.int32))

    def _own(self, made: FakeSequence, row: int) -> None:
        made.chunks.append(row)
        self.owners[row] += 1

    def slice(self, made: FakeSequence, num_rows: int) -> RowSlice:
        """The next rows of a sequence, with rows of the table for them."""
        table, end = self.table, made.num_tokens + num_rows
        num_sealed = table.num_sealed_for(end)
        for index in range(len(made.chunks), num_sealed):
            self._own(made, int(table.take(1, table.sealed_codec, sidecar=index == 0)[0]))
        last = made.num_tokens // PAGE_TOKENS
        if table.encodes and num_sealed > last and made.num_tokens % PAGE_TOKENS and made.filled < 0:
            made.filled = made.chunks[last]
            row = int(table.take(1, table.sealed_codec, sidecar=last == 0)[0])
            self.owners[row] += 1
            made.chunks[last] = row
        if len(made.chunks) < -(-end // PAGE_TOKENS):
            self._own(made, int(table.take(1, table.open_codec)[0]))
        shared = ((made.chunks[made.num_shared - 1], made.num_shared),) if made.num_shared else ()
        filled = made.filled if end > (last + 1) * PAGE_TOKENS - 1 else -1
        return RowSlice(made.num_tokens, num_rows, np.array(made.chunks, np.int32), shared, filled)

    # ---- steps -------------------------------------------------------------------------------------------------------

    def step(self, slices: Sequence[RowSlice]) -> None:
        """Computes all layers, and compares all that is read."""
        rows = torch.arange(sum(piece.num_rows for piece in slices))
        plan = self.blocks.plan(slices)
        model: Any = Kernels(self)
        self.reads.clear()
        found = run(model, rows, rows, plan, self, self.states, overlaps=self.overlaps)
        assert torch.equal(found, rows * 2 + model.shape.num_layers), "rows of one micro-batch came to another"

    def commit(self, made: FakeSequence, num_tokens: int) -> None:
        """Notes how many tokens of a sequence are there now."""
        before, made.num_tokens = made.num_tokens, num_tokens
        if made.filled >= 0 and num_tokens // PAGE_TOKENS > before // PAGE_TOKENS:
            self._give([made.filled])
            made.filled = -1

    def close(self) -> None:
        """Ends its threads."""
        self.mover.close()
        self.states_mover.close()

    def check(self) -> None:
        """Compares what is in frames and in the file with the dictionary."""
        self.table.check()
        for row in self.bytes:
            assert self.table.frames.starts[row] >= 0 or self.table.slots.is_stored[row], f"row {row} is nowhere"

    def parts(self, row: int, layer: int) -> Iterator[np.ndarray]:
        """The bytes of a row in a layer, as kernels find them: its pages, and the layer's part of its sidecar."""
        table, data = self.table, self.table.arena.data.numpy()
        sizes = table.sizes[table.kinds[row], layer]
        for page, size in zip(self.pages[row, layer].tolist(), sizes.tolist(), strict=True):
            yield data[page * UNIT : page * UNIT + size]
        if table.sinks is not None and table.sidecars[row] >= 0:
            start = int(table.sidecars[row]) * UNIT + layer * table.sinks.layer_bytes
            yield data[start : start + table.sinks.layer_bytes]


class StepError(Exception):
    """A step ends before its last layer."""


class Kernels:
    """A model that compares what it reads with the dictionary, and writes random bytes."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.shape = SimpleNamespace(num_layers=machine.table.shape[0])

    def begin(self, tokens: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """See Model."""
        return tokens.clone(), positions.clone()

    def layer(self, layer: int, state: tuple[torch.Tensor, ...], plan: list[RowSlice]) -> tuple[torch.Tensor, ...]:
        """Reads, then writes the pages of a micro-batch's slices in a layer."""
        if self.machine.left is not None:
            self.machine.left -= 1
            if self.machine.left < 0:
                self.machine.left = None
                raise StepError
        for piece in plan:
            end, first = piece.start + piece.num_rows, piece.start // PAGE_TOKENS
            chunks = piece.chunks[: -(-end // PAGE_TOKENS)].tolist()
            is_begun = piece.start % PAGE_TOKENS != 0
            begun = [piece.filled] if piece.filled >= 0 else chunks[first : first + is_begun]
            for row in chunks[:first] + begun:
                self._compare(row, layer)
            for row in chunks[first:]:
                self._write(row, layer)
        x, residual = state
        residual += 1  # in place, as the residual stream
        return x, residual

    def finish(self, state: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """See Model. The result may lie in the state, as a decoder's does."""
        x, residual = state
        x += residual
        return x

    def _compare(self, row: int, layer: int) -> None:
        machine = self.machine
        for index, (part, wanted) in enumerate(zip(machine.parts(row, layer), machine.bytes[row][layer], strict=True)):
            assert np.array_equal(part, wanted), f"layer {layer}, part {index} of row {row} has other bytes"
        machine.reads[row, layer] += 1

    def _write(self, row: int, layer: int) -> None:
        new = self.machine.bytes.setdefault(row, {})[layer] = []
        for part in self.machine.parts(row, layer):
            part[:] = np.frombuffer(self.machine.generator.randbytes(len(part)), np.uint8)
            new.append(part.copy())
