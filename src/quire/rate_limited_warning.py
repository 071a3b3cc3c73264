"""A warning that clients may cause at any rate: logs the first one at once, then counts."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

INTERVAL_SECONDS = 60.0
"""Least time between two lines of one warning."""


class RateLimitedWarning:
    """Logs the first of many warnings of one kind, and then at most one line per interval, with their number.

    Safe to call from any thread.
    """

    def __init__(
        self, log: logging.Logger, seconds: float = INTERVAL_SECONDS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._log, self._seconds, self._clock = log, seconds, clock
        self._lock = threading.Lock()
        self._next = float("-inf")
        self._num_suppressed = 0

    def warn(self, text: str) -> None:
        """Logs the text, or counts it if a line was logged less than an interval ago."""
        with self._lock:
            now = self._clock()
            if now < self._next:
                self._num_suppressed += 1
                return
            num_suppressed, self._num_suppressed = self._num_suppressed, 0
            self._next = now + self._seconds
        more = f"; {num_suppressed} more since the last such line" if num_suppressed else ""
        self._log.warning("%s%s", text, more)

    def end(self) -> None:
        """Logs how many warnings were counted since the last line."""
        with self._lock:
            num_suppressed, self._num_suppressed = self._num_suppressed, 0
        if num_suppressed:
            self._log.warning("such warnings since the last one: %d", num_suppressed)
