"""A store that keeps the most recently used runs in memory. Knows the size of a run's content, not the content."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from quire.cache.run import Run
from quire.cache.store import Transfer
from quire.errors import QuireError
from quire.stores.tiers import Tier

Content = TypeVar("Content")


@dataclass(eq=False)
class _Kept(Generic[Content]):
    """A run. used: time of its last use."""

    content: Content
    num_bytes: int
    used: float


class LruStore(Tier, Generic[Content]):
    """Keeps at most `cap` bytes of runs. Evicts the least recently used ones.

    Content   the stored form of a run
    lifetime  seconds without use after which a run is dropped; None: only when its memory is needed
    """

    name = "memory"
    keeps = True

    def __init__(self, cap: int, lifetime: float | None, clock: Callable[[], float]) -> None:
        self.cap = cap
        self._lifetime, self._clock = math.inf if lifetime is None else lifetime, clock
        self._kept: OrderedDict[Run, _Kept[Content]] = OrderedDict()
        self._runs: dict[bytes, Run] = {}
        self._bytes = 0
        self._counts = dict.fromkeys(("num_put", "num_read", "bytes_read", "bytes_written", "num_collected"), 0)

    def wants(self, names: Sequence[bytes]) -> list[bool]:
        """True for every chunk that it lacks: older runs make room."""
        self._expire()
        known = [self._runs.get(name) for name in names]
        for run in known:
            if run is not None:
                self._touch(run)
        return [run is None for run in known]

    def find(self, name: bytes) -> Run | None:
        """See Store."""
        self._expire()
        return self._runs.get(name)

    def drop(self, names: Iterable[bytes]) -> None:
        """See Store."""
        for name in list(names):
            if (run := self._runs.get(name)) is not None:
                self._forget(run)

    def stats(self) -> dict[str, Any]:
        """Bytes and counts since start."""
        chunks = sum(len(run.names) for run in list(self._kept))
        return {"bytes": self._bytes, "cap_bytes": self.cap, "chunks": chunks, "is_on": True, **self._counts}

    def _has(self, run: Run) -> bool:
        """Whether the store has all chunks of a run. A stored run with fewer attachments does not count."""
        self._expire()
        known = {self._runs.get(name) for name in run.names}
        return None not in known and all(each and each.num_attached >= run.num_attached for each in known)

    def _make_room(self, num_bytes: int) -> bool:
        """Evicts runs until `num_bytes` are free. Returns False if the store is too small."""
        if num_bytes > self.cap:
            return False
        while self._bytes + num_bytes > self.cap:
            self._forget(next(iter(self._kept)))
            self._counts["num_collected"] += 1
        return True

    def _keep(self, run: Run, content: Content, num_bytes: int) -> None:
        """Stores a run that fits. Forgets runs all of whose chunks are in other runs."""
        self._kept[run] = _Kept(content, num_bytes, self._clock())
        self._bytes += num_bytes
        self._counts["num_put"] += 1
        self._counts["bytes_written"] += num_bytes
        older = {each for name in run.names if (each := self._runs.get(name)) is not None}
        self._runs.update(dict.fromkeys(run.names, run))
        for each in older:
            if not any(self._runs.get(name) is each for name in each.names):
                self._forget(each)

    def _read(self, transfer: Transfer, run: Run) -> _Kept[Content] | None:
        """The content of a run for a transfer. If the run is gone, fails the transfer and returns None."""
        transfer.sources[run] = self.name
        kept = self._kept.get(run)
        if kept is None:
            transfer.fail(QuireError(f"a run is no longer in {self.name}"), run)
            return None
        self._touch(run)
        self._counts["num_read"] += 1
        self._counts["bytes_read"] += kept.num_bytes
        return kept

    def _forget(self, run: Run) -> None:
        """Forgets a run, even if other runs have taken over its names."""
        self._bytes -= self._kept.pop(run).num_bytes
        for name in run.names:
            if self._runs.get(name) is run:
                del self._runs[name]

    def _touch(self, run: Run) -> None:
        self._kept[run].used = self._clock()
        self._kept.move_to_end(run)

    def _expire(self) -> None:
        last = self._clock() - self._lifetime
        while self._kept and self._kept[oldest := next(iter(self._kept))].used < last:
            self._forget(oldest)
