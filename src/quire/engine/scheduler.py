"""The scheduler: which rows run next. No torch and no clock of its own; the simulator drives this very class.

waiting --admit--> running --commit--> finished
   ^                  |
   +---- preempt -----+          youngest first; what it generated is replayed when it is admitted again
"""

from __future__ import annotations

import logging
import operator
from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from quire.cache.ledger import PAGE_TOKENS
from quire.cache.manager import PINNED_SHARE, CacheManager
from quire.cache.retention.decisions import Decided
from quire.engine.request import Sequence, State
from quire.errors import ConfigError, QueueFullError

log = logging.getLogger("quire")


@dataclass(slots=True, eq=False)
class Slice:
    """Rows of one sequence in a step: tokens [start, start + count). `samples` if its last row yields a token.

    last_rows  rows at its end over which retention is decided once they are computed; 0 if it is not yet, or was
    shared     see PrefixTree.shared
    """

    sequence: Sequence
    start: int
    count: int
    samples: bool
    last_rows: int = 0
    shared: tuple[tuple[int, int], ...] = ()


_by_shared = operator.attrgetter("shared")


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's work, decode rows first. Valid until commit."""

    slices: list[Slice]


_NOTHING_DECIDED: Mapping[Sequence, Decided] = MappingProxyType({})


class Sampled(NamedTuple):
    """A sequence that got a token in this step, and whether its length ends it."""

    sequence: Sequence
    token_id: int
    finished_by_length: bool


@dataclass
class Counters:
    """What happened since start. A token of a sequence counts once as prefilled, cached or decoded; computing it again
    after a preemption counts as replayed.
    """

    prefill_tokens_computed: int = 0
    prefill_tokens_cached: int = 0
    decode_tokens: int = 0
    replayed_tokens: int = 0
    preemptions: int = 0
    steps: int = 0


def check_budget(token_budget: int, max_running: int) -> None:
    """Raises ConfigError for a budget under which a full batch would never admit anyone."""
    if token_budget < max_running + PAGE_TOKENS:
        raise ConfigError(
            f"scheduler.token_budget is {token_budget}; with scheduler.max_running {max_running} it must be at least"
            f" {max_running + PAGE_TOKENS}, or a full batch leaves prefill no room for a chunk"
        )


@dataclass
class Scheduler:
    """First come, first served, under a budget of rows per step. Invariant: every sequence is in exactly one of
    waiting, running, neither (finished).

    token_budget  rows of a step at most; decode rows come first, prefill slices take what is left, in whole chunks
    max_running   sequences in the batch at most
    max_queue     sequences waiting at most
    """

    manager: CacheManager
    token_budget: int
    max_running: int
    max_queue: int
    waiting: deque[Sequence] = field(default_factory=deque)
    running: list[Sequence] = field(default_factory=list)
    counters: Counters = field(default_factory=Counters)
    _next_order: int = 0

    def __post_init__(self) -> None:
        check_budget(self.token_budget, self.max_running)

    def add(self, sequences: SequenceOf[Sequence]) -> None:
        """Queues the sequences of one request. Raises QueueFullError, queueing none, if they do not all fit."""
        if not self.has_room(len(sequences)):
            raise QueueFullError(
                f"{len(self.waiting)} sequences wait and scheduler.max_queue is {self.max_queue}; try again later",
                retry_after=1.0,
            )
        for sequence in sequences:
            sequence.order = self._next_order
            self._next_order += 1
        self.waiting.extend(sequences)

    def has_room(self, count: int) -> bool:
        """Whether so many more sequences may be queued."""
        return len(self.waiting) + count <= self.max_queue

    def next_batch(self) -> Batch | None:
        """The rows of the next step, with their cache slots taken; None if there is nothing to do. May preempt; admits
        what fits.
        """
        slices: list[Slice] = []
        underway: set[bytes] = set()
        budget = self.token_budget
        num_preempted = self.counters.preemptions
        retains = self.manager.retainer is not None
        prefilling: list[Sequence] = []
        for sequence in list(self.running):
            path = sequence.path
            start, count = path.num_tokens, 1
            if sequence.state is not State.RUNNING or sequence.awaits_scores:
                continue
            if path.is_decided or (retains and len(sequence.token_ids) == start + 1):
                count = self._slice_rows(sequence, budget)
            elif len(sequence.token_ids) != start + 1:
                prefilling.append(sequence)
                continue
            # Most rows go where there is room already.
            if count and (start + count <= path.free_until or self._make_room(sequence, start + count)):
                last_rows = self.manager.last_rows(sequence, start + count) if retains else 0
                slices.append(Slice(sequence, start, count, start + count == len(sequence.token_ids), last_rows))
                budget -= count
        for sequence in prefilling:
            if sequence.state is not State.RUNNING or not self._ready(sequence, underway):
                continue
            count = self._slice_rows(sequence, budget)
            if count and self._make_room(sequence, sequence.num_computed + count):
                slices.append(self._slice(sequence, count))
                budget -= count
        # A preempted sequence would be admitted straight away into the room that its own pages left.
        while self.waiting and len(self.running) < self.max_running and self.counters.preemptions == num_preempted:
            sequence = self.waiting[0]
            if budget < min(PAGE_TOKENS, sequence.num_pending):
                break
            admission = self.manager.admit(sequence)
            if admission is None:
                break
            self.waiting.popleft()
            self.running.append(sequence)
            sequence.state = State.RUNNING
            self._count_found(sequence, admission.cached_tokens)
            if log.isEnabledFor(logging.DEBUG):
                log.debug(
                    "request %s: %d of %d tokens found in the cache: %s",
                    sequence.name,
                    admission.cached_tokens,
                    len(sequence.token_ids),
                    self.manager.explain(sequence),
                )
            if sequence.awaits_scores or not self._ready(sequence, underway):
                continue
            count = self._slice_rows(sequence, budget)
            if count and self._make_room(sequence, sequence.num_computed + count):
                slices.append(self._slice(sequence, count))
                budget -= count
        # A sequence may have been preempted after its slice was made: its pages are gone.
        if self.counters.preemptions != num_preempted:
            slices = [piece for piece in slices if piece.sequence.state is State.RUNNING]
        decoding = [piece for piece in slices if piece.count == 1]
        if self.manager.tree is not None:
            # Whoever shares stands side by side, so that attention reads what they share once for all of them.
            for piece in slices:
                piece.shared = self.manager.shared(piece.sequence)
            decoding.sort(key=_by_shared)
        slices = decoding + [piece for piece in slices if piece.count > 1]
        return Batch(slices) if slices else None

    def commit(
        self, batch: Batch, token_ids: SequenceOf[int], decided: Mapping[Sequence, Decided] = _NOTHING_DECIDED
    ) -> list[Sampled]:
        """Takes the tokens of the slices that sample, in order; seals chunks; ends what reached its length. Aborted
        sequences are passed over.

        decided  what sequences whose prompts are computed now keep of them
        """
        self.counters.steps += 1
        sampled: list[Sampled] = []
        tokens, decoded = iter(token_ids), 0
        for piece in batch.slices:
            token_id = next(tokens) if piece.samples else None
            sequence = piece.sequence
            if sequence.state is not State.RUNNING:
                continue
            end, path = piece.start + piece.count, sequence.path
            generated = len(sequence.token_ids) - sequence.num_prompt
            if generated and piece.count == 1 and end > sequence.high_water:
                sequence.high_water, decoded = end, decoded + 1
            else:
                self._count(sequence, end, piece.count)
            if end < path.next_seal:
                path.num_tokens = end
            else:
                self.manager.commit(sequence, end)
            if token_id is not None and not generated:
                self._pin(sequence)
            if decided and sequence in decided:
                sequence.kept_fraction = decided[sequence].kept_fraction
                self.manager.retain(sequence, decided[sequence])
            if token_id is not None:
                sequence.token_ids.append(token_id)
                ended = generated + 1 >= sequence.max_tokens
                sampled.append(Sampled(sequence, token_id, ended))
                if ended:
                    self.finish(sequence)
        self.counters.decode_tokens += decoded
        return sampled

    def finish(self, sequence: Sequence) -> None:
        """Ends a sequence wherever it stands and frees what it holds; ending it twice does nothing."""
        if sequence.state is State.RUNNING:
            self.running.remove(sequence)
            self.manager.release(sequence)
        elif sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        sequence.state = State.FINISHED

    def eventless_steps(self) -> int:
        """For how many steps from now the batch stays as it is: nothing is admitted, ends, prefills or needs a new
        chunk.
        """
        if not self.running or any(sequence.num_pending != 1 for sequence in self.running):
            return 0
        if self.waiting and len(self.running) < self.max_running:
            return 0
        return min(
            min(
                sequence.max_tokens - sequence.num_generated - 1,
                max(0, sequence.path.free_until - sequence.num_computed),
            )
            for sequence in self.running
        )

    def advance(self, steps: int) -> None:
        """Commits `steps` decode steps of the whole batch at once, with token 0 as every token: what the simulator
        skips through.

        Raises ValueError if an event lies within them (see `eventless_steps`).
        """
        if steps > self.eventless_steps():
            raise ValueError(f"{steps} steps hold an event: only {self.eventless_steps()} are free of one")
        self.counters.steps += steps
        self.counters.decode_tokens += steps * len(self.running)
        # In the order of a batch: of two that fill equal chunks at once, the first one's stay.
        for sequence in sorted(self.running, key=self.manager.shared):
            sequence.token_ids.extend([0] * steps)
            self.manager.commit(sequence, sequence.num_computed + steps)
            sequence.high_water = sequence.num_computed

    def check(self) -> None:
        """Proves the invariant, and the manager's."""
        assert all(sequence.state is State.RUNNING for sequence in self.running), (
            "a sequence that does not run is in the batch"
        )
        assert all(sequence.state is State.WAITING for sequence in self.waiting), (
            "a sequence that does not wait is queued"
        )
        self.manager.check()

    def _ready(self, sequence: Sequence, underway: set[bytes]) -> bool:
        """Takes what the cache has by now of a prompt; False if its next chunk is being computed in this very step:
        it will be there for the next.
        """
        found = self.manager.match_again(sequence)
        self._count_found(sequence, found)
        if found:
            log.debug("request %s: %d tokens more, just computed for others", sequence.name, found)
        if self.manager.is_coming(sequence):
            return False
        chunk = self.manager.next_chunk(sequence)
        if chunk is None:
            return True
        if chunk in underway:
            return False
        underway.add(chunk)
        return True

    def _slice_rows(self, sequence: Sequence, budget: int) -> int:
        """Rows of the sequence's next slice: all that is pending, or as many whole chunks as the budget allows, and
        together those that retention is decided over.
        """
        start, end = sequence.num_computed, self.manager.slice_end(sequence)
        if end - start <= budget:
            return end - start
        end = min(end, self.manager.undivided(sequence))
        return max(0, min(end, (start + budget) // PAGE_TOKENS * PAGE_TOKENS) - start)

    def _slice(self, sequence: Sequence, count: int) -> Slice:
        end = sequence.num_computed + count
        last_rows = self.manager.last_rows(sequence, end)
        return Slice(sequence, sequence.num_computed, count, count == sequence.num_pending, last_rows)

    def _count(self, sequence: Sequence, end: int, count: int) -> None:
        new = end - sequence.high_water
        if new < count:
            new = max(0, new)
            self.counters.replayed_tokens += count - new
        sequence.high_water += new
        # Generated tokens are first computed one at a time, prompt tokens before any of them.
        if len(sequence.token_ids) > sequence.num_prompt:
            self.counters.decode_tokens += new
        else:
            self.counters.prefill_tokens_computed += new

    def _count_found(self, sequence: Sequence, found: int) -> None:
        new = max(0, sequence.num_computed - sequence.high_water)
        sequence.high_water += new
        self.counters.prefill_tokens_cached += new
        if not sequence.num_preemptions:
            sequence.num_cached_tokens += found

    def _pin(self, sequence: Sequence) -> None:
        """Keeps the prompt of a sequence that asked for it, now that it is computed."""
        request = sequence.request
        seconds = request.hints.cache_pin
        if not seconds or request.num_pinned_tokens is not None:
            return
        num_tokens = len(request.prompt_ids)
        if self.manager.pin(sequence, num_tokens, seconds):
            request.num_pinned_tokens = num_tokens // PAGE_TOKENS * PAGE_TOKENS
        else:
            request.num_pinned_tokens = 0
            log.warning(
                "request %s: its prompt of %d tokens is not pinned: with the pins that are there, over %.0f %% of the"
                " cache would be",
                request.request_id,
                num_tokens,
                100 * PINNED_SHARE,
            )

    def _make_room(self, sequence: Sequence, num_tokens: int) -> bool:
        """Extends the sequence, preempting the youngest others until it fits; False if it was itself the youngest."""
        while not self.manager.extend(sequence, num_tokens):
            youngest = max(self.running, key=lambda running: running.order)
            self.preempt(youngest)
            if youngest is sequence:
                return False
        return True

    def preempt(self, sequence: Sequence) -> None:
        """Takes a running sequence's pages; it waits, before all others, to be computed again. So do those that wait
        for its log-probabilities: what they hold may be what it lacks.
        """
        if sequence.num_generated == 0:
            for other in sequence.request.sequences[::-1]:
                if other is not sequence and other.awaits_scores and other.state is State.RUNNING:
                    self._preempt(other)
        self._preempt(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.manager.release(sequence)
        sequence.state = State.WAITING
        sequence.num_preemptions += 1
        self.waiting.appendleft(sequence)
        self.counters.preemptions += 1
