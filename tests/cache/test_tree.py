"""The prefix tree compared with a dictionary of published chunks, for any order of joining, growing, leaving and
eviction.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, fields, replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from quire.cache.arena import Arena
from quire.cache.codecs.dense import DenseCodec
from quire.cache.codecs.nuq import NuqCodec
from quire.cache.keys import ChunkKeys
from quire.cache.ledger import PAGE_TOKENS, PageLedger
from quire.cache.manager import PINNED_SHARE, CacheManager
from quire.cache.namespace import FORMAT_VERSION, Namespace
from quire.cache.path import Path, SwappedPath
from quire.cache.sinks import Sinks
from quire.cache.table import ChunkTable
from quire.cache.tree import PrefixTree
from quire.engine.explain import explain
from tests.effort import IS_FULL, examples, tries
from tests.nuq_tables import random_tables

L, H = 2, 1
CODEC = DenseCodec(16, torch.float32)


@dataclass(eq=False)
class Holder:
    """A sequence, as the manager sees one."""

    token_ids: list[int]
    namespace: Hashable = "model"
    reads_cache: bool = True
    num_preemptions: int = 0
    priority: int = 0
    lifetime: float | None = None
    fetched: dict[str, int] = field(default_factory=dict)
    swapped: SwappedPath | None = None
    path: Path = field(default_factory=Path)

    @property
    def num_prompt(self) -> int:
        return len(self.token_ids)

    @property
    def keys(self) -> ChunkKeys:
        return ChunkKeys(self.namespace, self.token_ids)


def make_manager(chunks: int) -> CacheManager:
    bytes_per_chunk = CODEC.page_bytes * L * H
    ledger = PageLedger(chunks * bytes_per_chunk, bytes_per_chunk)
    table = ChunkTable(ledger, L, H, CODEC, arena=Arena(ledger.num_bytes))
    return CacheManager(table, PrefixTree((L, H)))


def run_prompt(manager: CacheManager, holder: Holder) -> bool:
    """Admits a sequence and computes its whole prompt; False if it does not fit."""
    if not manager.admit(holder):
        return False
    assert manager.paths.extend(holder, len(holder.token_ids))
    manager.paths.commit(holder, len(holder.token_ids))
    return True


def chunk(letter: int, count: int = PAGE_TOKENS) -> list[int]:
    return [letter] * count


def test_a_second_prompt_reads_the_first_one_s_chunks() -> None:
    manager = make_manager(20)
    first = Holder(chunk(1) + chunk(2) + chunk(3, 10))
    assert run_prompt(manager, first)
    second = Holder(chunk(1) + chunk(2) + chunk(4, 30))
    assert manager.admit(second) and second.path.num_tokens == 128
    assert second.path.chunks.tolist() == first.path.chunks[:2].tolist()
    manager.check()


@pytest.mark.parametrize(("length", "cached"), [(1, 0), (64, 63), (65, 64), (127, 64), (128, 127), (129, 128)])
def test_the_last_token_is_always_computed(length: int, cached: int) -> None:
    manager = make_manager(20)
    assert run_prompt(manager, Holder(chunk(1) + chunk(1) + chunk(1)))
    again = Holder(chunk(1, length))
    assert manager.admit(again) and again.path.num_tokens == cached
    manager.check()


def test_a_whole_last_chunk_is_copied_and_the_tree_s_is_not_written(seed: int) -> None:
    manager = make_manager(20)
    table = manager.table
    first, again = Holder(chunk(1) + chunk(2)), Holder(chunk(1) + chunk(2))
    assert run_prompt(manager, first)
    cached = int(first.path.chunks[1])
    ids, size = table.pages[cached].reshape(-1), int(table.sizes[table.kinds[cached]][0, 0])
    table.arena.store(ids, size, np.random.default_rng(seed).integers(0, 256, (len(ids), size), np.uint8))
    before = table.arena.images(ids, size)
    assert manager.admit(again) and again.path.num_shared == 1
    (own,) = again.path.private.tolist()
    assert own != cached and np.array_equal(table.arena.images(table.pages[own].reshape(-1), size), before)
    table.arena.store(table.pages[own].reshape(-1), size, np.zeros_like(before))
    assert np.array_equal(table.arena.images(ids, size), before)
    manager.paths.commit(again, 128)
    assert again.path.chunks.tolist() == first.path.chunks.tolist(), "the tree's chunk stays, the copy is freed"
    manager.check()


def test_two_equal_prompts_of_whole_chunks_diverge_in_tails_of_their_own() -> None:
    manager = make_manager(20)
    holders = [Holder(chunk(1) + chunk(2)), Holder(chunk(1) + chunk(2))]
    for holder in holders:
        assert run_prompt(manager, holder)
    assert holders[0].path.chunks.tolist() == holders[1].path.chunks.tolist(), "the second took the first one's chunks"
    assert manager.table.num_taken == 2
    for letter, holder in enumerate(holders, 5):
        holder.token_ids += chunk(letter)
        assert manager.paths.extend(holder, 192)
    assert holders[0].path.chunks[2] != holders[1].path.chunks[2]
    for holder in holders:
        manager.paths.commit(holder, 192)
    manager.check()


def test_another_namespace_never_hits() -> None:
    manager = make_manager(20)
    assert run_prompt(manager, Holder(chunk(1) + chunk(2), "bfloat16"))
    other = Holder(chunk(1) + chunk(2), "float16")
    assert manager.admit(other) and other.path.num_tokens == 0


def test_a_prompt_whose_every_row_is_wanted_reads_nothing_but_gives() -> None:
    manager = make_manager(20)
    assert run_prompt(manager, Holder(chunk(1) + chunk(2), reads_cache=False))
    second = Holder(chunk(1) + chunk(2), reads_cache=False)
    assert run_prompt(manager, second)
    assert manager.table.num_taken == 2, "what it computed again was given back"
    manager.check()


def test_a_segment_is_divided_where_a_newcomer_differs() -> None:
    manager = make_manager(20)
    first = Holder(chunk(1) + chunk(2) + chunk(3))
    assert run_prompt(manager, first)
    assert [len(segment.chunks) for segment in first.path.segments] == [3]
    second = Holder(chunk(1) + chunk(9) + chunk(3))
    assert run_prompt(manager, second)
    assert [len(segment.chunks) for segment in first.path.segments] == [1, 2]
    assert [len(segment.chunks) for segment in second.path.segments] == [1, 2]
    assert first.path.segments[0] is second.path.segments[0]
    assert first.path.segments[0].locks == 2
    manager.check()


def test_a_segment_that_others_read_is_not_lengthened() -> None:
    manager = make_manager(20)
    first, second = Holder([*chunk(1), 2]), Holder([*chunk(1), 3])
    assert run_prompt(manager, first) and run_prompt(manager, second)
    first.token_ids += chunk(2, 63)
    assert manager.paths.extend(first, 128)
    manager.paths.commit(first, 128)
    assert [len(segment.chunks) for segment in first.path.segments] == [1, 1]
    assert [segment.hits for segment in first.path.segments] == [1, 0]
    manager.check()


def test_what_others_take_and_seal_leaves_a_path_s_names_as_they_are() -> None:
    """They are asked for at every step; only its own growth and a division make them new."""
    manager = make_manager(20)
    tree = manager.tree
    assert tree is not None
    first, second = Holder([*chunk(1), *chunk(2), 3]), Holder([*chunk(7), 3])
    assert run_prompt(manager, first)
    names = tree.shared(first.path)
    assert run_prompt(manager, second)
    second.token_ids += chunk(7)
    assert manager.paths.extend(second, 129)
    manager.paths.commit(second, 129)
    assert tree.shared(first.path) is names and [count for _, count in tree.shared(second.path)] == [2]
    assert run_prompt(manager, Holder([*chunk(1), *chunk(5), 3]))
    assert [count for _, count in tree.shared(first.path)] == [1, 1] and tree.num_divided == 1
    first.token_ids += chunk(2)
    assert manager.paths.extend(first, 193)
    manager.paths.commit(first, 193)
    assert sum(count for _, count in tree.shared(first.path)) == 3


def test_what_waits_is_looked_at_again_only_when_something_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = make_manager(4)
    looks: list[object] = []
    room_for = manager._has_room_for
    monkeypatch.setattr(manager, "_has_room_for", lambda holder: (looks.append(holder), room_for(holder))[1])
    running, waiting = Holder(chunk(1) + chunk(2)), Holder(chunk(3) * 3)
    assert run_prompt(manager, running)
    for _ in range(5):
        assert not manager.admit(waiting)
    assert looks == [running, waiting]
    running.token_ids.append(1)
    assert manager.paths.extend(running, 129)
    assert not manager.admit(waiting) and len(looks) == 3, "there is less room than before"
    manager.release(running)
    assert manager.admit(waiting)


def test_what_a_sequence_finds_again_after_a_preemption_is_no_hit() -> None:
    manager = make_manager(6)
    holder = Holder(chunk(1) + chunk(2) + [3])
    assert run_prompt(manager, holder)
    manager.release(holder)
    holder.num_preemptions = 1
    assert manager.admit(holder)
    assert [segment.hits for segment in holder.path.segments] == [0]


def test_a_chunk_has_the_longest_lifetime_of_its_requests() -> None:
    manager = make_manager(20)
    for letter, lifetimes in ((1, [5.0]), (2, [5.0, 20.0]), (3, [5.0, None]), (4, [0.0])):
        for lifetime in lifetimes:
            holder = Holder([*chunk(letter), 3], lifetime=lifetime)
            assert run_prompt(manager, holder)
            manager.release(holder)
    for now, left in ((0.0, [1, 2, 3]), (4.9, [1, 2, 3]), (5.0, [2, 3]), (19.9, [2, 3]), (20.0, [3]), (1e9, [3])):
        manager.tick(now)
        assert sorted(segment.tokens[0] for segment in manager.tree.segments()) == left, now


def test_a_lifetime_may_be_longer_than_the_trees_own() -> None:
    manager = make_manager(20)
    manager.tree.lifetime = 10.0
    for letter, lifetime in ((1, None), (2, 3.0), (3, 30.0)):
        holder = Holder([*chunk(letter), 3], lifetime=lifetime)
        assert run_prompt(manager, holder)
        manager.release(holder)
    for now, left in ((2.0, [1, 2, 3]), (3.0, [1, 3]), (10.0, [3]), (30.0, [])):
        manager.tick(now)
        assert sorted(segment.tokens[0] for segment in manager.tree.segments()) == left, now


def test_what_nobody_used_for_the_lifetime_is_dropped() -> None:
    manager = make_manager(20)
    manager.tree.lifetime = 10.0
    tree = manager.tree
    assert tree is not None
    for now, letter in ((0.0, 1), (6.0, 2)):
        manager.tick(now)
        holder = Holder(chunk(letter) + chunk(3) + [4])
        assert run_prompt(manager, holder)
        manager.release(holder)
    manager.tick(9.9)
    assert tree.num_chunks == 4
    manager.tick(10.0)
    assert tree.num_chunks == 2
    again = Holder([*chunk(2), 4])
    assert run_prompt(manager, again)
    manager.tick(17.0)
    assert tree.num_chunks == 1, "what is read stays; what follows it does not"
    manager.release(again)
    manager.tick(26.9)
    assert tree.num_chunks == 1
    manager.tick(27.0)
    assert tree.num_chunks == 0 and not tree._root.children, "an empty root is kept"
    manager.check()


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        (chunk(1, 64), "of 64 tokens no whole chunk of 64 lies before the last one, which is computed"),
        (chunk(1) + chunk(2) + [5], "everything but its last tokens, which are always computed"),
        (chunk(1) + chunk(2) + chunk(3) + [5], "no cached prompt goes on after token 128"),
        (
            chunk(1) + chunk(2, 40) + chunk(7, 60),
            "the nearest cached prompt differs from it at token 104;"
            " chunks are shared whole, so it is computed from token 64 on",
        ),
        ([*chunk(9), 1], "no cached prompt begins with its first token"),
    ],
)
def test_a_prompt_s_hit_or_miss_is_explained(prompt: list[int], reason: str) -> None:
    manager = make_manager(20)
    assert run_prompt(manager, Holder(chunk(1) + chunk(2)))
    assert run_prompt(manager, Holder(chunk(4)))
    assert explain(manager, Holder(prompt)) == reason
    assert "with its salt" in explain(manager, Holder(chunk(1) * 2, "another"))
    assert "log-probabilities" in explain(manager, Holder(prompt, reads_cache=False))


SPACES = {
    "model": "another",
    "dtype": "float16",
    "weights": "native",
    "adapter": "lora-1",
    "codec": "nuq3",
    "calibration": "5a0c",
    "strict": False,
    "rope": "Rope(theta=500000.0)",
    "version": FORMAT_VERSION + 1,
    "salt": "tenant",
}


@pytest.mark.parametrize("name", [each.name for each in fields(Namespace)])
def test_whatever_pages_depend_on_keeps_requests_apart(name: str) -> None:
    base = Namespace(model="m", dtype="bfloat16", weights="dequantized", codec="dense", rope="Rope(theta=10000.0)")
    manager = make_manager(20)
    tokens = chunk(1) + chunk(2) + [3]
    assert run_prompt(manager, Holder(tokens, base))
    other, same = Holder(tokens, replace(base, **{name: SPACES[name]})), Holder(tokens, replace(base))
    assert manager.admit(other) and other.path.num_tokens == 0
    assert manager.admit(same) and same.path.num_tokens == 128


class Churn(RuleBasedStateMachine):
    """Joins, growth, leaves and aborts at every stage, pins, evictions and time, in a small arena.

    The model is two dictionaries: what every page was written with, and which prefixes the tree must find.
    """

    operations = tokens = 0
    live: Bundle[Holder] = Bundle("live")

    def begin(self, manager: CacheManager, lifetime: float | None) -> None:
        self.manager = manager
        self.manager.tree.lifetime = lifetime
        self.now = 0.0
        self.written: dict[int, tuple[object, ...]] = {}  # chunk id -> namespace and tokens up to its end
        self.cached: dict[tuple[object, ...], int] = {}  # namespace and tokens up to a chunk's end -> chunk id
        self.holders: list[Holder] = []
        free = self.manager.table.free

        def forget(chunks: np.ndarray) -> None:
            for each in chunks.tolist():
                if self.cached.get(self.written.get(each, ())) == each:
                    del self.cached[self.written[each]]
            free(chunks)

        self.manager.table.free = forget  # type: ignore[method-assign]

    @rule(
        target=live,
        letters=st.lists(st.integers(0, 2), min_size=1, max_size=5),
        tail=st.just(64) | st.integers(1, 64),  # whole chunks take a path of their own
        reads=st.booleans(),
        space=st.sampled_from("ab"),
    )
    def join(self, letters: list[int], tail: int, reads: bool, space: str) -> Holder | object:
        tokens = [letter for letter in letters[:-1] for _ in range(PAGE_TOKENS)] + [letters[-1]] * tail
        holder = Holder(tokens, space, reads)
        self.count()
        expected = self.expected_hit(holder) if reads else 0
        before, pinned = self.manager.table.num_taken, self.tree.num_pinned
        if not self.manager.admit(holder):
            assert self.manager.table.num_taken == before
            return multiple()
        if holder.path.num_tokens == len(tokens) - 1 and reads and self.is_all_cached(holder):
            self.written[int(holder.path.chunks[-1])] = (space, *tokens[:-1])  # a copy of its last chunk
        else:
            assert holder.path.num_tokens == expected * PAGE_TOKENS
        assert self.tree.num_pinned == pinned or not self.holders, "a pin was given up while others ran"
        self.holders.append(holder)
        return holder

    @rule(holder=live, steps=st.integers(1, 3))
    def compute(self, holder: Holder, steps: int) -> None:
        """The next slices of a prompt, whole chunks, or what is left of it."""
        if holder not in self.holders:
            return
        self.count()
        self.manager.paths.match(holder)
        path = holder.path
        end = min(len(holder.token_ids), (path.num_tokens // PAGE_TOKENS + steps) * PAGE_TOKENS)
        if end > path.num_tokens:
            assert self.manager.paths.extend(holder, end), "an admitted prompt finds its room taken"
            self.write(holder, end)

    @rule(holder=live, count=st.integers(1, 140), letter=st.integers(0, 2))
    def generate(self, holder: Holder, count: int, letter: int) -> None:
        if holder not in self.holders or holder.path.num_tokens < len(holder.token_ids):
            return
        for _ in range(count):
            self.count()
            type(self).tokens += 1
            holder.token_ids.append(letter)
            if not self.manager.paths.extend(holder, len(holder.token_ids)):
                holder.token_ids.pop()
                return
            self.write(holder, len(holder.token_ids))

    @rule(holder=consumes(live))
    def leave(self, holder: Holder) -> None:
        """Done or aborted, wherever it stands."""
        if holder in self.holders:
            self.count()
            self.holders.remove(holder)
            self.manager.release(holder)

    @rule(holder=live, seconds=st.sampled_from([1.0, 15.0, float("inf")]), part=st.integers(1, 200))
    def pin(self, holder: Holder, seconds: float, part: int) -> None:
        if holder not in self.holders:
            return
        self.count()
        num_tokens = min(part, holder.path.num_shared * PAGE_TOKENS)
        allowed = self.manager.pins.has_room(holder.keys, num_tokens // PAGE_TOKENS)
        assert self.manager.pins.add(holder, num_tokens, seconds) == (allowed and num_tokens >= PAGE_TOKENS)
        assert self.tree.num_pinned <= self.manager.table.capacity * PINNED_SHARE

    @rule(holder=live)
    def unpin(self, holder: Holder) -> None:
        self.count()
        self.manager.pins.end(holder.keys)

    @rule(count=st.integers(1, 4))
    def evict(self, count: int) -> None:
        """As a demand for memory does."""
        self.count()
        idle = self.tree.num_idle
        dropped = np.concatenate([np.empty(0, np.int32), *(each.rows for each in self.tree.evict(count))])
        assert len(dropped) == min(count, idle)
        self.manager.table.free(dropped)

    @rule(seconds=st.floats(0, 12))
    def wait(self, seconds: float) -> None:
        self.count()
        self.now += seconds
        self.manager.tick(self.now)

    def count(self) -> None:
        type(self).operations += 1

    @property
    def tree(self) -> PrefixTree:
        assert self.manager.tree is not None
        return self.manager.tree

    def expected_hit(self, holder: Holder) -> int:
        """Chunks that a dictionary of prefixes has of a prompt, one after the other from its start."""
        count, limit = 0, (len(holder.token_ids) - 1) // PAGE_TOKENS
        while count < limit and (holder.namespace, *holder.token_ids[: (count + 1) * PAGE_TOKENS]) in self.cached:
            count += 1
        return count

    def is_all_cached(self, holder: Holder) -> bool:
        """Whether a prompt of whole chunks stands in the dictionary to its end."""
        return len(holder.token_ids) % PAGE_TOKENS == 0 and (holder.namespace, *holder.token_ids) in self.cached

    def write(self, holder: Holder, end: int) -> None:
        path, tokens = holder.path, holder.token_ids
        first = path.num_tokens // PAGE_TOKENS
        for index in range(first, -(-end // PAGE_TOKENS)):
            assert index >= path.num_sealed, "a sealed page is written"
            self.written[int(path.chunks[index])] = (holder.namespace, *tokens[: min(end, (index + 1) * PAGE_TOKENS)])
        self.manager.paths.commit(holder, end)
        for index in range(first, end // PAGE_TOKENS):
            self.cached.setdefault((holder.namespace, *tokens[: (index + 1) * PAGE_TOKENS]), int(path.chunks[index]))

    @invariant()
    def everything_adds_up(self) -> None:
        self.manager.check()
        for holder in self.holders:
            for index in range(-(-holder.path.num_tokens // PAGE_TOKENS)):
                upto = min(holder.path.num_tokens, (index + 1) * PAGE_TOKENS)
                expected = (holder.namespace, *holder.token_ids[:upto])
                assert self.written[int(holder.path.chunks[index])] == expected, (
                    "a path reads pages with other contents"
                )

    @invariant()
    def sharers_stand_side_by_side(self) -> None:
        """In the order in which the scheduler puts them, the readers of every segment are neighbours."""
        for holder in self.holders:
            fresh = tuple((segment.number, len(segment.chunks)) for segment in holder.path.segments)
            assert self.tree.shared(holder.path) == fresh, "what a path remembers of its segments is out of date"
        rows = sorted(self.holders, key=lambda holder: self.tree.shared(holder.path))
        for segment in self.tree.segments():
            reading = [row for row, holder in enumerate(rows) if segment in holder.path.segments]
            assert (segment.locks == len(reading)).all(), "locks are not the paths that read a segment"
            assert reading == list(range(reading[0], reading[-1] + 1)) if reading else True

    @invariant()
    def the_tree_holds_what_was_sealed_and_not_dropped(self) -> None:
        held = {int(each) for segment in self.tree.segments() for each in segment.chunks}
        assert held == set(self.cached.values())

    def teardown(self) -> None:
        for holder in self.holders:
            self.manager.release(holder)
        tree = self.tree
        assert all(not segment.locks.any() for segment in tree.segments())
        assert tree.num_idle + tree.num_pinned == tree.num_chunks == self.manager.table.num_taken
        assert self.manager.stats()["bytes_used"] == 0
        while self.manager.pins.end_oldest():
            pass
        self.manager.eviction.evict(tree.num_idle)
        assert self.manager.table.num_taken == 0
        self.manager.check()


class DenseChurn(Churn):
    """Where a full chunk is the open one it was."""

    @initialize(chunks=st.integers(4, 24), lifetime=st.sampled_from([None, 20.0]))
    def start(self, chunks: int, lifetime: float | None) -> None:
        self.begin(make_manager(chunks), lifetime)


class EncodedChurn(Churn):
    """Where a full chunk is another one than the open one it was, pages have several sizes, and the first tokens of
    every sequence lie apart.
    """

    @initialize(
        slabs=st.integers(3, 30),
        slab_pages=st.sampled_from([1, 2, 5]),
        num_sinks=st.sampled_from([0, 1, 64]),
        lifetime=st.sampled_from([None, 20.0]),
    )
    def start(self, slabs: int, slab_pages: int, num_sinks: int, lifetime: float | None) -> None:
        slab = slab_pages * CODEC.page_bytes
        sinks = Sinks(num_sinks, L, H, 16, torch.float32) if num_sinks else None
        if sinks is not None:
            slab = max(slab, sinks.sidecar_bytes)
        encoded = NuqCodec("nuq3", random_tables(L, H, 16, 0))
        arena = Arena(slabs * slab)
        table = ChunkTable(PageLedger(slabs * slab, slab), L, H, CODEC, encoded, sinks=sinks, arena=arena)
        self.begin(CacheManager(table, PrefixTree((L, H))), lifetime)


@pytest.mark.parametrize("churn", [DenseChurn, EncodedChurn])
def test_thousands_of_operations_lose_nothing(churn: type[Churn]) -> None:
    """In a full run a hundred thousand for each, with 450 examples; their lengths are random."""
    churn.operations = churn.tokens = 0
    number, least = (90, 100_000) if IS_FULL else (30, tries(3_500))
    run_state_machine_as_test(
        churn, settings=examples(number, stateful_step_count=200, suppress_health_check=list(HealthCheck))
    )
    print(f"{churn.operations} operations, {churn.tokens} of them single tokens appended")
    assert churn.operations >= least


def test_segments_keep_no_other_tokens_in_memory() -> None:
    manager = make_manager(40)
    assert manager.tree is not None
    shared = list(range(20 * PAGE_TOKENS))
    for number in range(3):
        holder = Holder([*shared, *[number + 1] * (PAGE_TOKENS + 1)])
        assert manager.admit(holder) and manager.paths.extend(holder, len(holder.token_ids))
        manager.paths.commit(holder, len(holder.token_ids))
        manager.release(holder)
    found = [segment.tokens for segment in manager.tree.segments()]
    bases = {id(base): base for base in (tokens if tokens.base is None else tokens.base for tokens in found)}
    assert sum(base.nbytes for base in bases.values()) == sum(tokens.nbytes for tokens in found)
