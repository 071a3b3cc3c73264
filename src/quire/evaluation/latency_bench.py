"""Measures the steps of an engine for a latency model: prompts, prompts behind cached tokens, and decoding batches that
prompts join.

Requests are made so that the scheduler composes the wanted steps. Points are visited in random order, round after
round, so that a slow minute of the machine does not fall on one of them alone.
"""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime

import torch

from quire.cache.costs import LATENCY
from quire.cache.ledger import PAGE_TOKENS
from quire.config import EngineConfig, RetainConfig
from quire.engine.engine import Engine
from quire.engine.machine import processor_name
from quire.engine.params import SamplingParams
from quire.engine.step import Result, Runner, Step
from quire.errors import ModelError
from quire.evaluation.latency_points import DECODE_STEPS, LEAST_PROMPT, POINTS, ROUNDS, Limits, Point, plan
from quire.kernels import runtime
from quire.offload.quiet import OtherLoad, quiet_cores
from quire.planning.latency import About, Link, StepWork
from quire.planning.latency_fit import Record
from quire.planning.work import WorkMeter
from quire.version import __version__

JITTER = 0.15
"""Largest relative change of a length from visit to visit: lengths in service are no multiples of 16."""

Progress = Callable[[float, float], None]
"""Called with the seconds that have passed, and with all of them."""


@dataclass
class Visit:
    """Steps of a point. cores: that other programs kept busy meanwhile."""

    cores: float
    records: list[Record]


class _TimeIsUp(Exception):
    """The budget of seconds is spent."""


class _Watched:
    """A runner that counts the work of each step that it runs.

    work     of the last step; None: there was none, or it waited for chunks
    seconds  that counting it took
    """

    def __init__(self, runner: Runner, meter: WorkMeter) -> None:
        self._runner, self._meter = runner, meter
        self.work: StepWork | None = None
        self.seconds = 0.0

    def run(self, step: Step) -> Result:
        """Counts, and runs."""
        begun = time.perf_counter()
        work = self._meter.of(step)
        self.work = work if step.ready is None else None
        self.seconds = time.perf_counter() - begun
        return self._runner.run(step)

    @property
    def vocab_size(self) -> int:
        """See Runner."""
        return self._runner.vocab_size

    def check(self, live: set[int]) -> None:
        """See Runner."""
        self._runner.check(live)


@dataclass
class Measurement:
    """Measured steps of an engine.

    points  all that were planned
    visits  of each point that was visited, in order. The first one of ROUNDS only warms up
    """

    points: list[Point] = field(default_factory=list)
    visits: dict[Point, list[Visit]] = field(default_factory=dict)

    def _kept(self) -> Iterator[list[Visit]]:
        for visits in self.visits.values():
            yield visits[len(visits) >= ROUNDS :]

    @property
    def records(self) -> list[Record]:
        """All steps of visits that other programs disturbed little, and of the better half of each point's others."""
        found: list[Record] = []
        for visits in self._kept():
            least = max(quiet_cores(), statistics.median_low(visit.cores for visit in visits))
            found += [record for visit in visits if visit.cores <= least for record in visit.records]
        return found

    @property
    def num_disturbed(self) -> int:
        """Visits during which other programs were busy."""
        return sum(visit.cores > quiet_cores() for visits in self._kept() for visit in visits)

    @property
    def num_visits(self) -> int:
        """Visits without those that warm up."""
        return sum(map(len, self._kept()))


def measure_steps(
    engine: Engine, seconds: float, seed: int = 0, progress: Progress = lambda done, total: None
) -> list[Record]:
    """Steps of an idle engine with their seconds, from all points that fit it. Nothing of the requests stays.

    seconds  time to spend
    """
    return measure(engine, seconds, seed, progress).records


def measure(
    engine: Engine,
    seconds: float,
    seed: int = 0,
    progress: Progress = lambda done, total: None,
    kinds: Sequence[str] = POINTS,
) -> Measurement:
    """See measure_steps. kinds: of points, see POINTS. Raises ModelError if the model's logits are not finite."""
    assert not engine.has_work, "an engine that is measured does nothing else"
    with _Driver(engine, seconds, seed, progress).watching() as driver:
        found = Measurement()
        try:
            found.points = driver.plan(kinds)
            order = [*found.points]
            while order:
                for point in order:
                    driver.records, load = [], OtherLoad()
                    try:
                        driver.visit(point)
                    finally:
                        if driver.records:
                            found.visits.setdefault(point, []).append(Visit(load.cores(), driver.records))
                driver.draw.shuffle(order)
        except _TimeIsUp:
            pass
    return found


class _Driver:
    """Makes an engine run steps, and times them.

    records  steps since somebody emptied it
    """

    def __init__(self, engine: Engine, seconds: float, seed: int, progress: Progress) -> None:
        self.engine, self.draw = engine, random.Random(seed)
        self.records: list[Record] = []
        self._limits = Limits.of(engine)
        self._watched = _Watched(engine.any_runner, WorkMeter(engine.runner.model.shape.sliding_window))
        self._progress, self._seconds, self._begun = progress, seconds, time.perf_counter()
        self._ids: set[str] = set()
        self._num_requests = 0

    @contextmanager
    def watching(self) -> Iterator[_Driver]:
        """While steps are counted. Ends all requests."""
        runner, self.engine.any_runner = self.engine.any_runner, self._watched
        try:
            with self.engine.leaving_nothing():
                yield self
                self._end()
        finally:
            self.engine.any_runner = runner

    def plan(self, kinds: Sequence[str]) -> list[Point]:
        """The points that there is time for. Steps are slow at first: memory is new, and late kernels are compiled."""
        longest = min(self._limits.budget, self._limits.longest)
        for _ in range(2):
            self.records = []
            self.visit(Point("prompt", joining=((1, longest),)))
            self.visit(Point("decode", 1, LEAST_PROMPT))
        tokens = max(work.prompt_rows / seconds for work, seconds in self.records)
        step = min(seconds for work, seconds in self.records if work.kind == "decode")
        left = self._seconds - (time.perf_counter() - self._begun)
        return plan(self._limits, kinds, left, tokens, step)

    def visit(self, point: Point) -> None:
        """Runs the requests of a point. Raises _TimeIsUp in the middle of it if time is up."""
        vary, limits = self._varied, self._limits
        # Whole chunks are cached: behind a part of one, prompts would begin with its tokens.
        beginning = self._tokens(vary(point.shared) // PAGE_TOKENS * PAGE_TOKENS)
        joining = [(count, vary(length)) for count, length in point.joining]
        room = limits.context - len(beginning), limits.tokens - point.cached_tokens
        most = min(limits.budget - point.sequences, min(room) - 2 * PAGE_TOKENS)
        joining += [(1, length) for _ in range(point.num_joins) if (length := self._any_length(most))]
        try:
            if beginning:
                self._run([beginning + self._tokens(1)], 1)
            if point.sequences:
                own = vary(point.own)
                prompts = [beginning + self._tokens(own) for _ in range(point.sequences)]
                num_slices = point.sequences * (own + PAGE_TOKENS) // limits.budget + 1
                num_tokens = DECODE_STEPS + 4 * (len(joining) + num_slices) + LEAST_PROMPT
                self._run(prompts, min(num_tokens, limits.context - len(prompts[0])))
                for _ in range(DECODE_STEPS):
                    self._step()
            for count, length in joining:
                self._run([beginning + self._tokens(length) for _ in range(count)], 1)
                if self._ids:
                    self._step()
        finally:
            self._end()

    def _varied(self, length: int) -> int:
        """About a length."""
        return round(length * (1 - JITTER * self.draw.random()))

    def _any_length(self, most: int) -> int:
        """A length of a prompt, the same chance for each doubling; 0 if there is no room for one."""
        low = LEAST_PROMPT // 2
        return 0 if most < low else round(low * math.exp(self.draw.random() * math.log(most / low)))

    def _tokens(self, count: int) -> list[int]:
        """Ids from the middle of the vocabulary, which are not special tokens."""
        size = self.engine.vocab_size
        return self.draw.choices(range(size // 4, size // 2), k=count)

    def _run(self, prompts: list[list[int]], max_tokens: int) -> None:
        """Adds requests, and steps until each of them has its first token, or there is no room for more of them."""
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        waiting = set()
        for prompt in prompts:
            self._num_requests += 1
            name = f"latency-{self._num_requests}"
            self.engine.add(name, prompt, params)
            waiting.add(name)
        self._ids |= waiting
        while waiting:
            begun = self._step()
            waiting -= begun
            if not begun and self._watched.work is None:
                return

    def _step(self) -> set[str]:
        """Runs and records a step. Returns the requests that got a token."""
        watched, now = self._watched, time.perf_counter()
        self._progress(now - self._begun, self._seconds)
        if now - self._begun >= self._seconds:
            raise _TimeIsUp
        watched.work, watched.seconds = None, 0.0
        begun = time.perf_counter()
        outputs = self.engine.step()
        seconds = time.perf_counter() - begun - watched.seconds
        if watched.work is not None:
            self.records.append((watched.work, seconds))
        for output in outputs:
            if output.finished:
                self._ids.discard(output.request_id)
            for answer in output.outputs:
                if answer.finish_reason == "error":
                    raise ModelError(f"the model cannot be measured: {answer.stop_reason}")
        return {output.request_id for output in outputs}

    def _end(self) -> None:
        """Ends all requests, and drops what is cached of them."""
        for name in self._ids:
            self.engine.abort(name)
        self._ids.clear()
        manager = self.engine.scheduler.manager
        manager.eviction.evict(manager.tree.num_chunks)


def links_of(engine: Engine, config: EngineConfig) -> dict[str, Link]:
    """How fast the engine's tiers read, as measured at its start and since: empty without tiers."""
    speed = engine.scheduler.manager.fetching.costs.speed
    if speed is None or not config.tiers.is_on:
        return {}
    return {"disk" if config.tiers.disk is not None else "pinned": Link(LATENCY, speed)}


def settings_of(fingerprint: str, config: EngineConfig) -> About:
    """What the seconds of steps depend on, for `latency.mismatch`.

    fingerprint  of the checkpoint
    config       without automatic values
    """
    on_cpu = config.runtime.device == "cpu"
    return {
        "fingerprint": fingerprint,
        "dtype": config.model.dtype,
        "weights": config.model.weights,
        "codec": config.cache.codec,
        "outlier_slots": config.cache.outlier_slots if config.cache.is_calibrated else None,
        "sparse_values": config.cache.sparse_values,
        "retain": retention_text(config.retain),
        "offload": config.offload.mode,
        "backend": config.attention.backend,
        "threads": config.runtime.threads if on_cpu else None,
        "processor": processor_name() if on_cpu else torch.cuda.get_device_name(),
        "level": runtime.level() if on_cpu else None,
        "tp": 1,
        "pp": 1,
    }


def about_of(name: str, fingerprint: str, config: EngineConfig, engine: Engine) -> About:
    """All that a latency model says about its origin: `settings_of`, and what is good to know."""
    limits = Limits.of(engine)
    return {
        "model": name,
        **settings_of(fingerprint, config),
        "token_budget": limits.budget,
        "max_running": limits.running,
        "max_context": limits.context,
        "cache_tokens": limits.tokens,
        "bytes_per_token": engine.scheduler.manager.statistics.chunk_bytes / PAGE_TOKENS,
        "version": __version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def retention_text(retain: RetainConfig) -> str:
    """The settings of retention in one line; `off` without it."""
    if not retain.is_on:
        return "off"
    fields = {each.name: getattr(retain, each.name) for each in dataclasses.fields(retain)}
    if retain.budget != "off":
        return f"budget {retain.budget:g}, profile_rows {retain.profile_rows}"
    del fields["budget"]
    return ", ".join(f"{name} {value}" for name, value in fields.items())
