"""Simulated instances that skip steps in which nothing happens, for loads of a million requests.

An instance computes prompts and decodes them. It drives a `FastForward`, over a chunk table that only counts. Steps
between two events (an arrival, a chunk that begins or is full, an end) are one event here, whose time follows from the
latency model in closed form. It leaves out tiers, transfers, and messages, which take no time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from quire.cache.counts import ChunkCounts
from quire.cache.keys import ChunkKeys
from quire.cache.ledger import PAGE_TOKENS, PageCounts
from quire.engine.control_plane import retention_of, scheduler_of
from quire.engine.fast_forward import FastForward
from quire.engine.request import Sequence as Running
from quire.engine.scheduler import SampledToken, Scheduler
from quire.errors import ConfigError
from quire.simulation.engine import NO_MARKS, Plan
from quire.simulation.events import Events
from quire.timing.latency import StepTime, StepWork
from quire.workload.workload import Span

_TOKENS = np.zeros(1 << 20, np.int32)
_TOKENS.setflags(write=False)


class SpanKeys(ChunkKeys):
    """Keys of chunks whose tokens are known by spans alone. Equal keys are equal spans from the beginning on.

    spans  of the prompt, and then of the answer
    """

    reads_tokens = False

    def __init__(self, spans: Sequence[Span], num_tokens: int, prefixes: dict[tuple[int, int, int], int]) -> None:
        """spans: with ids below 2^48 - 1. num_tokens: of prompt and answer. prefixes: numbers of rows of whole spans,
        shared by all requests.
        """
        self.namespace = None
        self._keys = keys = []
        spans_left, end, number = iter(spans), 0, 0
        before, span = 0, Span(-1, 0)
        for chunk_end in range(PAGE_TOKENS, num_tokens + 1, PAGE_TOKENS):
            while end < chunk_end:
                if span.num_tokens:
                    before = prefixes.setdefault((before, *span), len(prefixes) + 1)
                span = next(spans_left)
                end += span.num_tokens
                number = span.id + 1
            keys.append(_key(before, number << 24 | chunk_end // PAGE_TOKENS))

    def first(self, count: int) -> list[bytes]:
        """See ChunkKeys."""
        return self._keys[:count]

    def tokens(self, first: int, end: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        """Stand-ins: nobody reads them."""
        return _TOKENS[: (end - first) * PAGE_TOKENS]


def _key(before: int, inside: int) -> bytes:
    return before.to_bytes(7, "little") + inside.to_bytes(9, "little")


def counting_scheduler(plan: Plan) -> Scheduler:
    """The scheduler of a plan, over a table that counts. Raises ConfigError with retention, which has pages."""
    if plan.config.retain.is_on:
        raise ConfigError("requests that retain are not simulated in bulk; simulate fewer, without skipping steps")
    formats, shape = plan.formats, plan.shape
    ledger = PageCounts(plan.sizes.cache_bytes, plan.sizes.arena.slab_bytes)
    table = ChunkCounts(ledger, shape.num_layers, shape.num_kv_heads, *formats.codecs, sinks=formats.sinks)
    return scheduler_of(plan.config, table, retention_of(plan.config, lambda: NO_MARKS), None, lambda: 0.0)


class SkippingInstance:
    """A scheduler under the time of a latency model.

    told     is called with each sequence at the end of the step that gave it its first token or its last one
    busy     seconds of all steps
    num_out  steps outside of the range of the latency model; steps that are skipped together count like the first one
    """

    def __init__(
        self,
        events: Events,
        scheduler: Scheduler,
        latency: StepTime,
        told: Callable[[Running, bool], None],
    ) -> None:
        self.scheduler, self.latency = scheduler, latency
        self._forward = FastForward(scheduler)
        self.busy = 0.0
        self.num_steps = 0
        self.num_out = 0
        self._events, self._told = events, told
        self._arrived: list[Running] = []
        self._version = 0
        self._is_idle = True
        self._quiet: tuple[float, StepWork, int] | None = None  # when it began, the first step's work, and their number

    def add(self, sequence: Running) -> None:
        """A request of one sequence arrives now. It is queued at the end of the step that runs."""
        self._arrived.append(sequence)
        if self._is_idle:
            self._is_idle = False
            self._events.at(self._events.now, self._turn)  # with others that arrive now
        elif self._quiet is not None:
            self._interrupt(self._quiet)

    @property
    def num_waiting(self) -> int:
        """Sequences that are not admitted."""
        return len(self.scheduler.waiting) + len(self._arrived)

    def memory_used(self) -> float:
        """Share of the cache that live sequences use."""
        manager = self.scheduler.manager
        ledger = manager.table.ledger
        return (ledger.allocated_bytes - manager.statistics.cached()) / ledger.num_bytes

    def _interrupt(self, quiet: tuple[float, StepWork, int]) -> None:
        """Ends skipped steps with the one that runs now."""
        begun, work, count = quiet
        low, high, left = 1, count, self._events.now - begun
        while low < high:
            middle = (low + high) // 2
            if self.latency.quiet(work, middle) >= left:
                high = middle
            else:
                low = middle + 1
        self._end_at(begun + self._pass_quiet(quiet, low))

    def _pass_quiet(self, quiet: tuple[float, StepWork, int], count: int) -> float:
        """Takes the first `count` of skipped steps. Returns their seconds."""
        _, work, _ = quiet
        passed = self._forward.advance(count)
        assert passed == count, f"{passed} steps of {count} were quiet"
        self._quiet = None
        return self._spend(self.latency.quiet(work, count), count, work)

    def _spend(self, seconds: float, count: int, work: StepWork) -> float:
        self.busy += seconds
        self.num_steps += count
        if not self.latency.covers(work):
            self.num_out += count
        return seconds

    def _end_at(self, time: float) -> None:
        """Steps end. What was to happen before is called off."""
        self._version += 1
        self._events.at(time, partial(self._end, self._version))

    def _turn(self) -> None:
        """Between two steps."""
        now, scheduler = self._events.now, self.scheduler
        if self._arrived:
            scheduler.add(self._arrived, is_counted=True)
            self._arrived = []
        scheduler.manager.tick(now)
        count = self._forward.num_quiet
        if count:
            rows, context = len(scheduler.calendar), scheduler.calendar.context
            work = StepWork(0, 0.0, rows, context, context - self._num_shared, 0)
            self._quiet = now, work, count
            self._version += 1
            self._events.at(now + self.latency.quiet(work, count), partial(self._wake, self._version))
            return
        num_shared = self._num_shared
        if not self._forward.advance(1):
            self._is_idle = True
            return
        passed = self._forward.report
        context = passed.context + sum(passed.decodes) + len(passed.decodes)
        num_rows = sum(rows for _, rows in passed.prompts)
        pairs = sum(rows * (start + rows / 2) for start, rows in passed.prompts)
        decode_rows = passed.num_quiet + len(passed.decodes)
        # Prompts may share with each other, or with a sequence of one row.
        unique = max(context - num_shared, context / max(1, decode_rows))
        work = StepWork(num_rows, pairs, decode_rows, context, unique, len(passed.prompts))
        seconds, occupied = self.latency.seconds(work), self.latency.occupancy(work)
        if any(not is_last for _, _, is_last, _ in passed.sampled):
            occupied = seconds  # their next rows need these tokens
        self._spend(occupied, 1, work)
        if occupied < seconds:  # of a pipeline: the next prompts enter while these are in later stages
            self._events.at(now + seconds, partial(self._tell, passed.sampled))
            passed.sampled = []
        self._end_at(now + occupied)

    @property
    def _num_shared(self) -> int:
        """Tokens of the batch's contexts that are read with those of others: the rest is distinct."""
        tree = self.scheduler.manager.tree
        return (tree.num_reads - tree.num_read) * PAGE_TOKENS

    def _wake(self, version: int) -> None:
        if version == self._version and self._quiet is not None:
            self._pass_quiet(self._quiet, self._quiet[2])
            self._turn()

    def _end(self, version: int) -> None:
        if version != self._version:
            return
        self._tell(self._forward.report.sampled)
        self._turn()

    def _tell(self, sampled: list[SampledToken]) -> None:
        for sequence, _, is_last, _ in sampled:
            if is_last or sequence.num_generated == 1:
                self._told(sequence, is_last)
