"""Demotion: within its budget, once, attachments included, and complete in the end."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from quire.cache.arena import Arena
from quire.cache.codecs.dense import DenseCodec
from quire.cache.demotion import COPY_SPEED, MOST_AHEAD, Demotion
from quire.cache.ledger import PAGE_TOKENS, PageLedger
from quire.cache.manager import CacheManager
from quire.cache.run import Run
from quire.cache.table import ChunkTable
from quire.cache.tree import PrefixTree
from quire.engine.engine import Engine
from tests.cache.test_fetching import CACHES, VOCABULARY, with_store
from tests.cache.test_tree import Holder, chunk, run_prompt

from ..engines import GREEDY, drain, generate
from ..toy_store import ToyStore

L, H = 2, 1
CODEC = DenseCodec(64, torch.float32)
CHUNK_BYTES = CODEC.page_bytes * L * H


class Counting(ToyStore):
    """Notes what it is given. is_full: whether it wants nothing."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.is_full = False
        self.names: list[bytes] = []
        self.attached: list[bytes] = []
        self.num_asked = 0

    def wants(self, names: Sequence[bytes]) -> list[bool]:
        self.num_asked += 1
        return [False] * len(names) if self.is_full else super().wants(names)

    def put(self, run: Run, extents: Iterable[memoryview]) -> None:
        self.names += run.names if run.is_shared else []
        if run.num_attached:
            self.attached.append(run.names[-1])
        super().put(run, extents)


def make_manager(chunks: int, store: ToyStore) -> CacheManager:
    ledger = PageLedger(chunks * CHUNK_BYTES, CHUNK_BYTES)
    table = ChunkTable(ledger, L, H, CODEC, arena=Arena(ledger.num_bytes))
    return CacheManager(table, PrefixTree((L, H)), store=store)


def prompt_of(*letters: int) -> list[int]:
    return [token for letter in letters for token in chunk(letter)] + [99]


def publish(manager: CacheManager, *letters: int) -> Holder:
    """A computed prompt that nobody reads any more."""
    holder = Holder(prompt_of(*letters))
    assert run_prompt(manager, holder)
    manager.release(holder)
    return holder


def test_the_budget_is_that_of_the_time_that_passed(seed: int) -> None:
    rng = random.Random(seed)
    store = Counting(seed)
    manager = make_manager(200, store)
    for first in range(30):
        publish(manager, first, *(100 + first + each for each in range(5)))
    now, begun = 0.0, None
    run_bytes = manager.demotion._most * CHUNK_BYTES
    while manager.demotion.is_waiting:
        before = len(store.names)
        now += rng.expovariate(COPY_SPEED / CHUNK_BYTES)
        manager.tick(now)
        begun = now if begun is None else begun
        # Time spends on whole runs: at most one more than there is time for, which the next ones wait for.
        assert len(store.names) * CHUNK_BYTES <= now * COPY_SPEED + run_bytes
        assert (len(store.names) - before) * CHUNK_BYTES <= MOST_AHEAD + run_bytes
    assert len(store.names) == 30 * 6 and len({*store.names}) == len(store.names)
    assert now * COPY_SPEED < 30 * 6 * CHUNK_BYTES * 2, "most of the time was not used"


def test_a_long_pause_saves_up_no_more_than_a_few_runs() -> None:
    store = Counting()
    manager = make_manager(3000, store)
    run_bytes = manager.demotion._most * CHUNK_BYTES
    num_chunks = 2 * (MOST_AHEAD + run_bytes) // CHUNK_BYTES
    for first in range(num_chunks):
        publish(manager, first)
    manager.tick(1e6)
    copied = len(store.names) * CHUNK_BYTES
    assert MOST_AHEAD <= copied < MOST_AHEAD + run_bytes
    manager.tick(1e6)
    assert len(store.names) * CHUNK_BYTES == copied, "no time has passed"
    manager.tick(1e6 - 5)
    assert len(store.names) * CHUNK_BYTES == copied, "a clock that goes back gives no time"


def test_a_deep_branch_is_copied_within_the_budget_too() -> None:
    """A conversation of many turns, each a segment of its own."""
    store = Counting()
    manager = make_manager(400, store)
    letters: list[int] = []
    for turn in range(60):
        letters.append(turn)
        publish(manager, *letters, 200)
    holder = publish(manager, *letters)
    segments = [segment for segment, _ in manager.tree.walk(holder.keys)]
    assert len(segments) >= 60
    manager.demotion.run(1 << 30)
    store.drop(holder.keys.first(61))  # it lost all of them, and a new turn comes
    store.names.clear()
    manager.demotion.note(segments[-1])
    while manager.demotion.is_waiting:
        before = len(store.names)
        manager.demotion.run(3 * CHUNK_BYTES)
        assert before < len(store.names) <= before + 4, "a tick copies the whole conversation"
    assert all(store.find(name) for name in holder.keys.first(60))


def test_nothing_is_copied_twice(seed: int) -> None:
    rng = random.Random(seed)
    store = Counting(seed)
    manager = make_manager(12, store)
    now = 0.0
    for _ in range(150):
        letters = [rng.randrange(3) for _ in range(rng.randrange(1, 6))]
        holder = Holder(prompt_of(*letters))
        store.delay = 0.0
        if manager.admit(holder):
            while holder.path.transfer is not None:
                store.settle()
                assert manager.end_fetch(holder)
            assert manager.paths.extend(holder, len(holder.token_ids))
            manager.paths.commit(holder, len(holder.token_ids))
            manager.release(holder)
        now += rng.choice([0.0, 1e-4, 1.0])
        manager.tick(now)
        if rng.random() < 0.2:
            manager.eviction.evict(rng.randrange(1, 13))
        manager.check()
    assert Counter(store.names).most_common(1)[0][1] == 1
    assert store.num_got > 0 and manager.demotion.num_lost == 0


def test_what_is_stored_is_evicted_without_a_copy(seed: int) -> None:
    store = Counting(seed)
    manager = make_manager(20, store)
    holder = publish(manager, 1, 2, 3, 4)
    assert manager.demotion.run(10 * CHUNK_BYTES) == 4 * CHUNK_BYTES
    assert not manager.demotion.is_waiting
    num_put = store.num_put
    manager.eviction.evict(3)
    manager.eviction.evict(3)
    assert store.num_put == num_put and manager.tree.num_chunks == 0 and manager.demotion.num_lost == 0
    # And what is not: the end first, because the end is evicted first; the rest when its time comes.
    manager = make_manager(20, store := Counting(seed))
    holder = publish(manager, 1, 2, 3, 4)
    manager.eviction.evict(1)
    assert store.names == holder.keys.first(4)[3:]
    assert manager.demotion.run(10 * CHUNK_BYTES) == 3 * CHUNK_BYTES
    assert sorted(store.names) == sorted(holder.keys.first(4))


def test_a_hit_in_the_arena_is_a_use_for_the_store_and_mends_what_it_lost(seed: int) -> None:
    store = Counting(seed)
    manager = make_manager(40, store)
    holder = publish(manager, 1, 2, 3, 4)
    manager.demotion.run(1 << 30)
    num_asked = store.num_asked
    publish(manager, 5)
    assert store.num_asked == num_asked, "it shares nothing"
    manager.demotion.run(1 << 30)
    num_asked, num_put = store.num_asked, store.num_put
    publish(manager, 1, 2, 3, 4)
    assert store.num_asked == num_asked + 1 and not manager.demotion.is_waiting
    store.drop(holder.keys.first(2))
    publish(manager, 1, 2, 3, 4)
    manager.demotion.run(1 << 30)
    assert all(store.find(name) for name in holder.keys.first(4)) and store.num_put > num_put


def test_a_full_store_gets_everything_once_it_has_room(seed: int) -> None:
    store = Counting(seed)
    manager = make_manager(60, store)
    store.is_full = True
    holders = [publish(manager, first, first + 50, first + 100) for first in range(8)]
    for second in range(5):
        manager.tick(float(second))
    assert manager.demotion.is_waiting and store.num_put == 0
    assert store.num_asked <= 5, "a store that is full is asked once a step"
    manager.eviction.evict(3)  # the first one's
    assert manager.demotion.num_lost == 3
    store.is_full = False
    for second in range(5, 20):
        manager.tick(float(second))
    assert not manager.demotion.is_waiting
    assert all(store.find(name) for holder in holders[1:] for name in holder.keys.first(3))
    assert not any(store.find(name) for name in holders[0].keys.first(3))


def test_evicted_while_they_wait_chunks_are_offered_once_or_not_at_all(seed: int) -> None:
    store = Counting(seed)
    manager = make_manager(20, store)
    publish(manager, 1, 2, 3)
    manager.eviction.evict(20)
    assert len(store.names) == 3
    assert manager.demotion.run(1 << 30) == 0 and not manager.demotion.is_waiting
    # A part of a segment was evicted, and its rows have other owners now.
    manager.table.arena.data.fill_(1)
    publish(manager, 4, 5, 6)
    manager.eviction.evict(2)
    publish(manager, 7, 8)
    assert manager.demotion.run(1 << 30) == 3 * CHUNK_BYTES
    assert len(store.names) == 8 == len({*store.names})


def test_a_store_that_takes_nothing_collects_no_evicted_segments(seed: int) -> None:
    store = Counting(seed)
    manager = make_manager(30, store)
    store.is_full = True
    publish(manager, 1, 2)
    pinned = Holder(prompt_of(1, 2))
    assert run_prompt(manager, pinned) and manager.pins.add(pinned, 128, 1e9)
    for number in range(1000):
        publish(manager, 10 + number, 5)
        manager.tick(float(number))
    segments = list(manager.tree.segments())
    assert manager.tree.num_evicted > 1000 and len(manager.demotion._waiting) < 2 * 30 + 2 * 64 + len(segments)
    manager.release(pinned)


def test_the_end_of_a_lifetime_in_the_arena_takes_nothing_from_a_store() -> None:
    """Others asked for the same chunks without one, or pinned them there."""
    store = Counting()
    store.delay = 0.0
    manager = make_manager(30, store)
    names = publish(manager, 1, 2, 3).keys.first(3)
    manager.demotion.run(1 << 30)
    manager.eviction.evict(99)
    short = Holder(prompt_of(1, 2, 3), lifetime=0.0)
    assert manager.admit(short)
    store.settle()
    assert manager.end_fetch(short)
    manager.release(short)
    manager.tick(5.0)
    assert manager.tree.num_chunks == 0 and all(store.find(name) for name in names)


def test_a_pinned_prefix_and_what_is_read_now_are_copied_as_well(seed: int) -> None:
    store = Counting(seed)
    manager = make_manager(20, store)
    holder = Holder(prompt_of(1, 2, 3))
    assert run_prompt(manager, holder) and manager.pins.add(holder, 128, 10.0)
    assert manager.demotion.run(1 << 30) == 3 * CHUNK_BYTES and len(store.names) == 3
    manager.release(holder)


def test_a_store_that_fails_a_part_is_not_asked_for_more(seed: int) -> None:
    """What it took stays, what it did not is not counted as stored, and later tries go on from there."""

    class Short(Counting):
        left = 2

        def put(self, run: Run, extents: Iterable[memoryview]) -> None:
            if self.left:
                self.left -= 1
                super().put(run, extents)

    store = Short(seed)
    manager = make_manager(400, store)
    most = manager.demotion._most
    holder = publish(manager, *range(4 * most))
    manager.demotion.run(1 << 30)
    assert manager.demotion.is_waiting and store.num_put == 2
    store.left = 99
    manager.demotion.run(1 << 30)
    assert not manager.demotion.is_waiting
    assert store.names == holder.keys.first(4 * most), "in order, and none twice"


def test_no_store_means_no_work() -> None:
    ledger = PageLedger(20 * CHUNK_BYTES, CHUNK_BYTES)
    table = ChunkTable(ledger, L, H, CODEC, arena=Arena(ledger.num_bytes))
    manager = CacheManager(table, PrefixTree((L, H)))
    publish(manager, 1, 2)
    assert not manager.demotion.is_on and not manager.demotion.is_waiting
    manager.eviction.evict(2)
    assert manager.demotion.num_lost == 0


# ---- attachments -----------------------------------------------------------------------------------------------------


def sums_engine(store: ToyStore, chunks: int = 60) -> Engine:
    return with_store(store, chunks, **CACHES["retained"])


def test_column_sums_that_come_later_are_stored_with_a_last_chunk(seed: int) -> None:
    rng = random.Random(seed)
    store = Counting(seed)
    engine = sums_engine(store)
    demotion, tree = engine.scheduler.manager.demotion, engine.scheduler.manager.tree
    shared = [rng.randrange(VOCABULARY) for _ in range(64 * 3)]
    first, second = ([*shared, *(rng.randrange(VOCABULARY) for _ in range(140))] for _ in range(2))
    once = replace(GREEDY, max_tokens=2)
    answers = generate(engine, [first], once)
    demotion.run(1 << 30)
    assert not demotion.is_waiting
    before = Counter(store.names)
    # The second prompt parts from the first where no sums are: there they are attached now.
    answers += generate(engine, [second], once)
    demotion.run(1 << 30)
    (parting,) = [each for each in tree.segments() if len(each.children) == 2]
    assert len(parting.attached) and parting.end == 3
    run = store.find(parting.keys[-1])
    assert run is not None and run.ends_with_sums(parting.keys[-1]) and run.num_attached == 3
    again = Counter(store.names) - before
    assert again[parting.keys[-1]] == 1 and not any(again[name] for name in parting.keys[:-1])
    # Nothing more to do, however often it is noted.
    num_put = store.num_put
    for segment in tree.segments():
        demotion.note(segment)
    assert demotion.run(1 << 30) == 0 and store.num_put == num_put
    # A third prompt goes on from these sums, from the store.
    engine.scheduler.manager.eviction.evict(99)
    assert store.num_put == num_put
    third = [*shared, *(rng.randrange(VOCABULARY) for _ in range(140))]
    engine.add("third", third, once)
    output = drain(engine)["third"]
    assert output.num_cached_tokens == 64 * 3
    assert output.outputs[0].token_ids == generate(sums_engine(ToyStore(seed)), [third], once)[0]
    del answers


def test_sums_are_evicted_to_the_store_with_their_chunk(seed: int) -> None:
    rng = random.Random(seed)
    store = Counting(seed)
    engine = sums_engine(store)
    prompt = [rng.randrange(VOCABULARY) for _ in range(64 * 5 + 20)]
    (answer,) = generate(engine, [prompt], replace(GREEDY, max_tokens=3))
    engine.scheduler.manager.eviction.evict(99)
    assert len(store.attached) == 1
    engine.add("again", prompt, replace(GREEDY, max_tokens=3))
    output = drain(engine)["again"]
    assert output.outputs[0].token_ids == answer and output.num_cached_tokens >= 64 * 4


def test_an_idle_engine_copies_everything_and_then_rests(seed: int) -> None:
    rng = random.Random(seed)
    store = Counting(seed)
    engine = with_store(store, 60)
    demotion = engine.scheduler.manager.demotion
    engine.clock = lambda: 0.0  # no time passes, and steps copy nothing
    prompts = [[rng.randrange(VOCABULARY) for _ in range(64 * 3 + 1)] for _ in range(4)]
    generate(engine, prompts)
    assert store.num_put == 0 and demotion.is_waiting
    store.is_full = True
    assert engine.idle() not in (0.0, None), "it would spin"
    store.is_full = False
    waits = [engine.idle() for _ in range(3)]
    assert waits[-1] is None and not demotion.is_waiting
    assert len({*store.names}) == len(store.names) == engine.scheduler.manager.tree.num_chunks


@pytest.mark.parametrize("num_chunks", [1, 5, 16, 17, 33])
def test_runs_are_of_the_size_that_was_chosen(num_chunks: int) -> None:
    store = Counting()
    manager = make_manager(100, store)
    publish(manager, *range(num_chunks))
    manager.demotion.run(1 << 30)
    sizes = [len(run.names) for run in dict.fromkeys(store.runs.values())]
    most = manager.demotion._most
    assert sum(sizes) == num_chunks and max(sizes) <= most and len(sizes) == -(-num_chunks // most)
    for run in store.runs.values():
        assert np.array_equal(np.repeat(range(run.start, run.start + len(run.names)), PAGE_TOKENS), run.tokens)


def test_a_chunk_larger_than_a_run_is_a_run_of_its_own() -> None:
    codec = DenseCodec(4096, torch.float32)
    ledger = PageLedger(6 * 3 * codec.page_bytes, codec.page_bytes)
    table = ChunkTable(ledger, 3, 1, codec, arena=Arena(ledger.num_bytes))
    assert Demotion(table, ToyStore())._most == 1
