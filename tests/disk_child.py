"""Processes that write to a disk store, for tests that kill them."""

from __future__ import annotations

import multiprocessing
import random
import time
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from quire.stores.disk import DiskStore

from .disk_runs import NAMESPACE, FakeRun

_CONTEXT = multiprocessing.get_context("forkserver")


def fake_of(number: int, extent_bytes: int) -> FakeRun:
    """The run that a child puts under a number."""
    return FakeRun(number, number % 3 + 1, extent_bytes, attached=number % 2)


def start_child(
    folder: Path, cap: int, first: int, extent_bytes: int, pause: float = 0.0
) -> tuple[BaseProcess, Any, Event]:
    """A process that puts the runs first, first + 1, ... until it is killed or told to stop. Returns it, the number of
    runs it has put, and what stops it.
    """
    _CONTEXT.set_forkserver_preload(["tests.disk_child"])
    # Without a lock, which a process that is killed would take along. It alone writes the number.
    count, stop = _CONTEXT.Value("i", 0, lock=False), _CONTEXT.Event()
    arguments = folder, cap, first, extent_bytes, pause, count, stop
    child = _CONTEXT.Process(target=_write, args=arguments, daemon=True)
    child.start()
    return child, count, stop


def _write(folder: Path, cap: int, first: int, extent_bytes: int, pause: float, count: Any, stop: Event) -> None:
    store, rng = DiskStore(folder, cap, NAMESPACE), random.Random(first)
    while not stop.is_set():
        fake = fake_of(first + count.value, extent_bytes)
        if all(store.wants(fake.names)):
            store.put(fake.run, fake.pack())
        count.value += 1
        if rng.random() < 0.1:
            store.drop([fake_of(first + rng.randrange(count.value), extent_bytes).names[0]])
        if rng.random() < 0.2:
            store.flush(5)
        time.sleep(pause)
    assert store.flush(10)
    store.check()
    store.close()
