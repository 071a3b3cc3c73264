"""The page pool against a dictionary model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from quire.cache.page import UNIT, PagePool
from quire.errors import CacheFullError, ConfigError


@dataclass(frozen=True)
class Pages:
    page_bytes: int


SIZES = [Pages(UNIT), Pages(3 * UNIT), Pages(8 * UNIT)]


class PoolMachine(RuleBasedStateMachine):
    """Pages of three sizes out of one arena; every page out carries its own number, and keeps it."""

    taken = Bundle("taken")

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(40 * 16 * UNIT, slab_bytes=16 * UNIT)
        self.content: dict[int, tuple[Pages, int]] = {}
        self.number = 0

    @rule(target=taken, count=st.integers(0, 40), codec=st.sampled_from(SIZES))
    def take(self, count: int, codec: Pages) -> tuple[Pages, tuple[int, ...]]:
        available = self.pool.available(codec)
        if count > available:
            with pytest.raises(CacheFullError):
                self.pool.take(count, codec)
            return codec, ()
        ids = self.pool.take(count, codec)
        assert len(set(ids.tolist())) == count
        for page_id in ids.tolist():
            assert page_id not in self.content
            self.number += 1
            self.content[page_id] = codec, self.number
            image = torch.full((1, codec.page_bytes), self.number % 251, dtype=torch.uint8)
            self.pool.store(np.array([page_id], np.int32), codec, image)
        return codec, tuple(ids.tolist())

    @rule(pages=taken)
    def give(self, pages: tuple[Pages, tuple[int, ...]]) -> None:
        codec, ids = pages
        alive = [page_id for page_id in ids if self.content.get(page_id, (None,))[0] is codec]
        images = self.pool.load(np.array(alive, np.int32), codec)
        for page_id, image in zip(alive, images, strict=True):
            assert (image == self.content.pop(page_id)[1] % 251).all(), "another page was written over this one"
        self.pool.give(np.array(alive, np.int32), codec)

    @invariant()
    def nothing_is_lost(self) -> None:
        self.pool.check()
        assert self.pool.bytes_out == sum(codec.page_bytes for codec, _ in self.content.values())


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def test_an_empty_slab_serves_another_page_size() -> None:
    pool = PagePool(4 * 16 * UNIT, slab_bytes=16 * UNIT)
    small = pool.take(64, SIZES[0])
    with pytest.raises(CacheFullError):
        pool.take(1, SIZES[2])
    pool.give(small, SIZES[0])
    assert len(pool.take(8, SIZES[2])) == 8
    pool.check()


def test_giving_a_page_back_twice_is_caught() -> None:
    pool = PagePool(16 * UNIT, slab_bytes=16 * UNIT)
    ids = pool.take(1, SIZES[0])
    pool.give(ids, SIZES[0])
    with pytest.raises(AssertionError, match="twice"):
        pool.give(ids, SIZES[0])


def test_an_arena_too_small_for_a_page_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cache\.memory"):
        PagePool(0)
    with pytest.raises(ConfigError, match=r"cache\.memory"):
        PagePool(16 * UNIT, slab_bytes=16 * UNIT).take(1, Pages(17 * UNIT))


def test_taking_thousands_of_pages_costs_no_loop_over_them() -> None:
    pool = PagePool(64 << 20)
    ids = pool.take(90 * 500, SIZES[0])
    assert ids.dtype == np.int32
    assert pool.bytes_out == 90 * 500 * UNIT
    pool.give(ids, SIZES[0])
    pool.check()
