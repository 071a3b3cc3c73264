"""Runs with random bytes, and transfers that collect what arrives, for tests of the disk store."""

from __future__ import annotations

import os
import random
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from quire.cache.keys import ChunkKeys, namespace_key
from quire.cache.namespace import FORMAT_VERSION, Namespace
from quire.cache.run import Run
from quire.cache.table import ALL_SLOTS
from quire.errors import QuireError

NAMESPACE = Namespace(model="m", dtype="float32", codec="dense")
LAYERS, HEADS = 3, 2
MIB = 1 << 20


class FakeRun:
    """A run and its extents, unsealed."""

    def __init__(
        self,
        seed: int,
        chunks: int = 2,
        extent_bytes: int = 5000,
        *,
        namespace: Namespace = NAMESPACE,
        start: int = 0,
        attached: int = 0,
        layers: int = LAYERS,
        is_shared: bool = True,
        jitter: int = 200,
    ) -> None:
        """extent_bytes: of each extent, and up to `jitter` more."""
        rng = random.Random(seed)
        tokens = [rng.randrange(1 << 15) for _ in range(64 * (start + chunks))]
        keys = ChunkKeys(namespace, tokens)
        names = keys.first(start + chunks)
        parent = names[start - 1] if start else namespace_key(namespace)
        n = chunks + attached
        masks = np.full((n, layers, HEADS), ALL_SLOTS)
        placed = np.zeros((n, layers, HEADS), bool)
        masks[chunks:] = 7
        placed[chunks:] = True
        kinds, bases = np.full(n, 1, np.uint8), np.arange(n, dtype=np.int32) - 1
        sidecars = np.arange(n) == 0
        if is_shared:
            found = keys.tokens(start, start + chunks)
            origin: tuple[Any, ...] = (namespace, start, parent)
            shared = tuple(names[start:])
        else:
            found, origin, shared = np.empty(0, np.int32), (None, 0, b""), (rng.randbytes(16),)
        self.run = Run(shared, is_shared, found, attached, kinds, masks, placed, bases, sidecars, *origin)
        self.extents = [
            struct.pack("<4sHHIIIIQ48x", b"QRUN", FORMAT_VERSION, is_shared, layer, n, attached, HEADS, len(rest))
            + rest
            for layer in range(layers)
            for rest in [rng.randbytes(extent_bytes + rng.randrange(jitter))]
        ]

    @property
    def names(self) -> tuple[bytes, ...]:
        return self.run.names

    def pack(self) -> Iterator[memoryview]:
        """Each extent in the same memory, as from an arena."""
        buffer = bytearray(max(map(len, self.extents)))
        for extent in self.extents:
            buffer[: len(extent)] = extent
            yield memoryview(buffer)[: len(extent)]
            buffer[:] = bytes(len(buffer))


class FakeTransfer:
    """What the store sees of a transfer. arrived: extents in the order of their arrival."""

    def __init__(self, runs: list[Run], delay: float = 0.0) -> None:
        self.runs = runs
        self.sources: dict[Run, str] = {}
        self.arrived: list[tuple[Run, int, bytes]] = []
        self.error: QuireError | None = None
        self.is_closed = False
        self._delay = delay
        self._changed = threading.Condition()

    def arrive(self, run: Run, extent: memoryview) -> None:
        time.sleep(self._delay)
        with self._changed:
            if not self.is_closed and self.error is None:
                self.arrived.append((run, struct.unpack_from("<I", extent, 8)[0], bytes(extent)))
                self._changed.notify_all()

    def fail(self, error: QuireError, lost: Run | None = None) -> None:
        with self._changed:
            if self.error is None:
                self.error = error
            self._changed.notify_all()

    @property
    def num_layers(self) -> int:
        return sum(run.masks.shape[1] for run in self.runs)

    @property
    def is_over(self) -> bool:
        return self.is_closed or self.error is not None or len(self.arrived) == self.num_layers

    def wait(self, seconds: float = 20.0) -> bool:
        """Whether all has arrived; False after a failure."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.is_over, seconds), "a transfer hangs"
            return self.error is None


def unsealed(extent: bytes) -> bytes:
    """An extent without checksum and MAC."""
    return extent[:32] + bytes(48) + extent[80:]


def fetch(store: Any, names: tuple[bytes, ...], delay: float = 0.0) -> FakeTransfer | None:
    """A transfer of the runs with these names that has ended; None if one is not found."""
    runs = [store.find(name) for name in names]
    if None in runs:
        return None
    transfer = FakeTransfer(list(dict.fromkeys(runs)), delay)
    store.get(transfer, transfer.runs)
    transfer.wait()
    return transfer


def holds(store: Any, fake: FakeRun) -> bool:
    """Whether a run comes back, byte by byte; False for a miss or a failure. Fails on wrong bytes."""
    transfer = fetch(store, fake.names)
    if transfer is None or transfer.error is not None:
        return False
    found = {(run.names, layer): unsealed(extent) for run, layer, extent in transfer.arrived}
    assert found == {(fake.names, layer): extent for layer, extent in enumerate(fake.extents)}, "wrong bytes"
    return True


def disk_usage(folder: Path) -> int:
    """As `du -B1`. What disappears meanwhile counts nothing."""
    found = 0
    for here, folders, files in os.walk(folder):
        for name in [*files, *folders]:
            try:
                found += os.lstat(os.path.join(here, name)).st_blocks * 512
            except FileNotFoundError:
                continue
    return found + folder.stat().st_blocks * 512
