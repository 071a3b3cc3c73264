"""What fetching and computing cost: the fits, the choice between the two, and who waits for a slow store."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from quire.attention import reference
from quire.attention.rows import wait_for
from quire.cache.costs import DECAY, LATENCY, LEAST_BYTES, LEAST_TOKENS, WEIGHT, Costs
from quire.cache.fetching import OVERLAP_SECONDS, Fetching
from quire.cache.keys import ChunkKeys
from quire.cache.run import Run, run_bytes
from quire.cache.store import Transfer
from quire.engine.engine import Engine
from quire.engine.params import SamplingParams
from quire.errors import QuireError
from quire.llm import merge_delta
from tests.cache.test_fetching import SHAPE, VOCABULARY, with_store

from ..effort import tries
from ..engines import GREEDY, drain, generate, make_engine
from ..store_helpers import put_store
from ..toy_store import ToyStore

# ---- fits ------------------------------------------------------------------------------------------------------------


def prefill_seconds(a: float, b: float, start: int, num_tokens: int) -> float:
    return num_tokens * a + b * num_tokens * (start + num_tokens / 2)


def note_slice(costs: Costs, start: int, num_tokens: int, seconds: float) -> None:
    costs.note_prefill(num_tokens, num_tokens * (start + num_tokens / 2), seconds)


def test_nothing_is_known_before_it_is_measured() -> None:
    costs = Costs()
    assert costs.fetch(0) is None and costs.prefill(0, 64) is None and costs.decode(1) is None
    costs.note_fetch(LEAST_BYTES - 1, 1.0)
    note_slice(costs, 0, LEAST_TOKENS - 1, 1.0)
    assert costs.fetch(0) is None and costs.prefill(0, 64) is None, "small ones say nothing"
    costs.note_decode(0.25)
    assert costs.decode(0) == 0.0 and costs.decode(8) == 2.0
    assert costs.fetch(1) is None and costs.prefill(0, 64) is None, "one measurement told of another"


def test_a_speed_is_exact_from_the_first_transfer_on_and_follows_changes(seed: int) -> None:
    rng = random.Random(seed)
    costs, speed = Costs(), 10 ** rng.uniform(7, 10)
    for _ in range(20):
        num_bytes = rng.randrange(LEAST_BYTES, 200 * LEAST_BYTES)
        costs.note_fetch(num_bytes, LATENCY + num_bytes / speed)
        # Of a transfer of a tenth of a millisecond not even the order is known.
        if num_bytes / speed > 1e-3:
            assert costs.speed == pytest.approx(speed, rel=0.2)
    costs = Costs()
    costs.note_fetch(10 << 20, LATENCY + (10 << 20) / 1e8)
    assert costs.fetch(5 << 20) == pytest.approx(LATENCY + (5 << 20) / 1e8)
    assert costs.fetch(0) == LATENCY
    # A disk that slows down to a hundredth: by the geometric mean, one outlier moves it little, and many all the way.
    costs.note_fetch(10 << 20, LATENCY + (10 << 20) / 1e6)
    assert costs.speed == pytest.approx(1e8 * 0.01**WEIGHT)
    for _ in range(60):
        costs.note_fetch(10 << 20, LATENCY + (10 << 20) / 1e6)
    assert costs.speed == pytest.approx(1e6, rel=0.01)


def test_a_transfer_that_took_no_time_has_a_speed() -> None:
    costs = Costs()
    costs.note_fetch(LEAST_BYTES, 0.0)
    assert costs.speed is not None and 0 < costs.speed < float("inf")


def test_prefill_is_exact_on_lines_without_noise(seed: int) -> None:
    for number in range(tries(20)):
        rng = random.Random(seed + number)
        a, b = 10 ** rng.uniform(-6, -3), 10 ** rng.uniform(-10, -6)
        costs = Costs()
        for place in range(30):
            start, num_tokens = 64 * rng.randrange(100), rng.randrange(LEAST_TOKENS, 2000)
            note_slice(costs, start, num_tokens, prefill_seconds(a, b, start, num_tokens))
            if place == 0:
                found = costs.prefill(start, num_tokens)
                assert found == pytest.approx(prefill_seconds(a, b, start, num_tokens)), "its own first measurement"
        for start, num_tokens in ((0, 64), (0, 4096), (8192, 64), (30_000, 1000)):
            expected = prefill_seconds(a, b, start, num_tokens)
            assert costs.prefill(start, num_tokens) == pytest.approx(expected, rel=1e-6)
        costs.forget_prefill()
        assert costs.prefill(0, 64) is None


def test_prefill_is_near_with_noise_and_never_negative(seed: int) -> None:
    for number in range(tries(20)):
        rng = random.Random(seed + number)
        a, b = 2e-4, 3e-8
        costs = Costs()
        for _ in range(200):
            start, num_tokens = 64 * rng.randrange(64), rng.randrange(64, 1024)
            seconds = prefill_seconds(a, b, start, num_tokens) * rng.uniform(0.8, 1.25)
            note_slice(costs, start, num_tokens, seconds)
        for start, num_tokens in ((0, 512), (2048, 512), (4096, 1024)):
            found = costs.prefill(start, num_tokens)
            assert found is not None and 0.7 < found / prefill_seconds(a, b, start, num_tokens) < 1.4
    # Where longer contexts seem faster, which noise can do, nothing is expected to be free.
    costs = Costs()
    for start in (0, 1000, 5000):
        note_slice(costs, start, 500, 0.5 / (1 + start))
    assert (costs.prefill(0, 64) or 0) > 0 and (costs.prefill(100_000, 64) or 0) > 0
    assert (costs.prefill(0, 128) or 0) == pytest.approx(2 * (costs.prefill(0, 64) or 0)), "the mean, without positions"


def test_slices_at_one_position_alone_tell_nothing_of_others() -> None:
    costs = Costs()
    for _ in range(5):
        note_slice(costs, 0, 256, 0.256)
    assert costs.prefill(0, 256) == pytest.approx(0.256)
    assert costs.prefill(10_000, 256) == pytest.approx(0.256)


def test_old_slices_lose_their_weight() -> None:
    costs = Costs()
    for start in (0, 512, 1024) * 20:
        note_slice(costs, start, 256, 1.0)
    num_new = 0
    while (costs.prefill(512, 256) or 0) < 1.9:
        note_slice(costs, 512 * (num_new % 3), 256, 2.0)
        num_new += 1
        assert num_new < 500
    assert 0.5 < DECAY**num_new / 0.1 < 2, "a tenth of the weight is left where a tenth of the way is missing"


# ---- the choice ------------------------------------------------------------------------------------------------------


class Unhurried(ToyStore):
    """Brings nothing by itself: a test delivers, in the order of the requests."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.asked: list[tuple[Transfer, Run]] = []

    def get(self, transfer: Transfer, runs: Sequence[Run]) -> None:
        self.num_got += len(runs)
        for run in runs:
            transfer.sources[run] = "toy"
            self.asked.append((transfer, run))

    def deliver(self, first: int = 0, end: int = 99) -> None:
        """The layers [first, end) of all that was asked for."""
        for transfer, run in self.asked:
            for extent in self.extents[run][first:end]:
                transfer.arrive(run, extent)


@dataclass
class Chosen:
    """What the decision depends on, at the moment of one."""

    num_bytes: int
    fetching: Fetching
    engine: Engine
    prompt: list[int] = field(default_factory=list)

    def ask(self) -> Any:
        """A request for the far prompt, and one step."""
        request = self.engine.add(f"far {len(self.engine._requests)}", self.prompt, GREEDY)
        self.engine.step()
        return request.sequences[0]


FAR = 6


def far_prompt(seed: int, near: int = 0, **options: Any) -> tuple[Chosen, Unhurried]:
    """An engine whose store has the six chunks of a prompt, and whose tree has the first `near` of them."""
    rng = random.Random(seed)
    store = Unhurried(seed)
    engine = with_store(store, chunks=40, **options)
    prompt = [rng.randrange(VOCABULARY) for _ in range(64 * FAR + 5)]
    generate(engine, [prompt])
    engine.scheduler.manager.eviction.evict(FAR - near)
    fetching = engine.scheduler.manager.fetching
    runs = fetching.far(ChunkKeys(engine.namespace, prompt), near, FAR)
    assert len(runs) == FAR - near
    pages = engine.scheduler.manager.table
    return Chosen(sum(run_bytes(pages, run) for run in {*runs}), fetching, engine, prompt), store


def tell(costs: Costs, speed: float | None, prefill: float | None) -> None:
    """Bytes a second, and seconds for a token at any position."""
    costs.speed = speed
    costs.forget_prefill()
    if prefill is not None:
        costs.note_prefill(64, 64 * 32, 64 * prefill)


def test_what_is_not_measured_is_fetched(seed: int) -> None:
    for speed, prefill in ((None, None), (1.0, None), (None, 1e-9)):
        chosen, store = far_prompt(seed)
        tell(chosen.fetching.costs, speed, prefill)
        assert chosen.ask().path.transfer is not None and store.num_got > 0
        assert not chosen.fetching.counts.computed_instead


@pytest.mark.parametrize("share, fetches", [(0.98, True), (1.02, False)])
def test_the_faster_of_the_two_is_chosen(share: float, fetches: bool, seed: int) -> None:
    chosen, store = far_prompt(seed)
    seconds = 64 * FAR * 1e-2
    tell(chosen.fetching.costs, chosen.num_bytes / (seconds * share - LATENCY), 1e-2)
    sequence = chosen.ask()
    assert (sequence.path.transfer is not None) == fetches == (store.num_got > 0)
    assert chosen.fetching.counts.computed_instead == (0 if fetches else FAR)
    store.deliver()
    drain(chosen.engine)
    assert sequence.num_cached_tokens == (64 * FAR if fetches else 0)


def test_chunks_that_are_not_fetched_ahead_either_count_once_as_computed(seed: int) -> None:
    rng = random.Random(seed + 1)
    chosen, store = far_prompt(seed, **{"scheduler.max_running": 1})
    tell(chosen.fetching.costs, 1e3, 1e-6)
    chosen.engine.add("first", [rng.randrange(VOCABULARY) for _ in range(70)], GREEDY)
    chosen.engine.add("waits", chosen.prompt, GREEDY)
    drain(chosen.engine)
    assert store.num_got == 0 and chosen.fetching.counts.computed_instead == FAR


@pytest.mark.parametrize("share, fetches", [(0.98, True), (1.02, False)])
def test_what_is_computed_starts_where_the_cached_part_ends(share: float, fetches: bool, seed: int) -> None:
    """Later positions cost more: so much that only with the right positions the choice comes out right."""
    near = 4
    chosen, _ = far_prompt(seed, near)
    costs = chosen.fetching.costs
    a, b = 1e-9, 1e-6
    costs.forget_prefill()
    for start in (0, 64, 640):
        note_slice(costs, start, 64, prefill_seconds(a, b, start, 64))
    seconds = prefill_seconds(a, b, 64 * near, 64 * (FAR - near))
    costs.speed = chosen.num_bytes / (seconds * share - LATENCY)
    assert (chosen.ask().path.transfer is not None) == fetches
    assert chosen.fetching.counts.computed_instead == (0 if fetches else FAR - near)


@pytest.mark.parametrize("backlog, fetches", [(0, True), (1, False)])
def test_transfers_that_are_under_way_delay_a_new_one(backlog: int, fetches: bool, seed: int) -> None:
    rng = random.Random(seed + 1)
    chosen, store = far_prompt(seed)
    engine, other = chosen.engine, [rng.randrange(VOCABULARY) for _ in range(64 * FAR + 5)]
    generate(engine, [other])
    engine.scheduler.manager.eviction.evict(99)
    costs, seconds = chosen.fetching.costs, 64 * FAR * 1e-2
    if backlog:
        tell(costs, None, None)
        engine.add("other", other, GREEDY)
        engine.step()
        assert len(store.asked) > 0
    # One takes 0.6 of the time of computing it, and one behind another 1.2. The other one is not computed before it.
    tell(costs, chosen.num_bytes / (seconds * 0.6 - LATENCY), 1e-2)
    sequence = chosen.ask()
    assert (sequence.path.transfer is not None) == fetches
    if backlog:
        engine.abort(sequence.request.request_id)
        engine.scheduler.manager.eviction.evict(99)
        store.deliver(1, 2)  # not the first layer, behind which a step would follow
        assert chosen.ask().path.transfer is not None, "half of what was ahead has arrived: 0.9 of the time"


@pytest.mark.parametrize("waiting, fetches", [(0, False), (1, True)])
def test_a_prompt_that_is_computed_before_makes_fetching_worth_more(waiting: int, fetches: bool, seed: int) -> None:
    rng = random.Random(seed + 1)
    chosen, _ = far_prompt(seed, **{"scheduler.token_budget": 128})
    engine, fetching = chosen.engine, chosen.fetching
    seconds = 64 * FAR * 1e-2
    if waiting:
        engine.add("before", [rng.randrange(VOCABULARY) for _ in range(64 * 6)], GREEDY)
        engine.step()  # two of its six chunks
    tell(fetching.costs, chosen.num_bytes / (seconds * 1.5 - LATENCY), 1e-2)
    sequence = chosen.ask()  # it waits for its admission, because the step is full
    assert (
        (sequence in fetching.prefetches)
        == fetches
        == (sequence.path.transfer is None and fetching.transfer is not None)
    )


def test_a_swap_pays_if_both_ways_take_less_time_than_computing_again(seed: int) -> None:
    rng = random.Random(seed)
    for share, swaps in ((0.9, True), (1.1, False)):
        store = ToyStore(seed, delay=0.001)
        engine = with_store(store, chunks=40)
        request = engine.add("x", [rng.randrange(VOCABULARY) for _ in range(64 * 2 + 20)], GREEDY)
        sequence = request.sequences[0]
        while sequence.num_generated < 10:
            engine.step()
        assert sequence.path.num_shared == 2 and len(sequence.path.private) == 1
        costs, manager = engine.scheduler.manager.fetching.costs, engine.scheduler.manager
        num_tokens = sequence.num_computed - 128  # the shared chunks stay where they are
        tell(costs, 2 * manager.table.bytes_of(sequence.path.private) / (num_tokens * 1e-2 * share - LATENCY), 1e-2)
        engine.scheduler.preempt(sequence)
        assert (sequence.swapped is not None) == swaps == (manager.fetching.counts.swapped_out > 0)
        drain(engine)
        assert engine.holds_nothing


def test_a_swap_of_a_decided_sequence_is_compared_with_its_decode_steps(seed: int) -> None:
    rng = random.Random(seed)
    for share, swaps in ((0.9, True), (1.1, False)):
        store = ToyStore(seed, delay=0.001)
        engine = with_store(store, chunks=40, **{"retain.budget": 0.5, "retain.profile_rows": 32})
        request = engine.add("x", [rng.randrange(VOCABULARY) for _ in range(150)], GREEDY)
        sequence = request.sequences[0]
        while sequence.num_generated < 20:
            engine.step()
        assert sequence.path.retention.is_decided
        costs, table = engine.scheduler.manager.fetching.costs, engine.scheduler.manager.table
        costs.note_decode(0.5)
        seconds = 150 * 1e-3 + (sequence.num_computed - 150) * 0.5
        num_bytes = table.bytes_of(sequence.path.private) + table.bytes_of(sequence.path.retention.sums)
        tell(costs, 2 * num_bytes / (seconds * share - LATENCY), 1e-3)
        engine.scheduler.preempt(sequence)
        assert (sequence.swapped is not None) == swaps
        drain(engine)


# ---- steps behind arriving layers ------------------------------------------------------------------------------------


def test_a_step_follows_only_where_the_rest_is_expected_soon(seed: int) -> None:
    chosen, store = far_prompt(seed)
    fetching = chosen.fetching
    sequence = chosen.ask()
    path = sequence.path
    assert path.transfer is not None
    soon, late = (chosen.num_bytes / 2 / (OVERLAP_SECONDS * share - LATENCY) for share in (0.9, 1.1))
    fetching.costs.speed = soon
    assert not fetching.can_overlap(path), "no layer has arrived"
    store.deliver(0, 1)  # of two
    assert fetching.can_overlap(path)
    fetching.costs.speed = late
    assert not fetching.can_overlap(path), "the step would hold up everybody for too long"
    fetching.costs.speed = None
    assert not fetching.can_overlap(path), "nobody knows when the rest arrives"
    # Bytes that arrived are not waited for.
    fetching.costs.speed = late
    path.transfer.ready[:] = 1
    assert fetching.can_overlap(path)


def test_nobody_follows_what_is_private(seed: int) -> None:
    rng = random.Random(seed)
    store = Unhurried(seed)
    engine = with_store(store, chunks=40)
    sequence = engine.add("x", [rng.randrange(VOCABULARY) for _ in range(150)], GREEDY).sequences[0]
    while sequence.num_generated < 5:
        engine.step()
    engine.scheduler.preempt(sequence)
    engine.step()
    fetching = engine.scheduler.manager.fetching
    fetching.costs.speed = 1e12
    assert sequence.path.transfer is not None
    store.deliver(0, 1)
    assert not fetching.can_overlap(sequence.path)
    store.deliver(1)
    drain(engine)


# ---- slow stores, and such as never answer ---------------------------------------------------------------------------


def test_a_request_on_a_very_slow_store_is_computed_instead(seed: int) -> None:
    chosen, store = far_prompt(seed)
    tell(chosen.fetching.costs, 1e3, 1e-6)
    (expected,) = generate(make_engine(SHAPE), [chosen.prompt])
    assert generate(chosen.engine, [chosen.prompt]) == [expected]
    assert store.num_got == 0 and chosen.fetching.counts.computed_instead == FAR
    assert chosen.engine.holds_nothing


@pytest.mark.parametrize("ends", ["fails", "arrives", "is aborted"])
def test_a_store_that_does_not_answer_holds_up_nobody_else(ends: str, seed: int) -> None:
    rng = random.Random(seed + 1)
    chosen, store = far_prompt(seed)
    engine, fetching = chosen.engine, chosen.fetching
    others = [[rng.randrange(VOCABULARY) for _ in range(90)] for _ in range(3)]
    params = SamplingParams(max_tokens=70, temperature=0.0, ignore_eos=True)
    *expected, first = generate(make_engine(SHAPE), [*others, chosen.prompt], params)
    running = engine.add("0", others[0], params).sequences[0]
    collected: dict[str, Any] = {}
    while not running.num_generated:
        for delta in engine.step():
            merge_delta(collected, delta)
    stuck = engine.add("stuck", chosen.prompt, params).sequences[0]
    for number in (1, 2):
        engine.add(str(number), others[number], params)
    num_steps = 0
    while not {"0", "1", "2"} <= {name for name, output in collected.items() if output.finished}:
        before = running.num_generated
        for delta in engine.step():
            merge_delta(collected, delta)
        engine.check()
        num_steps += 1
        if running.num_generated < 70:
            assert running.num_generated == before + 1, "a decode step waited for a store"
        assert num_steps < 100
    assert stuck.path.transfer is not None and not stuck.num_generated
    # Its pages stay its own, whatever the others take; and alone it is waited for in short naps, not in a loop.
    begun = time.monotonic()
    assert all(engine.step() == [] for _ in range(3))
    assert 0.03 < time.monotonic() - begun < 1.0
    if ends == "is aborted":
        engine.abort("stuck")
    elif ends == "arrives":
        store.deliver()
    else:
        stuck.path.transfer.fail(QuireError("the store gave up"))
    drain(engine, collected)
    if ends != "is aborted":
        assert collected["stuck"].outputs[0].token_ids == first
        assert collected["stuck"].num_cached_tokens == (64 * FAR if ends == "arrives" else 0)
    assert [collected[str(number)].outputs[0].token_ids for number in range(3)] == expected
    assert fetching.counts.failed_transfers == (ends == "fails")
    assert engine.holds_nothing and not fetching.arriving
    engine.check()


def test_a_transfer_that_fails_behind_a_step_ends_the_step_and_is_computed(seed: int) -> None:
    """The step itself waits then: for as long as the store takes to say so, and not for ever."""
    chosen, store = far_prompt(seed)
    engine, fetching = chosen.engine, chosen.fetching
    (expected,) = generate(make_engine(SHAPE), [chosen.prompt])
    followed: list[int] = []
    run = engine.runner.run

    def noted(step: Any) -> Any:
        if step.ready is not None:
            followed.append(int((step.ready == 1).sum()))
        return run(step)

    engine.runner.run = noted  # type: ignore[method-assign]
    sequence = chosen.ask()
    transfer = sequence.path.transfer
    assert transfer is not None
    fetching.costs.speed = 1e12
    store.deliver(0, 1)
    timer = threading.Timer(0.05, transfer.fail, [QuireError("it gave up")])
    timer.start()
    (output,) = drain(engine).values()
    timer.join()
    assert output.outputs[0].token_ids == expected and output.num_cached_tokens == 0
    assert followed == [1], "no step ran behind the transfer"
    assert engine.holds_nothing


@pytest.mark.alone
def test_layers_are_computed_while_later_ones_arrive(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight layers that take 60 ms each to arrive and to compute: 540 ms, and 960 one after the other."""
    rng = random.Random(seed)
    store = Unhurried(seed)
    options = {"attention.backend": "reference", "chunks": 40}
    engine = put_store(make_engine(replace(SHAPE, layers=SHAPE.layers[:1] * 8), **options), store)
    prompt = [rng.randrange(VOCABULARY) for _ in range(64 * 3 + 5)]
    (expected,) = generate(engine, [prompt], replace(GREEDY, max_tokens=1))
    engine.scheduler.manager.eviction.evict(3)
    engine.scheduler.manager.fetching.costs.speed = 1e12

    def bring() -> None:
        for layer in range(8):
            time.sleep(0.06)
            store.deliver(layer, layer + 1)

    def compute(ready: Any, layer: int) -> None:
        wait_for(ready, layer)
        if ready is not None:
            time.sleep(0.06)

    monkeypatch.setattr(reference, "wait_for", compute)
    engine.add("far", prompt, replace(GREEDY, max_tokens=1))
    engine.step()
    begun, thread = time.monotonic(), threading.Thread(target=bring)
    thread.start()
    output = drain(engine)["far"]
    assert time.monotonic() - begun < 0.8
    assert output.outputs[0].token_ids == expected and output.num_cached_tokens == 192
    thread.join()
