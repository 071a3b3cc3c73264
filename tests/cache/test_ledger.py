"""The ledger compared with a dictionary model, and the bytes of the pages it moves."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from quire.cache.arena import Arena
from quire.cache.ledger import UNIT, PageCounts, PageLedger, PageMove
from quire.engine.sizes import slab_bytes
from quire.errors import CacheFullError, ConfigError
from tests.effort import tries

SIZES = [UNIT, 3 * UNIT, 8 * UNIT]  # a slab of 16 units is not a whole number of the second
SLABS = 40


def by_class(ledger: PageLedger, needs: dict[int, int]) -> list[int]:
    """Pages by their size as pages by size class."""
    for page_bytes in needs:
        ledger.size_class(page_bytes)
    return [needs.get(page_bytes, 0) for page_bytes in ledger.page_sizes]


def of_size(ledger: PageLedger, page_bytes: int) -> list[int]:
    """The ids of the pages of a size that are out."""
    ids = ledger.allocated_ids()
    return ids[ledger.page_bytes(ids) == page_bytes].tolist()


def fits(ledger: PageLedger, needs: dict[int, int]) -> bool:
    return ledger.has_room(by_class(ledger, needs))


def available(ledger: PageLedger, page_bytes: int) -> int:
    """How many pages of a size `take` can give without moves."""
    ids = ledger.allocated_ids()
    others = np.unique(ledger.slabs_of(ids[ledger.page_bytes(ids) != page_bytes]))
    return (ledger.num_slabs - len(others)) * (ledger.slab_bytes // page_bytes) - ledger.out(page_bytes)


def moved(moves: list[PageMove]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """All ids before and after."""
    before, after = ([np.empty(0, np.int32), *(move[part] for move in moves)] for part in (1, 2))
    return np.concatenate(before), np.concatenate(after)


def take(ledger: PageLedger, count: int, page_bytes: int) -> NDArray[np.int32]:
    """Takes pages of one size."""
    ledger.size_class(page_bytes)
    return ledger.take(np.full(count, page_bytes))


@dataclass
class Page:
    """What a page must be: its size, the byte all of it is, and who has it."""

    size: int
    byte: int
    holders: int = 1
    holds: int = 0


@dataclass
class Model:
    """Pages of three sizes out of one arena: takes, shares, holds, moves, releases and gives what a random number says,
    beside a dictionary that knows what each page must be.
    """

    rng: np.random.Generator
    ledger: PageLedger = field(default_factory=lambda: PageLedger(SLABS * 16 * UNIT, 16 * UNIT))
    arena: Arena = field(default_factory=lambda: Arena(SLABS * 16 * UNIT))
    pages: dict[int, Page] = field(default_factory=dict)
    done: Counter[str] = field(default_factory=Counter)

    def some(self, size: int, count: int, *, held: bool = False) -> list[int]:
        """Some pages of a size that somebody holds, or under a hold."""
        found = [
            id
            for id, page in self.pages.items()
            if page.size == size and (page.holds if held else page.holders > page.holds)
        ]
        return sorted(self.rng.permutation(found)[:count].tolist())

    def step(self) -> None:
        """One operation."""
        size, count = int(self.rng.choice(SIZES)), int(self.rng.integers(1, 12))
        # As often as it grows it shrinks, about a full arena.
        what = self.rng.choice(
            ["take", "compact", "share", "hold", "release", "free"], p=[0.2, 0.15, 0.1, 0.1, 0.15, 0.3]
        )
        getattr(self, what)(size, count)
        self.done[what] += 1

    def take(self, size: int, count: int) -> None:
        count *= 3
        if count > available(self.ledger, size):
            with pytest.raises(CacheFullError):
                take(self.ledger, count, size)
            return
        ids = take(self.ledger, count, size)
        assert ids.dtype == np.int32 and len(set(ids.tolist())) == count and not set(ids.tolist()) & set(self.pages)
        images = self.rng.integers(0, 256, count, np.uint8)
        self.arena.store(ids, size, np.repeat(images[:, None], size, 1))
        self.pages |= {id: Page(size, int(image)) for id, image in zip(ids.tolist(), images, strict=True)}

    def compact(self, size: int, count: int) -> None:
        needs = {size: 4 * count}
        if not fits(self.ledger, needs):
            return
        moves = self.ledger.compact(by_class(self.ledger, needs))
        for move in moves:
            self.arena.copy(move.before, move.after, move.page_bytes)
        before, after = moved(moves)
        assert not any(self.pages[id].holds for id in before.tolist()), "a page under a hold was moved"
        self.done["moved"] += len(before)
        self.pages |= dict(zip(after.tolist(), [self.pages.pop(id) for id in before.tolist()], strict=True))
        assert available(self.ledger, size) >= 4 * count

    def share(self, size: int, count: int) -> None:
        ids = self.some(size, count)
        self.ledger.share(np.array(ids, np.int32))
        for id in ids:
            self.pages[id].holders += 1

    def hold(self, size: int, count: int) -> None:
        ids = self.some(size, count)
        self.ledger.hold(np.array(ids, np.int32))
        for id in ids:
            self.pages[id].holders += 1
            self.pages[id].holds += 1

    def release(self, size: int, count: int) -> None:
        ids = self.some(size, count, held=True)
        self.ledger.release(np.array(ids, np.int32))
        for id in ids:
            self.pages[id].holds -= 1
            self.let_go(id)

    def free(self, size: int, count: int) -> None:
        ids = self.some(size, count)
        self.ledger.free(np.array(ids, np.int32))
        for id in ids:
            self.let_go(id)

    def let_go(self, id: int) -> None:
        page = self.pages[id]
        assert (self.arena.load(np.array([id], np.int32), page.size) == page.byte).all(), "written over"
        page.holders -= 1
        if not page.holders:
            del self.pages[id]

    def check(self) -> None:
        """Ledger and dictionary agree."""
        self.ledger.check()
        assert self.ledger.allocated_bytes == sum(page.size for page in self.pages.values())
        for size in SIZES:
            out = sorted(id for id, page in self.pages.items() if page.size == size)
            assert of_size(self.ledger, size) == out and self.ledger.out(size) == len(out)
            ids = np.array(out, np.int32)
            assert self.ledger.holders(ids).tolist() == [self.pages[id].holders for id in out]
            assert self.ledger.holds(ids).tolist() == [self.pages[id].holds for id in out]


def test_pages_are_what_was_put_into_them_until_their_last_holder_is_gone(seed: int) -> None:
    """100,000 operations in a full run."""
    model = Model(np.random.default_rng(seed))
    for number in range(tries(20_000)):
        model.step()
        if number % 100 == 0:
            model.check()
    assert min(model.done.values()) > 100 and model.done["moved"] > 100, model.done


def test_a_page_under_a_hold_neither_moves_nor_becomes_free() -> None:
    ledger = PageLedger(4 * 16 * UNIT, 16 * UNIT)
    ids = take(ledger, 64, UNIT)
    kept = ids[[0, 20, 40, 60]]
    ledger.hold(kept[:2])
    ledger.free(ids)
    assert of_size(ledger, UNIT) == kept[:2].tolist(), "what is under way has no other holder"
    assert fits(ledger, {8 * UNIT: 4}) and not fits(ledger, {8 * UNIT: 5}), "two slabs of four are held"
    assert fits(ledger, {UNIT: 62}), "and have room for pages of their size"
    with pytest.raises(AssertionError, match="no other holder"):
        ledger.free(kept[:1])
    ledger.hold(kept[:1])
    ledger.release(kept[:2])
    assert of_size(ledger, UNIT) == kept[:1].tolist(), "one hold of two is left"
    ledger.release(kept[:1])
    assert ledger.allocated_bytes == 0 and fits(ledger, {8 * UNIT: 8})
    ledger.check()
    with pytest.raises(AssertionError, match="has no hold"):
        ledger.release(take(ledger, 1, UNIT))


def test_an_empty_slab_serves_another_page_size() -> None:
    ledger = PageLedger(4 * 16 * UNIT, 16 * UNIT)
    small = take(ledger, 64, SIZES[0])
    with pytest.raises(CacheFullError, match="they take 1 slabs of 2048 bytes, and 0 of 4 are free"):
        take(ledger, 1, SIZES[2])
    ledger.free(small)
    assert available(ledger, SIZES[2]) == 8
    assert len(take(ledger, 8, SIZES[2])) == 8
    ledger.check()


def test_pages_gather_in_the_lowest_slabs() -> None:
    ledger = PageLedger(6 * 16 * UNIT, 16 * UNIT)
    low = take(ledger, 16, UNIT)
    other = take(ledger, 2, SIZES[2])
    high = take(ledger, 32, UNIT)
    assert np.unique(ledger.slabs_of(high)).tolist() == [2, 3]
    ledger.free(high[[3, 20]])
    ledger.free(low[7:9])
    # What is free in slab 0, then in 2, then in 3, then the lowest free slab.
    assert ledger.slabs_of(take(ledger, 5, UNIT)).tolist() == [0, 0, 2, 3, 4]
    ledger.free(other)
    ledger.free(low[9:10])
    # 16 are free; the slab that the other two need lies before the last.
    assert ledger.slabs_of(take(ledger, 18, UNIT)).tolist() == [0] + [1] * 16 + [4]
    ledger.check()


def test_what_fits_is_counted_in_whole_slabs_of_each_size() -> None:
    ledger = PageLedger(4 * 16 * UNIT, 16 * UNIT)
    assert fits(ledger, {}) and fits(ledger, {3 * UNIT: 20}) and not fits(ledger, {3 * UNIT: 21})
    assert fits(ledger, {UNIT: 17, 3 * UNIT: 5, 8 * UNIT: 2}), "2 + 1 + 1 slabs"
    assert not fits(ledger, {UNIT: 17, 3 * UNIT: 5, 8 * UNIT: 3})
    ids = take(ledger, 48, UNIT)
    ledger.free(ids[1:47])
    # Two pages in two slabs count as one.
    assert fits(ledger, {8 * UNIT: 6}) and not fits(ledger, {8 * UNIT: 7}) and available(ledger, 8 * UNIT) == 4


def test_sparse_slabs_are_emptied_into_others_of_their_size() -> None:
    ledger, arena = PageLedger(4 * 16 * UNIT, 16 * UNIT), Arena(4 * 16 * UNIT)
    ids = take(ledger, 64, UNIT)
    kept = ids[[0, 1, 2, 20, 33, 34, 48, 63]]
    images = torch.arange(8, dtype=torch.uint8)[:, None].expand(-1, UNIT)
    arena.store(kept, UNIT, images)
    ledger.free(np.setdiff1d(ids, kept))
    before, after = moved(ledger.compact(by_class(ledger, {8 * UNIT: 4})))
    arena.copy(before, after, UNIT)
    # The one page of slab 1 first, then the two of a slab further on, here of the last.
    assert sorted(before.tolist()) == [20, 48, 63]
    ledger.check()
    where = dict(zip(before.tolist(), after.tolist(), strict=True))
    now = np.array([where.get(page, page) for page in kept.tolist()], np.int32)
    assert np.sort(now).tolist() == of_size(ledger, UNIT)
    assert torch.equal(arena.load(now, UNIT), images)
    assert len(take(ledger, 4, 8 * UNIT)) == 4
    assert ledger.compact(by_class(ledger, {UNIT: 8})) == []


def test_the_slabs_with_the_fewest_bytes_out_are_emptied_of_whatever_size() -> None:
    ledger = PageLedger(6 * 16 * UNIT, 16 * UNIT)
    threes = take(ledger, 15, 3 * UNIT)
    ledger.free(threes[[0, 1, 5, 6, 7, 10, 11]])
    fives = take(ledger, 9, 5 * UNIT)
    ledger.free(fives[[0, 4, 5, 7]])
    # By slab, in units: 9, 6, 9 of three, then 10, 5, 10 of five.
    before, _ = moved(ledger.compact(by_class(ledger, {8 * UNIT: 2})))
    assert ledger.slabs_of(before).tolist() == [4]
    take(ledger, 2, 8 * UNIT)
    before, _ = moved(ledger.compact(by_class(ledger, {8 * UNIT: 2})))
    assert ledger.slabs_of(before).tolist() == [1, 1]
    ledger.check()


def test_the_last_slab_of_a_size_is_left_to_it() -> None:
    ledger = PageLedger(4 * 16 * UNIT, 16 * UNIT)
    for page_bytes, count in ((UNIT, 1), (4 * UNIT, 2)):
        ids = take(ledger, 2 * 16 * UNIT // page_bytes, page_bytes)
        ledger.free(ids[count:-count])
    before, _ = moved(ledger.compact(by_class(ledger, {8 * UNIT: 4})))
    assert sorted(ledger.slabs_of(before).tolist()) == [1, 3, 3], "though both slabs of the first size hold less"
    assert len(take(ledger, 4, 8 * UNIT)) == 4 and ledger.out(UNIT) == 2
    ledger.check()


def test_no_slab_is_emptied_that_its_own_size_needs() -> None:
    ledger = PageLedger(6 * 16 * UNIT, 16 * UNIT)
    alone = take(ledger, 1, UNIT)
    growing = take(ledger, 16, 2 * UNIT)
    ledger.free(growing[1:-1])
    halves = take(ledger, 12, 4 * UNIT)
    ledger.free(halves[::2])
    # Slabs of 1, of 2 and 2, and of 8, 8 and 8 units: the last size alone can spare one.
    needs = {2 * UNIT: 16}
    assert fits(ledger, needs)
    before, _ = moved(ledger.compact(by_class(ledger, needs)))
    assert ledger.slabs_of(before).tolist() == [5, 5]
    assert len(take(ledger, 16, 2 * UNIT)) == 16 and of_size(ledger, UNIT) == alone.tolist()
    ledger.check()


def test_slabs_are_whole_open_pages_and_a_small_share_of_the_arena() -> None:
    for page_bytes in (UNIT, 1024, 9 * UNIT, 16 << 10, 40 << 10):
        for memory in (200 * page_bytes, 100 << 20, 1 << 30, 80 << 30):
            slab = slab_bytes(page_bytes, memory)
            assert slab % page_bytes == 0
            assert slab == page_bytes or slab <= min(1 << 20, memory // 128)
            assert slab + page_bytes > min(1 << 20, memory // 128), "no smaller than it must be"
    assert slab_bytes(16 << 10, 1 << 30, largest=1_500_032) == 92 * (16 << 10), "the largest page fits"
    assert slab_bytes(16 << 10, 1 << 30, largest=1 << 20) == 1 << 20


def test_giving_a_page_back_twice_is_caught() -> None:
    ledger = PageLedger(2 * 16 * UNIT, 16 * UNIT)
    ids = take(ledger, 3, UNIT)
    with pytest.raises(AssertionError, match="twice"):
        ledger.free(ids[[0, 1, 0]])
    ledger.free(ids[:1])
    with pytest.raises(AssertionError, match="twice"):
        ledger.free(ids[:1])
    other = take(ledger, 1, 3 * UNIT)
    with pytest.raises(AssertionError, match="has this id"):
        ledger.free(other + 1)
    ledger.check()


def test_an_arena_too_small_for_a_page_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cache\.memory"):
        PageLedger(0)
    ledger = PageLedger(16 * UNIT, 16 * UNIT)
    for page_bytes in (17 * UNIT, 100, 0):
        for ask in (lambda size: take(ledger, 1, size), lambda size: fits(ledger, {size: 1}), ledger.out):
            with pytest.raises(ConfigError, match=f"a page of {page_bytes} bytes .* cache.memory"):
                ask(page_bytes)


def test_taking_thousands_of_pages_costs_no_loop_over_them() -> None:
    ledger = PageLedger(64 << 20)
    ids = take(ledger, 90 * 500, UNIT)
    assert ids.dtype == np.int32
    assert ledger.allocated_bytes == 90 * 500 * UNIT
    ledger.free(ids)
    ledger.check()


def test_a_page_is_free_when_its_last_holder_gives_it_back() -> None:
    ledger = PageLedger(64 * UNIT, 8 * UNIT)
    ids = take(ledger, 5, 2 * UNIT)
    ledger.share(ids[:3])
    ledger.share(ids[:1])
    assert ledger.holders(ids).tolist() == [3, 2, 2, 1, 1]
    assert ledger.allocated_bytes == 5 * 2 * UNIT, "what is shared counts once"
    ledger.free(ids)
    assert ledger.holders(ids[:3]).tolist() == [2, 1, 1] and ledger.allocated_bytes == 3 * 2 * UNIT
    assert not np.isin(take(ledger, 2, 2 * UNIT), ids[:3]).any()
    ledger.free(ids[:3])
    ledger.check()
    assert ledger.holders(ids[:3]).tolist() == [1, 0, 0]
    with pytest.raises(AssertionError, match="free page"):
        ledger.share(ids[1:2])
    with pytest.raises(AssertionError, match="twice"):
        ledger.free(ids[1:2])


def test_holders_move_with_their_page() -> None:
    ledger = PageLedger(4 * 8 * UNIT, 8 * UNIT)
    ids = take(ledger, 4 * 8, UNIT)
    kept = ids[[0, 9, 18, 27]]
    ledger.share(kept[2:])
    ledger.free(np.setdiff1d(ids, kept))
    before, after = moved(ledger.compact(by_class(ledger, {4 * UNIT: 6})))
    now = kept.copy()
    for old, new in zip(before, after, strict=True):
        now[kept == old] = new
    assert len(before) and ledger.holders(now).tolist() == [1, 1, 2, 2]
    ledger.free(now)
    ledger.free(now[2:])
    ledger.check()
    assert ledger.allocated_bytes == 0


@given(
    st.lists(st.tuples(st.integers(1, 7), st.integers(0, 40), st.integers(0, 3)), min_size=1, max_size=3),
    st.integers(1, 6),
    st.integers(0, 30),
)
def test_a_shortage_never_exceeds_what_is_lacking(sizes: list[tuple[int, int, int]], num_slabs: int, need: int) -> None:
    """Eviction by it never drops a chunk too many; for one size it is exact."""
    slab_bytes = 128 * 420
    counts = PageCounts(num_slabs * slab_bytes, slab_bytes)
    for per_slab in {per_slab for per_slab, _, _ in sizes}:
        counts.size_class(slab_bytes // per_slab)
    out, each = ([0] * len(counts.page_sizes) for _ in range(2))
    for per_slab, pages, freed in sizes:
        out[counts.size_class(slab_bytes // per_slab)] += pages
        each[counts.size_class(slab_bytes // per_slab)] += freed
    each = [freed or 1 for freed in each]
    needs = [pages + need for pages in out]
    found = counts.shortage(needs, each)
    packed = sum(pages.slabs_for(pages_needed) for pages, pages_needed in zip(counts._classes, needs, strict=True))
    assert counts.has_room(needs) == (packed <= counts.num_slabs)
    least = next(n for n in range(200) if counts.has_room([a - n * b for a, b in zip(needs, each, strict=True)]))
    assert found <= least
    if len(each) == 1:
        assert max(0, found) == least
