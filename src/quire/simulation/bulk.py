"""A simulated cluster for loads of a million requests: instances that skip steps, behind the router's own choice."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial

import numpy as np

from quire.cache.ledger import PAGE_TOKENS
from quire.cluster.bodies import InstanceLoad, InstanceReady
from quire.cluster.members import Health, Member, PrefixIndex, ServingInstances, choose_instances
from quire.cluster.messages import Attempt
from quire.engine.capacity import MeasuredCapacity
from quire.engine.params import SamplingParams
from quire.engine.request import Request
from quire.engine.request import Sequence as Running
from quire.gc_pause import gc_paused
from quire.simulation.engine import Plan
from quire.simulation.events import Events
from quire.simulation.outcome import Outcome, Used
from quire.simulation.skipping import SkippingInstance, SpanKeys, counting_scheduler
from quire.workload.workload import Span, Workload

LOAD_SECONDS = 0.2
"""As often as instances tell how full they are."""

MOST_KEYS = 4_000_000
"""Keys that the router's index remembers."""

ANSWERS = 1 << 40
"""The answer of request i is the span with id ANSWERS + i: no workload has so many spans."""

PARAMS = SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False)

_PARTS = 1 << 20

_NUM_TOLD = 100
"""Times that progress is told."""


class BulkSimulation:
    """A workload on equal instances that compute prompts and decode.

    A request fails if prompt and answer are longer than the context. It also fails if it comes when
    `scheduler.max_queue` sequences wait: in the queue of the only instance, or, of several, for their first tokens.

    routing      see ClusterConfig. Instances do not fetch prefixes from each other
    prompt_rows  see Policy: of instances that only compute prompts
    progress     is told the number of requests that have ended, and of all
    """

    def __init__(
        self,
        workload: Workload,
        plan: Plan,
        num_instances: int,
        *,
        routing: str = "expected",
        prompt_rows: int | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self._events, self._routing, self._progress = Events(), routing, progress
        # Small ids, for keys have room for those.
        ids = np.unique(workload.columns.ids, return_inverse=True)[1].astype(np.int64)
        self._columns = replace(workload.columns, ids=ids)
        self._index = PrefixIndex(MOST_KEYS)
        # Of a single instance nobody asks what it can do.
        capacity = plan.capacity if num_instances > 1 else MeasuredCapacity(1, 1, 1e-3, 1e-3)
        ready = InstanceReady(
            "", "", capacity.prompt_rows, capacity.batch, None, capacity.seconds_per_row,
            capacity.seconds_per_step,
        )  # fmt: skip
        names = [f"mixed-{number}" for number in range(num_instances)]
        self._members = {name: Member(name, name, "mixed", Health.SERVING, ready) for name in names}
        self._serving = ServingInstances.of(self._members.values())
        self._instances = {
            name: SkippingInstance(self._events, counting_scheduler(plan), plan.latency, partial(self._told, member))
            for name, member in self._members.items()
        }
        for each in self._instances.values():
            each.scheduler.policy.prompt_rows = prompt_rows
        self._most, self._max_queue = plan.sizes.max_context, plan.config.scheduler.max_queue
        self._shares = plan.config.cache.share
        self._prefixes: dict[tuple[int, int, int], int] = {}
        self._spans: dict[int, tuple[Span, ...]] = {}  # of prompts that others follow
        self._following: dict[int, list[int]] = {}
        n = len(workload.arrivals)
        self._arrived, self._first, self._last = np.zeros(n), np.full(n, np.inf), np.full(n, np.inf)
        self._num_in, self._num_out, self._num_cached = (np.zeros(n, np.int64) for _ in range(3))
        self._num_done = self._num_unanswered = 0

    def run(self) -> Outcome:
        """Lets all requests arrive, and end. Called once."""
        arrivals = self._columns
        for index in np.flatnonzero(arrivals.after >= 0).tolist():
            self._following.setdefault(int(arrivals.after[index]), []).append(index)
        roots = np.flatnonzero(arrivals.after < 0)
        self._left = deque(zip(roots.tolist(), arrivals.at[roots].tolist(), strict=True))
        self._await_next()
        with gc_paused():
            self._events.run(lambda: self._num_done == len(self._arrived))
        unknown = np.full(len(self._arrived), np.nan)
        used = tuple(
            Used(name, "mixed", each.busy, each.num_steps, each.num_out, asdict(each.scheduler.counters))
            for name, each in self._instances.items()
        )
        with np.errstate(invalid="ignore"):
            decode = self._last - self._first
        stages = {"queue": unknown, "prefill": unknown, "transfer": unknown, "decode": decode}
        return Outcome(
            self._arrived, self._first, self._last, self._num_out, self._num_in, self._num_cached,
            {"arena": self._num_cached}, stages, used, self._events.now,
        )  # fmt: skip

    def _await_next(self) -> None:
        """Only the next arrivals are among the events."""
        if self._left:
            self._events.at(self._left[0][1], self._arrive)

    def _arrive(self) -> None:
        while self._left and self._left[0][1] <= self._events.now:
            index, _ = self._left.popleft()
            self._begin(index, self._columns[index].prompt)
        self._await_next()

    def _begin(self, index: int, spans: tuple[Span, ...]) -> None:
        num_out = int(self._columns.num_out[index])
        num_in = sum(span.num_tokens for span in spans)
        now = self._events.now
        self._arrived[index], self._num_in[index], self._num_out[index] = now, num_in, num_out
        whole = (*spans, Span(ANSWERS + index, num_out))
        if index in self._following:
            self._spans[index] = whole
        if num_in + num_out > self._most or self._is_full:
            self._done(index)
            return
        self._num_unanswered += 1
        keys = SpanKeys(whole, num_in + num_out, self._prefixes)
        known = keys.first(num_in // PAGE_TOKENS) if self._shares else []
        choice = choose_instances(self._serving, self._index, known, num_in, self._routing, fetches=False)
        assert choice is not None, "nobody serves"
        member, attempt = choice.receiver, Attempt(index, 0)
        member.begin_prefill(attempt, choice.num_rows)
        member.sequences.add(attempt)
        self._index.add(member.name, known)
        self._instances[member.name].add(sequence_of(index, num_in, num_out, keys, now))

    @property
    def _is_full(self) -> bool:
        """Whether a request that comes now fails: a router counts what has no token, an engine what is queued."""
        if len(self._instances) > 1:
            return self._max_queue <= self._num_unanswered
        (only,) = self._instances.values()
        return self._max_queue <= only.num_waiting

    def _told(self, member: Member, sequence: Running, is_last: bool) -> None:
        index, now, attempt = sequence.seed, self._events.now, Attempt(sequence.seed, 0)
        if self._first[index] == math.inf:
            self._first[index] = now
            self._num_unanswered -= 1
            self._num_cached[index] = sequence.num_cached_tokens
            member.end_prefill(attempt)
        instance = self._instances[member.name]
        if is_last or member.load is None or now >= member.seen + LOAD_SECONDS:
            member.set_load(
                InstanceLoad(member.name, 0, 0, 0, 0, int((1 - instance.memory_used()) * _PARTS), _PARTS), now
            )
        if is_last:
            sequence.request.sequences.clear()  # a circle: nothing is collected while this runs
            self._last[index] = now
            member.forget(attempt)
            if self._shares:
                self._index.add(
                    member.name, sequence.keys.first((sequence.num_prompt + sequence.max_tokens - 1) // PAGE_TOKENS)
                )
            self._done(index)

    def _done(self, index: int) -> None:
        self._num_done += 1
        if self._num_done % max(1, len(self._arrived) // _NUM_TOLD) == 0:
            self._progress(self._num_done, len(self._arrived))
        before = self._spans.pop(index, ())
        for later in self._following.pop(index, ()):
            arrival = self._columns[later]
            self._events.after(arrival.pause, partial(self._begin, later, before + arrival.prompt))


def sequence_of(index: int, num_in: int, num_out: int, keys: SpanKeys, now: float) -> Running:
    """A request of one sequence. Its tokens are known by its keys alone."""
    tokens = [0] * num_in
    request = Request(str(index), None, tokens, PARAMS, now)
    sequence = Running(request, 0, tokens.copy(), num_out, seed=index)
    sequence.keys = keys
    request.sequences.append(sequence)
    return sequence
