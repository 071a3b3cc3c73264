"""One simulated engine: the real `Engine` with a runner that takes time instead of computing."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np

from quire.cache.ledger import PageLedger
from quire.cache.retention.decisions import Retention, RetentionDecision
from quire.config import EngineConfig
from quire.engine.calibration import Calibration
from quire.engine.capacity import MeasuredCapacity, measure_capacity, measure_prefill
from quire.engine.control_plane import ChunkFormats, formats_of, namespace_of, retention_of, scheduler_of
from quire.engine.engine import Engine
from quire.engine.outputs import RequestOutput
from quire.engine.sizes import EngineSizes
from quire.engine.step import Result, Slice, Step
from quire.engine.step_work import WorkMeter
from quire.engine_thread import ROOM_SECONDS
from quire.errors import ConfigError
from quire.models.shape import ModelShape
from quire.models.structural_tokens import StructuralTokens
from quire.simulation.arrivals import ChunkArrivals, SimulatedDisk
from quire.simulation.events import Events, StepClock
from quire.simulation.table import PagesOnly
from quire.stores.tiers import Tier, Tiers
from quire.timing.latency import StepTime

if TYPE_CHECKING:
    from quire.models.tokenizer import Detokenizer

NO_MARKS = StructuralTokens((), frozenset())
"""Imagined tokens have no meaning. Retention keeps the first ones as special in any case."""


class NoText:
    """A tokenizer for requests without text."""

    def decode(self, token_ids: list[int], skip_special: bool = True) -> str:
        """Nothing."""
        return ""

    def stream(self, prompt_ids: list[int], skip_special: bool = True) -> Detokenizer:
        """Never called: requests are not detokenized."""
        raise AssertionError("a simulated request has no text")


@dataclass(frozen=True)
class Plan:
    """What an engine is simulated from.

    config    resolved: without automatic values
    sizes     what fits under it
    latency   of its steps
    model_id  the checkpoint's fingerprint
    """

    shape: ModelShape
    config: EngineConfig
    sizes: EngineSizes
    latency: StepTime
    calibration: Calibration | None = None
    model_id: str = ""

    @cached_property
    def capacity(self) -> MeasuredCapacity:
        """What an instance measures when it starts. It takes a quarter of a second to simulate, and only routers and
        instances for prompts need it.
        """
        events = Events()
        clock = StepClock(events)
        return measure_capacity(make_engine(self, clock, ChunkArrivals(events)))

    @property
    def window(self) -> int | None:
        """Tokens that a row attends to at most; None: all."""
        window = self.shape.sliding_window
        return window if window is not None and window < self.sizes.max_context else None

    @property
    def formats(self) -> ChunkFormats:
        """Of the cache's chunks."""
        return formats_of(self.config, self.shape, self.calibration)


def check_simulated(config: EngineConfig) -> None:
    """Raises ConfigError for a configuration whose retention cannot be simulated."""
    if config.retain.threshold != "off":
        raise ConfigError(
            "what retain.threshold keeps is known only after a prompt; simulate with retain.budget instead"
        )


class SimulatedRunner:
    """A `Runner` whose steps take the time of a latency model. Its tokens are imagined.

    clock     of the engine
    arrivals  of chunks; None: nothing is fetched
    decide    what retention keeps of a prompt, by a slice that ends it; None without retention
    window    tokens that a row attends to at most; None: all
    num_out   steps outside of the range for which the latency model has been measured
    lag       seconds from the moment at which the next step may begin until the tokens of the last one are there: in a
              pipeline, prompts enter while others are in later stages
    """

    def __init__(
        self,
        latency: StepTime,
        clock: StepClock,
        vocab_size: int,
        decide: Callable[[Slice], RetentionDecision] | None = None,
        window: int | None = None,
    ) -> None:
        self.latency, self.clock, self.decide = latency, clock, decide
        self.num_out = 0
        self.lag = 0.0
        self.arrivals: ChunkArrivals | None = None
        self.vocab_size = vocab_size
        self._meter = WorkMeter(window)

    def run(self, step: Step) -> Result:
        """Lets the time of the step pass."""
        work = self._meter.of(step)
        seconds = self.latency.occupancy(work)
        self.lag = self.latency.seconds(work) - seconds
        if step.ready is not None:  # its layers follow chunks in transfer
            assert self.arrivals is not None
            seconds = max(seconds, self.arrivals.last(step.ready) - self.clock())
        self.num_out += not self.latency.covers(work)
        self.clock.spend(seconds)
        if step.ready is not None and self.arrivals is not None:
            self.arrivals.finish(step.ready)
        result = Result()
        for index, piece in enumerate(step.slices):
            if piece.samples:
                result.token_ids.append(self._token(piece.sequence_id, piece.start + piece.num_rows))
            if piece.decides:
                assert self.decide is not None, "a prompt is to be decided on without retention"
                result.decided[index] = self.decide(piece)
        return result

    def _token(self, sequence_id: int, position: int) -> int:
        """A token of an answer. Unlike the scheduler's stand-ins it may stand in the prompt of a later request."""
        return (sequence_id * 1_000_003 + position * 7919) % self.vocab_size

    def check(self, live: set[int]) -> None:
        """See Runner: it remembers nothing."""


class Changed(nullcontext[None]):
    """Stands for the condition on which an engine waits for chunks in transfer: it notes the wait, and does not."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: float | None = None
        self.wake: Callable[[], None] = lambda: None

    def wait(self, seconds: float) -> None:
        """The engine would wait for `seconds` at most."""
        self.seconds = seconds

    def notify_all(self) -> None:
        """Ends a wait."""
        self.wake()


EngineOf = Callable[[StepClock, ChunkArrivals, Tiers | None], Engine]
"""Makes an engine on a clock, with stores."""

StoresOf = Callable[[Events, ChunkArrivals], Sequence[Tier]]
"""Makes the stores of an engine, nearest first."""


def no_stores(events: Events, arrivals: ChunkArrivals) -> Sequence[Tier]:
    """Nothing beside the arena."""
    return ()


def with_stores(engine_of: EngineOf, clock: StepClock, arrivals: ChunkArrivals, tiers: Sequence[Tier]) -> Engine:
    """An engine over these stores."""
    engine = engine_of(clock, arrivals, Tiers(tiers) if tiers else None)
    fetching = engine.scheduler.manager.fetching
    for tier in tiers:
        if isinstance(tier, SimulatedDisk):
            tier.table = fetching.table
    if tiers:  # as `load_engine` does
        if (speed := Tiers(tiers).measure()) is not None:
            fetching.costs.speed = speed
        measure_prefill(engine)
        clock.restart()
        if isinstance(engine.any_runner, SimulatedRunner):
            engine.any_runner.num_out = 0
    return engine


def make_engine(plan: Plan, clock: StepClock, arrivals: ChunkArrivals, tiers: Tiers | None = None) -> Engine:
    """An engine without a model."""
    config, shape, formats = plan.config, plan.shape, plan.formats
    ledger = PageLedger(plan.sizes.cache_bytes, plan.sizes.arena.slab_bytes)
    table = PagesOnly(ledger, (shape.num_layers, shape.num_kv_heads), formats)
    scheduler = scheduler_of(config, table, retention_of(config, lambda: NO_MARKS), tiers, arrivals.clock)
    retainer = scheduler.manager.retainer
    decide = None if retainer is None else partial(_decided, retainer.retention, table.shape)
    runner = SimulatedRunner(plan.latency, clock, shape.vocab_size, decide, plan.window)
    runner.arrivals = arrivals
    namespace = namespace_of(config, shape, plan.model_id, plan.calibration)
    limit = "what fits cache.memory" if plan.sizes.max_context < plan.sizes.model_context else "model.max_context"
    return Engine(
        runner, NoText(), scheduler, max_context=plan.sizes.max_context, eos_token_ids=(), namespace=namespace,
        tiers=tiers, context_limit=limit, clock=clock,
    )  # fmt: skip


def _decided(retention: Retention, shape: tuple[int, int], piece: Slice) -> RetentionDecision:
    """What heads keep of the prompt that a slice ends, if all its tokens get the same attention."""
    assert retention.budget is not None, "what a threshold keeps is known only after a prompt"
    n = piece.start + piece.num_rows
    return retention.decide([-1] * n, np.zeros((*shape, n), np.float32), None)


class EngineLoop:
    """Commands and steps of an engine, in the order of `EngineThread`, as events.

    has_stepped  is told the outputs of each step at its end, and after commands
    busy         seconds of all steps
    num_steps    steps that took time
    """

    def __init__(
        self, events: Events, engine: Engine, clock: StepClock, has_stepped: Callable[[list[RequestOutput]], None]
    ) -> None:
        self.engine = engine
        self._events, self._clock, self._has_stepped = events, clock, has_stepped
        self._commands: deque[Callable[[], object]] = deque()
        self._is_busy = self._is_waiting = False
        self.busy, self.num_steps = 0.0, 0
        self._turn_at = float("inf")  # of the next turn; later ones were called off
        self.changed = Changed()
        self.changed.wake = self._has_arrived
        engine.scheduler.manager.fetching.changed = self.changed  # type: ignore[assignment]

    @property
    def num_out(self) -> int:
        """Steps outside of what the latency model is known for."""
        runner = self.engine.any_runner
        return runner.num_out if isinstance(runner, SimulatedRunner) else 0

    def submit(self, command: Callable[[], object]) -> None:
        """Runs a command between two steps."""
        self._commands.append(command)
        self._wake()

    def _wake(self) -> None:
        if not self._is_busy:
            self._is_waiting = False
            self._plan(self._events.now)

    def _has_arrived(self) -> None:
        if self._is_waiting:
            self._wake()

    def _plan(self, time: float) -> None:
        if time < self._turn_at:
            self._turn_at = time
            self._events.at(time, partial(self._turn, time))

    def _turn(self, planned: float) -> None:
        if self._is_busy or planned != self._turn_at:
            return
        self._turn_at, self._is_busy = float("inf"), True
        while self._commands:
            self._commands.popleft()()
        outputs = self.engine.step()
        lag = self._lag(outputs)
        seconds = self._clock() - self._events.now
        self.busy += seconds
        self.num_steps += seconds > 0
        self._events.after(seconds, partial(self._end, outputs, lag))

    def _lag(self, outputs: list[RequestOutput]) -> float:
        """Seconds that the tokens of a step come after its end. A step whose sequences go on here ends with its tokens:
        their next rows need them.
        """
        runner = self.engine.any_runner
        if not outputs or not isinstance(runner, SimulatedRunner):
            return 0.0
        if any(not each.finished and each.request_id not in self.engine.exports for each in outputs):
            self._clock.spend(runner.lag)
            return 0.0
        return runner.lag

    def _end(self, outputs: list[RequestOutput], lag: float) -> None:
        self._is_busy = False
        if lag > 0:
            self._events.after(lag, partial(self._has_stepped, outputs))
            outputs = []
        self._has_stepped(outputs)
        now, engine = self._events.now, self.engine
        waited, self.changed.seconds = self.changed.seconds, None
        self._is_waiting = waited is not None
        if self._commands:
            self._plan(now)
        elif not engine.has_work:
            assert engine.holds_nothing, f"an idle engine holds {engine.stats()['cache']}"
            if (seconds := engine.idle()) is not None:
                self._plan(now + seconds)
        elif engine.is_blocked:
            self._plan(now + ROOM_SECONDS)
        else:
            self._plan(now if waited is None else now + waited)
