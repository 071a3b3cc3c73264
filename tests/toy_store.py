"""A store for tests: it keeps runs in memory and brings layers late, sometimes damaged or not at all."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from quire.cache.run import Run
from quire.cache.store import Transfer
from quire.errors import QuireError


@dataclass
class ToyStore:
    """Runs and their extents, by name. delay: seconds at most before each layer; failing: share of the transfers."""

    seed: int = 0
    delay: float = 0.02
    failing: float = 0.0
    refusing: float = 0.0
    num_put: int = 0
    num_got: int = 0
    keeps = True
    num_failed: int = 0
    runs: dict[bytes, Run] = field(default_factory=dict)
    extents: dict[Run, list[bytes]] = field(default_factory=dict)
    threads: list[threading.Thread] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def wants(self, names: Sequence[bytes]) -> list[bool]:
        """What it lacks, but for some calls."""
        refuses = self.rng.random() < self.refusing
        return [not refuses and name not in self.runs for name in names]

    def put(self, run: Run, extents: Iterable[memoryview]) -> None:
        """Keeps it; of chunks that it has already, the newer ones."""
        self.num_put += 1
        self.extents[run] = [bytes(extent) for extent in extents]
        assert len(self.extents[run]) == run.masks.shape[1], "a layer is missing"
        for name in run.names:
            self.runs[name] = run

    def find(self, name: bytes) -> Run | None:
        """See Store."""
        return self.runs.get(name)

    def get(self, transfer: Transfer, runs: Sequence[Run]) -> None:
        """Brings the layers of each run from a thread of its own."""
        for run in runs:
            transfer.sources[run] = "toy"
            self.num_got += 1
            fails = self.rng.random() < self.failing
            delays = [self.rng.random() * self.delay for _ in self.extents[run]]
            place = self.rng.randrange(len(delays)) if fails else -1
            how = self.rng.choice(["lost", "damaged", "short", "another"])
            thread = threading.Thread(target=self._bring, args=(run, transfer, delays, place, how), daemon=True)
            self.threads.append(thread)
            thread.start()

    def _bring(self, run: Run, transfer: Transfer, delays: list[float], place: int, how: str) -> None:
        extents = self.extents[run]
        for layer, seconds in enumerate(delays):
            time.sleep(seconds)
            extent = extents[layer]
            if layer == place:
                self.num_failed += 1
                if how in ("lost", "damaged"):  # a store checks the bytes itself
                    transfer.fail(QuireError(f"the toy store found it {how}"), run)
                    return
                extent = extent[:-1] if how == "short" else extent.replace(b"QRUN", b"QRUM", 1)
            transfer.arrive(run, extent)

    def drop(self, names: Iterable[bytes]) -> None:
        """See Store. Threads that bring such runs go on."""
        for name in names:
            run = self.runs.get(name)
            if run is not None:
                for each in run.names:
                    if self.runs.get(each) is run:
                        del self.runs[each]

    def settle(self) -> None:
        """Waits for all threads."""
        for thread in self.threads:
            thread.join()
