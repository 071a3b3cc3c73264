"""Chunks on their way to a simulated engine: layer by layer, at known times. A store of runs without bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from quire.cache.arrays import Int32s
from quire.cache.run import Run, layout_of
from quire.cache.store import Transfer
from quire.cache.table import ChunkTable
from quire.errors import QuireError
from quire.planning.latency import Link
from quire.simulation.events import Events
from quire.stores.tiers import Volatile


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


class Arrivals:
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
        """All known layers of a transfer arrive now, in advance: a step that is simulated as a whole follows them."""
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


@dataclass(eq=False)
class Disk(Volatile):
    """A tier whose runs have no bytes: the least recently used ones make room. Reads follow one another.

    name     in statistics
    cap      bytes
    link     of reads
    """

    name: str
    cap: int
    link: Link
    events: Events
    arrivals: Arrivals
    keeps: bool = True
    table: ChunkTable | None = None
    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(
            ("num_put", "num_read", "bytes_read", "bytes_written", "num_collected"), 0
        )
    )

    def __post_init__(self) -> None:
        self._kept: OrderedDict[Run, int] = OrderedDict()
        self._runs: dict[bytes, Run] = {}
        self._bytes = 0
        self._free_at = 0.0

    def wants(self, names: Sequence[bytes]) -> list[bool]:
        """Whatever it lacks."""
        return [self._use(name) is None for name in names]

    def put(self, run: Run, extents: Iterable[memoryview]) -> None:
        """Keeps the run unless it has it already. One with an attachment replaces one without."""
        known = {self._runs.get(name) for name in run.names}
        if None not in known and all(each and each.num_attached >= run.num_attached for each in known):
            return
        num_bytes = self._size(run)
        if num_bytes > self.cap:
            return
        while self._bytes + num_bytes > self.cap:
            self._forget(next(iter(self._kept)))
            self.counts["num_collected"] += 1
        self._kept[run] = num_bytes
        self._bytes += num_bytes
        self.counts["num_put"] += 1
        self.counts["bytes_written"] += num_bytes
        older = {each for name in run.names if (each := self._runs.get(name)) is not None}
        self._runs.update(dict.fromkeys(run.names, run))
        for each in older:
            if not any(self._runs.get(name) is each for name in each.names):
                self._forget(each)

    def find(self, name: bytes) -> Run | None:
        """See Store."""
        return self._runs.get(name)

    def get(self, transfer: Transfer, runs: Sequence[Run]) -> None:
        """Reads the runs, one after the other."""
        num_layers = len(transfer.ready)
        for run in runs:
            transfer.sources[run] = self.name
            if run not in self._kept:
                transfer.fail(QuireError("a run is no longer there"), run)
                return
            self._kept.move_to_end(run)
            begun = max(self.events.now + self.link.latency, self._free_at)
            seconds = self._kept[run] / self.link.bytes_per_second
            self._free_at = begun + seconds
            self.counts["num_read"] += 1
            self.counts["bytes_read"] += self._kept[run]
            times = [begun + seconds * (layer + 1) / num_layers for layer in range(num_layers)]
            self.arrivals.bring(transfer, times, partial(transfer.note, run))

    def drop(self, names: Iterable[bytes]) -> None:
        """See Store."""
        for name in list(names):
            if (run := self._runs.get(name)) is not None:
                self._forget(run)

    def measure(self) -> float | None:
        """The speed of reads."""
        return self.link.bytes_per_second

    def close(self) -> None:
        """Does nothing."""

    def stats(self) -> dict[str, Any]:
        """Bytes and counts since start."""
        chunks = sum(len(run.names) for run in self._kept)
        return {"bytes": self._bytes, "cap_bytes": self.cap, "chunks": chunks, "is_on": True, **self.counts}

    def _size(self, run: Run) -> int:
        assert self.table is not None, "no engine"
        return sum(layout_of(self.table, run).num_bytes)

    def _use(self, name: bytes) -> Run | None:
        run = self._runs.get(name)
        if run is not None:
            self._kept.move_to_end(run)
        return run

    def _forget(self, run: Run) -> None:
        self._bytes -= self._kept.pop(run)
        for name in run.names:
            if self._runs.get(name) is run:
                del self._runs[name]
