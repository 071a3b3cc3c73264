"""Chunks on their way to a simulated engine: layer by layer, at known times. A store of runs without bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from quire.cache.arrays import Int32s
from quire.cache.counts import ChunkCounts
from quire.cache.run import Run, extent_layout
from quire.cache.store import Transfer
from quire.cache.table import ChunkTable
from quire.simulation.events import Events
from quire.stores.lru_store import LruStore
from quire.timing.latency import Link


@dataclass(eq=False)
class _Bringing:
    """Layers of one transfer from one source. times: when each arrives; note: a layer has arrived."""

    times: list[float]
    note: Callable[[int], None]
    num_done: int = 0

    def next_layer(self) -> None:
        if self.num_done < len(self.times):
            self.num_done += 1
            self.note(self.num_done - 1)


class ChunkArrivals:
    """What is on its way to one engine."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._now: float | None = None
        self._underway: dict[int, list[_Bringing]] = {}

    def clock(self) -> float:
        """The time of arrivals, which an engine's step does not delay."""
        return self._events.now if self._now is None else self._now

    def bring(self, transfer: Transfer, times: list[float], note: Callable[[int], None]) -> None:
        """Lets the layers of a transfer arrive. times: of each layer, rising."""
        bringing, key = _Bringing(times, note), id(transfer.ready)
        self._underway.setdefault(key, []).append(bringing)
        for layer, time in enumerate(times):
            self._events.at(time, partial(self._arrive, bringing, layer))
        self._events.at(times[-1], partial(self._end, key, bringing))

    def last(self, ready: Int32s) -> float:
        """When the last known layer of a transfer arrives."""
        return max((each.times[-1] for each in self._underway.get(id(ready), ())), default=self._events.now)

    def finish(self, ready: Int32s) -> None:
        """Delivers all known layers of a transfer now. The step waited for them, and it is simulated at once."""
        for bringing in self._underway.get(id(ready), []):
            for time in bringing.times[bringing.num_done :]:
                self._now = time
                bringing.next_layer()
        self._now = None

    def _arrive(self, bringing: _Bringing, layer: int) -> None:
        if bringing.num_done == layer:
            bringing.next_layer()

    def _end(self, key: int, bringing: _Bringing) -> None:
        found = self._underway[key]
        found.remove(bringing)
        if not found:
            del self._underway[key]


class LateReads:
    """When the layers of runs arrive that a tier reads one after the other.

    link  of reads
    """

    def __init__(self, link: Link, events: Events, arrivals: ChunkArrivals) -> None:
        self.link, self._events, self._arrivals = link, events, arrivals
        self._free_at = 0.0

    def bring(self, transfer: Transfer, num_bytes: int, note: Callable[[int], None]) -> None:
        """Reads a run after those before it. note: a layer has arrived."""
        begun = max(self._events.now + self.link.latency, self._free_at)
        seconds, count = num_bytes / self.link.bytes_per_second, len(transfer.ready)
        self._free_at = begun + seconds
        self._arrivals.bring(transfer, [begun + seconds * (layer + 1) / count for layer in range(count)], note)


class SimulatedDisk(LruStore[None]):
    """A tier whose runs have no bytes, but take their room and their time.

    name   in statistics
    table  of the engine that it belongs to
    """

    def __init__(
        self, name: str, cap: int, link: Link, events: Events, arrivals: ChunkArrivals, lifetime: float | None = None
    ) -> None:
        """cap, lifetime: see LruStore. link: of reads."""
        super().__init__(cap, lifetime, lambda: events.now)
        self.name = name
        self.table: ChunkCounts | None = None
        self._reads = LateReads(link, events, arrivals)

    def put(self, run: Run, extents: Iterable[memoryview]) -> None:
        """Keeps the run unless it has it already, or it is larger than everything."""
        if not self._has(run) and self._make_room(num_bytes := self._size(run)):
            self._keep(run, None, num_bytes)

    def get(self, transfer: Transfer, runs: Sequence[Run]) -> None:
        """Reads the runs, one after the other."""
        for run in runs:
            kept = self._read(transfer, run)
            if kept is None:
                return
            self._reads.bring(transfer, kept.num_bytes, partial(transfer.note, run))

    def measure(self) -> float | None:
        """The speed of reads."""
        return self._reads.link.bytes_per_second

    def close(self) -> None:
        """Does nothing."""

    def _size(self, run: Run) -> int:
        assert isinstance(self.table, ChunkTable), "no engine with pages"
        return sum(extent_layout(self.table, run).num_bytes)
