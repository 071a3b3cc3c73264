"""Loads of a setup: many simulations of one workload, at several rates and with several seeds, in several processes."""

from __future__ import annotations

import dataclasses
import math
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from quire.errors import QuireError
from quire.planning.fitted import Fitted
from quire.planning.latency import Origin
from quire.planning.traces import tokens
from quire.planning.workload import Arrivals, Workload
from quire.simulation.outcome import Outcome, Slo
from quire.simulation.setup import Setup
from quire.simulation.simulate import simulate

Progress = Callable[[int, int], None]
"""Is told the number of requests that have ended, and of all."""


class Part(StrEnum):
    """What of each request is simulated.

    WHOLE    prompt and answer
    PREFILL  the prompt and its first token: see `prompts_of`
    DECODE   everything, on a setup that computes prompts in no time: see `quire.simulation.phases`
    """

    WHOLE = "whole"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, eq=False)
class Load:
    """Requests to simulate.

    workload  as it was recorded
    count     number of requests
    fitted    distributions to draw them from; None: the first ones of the workload, whatever the seed
    part      of each request
    tpot      PREFILL: seconds per token that answers are thought to take
    """

    workload: Workload
    count: int
    fitted: Fitted | None = None
    part: Part = Part.WHOLE
    tpot: float = 0.0

    @property
    def origin(self) -> Origin:
        """Of the requests."""
        return Origin.MEASURED if self.fitted is None else Origin.FITTED

    def drawn(self, rate: float | None, seed: int) -> Workload:
        """The requests at a rate; None: at the workload's own. The same seed gives the same requests at any rate."""
        if self.fitted is not None:
            found = self.fitted.sample(self.count, seed, rate)
        else:
            found = self.workload.first(self.count)
            found = found if rate is None else found.at_rate(rate)
        return prompts_of(found, self.tpot) if self.part is Part.PREFILL else found


def prompts_of(workload: Workload, tpot: float) -> Workload:
    """The same requests with answers of one token.

    Of what follows in a conversation, the prompt is as long as before: the rest of the answer is a span of its own,
    which nothing has cached. It comes as late as if each token had taken `tpot` seconds.
    """
    source = workload.columns
    if not (source.after >= 0).any():
        return Workload(workload.name, dataclasses.replace(source, num_out=np.ones_like(source.num_out)))
    before = np.where(source.after >= 0, source.after, 0)
    rest = np.where(source.after >= 0, source.num_out[before] - 1, 0)
    has_rest = rest > 0
    places = source.start[:-1][has_rest]
    new_ids = int(source.ids.max()) + 1 + np.flatnonzero(has_rest)
    num_spans = np.diff(source.start) + has_rest
    return Workload(
        workload.name,
        Arrivals(
            source.at,
            source.pause + tpot * rest,
            np.ones_like(source.num_out),
            source.after,
            np.concatenate(([0], np.cumsum(num_spans))),
            np.insert(source.ids, places, new_ids),
            np.insert(source.sizes, places, rest[has_rest]),
        ),
    )


@dataclass(frozen=True)
class Run:
    """One simulation. rate: requests/s; None: the workload's own."""

    setup: Setup
    load: Load
    rate: float | None = None
    seed: int = 0

    def outcome(self, progress: Progress = lambda done, total: None) -> Outcome:
        """Simulates."""
        workload = self.load.drawn(self.rate, self.seed)
        prompts = tokens(workload, range(self.setup.vocab_size), self.seed)
        return simulate(workload, prompts, self.setup.front_of, progress=progress)


def run_many(runs: Sequence[Run], processes: int = 1, progress: Progress = lambda done, total: None) -> list[Outcome]:
    """What comes of each run, in their order. The number of processes does not change it.

    Raises QuireError if a process ends by itself, as one does for which the memory is not enough.
    """
    total = sum(run.load.count for run in runs)
    if processes == 1 or len(runs) == 1:
        found, done = [], 0
        for run in runs:
            found.append(run.outcome(lambda ended, _, before=done: progress(before + ended, total)))  # type: ignore[misc]
            done += run.load.count
        return found
    with Workers(min(processes, len(runs))) as workers:
        return workers.run(runs, progress)


class Workers:
    """Processes that simulate. They end with the block that they are made for, and with this process."""

    def __init__(self, processes: int) -> None:
        # A fork of this process would have its threads' locks, but not its threads.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._executor = ProcessPoolExecutor(processes, context, _start)
        self._others = set(multiprocessing.active_children())

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._executor.shutdown(wait=kind is None, cancel_futures=True)
        if kind is not None:
            for process in set(multiprocessing.active_children()) - self._others:
                process.kill()

    def run(self, runs: Sequence[Run], progress: Progress = lambda done, total: None) -> list[Outcome]:
        """See run_many."""
        futures = {self._executor.submit(run.outcome): run for run in runs}
        total, done = sum(run.load.count for run in runs), 0
        try:
            for future in as_completed(futures):
                done += futures[future].load.count
                future.result()
                progress(done, total)
            return [future.result() for future in futures]
        except BrokenProcessPool:
            raise QuireError(
                "a process that simulates has ended by itself, perhaps because the memory is not enough; try fewer"
                " --processes or --requests"
            ) from None


def _start() -> None:
    """Of a process that simulates: the one that began it handles Ctrl-C, and it ends with that one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@dataclass
class Attains:
    """The share of requests of a setup that meet both targets, by rate and seed: see `quire.planning.goodput`.

    groups     seeds that are simulated at the same time: those of a search, and those of its confirmation
    workers    None: one simulation after the other, in this process
    on_run     is told of each simulation
    outcomes   by rate and seed, of all that was simulated
    """

    setup: Setup
    load: Load
    slo: Slo
    groups: Sequence[Sequence[int]] = ()
    workers: Workers | None = None
    on_run: Callable[[float, int, float], None] = lambda rate, seed, share: None
    outcomes: dict[tuple[float, int], Outcome] = field(default_factory=dict)

    def __call__(self, rate: float, seed: int) -> float:
        """The share, from 0 to 1."""
        if (rate, seed) not in self.outcomes:
            together = next((group for group in self.groups if seed in group), (seed,))
            runs = [Run(self.setup, self.load, rate, each) for each in together]
            found = [run.outcome() for run in runs] if self.workers is None else self.workers.run(runs)
            for run, outcome in zip(runs, found, strict=True):
                self.outcomes[rate, run.seed] = outcome
                self.on_run(rate, run.seed, outcome.attainment(self.slo))
        share = self.outcomes[rate, seed].attainment(self.slo)
        assert not math.isnan(share), "a simulation without requests"
        return share
