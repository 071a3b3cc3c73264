"""Loads of a setup: many simulations of one workload, at several rates and with several seeds, in several processes."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

from quire.config import RetainConfig
from quire.errors import QuireError
from quire.options import format_number
from quire.planning.bounds import Asked, Bound, joint_bound
from quire.planning.fitted import Fitted, fit
from quire.planning.goodput import Goodput, goodput
from quire.planning.latency import Origin
from quire.planning.slo import ANYTHING, Slo, finite
from quire.planning.traces import read_workload, tokens
from quire.planning.workload import Workload
from quire.simulation.outcome import Outcome
from quire.simulation.setup import Replicas, Setup, silent
from quire.simulation.simulate import simulate

CONFIRMATIONS = 4
"""Fresh seeds that confirm a goodput."""

SHORT = 0.05
"""A doubt is told if a queue that still grows may account for more than this share of a goodput."""

LONGEST = 20
"""A run has at most so many times the requests that are asked for."""

CLEARLY = 0.8
"""Few requests whose share is below this part of the target are taken to miss it with more of them, too."""

LOWEST = 1000
"""The lowest rate of a search for the goodput is this part of the highest one."""

Progress = Callable[[int, int], None]
"""Is told the number of requests that have ended, and of all."""


@dataclass(frozen=True, eq=False)
class Load:
    """Requests to simulate.

    workload  as it was recorded
    count     number of requests that count
    fitted    distributions to draw them from; None: the first ones of the workload, whatever the seed
    """

    workload: Workload
    count: int
    fitted: Fitted | None = None

    @classmethod
    def read(cls, file: Path, count: int, *, fitted: bool) -> Load:
        """The requests of a trace. fitted: drawn from distributions; otherwise its first ones. Raises ConfigError."""
        workload = read_workload(file)
        if fitted:
            return cls(workload, count, fit(workload))
        return cls(workload.first(count), min(count, len(workload.arrivals)))

    @property
    def origin(self) -> Origin:
        """Of the requests."""
        return Origin.MEASURED if self.fitted is None else Origin.FITTED

    def drawn(self, rate: float | None, seed: int) -> Workload:
        """The requests at a rate; None: at the workload's own. The same seed gives the same requests at any rate."""
        if self.fitted is not None:
            return self.fitted.steady(self.count, seed, rate)
        found = self.workload.first(self.count)
        return found if rate is None else found.at_rate(rate)

    def facts(self) -> dict[str, Any]:
        """Numbers of the requests, for JSON."""
        workload, fitted = self.workload, self.fitted
        found: dict[str, Any] = {
            "name": workload.name,
            "requests": self.count,
            "rate": finite(workload.rate),
            "cv": workload.cv,
            "mean_in": workload.mean_in,
            "mean_out": workload.mean_out,
            "shared": workload.shared,
            "origin": self.origin.value,
        }
        if fitted is not None:
            names = ("ks_in", "ks_out", "ks_gaps", "cv", "accepted")
            found["fit"] = {name: getattr(fitted, name) for name in names}
        return found

    def lasting(self, rate: float, slo: Slo) -> Load:
        """At least so many requests that at this rate a queue that grows shows: that it accounts for at most SHORT of
        the rate if they meet their targets. Requests may wait for their first token, and for room where they are
        decoded, which counts among the seconds of their tokens. See `noted`.
        """
        answer = slo.tpot * float(self.workload.columns.num_out.mean())
        wait = max((each for each in (slo.ttft, answer) if math.isfinite(each)), default=0.0)
        count = math.ceil(rate * wait / (slo.attainment * SHORT)) if math.isfinite(rate) else 0
        return replace(self, count=min(max(self.count, count), LONGEST * self.count))


class Simulation(Protocol):
    """One simulation, which another process may run.

    load   its requests
    count  number of those that count
    """

    @property
    def load(self) -> Load: ...  # noqa: D102

    @property
    def count(self) -> int: ...  # noqa: D102

    def outcome(self, progress: Progress = ...) -> Outcome:
        """Simulates."""
        ...


@dataclass(frozen=True)
class Run:
    """A load of a setup. rate: requests/s; None: the workload's own."""

    setup: Setup
    load: Load
    rate: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        self.setup.measure()

    @property
    def count(self) -> int:
        """See Simulation."""
        return self.load.count

    def outcome(self, progress: Progress = lambda done, total: None) -> Outcome:
        """See Simulation."""
        workload = self.load.drawn(self.rate, self.seed)
        return run_of(self.setup, workload, self.seed, progress).counting(workload.counted)


def run_of(setup: Setup, workload: Workload, seed: int, progress: Progress = lambda done, total: None) -> Outcome:
    """What comes of a workload. seed: of its tokens."""
    prompts = tokens(workload, range(setup.vocab_size), seed)
    with silent():
        return simulate(workload, prompts, setup.front_of, progress=progress)


class InProcess:
    """Simulates in this process."""

    def run(self, runs: Sequence[Simulation], progress: Progress = lambda done, total: None) -> list[Outcome]:
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
        context.set_forkserver_preload([__name__])
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

    def run(self, runs: Sequence[Simulation], progress: Progress = lambda done, total: None) -> list[Outcome]:
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
    """What simulates, with so many processes."""
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


@dataclass
class Attains:
    """The share of requests that meet both targets, by rate and seed: what `quire.planning.goodput` asks for.

    simulation  of a rate and a seed
    groups      seeds that are simulated at the same time: those of a search, and those of its confirmation
    on_run      is told of each simulation
    first       shorter simulations, which come first: where they clearly miss the target, they are the outcomes. Few
                requests may meet targets that many miss, because a queue takes time to grow, but hardly the reverse
    outcomes    by rate and seed, of all that was simulated
    """

    simulation: Callable[[float, int], Simulation]
    slo: Slo
    groups: Sequence[Sequence[int]] = ()
    pool: Pool = field(default_factory=InProcess)
    on_run: Callable[[float, int, Outcome], None] = lambda rate, seed, outcome: None
    first: Callable[[float, int], Simulation] | None = None
    outcomes: dict[tuple[float, int], Outcome] = field(default_factory=dict)

    def __call__(self, rate: float, seed: int) -> float:
        """The share, from 0 to 1."""
        if (rate, seed) not in self.outcomes:
            together = next((group for group in self.groups if seed in group), (seed,))
            found = [] if self.first is None else self._run(self.first, rate, together)
            if not found or self._share(found) >= CLEARLY * self.slo.attainment:
                found = self._run(self.simulation, rate, together)
            for each, outcome in zip(together, found, strict=True):
                self.outcomes[rate, each] = outcome
                self.on_run(rate, each, outcome)
        return self.outcomes[rate, seed].attainment(self.slo)

    def _run(
        self, simulation: Callable[[float, int], Simulation], rate: float, seeds: Sequence[int]
    ) -> Sequence[Outcome]:
        return self.pool.run([simulation(rate, each) for each in seeds])

    def _share(self, outcomes: Sequence[Outcome]) -> float:
        return fmean(each.attainment(self.slo) for each in outcomes)


def ceiling_of(setup: Setup, workload: Workload) -> float:
    """A rate in requests/s that a setup never serves for long, whatever the latency targets."""
    first = setup.replicas[0]
    asked = asked_of(workload, first.config.retain, first.plan.window)
    return joint_bound([(each.role, each.count, bound_of(each)) for each in setup.replicas], asked, ANYTHING)


def asked_of(workload: Workload, retain: RetainConfig, window: int | None) -> Asked:
    """What the requests of a workload ask at least of instances with this retention and window of attention."""
    return Asked.of(workload, 1.0 if retain.budget == "off" else retain.budget, window)


def bound_of(replicas: Replicas) -> Bound:
    """Upper bounds of the rates of an instance."""
    limits = replicas.config.scheduler
    assert limits.token_budget is not None, "a configuration with automatic values"
    return Bound(replicas.plan.latency, limits.token_budget, limits.max_running)


def find_goodput(
    attains: Attains,
    ceiling: float,
    seed: int,
    num_seeds: int = 1,
    confirmations: int = CONFIRMATIONS,
    guess: float | None = None,
    **settings: Any,
) -> Goodput:
    """The goodput of what `attains` simulates: the highest rate that reaches the target.

    ceiling        requests/s; higher rates are not tried, because no system serves them for long
    seed           the first one
    num_seeds      number of seeds of the search
    confirmations  number of fresh seeds after them, which confirm its result
    guess          the first rate; None: half the ceiling
    settings       of `quire.planning.goodput.goodput`, in place of its own
    """
    own, fresh = range(seed, seed + num_seeds), range(seed + num_seeds, seed + num_seeds + confirmations)
    attains.groups = (own, fresh)
    found = goodput(
        attains, attains.slo.attainment, low=ceiling / LOWEST, high=ceiling,
        guess=ceiling / 2 if guess is None else guess, seeds=own, confirm_seeds=fresh, **settings,
    )  # fmt: skip
    return noted(found, attains.simulation(found.rate, seed).load, attains.slo) if found.rate else found


def noted(found: Goodput, load: Load, slo: Slo) -> Goodput:
    """A goodput with the reasons why its requests may meet their targets only because they are few."""
    told, rate, count = list[str](), found.rate, load.count
    # With a capacity of C requests/s request k waits k / C - k / rate. The wait of request attainment * count reaches
    # the target at rate / C = 1 + excess.
    excess = rate * slo.ttft / (slo.attainment * count)
    if math.isfinite(excess) and excess > SHORT:
        told.append(
            f"{count:,} requests arrive within {format_number(count / rate)} s at {rate:.4g} requests/s; up to"
            f" {excess / (1 + excess):.0%} of this rate may be a queue that still grows, because requests may wait for"
            f" {slo.ttft:.4g} s; more --requests show it"
        )
    if load.fitted is not None and not load.fitted.settles(count, rate):
        told.append(
            f"conversations pause so long ({load.fitted.settling:.4g} s) that {count:,} requests are over before"
            f" {rate:.4g} requests/s arrive; more --requests reach it"
        )
    return replace(found, notes=tuple(told))
