"""Stores: memories of runs beside the arena, which answer to names. Knows runs and their bytes, not sequences or when
something is wanted.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quire.cache.arrays import Int32s
from quire.cache.run import Run, unpack
from quire.cache.table import ChunkTable
from quire.errors import ExtentError, QuireError


class Transfer:
    """Runs on their way into an arena, layer by layer. A store's thread brings extents; the engine's asks and waits.

    The pages they are written into are held until `close`.

    ready  int32 [L]: 1 once a layer has arrived as a whole, -1 if it will not; kernels may wait for it
    error  why it failed; None while it has not
    """

    def __init__(self, table: ChunkTable, parts: list[tuple[Run, Int32s]], changed: threading.Condition) -> None:
        """parts: runs, and for each of its rows the row of the table that takes it, or -1 if it is not wanted.
        changed: of all transfers of an engine.
        """
        num_layers, _ = table.shape
        self.ready: NDArray[np.int32] = np.zeros(num_layers, np.int32)
        self.error: QuireError | None = None
        self._is_closed = False
        self._table = table
        self._parts = dict(parts)
        self._missing = [set(self._parts) for _ in range(num_layers)]
        self._held = table.hold(np.concatenate([rows[rows >= 0] for _, rows in parts]))
        self._lock = threading.Lock()
        self._changed = changed

    def arrive(self, run: Run, extent: bytes) -> None:
        """Takes the extent of one layer of one of the runs. Fails, with every layer that is missing, if it is damaged;
        does nothing once it has failed.
        """
        with self._lock:
            if self._is_closed or self.error is not None:
                return
            try:
                layer = unpack(self._table, run, self._parts[run], extent)
            except ExtentError as error:
                self._fail(error)
                return
            except Exception as error:  # whoever waits must not wait for ever
                self._fail(QuireError(f"an extent could not be read: {error}"))
                raise
            self._missing[layer].discard(run)
            if not self._missing[layer]:
                self.ready[layer] = 1
                self._tell()

    def fail(self, error: QuireError) -> None:
        """The layers that are missing will not come."""
        with self._lock:
            if not self._is_closed and self.error is None:
                self._fail(error)

    def done(self, layer: int) -> bool:
        """Whether a layer has arrived, or will not."""
        return bool(self.ready[layer])

    @property
    def is_over(self) -> bool:
        """Whether nothing more will arrive."""
        return bool(self.ready.all())

    def wait(self, seconds: float) -> None:
        """Sleeps until a layer of any transfer arrives, or nothing more of this one will; for some time at most."""
        with self._changed:
            if not self.ready.all():
                self._changed.wait(seconds)

    @property
    def runs(self) -> list[Run]:
        """What it brings."""
        return list(self._parts)

    def close(self) -> bool:
        """Nothing is written any more, whatever still comes; the pages are no longer held. Whether all has arrived."""
        with self._lock:
            self._is_closed = True
            self._table.release(self._held)
            return bool((self.ready == 1).all())

    def _fail(self, error: QuireError) -> None:
        self.error = error
        self.ready[self.ready == 0] = -1
        self._tell()

    def _tell(self) -> None:
        with self._changed:
            self._changed.notify_all()


class Store(Protocol):
    """Keeps runs, and may lose any of them at any time: what it does not find is computed."""

    def wants(self, keys: Sequence[bytes]) -> bool:
        """Whether to keep chunks that are evicted."""
        ...

    def put(self, run: Run, extents: Iterable[bytes]) -> None:
        """Keeps a run, or does not. The extents, of all layers in order, are there only during the call."""
        ...

    def find(self, name: bytes) -> Run | None:
        """The run in which a chunk is, by its key, or a private run by its handle."""
        ...

    def get(self, run: Run, transfer: Transfer) -> None:
        """Begins to bring all layers of a run, in order. If the run was lost since it was found, fails the transfer."""
        ...

    def drop(self, names: Iterable[bytes]) -> None:
        """Forgets runs, by any name each has."""
        ...


class Nowhere:
    """The plainest store: it keeps nothing. What is evicted from the tree is gone."""

    def wants(self, keys: Sequence[bytes]) -> bool:
        """Wants nothing."""
        return False

    def put(self, run: Run, extents: Iterable[bytes]) -> None:
        """Drops the run."""

    def find(self, name: bytes) -> Run | None:
        """Finds nothing."""
        return None

    def get(self, run: Run, transfer: Transfer) -> None:
        """Brings nothing: there was nothing to be found."""
        raise AssertionError("nothing was found here")

    def drop(self, names: Iterable[bytes]) -> None:
        """There is nothing to forget."""
