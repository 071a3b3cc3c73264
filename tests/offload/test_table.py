"""A cache on the disk: every page has its bytes when it is read, and tokens are those of a cache in memory."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from quire.attention.rows import RowSlice
from quire.cache.codecs.dense import DenseCodec
from quire.cache.ledger import PAGE_TOKENS
from quire.cache.sinks import Sinks
from quire.offload.blocks import BlockAttention
from quire.offload.mover import NOTHING, IoTicket, Mover
from quire.offload.step_chunks import FarChunks
from quire.offload.table import OffloadedTable
from quire.offload.units import Share
from quire.stores.direct import DirectFile

from ..effort import tries
from ..offloaded import FakeSequence, Kernels, Machine, StepError, delayed, patched, poisoned

DENSE = DenseCodec(2, torch.float32)
LAYERS, HEADS = 3, 2
IRREGULAR: Any = SimpleNamespace(
    name="irregular", kernel_id=5, page_bytes=np.array([[128, 384], [512, 128], [4096, 640]], np.int32)
)
"""Pages whose size differs by layer and head."""

CODECS: dict[str, tuple[Any, ...]] = {"dense": (), "encoded": (IRREGULAR,), "encoded with sinks": (IRREGULAR,)}


def machine_of(folder: Path, generator: random.Random, codec: str, **more: Any) -> Machine:
    sinks = Sinks(1, LAYERS, HEADS, 2, torch.float32) if "sinks" in codec else None
    return Machine(folder, generator, DENSE, *CODECS[codec], shape=(LAYERS, HEADS), sinks=sinks, **more)


def random_machine(folder: Path, generator: random.Random, codec: str) -> Machine:
    max_chunks = generator.choice((2, 4))
    return machine_of(
        folder,
        generator,
        codec,
        memory=generator.choice((1.0, 1.0, 1.3, 3.0)),
        near=Share(generator.choice((0.0, 0.0, 0.3, 0.5, 1.0))),
        far_states=Share(generator.choice((0.0, 0.5, 1.0))),
        max_chunks=max_chunks,
        micro_batch=generator.choice((1, 2, 3, 9)),
        num_shared=generator.choice((None, None, 0, 1)),
        overlaps=generator.random() < 0.7,
    )


def rows_of(machine: Machine, made: FakeSequence, generator: random.Random) -> list[RowSlice]:
    """The next rows of a sequence: one, those that fill its chunk, many, or a row and drafts. None if it is full."""
    left = machine.max_chunks * PAGE_TOKENS - made.num_tokens
    to_fill = PAGE_TOKENS - made.num_tokens % PAGE_TOKENS
    match generator.randrange(5):
        case 0:
            count = 1
        case 1:
            count = to_fill
        case 2:
            count = to_fill + PAGE_TOKENS * generator.randrange(3)
        case 3:
            count = generator.randrange(1, 2 * PAGE_TOKENS)
        case _:
            # Where chunks are encoded, the row that fills one is no draft.
            most = to_fill - 1 if machine.table.encodes else 5
            count = min(generator.randrange(1, 6), most, left)
            if count > 1:
                last = machine.slice(made, count)
                at = made.num_tokens
                return [RowSlice(at + place, 1, last.chunks, last.shared) for place in range(count)]
            count = 1
    count = min(count, left)
    return [machine.slice(made, count)] if count else []


def opens_two(rows: list[RowSlice]) -> bool:
    """Whether a chunk that has tokens is filled, and the next one is left open."""
    start, end = rows[0].start, rows[-1].start + rows[-1].num_rows
    return start % PAGE_TOKENS > 0 and end % PAGE_TOKENS > 0 and end // PAGE_TOKENS > start // PAGE_TOKENS


def random_step(machine: Machine, generator: random.Random) -> None:
    chosen = generator.sample(machine.live, generator.randrange(1, len(machine.live) + 1))
    chosen.sort(key=lambda made: made.chunks[: made.num_shared])
    work = [(made, rows) for made in chosen if (rows := rows_of(machine, made, generator))]
    work.sort(key=lambda each: each[1][0].num_rows > 1)
    crossing = [each for each in work if opens_two(each[1])]
    if not machine.table.encodes:  # an engine's sequence has two open chunks only in the step that copied the first
        work = [each for each in work if each not in crossing[machine.max_running // 4 + 1 :]]
    if not work:
        return
    slices = [piece for _, rows in work for piece in rows]
    while generator.random() < 0.3:  # the step fails in one of its layers, or after the last one
        machine.left = generator.randrange(LAYERS * 4)
        with contextlib.suppress(StepError):
            machine.step(slices)
    machine.left = None
    machine.step(slices)
    for made, rows in work:
        count = sum(piece.num_rows for piece in rows)
        if generator.random() < 0.3 and not (machine.table.encodes and len(rows) == 1):
            count = generator.randrange(not machine.table.encodes and len(rows) == 1, count) if count > 1 else count
        machine.commit(made, made.num_tokens + count)


def random_operation(machine: Machine, generator: random.Random) -> None:
    while machine.table.num_taken > 18 and machine.cached:
        machine.evict()
    chain = generator.choice(machine.cached)[: machine.max_chunks] if machine.cached else []
    is_full = len(machine.live) == machine.max_running
    match generator.randrange(8):
        case 0 | 1 if not is_full:
            machine.begin(generator.randrange(min(len(chain), machine.max_chunks - 1) + 1), chain)
        case 2 if not is_full and chain and not machine.table.encodes:
            machine.copy(chain, generator.randrange(1, len(chain) + 1))
        case 3 if machine.live:
            machine.end(generator.choice(machine.live), generator.random() < 0.7)
        case _ if machine.live:
            random_step(machine, generator)


@pytest.mark.parametrize("codec", CODECS)
def test_every_page_has_its_bytes_when_it_is_read(tmp_path: Path, codec: str, seed: int) -> None:
    for number in range(tries(8)):
        generator = random.Random(f"{seed} {codec} {number}")
        machine = random_machine(tmp_path, generator, codec)
        with poisoned(), delayed(number, 0.001):
            for _ in range(60):
                random_operation(machine, generator)
                machine.check()
        machine.close()


# ---- one case each ---------------------------------------------------------------------------------------------------


@pytest.fixture
def machine(tmp_path: Path, seed: int) -> Iterator[Callable[..., Machine]]:
    made: list[Machine] = []

    def make(codec: str = "dense", **more: Any) -> Machine:
        made.append(machine_of(tmp_path, random.Random(seed), codec, **{"near": Share(0.0)} | more))
        return made[-1]

    with poisoned():
        yield make
    for each in made:
        each.check()
        each.close()


def computed(machine: Machine, num_tokens: int) -> FakeSequence:
    """A sequence of its own with so many tokens."""
    made = machine.begin()
    machine.step([machine.slice(made, num_tokens)])
    machine.commit(made, num_tokens)
    return made


def cached(machine: Machine, num_chunks: int) -> list[int]:
    """A chain of the cache, all on the disk."""
    machine.end(computed(machine, num_chunks * PAGE_TOKENS), is_cached=True)
    return machine.cached[-1]


def decode(machine: Machine, *sequences: FakeSequence) -> None:
    machine.step([machine.slice(made, 1) for made in sequences])
    for made in sequences:
        machine.commit(made, made.num_tokens + 1)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("micro_batch", [1, 2, 4])
@pytest.mark.parametrize("num_shared", [3, 2, 0])
def test_a_chunk_that_several_micro_batches_read_is_loaded_once_a_layer(
    machine: Callable[..., Machine], codec: str, micro_batch: int, num_shared: int
) -> None:
    """If the shared buffers have room for it. Else every micro-batch loads it, into its own buffer."""
    made = machine(codec, memory=6.0, micro_batch=micro_batch, num_shared=num_shared)
    chain = cached(made, 3)
    sequences = [made.begin(3, chain) for _ in range(4)]
    decode(made, *sequences)
    before, read = made.table.num_layers_loaded, made.mover.bytes_read
    decode(made, *sequences)
    count = 4 // micro_batch
    loads = 3 if count == 1 else num_shared + (3 - num_shared) * count
    assert made.table.num_layers_loaded - before == LAYERS * loads
    assert made.mover.bytes_read - read == loads * made.table.sealed.num_bytes
    assert all(made.reads[row, layer] == 4 for row in chain for layer in range(LAYERS)), "not every sequence reads it"


def test_prefixes_longer_than_the_shared_buffers_are_no_error(machine: Callable[..., Machine]) -> None:
    """Two beginnings of four chunks, each shared over the border of two micro-batches, and room for four chunks."""
    made = machine(micro_batch=2, max_chunks=5, max_running=6)
    chains = [cached(made, 4), cached(made, 4)]
    sequences = [made.begin(4, chain) for chain in chains for _ in range(3)]
    for _ in range(3):
        decode(made, *sequences)
    assert made.table.memory_plan.shared_bytes == 5 * made.table.sealed.largest


@pytest.mark.parametrize("kind", ["read", "write"])
def test_bytes_are_those_of_the_layers_of_the_chunks(machine: Callable[..., Machine], kind: str) -> None:
    """Three chunks and an open one are computed, then three steps decode: the open chunk stays in memory."""
    made = machine(memory=1.0)
    sequence = computed(made, 3 * PAGE_TOKENS + 5)
    table, chunk = made.table, made.table.sealed.num_bytes
    assert (made.mover.bytes_read, made.mover.bytes_written) == (0, 3 * chunk)
    for _ in range(3):
        decode(made, sequence)
    assert (made.mover.bytes_read, made.mover.bytes_written) == (3 * 3 * chunk, 3 * chunk)
    assert (table.num_layers_loaded, table.num_layers_stored) == (9 * LAYERS, 3 * LAYERS)


def test_chunks_next_to_each_other_are_read_with_one_request(machine: Callable[..., Machine]) -> None:
    made = machine()
    sequence = computed(made, 3 * PAGE_TOKENS + 5)
    reads: list[int] = []
    read = DirectFile.read

    def counted(self: DirectFile, view: memoryview, *arguments: Any) -> None:
        reads.append(len(view))
        read(self, view, *arguments)

    with patched(DirectFile, read=counted):
        decode(made, sequence)
    assert reads == [3 * size for size in made.table.sealed.layer_bytes]


def test_a_chunk_is_copied_from_memory_and_from_the_disk(machine: Callable[..., Machine]) -> None:
    made = machine(memory=3.0, near=Share(0.5))
    chain = cached(made, 2)
    assert sorted(made.table.frames.starts[chain] >= 0) == [False, True]
    for count in (1, 2):
        copy = made.copy(chain, count)
        decode(made, copy)
        made.end(copy, is_cached=False)


def test_copies_of_all_sequences_come_back_from_the_disk(machine: Callable[..., Machine]) -> None:
    """More copies than frames, none of them in a step yet."""
    made = machine(max_running=4, max_chunks=2)
    chain = cached(made, 2)
    for _ in range(4):
        copies = [made.copy(chain, 1) for _ in range(4)]
        decode(made, *copies)
        for copy in copies:
            made.end(copy, is_cached=False)


def test_a_row_that_is_taken_again_is_a_new_chunk(machine: Callable[..., Machine]) -> None:
    """The step before filled it for a sequence that has ended."""
    made = machine(memory=3.0, near=Share(1.0))
    chain = cached(made, 1)
    first = computed(made, PAGE_TOKENS - 1)
    decode(made, first)
    row = first.chunks[0]
    made.table.bases[row] = PAGE_TOKENS  # as the runner sets it for a step on a device
    made.end(first, is_cached=False)
    again = made.copy(chain, 1)
    assert again.chunks == [row], "another row was taken"
    assert made.table.bases[row] < 0, "it has the position of the chunk before"
    other = computed(made, 3)
    assert not made.table.frames.is_sealed[row], "a chunk of 63 tokens counts as full"
    decode(made, again, other)


def test_a_full_chunk_counts_as_full_in_the_next_step(machine: Callable[..., Machine]) -> None:
    """A row fills the first one, and a prompt of 70 rows the other one and goes on in the next chunk."""
    made = machine(memory=3.0, near=Share(1.0))
    one, other = computed(made, PAGE_TOKENS - 1), computed(made, 10)
    made.step([made.slice(one, 1), made.slice(other, 70)])
    made.commit(one, PAGE_TOKENS)
    made.commit(other, 80)
    decode(made, computed(made, 1))
    assert made.table.frames.is_sealed[[one.chunks[0], *other.chunks]].tolist() == [True, True, False]


def test_a_step_that_is_repeated_finds_what_it_filled(machine: Callable[..., Machine]) -> None:
    """Its tokens were refused, or it failed after its last layer. Chunks that are on the disk already are filled again,
    and one of them is begun from its middle.
    """
    made = machine()
    sequence = made.begin()
    made.step([made.slice(sequence, 2 * PAGE_TOKENS)])
    made.step([made.slice(sequence, 2 * PAGE_TOKENS)])
    made.commit(sequence, PAGE_TOKENS + 30)
    for count in (1, 30, 34, PAGE_TOKENS + 3):
        made.step([made.slice(sequence, count)])
    made.commit(sequence, 2 * PAGE_TOKENS)
    decode(made, sequence)


def test_a_read_of_a_step_that_failed_spoils_no_later_step(machine: Callable[..., Machine], seed: int) -> None:
    """It is still under way when the next step loads into the same buffer."""
    made, generator = machine(micro_batch=1, far_states=Share(0.0)), random.Random(seed)
    sequences = [computed(made, PAGE_TOKENS) for _ in range(3)]
    read, layer, slow = made.mover._file.read, Kernels.layer, list[float]()

    def reading(*arguments: Any) -> None:
        seconds = slow.pop() if slow else 0
        time.sleep(seconds)
        read(*arguments)

    def computing(*arguments: Any) -> Any:
        time.sleep(0.002)
        return layer(*arguments)

    decode(made, *sequences)
    with patched(made.mover._file, read=reading), patched(Kernels, layer=computing):
        for _ in range(tries(12)):
            made.left, slow[:] = 0, [0.003 + 0.01 * generator.random(), 0.0]
            with pytest.raises(StepError):
                made.step([made.slice(each, 1) for each in sequences])
            sequences.reverse()
            decode(made, *sequences)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("codec", CODECS)
def test_the_share_of_near_chunks_is_kept(machine: Callable[..., Machine], codec: str, share: float) -> None:
    """A step that fills many chunks keeps no more of them in memory than one that fills few."""
    made = machine(codec, memory=8.0, near=Share(share), max_chunks=4)
    assert made.table.memory_plan.num_near >= 16
    for number in range(1, 5):
        computed(made, 4 * PAGE_TOKENS)
        assert made.table.frames.num_sealed == 4 * number
        assert abs(made.table.frames.num_near - share * 4 * number) <= 1


def test_the_share_that_is_told_is_that_of_all_steps(machine: Callable[..., Machine]) -> None:
    """At the end of a batch nothing may be left of its cache."""
    made = machine()
    sequence = computed(made, 2 * PAGE_TOKENS)
    decode(made, sequence)
    made.end(sequence, is_cached=False)
    assert made.table.stats()["cache_near"] == 0


def test_micro_batches_wait_for_chunks_in_transfer() -> None:
    """Each one's plan is told when a layer's pages may be read."""
    told: list[Any] = []
    fake: Any = SimpleNamespace(plan=lambda slices, moved, ready: told.append(ready), clone=lambda: fake, refresh=None)
    ready = np.zeros(3, np.int32)
    chunks = np.arange(2, dtype=np.int32)
    slices = [RowSlice(70, 1, chunks) for _ in range(3)]
    plan = BlockAttention(fake, 2, None).plan(slices, None, ready)
    assert [each.rows for each in plan.batches] == [slice(0, 2), slice(2, 3)]
    assert len(told) == 2 and all(each is ready for each in told)


def test_slots_and_frames_come_back(machine: Callable[..., Machine]) -> None:
    made = machine("encoded with sinks", memory=2.0, near=Share(0.5))
    table = made.table
    for _ in range(5):
        sequences = [computed(made, 3 * PAGE_TOKENS + 7) for _ in range(4)]
        decode(made, *sequences)
        for sequence in sequences:
            made.end(sequence, is_cached=False)
        assert not table.slots.num_taken and not table.num_taken
        assert table.frames.open.num_free == table.frames.open.count
        assert table.frames.near.num_free == table.frames.near.count


# ---- the order of loads, computing and stores ------------------------------------------------------------------------


class Recorder:
    """What happens in a step, in its order: (event, layer, micro-batch)."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.events: list[tuple[str, int, int]] = []
        self.names: dict[IoTicket, tuple[str, int, int]] = {}
        self.waited: dict[tuple[int, int], set[tuple[str, int, int]]] = {}
        machine.take = lambda layer: self.events.append(("take", layer, -1))
        machine.give = lambda layer: self.events.append(("give", layer, -1))

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        load, store, finish, layer = OffloadedTable.load, OffloadedTable.store, Mover._finish, Kernels.layer

        def loading(
            table: OffloadedTable, at: int, batch: int, count: int, placed: FarChunks, *after: IoTicket
        ) -> IoTicket:
            # What is done already need not be waited for.
            self.waited[at, batch] = {self.names[ticket] for ticket in after if ticket in self.names} | {
                event for event in self.events if event[0] == "stored"
            }
            self.events.append(("load", at, batch))
            return self._named("loaded", at, batch, load(table, at, batch, count, placed, *after))

        def storing(table: OffloadedTable, at: int, batch: int, count: int, placed: FarChunks) -> IoTicket:
            self.events.append(("store", at, batch))
            return self._named("stored", at, batch, store(table, at, batch, count, placed))

        def finishing(mover: Mover, ticket: IoTicket, error: BaseException | None) -> None:
            if ticket.left == 1 and ticket in self.names:
                self.events.append(self.names[ticket])
            finish(mover, ticket, error)

        def computing(kernels: Kernels, at: int, state: Any, plan: list[RowSlice]) -> Any:
            batch = next(number for number, each in enumerate(self.plans) if each is plan[0])
            self.events.append(("compute", at, batch))
            found = layer(kernels, at, state, plan)
            self.events.append(("computed", at, batch))
            return found

        with (
            patched(OffloadedTable, load=loading, store=storing),
            patched(Mover, _finish=finishing),
            patched(Kernels, layer=computing),
        ):
            yield

    def _named(self, event: str, layer: int, batch: int, ticket: IoTicket) -> IoTicket:
        if ticket is NOTHING:
            self.events.append((event, layer, batch))
        else:
            with self.machine.mover._changed:
                self.names[ticket] = event, layer, batch
                if ticket.done.is_set():
                    self.events.append((event, layer, batch))
        return ticket

    def run(self, slices: list[RowSlice]) -> list[tuple[str, int, int]]:
        """The events of a step whose micro-batches have one slice each."""
        self.plans = slices
        with self.step():
            self.machine.step(slices)
        return self.events


@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_loads_computing_and_stores_keep_their_order(
    machine: Callable[..., Machine], overlaps: bool, count: int, seed: int
) -> None:
    made = machine(micro_batch=1, overlaps=overlaps)
    sequences = [computed(made, 2 * PAGE_TOKENS) for _ in range(count)]
    with delayed(seed, 0.004):
        # Every second one fills a chunk.
        slices = [made.slice(each, PAGE_TOKENS if place % 2 else 1) for place, each in enumerate(sequences)]
        recorder = Recorder(made)
        events = recorder.run(slices)
    for made_rows, piece in zip(sequences, slices, strict=True):
        made.commit(made_rows, piece.start + piece.num_rows)
    assert all(each in events for layer in range(LAYERS) for each in (("take", layer, -1), ("give", layer, -1)))
    order = [(layer, batch) for layer in range(LAYERS) for batch in range(count)]
    assert [each[1:] for each in events if each[0] == "compute"] == order, "not layer by layer"
    at = {event: place for place, event in enumerate(events)}
    assert len(at) == len(events) == (6 * count + 2) * LAYERS
    for number, (layer, batch) in enumerate(order):
        compute, computed_at = at["compute", layer, batch], at["computed", layer, batch]
        assert at["loaded", layer, batch] < compute < computed_at < at["store", layer, batch]
        assert at["take", layer, -1] < compute and computed_at < at["give", layer, -1]
        if number + 1 < len(order):
            load = at["load", *order[number + 1]]
            assert (load < compute) if overlaps else (load > at["stored", layer, batch])
        if number + 2 < len(order):
            following = order[number + 2]
            assert computed_at < at["load", *following], "a buffer is filled while it is computed with"
            assert ("stored", layer, batch) in recorder.waited[following], "a buffer is filled before it is stored"
    for layer in range(LAYERS - 1):
        assert at["give", layer, -1] < at["take", layer + 1, -1]


@pytest.mark.alone
@pytest.mark.parametrize("overlaps", [True, False])
def test_the_next_micro_batch_is_loaded_while_one_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overlaps: bool
) -> None:
    """Twelve loads and twelve computations of 20 ms: 13 times 20 ms with overlap, 24 times without."""
    seconds, layer, read = 0.02, Kernels.layer, DirectFile.read
    made = machine_of(tmp_path, random.Random(0), "dense", micro_batch=1, near=Share(0.0), overlaps=overlaps)
    sequences = [computed(made, PAGE_TOKENS) for _ in range(4)]
    decode(made, *sequences)

    def computing(*arguments: Any) -> Any:
        time.sleep(seconds)
        return layer(*arguments)

    def reading(self: DirectFile, view: memoryview, *arguments: Any) -> None:
        time.sleep(seconds)
        read(self, view, *arguments)

    monkeypatch.setattr(Kernels, "layer", computing)
    monkeypatch.setattr(made.mover._file, "read", reading.__get__(made.mover._file))
    made.states.far = Share(0.0)
    begun = time.monotonic()
    decode(made, *sequences)
    took = (time.monotonic() - begun) / seconds
    made.close()
    assert (13 < took < 20) if overlaps else (took > 24), f"{took:.1f} times the seconds of a load"
