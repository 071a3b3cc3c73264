"""Latencies of settings that were not measured, from those of their parts."""

from __future__ import annotations

import pytest

from quire.timing.composed import LEAST, composed, grid
from quire.timing.latency import StepWork
from tests.planning.test_halving import latency


def test_effects_of_weights_and_codec_add_up_and_threads_scale() -> None:
    origin, weights = latency(0.010, 1e-6, 1e-4), latency(0.006, 1e-6, 1e-4)
    codec, threads = latency(0.010, 4e-7, 1e-4), latency(0.020, 2e-6, 2e-4)
    found = composed(origin, [weights, codec], [(threads, origin)], {"codec": "nuq3"})
    for work in (StepWork(decode_rows=4, context=4000, unique=4000), StepWork(100, 5000, num_prompts=1)):
        expected = 2 * (0.006 + 4e-7 * work.context + 1e-4 * (work.rows - 1))
        assert found.seconds(work) == pytest.approx(expected, rel=0.01)
    assert found.about == {"codec": "nuq3", "composed": True}


def test_parts_that_save_more_than_there_is_leave_a_tenth() -> None:
    origin = latency(0.010)
    found = composed(origin, [latency(0.004), latency(0.004)], [], {})
    assert found.seconds(StepWork(decode_rows=1, context=64, unique=64)) == pytest.approx(LEAST * 0.010, rel=0.01)


def test_the_grid_stays_within_what_was_measured() -> None:
    model = latency(0.01)
    works = list(grid(model))
    assert max(work.prompt_rows for work in works) == 512 and max(work.decode_rows for work in works) == 64
    assert all(work.context <= 40000 and work.decode_rows <= work.context for work in works if work.decode_rows)
    assert {work.kind for work in works} == {"prompt", "decode", "mixed"}
