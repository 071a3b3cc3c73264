"""A limit on bytes per second, shared by reads and writes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

BURST_SECONDS = 0.05
"""Unused time that is saved: in t seconds, at most the bytes of t + 0.05 seconds pass, apart from `first` requests."""


class Throttle:
    """A token bucket. A request waits until its own bytes are paid for, so that a large one causes no burst."""

    def __init__(
        self,
        bandwidth: float | None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] | None = None,
    ) -> None:
        """bandwidth: bytes per second; None: no limit. sleep: by default a wait that `close` ends."""
        assert bandwidth is None or bandwidth > 0, f"a bandwidth of {bandwidth}"
        self.bandwidth = bandwidth
        self._clock = clock
        self._closed = threading.Event()
        self._sleep = sleep or self._closed.wait
        self._lock = threading.Lock()
        self._paid_until = self._first_until = clock()

    def take(self, num_bytes: int, *, first: bool = False) -> None:
        """Waits until these bytes may pass. Requests pass in the order of their calls.

        first  whether the request overtakes all waiting ones: it waits only for its own bytes and those of other
               `first` requests. Later requests make up for it
        """
        if self.bandwidth is None:
            return
        with self._lock:
            now = self._clock()
            own = num_bytes / self.bandwidth
            until = self._paid_until = max(self._paid_until, now - BURST_SECONDS) + own
            if first:
                self._first_until = max(self._first_until, now) + own
                until = min(until, self._first_until)
            seconds = until - now
        if seconds > 0 and not self._closed.is_set():
            self._sleep(seconds)

    def close(self) -> None:
        """Ends the limit and all waits."""
        self._closed.set()
