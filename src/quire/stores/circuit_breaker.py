"""Circuit breaker: stops using a failing disk for a while, with one warning."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

log = logging.getLogger("quire")

FIRST_SECONDS, LAST_SECONDS = 30.0, 600.0


class CircuitBreaker:
    """Turns something off after several failures in a row. Allows a try after 30 s, then after 60 s, up to ten minutes.

    reason  of the last failure, while it is off or being tried; None while it works
    """

    def __init__(self, what: str, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        """what: begins both log lines. limit: number of failures in a row."""
        self.reason: str | None = None
        self._what, self._limit, self._clock = what, limit, clock
        self._num_failed = 0
        self._seconds = FIRST_SECONDS
        self._until = 0.0
        self._lock = threading.Lock()

    @property
    def is_on(self) -> bool:
        """Whether the next operation may be tried."""
        return self.reason is None or self._clock() >= self._until

    def fail(self, reason: str) -> None:
        """Notes a failure. Turns off after `limit` failures, and during a try after one."""
        with self._lock:
            if self.reason is not None and not self.is_on:
                return
            self._num_failed += 1
            if self.reason is None and self._num_failed < self._limit:
                return
            if self.reason is None:
                log.warning("%s is off: %s; it is tried again in %.0f s", self._what, reason, self._seconds)
            else:
                self._seconds = min(self._seconds * 2, LAST_SECONDS)
            self._until = self._clock() + self._seconds
            self.reason = reason

    def succeed(self) -> None:
        """Notes a success."""
        if self._num_failed:
            with self._lock:
                if self.reason is not None:
                    log.warning("%s works again", self._what)
                self.reason, self._num_failed, self._seconds = None, 0, FIRST_SECONDS
