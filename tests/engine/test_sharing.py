"""Requests with a common prefix store and compute it once, and give the same answers as without sharing."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.engine import Engine
from quire.engine.outputs import RequestOutput
from quire.engine.params import CacheHints, SamplingParams
from quire.engine.request import NO_HINTS
from quire.errors import QueueFullError, RequestError
from quire.llm import merge_delta
from quire.prefixes.listing import engine_prefixes
from tests import engines
from tests.effort import examples
from tests.engines import GREEDY, drain, generate
from tests.tiny_models import of_layers, tiny_shape

LONG = SamplingParams(max_tokens=90, temperature=0.0, ignore_eos=True)


def make_engine(*shape: Any, **options: Any) -> Engine:
    return engines.make_engine(*shape, **{"cache.share": True, **options})


def ids(count: int, seed: int) -> list[int]:
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def both(prompts: list[list[int]], params: SamplingParams = GREEDY, **options: Any) -> tuple[Engine, Engine]:
    """An engine that shares and one that does not, after the same requests, whose answers were equal."""
    made = [make_engine(**{"cache.share": share, **options}) for share in (True, False)]
    answers = [generate(engine, prompts, params) for engine in made]
    assert answers[0] == answers[1]
    return made[0], made[1]


def count_rows(engine: Engine) -> list[int]:
    """Rows of every step's pass through the model, hence through its K projections."""
    rows: list[int] = []
    hidden = engine.runner.model.hidden
    engine.runner.padded_rows = lambda count: count

    def counted(tokens: torch.Tensor, positions: torch.Tensor, plan: Any) -> torch.Tensor:
        rows.append(len(tokens))
        return hidden(tokens, positions, plan)

    engine.runner.model.hidden = counted  # type: ignore[method-assign]
    return rows


@pytest.mark.parametrize("length", [1, 63, 64, 65, 128, 129, 200])
def test_equal_prompts_answer_alike_alone_and_together(length: int) -> None:
    prompt = ids(length, 1)
    shared, _ = both([prompt] * 4, LONG)
    found = length - 1 if length % 64 == 0 else length // 64 * 64
    assert shared.stats()["prefill_tokens_cached"] == 3 * found


def test_prompts_that_differ_inside_a_chunk() -> None:
    common = ids(150, 2)
    both([common + ids(20, seed) for seed in range(3)] + [common[:140]], LONG)


def test_a_second_prompt_is_computed_from_where_it_differs() -> None:
    engine = make_engine(tiny_shape(max_context=2048))
    common = ids(1024, 3)
    generate(engine, [common + ids(32, 4)])
    rows = count_rows(engine)
    engine.add("second", common + ids(32, 5), SamplingParams(max_tokens=1))
    (output,) = drain(engine).values()
    assert sum(rows) == 32
    assert output.num_cached_tokens == len(common)


def test_the_second_of_two_simultaneous_prompts_waits_for_the_chunks_of_the_first() -> None:
    engine = make_engine(**{"scheduler.token_budget": 96, "scheduler.max_running": 4})
    rows = count_rows(engine)
    prompt = ids(330, 6)
    answers = generate(engine, [prompt, prompt])
    assert answers[0] == answers[1] == generate(make_engine(**{"cache.share": False}), [prompt])[0]
    # Five whole chunks once, the last ten tokens twice, and 23 decode steps of one row each.
    assert sum(rows) == 320 + 2 * 10 + 2 * 23
    assert engine.stats()["prefill_tokens_computed"] == 340
    assert engine.stats()["prefill_tokens_cached"] == 320


def test_answers_are_cached_too() -> None:
    engine = make_engine()
    prompt = ids(100, 7)
    (answer,) = generate(engine, [prompt], LONG)
    rows = count_rows(engine)
    engine.add("turn 2", prompt + answer + ids(5, 8), SamplingParams(max_tokens=1))
    drain(engine)
    # 190 tokens of the first turn, the last of which was never computed: two whole chunks.
    assert sum(rows) == 195 - 128


@pytest.mark.parametrize("chunks", [8, 10])
def test_preemption_and_eviction_change_no_token(chunks: int) -> None:
    common = ids(70, 9)
    prompts = [common + ids(10 + index, 20 + index) for index in range(4)]
    params = SamplingParams(max_tokens=150, temperature=0.0, ignore_eos=True)
    expected = generate(make_engine(**{"cache.share": False}), prompts, params)
    tight = make_engine(chunks=chunks)
    assert generate(tight, prompts, params) == expected
    assert tight.stats()["preemptions"] > 0
    assert generate(tight, prompts, params) == expected, "nor do pages that others left"


def test_what_others_computed_during_a_preemption_is_no_work_of_ours() -> None:
    """Every token of a prompt counts once, as computed or as found, however often it was preempted."""
    engine = make_engine(**{"scheduler.token_budget": 80, "scheduler.max_running": 4})
    prompt = ids(330, 30)
    engine.add("first", prompt, GREEDY)
    engine.step()
    (sequence,) = engine.scheduler.running
    engine.scheduler.preempt(sequence)
    assert 0 < sequence.high_water < 320
    engine.scheduler.waiting.clear()
    engine.add("second", prompt, GREEDY)
    while engine.scheduler.waiting or engine.scheduler.running:
        engine.step()
    engine.scheduler.waiting.append(sequence)
    drain(engine)
    stats = engine.stats()
    assert stats["prefill_tokens_computed"] + stats["prefill_tokens_cached"] == 2 * 330
    assert stats["decode_tokens"] == 2 * 23 and stats["replayed_tokens"] == 0


def test_samples_of_one_prompt_share_it() -> None:
    params = SamplingParams(max_tokens=70, temperature=1.0, seed=5, n=4, ignore_eos=True)
    texts = []
    for share in (True, False):
        engine = make_engine(**{"cache.share": share})
        engine.add("x", ids(200, 10), params)
        (output,) = drain(engine).values()
        texts.append([each.token_ids for each in output.outputs])
        if share:
            assert engine.stats()["prefill_tokens_computed"] == 192 + 4 * 8
    assert texts[0] == texts[1] and len({tuple(each) for each in texts[0]}) == 4


@pytest.mark.parametrize("steps", range(8))
def test_an_abort_at_any_moment_leaves_every_lock_undone(steps: int) -> None:
    engine = make_engine(**{"scheduler.token_budget": 80, "scheduler.max_running": 4})
    common = ids(130, 11)
    for index in range(3):
        engine.add(str(index), common + ids(40, index), GREEDY)
    collected: dict[str, RequestOutput] = {}
    for _ in range(steps):
        for delta in engine.step():
            merge_delta(collected, delta)
        engine.check()
    engine.abort("0")
    engine.check()
    left = drain(engine, collected)
    expected = [generate(make_engine(), [common + ids(40, index)])[0] for index in (1, 2)]
    assert [left[str(index)].outputs[0].token_ids for index in (1, 2)] == expected
    tree = engine.scheduler.manager.tree
    assert tree is not None and not any(segment.locks.any() for segment in tree.segments())
    cache = engine.stats()["cache"]
    assert cache["bytes_used"] == 0 and cache["bytes_cached"] + cache["bytes_free"] == cache["bytes_total"]


def test_bytes_of_sharers_are_those_of_the_unique_chunks() -> None:
    engine = make_engine(
        tiny_shape(max_context=2048), chunks=128, **{"scheduler.max_running": 32, "scheduler.token_budget": 512}
    )
    common = ids(1024, 12)
    for index in range(32):
        engine.add(
            str(index),
            common + ids(64, 100 + index),
            SamplingParams(max_tokens=30, temperature=0, ignore_eos=True),
        )
    drain(engine)
    table = engine.scheduler.manager.table
    chunk_bytes = table.chunk_bytes(table.open_codec)
    unique = 16 + 32 * 2  # the prefix, and for each its own 64 tokens and an open chunk
    assert engine.stats()["cache"]["bytes_peak"] <= 1.05 * unique * chunk_bytes


def test_overwriting_a_shared_page_changes_what_the_next_request_says() -> None:
    prompt = ids(130, 13)
    params = SamplingParams(max_tokens=2, temperature=0.0, logprobs=3)
    engine = make_engine()
    first = generate(engine, [prompt], params)
    arena = engine.scheduler.manager.table.arena
    arena.data.fill_(0x3C)
    engine.add("again", prompt, params)
    (output,) = drain(engine).values()
    assert output.num_cached_tokens == 128
    clean = make_engine()
    clean.add("again", prompt, params)
    (expected,) = drain(clean).values()
    assert output.outputs[0].logprobs != expected.outputs[0].logprobs or output.outputs[0].token_ids != first[0]


PREFIXES = [ids(192, 40), ids(192, 40)[:100] + ids(92, 41), ids(20, 42)]
ANSWERS: dict[tuple[int, ...], list[int]] = {}


def alone(prompt: list[int], count: int) -> list[int]:
    """What an engine that shares nothing says to a prompt."""
    key = tuple(prompt)
    if key not in ANSWERS:
        params = SamplingParams(max_tokens=MOST, temperature=0.0, ignore_eos=True)
        (ANSWERS[key],) = generate(make_engine(**{"cache.share": False}), [prompt], params)
    return ANSWERS[key][:count]


MOST = 70


@examples(18)
@given(
    chunks=st.sampled_from([9, 14, 40]),
    events=st.lists(
        st.one_of(
            st.tuples(
                st.just("arrive"),
                st.integers(0, 2),
                st.sampled_from([1, 63, 64, 65, 127, 128, 140, 192]),
                st.integers(0, 3),
                st.integers(1, MOST),
                st.sampled_from([1, 1, 3]),
            ),
            st.tuples(st.just("step"), st.integers(1, 30)),
            st.tuples(st.just("abort"), st.integers(0, 9)),
        ),
        min_size=3,
        max_size=25,
    ),
)
def test_any_mix_of_arrivals_forks_aborts_and_evictions_answers_as_if_nothing_were_shared(
    chunks: int, events: list[tuple[Any, ...]]
) -> None:
    engine = make_engine(chunks=chunks, **{"scheduler.token_budget": 100, "scheduler.max_running": 5})
    requested: dict[str, tuple[list[int], int]] = {}
    collected: dict[str, RequestOutput] = {}

    def step() -> None:
        for delta in engine.step():
            merge_delta(collected, delta)
        engine.check()

    for number, event in enumerate(events):
        if event[0] == "arrive":
            _, family, length, tail, count, n = event
            prompt = PREFIXES[family][:length] + [tail] * tail
            params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, n=n)
            engine.add(str(number), prompt, params)
            requested[str(number)] = prompt, count
        elif event[0] == "step":
            for _ in range(event[1]):
                step()
        elif requested:
            name = sorted(requested)[event[1] % len(requested)]
            engine.abort(name)
            del requested[name]
    while engine.has_work:
        step()
    for name, (prompt, count) in requested.items():
        for output in collected[name].outputs:
            assert output.token_ids == alone(prompt, count)
    manager = engine.scheduler.manager
    assert manager.tree is not None and not any(segment.locks.any() for segment in manager.tree.segments())
    cache = engine.stats()["cache"]
    assert cache["bytes_used"] == cache["bytes_saved"] == 0
    assert cache["bytes_cached"] + cache["bytes_free"] == cache["bytes_total"]


def test_who_waits_for_room_is_no_sharer_and_has_no_hits() -> None:
    engine = make_engine(chunks=8)
    common = ids(128, 31)
    engine.add("first", common + ids(64, 1), SamplingParams(max_tokens=120, temperature=0.0, ignore_eos=True))
    engine.step()
    engine.add("second", common + ids(200, 2), GREEDY)
    tree = engine.scheduler.manager.tree
    assert tree is not None
    uses = tree.num_uses
    for _ in range(40):
        engine.step()
    assert len(engine.scheduler.waiting) == 1
    assert [prefix.hits for prefix in engine_prefixes(engine)] == [0]
    assert (tree.num_uses, tree.num_divided) == (uses, 0), "who waits takes and divides nothing"
    drain(engine)
    assert [prefix.hits for prefix in engine_prefixes(engine) if prefix.start == 0] == [1]


def test_every_engine_has_a_namespace_of_its_own() -> None:
    """Whatever its pages depend on: with the same tokens, none of these may read what another wrote."""
    shape = tiny_shape()
    assert shape.first.rope is not None
    other = of_layers(shape, rope=replace(shape.first.rope, theta=5e5))
    even = tiny_shape(head_dim=16)
    encoded: list[dict[str, Any]] = [
        {"cache.codec": "g4", "cache.sink_tokens": 0},
        {"cache.codec": "g4", "cache.sink_tokens": 0, "cache.strict": False},
        {"cache.codec": "nuq3", "cache.sink_tokens": 0},
        {"cache.codec": "nuq3", "cache.sink_tokens": 1},
        {"cache.codec": "nuq3", "cache.sink_tokens": 2},
        {"cache.codec": "nuq3", "cache.sink_tokens": 2, "cache.outlier_slots": 2},
        {"cache.codec": "nuq2", "cache.sink_tokens": 2},
    ]
    made = [
        make_engine(),
        make_engine(other),
        make_engine(**{"model.dtype": "bfloat16"}),
        make_engine(**{"model.dtype": "float16"}),
        make_engine(**{"model.weights": "dequantized"}),
        make_engine(**{"model.weights": "g4"}),
        make_engine(model_id="another checkpoint"),
        *(make_engine(even, **options) for options in encoded),
    ]
    assert len({engine.namespace for engine in made}) == len(made)
    assert make_engine().namespace == made[0].namespace


def test_bytes_saved_are_those_that_sharers_would_take_on_top() -> None:
    engine = make_engine()
    common = ids(128, 14)
    for index in range(3):
        engine.add(str(index), common + ids(5, index), GREEDY)
    while any(sequence.num_pending > 1 for sequence in engine.scheduler.running) or engine.scheduler.waiting:
        engine.step()
    assert engine.stats()["cache"]["bytes_saved"] == 2 * 2 * engine.scheduler.manager.statistics.chunk_bytes


def cached_tokens(engine: Engine, prompt: list[int], hints: CacheHints = NO_HINTS) -> int | None:
    engine.add("x", prompt, SamplingParams(max_tokens=1), hints)
    return drain(engine)["x"].num_cached_tokens


def test_a_salt_keeps_requests_apart() -> None:
    engine = make_engine()
    prompt = ids(130, 15)
    one, other = CacheHints(cache_salt="one"), CacheHints(cache_salt="other")
    assert [cached_tokens(engine, prompt, hints) for hints in (one, other, NO_HINTS)] == [0, 0, 0]
    assert [cached_tokens(engine, prompt, hints) for hints in (one, other, NO_HINTS)] == [128, 128, 128]
    assert {each.token_ids[0] for each in engine_prefixes(engine, lambda salt: salt == "one")} == {prompt[0]}
    assert len(engine_prefixes(engine)) == 3


def test_a_pinned_prompt_outlives_everything_else_and_a_pin_can_be_ended() -> None:
    engine = make_engine(chunks=10)
    prompt = ids(130, 16)
    assert cached_tokens(engine, prompt, CacheHints(cache_pin=True)) == 0
    for seed in range(50, 60):
        generate(engine, [ids(250, seed)])
    assert engine.stats()["cache"]["bytes_evicted"] > 0
    assert cached_tokens(engine, prompt) == 128
    assert engine.stats()["cache"]["bytes_pinned"] == 2 * engine.scheduler.manager.statistics.chunk_bytes
    cached_tokens(engine, prompt, CacheHints(cache_pin=0))
    assert engine.stats()["cache"]["bytes_pinned"] == 0


def test_pins_end_and_prefixes_expire_by_the_engine_s_clock() -> None:
    engine = make_engine(**{"cache.lifetime": 60.0})
    now = [1000.0]
    engine.clock = lambda: now[0]
    assert not engine.forgets
    cached_tokens(engine, ids(130, 17), CacheHints(cache_pin=100.0))
    cached_tokens(engine, ids(130, 18))
    assert engine.forgets
    for passed, left in ((59.0, 2), (60.0, 1), (99.0, 1), (100.0, 0)):
        now[0] = 1000.0 + passed
        engine.step()
        assert len(engine_prefixes(engine)) == left, f"after {passed} s"
    assert not engine.forgets


def test_an_idle_engine_finds_what_the_request_s_own_end_of_a_pin_had_kept() -> None:
    engine = make_engine(**{"cache.lifetime": 10.0})
    now = [0.0]
    engine.clock = lambda: now[0]
    cached_tokens(engine, ids(130, 33), CacheHints(cache_pin=True))
    assert engine.forgets, "a lifetime is counted even while all is pinned"
    now[0] = 100.0
    assert cached_tokens(engine, ids(130, 33), CacheHints(cache_pin=False)) == 128


def test_an_engine_with_nothing_but_endless_pins_need_not_look_at_the_clock() -> None:
    engine = make_engine()
    cached_tokens(engine, ids(130, 34), CacheHints(cache_pin=True))
    assert not engine.forgets
    cached_tokens(engine, ids(70, 35), CacheHints(cache_pin=5))
    assert engine.forgets


def test_a_request_that_cannot_wait_ends_no_pin() -> None:
    engine = make_engine(**{"scheduler.max_queue": 1})
    cached_tokens(engine, ids(130, 36), CacheHints(cache_pin=True))
    engine.add("waits", ids(5, 37), GREEDY)
    with pytest.raises(QueueFullError):
        engine.add("refused", ids(130, 36), GREEDY, CacheHints(cache_pin=False))
    assert engine.stats()["cache"]["bytes_pinned"] > 0
    drain(engine)


@pytest.mark.parametrize("window", [None, 4, 512, 600])
def test_a_window_that_no_request_outgrows_is_none(window: int | None) -> None:
    engine = make_engine(tiny_shape("mistral", sliding_window=window))
    assert engine.max_context == 512
    assert engine.runner.attention.spec.layers[0].scoring.window == (4 if window == 4 else None)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("hints", "length", "message"),
    [
        (CacheHints(cache_pin=True), 63, "whole chunks of 64"),
        (CacheHints(cache_pin=True), 400, "50% of the cache"),
    ],
)
def test_pins_that_cannot_be_are_refused(hints: CacheHints, length: int, message: str) -> None:
    engine = make_engine(chunks=10)
    with pytest.raises(RequestError, match=message) as caught:
        engine.add("x", ids(length, 19), GREEDY, hints)
    assert caught.value.param == "cache_pin"
    with pytest.raises(RequestError, match="needs cache.share"):
        make_engine(**{"cache.share": False}).add("x", ids(70, 19), GREEDY, CacheHints(cache_pin=True))


def test_pins_beyond_the_limit_are_not_kept_and_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine(chunks=10)
    params = SamplingParams(max_tokens=3, n=2)
    kept = []
    for name, (length, pin) in {"a": (260, True), "b": (130, True), "c": (260, False), "d": (130, None)}.items():
        engine.add(name, ids(length, 20), params, CacheHints(cache_pin=pin))
        kept.append(drain(engine)[name].num_pinned_tokens)
    assert kept == [256, 128, 0, None], "the second is the beginning of the first"
    cached_tokens(engine, ids(260, 20), CacheHints(cache_pin=True))
    engine.add("e", ids(130, 21), params, CacheHints(cache_pin=True))
    assert drain(engine)["e"].num_pinned_tokens == 0
    assert caplog.text.count("is not pinned") == 1


@pytest.mark.parametrize("value", [-1, "x", float("nan"), 1e12, [1]])
def test_a_pin_is_seconds_or_a_truth_value(value: Any) -> None:
    with pytest.raises(RequestError, match="cache_pin"):
        CacheHints(cache_pin=value)


def test_every_hit_and_miss_is_explained_in_the_debug_log(caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine()
    prompt = ids(130, 22)
    with caplog.at_level(logging.DEBUG, "quire"):
        cached_tokens(engine, prompt)
        cached_tokens(engine, prompt)
        cached_tokens(engine, prompt[:70] + ids(60, 23))
    said = [message for message in caplog.messages if "found in the cache" in message]
    assert said == [
        "request x: 0 of 130 tokens found in the cache: nothing is cached with its salt",
        "request x: 128 of 130 tokens found in the cache: everything but its last tokens, which are always computed",
        "request x: 64 of 130 tokens found in the cache:"
        " the nearest cached prompt differs from it at token 70;"
        " chunks are shared whole, so it is computed from token 64 on",
    ]
