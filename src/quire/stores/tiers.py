"""The tiers of an engine: its stores, nearest first."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from quire.cache.run import Run
from quire.cache.store import Store, Transfer

if TYPE_CHECKING:
    from quire.stores.listing import StoredRun


class Tier(Store):
    """A store with a name. By default it takes no runs, keeps nothing after a restart, and so has no pins.

    keeps          whether it ever stores runs
    is_persistent  whether its runs survive a restart; only such a store has pins
    """

    name: str
    keeps: bool
    is_persistent = False

    def wants(self, names: Sequence[bytes]) -> list[bool]:
        """False for every chunk."""
        return [False] * len(names)

    def put(self, run: Run, extents: Iterable[memoryview]) -> None:
        """Ignores the run."""

    def pin(self, names: Sequence[bytes], until: float) -> bool:
        """Pins chunks until a time, in seconds since the epoch. False if it lacks them or has no room for the pin."""
        return False

    def unpin(self, names: Iterable[bytes]) -> None:
        """Ends pins."""

    def stored(self, visible: Callable[[str], bool]) -> list[StoredRun]:
        """The runs that survive a restart and have a visible salt, the last used first. Reads the disk, so it must not
        run on the engine's thread.
        """
        return []

    def measure(self) -> float | None:
        """Measured bytes per second; None without a measurement: the first transfers then give the speed."""
        return None

    def flush(self, seconds: float) -> bool:
        """Waits until all stored runs are in their final place. Returns False if that takes longer than `seconds`."""
        return True

    @abstractmethod
    def close(self) -> None:
        """Ends the threads. A second call does nothing."""

    @abstractmethod
    def stats(self) -> dict[str, Any]:
        """Bytes, chunks and counts since start."""


class Tiers:
    """Several stores as one. A run is put into every store that lacks it, so that the copy on the disk outlives the
    copy in memory. It is read from the nearest store that has it.
    """

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self.tiers = list(tiers)
        self.keeps = any(tier.keeps for tier in self.tiers)

    def wants(self, names: Sequence[bytes]) -> list[bool]:
        """For each chunk, whether any store wants it."""
        return [any(each) for each in zip(*(tier.wants(names) for tier in self.tiers), strict=True)]

    def put(self, run: Run, extents: Iterable[memoryview]) -> None:
        """Puts a run into all stores. A store that has it already ignores it."""
        if len(self.tiers) > 1:
            extents = [memoryview(bytes(extent)) for extent in extents]
        for tier in self.tiers:
            tier.put(run, extents)

    def find(self, name: bytes) -> Run | None:
        """The run in the nearest store that has it."""
        for tier in self.tiers:
            if (run := tier.find(name)) is not None:
                return run
        return None

    def get(self, transfer: Transfer, runs: Sequence[Run]) -> None:
        """Reads each run from the nearest store that has it."""
        found: dict[Tier, list[Run]] = {}
        for run in runs:
            having = (each for each in self.tiers if any(each.find(name) is run for name in run.names))
            tier = next(having, self.tiers[-1])
            found.setdefault(tier, []).append(run)
        for tier, of_tier in found.items():
            tier.get(transfer, of_tier)

    def drop(self, names: Iterable[bytes]) -> None:
        """Drops runs from all stores."""
        names = list(names)
        for tier in self.tiers:
            tier.drop(names)

    @property
    def is_persistent(self) -> bool:
        """Whether any store survives a restart."""
        return any(tier.is_persistent for tier in self.tiers)

    def pin(self, names: Sequence[bytes], until: float) -> bool:
        """Pins chunks in the persistent store; see Tier."""
        return any(tier.pin(names, until) for tier in self.tiers)

    def unpin(self, names: Iterable[bytes]) -> None:
        """See Tier."""
        names = list(names)
        for tier in self.tiers:
            tier.unpin(names)

    def stored(self, visible: Callable[[str], bool] = lambda salt: True) -> list[StoredRun]:
        """See Tier."""
        return [each for tier in self.tiers for each in tier.stored(visible)]

    def count(self, names: Iterable[bytes]) -> dict[str, int]:
        """Number of chunks in the runs that have any of these names, by tier."""
        names = list(names)
        runs = {tier.name: {run for name in names if (run := tier.find(name)) is not None} for tier in self.tiers}
        return {tier: sum(len(run.names) for run in found) for tier, found in runs.items()}

    def measure(self) -> float | None:
        """Bytes per second of the slowest tier; None if unknown."""
        speeds = [speed for tier in self.tiers if (speed := tier.measure()) is not None]
        return min(speeds, default=None)

    def flush(self, seconds: float) -> bool:
        """See Tier."""
        end = time.monotonic() + seconds
        done = [tier.flush(max(0.0, end - time.monotonic())) for tier in self.tiers]
        return all(done)

    def close(self) -> None:
        """See Tier."""
        for tier in self.tiers:
            tier.close()

    def stats(self) -> dict[str, Any]:
        """The counters of each tier, by its name; see Tier."""
        return {tier.name: tier.stats() for tier in self.tiers}
