"""The chunk table with pages of several sizes, compared with a model that knows the contents of every page."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from numpy.typing import NDArray

from quire.cache.arena import Arena
from quire.cache.codecs.sums import SumsCodec
from quire.cache.counts import RETAINED_ROWS, ChunkCounts
from quire.cache.ledger import PAGE_TOKENS, UNIT, PageCounts, PageLedger
from quire.cache.sinks import Sinks
from quire.cache.table import ChunkTable
from quire.errors import CacheFullError, ConfigError
from tests.effort import examples
from tests.tables import available

L, H = 2, 3
SLAB_UNITS = 16


@dataclass(frozen=True, eq=False)
class Sized:
    """As much of a codec as the table sees."""

    name: str
    kernel_id: int
    page_bytes: int | NDArray[np.int32]

    @property
    def sizes(self) -> list[int]:
        """Bytes of each page of a chunk."""
        return np.broadcast_to(self.page_bytes, (L, H)).reshape(-1).tolist()


OPEN = Sized("open", 0, 8 * UNIT)
MIXED = Sized("mixed", 3, np.array([[1, 3, 3], [5, 1, 3]], np.int32) * UNIT)
SMALL = Sized("small", 4, 2 * UNIT)
CODECS = [OPEN, MIXED, SMALL]


def ledger_of(num_slabs: int) -> PageLedger:
    return PageLedger(num_slabs * SLAB_UNITS * UNIT, SLAB_UNITS * UNIT)


def table_of(num_slabs: int, *sealed: Sized, sidecar_units: int = 0) -> ChunkTable:
    ledger = ledger_of(num_slabs)
    sinks = sinks_of(sidecar_units) if sidecar_units else None
    arena = Arena(ledger.num_bytes)
    return ChunkTable(ledger, L, H, OPEN, *sealed, sinks=sinks, arena=arena)  # type: ignore[arg-type]


def fits(table: ChunkCounts, *need: int) -> bool:
    """Whether sealed and open chunks, and sidecars, fit."""
    return table.fits(table.demand(*need))


def sinks_of(units: int) -> Sinks:
    """Those whose sidecar has so many units: one token, in each head as many channels as that takes."""
    sinks = Sinks(1, L, H, units * UNIT // (L * H * 2 * 4), torch.float32)
    assert sinks.sidecar_bytes == units * UNIT
    return sinks


def pages_of(table: ChunkTable, chunk: int) -> list[tuple[int, int]]:
    """Id and size of everything a chunk holds."""
    sizes = table.codecs[int(table.kinds[chunk])].sizes  # type: ignore[attr-defined]
    found = list(zip(table.pages[chunk].reshape(-1).tolist(), sizes, strict=True))
    if table.sidecars[chunk] >= 0:
        found.append((int(table.sidecars[chunk]), table.sidecar_bytes))
    return found


def write(table: ChunkTable, chunk: int, number: int) -> None:
    """Fills the chunk's pages, each with another byte."""
    for at, (page_id, size) in enumerate(pages_of(table, chunk)):
        image = torch.full((1, size), (number + at) % 256, dtype=torch.uint8)
        table.arena.store(np.array([page_id], np.int32), size, image)


def holds(table: ChunkTable, chunk: int, number: int) -> bool:
    return all(
        (table.arena.data[page_id * UNIT :][:size] == (number + at) % 256).all()
        for at, (page_id, size) in enumerate(pages_of(table, chunk))
    )


class TableMachine(RuleBasedStateMachine):
    """Chunks of three codecs, seven pages at most, come and go; whatever was written stays where the table says."""

    @initialize(num_slabs=st.integers(6, 20), sidecar_units=st.sampled_from([3, 7]))
    def start(self, num_slabs: int, sidecar_units: int) -> None:
        self.table = table_of(num_slabs, MIXED, SMALL, sidecar_units=sidecar_units)
        ledger = PageCounts(num_slabs * SLAB_UNITS * UNIT, SLAB_UNITS * UNIT)
        self.counted = ChunkCounts(ledger, L, H, OPEN, MIXED, SMALL, sinks=sinks_of(sidecar_units))  # type: ignore[arg-type]
        self.held: dict[int, tuple[Sized, bool, int]] = {}  # chunk -> codec, has a sidecar, number
        self.mirror: dict[int, tuple[int, list[tuple[int, int]]]] = {}
        self.number = 0

    def fits(self, chunks: list[tuple[Sized, bool]], without: Collection[int] = ()) -> bool:
        """Whether these, (codec, has a sidecar), fit beside those held: whole slabs of each size, counted in pages."""
        held = [(codec, sidecar) for chunk, (codec, sidecar, _) in self.held.items() if chunk not in without]
        sizes: Counter[int] = Counter()
        for codec, sidecar in chunks + held:
            sizes.update(codec.sizes + [self.table.sidecar_bytes] * sidecar)
        slabs = sum(-(-count // (SLAB_UNITS * UNIT // size)) for size, count in sizes.items())
        return slabs <= self.table.ledger.num_slabs

    @rule(codec=st.sampled_from(CODECS), share=st.sampled_from([0.3, 1, 1.2]), wants_sidecar=st.booleans())
    def take_a_share(self, codec: Sized, share: float, wants_sidecar: bool) -> None:
        """Of what there is room for: the arena is full soon, and stays so."""
        self.take(codec, math.ceil(share * available(self.table, codec)), wants_sidecar)

    def take(self, codec: Sized, count: int, wants_sidecar: bool) -> None:
        table, sidecar = self.table, wants_sidecar and count > 0
        if not self.fits([(codec, sidecar and at == 0) for at in range(count)]):
            before = table.ledger.allocated_bytes, table.num_taken, table.num_moved_pages
            with pytest.raises(CacheFullError):
                table.take(count, codec, sidecar=sidecar)
            assert before == (table.ledger.allocated_bytes, table.num_taken, table.num_moved_pages)
            with pytest.raises(CacheFullError):
                self.counted.take(count, codec, sidecar=sidecar)
            return
        chunks = table.take(count, codec, sidecar=sidecar).tolist()
        assert self.counted.take(count, codec, sidecar=sidecar).tolist() == chunks
        assert len(set(chunks)) == count and not self.held.keys() & set(chunks)
        for at, chunk in enumerate(chunks):
            assert (table.sidecars[chunk] >= 0) == (sidecar and at == 0), "the first chunk alone has a sidecar"
            self.number += 17
            self.held[chunk] = codec, sidecar and at == 0, self.number
            write(table, chunk, self.number)

    @rule(num_sealed=st.integers(0, 8), num_open=st.integers(0, 4), seed=st.integers(0, 2**32))
    def replace(self, num_sealed: int, num_open: int, seed: int) -> None:
        """Sealed and open chunks at once, some sealed ones given back before: what fits is then taken."""
        random = Random(seed)
        sealed = [chunk for chunk, (codec, _, _) in self.held.items() if codec is MIXED and random.random() < 0.5]
        back = sum(self.held[chunk][1] for chunk in sealed)
        is_room = fits(self.table, num_sealed - len(sealed), num_open, (num_sealed > 0) - back)
        wanted = [(MIXED, at == 0) for at in range(num_sealed)] + [(OPEN, False)] * num_open
        assert is_room == self.fits(wanted, sealed)
        if is_room:
            self._give(sealed)
            self.take(MIXED, num_sealed, True)
            self.take(OPEN, num_open, False)

    @rule(seed=st.integers(0, 2**32), share=st.sampled_from([0.1, 0.5, 0.8]))
    def free(self, seed: int, share: float) -> None:
        random = Random(seed)
        self._give([chunk for chunk in self.held if random.random() < share])

    def _give(self, chunks: list[int]) -> None:
        self.table.free(np.array(chunks, np.int32))
        self.counted.free(np.array(chunks, np.int32))
        for chunk in chunks:
            del self.held[chunk]

    @invariant()
    def the_model_agrees(self) -> None:
        table = self.table
        table.check()
        self.counted.check()
        assert table.num_taken == self.counted.num_taken == len(self.held)
        assert table.ledger.allocated_bytes == self.counted.ledger.allocated_bytes, "without places as much is out"
        used = np.zeros(table.ledger.num_bytes // UNIT, int)
        for chunk, (codec, _, number) in self.held.items():
            assert table.kinds[chunk] == codec.kernel_id
            assert holds(table, chunk, number), "a page was moved without its bytes, or written over"
            pages = pages_of(table, chunk)
            for page_id, size in pages:
                used[page_id : page_id + size // UNIT] += 1
                assert page_id // SLAB_UNITS == (page_id + size // UNIT - 1) // SLAB_UNITS
            takes, row = self.mirror.get(chunk, (-1, pages))
            assert row == pages or takes != table.takes[chunk], "a row changed, and its count of takes does not say so"
            self.mirror[chunk] = int(table.takes[chunk]), pages
        assert used.max() <= 1, "two pages overlap"
        assert used.sum() * UNIT == table.ledger.allocated_bytes
        for codec in CODECS:
            count = available(table, codec)
            assert count == available(self.counted, codec)
            assert self.fits([(codec, False)] * count) and not self.fits([(codec, False)] * (count + 1))
            assert count <= table.capacity - table.num_taken, "ids run out before bytes do"


TestTableMachine = TableMachine.TestCase
TestTableMachine.settings = examples(35, stateful_step_count=50)


def test_the_machine_s_sizes_do_make_pages_move() -> None:
    """What the state machine is for, once by hand: every second small chunk goes, and a large one needs the holes."""
    table = table_of(12, SMALL)
    small = table.take(16, SMALL)
    for chunk in small.tolist():
        write(table, chunk, 10 * chunk)
    assert available(table, SMALL) == 0
    table.free(small[::2])
    kept, takes = small[1::2], table.takes.copy()
    assert len(np.unique(table.ledger.slabs_of(table.ledger.allocated_ids()))) == table.ledger.num_slabs, (
        "no slab is empty"
    )
    # 48 pages are left, of 8 in a slab: six slabs, so the other six hold twelve large pages.
    assert available(table, OPEN) == 2 and fits(table, 0, 2) and not fits(table, 0, 3) and not fits(table, 1, 2)
    assert fits(table, -8, 4) and not fits(table, -8, 5), "as though all small chunks were given back"
    large = table.take(1, OPEN)
    assert table.num_moved_pages == 3 * 2, "of six pages a chunk, slabs hold 2, 4 and 6 that are left"
    moved = kept[table.takes[kept] != takes[kept]]
    assert 3 <= len(moved) < len(kept)
    assert len(table.take(1, OPEN)) == 1 and available(table, OPEN) == available(table, SMALL) == 0
    assert all(holds(table, chunk, 10 * chunk) for chunk in kept.tolist())
    table.check()
    table.free(np.concatenate((kept, large)))
    table.check()


def test_sidecars_move_with_their_chunks() -> None:
    table = table_of(8, SMALL, sidecar_units=7)
    taken = [table.take(1, SMALL, sidecar=True) for _ in range(6)]
    for chunk in np.concatenate(taken).tolist():
        write(table, chunk, 40 * chunk)
    first = np.concatenate(taken[::2])
    table.free(np.concatenate(taken[1::2]))
    before = table.sidecars[first].copy()
    # A sidecar in each of three slabs, room for two in each: one slab can be had, and small pages leave another.
    assert available(table, OPEN) == 1
    table.take(1, OPEN)
    assert (table.sidecars[first] != before).any() and table.num_moved_pages >= 1
    assert all(holds(table, chunk, 40 * chunk) for chunk in first.tolist())
    table.check()


def test_taking_what_has_room_as_it_lies_moves_nothing() -> None:
    table = table_of(15, SMALL)
    small = table.take(16, SMALL)
    table.free(small[::2])
    table.take(1, OPEN)
    assert table.num_moved_pages == 0, "three slabs were free"
    table.take(8, SMALL)
    assert table.num_moved_pages == 0 and available(table, SMALL) == 0


def test_without_a_codec_for_sealed_chunks_all_are_of_the_open_one() -> None:
    table = table_of(9)
    assert table.sealed_codec is table.open_codec and not table.encodes
    assert available(table, OPEN) == 3 and fits(table, 2, 1) and not fits(table, 2, 2) and fits(table, 0, 3)
    encoding = table_of(9, MIXED)
    assert encoding.sealed_codec is MIXED and encoding.encodes and fits(encoding, 2, 1) and fits(encoding, 1, 2)


def test_a_full_table_says_how_much_is_taken() -> None:
    table = table_of(12, SMALL, sidecar_units=16)
    table.take(2, OPEN)
    message = "3 chunks of open and a sidecar do not fit beside 12288 of 24576 bytes"
    with pytest.raises(CacheFullError, match=message):
        table.take(3, OPEN, sidecar=True)
    with pytest.raises(CacheFullError, match="9 chunks of small do not fit beside "):
        table.take(9, SMALL)


def test_a_sidecar_that_fits_no_slab_is_refused() -> None:
    with pytest.raises(ConfigError, match="a sidecar of 2176 bytes must fit a slab of 2048; raise cache.memory"):
        table_of(4, sidecar_units=17)
    table = table_of(4, sidecar_units=16)
    # Three slabs of pages, and a slab for the sidecar.
    assert table.sidecars[table.take(1, OPEN, sidecar=True)].tolist() == [3 * SLAB_UNITS]
    assert table_of(4).take(1, OPEN, sidecar=True).tolist() == [0], "a table without sinks gives none"


@pytest.mark.parametrize("units", [17, 0.5])
def test_a_page_that_fits_no_slab_is_refused(units: float) -> None:
    size = int(units * UNIT)
    odd = Sized("odd", 9, np.array([[UNIT, UNIT, UNIT], [UNIT, UNIT, size]], np.int32))
    with pytest.raises(ConfigError, match=f"a page of {size} bytes .* fit a slab of 2048; raise cache.memory"):
        ChunkTable(ledger_of(4), L, H, OPEN, odd, arena=Arena(UNIT))  # type: ignore[arg-type]


def test_a_page_that_no_chunk_holds_is_not_moved_unnoticed() -> None:
    table = table_of(4, SMALL)
    small = table.take(5, SMALL)
    foreign = table.ledger.take(np.array([2 * UNIT]))
    table.free(small[1:])
    with pytest.raises(AssertionError, match="not the 7 out"):
        table.check()
    with pytest.raises(AssertionError, match="belongs to no chunk"):
        table.take(1, OPEN)
    assert len(foreign) == 1


def test_bytes_of_chunks_and_pages() -> None:
    table = table_of(4, MIXED, SMALL)
    assert [table.chunk_bytes(codec) // UNIT for codec in CODECS] == [48, 16, 12]
    assert table.capacity == 4 * SLAB_UNITS // 12
    assert (table.page_sizes(MIXED)[1] // UNIT).tolist() == [5, 1, 3]
    assert table.page_sizes(OPEN)[1, 2] == 8 * UNIT


def test_every_chunk_may_have_several_rows() -> None:
    """Rows of sums are small, and rows may hold few pages: ids would run out if there were only as many as the smallest
    chunks.
    """
    ledger, sums = ledger_of(30), SumsCodec()
    table = ChunkTable(ledger, L, H, OPEN, SMALL, sums=sums, arena=Arena(ledger.num_bytes))  # type: ignore[arg-type]
    assert table.capacity == RETAINED_ROWS * table_of(30, SMALL).capacity == RETAINED_ROWS * 30 * SLAB_UNITS // 12
    assert table.chunk_bytes(sums) == L * H * 4 * PAGE_TOKENS
    chunks = table.take(10, SMALL)
    rows = table.take(20, sums)
    assert not set(chunks) & set(rows) and table.sums is sums is table.codecs[sums.kernel_id]
    assert (table.kinds[rows] == sums.kernel_id).all() and (table.sidecars[rows] == -1).all()
    assert table.num_taken == 30 and table.ledger.allocated_bytes == 10 * table.chunk_bytes(
        SMALL
    ) + 20 * table.chunk_bytes(sums)
    table.check()
    table.free(rows)
    table.check()


def test_ids_that_run_out_are_room_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.cache.counts.RETAINED_ROWS", 3)
    ledger, sums = ledger_of(30), SumsCodec()
    table = ChunkTable(ledger, L, H, OPEN, sums=sums, arena=Arena(ledger.num_bytes))  # type: ignore[arg-type]
    assert table.capacity == available(table, sums) == 30, "of 40 for which there are bytes"
    with pytest.raises(CacheFullError, match="31 chunks of sums do not fit beside 0 of 61440 bytes"):
        table.take(31, sums)
    assert len(table.take(30, sums)) == 30 and available(table, sums) == available(table, OPEN) == 0


def test_sums_move_with_their_rows() -> None:
    ledger, sums = ledger_of(12), SumsCodec()
    arena = Arena(ledger.num_bytes)
    table = ChunkTable(ledger, L, H, OPEN, sums=sums, arena=arena)  # type: ignore[arg-type]
    rows = table.take(12, sums)
    written = np.random.default_rng(0).random((L, H, len(rows) * PAGE_TOKENS), np.float32)
    table.store_sums(rows, written)
    assert np.array_equal(table.load_sums(rows), written)
    table.free(rows[::2])
    table.take(2, OPEN)
    assert table.num_moved_pages > 0
    kept = written.reshape(L, H, len(rows), PAGE_TOKENS)[:, :, 1::2].reshape(L, H, -1)
    assert np.array_equal(table.load_sums(rows[1::2]), kept)
    table.check()
