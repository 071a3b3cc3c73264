"""Gives freed memory back to the system after large requests. Knows the C library, nothing of requests."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
from collections.abc import Callable

TRIM_BYTES = 1_000_000
"""Size from which a body, as text or parsed, or an answer with log-probabilities causes a trim. Prompts of 250,000
tokens reach it."""

MANY_BYTES = 16_000_000
"""Total size of small bodies that causes a trim."""

TRIM_SECONDS = 3.0
"""Time from a large body or answer to the trim. Requests that come meanwhile use the memory again."""


class MemoryTrimmer:
    """Returns the freed pages that glibc keeps. After 25 different kinds of hostile requests, one after the other, it
    keeps 400 MB without trims and 150 MB with them. A trim takes 1 to 40 ms, on a thread. Other C libraries return
    pages by themselves.
    """

    def __init__(self) -> None:
        self._trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._timer: asyncio.TimerHandle | None = None
        self._num_bytes = 0  # bytes of bodies and answers since the last trim

    def note_freed(self, num_bytes: int) -> None:
        """Notes that a body or an answer of this size was freed. One trim follows within TRIM_SECONDS."""
        self._num_bytes += num_bytes
        is_much = num_bytes >= TRIM_BYTES or self._num_bytes >= MANY_BYTES
        if is_much and self._trim is not None and self._timer is None:
            with contextlib.suppress(RuntimeError):  # an answer is dropped after the event loop has ended
                self._timer = asyncio.get_running_loop().call_later(TRIM_SECONDS, self._start, self._trim)

    def _start(self, trim: Callable[[int], int]) -> None:
        self._timer, self._num_bytes = None, 0
        asyncio.get_running_loop().run_in_executor(None, trim, 0)
