"""The order of eviction: by last use, priority and lifetime."""

from __future__ import annotations

import itertools

import pytest

from quire.cache.keys import ChunkKeys
from quire.cache.path import Path
from tests.cache.test_tree import Holder, chunk, make_manager, run_prompt


def test_what_nobody_reads_stays_until_room_is_needed_and_the_oldest_goes_first() -> None:
    manager = make_manager(6)
    for letter in (1, 2):
        holder = Holder(chunk(letter) + chunk(letter + 10))
        assert run_prompt(manager, holder)
        manager.release(holder)
    assert manager.stats()["bytes_used"] == 0 and manager.tree is not None and manager.tree.num_idle == 4
    again = Holder(chunk(1) + chunk(11) + [7])
    assert run_prompt(manager, again)
    assert again.path.num_shared == 2
    manager.release(again)
    # Six chunks in all: the three of a newcomer need one that is cached, and the second prompt is the one unused for
    # longest.
    assert run_prompt(manager, Holder(chunk(5) + chunk(6) + chunk(7, 5)))
    manager.check()
    found = {
        letter: manager.tree.extend(Path(), ChunkKeys("model", chunk(letter) + chunk(letter + 10) + [7]), 2)
        for letter in (1, 2)
    }
    assert found == {1: 2, 2: 1}, "leaves go from their end"


def test_what_was_read_until_last_is_evicted_last_whoever_began_first() -> None:
    manager = make_manager(4)
    first, second = Holder(chunk(1)), Holder(chunk(2))
    assert run_prompt(manager, first) and run_prompt(manager, second)
    manager.release(second)
    manager.release(first)
    assert run_prompt(manager, Holder(chunk(5) + chunk(6) + [7])), "three chunks, and two are free"
    assert manager.tree is not None
    assert [[*manager.tree.walk(ChunkKeys("model", chunk(letter)), 1)] == [] for letter in (1, 2)] == [False, True]


def test_locked_paths_are_never_evicted() -> None:
    manager = make_manager(4)
    holder = Holder(chunk(1) + chunk(2) + [3])
    assert run_prompt(manager, holder)
    assert not manager.admit(Holder(chunk(8) + chunk(9)))
    manager.check()
    manager.release(holder)
    assert run_prompt(manager, Holder(chunk(8) + chunk(9) + chunk(10)))
    manager.check()


@pytest.mark.parametrize("order", [range(6), range(5, -1, -1)])
def test_what_uses_note_is_forgotten_in_time_and_their_order_is_not(order: range) -> None:
    """A server that never runs short of memory evicts nothing, and its leaves are used for ever."""
    manager = make_manager(6)
    tree = manager.tree
    assert tree is not None
    for letter in order:
        holder = Holder(chunk(letter))
        assert run_prompt(manager, holder)
        manager.release(holder)
    used: list[int] = []
    for letter in itertools.islice(itertools.cycle(order), 1000):
        num_notes, path = len(tree._order._leaves), Path()
        assert tree.extend(path, ChunkKeys("model", chunk(letter)), 1) == 1
        tree.release(path)
        used.append(letter)
        if len(tree._order._leaves) < num_notes:
            break
    else:
        pytest.fail(f"{len(tree._order._leaves)} notes of six leaves")
    for letter in used[-6:]:
        assert list(tree.walk(ChunkKeys("model", chunk(letter)), 1))
        manager.eviction.evict(1)
        assert not list(tree.walk(ChunkKeys("model", chunk(letter)), 1)), (
            f"{letter} was used longest ago of {used[-6:]}"
        )


def test_a_lower_priority_is_evicted_first_whoever_was_used_last() -> None:
    manager = make_manager(20)
    for letter, priority in ((1, 5), (2, 0), (3, -1), (4, 0)):
        holder = Holder([*chunk(letter), 3], priority=priority)
        assert run_prompt(manager, holder)
        manager.release(holder)
    again = Holder([*chunk(4), 3], priority=7)  # a chunk has the highest one of its requests
    assert manager.admit(again)
    manager.release(again)
    again = Holder([*chunk(4), 3], priority=-9)
    assert manager.admit(again)
    manager.release(again)
    left = [1, 2, 3, 4]
    for letter in (3, 2, 1, 4):
        manager.eviction.evict(1)
        left.remove(letter)
        assert sorted(segment.tokens[0] for segment in manager.tree.segments()) == left
