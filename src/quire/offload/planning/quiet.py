"""Takes timing samples while other programs are idle, because a busy program distorts them."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

QUIET_CORES = 0.1
"""Cores, besides those that torch leaves idle, that other programs may keep busy during a quiet sample."""

MOST_TRIES = 4
"""Most samples taken for each requested one."""

_STAT = Path("/proc/stat")


class OtherLoad:
    """Average cores that other programs keep busy, since construction; 0 on systems that do not report it."""

    def __init__(self) -> None:
        self._begun, self._before = time.monotonic(), _foreign_seconds()

    def cores(self) -> float:
        """Average number of cores."""
        return max(0.0, (_foreign_seconds() - self._before) / max(1e-9, time.monotonic() - self._begun))


def _foreign_seconds() -> float:
    """Seconds of processor time of all programs but this one and its ended children."""
    try:
        words = _STAT.read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return 0.0
    # user, nice, system, then idle and waiting, then interrupts of two kinds, and what a virtual machine's host took.
    busy = sum(int(word) for index, word in enumerate(words[:8]) if index not in (3, 4))
    return busy / os.sysconf("SC_CLK_TCK") - sum(os.times()[:4])


def quiet_cores() -> float:
    """Most cores that other programs may keep busy during a quiet sample."""
    return QUIET_CORES + max(0, len(os.sched_getaffinity(0)) - torch.get_num_threads())


def quietest(sample: Callable[[], float], rounds: int) -> list[float]:
    """Samples until `rounds` of them were quiet, but at most MOST_TRIES for each. Returns the least disturbed ones."""
    found: list[tuple[float, float]] = []
    limit, num_quiet = quiet_cores(), 0
    while num_quiet < rounds and len(found) < MOST_TRIES * rounds:
        load = OtherLoad()
        value = sample()
        cores = load.cores()
        num_quiet += cores <= limit
        found.append((cores, value))
    return [value for _, value in sorted(found, key=lambda each: each[0])[:rounds]]


def spread(values: list[float]) -> float:
    """(maximum - minimum) / median."""
    return (max(values) - min(values)) / statistics.median(values)
