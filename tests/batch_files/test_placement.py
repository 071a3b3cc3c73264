"""The report of a planned batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from quire.batch_files.placement import PlannedBatch


def test_a_report_tells_the_bytes_of_all_kinds() -> None:
    moved = {"weights_near": 0.5, "cache_near": 0.25, "hidden_near": 0.0, "weights_wait_seconds": 1.0}
    moved |= {"weights_bytes_read": 1 << 20, "cache_bytes_read": 2 << 20, "hidden_bytes_read": 4 << 20}
    moved |= {"cache_bytes_written": 8 << 20, "hidden_bytes_written": 16 << 20}
    batch: Any = SimpleNamespace(num_tokens=0, num_done=0, num_failed=0)
    (said,) = PlannedBatch().report(batch, {"offload": moved})
    assert said.startswith("in memory: weights 50 %, cache 25 %, hidden 0 %; loaded 7MiB, stored 24MiB, waited 1.0 s")


def test_lines_that_failed_were_not_predicted() -> None:
    """A line that the model refuses takes no second block."""
    plan: Any = SimpleNamespace(rate=lambda num_lines, num_tokens: num_tokens / num_lines)
    batch: Any = SimpleNamespace(num_tokens=80, num_done=5, num_failed=1, seconds=8.0)
    assert PlannedBatch(plan=plan).report(batch, {}) == ["predicted 20 tokens/s, measured 10 (-50%)"]
    batch.num_failed = 5
    assert not PlannedBatch(plan=plan).report(batch, {})
