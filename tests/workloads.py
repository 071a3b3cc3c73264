"""Workloads that several tests have."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.workload.workload import Arrival, Span, Workload


def trace(data_dir: Path, name: str) -> Path:
    """The file of a recorded trace. Skips the test if there is none."""
    path = data_dir / "traces" / name
    if not path.is_file():
        pytest.skip(f"no trace at {path}")
    return path


def equal_conversations(
    count: int, *, turns: int, gap: float, pause: float, num_in: int = 30, num_out: int = 5
) -> Workload:
    """Conversations that begin `gap` seconds apart; each has `turns` of the `count` requests."""
    arrivals = []
    for index in range(count):
        follows = (index - 1, pause) if index % turns else ()
        arrivals.append(Arrival(gap * (index // turns), (Span(index, num_in),), num_out, *follows))
    return Workload("chat", arrivals)
