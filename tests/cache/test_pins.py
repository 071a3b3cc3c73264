"""Pins: what they hold, how they end, and what they give way to."""

from __future__ import annotations

import pytest

from quire.cache.keys import ChunkKeys
from quire.cache.path import Path
from tests.cache.test_tree import Holder, chunk, make_manager, run_prompt


def test_what_is_pinned_stays_until_its_time_is_over() -> None:
    manager = make_manager(6)
    holder = Holder(chunk(1) + chunk(2) + chunk(3, 10))
    assert run_prompt(manager, holder)
    manager.tick(100.0)
    assert manager.pins.add(holder, 138, 50.0)
    manager.release(holder)
    manager.check()
    assert manager.tree is not None and (manager.tree.num_pinned, manager.tree.num_idle) == (2, 0)
    for letter in (5, 6):
        other = Holder(chunk(letter) * 3 + [letter])
        assert run_prompt(manager, other)
        manager.release(other)
    assert manager.tree.extend(Path(), holder.keys, 2) == 2, "other requests dropped a pinned prefix"
    manager.tick(149.9)
    assert manager.tree.num_pinned == 2
    manager.tick(150.0)
    manager.check()
    assert manager.tree.num_pinned == 0


def test_a_pin_holds_its_prefix_and_what_leads_to_it_but_nothing_that_follows() -> None:
    manager = make_manager(20)
    holder = Holder(chunk(1) + chunk(2) + chunk(3) + [4])
    assert run_prompt(manager, holder)
    assert manager.pins.add(holder, 64 + 40, 10.0), "the whole chunks of 104 tokens: one"
    manager.release(holder)
    assert manager.tree is not None and manager.tree.num_pinned == 1
    manager.eviction.evict(20)
    assert manager.tree.num_chunks == 1
    manager.check()
    # The other way round: a longer pin below a shorter one outlives it with all that leads to it.
    assert run_prompt(manager, holder)
    assert manager.pins.add(holder, 192, 100.0)
    manager.release(holder)
    manager.tick(11.0)
    assert manager.tree.num_pinned == 3
    manager.tick(101.0)
    assert manager.tree.num_pinned == 0
    manager.check()


def test_a_pin_is_moved_by_a_later_one_and_ended_by_name() -> None:
    manager = make_manager(20)
    holder = Holder(chunk(1) + chunk(2) + [3])
    assert run_prompt(manager, holder)
    assert manager.pins.add(holder, 128, 100.0) and manager.pins.add(holder, 128, 10.0)
    manager.tick(50.0)
    assert manager.tree is not None and manager.tree.num_pinned == 2, "a shorter pin ended a longer one"
    assert manager.pins.end(ChunkKeys("model", chunk(1))) == manager.pins.end(ChunkKeys("other", holder.token_ids)) == 0
    assert manager.pins.end(ChunkKeys("model", holder.token_ids + chunk(8))) == 1, "a longer prompt begins with it"
    assert manager.pins.end(ChunkKeys("model", holder.token_ids)) == 0
    assert manager.tree.num_pinned == 0
    manager.check()


def test_pins_take_half_of_the_arena_at_most_and_the_same_prefix_counts_once() -> None:
    manager = make_manager(8)
    first = Holder(chunk(1) + chunk(2) + chunk(3) + [4])
    assert run_prompt(manager, first) and manager.pins.add(first, 192, 10.0)
    manager.release(first)
    second = Holder(chunk(1) + chunk(2) + chunk(9) + [4])
    assert run_prompt(manager, second) and manager.pins.add(second, 192, 10.0), "two of its chunks are pinned already"
    manager.release(second)
    third = Holder([*chunk(7), 4])
    assert run_prompt(manager, third)
    assert not manager.pins.has_room(third.keys, 1) and not manager.pins.add(third, 65, 10.0)
    manager.check()


def test_pins_give_way_to_a_request_that_would_wait_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    manager = make_manager(6)
    holder = Holder(chunk(1) + chunk(2) + chunk(3))
    assert run_prompt(manager, holder) and manager.pins.add(holder, 192, float("inf"))
    waiting = Holder(chunk(8) * 4 + [1])
    assert not manager.admit(waiting), "while somebody runs it waits"
    manager.release(holder)
    assert manager.admit(waiting)
    assert "the pin of a prefix of 192 tokens is given up: a request of 257 tokens" in caplog.text
    manager.check()


def test_a_protected_pin_is_neither_ended_nor_given_up() -> None:
    manager = make_manager(6)
    tree = manager.tree
    assert tree is not None
    holder = Holder(chunk(1) + chunk(2) + [3])
    assert run_prompt(manager, holder) and manager.pins.add(holder, 128, 5.0)
    manager.pins.protect(ChunkKeys("model", chunk(1) + chunk(2)))
    other = Holder([*chunk(1), 9])
    assert run_prompt(manager, other) and manager.pins.add(other, 64, 5.0)
    manager.release(holder)
    manager.release(other)
    assert manager.pins.num_protected == (2, 1)
    assert manager.pins.end(ChunkKeys("model", holder.token_ids)) == 1, "the shorter one alone"
    assert not manager.admit(Holder(chunk(8) * 4 + [1]))
    manager.tick(1e9)
    assert tree.num_pinned == 2
    assert tree.extend(Path(), holder.keys, 2) == 2
    manager.check()


def test_who_pins_a_protected_prefix_again_can_neither_end_it_nor_have_it_given_up() -> None:
    manager = make_manager(6)
    tree = manager.tree
    assert tree is not None
    holder = Holder([*chunk(1), *chunk(2), 3])
    assert run_prompt(manager, holder) and manager.pins.add(holder, 128, 5.0)
    manager.pins.protect(ChunkKeys("model", chunk(1) + chunk(2)))
    assert manager.pins.add(holder, 128, 9.0), "a request with the same beginning asks for it, too"
    manager.release(holder)
    assert manager.pins.end(ChunkKeys("model", holder.token_ids)) == 0 and manager.pins.end_oldest() is None
    assert manager.pins.num_protected == (2, 1) and tree.num_pinned == 2
    manager.check()


def test_to_end_a_pin_is_a_use() -> None:
    manager = make_manager(6)
    manager.tree.lifetime = 10.0
    holder = Holder([*chunk(1), 3])
    assert run_prompt(manager, holder) and manager.pins.add(holder, 64, float("inf"))
    manager.release(holder)
    manager.tick(50.0)
    assert manager.pins.end(ChunkKeys("model", holder.token_ids)) == 1
    manager.tick(59.0)
    again = Holder([*chunk(1), 3])
    assert manager.admit(again) and again.path.num_tokens == 64


def test_a_pin_that_was_ended_is_no_hindrance_to_older_ones() -> None:
    """What it kept is the youngest by now, in the order of eviction and of lifetimes alike."""
    manager = make_manager(12)
    tree = manager.tree
    tree.lifetime = 10.0
    pinned, old = Holder([*chunk(1), *chunk(2), 3]), Holder([*chunk(4), 3])
    for now, holder in ((0.0, pinned), (5.0, old)):
        manager.tick(now)
        assert run_prompt(manager, holder)
        if holder is pinned:
            assert manager.pins.add(holder, 128, float("inf"))
        manager.release(holder)
    manager.tick(14.0)
    assert manager.pins.end(ChunkKeys("model", pinned.token_ids)) == 1
    manager.check()
    manager.tick(15.0)
    assert [segment.tokens[0] for segment in tree.segments()] == [1], "the older one is gone"
    assert tree.num_evicted == 0, "of lack of memory nothing was dropped"
    manager.tree.lifetime = None
    assert run_prompt(manager, old)
    manager.release(old)
    manager.eviction.evict(2)
    assert [segment.tokens[0] for segment in tree.segments()] == [4] and tree.num_evicted == 2
