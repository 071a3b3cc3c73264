"""Stores: evicted chunks come back with the same bytes, late or not at all, without effect on other requests."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from quire.cache.keys import ChunkKeys
from quire.cache.run import Run
from quire.cache.store import Transfer
from quire.engine.engine import Engine
from quire.engine.params import CacheHints, SamplingParams
from quire.engine.step import Step, Wait
from quire.llm import merge_delta

from ..codecs import EVERY, TOY, options_of
from ..effort import IS_FULL, combine, tries, whole
from ..engines import GREEDY, drain, generate, make_engine
from ..store_helpers import put_store
from ..tiny_models import tiny_shape
from ..toy_store import ToyStore

VOCABULARY = 256
SHAPE = tiny_shape(head_dim=16)

RETAINED = {"retain.threshold": 0.9, "retain.profile_rows": 32}
SOME = whole(sorted(EVERY, key=lambda name: name not in ("g4", "nuq3", TOY.name)), 3)
"""Codecs that a quick run tries."""

CACHES: dict[str, dict[str, Any]] = {
    "dense": {},
    "reference": {"attention.backend": "reference"},
    **{name: {**options_of(name), "cache.sink_tokens": 3} for name in SOME},
    "retained": RETAINED,
    "ranked": {"retain.budget": 0.5, "retain.profile_rows": 32},
    **{f"retained {name}": RETAINED | options_of(name) for name in ("nuq3", TOY.name)},
    "retained reference": {**RETAINED, "attention.backend": "reference"},
}

CHUNKS = {
    **dict.fromkeys(SOME, 4),
    "retained nuq3": 5,
    **dict.fromkeys(("retained", "retained reference", "ranked"), 14),
}
"""Of dense pages in the arena: what a few prompts take."""

LONGEST = 90 if IS_FULL else 40
"""Tokens of the longest answers."""

SLOW = {name for name, options in CACHES.items() if options.get("attention.backend") == "reference"}

pytestmark = pytest.mark.usefixtures("toy_codec")


def with_store(store: ToyStore, chunks: int = 24, **options: Any) -> Engine:
    """An engine whose manager has the store from its beginning."""
    return put_store(make_engine(SHAPE, chunks=chunks, **options), store)


def prompts_of(rng: random.Random, count: int) -> list[list[int]]:
    """Some of them share a beginning."""
    shared = [
        [rng.randrange(VOCABULARY) for _ in range(64 * rng.randrange(1, 4) + rng.randrange(64))] for _ in range(3)
    ]
    return [
        [*rng.choice([*shared, []]), *(rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 200)))]
        for _ in range(count)
    ]


@combine(1, cache=list(CACHES), failing=[0.0, 0.4])
def test_what_was_evicted_is_fetched_and_answers_as_if_it_had_been_computed(
    cache: str, failing: float, seed: int
) -> None:
    for number in range(1 if cache in SLOW else tries(1)):
        rng = random.Random(seed + number)
        store = ToyStore(seed + number, delay=0.002, failing=failing, refusing=0.1)
        engine = with_store(store, CHUNKS.get(cache, 12), **CACHES[cache])
        prompts = prompts_of(rng, 5)
        longest = replace(GREEDY, max_tokens=LONGEST)
        alone = [generate(make_engine(SHAPE, **CACHES[cache]), [prompt], longest)[0] for prompt in prompts]
        # Each is asked again when others have taken its place, some of them at once.
        for batch in range(3 if cache in SLOW else 6):
            asked, length = rng.sample(range(5), 3), rng.randrange(1, LONGEST)
            answers = generate(engine, [prompts[index] for index in asked], replace(GREEDY, max_tokens=length))
            assert answers == [alone[index][:length] for index in asked], f"seed {seed + number}, batch {batch}"
            assert engine.holds_nothing
            engine.scheduler.manager.eviction.evict(rng.randrange(6, 20))
            engine.check()
        store.settle()
        assert store.num_put > 0 and (store.num_got > 0 or cache in SLOW), "nothing moved"
        assert (store.num_failed > 0) <= (failing > 0)
        assert not engine.scheduler.manager.fetching.arriving


def test_a_fetched_prefix_counts_as_cached_and_is_not_computed(seed: int) -> None:
    rng = random.Random(seed)
    first, second, third = ([rng.randrange(VOCABULARY) for _ in range(64 * 6 + 20)] for _ in range(3))
    store = ToyStore(seed, delay=0.01)
    engine = with_store(store, chunks=9)
    (answer,) = generate(engine, [first])
    generate(engine, [second])
    generate(engine, [third])
    before = engine.stats()
    engine.add("again", first, GREEDY)
    output = drain(engine)["again"]
    after = engine.stats()
    assert output.outputs[0].token_ids == answer and output.num_cached_tokens == 64 * 6
    assert after["prefill_tokens_cached"] - before["prefill_tokens_cached"] == 64 * 6
    assert after["prefill_tokens_computed"] - before["prefill_tokens_computed"] == 20
    assert store.num_got >= 1


def test_two_requests_for_the_same_run_fetch_it_once(seed: int) -> None:
    rng = random.Random(seed)
    first, second = ([rng.randrange(VOCABULARY) for _ in range(64 * 7)] for _ in range(2))
    store = ToyStore(seed, delay=0.01)
    engine = with_store(store, chunks=20)
    generate(engine, [[*first, 1]])
    generate(engine, [[*second, 1]])
    generate(engine, [[*second[::-1], 1]])
    generate(engine, [[*first[::-1], 1]])
    runs = {store.find(key) for key in engine_keys(engine, first)}
    assert None not in runs, "the prompt is not in the store"
    store.num_got = 0
    for name in range(4):
        engine.add(str(name), [*first, 5 + name], GREEDY)
    outputs = drain(engine)
    assert store.num_got == len(runs)
    assert sorted(output.num_cached_tokens for output in outputs.values()) == [64 * 7] * 4


def engine_keys(engine: Engine, tokens: list[int]) -> list[bytes]:
    return ChunkKeys(engine.namespace, tokens).first(len(tokens) // 64)


@pytest.mark.parametrize("steps", range(6))
def test_an_abort_while_chunks_are_under_way_gives_everything_back(steps: int, seed: int) -> None:
    rng = random.Random(seed)
    first, second = ([rng.randrange(VOCABULARY) for _ in range(64 * 6 + 20)] for _ in range(2))
    store = ToyStore(seed, delay=0.02)
    engine = with_store(store, chunks=9)
    (answer,) = generate(engine, [first])
    generate(engine, [second])
    engine.add("x", first, GREEDY)
    for _ in range(steps):
        engine.step()
        engine.check()
    engine.abort("x")
    engine.check()
    assert engine.holds_nothing and not engine.scheduler.manager.fetching.arriving
    assert generate(engine, [first]) == [answer]
    store.settle()
    assert generate(engine, [second, first])[1] == answer


def test_somebody_else_goes_on_while_chunks_are_under_way(seed: int) -> None:
    rng = random.Random(seed)
    first, other = ([rng.randrange(VOCABULARY) for _ in range(64 * 5 + 20)] for _ in range(2))
    store = ToyStore(seed, delay=0.1)
    engine = with_store(store, chunks=16)
    generate(engine, [first])
    for _ in range(4):
        generate(engine, [[rng.randrange(VOCABULARY) for _ in range(64 * 5)]])
    params = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
    expected = generate(make_engine(SHAPE), [other[:64]], params)
    running = engine.add("running", other[:64], params)
    while not running.sequences[0].num_generated:
        engine.step()
    fetching = engine.add("fetching", first, GREEDY)
    collected: dict[str, Any] = {}
    for delta in engine.step():
        merge_delta(collected, delta)
    assert fetching.sequences[0].path.transfer is not None, "nothing is fetched"
    while fetching.sequences[0].path.transfer is not None and running.sequences[0].num_generated < 100:
        before = running.sequences[0].num_generated
        engine.step()
        assert running.sequences[0].num_generated == before + 1
    drain(engine)
    assert running.sequences[0].token_ids[64:] == expected[0]


@combine(1, cache=["retained", "ranked", "retained nuq3", "retained byte", "retained reference"], failing=[0.0, 0.5])
def test_a_preempted_sequence_with_retention_is_swapped_and_goes_on_with_the_same_tokens(
    cache: str, failing: float, seed: int
) -> None:
    options = {**CACHES[cache], **({} if cache == "ranked" else {"retain.threshold": 0.5})}
    for number in range(1 if cache in SLOW else tries(1)):
        rng = random.Random(seed + number)
        prompts = [[rng.randrange(VOCABULARY) for _ in range(130 + 7 * index)] for index in range(4)]
        params = replace(GREEDY, max_tokens=80 if cache in SLOW or not IS_FULL else 150)
        roomy = [generate(make_engine(SHAPE, **options), [prompt], params)[0] for prompt in prompts]
        store = ToyStore(seed + number, delay=0.002, failing=failing)
        engine = with_store(store, chunks=40, **options)
        for index, prompt in enumerate(prompts):
            engine.add(str(index), prompt, params)
        collected: dict[str, Any] = {}
        swapped = num_steps = 0
        while engine.has_work:
            for delta in engine.step():
                merge_delta(collected, delta)
            engine.check()
            num_steps += 1
            if swapped < 12 and rng.random() < 0.2 and engine.scheduler.running:
                victim = rng.choice(engine.scheduler.running)
                is_small = victim.path.retention.retained is not None and victim.path.transfer is None
                engine.scheduler.preempt(victim)
                assert (victim.swapped is not None) == is_small
                swapped += is_small
                engine.check()
        assert [collected[str(index)].outputs[0].token_ids for index in range(4)] == roomy
        assert swapped > 0 and store.num_got > 0
        assert (store.num_failed > 0) <= (failing > 0)
        assert generate(engine, prompts[:2], params) == roomy[:2], "hit equals cold"
        if not failing:
            assert engine.stats()["replayed_tokens"] < 100 * swapped
        store.settle()
        assert all(run.is_shared for run in store.runs.values()), "a private run outlives its sequence"
        assert engine.holds_nothing


def test_a_swapped_sequence_that_is_aborted_leaves_nothing(seed: int) -> None:
    rng = random.Random(seed)
    store = ToyStore(seed, delay=0.01)
    engine = with_store(store, chunks=40, **{"retain.budget": 0.5, "retain.profile_rows": 32})
    request = engine.add("x", [rng.randrange(VOCABULARY) for _ in range(200)], replace(GREEDY, max_tokens=90))
    (sequence,) = request.sequences
    while sequence.num_generated < 20:
        engine.step()
    engine.scheduler.preempt(sequence)
    assert sequence.swapped is not None and store.find(sequence.swapped.run.names[0]) is not None
    engine.abort("x")
    assert not any(not run.is_shared for run in store.runs.values())
    assert engine.holds_nothing
    engine.check()


def test_private_runs_are_in_no_index_and_shared_ones_are_lossless(seed: int) -> None:
    rng = random.Random(seed)
    store = ToyStore(seed, delay=0.0)
    engine = with_store(store, chunks=14, **{**CACHES["retained"], "retain.threshold": 0.5})
    seen: list[Run] = []
    put = store.put

    def noted(run: Run, extents: Iterable[memoryview]) -> None:
        seen.append(run)
        put(run, extents)

    store.put = noted  # type: ignore[method-assign]
    for index, prompt in enumerate(prompts_of(rng, 8)):
        engine.add(str(index), prompt, replace(GREEDY, max_tokens=120))
    while engine.has_work:
        engine.step()
        if rng.random() < 0.05 and engine.scheduler.running:
            engine.scheduler.preempt(rng.choice(engine.scheduler.running))
    keys = {name for run in seen if run.is_shared for name in run.names}
    assert keys and all((run.masks[: len(run.names)] == 2**64 - 1).all() for run in seen if run.is_shared)
    assert not all(run.is_shared for run in seen)
    for run in seen:
        if not run.is_shared:
            assert len(run.names) == 1 and run.names[0] not in keys and not len(run.tokens)


def test_chunks_with_a_lifetime_of_their_own_never_reach_a_store(seed: int) -> None:
    rng = random.Random(seed)
    store = ToyStore(seed, delay=0.0)
    engine = with_store(store, chunks=30)
    manager = engine.scheduler.manager
    begin, rest = ([rng.randrange(VOCABULARY) for _ in range(64 * 3)] for _ in range(2))
    engine.add("short", [*begin, 1], GREEDY, CacheHints(cache_lifetime=60))
    drain(engine)
    # A request that keeps its chunks goes on from there: the beginning is kept for it.
    engine.add("branch", [*begin[:64], *rest, 1], GREEDY)
    drain(engine)
    (sequence,) = engine.add("preempted", rest[:100], GREEDY, CacheHints(cache_lifetime=60)).sequences
    while not sequence.num_generated:
        engine.step()
    engine.scheduler.preempt(sequence)
    assert sequence.swapped is None
    drain(engine)
    manager.demotion.run(sys.maxsize)
    manager.eviction.evict(manager.tree.num_chunks)
    kept = set(engine_keys(engine, [*begin[:64], *rest]))
    assert kept <= store.runs.keys(), "others are copied"
    private = set(engine_keys(engine, begin)[1:])
    assert private.isdisjoint(store.runs)


def test_one_run_that_is_lost_costs_no_other(seed: int) -> None:
    rng = random.Random(seed)
    store = ToyStore(seed, delay=0.0)
    engine = with_store(store, chunks=30)
    engine.scheduler.manager.fetching.costs.speed = 1e12
    prompt = [rng.randrange(VOCABULARY) for _ in range(64 * 6 + 5)]
    (expected,) = generate(engine, [prompt])
    engine.scheduler.manager.eviction.evict(99)
    before = dict(store.runs)
    lost = before[rng.choice(sorted(before))]
    store.extents[lost][rng.randrange(len(store.extents[lost]))] = b"no extent"
    assert len({*before.values()}) > 1 and generate(engine, [prompt]) == [expected]
    assert {*before.values()} - {*store.runs.values()} <= {lost}
    assert engine.scheduler.manager.fetching.counts.failed_transfers == 1


def test_a_request_with_a_lifetime_takes_nothing_from_the_store_that_others_left_there(seed: int) -> None:
    rng = random.Random(seed)
    store = ToyStore(seed, delay=0.0)
    engine = with_store(store)
    prompt = [rng.randrange(VOCABULARY) for _ in range(64 * 3 + 5)]
    generate(engine, [prompt])
    engine.scheduler.manager.eviction.evict(99)
    assert len(store.runs) == 3
    engine.add("short", prompt, GREEDY, CacheHints(cache_lifetime=0))
    assert drain(engine)["short"].cached_by_tier == {"toy": 64 * 3}
    engine.step()
    assert not engine.scheduler.manager.tree.num_chunks and len(store.runs) == 3


def test_what_is_fetched_ahead_has_priority_and_lifetime_of_its_request(seed: int) -> None:
    rng = random.Random(seed)
    store = ToyStore(seed, delay=0.0)
    engine = with_store(store, chunks=40)
    manager = engine.scheduler.manager
    prompt = [rng.randrange(VOCABULARY) for _ in range(64 * 4 + 1)]
    generate(engine, [prompt])
    manager.demotion.run(sys.maxsize)
    manager.eviction.evict(99)
    engine.scheduler.policy.max_running = 0
    engine.add("waits", prompt, GREEDY, CacheHints(cache_priority=7, cache_lifetime=60))
    while not manager.fetching.counts.prefetched:
        engine.step()
        store.settle()
        manager.fetching.tick()
    assert {(segment.priority, segment.lifetime) for segment in manager.tree.segments()} == {(7, 60)}


class SilentStore(ToyStore):
    """Brings nothing."""

    def get(self, transfer: Transfer, runs: Sequence[Run]) -> None:
        """Waits."""


def test_of_fetches_ahead_the_latest_one_gives_way(seed: int) -> None:
    rng = random.Random(seed)
    engine = with_store(SilentStore(seed), chunks=40)
    manager = engine.scheduler.manager
    prompts = {name: [rng.randrange(VOCABULARY) for _ in range(64 * 4 + 1)] for name in ("first", "second", "third")}
    for prompt in prompts.values():
        generate(engine, [prompt])
    manager.demotion.run(sys.maxsize)
    manager.eviction.evict(99)
    engine.scheduler.policy.max_running = 0
    requests = {name: engine.add(name, prompt, GREEDY) for name, prompt in prompts.items()}
    engine.step()
    for left in (["first", "second", "third"], ["first", "second"], ["first"]):
        assert list(manager.fetching.prefetches) == [requests[name].sequences[0] for name in left]
        assert manager.fetching.cancel_latest_prefetch()
    assert not manager.fetching.cancel_latest_prefetch()
    for name in prompts:
        engine.abort(name)
    assert engine.holds_nothing and not manager.fetching.arriving


def test_cached_tokens_count_once_though_chunks_behind_them_did_not_arrive(seed: int) -> None:
    rng = random.Random(seed)
    store = ToyStore(seed, delay=0.0, failing=1.0)
    engine = with_store(store, chunks=40)
    manager = engine.scheduler.manager
    prompt = [rng.randrange(VOCABULARY) for _ in range(64 * 4 + 1)]
    (answer,) = generate(engine, [prompt])
    manager.demotion.run(sys.maxsize)
    manager.eviction.evict(manager.tree.num_chunks - 2)
    engine.add("again", prompt, GREEDY)
    output = drain(engine)["again"]
    assert manager.fetching.counts.failed_transfers == 1 and output.outputs[0].token_ids == answer
    assert output.num_cached_tokens == 64 * 2


def test_nothing_is_fetched_ahead_from_which_retention_cannot_go_on(seed: int) -> None:
    """Chunks that the tree gets ahead have no column sums."""
    rng = random.Random(seed)
    engine = with_store(ToyStore(seed, delay=0.0), chunks=40, **RETAINED)
    manager = engine.scheduler.manager
    prompt = [rng.randrange(VOCABULARY) for _ in range(64 * 4 + 1)]
    generate(engine, [prompt])
    manager.demotion.run(sys.maxsize)
    manager.eviction.evict(99)
    engine.scheduler.policy.max_running = 0
    request = engine.add("waits", prompt, GREEDY)
    engine.step()
    assert manager.fetching.far(request.sequences[0].keys, 0, 4) and not manager.fetching.prefetches
    engine.abort("waits")


def test_a_step_behind_a_transfer_waits_for_its_layers(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    engine = with_store(SilentStore(seed), chunks=40)
    scheduler, manager = engine.scheduler, engine.scheduler.manager
    prompt = [rng.randrange(VOCABULARY) for _ in range(64 * 4 + 1)]
    generate(engine, [prompt])
    manager.demotion.run(sys.maxsize)
    manager.eviction.evict(99)
    (sequence,) = engine.add("again", prompt, GREEDY).sequences
    assert isinstance(scheduler.next_step(), Wait), "no layer has arrived"
    transfer = sequence.path.transfer
    assert transfer is not None
    monkeypatch.setattr(manager.fetching, "can_overlap", lambda path: True)
    step = scheduler.next_step()
    assert isinstance(step, Step) and [(piece.start, piece.num_rows) for piece in step.slices] == [(64 * 4, 1)]
    assert step.ready is transfer.ready
    engine.abort("again")
