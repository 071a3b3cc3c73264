"""Requests that begin with the same tokens store and compute them once, and answer as if they had not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quire.engine.engine import Engine
from quire.engine.params import SamplingParams
from tests import engines
from tests.engines import GREEDY, drain, generate

LONG = SamplingParams(max_tokens=90, temperature=0.0, ignore_eos=True)


def make_engine(**options: Any) -> Engine:
    return engines.make_engine(**{"cache.share": True, **options})


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
    hidden = engine.model.hidden
    engine.padded_rows = lambda count: count

    def counted(tokens: torch.Tensor, positions: torch.Tensor, plan: Any) -> torch.Tensor:
        rows.append(len(tokens))
        return hidden(tokens, positions, plan)

    engine.model.hidden = counted  # type: ignore[method-assign]
    return rows


@pytest.mark.parametrize("length", [1, 63, 64, 65, 128, 129, 200])
def test_equal_prompts_answer_alike_alone_and_together(length: int) -> None:
    prompt = ids(length, 1)
    shared, _ = both([prompt] * 4, LONG)
    assert shared.stats()["prefill_tokens_cached"] == 3 * ((length - 1) // 64 * 64)


def test_prompts_that_differ_inside_a_chunk() -> None:
    common = ids(150, 2)
    both([common + ids(20, seed) for seed in range(3)] + [common[:140]], LONG)


def test_a_second_prompt_is_computed_from_where_it_differs() -> None:
    engine = make_engine()
    common = ids(1024, 3) if engine.max_context > 1100 else ids(256, 3)
    generate(engine, [common + ids(32, 4)])
    rows = count_rows(engine)
    engine.add("second", None, common + ids(32, 5), SamplingParams(max_tokens=1))
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
    engine.add("turn 2", None, prompt + answer + ids(5, 8), SamplingParams(max_tokens=1))
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
    engine.add("first", None, prompt, GREEDY)
    engine.step()
    (sequence,) = engine.scheduler.running
    engine.scheduler._preempt(sequence)
    assert 0 < sequence.high_water < 320
    engine.scheduler.waiting.clear()
    engine.add("second", None, prompt, GREEDY)
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
        engine.add("x", None, ids(200, 10), params)
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
        engine.add(str(index), None, common + ids(40, index), GREEDY)
    for _ in range(steps):
        engine.step()
        engine.check()
    engine.abort("0")
    engine.check()
    left = drain(engine)
    alone = [generate(make_engine(), [common + ids(40, index)])[0] for index in (1, 2)]
    if steps == 0:
        assert [left[str(index)].outputs[0].token_ids for index in (1, 2)] == alone
    tree = engine.scheduler.manager.tree
    assert tree is not None and not any(segment.locks.any() for _, segment in tree.segments())
    cache = engine.stats()["cache"]
    assert cache["bytes_used"] == 0 and cache["bytes_cached"] + cache["bytes_free"] == cache["bytes_total"]


def test_bytes_of_sharers_are_those_of_the_unique_chunks() -> None:
    engine = make_engine(chunks=128, **{"scheduler.max_running": 32, "scheduler.token_budget": 512})
    common = ids(320, 12)
    for index in range(32):
        engine.add(
            str(index),
            None,
            common + ids(64, 100 + index),
            SamplingParams(max_tokens=30, temperature=0, ignore_eos=True),
        )
    drain(engine)
    table = engine.scheduler.manager.table
    chunk_bytes = table.pages_per_chunk * table.open_codec.page_bytes
    unique = 5 + 32 * 2  # the prefix, and for each its own 64 tokens and an open chunk
    assert engine.stats()["cache"]["bytes_peak"] <= 1.05 * unique * chunk_bytes


def test_overwriting_a_shared_page_changes_what_the_next_request_says() -> None:
    prompt = ids(130, 13)
    params = SamplingParams(max_tokens=2, temperature=0.0, logprobs=3)
    engine = make_engine()
    first = generate(engine, [prompt], params)
    pool = engine.scheduler.manager.table.pool
    pool.arena.fill_(0x3C)
    engine.add("again", None, prompt, params)
    (output,) = drain(engine).values()
    assert output.num_cached_tokens == 128
    clean = make_engine()
    clean.add("again", None, prompt, params)
    (expected,) = drain(clean).values()
    assert output.outputs[0].logprobs != expected.outputs[0].logprobs or output.outputs[0].token_ids != first[0]
