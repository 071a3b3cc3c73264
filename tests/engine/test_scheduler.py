"""The contents of steps and the order of sequences, in an engine with a tiny random model."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np

from quire.attention.rows import Profiled
from quire.engine.params import SamplingParams
from quire.engine.step import Slice

from ..engines import drain, generate, make_engine


def prompt_of(length: int, first: int) -> list[int]:
    return [(first + 7 * place) % 256 for place in range(length)]


def test_no_step_has_more_rows_than_the_token_budget() -> None:
    engine = make_engine(**{"scheduler.token_budget": 128, "scheduler.max_running": 4})
    made, rows = engine.scheduler.next_step, []

    def counting():  # type: ignore[no-untyped-def]
        batch = made()
        rows.append(sum(piece.num_rows for piece in batch.slices) if batch is not None else 0)
        return batch

    engine.scheduler.next_step = counting  # type: ignore[method-assign]
    generate(engine, [prompt_of(100, first) for first in range(5)], SamplingParams(max_tokens=2, ignore_eos=True))
    # A prompt and whole chunks of the next would fit; of a prompt alone, no step is fuller than its 100 rows.
    assert 100 <= max(rows) <= 128


def test_a_preempted_sequence_runs_again_before_those_that_came_after_it() -> None:
    engine = make_engine(**{"scheduler.max_running": 1})
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    first, *later = (engine.add(name, prompt_of(20, number), params) for number, name in enumerate("abc"))
    engine.step()
    engine.scheduler.preempt(first.sequences[0])
    while not first.finished:
        engine.step()
        assert not any(request.sequences[0].num_computed for request in later), "somebody overtook it"
    drain(engine)


def test_a_sequence_that_is_preempted_after_it_got_its_row_is_not_computed() -> None:
    """The first request is admitted again after the second, and needs a chunk in the step in which the second one fills
    its last one.
    """
    params = SamplingParams(max_tokens=270, temperature=0.0, ignore_eos=True)
    prompts = [prompt_of(10, 0), prompt_of(9, 1)]
    alone = [generate(make_engine(), [prompt], params)[0] for prompt in prompts]
    engine = make_engine(chunks=8, **{"cache.share": False})
    first, second = (engine.add(str(number), prompt, params).sequences[0] for number, prompt in enumerate(prompts))
    engine.step()
    engine.scheduler.batch.restart(first)
    drain(engine)
    assert (first.num_preemptions, second.num_preemptions) == (0, 1)
    assert [each.token_ids[each.num_prompt :] for each in (first, second)] == alone


def test_a_row_goes_on_only_in_the_same_chunks() -> None:
    chunks, sums = np.arange(8, dtype=np.int32), np.arange(4, dtype=np.int32)
    last = Slice(70, 1, chunks[:2], samples=True, profiled=Profiled(sums, peaks=1, near=2))
    assert last.can_advance_to(replace(last, start=71))
    others = [
        replace(last, start=128),  # the first slot of a chunk
        replace(last, start=71, chunks=chunks[:3]),
        replace(last, start=71, chunks=chunks.copy()[:2]),
        replace(last, start=71, filled=5),
        replace(last, start=71, num_dropped=1),
        replace(last, start=71, samples=False),
        replace(last, start=71, decides=True),
        replace(last, start=71, scores=True),
        replace(last, start=71, profiled=None),
        replace(last, start=71, profiled=Profiled(sums.copy(), peaks=1, near=2)),
        replace(last, start=71, profiled=Profiled(sums, peaks=1, near=3)),
        replace(last, start=71, profiled=Profiled(sums, last_rows=1, near=2)),
    ]
    assert not any(last.can_advance_to(row) for row in others)


def test_a_step_and_its_result_are_plain_values() -> None:
    """A runner that gets every step through a pickle, and gives every result back so, gives the same answers."""
    prompts = [prompt_of(length, length) for length in (5, 70, 130)]
    params = SamplingParams(max_tokens=70, temperature=0.8, seed=3, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    expected = generate(make_engine(), prompts, params)
    engine = make_engine()
    run = engine.runner.run
    engine.runner.run = lambda step: pickle.loads(pickle.dumps(run(pickle.loads(pickle.dumps(step)))))  # type: ignore[method-assign]
    assert generate(engine, prompts, params) == expected
