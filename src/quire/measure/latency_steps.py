"""Makes an engine run steps, and measures their seconds: prompts, prompts behind cached tokens, and decoding batches
that prompts join.

Requests are made so that the scheduler composes the wanted steps. Points are visited in random order, round after
round, so that a slow minute of the machine does not fall on one of them alone.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from quire.cache.ledger import PAGE_TOKENS
from quire.engine.engine import Engine
from quire.engine.params import SamplingParams
from quire.engine.step_work import CountingRunner
from quire.errors import ModelError
from quire.measure.engines import Progress
from quire.measure.latency_points import DECODE_STEPS, LEAST_PROMPT, POINTS, ROUNDS, DesignPoint, Limits, plan
from quire.offload.planning.quiet import OtherLoad, quiet_cores
from quire.timing.latency_fit import Record

JITTER = 0.15
"""Largest relative change of a length from visit to visit: lengths in service are no multiples of 16."""


@dataclass
class Visit:
    """Steps of a point. cores: that other programs kept busy meanwhile."""

    cores: float
    records: list[Record]


class _TimeIsUp(Exception):
    """The budget of seconds is spent."""


@dataclass
class Measurement:
    """Measured steps of an engine.

    points  all that were planned
    visits  of each point that was visited, in order. The first one of ROUNDS only warms up
    """

    points: list[DesignPoint] = field(default_factory=list)
    visits: dict[DesignPoint, list[Visit]] = field(default_factory=dict)

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


def measure(
    engine: Engine,
    seconds: float,
    seed: int = 0,
    progress: Progress = lambda done, total: None,
    kinds: Sequence[str] = POINTS,
) -> Measurement:
    """Steps of an idle engine with their seconds, from all points that fit it. Nothing of the requests stays.

    seconds   time to spend
    progress  called with the whole seconds that have passed, and with all of them
    kinds     of points
    Raises ModelError if the model's logits are not finite.
    """
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
        self._counted = CountingRunner(engine)
        self._progress, self._seconds, self._begun = progress, seconds, time.perf_counter()
        self._ids: set[str] = set()
        self._num_requests = 0

    @contextmanager
    def watching(self) -> Iterator[_Driver]:
        """While steps are counted. Ends all requests."""
        try:
            with self.engine.leaving_nothing():
                yield self
                self._end()
        finally:
            self.engine.any_runner = self._counted.inner

    def plan(self, kinds: Sequence[str]) -> list[DesignPoint]:
        """The points that there is time for. Steps are slow at first: memory is new, and late kernels are compiled."""
        longest = min(self._limits.budget, self._limits.longest)
        for _ in range(2):
            self.records = []
            self.visit(DesignPoint("prompt", joining=((1, longest),)))
            self.visit(DesignPoint("decode", 1, LEAST_PROMPT))
        tokens = max(work.prompt_rows / seconds for work, seconds in self.records)
        step = min(seconds for work, seconds in self.records if work.kind == "decode")
        left = self._seconds - (time.perf_counter() - self._begun)
        return plan(self._limits, kinds, left, tokens, step)

    def visit(self, point: DesignPoint) -> None:
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
            if not begun and self._counted.work is None:
                return

    def _step(self) -> set[str]:
        """Runs and records a step. Returns the requests that got a token."""
        counted, now = self._counted, time.perf_counter()
        self._progress(int(min(now - self._begun, self._seconds)), int(self._seconds))
        if now - self._begun >= self._seconds:
            raise _TimeIsUp
        counted.forget()
        begun = time.perf_counter()
        outputs = self.engine.step()
        seconds = time.perf_counter() - begun - counted.seconds
        if counted.work is not None:
            self.records.append((counted.work, seconds))
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
