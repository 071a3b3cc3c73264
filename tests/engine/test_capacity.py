"""Prompts of an instance that only computes prompts are grouped until they saturate the processor."""

from __future__ import annotations

import random
from dataclasses import replace

from quire.engine.capacity import measure_capacity
from quire.engine.engine import Engine

from ..engines import GREEDY, drain, generate, make_engine


def groups_of(engine: Engine, lengths: list[int]) -> list[list[int]]:
    """Prompts of each step that computes any, by their lengths."""
    rng, found = random.Random(0), list[list[int]]()
    for number, length in enumerate(lengths):
        prompt = [rng.randrange(256) for _ in range(length)]
        engine.add(str(number), prompt, replace(GREEDY, max_tokens=1))
    run = engine.runner.run

    def noted(step: object) -> object:
        slices = step.slices  # type: ignore[attr-defined]
        found.append([engine.scheduler.sequence_of(index).num_prompt for index in range(len(slices))])
        return run(step)  # type: ignore[arg-type]

    engine.runner.run = noted  # type: ignore[method-assign, assignment]
    drain(engine)
    return found


def test_prompts_are_grouped_in_order_of_arrival() -> None:
    """Strictly first come, first served: 150 does not join 50 and 100, and 25 does not overtake 300 (DistServe,
    section 3.1).
    """
    engine = make_engine(chunks=128, **{"scheduler.token_budget": 1024})
    engine.scheduler.policy.prompt_rows = 256
    assert groups_of(engine, [50, 100, 150, 300, 25, 30]) == [[50, 100], [150], [300], [25, 30]]


def test_a_prompt_longer_than_a_step_runs_alone_but_for_its_last_slice() -> None:
    engine = make_engine(chunks=128, **{"scheduler.token_budget": 128})
    engine.scheduler.policy.prompt_rows = 80
    assert groups_of(engine, [300, 30, 40]) == [[300], [300], [300, 30], [40]]


def test_what_is_cached_does_not_count() -> None:
    engine = make_engine(chunks=128, **{"scheduler.token_budget": 1024})
    rng = random.Random(1)
    prompts = [[rng.randrange(256) for _ in range(400)] for _ in range(2)]
    generate(engine, prompts)
    engine.scheduler.policy.prompt_rows = 128
    before = engine.scheduler.counters.steps
    generate(engine, prompts, replace(GREEDY, max_tokens=1))
    assert engine.scheduler.counters.steps == before + 1, "16 rows each are left"


def test_without_groups_a_step_takes_what_fits() -> None:
    engine = make_engine(chunks=128, **{"scheduler.token_budget": 1024})
    assert groups_of(engine, [100, 200, 300, 50])[0] == [100, 200, 300, 50]


def test_measuring_leaves_nothing() -> None:
    engine = make_engine(chunks=64)
    found = measure_capacity(engine)
    assert 16 <= found.prompt_rows <= 256 and 1 <= found.batch <= 8
    assert found.seconds_per_row > 0 and found.seconds_per_step > 0
    assert engine.holds_nothing and engine.stats()["prefill_tokens_computed"] == 0
    assert engine.stats()["cache"]["bytes_cached"] == 0
    engine.check()
