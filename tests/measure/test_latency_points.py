"""The steps that a latency benchmark measures."""

from __future__ import annotations

import pytest

from quire.cli import bench_latency
from quire.measure.latency_points import DETAILS, POINTS, Limits, plan, points_of

LARGE = Limits(budget=1024, context=8192, running=256, tokens=500_000, shares=True)


@pytest.mark.parametrize("detail", DETAILS)
def test_points_respect_an_engine_s_limits(detail: int) -> None:
    for limits in (
        LARGE,
        Limits(256, 512, 8, 4096, True),
        Limits(128, 300, 2, 700, True),
        Limits(64, 70, 1, 128, True),
    ):
        points = points_of(limits, POINTS, detail)
        assert points or limits.context < 100
        assert len({*points}) == len(points)
        for point in points:
            lengths = [point.own, *(length for _, length in point.joining)]
            assert point.shared + max(lengths) + 64 < limits.context
            assert point.cached_tokens <= limits.tokens and point.sequences <= limits.running
            assert all(count <= limits.running for count, _ in point.joining)


def test_points_cover_full_steps_full_batches_and_deep_contexts() -> None:
    points = points_of(LARGE)
    assert max(count * length for point in points for count, length in point.joining if count == 1) >= 8 * 1024 - 128
    assert max(point.sequences for point in points) == 256
    assert any(point.shared and point.sequences > 100 for point in points)
    assert {point.kind for point in points} == {*POINTS} == {*bench_latency.POINTS}
    assert not any(point.shared for point in points_of(Limits(1024, 8192, 256, 500_000, shares=False)))
    assert {point.kind for point in points_of(LARGE, ["prefix"])} == {"prefix"}


def test_fewer_points_are_planned_for_a_slow_machine() -> None:
    sizes = [len(plan(LARGE, POINTS, seconds, 4000.0, 0.01)) for seconds in (10, 60, 120)]
    assert sizes == [len(points_of(LARGE, POINTS, detail)) for detail in reversed(DETAILS)]
