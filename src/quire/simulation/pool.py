"""Many simulations, in this process or in several others."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import forkserver, resource_tracker
from typing import Protocol, TypeVar

from quire.errors import QuireError

Progress = Callable[[int, int], None]
"""Is told the number of requests that have ended, and of all."""

Result = TypeVar("Result", covariant=True)


class Simulation(Protocol[Result]):
    """Something that is simulated, in any process.

    count  number of requests that count
    """

    @property
    def count(self) -> int: ...  # noqa: D102

    def outcome(self, progress: Progress = ...) -> Result:
        """Simulates."""
        ...


class InProcess:
    """Simulates in this process."""

    def run(self, runs: Sequence[Simulation[Result]], progress: Progress = lambda done, total: None) -> list[Result]:
        """What comes of each run, in their order."""
        total, done, found = sum(run.count for run in runs), 0, []
        for run in runs:
            found.append(run.outcome(partial(_after, progress, done, total)))
            done += run.count
        return found


def _after(progress: Progress, before: int, total: int, done: int, _: int) -> None:
    progress(min(before + done, total), total)  # requests that do not count are simulated, too


class Workers:
    """Processes that simulate. They end with the block that they are made for, and with this process."""

    def __init__(self, processes: int) -> None:
        # A fork of this process would have its threads' locks, but not its threads.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["quire.simulation.run"])
        # This process handles Ctrl-C; in the others it is blocked from the beginning. To start the tracker unblocks it.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._executor = ProcessPoolExecutor(processes, context, _start)
        self._others = set(multiprocessing.active_children())

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._executor.shutdown(wait=kind is None, cancel_futures=True)
        if kind is not None:
            for process in set(multiprocessing.active_children()) - self._others:
                process.kill()

    def run(self, runs: Sequence[Simulation[Result]], progress: Progress = lambda done, total: None) -> list[Result]:
        """See InProcess. The number of processes does not change what comes of a run. Raises QuireError if a process
        ends by itself, as one does for which the memory is not enough.
        """
        futures = {self._executor.submit(run.outcome): run for run in runs}
        total, done = sum(run.count for run in runs), 0
        try:
            for future in as_completed(futures):
                done += futures[future].count
                future.result()
                progress(done, total)
            return [future.result() for future in futures]
        except BrokenProcessPool:
            raise QuireError(
                "a process that simulates has ended by itself, perhaps because the memory is not enough; try fewer"
                " --processes or --requests"
            ) from None


Pool = InProcess | Workers


@contextlib.contextmanager
def pool_of(processes: int) -> Iterator[Pool]:
    """What simulates. processes: at once."""
    if processes == 1:
        yield InProcess()
    else:
        with Workers(processes) as workers:
            yield workers


def _start() -> None:
    """Of a process that simulates: the one that began it handles Ctrl-C, and it ends with that one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a fork server that ran before has nothing blocked
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
