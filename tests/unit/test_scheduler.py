"""What a step holds and who runs first, on an engine with a tiny random model."""

from __future__ import annotations

from quire.engine.params import SamplingParams

from ..engines import drain, generate, make_engine


def prompt_of(length: int, first: int) -> list[int]:
    return [(first + 7 * place) % 256 for place in range(length)]


def test_no_step_has_more_rows_than_the_token_budget() -> None:
    engine = make_engine(**{"scheduler.token_budget": 128, "scheduler.max_running": 4})
    made, rows = engine.scheduler.next_batch, []

    def counting():  # type: ignore[no-untyped-def]
        batch = made()
        rows.append(sum(piece.count for piece in batch.slices) if batch is not None else 0)
        return batch

    engine.scheduler.next_batch = counting  # type: ignore[method-assign]
    generate(engine, [prompt_of(100, first) for first in range(5)], SamplingParams(max_tokens=2, ignore_eos=True))
    # A prompt and whole chunks of the next would fit; of a prompt alone, no step is fuller than its 100 rows.
    assert 100 <= max(rows) <= 128


def test_a_preempted_sequence_runs_again_before_those_that_came_after_it() -> None:
    engine = make_engine(**{"scheduler.max_running": 1})
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    first, *later = (engine.add(name, None, prompt_of(20, number), params) for number, name in enumerate("abc"))
    engine.step()
    engine.scheduler.preempt(first.sequences[0])
    while not first.finished:
        engine.step()
        assert not any(request.sequences[0].num_computed for request in later), "somebody overtook it"
    drain(engine)
