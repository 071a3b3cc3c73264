"""Steps that are skipped: as many steps give the same, and no step that matters is skipped."""

from __future__ import annotations

import random

from quire.engine.calendar import placeholder_tokens
from quire.engine.fast_forward import FastForward
from quire.engine.params import SamplingParams
from quire.engine.request import Request, Sequence
from quire.engine.scheduler import Scheduler
from quire.engine.step import Result
from tests.engine.test_engine import prompts_of

from ..effort import tries
from ..engines import make_engine


def test_no_steps_are_skipped_while_answers_wait_for_logprobs_of_the_first() -> None:
    (prompt,) = prompts_of([65], 6)
    engine = make_engine(**{"scheduler.token_budget": 128, "scheduler.max_running": 2})
    scheduler = engine.scheduler
    request = engine.add("x", prompt, SamplingParams(n=2, max_tokens=30, prompt_logprobs=1, temperature=0.0))
    scheduler.policy.token_budget = 64  # the prompt in two slices, the last of one row
    step = scheduler.next_step()
    assert step is not None
    scheduler.commit(step, Result())
    scheduler.policy.token_budget = 128
    assert FastForward(scheduler).advance(100) == 1, "the other one has a row to compute, and is to wait"
    first, other = scheduler.running
    assert request.sequences == [first, other] and first.num_generated == 1
    assert FastForward(scheduler).advance(100) == 1 and other.num_generated == 1


def test_advance_stops_where_a_sequence_ends() -> None:
    engine = make_engine()
    scheduler: Scheduler = engine.scheduler
    engine.add("a", [1] * 70, SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True))
    engine.add("b", [1] * 10, SamplingParams(max_tokens=90, temperature=0.0, ignore_eos=True))
    assert FastForward(scheduler).advance(100) == 1, "prompts are computed in a step by itself"
    assert FastForward(scheduler).advance(10) == 10
    assert FastForward(scheduler).advance(100) == 29, "request a ends with its 40th token, past a chunk of each"
    scheduler.check()
    assert [sequence.num_generated for sequence in scheduler.running] == [40]
    assert FastForward(scheduler).advance(100) == 50 and FastForward(scheduler).advance(100) == 0


def test_advance_tells_the_one_row_of_a_prompt_from_decode_rows() -> None:
    engine = make_engine()
    engine.add("a", [1], SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
    forward = FastForward(engine.scheduler)
    assert forward.advance() == 1
    assert forward.report.prompts == [(0, 1)] and not forward.report.decodes


def test_advance_equals_as_many_steps(seed: int) -> None:
    """Two schedulers get the same requests, some of them late; one skips through what has no event, one never does."""
    tight = {"scheduler.max_running": 4, "scheduler.token_budget": 100}
    skipping, plain = (make_engine(chunks=8, **tight).scheduler for _ in range(2))
    skips: list[int] = []

    def state(scheduler: Scheduler) -> list[object]:
        scheduler.check()
        sequences = [*scheduler.running, *scheduler.waiting]
        each_one = [(each.request.request_id, each.state, each.token_ids, each.high_water) for each in sequences]
        paths = [(path.num_tokens, path.num_sealed, path.chunks.tolist()) for path in (each.path for each in sequences)]
        return [each_one, paths, scheduler.counters, scheduler.manager.stats()]

    def add(scheduler: Scheduler, name: str, prompt: int, max_tokens: int) -> None:
        # Three kinds of prompts: some share, not all.
        tokens = [int(name) % 3] * prompt
        request = Request(name, None, tokens, SamplingParams(max_tokens=max_tokens), 0.0)
        request.sequences.append(Sequence(request, 0, list(tokens), max_tokens))
        scheduler.add(request.sequences)

    def step(scheduler: Scheduler) -> None:
        made = scheduler.next_step()
        assert made is not None, "nothing runs and something waits"
        sampling = [(index, piece) for index, piece in enumerate(made.slices) if piece.samples]
        tokens = [
            token_id
            for index, piece in sampling
            for token_id in placeholder_tokens(scheduler.sequence_of(index), piece.start + piece.num_rows, 1)
        ]
        scheduler.commit(made, Result(tokens))

    for number in range(tries(25)):
        rng = random.Random(seed + number)
        late = [
            (str(name), rng.randrange(1, 200), rng.randrange(1, 200))
            for name in range(8 if number < 3 else rng.randrange(1, 9))
        ]
        while late or plain.running or plain.waiting:
            while late and (rng.random() < 0.3 or not plain.running):
                for scheduler in (skipping, plain):
                    add(scheduler, *late[-1])
                late.pop()
            count = FastForward(skipping).advance(rng.randrange(1, 200))
            skips.append(count)
            for _ in range(count):
                step(plain)
            assert state(skipping) == state(plain), f"seed {seed + number}, after {count} steps"
    assert plain.counters.preemptions > 0 and sum(skips) > 2 * len(skips), "the schedules had no variety"
    assert max(skips) > 64, "no chunk's end was skipped"
    assert plain.manager.stats()["bytes_used"] == 0
