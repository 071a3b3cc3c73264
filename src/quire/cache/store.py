"""Stores: they keep runs outside the arena, by name. Knows runs and their bytes, not sequences or decisions."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quire.cache.arrays import Int32s
from quire.cache.run import HeldPages, Run, RunIdentity, RunUnpacker
from quire.cache.table import ChunkTable
from quire.errors import ExtentError, QuireError


class Transfer:
    """A transfer of runs into an arena, layer by layer. The store's thread brings extents; the engine's thread asks and
    waits.

    The target pages are under a hold until `close`.

    ready      int32 [L]: 1 once the whole layer has arrived, -1 if it will not; kernels may wait for it
    error      reason of the failure; None if there is none
    lost       the run that a store has lost, or that is damaged; None if no such run is known
    is_shared  whether all of its runs are shared
    sources    by run, the name of the store that brings it
    names      keys of the shared chunks that it brings
    """

    def __init__(
        self,
        table: ChunkTable,
        parts: list[tuple[Run, Int32s]],
        changed: threading.Condition,
        clock: Callable[[], float] = time.monotonic,
        names: Sequence[bytes] = (),
    ) -> None:
        """parts: runs, and for each of their rows the row of the table that takes it; -1: not needed.
        changed: shared by all transfers of an engine.
        """
        num_layers, _ = table.shape
        self.ready: NDArray[np.int32] = np.zeros(num_layers, np.int32)
        self.error: QuireError | None = None
        self.lost: Run | None = None
        self.is_shared = all(run.is_shared for run, _ in parts)
        self.sources: dict[Run, str] = {}
        self.names = names
        self._clock = clock
        self._begun, self._ended = clock(), 0.0
        self._is_closed = False
        self._table = table
        self._parts = dict(parts)
        self._unpackers: dict[Run, RunUnpacker] = {}
        self._missing = [set(self._parts) for _ in range(num_layers)]
        self._held = table.hold(np.concatenate([rows[rows >= 0] for _, rows in parts]))
        self._lock = threading.Lock()
        self._changed = changed

    def arrive(self, run: Run, extent: memoryview | bytes) -> None:
        """Takes the complete extent of one layer of one run. If it belongs to another run, the transfer fails, with all
        its missing layers. Does nothing after a failure.
        """
        with self._lock:
            if self._is_closed or self.error is not None:
                return
            try:
                if run not in self._unpackers:
                    self._unpackers[run] = RunUnpacker(self._table, run, self._parts[run])
                layer = self._unpackers[run].unpack(extent)
            except ExtentError as error:
                self._fail(error, run)
                return
            except Exception as error:  # otherwise waiting threads would wait for ever
                self._fail(QuireError(f"an extent could not be read: {error}"), run)
                raise
            self._note(run, layer)

    def note(self, run: Run, layer: int) -> None:
        """Notes that a layer of a run has arrived, for simulated stores, whose runs have no bytes."""
        with self._lock:
            if not self._is_closed and self.error is None:
                self._note(run, layer)

    def fail(self, error: QuireError, lost: Run | None = None) -> None:
        """Fails the transfer: the missing layers will not arrive. lost: the run that caused the failure, if known."""
        with self._lock:
            if not self._is_closed and self.error is None:
                self._fail(error, lost)

    def done(self, layer: int) -> bool:
        """Whether a layer has arrived or will never arrive."""
        return bool(self.ready[layer])

    @property
    def is_over(self) -> bool:
        """Whether nothing more will arrive, or the transfer is closed."""
        return self._is_closed or bool(self.ready.all())

    @property
    def share(self) -> float:
        """Share of the layers that have arrived."""
        return float((self.ready == 1).mean())

    @property
    def seconds(self) -> float:
        """Seconds from the beginning to the last arrival."""
        return self._ended - self._begun

    def wait(self, seconds: float) -> None:
        """Sleeps until a layer of any transfer arrives, this transfer is over, or `seconds` have passed."""
        with self._changed:
            if not self.ready.all():
                self._changed.wait(seconds)

    @property
    def runs(self) -> list[Run]:
        """The runs of the transfer."""
        return list(self._parts)

    def close(self) -> bool:
        """Ends the transfer: later extents are ignored, and the hold on pages ends. Returns whether all has arrived."""
        with self._lock:
            self._is_closed = True
            self._table.ledger.release(self._held)
            return bool((self.ready == 1).all())

    def _note(self, run: Run, layer: int) -> None:
        self._missing[layer].discard(run)
        if not self._missing[layer]:
            self._ended = self._clock()
            self.ready[layer] = 1
            with self._changed:
                self._changed.notify_all()

    def _fail(self, error: QuireError, lost: Run | None) -> None:
        self.error, self.lost = error, lost
        self.ready[self.ready == 0] = -1
        with self._changed:
            self._changed.notify_all()


class Store(Protocol):
    """Keeps runs. It may lose any run at any time; chunks that it does not find are computed. Only `put` and `get` take
    time, and neither waits for a disk or another machine.

    keeps  whether it ever keeps a run
    """

    keeps: bool

    def wants(self, names: Sequence[bytes]) -> list[bool]:
        """Which of these chunks it lacks and would take now. Counts as a use of the others."""

    def put(self, run: Run, extents: Iterable[memoryview]) -> None:
        """Offers a run, which it may refuse. Extents, of all layers in order, are valid until the next one is taken."""

    def find(self, name: bytes) -> Run | None:
        """The run that contains the chunk with this key, or the private run with this handle."""

    def get(self, transfer: Transfer, runs: Sequence[Run]) -> None:
        """Starts to bring all layers of some runs of a transfer, in order, and names itself as their source. Fails the
        transfer if a run was lost since it was found.
        """

    def drop(self, names: Iterable[bytes]) -> None:
        """Forgets runs, each given by any of its names."""


def put_rows(store: Store, table: ChunkTable, identity: RunIdentity, rows: Int32s, *, attached: int) -> Run:
    """Packs rows of a table and puts them into a store. See `HeldPages`."""
    pages = HeldPages(table, identity, rows, attached=attached)
    store.put(pages.run, pages.pack(range(table.shape[0])))
    pages.release()
    return pages.run


class NullStore:
    """The plainest store: it keeps nothing, so evicted chunks are lost."""

    keeps = False

    def wants(self, names: Sequence[bytes]) -> list[bool]:
        """Wants nothing."""
        return [False] * len(names)

    def put(self, run: Run, extents: Iterable[memoryview]) -> None:
        """Drops the run."""

    def find(self, name: bytes) -> Run | None:
        """Finds nothing."""
        return None

    def get(self, transfer: Transfer, runs: Sequence[Run]) -> None:
        """Never called, because `find` finds nothing."""
        raise AssertionError("nothing was found here")

    def drop(self, names: Iterable[bytes]) -> None:
        """Does nothing."""
