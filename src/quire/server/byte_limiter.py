"""A counting resource that requests share: a request waits until enough of it is free."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class ByteLimiter:
    """A resource of `size` units, lent in order of arrival: a small demand never overtakes a large one."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.free = size
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def num_waiting(self) -> int:
        """Number of waiting demands."""
        return len(self._waiting)

    @asynccontextmanager
    async def hold(self, size: int, seconds: float | None = None) -> AsyncIterator[None]:
        """Waits until `size` units (at most all) are free, and holds them within the context. Raises TimeoutError if
        it waits for longer than `seconds`.
        """
        size = min(size, self.size)
        async with asyncio.timeout(seconds):
            await self.acquire(size)
        try:
            yield
        finally:
            self.release(size)

    async def acquire(self, size: int) -> None:
        """Waits until `size` units (at most all) are free, and takes them. Returns at once for 0."""
        if not size:
            return
        mine = asyncio.get_running_loop().create_future()
        self._waiting.append((size, mine))
        self._lend()
        try:
            await mine
        except asyncio.CancelledError:
            if mine.cancelled():
                self._lend()  # later demands may have waited only for this one
            else:
                self.release(size)
            raise

    def release(self, size: int) -> None:
        """Returns `size` units."""
        self.free += size
        self._lend()

    def _lend(self) -> None:
        while self._waiting and (self._waiting[0][1].cancelled() or self._waiting[0][0] <= self.free):
            size, future = self._waiting.popleft()
            if not future.cancelled():
                self.free -= size
                future.set_result(None)
