"""Prefixes of the arena as a list."""

from __future__ import annotations

from quire.cache.keys import ChunkKeys
from quire.prefixes.listing import prefixes
from tests.cache.test_tree import Holder, chunk, make_manager, run_prompt


def test_prefixes_tell_how_far_they_are_alike() -> None:
    manager = make_manager(20)
    assert manager.tree is not None
    for tokens in (chunk(1) + chunk(2, 40) + chunk(5, 24), chunk(1) + chunk(2, 40) + chunk(6, 24), chunk(1) + chunk(9)):
        assert run_prompt(manager, Holder([*tokens, 1]))
    assert run_prompt(manager, Holder([*chunk(1), 1], "another"))
    shown = prefixes(manager.tree, 1)
    assert {(each.start, each.token_ids[-1]): each.num_same for each in shown} == {
        (0, 1): 0,
        (64, 5): 40,
        (64, 6): 40,
        (64, 9): 0,
    }
    assert len({each.space for each in shown}) == 2 and len({each.id for each in shown}) == 5


def test_a_prefix_keeps_its_id_when_another_prompt_divides_it() -> None:
    manager = make_manager(20)
    assert manager.tree is not None
    assert run_prompt(manager, Holder(chunk(1) + chunk(2) + chunk(3)))
    (whole,) = prefixes(manager.tree, 1000)
    assert run_prompt(manager, Holder(chunk(1) + chunk(9)))
    front, *others = sorted(prefixes(manager.tree, 1000), key=lambda each: each.start)
    back = next(each for each in others if each.token_ids[0] == 2)
    assert (back.id, back.parent) == (whole.id, front.id) and front.parent is whole.parent is None
    names = ChunkKeys("model", chunk(1) + chunk(2) + chunk(3)).first(3)
    assert [front.id, back.id] == [names[0].hex(), names[2].hex()], "ids are keys of their last chunks"
    assert front.space == whole.space


def test_prefixes_show_what_is_resident_and_who_uses_it() -> None:
    manager = make_manager(20)
    tree = manager.tree
    assert tree is not None
    first = Holder(chunk(1) + chunk(2) + [4])
    assert run_prompt(manager, first)
    second = Holder(chunk(1) + chunk(3) + [4], "model")
    assert run_prompt(manager, second)
    manager.tick(5.0)
    manager.release(second)
    manager.tick(8.0)
    shown = {(each.start, each.token_ids[0]): each for each in prefixes(tree, 1000)}
    top, left, right = shown[0, 1], shown[64, 2], shown[64, 3]
    assert (
        left.parent == right.parent == top.id and top.parent is None and len({each.id for each in shown.values()}) == 3
    )
    assert (top.sharers, top.hits, top.computed, top.hit_rate) == (1, 1, 1, 0.5)
    assert (right.sharers, right.idle_seconds, right.num_bytes, right.pinned_seconds) == (0, 3.0, 1000, None)
    assert left.idle_seconds == 0.0
    assert manager.pins.add(first, 128, 60.0)
    assert {each.token_ids[0]: each.pinned_seconds for each in prefixes(tree, 1000)} == {1: None, 2: 60.0, 3: None}
    assert prefixes(tree, 1000, lambda namespace: namespace != "model") == []
    other = make_manager(20)
    assert run_prompt(other, Holder(chunk(1) + chunk(3) + [4])) and other.tree is not None
    assert [each.id for each in prefixes(other.tree, 1)] != [top.id], "ids name contents, not places in the tree"
