"""Engines with retention, compared with an oracle of one sequence that keeps everything and masks: kept tokens, and
every logit.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from quire.cache.codecs import DENSE
from quire.cache.keys import ChunkKeys
from quire.engine.outputs import Logprob, RequestOutput
from quire.engine.params import CacheHints, SamplingParams
from quire.engine.request import Sequence, SequenceState
from quire.engine.retention_report import report_of
from quire.errors import ConfigError
from quire.llm import merge_delta
from tests.codecs import ENCODING, EVERY, row_of
from tests.effort import IS_FULL, tries
from tests.engines import drain, make_engine
from tests.retention_cases import BOS, Bench, EngineRecorder, Head, HeadWeights
from tests.retention_oracle import SPECIAL, Rules
from tests.tiny_models import tiny_shape

MEMBERS = ("special", "punctuation", "frequent", "local")
LENGTHS = (1, 2, 5, 40, 63, 64, 65, 100, 127, 128, 129, 160, 191, 192, 193, 256, 257, 300)


def greedy(count: int, **changes: Any) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, **changes)


def drawn_prompt(rng: random.Random, length: int) -> list[int]:
    """Bytes, a few of them punctuation, and now and then a special token."""
    tokens = [rng.choice([*range(97, 123)] * 3 + [*b" ,.:?"] + [*range(128, 200)] + [BOS]) for _ in range(length)]
    return [BOS, *tokens[1:]] if rng.random() < 0.7 else tokens


def drawn_head(rng: random.Random) -> Head:
    kinds = ("special", "punctuation", "heavy", "near")
    told = {kind: rng.choice([1.0, 2.0, 4.0]) for kind in rng.sample(kinds, rng.choice([0, 1, 1, 2]))}
    return Head(**told, noise=rng.choice([0.0, 0.5, 2.0, 4.0]))


def drawn_bench(
    rng: random.Random, backend: str, budget: float | None = None, codec: str = DENSE, **options: Any
) -> Bench:
    row = row_of(codec)
    dims = {} if codec == DENSE else {"head_dim": 64 if row.is_calibrated else 16}
    shape = tiny_shape(rng.choice(["llama", "llama", "qwen3", "smollm"]), **dims)
    heads = [[drawn_head(rng) for _ in range(shape.num_kv_heads)] for _ in range(shape.num_layers)]
    members = rng.sample(MEMBERS, rng.randint(1, 4)) if rng.random() < 0.4 else MEMBERS
    if row.has_sinks:  # whose exact first tokens are special
        members = ("special", *(member for member in members if member != "special"))
    rules = Rules(
        threshold=rng.choice([0.0, 0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0, 1.1]),
        frequent=rng.choice([0.0, 0.02, 0.1, 0.3, 0.3, 0.6, 1.0]),
        local=rng.choice([0.0, 0.02, 0.1, 0.3, 0.3, 0.7]),
        members=tuple(members),
        profile_rows=rng.choice([1, 5, 17, 64, 100]),
        special=rng.choice([SPECIAL, SPECIAL, (*SPECIAL, (98, 97), (99, 100, 101))]),
        budget=budget,
    )
    options = {
        "cache.codec": codec,
        "cache.share": rng.random() < 0.7,
        "scheduler.max_running": 4,
        "scheduler.token_budget": 4 + rules.profile_rows + 64 + rng.choice([0, 0, 64, 1000]),
        **options,
    }
    return Bench(shape, HeadWeights(shape, heads, rng.randrange(1000)), rules, backend, options=options)


def run_drawn_case(rng: random.Random, bench: Bench) -> None:
    """Several prompts, perhaps with a common beginning, perhaps twice, perhaps several answers to one."""
    witness = bench.witness
    common = drawn_prompt(rng, rng.choice([0, 0, 64, 70, 130, 192]))
    prompts = [common + drawn_prompt(rng, rng.choice(LENGTHS)) for _ in range(rng.choice([1, 1, 2, 3]))]
    count = rng.choice([1, 2, 30, 66, 100, 140, 200] if len(prompts) == 1 else [1, 30, 66, 100])
    params = greedy(count)
    if rng.random() < 0.15:
        params = SamplingParams(n=2, max_tokens=count, temperature=1.0, seed=rng.randrange(99), ignore_eos=True)
    elif rng.random() < 0.15:
        params = greedy(count, n=rng.choice([1, 2]), prompt_logprobs=0)
    collected: dict[str, RequestOutput] = {}
    for round_number in range(rng.choice([1, 1, 2])):
        for index, prompt in enumerate(prompts):
            witness.add(f"{round_number} {index}", prompt[:400], params)
            for _ in range(rng.choice([0, 0, 3])):
                witness.step(collected)
        if rng.random() < 0.2:
            for _ in range(rng.randint(0, 20)):
                witness.step(collected)
            bench.witness.engine.abort(f"{round_number} {rng.randrange(len(prompts))}")
            witness.engine.check()
        witness.drain(collected)
    bench.check()
    stats = witness.engine.stats()["cache"]
    assert stats["bytes_used"] == 0


@pytest.mark.parametrize("number", range(tries(20)))
def test_the_cpu_backend_does_what_the_oracle_does(number: int) -> None:
    rng = random.Random(number)
    run_drawn_case(rng, drawn_bench(rng, "cpu"))


@pytest.mark.parametrize("number", range(1000, 1000 + tries(5)))
def test_the_reference_backend_does_what_the_oracle_does(number: int) -> None:
    rng = random.Random(number)
    run_drawn_case(rng, drawn_bench(rng, "reference"))


@pytest.mark.parametrize("number", range(2000, 2000 + tries(10)))
def test_what_a_budget_keeps_is_what_the_oracle_keeps(number: int) -> None:
    rng = random.Random(number)
    budget = rng.choice([0.1, 0.25, 0.4, 0.5, 0.75, 0.9])
    run_drawn_case(rng, drawn_bench(rng, "cpu" if number % 5 else "reference", budget))


@pytest.mark.usefixtures("toy_codec")
@pytest.mark.parametrize("number", range(3000, 3000 + tries(7)))
def test_encoded_pages_keep_and_answer_like_the_oracle(number: int) -> None:
    rng, codec = random.Random(number), EVERY[number % len(EVERY)]
    backend = "cpu" if number % 4 and codec in ENCODING else "reference"
    run_drawn_case(rng, drawn_bench(rng, backend, codec=codec))


SHAPE = tiny_shape()
MIXED = HeadWeights(
    SHAPE,
    [[Head(special=3, noise=1.0), Head(near=3, noise=1.0)], [Head(heavy=3, noise=2.0), Head(noise=3.0)]],
    seed=1,
)
THRIFTY = HeadWeights(SHAPE, [[Head(special=6), Head(near=6)], [Head(special=6), Head(heavy=6)]], seed=2)
BACKENDS = pytest.mark.parametrize("backend", ["cpu", "reference"])
BUDGETS = pytest.mark.parametrize("budget", [None, 0.5])


def prompt_of(length: int, seed: int) -> list[int]:
    return [BOS, *drawn_prompt(random.Random(seed), length - 1)]


def answer(bench: Bench, name: str, *requests: tuple[list[int], SamplingParams]) -> list[Sequence]:
    """The sequences of requests that come at once."""
    for index, (prompt, params) in enumerate(requests):
        bench.witness.add(f"{name} {index}", prompt, params)
    bench.witness.drain()
    return [each for index in range(len(requests)) for each in bench.witness.sequences[f"{name} {index}"]]


def assert_same_tokens(bench: Bench, one: Sequence, other: list[int]) -> None:
    """What a sequence of a bench that was checked says is what another said, unless two logits were equal."""
    tokens = one.token_ids
    assert len(tokens) == len(other)
    at = next((i for i, pair in enumerate(zip(tokens, other, strict=True)) if pair[0] != pair[1]), None)
    if at is not None:
        logits = bench.runs[one].logits[at - one.num_prompt]
        assert abs(float(logits[tokens[at]] - logits[other[at]])) < 2e-4, f"token {at} differs"


@BACKENDS
@BUDGETS
def test_one_prompt_cold_found_twice_at_once_and_after_eviction(backend: str, budget: float | None) -> None:
    rules = Rules(0.8, profile_rows=40, budget=budget)
    bench = Bench(SHAPE, MIXED, rules, backend, chunks=26, options={"cache.share": True})
    engine, manager = bench.witness.engine, bench.witness.engine.scheduler.manager
    before = manager.stats()
    request = prompt_of(300, 1), greedy(100 if backend == "cpu" else 30)
    found = answer(bench, "cold", request)
    found += answer(bench, "hit", request)
    assert [each.num_cached_tokens for each in found] == [0, 256]
    found += answer(bench, "together", request, (prompt_of(150, 2), greedy(20)), request)[::2]
    assert manager.tree is not None
    seed = 3
    while list(manager.tree.walk(ChunkKeys(engine.namespace, request[0]), 1)):
        answer(bench, f"other {seed}", (prompt_of(250, seed), greedy(2)))
        seed += 1
    found += answer(bench, "after eviction", request)
    assert found[-1].num_cached_tokens == 0 and len(found) == 5
    bench.check()
    kept = {str(bench.runs[each].of_prompt) for each in found}
    assert len(kept) == 1 and 0.0 < (found[0].kept_fraction or 0) < 0.9
    for each in found[1:]:
        assert_same_tokens(bench, each, found[0].token_ids)
    manager.eviction.evict(manager.tree.num_idle)
    engine.check()
    after = manager.stats()
    assert all(after[name] == before[name] for name in ("bytes_used", "bytes_cached", "bytes_free"))
    assert manager.tree.num_chunks == manager.table.ledger.allocated_bytes == manager.table.num_taken == 0


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("budget", [None, 0.75])
def test_little_memory_changes_no_token(share: bool, budget: float | None) -> None:
    requests = [(prompt_of(length, length), greedy(180)) for length in (100, 60, 120, 70)]
    found = []
    for chunks in (64, 9 if budget is None else 6):
        rules = Rules(0.93, profile_rows=40, budget=budget)
        bench = Bench(SHAPE, MIXED, rules, chunks=chunks, options={"cache.share": share})
        sequences = answer(bench, "x", *requests)
        bench.check()
        found.append((bench, sequences))
    roomy, tight = (bench.witness.engine.stats() for bench, _ in found)
    assert roomy["preemptions"] == 0 < tight["preemptions"] and tight["replayed_tokens"] > 0
    assert max(sequence.num_preemptions for sequence in found[1][1]) > 0
    for one, other in zip(found[0][1], found[1][1], strict=True):
        assert_same_tokens(found[0][0], one, other.token_ids)
        assert one.kept_fraction == other.kept_fraction


@pytest.mark.parametrize("share", [False, True])
def test_who_retains_needs_no_preemption_where_others_do(share: bool) -> None:
    requests = [(prompt_of(100, seed), greedy(170)) for seed in range(4)]
    counted = []
    for threshold in ("off", 0.8):
        bench = Bench(SHAPE, THRIFTY, Rules(0.8, 0.1, 0.1, profile_rows=40), chunks=14, options={"cache.share": share})
        if threshold == "off":
            bench.witness = EngineRecorder(bench.engine(**{"retain.threshold": "off"}))
        answer(bench, "x", *requests)
        if threshold != "off":
            bench.check()
        counted.append(bench.witness.engine.stats())
    assert counted[0]["preemptions"] > 0 == counted[1]["preemptions"]
    assert counted[0]["cache"]["bytes_retention_freed"] == 0 < counted[1]["cache"]["bytes_retention_freed"]
    assert counted[1]["steps"] < counted[0]["steps"]


@BACKENDS
@pytest.mark.parametrize("share", [False, True])
def test_the_next_request_gets_the_pages_of_a_decision_in_the_next_step(backend: str, share: bool) -> None:
    options = {"cache.share": share, "scheduler.token_budget": 512}
    bench = Bench(SHAPE, THRIFTY, Rules(0.8, 0.1, 0.1, profile_rows=40), backend, chunks=9, options=options)
    first, second = (prompt_of(440, 1), greedy(10)), (prompt_of(190, 2), greedy(10))
    for threshold in ("off", 0.8):
        witness = bench.witness
        if threshold == "off":
            witness = EngineRecorder(bench.engine(**{"retain.threshold": "off"}))
        engine = witness.engine
        scheduler = engine.scheduler
        witness.add("first", *first)
        witness.add("second", *second)
        (sequence,) = witness.sequences["first"]
        while not sequence.num_generated:
            witness.step({})
            assert scheduler.running == [sequence] and len(scheduler.waiting) == 1
        free = engine.stats()["cache"]["bytes_free"] + engine.stats()["cache"]["bytes_cached"]
        chunk_bytes = scheduler.manager.statistics.chunk_bytes
        witness.step({})
        if threshold == "off":
            assert free < 3 * chunk_bytes and len(scheduler.running) == 1 == len(scheduler.waiting)
        else:
            assert free > 4 * chunk_bytes and len(scheduler.running) == 2
            assert witness.sequences["second"][0].num_computed > 0
            assert sequence.num_generated == 2
            witness.drain()
    bench.check()


def test_a_request_that_fails_disturbs_nobody_in_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt beside it and an answer are decided on, and go on, as if it had not been."""
    bench = Bench(SHAPE, MIXED, Rules(0.8, profile_rows=40), options={"scheduler.token_budget": 512})
    engine = bench.witness.engine
    bench.witness.add("answer", prompt_of(100, 3), greedy(100))
    while not bench.witness.sequences["answer"][0].num_generated:
        bench.witness.step({})
    bench.witness.add("prompt", prompt_of(300, 1), greedy(70))
    (prompt,) = bench.witness.sequences["prompt"]
    while engine.scheduler.manager.retention.slice_limits(prompt).end < 300 or not prompt.num_computed:
        bench.witness.step({})
    before = bench.witness.sequences["answer"][0].num_generated
    (bad,) = engine.add("bad", prompt_of(60, 2), greedy(3, prompt_logprobs=0)).sequences
    monkeypatch.setattr(engine.runner.sampler, "prompt_logprobs", lambda *asked: [{1: Logprob(math.nan)}])
    bench.witness.step({})
    assert bad.state is SequenceState.FINISHED and not bad.num_generated
    assert prompt.path.retention.is_decided, "it is decided on in this step"
    assert bench.witness.sequences["answer"][0].num_generated == before + 1, "it has its token of this step"
    bench.witness.drain()
    assert not any(bench.witness.sequences[name][0].num_preemptions for name in ("answer", "prompt"))
    bench.check()


@BUDGETS
@BACKENDS
def test_a_report_is_of_what_was_decided(backend: str, budget: float | None) -> None:
    bench = Bench(SHAPE, MIXED, Rules(0.8, profile_rows=40, budget=budget), backend, options={"cache.share": False})
    manager = bench.witness.engine.scheduler.manager
    assert manager.retainer is not None
    reports = []
    manager.retainer.on_decision = lambda decided, before, after: reports.append(report_of(decided, before, after))
    answer(bench, "x", (prompt_of(300, 1), greedy(1)), (prompt_of(40, 2), greedy(1)))
    bench.check()
    for name, report in zip(("x 0", "x 1"), reports, strict=True):
        (sequence,) = bench.witness.sequences[name]
        n, run = sequence.num_prompt, bench.runs[sequence]
        assert report.kept_fraction == pytest.approx(sequence.kept_fraction)
        assert report.bytes_full == -(-n // 64) * manager.statistics.chunk_bytes and report.budget == budget
        open_chunk = set(range(n // 64 * 64, n))
        assert report.kept.tolist() == [[len(each | open_chunk) for each in of_layer] for of_layer in run.of_prompt]
        for layer, head in np.ndindex(report.policies.shape):
            expected = run.recovery[layer][head]
            assert report.recovery[layer, head, : len(expected)] == pytest.approx(expected, abs=1e-5)
    assert reports[0].bytes_kept < 0.8 * reports[0].bytes_full and reports[0].kept_fraction < 0.8
    assert reports[1].kept_fraction == 1.0


@pytest.mark.parametrize("victim", ["first", "equal", "other", "late"])
def test_an_abort_in_any_phase_disturbs_nobody_and_leaves_nothing(victim: str) -> None:
    """Of requests one of which waits for what another is about to leave, and one for room."""
    phases = set()
    for step in (3, 9, 40, 82, 110, *((0, 1, 2, 5) if IS_FULL else ())):
        bench = Bench(
            SHAPE,
            MIXED,
            Rules(0.8, profile_rows=40),
            chunks=13,
            options={"cache.share": True, "scheduler.token_budget": 110, "scheduler.max_running": 4},
        )
        witness = bench.witness
        manager = witness.engine.scheduler.manager
        assert manager.retainer is not None and manager.retainer.shares_sums
        common = prompt_of(300, 7)
        witness.add("first", common, greedy(70))
        witness.add("equal", common, greedy(70))
        witness.add("other", [*common[:130], *prompt_of(40, 8)], greedy(90))
        witness.add("late", prompt_of(310, 9), greedy(60))
        outputs: dict[str, RequestOutput] = {}
        for _ in range(step):
            witness.step(outputs)
        (sequence,) = witness.sequences[victim]
        phases.add(phase(bench, sequence))
        witness.engine.abort(victim)
        witness.engine.check()
        witness.drain(outputs)
        assert set(outputs) | {victim} == {"first", "equal", "other", "late"}
        bench.check()
        assert not manager.retainer.shared_sums.stops and witness.engine.stats()["cache"]["bytes_used"] == 0
        assert not any(segment.locks.any() or segment.users for segment in manager.tree.segments())
    assert len(phases) >= 3, phases


def phase(bench: Bench, sequence: Sequence) -> str:
    """Where a sequence stands."""
    path = sequence.path
    if sequence.state is not SequenceState.RUNNING:
        return sequence.state.value if not sequence.num_preemptions else "preempted"
    if bench.witness.engine.scheduler.manager.retention.must_wait(sequence):
        return "waits for another's sums"
    if not path.retention.is_decided:
        return "prompt"
    return "decided" if path.num_sealed == sequence.num_prompt // 64 else "sealed again"


@BACKENDS
@BUDGETS
def test_answers_to_one_prompt_keep_alike_and_go_their_own_ways(backend: str, budget: float | None) -> None:
    params = SamplingParams(n=3, max_tokens=70, temperature=1.0, seed=5, ignore_eos=True)
    rules = Rules(0.8, profile_rows=40, budget=budget)
    bench = Bench(SHAPE, MIXED, rules, backend, options={"cache.share": True})
    several = answer(bench, "x", (prompt_of(250, 11), params))
    single = answer(bench, "y", (prompt_of(250, 11), replace(params, n=1)))
    bench.check()
    assert len({tuple(each.token_ids) for each in several}) == 3
    assert several[0].token_ids == single[0].token_ids
    assert len({str(bench.runs[each].of_prompt) for each in several}) == 1


@BUDGETS
def test_how_a_prompt_is_cut_decides_nothing(budget: float | None) -> None:
    """Slices of any length, on a hit and without one, beside others and alone."""
    prompt = prompt_of(330, 12)
    kept = set()
    for rows in (4 + 40 + 64, 180, 2048):
        for share in (False, True):
            bench = Bench(
                SHAPE,
                MIXED,
                Rules(0.8, profile_rows=40, budget=budget),
                options={
                    "cache.share": share,
                    "scheduler.token_budget": rows,
                    "scheduler.max_running": 4,
                },
            )
            found = answer(bench, "x", (prompt, greedy(5)), (prompt_of(100, 13), greedy(9)), (prompt, greedy(5)))[::2]
            found += answer(bench, "y", (prompt, greedy(5)))
            bench.check()
            for each in found:
                first, *_ = bench.witness.kept[each].values()
                kept.add((str(first.policies), str(first.kept), tuple(each.token_ids)))
    assert len(kept) == 1


@pytest.mark.parametrize("budget", [0.1, 0.4, 0.5, 0.75])
def test_a_budget_is_kept_to_whenever_pages_are_dealt_and_used_up(budget: float) -> None:
    """In the allocator's bytes, in every step: pages, the peaks beside them, and the open chunk. That, and a page that
    begins the sequence, is the least.
    """
    options = {"cache.share": False}
    bench = Bench(SHAPE, MIXED, Rules(0.0, profile_rows=40, budget=budget), chunks=80, options=options)
    witness, manager = bench.witness, bench.witness.engine.scheduler.manager
    table = manager.table
    assert table.sums is not None
    page_bytes = int(table.page_sizes(table.sealed_codec)[0, 0]) + table.sums.page_bytes
    least = 2 * SHAPE.num_layers * SHAPE.num_kv_heads * page_bytes
    witness.add("x", [token if token != BOS else 32 for token in prompt_of(370, 31)], greedy(141))
    (sequence,) = witness.sequences["x"]
    checked = set()
    while witness.engine.has_work:
        witness.step({})
        path = sequence.path
        if path.retention.retained is not None:
            num_tokens = len(sequence.token_ids) - 1
            held = table.bytes_of(path.chunks) + table.bytes_of(path.retention.sums)
            room = budget * -(-num_tokens // 64) * manager.statistics.chunk_bytes
            assert held <= max(room, least), num_tokens
            assert num_tokens % 64 == 0 or held > room - page_bytes, num_tokens
            checked.add(num_tokens)
    assert checked == set(range(370, 510))
    bench.check()


def test_a_prompt_may_be_pinned_though_its_answer_keeps_less() -> None:
    bench = Bench(SHAPE, THRIFTY, Rules(0.8, 0.1, 0.1, profile_rows=40), chunks=12, options={"cache.share": True})
    engine, prompt = bench.witness.engine, prompt_of(200, 14)
    bench.witness.sequences["pinned"] = list(
        engine.add("pinned", prompt, greedy(70), CacheHints(cache_pin=True)).sequences
    )
    bench.witness.drain()
    for seed in range(20, 30):
        answer(bench, str(seed), (prompt_of(400, seed), greedy(2)))
    assert engine.stats()["cache"]["bytes_evicted"] > 0
    assert engine.stats()["cache"]["bytes_pinned"] == 3 * engine.scheduler.manager.statistics.chunk_bytes
    (again,) = answer(bench, "again", (prompt, greedy(70)))
    bench.check()
    assert again.num_cached_tokens == 128
    assert_same_tokens(bench, again, bench.witness.sequences["pinned"][0].token_ids)


@BUDGETS
def test_a_conversation_of_many_turns_keeps_what_each_turn_alone_would(budget: float | None) -> None:
    """In little memory, most of which it comes to hold: neither sums of its turns nor rows of the table run out."""
    shape = tiny_shape(max_context=2048)
    rules = Rules(0.8, 0.1, 0.1, profile_rows=16, budget=budget)
    kept, hits = [], 0
    for share in (True, False):
        bench = Bench(
            shape,
            HeadWeights(shape, THRIFTY.heads, seed=2),
            rules,
            chunks=26,
            options={"cache.share": share, "scheduler.token_budget": 400, "scheduler.max_running": 4},
        )
        engine = bench.witness.engine
        tokens = [token if token != BOS else 32 for token in prompt_of(64 * 26, 5)]
        for turn in range(1, 23):
            (sequence,) = engine.add(str(turn), tokens[: 64 * turn + 20], greedy(1)).sequences
            steps = 0
            while engine.has_work:
                engine.step()
                steps += 1
                assert steps < 50, f"turn {turn} does not end"
            kept.append(sequence.kept_fraction)
            hits += sequence.num_cached_tokens
        engine.check()
        assert engine.stats()["preemptions"] == 0
    assert kept[:22] == pytest.approx(kept[22:], abs=1e-3) and max(kept[1:22]) < 0.9
    assert hits > 10 * 64 * 10


def test_a_prompt_that_fills_the_memory_leaves_most_of_itself_in_the_cache() -> None:
    """Only as many of its last chunks go as its heads keep pages."""
    bench = Bench(SHAPE, MIXED, Rules(0.0, profile_rows=16, budget=0.25), chunks=9, options={"cache.share": True})
    prompt = [token if token != BOS else 32 for token in prompt_of(500, 6)]
    first, again = (answer(bench, name, (prompt, greedy(3)))[0] for name in ("cold", "hit"))
    bench.check()
    assert first.num_cached_tokens == 0 and again.num_cached_tokens >= 4 * 64
    assert_same_tokens(bench, again, first.token_ids)


def test_a_long_prompt_is_admitted_though_most_of_it_is_cached() -> None:
    """What it finds and what it will keep of it together are more than there is; one of them goes."""
    bench = Bench(SHAPE, THRIFTY, Rules(0.8, 0.1, 0.1, profile_rows=40), chunks=9, options={"cache.share": True})
    prompt = prompt_of(340, 15)
    for name in ("cold", "hit"):
        answer(bench, name, (prompt, greedy(2)))
    bench.check()
    assert bench.witness.sequences["hit 0"][0].num_cached_tokens > 0


@pytest.mark.parametrize("option", [{"retain.threshold": 1.1}, {"retain.budget": 1.0}])
def test_sums_that_a_prompt_of_one_token_gave_back_are_no_longer_added_to(option: dict[str, Any]) -> None:
    """Heads that keep everything give their sums back, and the next chunk of another sequence takes the row."""
    found = []
    for options in ({}, option):
        engine = make_engine(**options, **{"scheduler.token_budget": 1024})
        outputs: dict[str, RequestOutput] = {}
        engine.add("other", [number % 90 + 5 for number in range(100)], greedy(150))
        for step in range(70):
            for delta in engine.step():
                merge_delta(outputs, delta)
            if step == 40:
                engine.add("one", [7], greedy(60))
        drain(engine, outputs)
        found.append({name: output.outputs[0].token_ids for name, output in outputs.items()})
    assert found[0] == found[1]


@pytest.mark.parametrize("windows", [(16,), (16, None), (None, 16)])
def test_no_layer_with_a_window_is_retained(windows: tuple[int | None, ...]) -> None:
    shape = tiny_shape("mistral", num_layers=len(windows))
    layers = [
        replace(layer, mixer=replace(layer.mixer, window=window))
        for layer, window in zip(shape.layers, windows, strict=True)
    ]
    with pytest.raises(ConfigError, match="layers of this model see 16 tokens back"):
        make_engine(replace(shape, layers=tuple(layers)), **{"retain.budget": 0.5})
