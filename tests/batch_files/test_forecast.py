"""The time that a batch still takes."""

from __future__ import annotations

import pytest

from quire.batch_files.forecast import Forecast, format_duration


def test_it_tells_prompts_and_tokens_apart() -> None:
    """Blocks of 40 prompts of 100 tokens at 1 ms, then 16 steps of 40 tokens at 10 ms."""
    forecast, seconds, prompts, tokens = Forecast(), 0.0, 0, 0
    for block in range(2):
        for _ in range(4):
            seconds, prompts = seconds + 1.0, prompts + 1000
            forecast.note(seconds, prompts, tokens)
        if block == 0:
            for _ in range(16):
                seconds, tokens = seconds + 0.4, tokens + 40
                forecast.note(seconds, prompts, tokens)
    assert forecast.remaining_seconds(4000, 1280) == pytest.approx(4.0 + 12.8)
    assert forecast.remaining_seconds(0, 640) == pytest.approx(6.4)


def test_it_says_nothing_before_it_knows() -> None:
    forecast = Forecast()
    for _ in range(9):
        forecast.note(1.0, 0, 0)
    assert forecast.remaining_seconds(10, 10) is None


def test_progress_that_does_not_tell_the_two_apart_has_one_rate() -> None:
    forecast = Forecast()
    for second in range(1, 9):
        forecast.note(second, 10 * second, 10 * second)
    assert forecast.remaining_seconds(0, 100) == pytest.approx(5.0, rel=0.01)


@pytest.mark.parametrize(("seconds", "text"), [(3.4, "3 s"), (600, "10 min"), (9000, "2.5 h")])
def test_times_for_people(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
