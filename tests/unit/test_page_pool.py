"""The page pool against a dictionary model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from quire.cache.page import UNIT, PagePool
from quire.engine.build import slab_bytes
from quire.errors import CacheFullError, ConfigError
from tests.effort import examples

SIZES = [UNIT, 3 * UNIT, 8 * UNIT]  # a slab of 16 units is not a whole number of the second


class PoolMachine(RuleBasedStateMachine):
    """Pages of three sizes out of one arena; every page out carries its own number, and keeps it."""

    taken = Bundle("taken")

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(40 * 16 * UNIT, slab_bytes=16 * UNIT)
        self.content: dict[int, tuple[int, int]] = {}
        self.number = 0

    @rule(target=taken, count=st.integers(0, 40), page_bytes=st.sampled_from(SIZES))
    def take(self, count: int, page_bytes: int) -> tuple[int, tuple[int, ...]]:
        available = self.pool.available(page_bytes)
        if count > available:
            with pytest.raises(CacheFullError):
                self.pool.take(count, page_bytes)
            return page_bytes, ()
        ids = self.pool.take(count, page_bytes)
        assert ids.dtype == np.int32 and len(set(ids.tolist())) == count
        images = torch.empty(count, page_bytes, dtype=torch.uint8)
        for page_id, image in zip(ids.tolist(), images, strict=True):
            assert page_id not in self.content
            self.number += 1
            self.content[page_id] = page_bytes, self.number
            image.fill_(self.number % 251)
        self.pool.store(ids, page_bytes, images)
        return page_bytes, tuple(ids.tolist())

    @rule(pages=taken)
    def give(self, pages: tuple[int, tuple[int, ...]]) -> None:
        page_bytes, ids = pages
        alive = [page_id for page_id in ids if self.content.get(page_id, (0,))[0] == page_bytes]
        images = self.pool.load(np.array(alive, np.int32), page_bytes)
        for page_id, image in zip(alive, images, strict=True):
            assert (image == self.content.pop(page_id)[1] % 251).all(), "another page was written over this one"
        self.pool.give(np.array(alive, np.int32), page_bytes)

    @invariant()
    def nothing_is_lost(self) -> None:
        self.pool.check()
        assert self.pool.bytes_out == sum(page_bytes for page_bytes, _ in self.content.values())
        for page_bytes in SIZES:
            out = sorted(page_id for page_id, (size, _) in self.content.items() if size == page_bytes)
            assert self.pool.ids_out(page_bytes).tolist() == out and self.pool.out(page_bytes) == len(out)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = examples(40, stateful_step_count=40)


def test_an_empty_slab_serves_another_page_size() -> None:
    pool = PagePool(4 * 16 * UNIT, slab_bytes=16 * UNIT)
    small = pool.take(64, SIZES[0])
    with pytest.raises(CacheFullError, match="1 pages of 1024 bytes do not fit: 0 of that size are free in 8192 bytes"):
        pool.take(1, SIZES[2])
    pool.give(small, SIZES[0])
    assert pool.available(SIZES[2]) == 8
    assert len(pool.take(8, SIZES[2])) == 8
    pool.check()


def test_pages_gather_in_the_lowest_slabs() -> None:
    pool = PagePool(6 * 16 * UNIT, slab_bytes=16 * UNIT)
    low = pool.take(16, UNIT)
    other = pool.take(2, SIZES[2])
    high = pool.take(32, UNIT)
    assert np.unique(pool.slabs_of(high)).tolist() == [2, 3]
    pool.give(high[[3, 20]], UNIT)
    pool.give(low[7:9], UNIT)
    # What is free in slab 0, then in 2, then in 3, then the lowest free slab.
    assert pool.slabs_of(pool.take(5, UNIT)).tolist() == [0, 0, 2, 3, 4]
    pool.give(other, SIZES[2])
    pool.give(low[9:10], UNIT)
    # 16 are free; the slab that the other two need lies before the last.
    assert pool.slabs_of(pool.take(18, UNIT)).tolist() == [0] + [1] * 16 + [4]
    pool.check()


def test_what_fits_is_counted_in_whole_slabs_of_each_size() -> None:
    pool = PagePool(4 * 16 * UNIT, slab_bytes=16 * UNIT)
    assert pool.fits({}) and pool.fits({3 * UNIT: 20}) and not pool.fits({3 * UNIT: 21})
    assert pool.fits({UNIT: 17, 3 * UNIT: 5, 8 * UNIT: 2}), "2 + 1 + 1 slabs"
    assert not pool.fits({UNIT: 17, 3 * UNIT: 5, 8 * UNIT: 3})
    ids = pool.take(48, UNIT)
    pool.give(ids[1:47], UNIT)
    # Two pages in two slabs count as one.
    assert pool.fits({8 * UNIT: 6}) and not pool.fits({8 * UNIT: 7}) and pool.available(8 * UNIT) == 4


def test_sparse_slabs_are_emptied_into_others_of_their_size() -> None:
    pool = PagePool(4 * 16 * UNIT, slab_bytes=16 * UNIT)
    ids = pool.take(64, UNIT)
    kept = ids[[0, 1, 2, 20, 33, 34, 48, 63]]
    images = torch.arange(8, dtype=torch.uint8)[:, None].expand(-1, UNIT)
    pool.store(kept, UNIT, images)
    pool.give(np.setdiff1d(ids, kept), UNIT)
    before, after = pool.make_room({8 * UNIT: 4})
    # The one page of slab 1 first, then the two of a slab further on, here of the last.
    assert sorted(before.tolist()) == [20, 48, 63]
    pool.check()
    where = dict(zip(before.tolist(), after.tolist(), strict=True))
    now = np.array([where.get(page, page) for page in kept.tolist()], np.int32)
    assert np.sort(now).tolist() == pool.ids_out(UNIT).tolist()
    assert torch.equal(pool.load(now, UNIT), images)
    assert len(pool.take(4, 8 * UNIT)) == 4
    assert all(len(moved) == 0 for moved in pool.make_room({UNIT: 8}))


def test_the_slabs_with_the_fewest_bytes_out_are_emptied_of_whatever_size() -> None:
    pool = PagePool(6 * 16 * UNIT, slab_bytes=16 * UNIT)
    threes = pool.take(15, 3 * UNIT)
    pool.give(threes[[0, 1, 5, 6, 7, 10, 11]], 3 * UNIT)
    fives = pool.take(9, 5 * UNIT)
    pool.give(fives[[0, 4, 5, 7]], 5 * UNIT)
    # By slab, in units: 9, 6, 9 of three, then 10, 5, 10 of five.
    before, _ = pool.make_room({8 * UNIT: 2})
    assert pool.slabs_of(before).tolist() == [4]
    pool.take(2, 8 * UNIT)
    before, _ = pool.make_room({8 * UNIT: 2})
    assert pool.slabs_of(before).tolist() == [1, 1]
    pool.check()


def test_the_last_slab_of_a_size_is_left_to_it() -> None:
    pool = PagePool(4 * 16 * UNIT, slab_bytes=16 * UNIT)
    for page_bytes, count in ((UNIT, 1), (4 * UNIT, 2)):
        ids = pool.take(2 * 16 * UNIT // page_bytes, page_bytes)
        pool.give(ids[count:-count], page_bytes)
    before, _ = pool.make_room({8 * UNIT: 4})
    assert sorted(pool.slabs_of(before).tolist()) == [1, 3, 3], "though both slabs of the first size hold less"
    assert len(pool.take(4, 8 * UNIT)) == 4 and pool.out(UNIT) == 2
    pool.check()


def test_no_slab_is_emptied_that_its_own_size_needs() -> None:
    pool = PagePool(6 * 16 * UNIT, slab_bytes=16 * UNIT)
    alone = pool.take(1, UNIT)
    growing = pool.take(16, 2 * UNIT)
    pool.give(growing[1:-1], 2 * UNIT)
    halves = pool.take(12, 4 * UNIT)
    pool.give(halves[::2], 4 * UNIT)
    # Slabs of 1, of 2 and 2, and of 8, 8 and 8 units: the last size alone can spare one.
    needs = {2 * UNIT: 16}
    assert pool.fits(needs)
    before, _ = pool.make_room(needs)
    assert pool.slabs_of(before).tolist() == [5, 5]
    assert len(pool.take(16, 2 * UNIT)) == 16 and pool.ids_out(UNIT).tolist() == alone.tolist()
    pool.check()


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
    pool = PagePool(2 * 16 * UNIT, slab_bytes=16 * UNIT)
    ids = pool.take(3, UNIT)
    with pytest.raises(AssertionError, match="twice"):
        pool.give(ids[[0, 1, 0]], UNIT)
    pool.give(ids[:1], UNIT)
    with pytest.raises(AssertionError, match="twice"):
        pool.give(ids[:1], UNIT)
    pool.take(1, 3 * UNIT)
    with pytest.raises(AssertionError, match="another size"):
        pool.give(ids[1:2], 3 * UNIT)
    pool.check()


def test_an_arena_too_small_for_a_page_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cache\.memory"):
        PagePool(0)
    pool = PagePool(16 * UNIT, slab_bytes=16 * UNIT)
    for page_bytes in (17 * UNIT, 100, 0):
        for ask in (lambda size: pool.take(1, size), lambda size: pool.fits({size: 1}), pool.available):
            with pytest.raises(ConfigError, match=f"a page of {page_bytes} bytes .* cache.memory"):
                ask(page_bytes)


def test_taking_thousands_of_pages_costs_no_loop_over_them() -> None:
    pool = PagePool(64 << 20)
    ids = pool.take(90 * 500, UNIT)
    assert ids.dtype == np.int32
    assert pool.bytes_out == 90 * 500 * UNIT
    pool.give(ids, UNIT)
    pool.check()


def test_a_page_is_free_when_its_last_holder_gives_it_back() -> None:
    pool = PagePool(64 * UNIT, slab_bytes=8 * UNIT)
    ids = pool.take(5, 2 * UNIT)
    pool.share(ids[:3], 2 * UNIT)
    pool.share(ids[:1], 2 * UNIT)
    assert pool.holders(ids, 2 * UNIT).tolist() == [3, 2, 2, 1, 1]
    assert pool.bytes_out == 5 * 2 * UNIT, "what is shared counts once"
    pool.give(ids, 2 * UNIT)
    assert pool.holders(ids[:3], 2 * UNIT).tolist() == [2, 1, 1] and pool.bytes_out == 3 * 2 * UNIT
    assert not np.isin(pool.take(2, 2 * UNIT), ids[:3]).any()
    pool.give(ids[:3], 2 * UNIT)
    pool.check()
    assert pool.holders(ids[:3], 2 * UNIT).tolist() == [1, 0, 0]
    with pytest.raises(AssertionError, match="free page"):
        pool.share(ids[1:2], 2 * UNIT)
    with pytest.raises(AssertionError, match="twice"):
        pool.give(ids[1:2], 2 * UNIT)


def test_holders_move_with_their_page() -> None:
    pool = PagePool(4 * 8 * UNIT, slab_bytes=8 * UNIT)
    ids = pool.take(4 * 8, UNIT)
    kept = ids[[0, 9, 18, 27]]
    pool.share(kept[2:], UNIT)
    pool.give(np.setdiff1d(ids, kept), UNIT)
    before, after = pool.make_room({4 * UNIT: 6})
    now = kept.copy()
    for old, new in zip(before, after, strict=True):
        now[kept == old] = new
    assert len(before) and pool.holders(now, UNIT).tolist() == [1, 1, 2, 2]
    pool.give(now, UNIT)
    pool.give(now[2:], UNIT)
    pool.check()
    assert pool.bytes_out == 0
