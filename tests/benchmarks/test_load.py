"""The client of benchmarks/load.py: what it calls the time of a token, and which requests meet their targets."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.benchmark_scripts import benchmark

load = benchmark("load")


def answered(*times: float, num_tokens: int | None = None, error: str = "") -> Any:
    """An answer that was due at 10, with tokens at these times after that."""
    request = load.LoadRequest(0.0, [1, 2, 3], len(times))
    count = len(times) if num_tokens is None else num_tokens
    return load.Answered(request, 10.0, [10.0 + each for each in times], count, error)


def test_the_time_of_a_token_is_that_of_those_after_the_first() -> None:
    found = answered(2.0, 2.1, 2.2, 2.3)
    assert found.ttft == pytest.approx(2.0)
    assert found.tpot == pytest.approx(0.1), "three steps, not four"
    assert answered(2.0, 2.3, num_tokens=4).tpot == pytest.approx(0.1), "an event may have several"
    assert answered(2.0).tpot == 0.0
    assert answered(2.0, 2.1, error="cut").ttft == answered(2.0, 2.1, error="cut").tpot == math.inf
    assert answered().ttft == math.inf


def test_a_request_meets_both_targets_or_misses() -> None:
    """Eight meet both, one is late and one is slow: 0.8, although 0.9 meet each target."""
    answers = [answered(0.5, 0.6)] * 8 + [answered(2.0, 2.1), answered(0.5, 1.5)]
    assert load.attainment(answers, 1.0, 0.2) == 0.8
    assert load.attainment([*answers, answered(error="503")], 9.0, 9.0) == pytest.approx(10 / 11)


def test_a_quantile_is_a_value() -> None:
    values = [float(each) for each in range(1, 101)]
    assert [load.quantile(values, share) for share in (0.5, 0.9, 0.99, 1.0)] == [50.0, 90.0, 99.0, 100.0]
    assert load.quantile([3.0], 0.01) == 3.0 and math.isnan(load.quantile([], 0.5))


def test_a_load_has_the_lengths_of_the_trace_and_the_rate_that_was_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n0,10,4\n0,900,200\n0,30,0\n0,20,6\n")
    found = load.azure(file, 2, longest=100, vocabulary=range(50, 60), seed=1)
    assert [(len(each.prompt), each.num_out) for each in found] == [(10, 4), (20, 6)]
    assert all(50 <= token < 60 for each in found for token in each.prompt)
    with pytest.raises(ValueError, match="only 2 requests"):
        load.azure(file, 3, longest=100, vocabulary=range(50, 60), seed=1)
    times = [each.at for each in load.poisson(found * 2000, 5.0, 1)]
    assert times == sorted(times) and 4000 / times[-1] == pytest.approx(5.0, rel=0.1)
