"""The work that is counted of a step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quire.cache.ledger import PAGE_TOKENS
from quire.engine.params import SamplingParams
from quire.engine.step import Result, Slice, Step
from quire.engine.step_work import WorkMeter
from quire.timing.latency import StepWork
from tests.engines import make_engine


def step_of(*slices: Slice) -> Step:
    rows = [place for piece in slices for place in range(piece.start, piece.start + piece.num_rows)]
    return Step([*slices], np.zeros(len(rows), np.int64), np.array(rows))


def work_of(step: Step, window: int | None = None) -> StepWork:
    return WorkMeter(window).of(step)


def row(start: int, *shared: tuple[int, int], **fields: Any) -> Slice:
    return Slice(start, 1, np.zeros(200, np.int32), shared=shared, samples=True, **fields)


def prompt(start: int, rows: int) -> Slice:
    return Slice(start, rows, np.zeros(200, np.int32))


def test_rows_of_prompts_and_decoding_rows_are_told_apart() -> None:
    found = work_of(step_of(row(99), row(639, reads_all=True), prompt(0, 100), prompt(1024, 50)))
    assert found == StepWork(151, 639.5 + 5000 + 50 * 1049, 1, 100.0, 100.0, 3)
    assert found.kind == "mixed" and found.rows == 152


def test_shared_chunks_count_once() -> None:
    """Two sequences share 3 + 2 chunks, a third one the first 3, and a fourth one nothing."""
    step = step_of(row(400, (1, 3), (2, 2)), row(500, (1, 3), (2, 2)), row(450, (1, 3), (7, 1)), row(300, (9, 4)))
    found = work_of(step)
    assert found.context == 401 + 501 + 451 + 301
    assert found.unique == found.context - 5 * PAGE_TOKENS - 3 * PAGE_TOKENS


def test_tokens_that_retention_dropped_are_not_attended_to() -> None:
    assert work_of(step_of(row(1000, num_dropped=10))).context == 1001 - 640


def test_a_window_bounds_what_is_attended_to() -> None:
    found = work_of(step_of(row(1000), row(99), prompt(2000, 10)), window=256)
    assert (found.context, found.prompt_pairs) == (256 + 100, 2560.0)


def test_what_a_window_has_passed_is_not_shared() -> None:
    """Three rows share five chunks, 320 tokens. Windows of 256 tokens begin behind them, or amid them."""
    step = step_of(row(999, (1, 5)), row(999, (1, 5)), row(399, (1, 5)), row(349, (1, 5)))
    found = work_of(step, window=256)
    assert found.context == 4 * 256
    # The first two see nothing of it. The last two see the tokens from 144 and from 94 on: 176 are common.
    assert found.unique == found.context - 176


OPTIONS: dict[str, dict[str, Any]] = {"plain": {}, "retention": {"retain.budget": 0.5, "retain.profile_rows": 16}}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_meter_counts_an_engine_s_steps_as_if_each_were_the_first(options: dict[str, Any]) -> None:
    """Shared beginnings, joining prompts, sequences that end: what grows from step to step equals a new count. Without
    retention the distinct tokens are those of distinct slots of chunks.
    """
    engine, meter = make_engine(**options), WorkMeter()
    runner, num_moved = engine.any_runner, 0

    class Checked:
        vocab_size, check = runner.vocab_size, runner.check

        def run(self, step: Step) -> Result:
            nonlocal num_moved
            found = meter.of(step)
            num_moved += step.moved is not None
            assert found == work_of(step)
            singles = [piece for piece in step.slices if piece.num_rows == 1 and not piece.reads_all]
            if not options:
                slots = {
                    (int(piece.chunks[at // PAGE_TOKENS]), at % PAGE_TOKENS)
                    for piece in singles
                    for at in range(piece.start + 1)
                }
                assert found.unique == len(slots)
            assert found.decode_rows == len(singles) and found.rows == len(step.tokens)
            return runner.run(step)

    engine.any_runner = Checked()
    draw = np.random.default_rng(0)
    beginnings = [draw.integers(0, 250, length).tolist() for length in (150, 80)]
    for index in range(10):
        own = draw.integers(0, 250, 5 + 9 * index).tolist()
        params = SamplingParams(max_tokens=40 + 13 * (index % 4), temperature=0.0, ignore_eos=True)
        engine.add(f"{index}", [*beginnings[0], *beginnings[1]][: 80 * (index % 4)] + own, params)
        for _ in range(7):
            engine.step()
    while engine.has_work:
        engine.step()
    assert num_moved > 40
