"""Engines that move chunks all the time: whatever is near, far, half fetched, copied ahead or swapped, the tokens are
those of an engine with room for everything and no store.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest

from quire.cache.ledger import PAGE_TOKENS
from quire.cache.run import Run
from quire.engine.outputs import Logprob, RequestOutput
from quire.engine.request import Sequence, SequenceState
from quire.engine.step import Step, Wait
from quire.llm import merge_delta
from tests.cache.test_fetching import SHAPE, VOCABULARY, with_store

from ..codecs import EVERY, TOY, options_of
from ..effort import tries
from ..engines import GREEDY, drain, generate, make_engine
from ..poison import poison_free
from ..toy_guide import ToyGuide
from ..toy_store import ToyStore

pytestmark = pytest.mark.usefixtures("toy_codec")

RETENTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "recovery": {"retain.threshold": 0.7, "retain.profile_rows": 32},
    "budget": {"retain.budget": 0.5, "retain.profile_rows": 32},
}

PARTS = ("no retention", "codecs", "retention")
"""Each part has a third of the compositions."""


@dataclass(frozen=True)
class Composition:
    """One engine and one store, drawn."""

    codec: str
    retention: str
    shares: bool
    backend: str
    num_sinks: int
    drafts: bool
    token_budget: int
    max_running: int
    arena: float
    delay: float
    failing: float
    refusing: float
    speed: float | None
    prefill: float | None

    @property
    def options(self) -> dict[str, Any]:
        """Of the engine, without what only changes when things are computed."""
        codec = {} if self.codec == "dense" else options_of(self.codec) | {"cache.sink_tokens": self.num_sinks}
        return {**codec, **RETENTIONS[self.retention], "attention.backend": self.backend}

    @property
    def scheduling(self) -> dict[str, Any]:
        """What changes only when things are computed."""
        return {
            "scheduler.max_running": self.max_running,
            "scheduler.token_budget": self.token_budget,
            "cache.share": self.shares,
        }


def draw(rng: random.Random, part: str) -> Composition:
    codec = "dense" if part == "no retention" else rng.choice([*EVERY, "nuq3", "g4"])
    retention = rng.choice(["recovery", "budget"]) if part == "retention" else "none"
    if part == "retention" and rng.random() < 0.5:
        codec = "dense"
    backend = "reference" if codec == TOY.name or rng.random() < 0.15 else "cpu"
    max_running = rng.choice([1, 2, 4])
    least = PAGE_TOKENS + max_running + 32 * (retention != "none")
    return Composition(
        codec=codec,
        retention=retention,
        shares=rng.random() < 0.85,
        backend=backend,
        num_sinks=rng.choice([0, 3]),
        drafts=part == "no retention" and rng.random() < 0.5,
        token_budget=rng.choice([least, 128 + max_running, 300]),
        max_running=max_running,
        arena=rng.uniform(1.0, 2.0),
        delay=rng.choice([0.0, 0.002, 0.02]),
        failing=rng.choice([0.0, 0.3]),
        refusing=rng.choice([0.0, 0.2]),
        speed=rng.choice([None, 1e9, 1e9, 1e7]),
        prefill=rng.choice([None, 1e-3, 1e-6]),
    )


class Watched:
    """An engine with a store, which counts what moves, and at random preempts, aborts, evicts, loses and poisons."""

    def __init__(self, rng: random.Random, made: Composition, longest: int) -> None:
        self.rng, self.made = rng, made
        self.store = ToyStore(rng.randrange(2**30), made.delay, made.failing, made.refusing)
        # At the least the longest sequence fits with what retention needs beside it while the prompt is computed.
        chunks = int((2 + longest // PAGE_TOKENS) * made.arena * (1.6 if made.retention != "none" else 1.0)) + 1
        self.engine = with_store(self.store, chunks, **made.options, **made.scheduling)
        self.manager = self.engine.scheduler.manager
        self.counts: Counter[str] = Counter()
        self.collected: dict[str, RequestOutput] = {}
        costs = self.manager.fetching.costs
        costs.speed = made.speed
        if made.prefill is not None:
            costs.note_prefill(64, 64 * 32, 64 * made.prefill)
        self._count_copies()
        self._count_followed()

    def _count_copies(self) -> None:
        put, offer_evicted, demotion = self.store.put, self.manager.demotion.offer_evicted, self.manager.demotion
        is_last = [False]

        def noted(run: Run, extents: Iterable[memoryview]) -> None:
            if run.is_shared:
                self.counts["evicted to the store" if is_last[0] else "demoted"] += len(run.names)
            put(run, extents)

        def noted_last(*dropped_chunks: Any) -> None:
            is_last[0] = True
            offer_evicted(*dropped_chunks)
            is_last[0] = False

        self.store.put, demotion.offer_evicted = noted, noted_last  # type: ignore[method-assign]

    def _count_followed(self) -> None:
        next_step = self.engine.scheduler.next_step

        def noted() -> Step | Wait | None:
            step = next_step()
            if isinstance(step, Step) and step.ready is not None:
                self.counts["followed"] += 1
                self.counts["followed ahead"] += bool((step.ready == 0).any())
            self.counts["guests"] += len(self.manager.fetching.prefetches)
            return step

        self.engine.scheduler.next_step = noted  # type: ignore[method-assign]

    def step(self) -> None:
        for delta in self.engine.step():
            merge_delta(self.collected, delta)

    def disturb(self) -> str | None:
        """Something at random. Returns the id of a request that was aborted."""
        rng, scheduler, manager = self.rng, self.engine.scheduler, self.manager
        roll = rng.random()
        if roll < 0.06 and scheduler.running:
            scheduler.preempt(rng.choice(scheduler.running))
        elif roll < 0.08 and (live := [*scheduler.running, *scheduler.waiting]):
            request_id = rng.choice(live).request.request_id
            output = self.engine.abort(request_id)
            assert output is not None
            merge_delta(self.collected, output)
            return request_id
        elif roll < 0.14:
            manager.eviction.evict(rng.choice([1, 3, 99]))
        elif roll < 0.17 and self.store.runs:
            name = rng.choice(list(self.store.runs))
            if self.store.runs[name].is_shared:
                self.store.drop([name])
        elif roll < 0.22:
            self.engine.idle()
        elif roll < 0.3:
            poison_free(manager.table)
        return None

    def run_out(self, most: int = 5000) -> None:
        """Steps until all requests are answered."""
        steps = 0
        while self.engine.has_work:
            self.step()
            steps += 1
            assert steps < most, "the engine works and nothing ends"

    def is_left_clean(self) -> None:
        engine, fetching = self.engine, self.manager.fetching
        self.store.settle()
        engine.check()
        assert engine.holds_nothing and not fetching.arriving and not fetching.prefetches and fetching.transfer is None
        assert all(run.is_shared for run in self.store.runs.values()), "a private run outlives its sequence"
        self.manager.eviction.evict(1 << 20)
        assert self.manager.table.ledger.allocated_bytes == 0
        self.counts.update(vars(fetching.counts))


def prompts_of(rng: random.Random, count: int) -> list[list[int]]:
    """Most of them share a beginning of one to four chunks with others."""
    shared = [
        [rng.randrange(VOCABULARY) for _ in range(64 * rng.randrange(1, 5) + rng.randrange(64))] for _ in range(2)
    ]
    return [
        [*rng.choice([*shared, *shared, []]), *(rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 90)))]
        for _ in range(count)
    ]


MARGIN = 1e-4
"""Between the log-probabilities of the two likeliest tokens. With less, rounding decides, and so does the batch."""


def asked_of(made: Composition, rng: random.Random, most: int) -> tuple[list[list[int]], list[list[int]]]:
    """Four prompts, and their answers with room for everything and no store. No answer hangs on rounding."""
    while True:
        roomy = make_engine(SHAPE, chunks=200, **made.options)
        prompts = prompts_of(rng, 4)
        for index, prompt in enumerate(prompts):
            roomy.add(str(index), prompt, replace(GREEDY, max_tokens=most, logprobs=2))
        found = drain(roomy)
        assert roomy.stats()["preemptions"] == 0
        answers = [found[str(index)].outputs[0] for index in range(len(prompts))]
        if min(margin_of(each) for answer in answers for each in answer.logprobs or []) >= MARGIN:
            return prompts, [answer.token_ids for answer in answers]


def margin_of(likeliest: Mapping[int, Logprob]) -> float:
    first, second = sorted((each.logprob for each in likeliest.values()), reverse=True)[:2]
    return first - second


def check_tiers(output: RequestOutput) -> None:
    """Cached tokens by tier are those that were cached, and none is negative."""
    tiers = output.cached_by_tier
    assert all(count > 0 for count in tiers.values()) and sum(tiers.values()) == output.num_cached_tokens, (
        f"{output.num_cached_tokens} tokens cached, {tiers}"
    )


def play(made: Composition, rng: random.Random) -> Counter[str]:
    most = rng.randrange(20, 90)
    prompts, expected = asked_of(made, rng, most)
    watched = Watched(rng, made, max(map(len, prompts)) + most)
    engine = watched.engine
    asked: dict[str, tuple[int, int]] = {}
    aborted: set[str] = set()
    left, steps = 10, 0
    while left or engine.has_work:
        if left and len(engine.scheduler.waiting) < 4 and rng.random() < 0.3:
            left -= 1
            index, count = rng.randrange(len(prompts)), rng.randrange(1, most)
            name, prompt, answer = f"r{left}", prompts[index], expected[index]
            asked[name] = index, count
            guide = (lambda known: lambda: ToyGuide(known, rng))(prompt + answer) if made.drafts else None
            engine.add(name, prompt, replace(GREEDY, max_tokens=count), guide=guide)
        watched.step()
        if (name_of_aborted := watched.disturb()) is not None:
            aborted.add(name_of_aborted)
        steps += 1
        assert steps < 5000, "the engine works and nothing ends"
        if rng.random() < 0.3:
            engine.check()
    for name, (index, count) in asked.items():
        tokens = watched.collected[name].outputs[0].token_ids
        whole = expected[index][:count]
        assert tokens == whole[: len(tokens)], f"{name}: other tokens"
        assert name in aborted or len(tokens) == count
        check_tiers(watched.collected[name])
    if made.shares:
        make_it_move(watched, prompts, expected)
    else:
        swap_one(watched, prompts[0], expected[0])
    watched.is_left_clean()
    return watched.counts


def swap_one(watched: Watched, prompt: list[int], answer: list[int]) -> None:
    """A sequence is preempted while it decodes, and goes on; drawn orders have that too, and not always."""
    engine, made = watched.engine, watched.made
    watched.store.failing = watched.store.refusing = 0.0
    watched.manager.fetching.costs.__init__()  # type: ignore[misc]
    count = len(answer)
    (sequence,) = engine.add("swapped", prompt, replace(GREEDY, max_tokens=count)).sequences
    while sequence.num_generated < count // 2:
        watched.step()
    engine.scheduler.preempt(sequence)
    has_own = sequence.swapped is not None
    watched.run_out()
    assert watched.collected["swapped"].outputs[0].token_ids == answer
    assert has_own or made.retention == "none", "nothing was swapped"


def make_it_move(watched: Watched, prompts: list[list[int]], expected: list[list[int]]) -> None:
    """Every kind of movement once, where it can be: drawn orders have them all, and not every time."""
    engine, manager, store, made = watched.engine, watched.manager, watched.store, watched.made
    store.failing = store.refusing = 0.0
    costs = manager.fetching.costs
    longest = max(range(len(prompts)), key=lambda index: len(prompts[index]))
    prompt, answer = prompts[longest], expected[longest]
    params = replace(GREEDY, max_tokens=len(answer))
    costs.__init__()  # type: ignore[misc]
    swap_one(watched, prompt, answer)
    manager.demotion.run(1 << 30)
    store.delay = max(store.delay, 0.002)
    if made.retention == "none":
        for _ in range(10):  # until a step runs behind a transfer, of which a thread may be too fast
            costs.speed = 1e12
            manager.eviction.evict(99)
            engine.add("followed", prompt, params)
            watched.run_out()
            assert watched.collected.pop("followed").outputs[0].token_ids == answer
            store.delay = 0.02
            if watched.counts["followed ahead"]:
                break
    # Somebody waits for the only place in the batch, and his chunks come meanwhile: the other one needs little room.
    manager.eviction.evict(99)
    store.delay, running, engine.scheduler.policy.max_running = 0.001, engine.scheduler.policy.max_running, 1
    short = prompt[:3]
    roomy = make_engine(SHAPE, chunks=200, **made.options)
    (short_answer,) = generate(roomy, [short], replace(GREEDY, max_tokens=50))
    engine.add("first", short, replace(GREEDY, max_tokens=50))
    watched.step()
    (waits,) = engine.add("waits", prompt, params).sequences
    assert isinstance(waits, Sequence) and waits.state is SequenceState.WAITING
    watched.run_out()
    engine.scheduler.policy.max_running = running
    assert watched.collected["first"].outputs[0].token_ids == short_answer
    assert watched.collected["waits"].outputs[0].token_ids == answer
    check_tiers(watched.collected["waits"])


def test_tokens_by_tier_add_up_though_what_was_fetched_ahead_is_evicted_again(seed: int) -> None:
    rng = random.Random(seed)
    prompt, other = ([rng.randrange(VOCABULARY) for _ in range(64 * 4 + 9)] for _ in range(2))
    store = ToyStore(seed, delay=0.001)
    engine = with_store(store, chunks=30, **{"scheduler.max_running": 1})
    manager = engine.scheduler.manager
    generate(engine, [prompt])
    manager.eviction.evict(99)
    collected: dict[str, RequestOutput] = {}
    engine.add("first", other, GREEDY)
    engine.add("waits", prompt, GREEDY)
    while manager.fetching.counts.prefetched < 4:
        for delta in engine.step():
            merge_delta(collected, delta)
    manager.eviction.evict(3)
    store.drop(list(store.runs))
    while engine.has_work:
        for delta in engine.step():
            merge_delta(collected, delta)
    assert collected["waits"].num_cached_tokens == 64
    check_tiers(collected["waits"])


@pytest.mark.parametrize("rest", [0, 9])
def test_what_is_fetched_ahead_is_read_once_and_counted_by_its_store(rest: int, seed: int) -> None:
    rng = random.Random(seed)
    prompt, other = ([rng.randrange(VOCABULARY) for _ in range(64 * 4 + rest)] for _ in range(2))
    store = ToyStore(seed, delay=0.001)
    engine = with_store(store, chunks=60, **{"scheduler.max_running": 1})
    manager = engine.scheduler.manager
    generate(engine, [prompt])
    manager.demotion.run(1 << 30)
    manager.eviction.evict(99)
    num_runs = len({*store.runs.values()})
    engine.add("first", other, GREEDY)
    engine.add("waits", prompt, GREEDY)
    output = drain(engine)["waits"]
    assert output.cached_by_tier == {"toy": 64 * 4 - (rest == 0)} and store.num_got == num_runs


def test_what_is_fetched_in_two_parts_is_all_counted_by_its_store(seed: int) -> None:
    """One part while the sequence waits, the other, which comes to the store later, once it is admitted."""
    rng = random.Random(seed)
    prompt, other = ([rng.randrange(VOCABULARY) for _ in range(64 * 4 + 9)] for _ in range(2))
    store = ToyStore(seed, delay=0.001)
    engine = with_store(store, chunks=60, **{"scheduler.max_running": 1})
    manager = engine.scheduler.manager
    generate(engine, [prompt])
    manager.eviction.evict(2)
    late = {name: store.runs.pop(name) for name in list(store.runs)}
    manager.eviction.evict(99)
    engine.add("first", other, GREEDY)
    engine.add("waits", prompt, GREEDY)
    collected: dict[str, RequestOutput] = {}
    while manager.fetching.counts.prefetched < 2:
        for delta in engine.step():
            merge_delta(collected, delta)
    store.runs |= late
    assert drain(engine, collected)["waits"].cached_by_tier == {"toy": 64 * 4}


def test_all_swapped_sequences_of_a_prefix_that_is_far_come_back(seed: int) -> None:
    """While the prefix comes for the first one, the others wait for it and keep their own chunks in the store."""
    rng = random.Random(seed)
    shared = [rng.randrange(VOCABULARY) for _ in range(64 * 3)]
    prompts = [[*shared, *(rng.randrange(VOCABULARY) for _ in range(30 + index))] for index in range(3)]
    params = replace(GREEDY, max_tokens=50)
    expected = generate(make_engine(SHAPE), prompts, params)
    engine = with_store(ToyStore(seed, delay=0.01), chunks=60)
    sequences = [engine.add(str(index), prompt, params).sequences[0] for index, prompt in enumerate(prompts)]
    collected: dict[str, RequestOutput] = {}
    while min(each.num_generated for each in sequences) < 20:
        for delta in engine.step():
            merge_delta(collected, delta)
    for each in sequences:
        engine.scheduler.preempt(each)
        assert each.swapped is not None
    manager = engine.scheduler.manager
    manager.eviction.evict(99)
    while engine.has_work:
        for delta in engine.step():
            merge_delta(collected, delta)
        engine.check()
    assert [collected[str(index)].outputs[0].token_ids for index in range(3)] == expected
    assert manager.fetching.counts.swapped_in == 3 and engine.stats()["replayed_tokens"] == 0


@pytest.mark.parametrize("calls", range(4, 9))
def test_a_prefix_that_is_lost_while_its_sequence_comes_back_is_computed(calls: int, seed: int) -> None:
    """Threads of a store lose runs between two questions of the same admission."""

    class Losing(ToyStore):
        left = 0

        def find(self, name: bytes) -> Run | None:
            self.left -= 1
            if self.left == 0:
                self.drop([each for each, run in self.runs.items() if run.is_shared])
            return super().find(name)

    rng = random.Random(seed)
    prompt = [rng.randrange(VOCABULARY) for _ in range(64 * 3 + 20)]
    params = replace(GREEDY, max_tokens=20)
    expected = generate(make_engine(SHAPE), [prompt], params)
    store = Losing(seed, delay=0.001)
    engine = with_store(store, chunks=40)
    (sequence,) = engine.add("swapped", prompt, params).sequences
    collected: dict[str, RequestOutput] = {}
    while sequence.num_generated < 5:
        for delta in engine.step():
            merge_delta(collected, delta)
    engine.scheduler.preempt(sequence)
    assert sequence.swapped is not None
    engine.scheduler.manager.eviction.evict(99)
    store.left = calls
    while engine.has_work:
        for delta in engine.step():
            merge_delta(collected, delta)
        engine.check()
    assert [collected["swapped"].outputs[0].token_ids] == expected
    assert engine.holds_nothing


def test_a_sequence_that_comes_back_knows_the_segments_that_are_there_now(seed: int) -> None:
    """Its prefix was evicted and computed again for somebody else, in as many chunks but another segment."""
    rng = random.Random(seed)
    shared = [rng.randrange(VOCABULARY) for _ in range(128)]
    store = ToyStore(seed, delay=0.001)
    engine = with_store(store, chunks=40)
    scheduler, tree = engine.scheduler, engine.scheduler.manager.tree
    (sequence,) = engine.add("swapped", [*shared, 1, 2], GREEDY).sequences
    while sequence.num_generated < 5:
        engine.step()
    before = tree.shared(sequence.path)
    scheduler.preempt(sequence)
    assert sequence.swapped is not None
    scheduler.manager.eviction.evict(99)
    store.drop([name for name, run in store.runs.items() if run.is_shared])
    engine.add("other", [*shared, 3], GREEDY)
    scheduler.waiting.reverse()
    scheduler.policy.max_running = 1
    while sequence.state is SequenceState.WAITING:
        engine.step()
    path = sequence.path
    assert path.num_shared == 2 and scheduler.manager.fetching.counts.swapped_in == 1
    fresh = tuple((segment.number, len(segment.chunks)) for segment in path.segments)
    assert tree.shared(path) == fresh != before
    while engine.has_work:
        engine.step()


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_no_order_of_moves_changes_a_token(part: str, seed: int) -> None:
    """A night run has 300 compositions."""
    counts: Counter[str] = Counter()
    for number in range(tries(2)):
        rng = random.Random(f"{seed} {part} {number}")
        made = draw(rng, part)
        if number == 0:
            made = replace(made, shares=True)  # else nothing but swaps moves
        try:
            counts += play(made, rng)
        except BaseException as error:
            error.add_note(f"composition {number} of seed {seed}: {made}")
            raise
    print(part, dict(counts))
    wanted = {"fetched", "swapped_out", "swapped_in"}
    if part != "retention":
        wanted |= {"prefetched", "followed", "followed ahead"}
    never = [name for name in sorted(wanted) if not counts[name]]
    assert not never and counts["demoted"] + counts["evicted to the store"] > 0, f"never happened: {never}"


@pytest.mark.slow
def test_a_hundred_seeds_of_delays_give_the_same_tokens(seed: int) -> None:
    """One load, in an arena in which every prompt has to be fetched again. A full run has 100 seeds."""
    rng = random.Random(7)
    prompts = [[rng.randrange(VOCABULARY) for _ in range(64 * 3 + 10 * index)] for index in range(4)]
    prompts.append(prompts[0][:128] + prompts[1])
    params = replace(GREEDY, max_tokens=12)
    expected = generate(make_engine(SHAPE, chunks=100), prompts, params)
    counts: Counter[str] = Counter()
    for number in range(tries(20)):
        store = ToyStore(seed + number, delay=0.01)
        engine = with_store(store, chunks=11, **{"scheduler.max_running": 2})
        engine.scheduler.manager.fetching.costs.speed = 1e12
        for _ in range(2):
            order = random.Random(seed + number).sample(range(5), 5)
            answers = generate(engine, [prompts[index] for index in order], params)
            assert answers == [expected[index] for index in order], f"delays of seed {seed + number}"
        store.settle()
        assert engine.holds_nothing
        counts.update(vars(engine.scheduler.manager.fetching.counts))
    assert counts["fetched"] > 0 and not counts["failed_transfers"]
    print(dict(counts))
