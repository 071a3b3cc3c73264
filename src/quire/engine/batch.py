"""The sequences of a scheduler by state, and every change of state. No torch and no clock of its own.

waiting --admit--> running --finish--> finished
   ^                  |
   +---- preempt -----+          its generated tokens are replayed after the next admission

A running sequence is either active, and every step examines it, or it rests in the calendar until its next event.
"""

from __future__ import annotations

import logging
import operator
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from quire.cache.exports import ExportedSequence
from quire.cache.manager import CacheManager
from quire.engine.calendar import Calendar
from quire.engine.explain import explain
from quire.engine.request import Sequence, SequenceState

log = logging.getLogger("quire")

_by_admission = operator.attrgetter("admitted")


@dataclass
class SchedulerCounters:
    """Counts since start. A token counts once, as prefilled, cached or decoded. Computed again after a preemption, it
    counts as replayed.
    """

    prefill_tokens_computed: int = 0
    prefill_tokens_cached: int = 0
    decode_tokens: int = 0
    replayed_tokens: int = 0
    preemptions: int = 0
    steps: int = 0

    def count_computed(self, sequence: Sequence, end: int, count: int) -> None:
        """Counts the last `count` tokens before position `end`, which a step has computed."""
        new = end - sequence.high_water
        if new < count:
            new = max(0, new)
            self.replayed_tokens += count - new
        sequence.high_water += new
        # All prompt tokens are computed before the first generated one.
        if len(sequence.token_ids) > sequence.num_prompt:
            self.decode_tokens += new
        else:
            self.prefill_tokens_computed += new

    def count_cached(self, sequence: Sequence, num_tokens: int) -> None:
        """Counts tokens that were taken from the cache."""
        new = max(0, sequence.num_computed - sequence.high_water)
        sequence.high_water += new
        self.prefill_tokens_cached += new
        if not sequence.num_preemptions:
            sequence.num_cached_tokens += num_tokens


@dataclass
class Batch:
    """Invariant: every sequence is in exactly one of waiting, running, neither (finished); every running one is either
    active or in the calendar.

    waiting     first come, first served; preempted ones are put before all others
    active      running sequences that the next step examines
    joined      sequences that have joined the calendar since the last step was made
    is_changed  whether the next step differs from the last one in more than the position of each row (one token later)
    """

    manager: CacheManager
    counters: SchedulerCounters = field(default_factory=SchedulerCounters)
    waiting: deque[Sequence] = field(default_factory=deque)
    running: list[Sequence] = field(default_factory=list)
    active: dict[Sequence, None] = field(default_factory=dict)
    calendar: Calendar = field(default_factory=Calendar)
    joined: list[Sequence] = field(default_factory=list)
    is_changed: bool = True
    _num_queued: int = 0
    _num_admitted: int = 0
    _ended: list[int] = field(default_factory=list)

    def queue(self, sequences: Iterable[Sequence]) -> None:
        """Adds sequences to the end of the queue."""
        for sequence in sequences:
            sequence.sequence_id = self._num_queued
            self._num_queued += 1
            self.waiting.append(sequence)

    def wake(self) -> list[Sequence]:
        """Activates the calendar's sequences with an event in the next step. Returns all active sequences, in the order
        of admission.
        """
        self.active.update(dict.fromkeys(self.calendar.due()))
        return sorted(self.active, key=_by_admission)

    def admit(self, sequence: Sequence) -> bool:
        """Admits the first waiting sequence if it fits."""
        if not self.manager.admit(sequence):
            return False
        self.waiting.popleft()
        self.running.append(sequence)
        self.active[sequence] = None
        self._num_admitted += 1
        sequence.admitted = self._num_admitted
        sequence.state = SequenceState.RUNNING
        self.counters.count_cached(sequence, sequence.path.num_tokens)
        if log.isEnabledFor(logging.DEBUG):
            log.debug(
                "request %s: %d of %d tokens found in the cache: %s",
                sequence.name,
                sequence.path.num_tokens,
                len(sequence.token_ids),
                explain(self.manager, sequence),
            )
        return True

    def make_room(self, sequence: Sequence, num_tokens: int) -> bool:
        """Extends the sequence, preempting the youngest sequences until it fits. False if it was preempted itself."""
        while not self.manager.paths.extend(sequence, num_tokens):
            if self.manager.fetching.cancel_latest_prefetch():
                continue
            youngest = max(self.running, key=lambda running: running.sequence_id)
            self.preempt(youngest)
            if youngest is sequence:
                return False
        return True

    def rest(self, sequence: Sequence) -> None:
        """Moves an active sequence to the calendar if its next step only adds a token. If the next row begins a chunk,
        takes that chunk now.

        Three kinds of sequences take a new chunk only in their own step: one with a packed path, because its budget
        counts only chunks with tokens; one with its first token, whose bytes must still be those of its prompt; and one
        that another engine will continue.
        """
        path, reservation = sequence.path, sequence.path.reservation
        if not sequence.is_decoding or sequence.guide is not None:
            return
        if reservation.free_until <= path.num_tokens:
            waits = path.retention.retained is not None or sequence.num_generated == 1 or sequence.will_hand_over
            if waits or not self.manager.paths.extend(sequence, path.num_tokens + 1):
                return
        last = min(reservation.free_until, path.next_seal - 1, sequence.num_prompt + sequence.max_tokens - 2)
        most = last - path.num_tokens
        if most > 0:
            self.joined.append(sequence)
            del self.active[sequence]
            self.calendar.join(sequence, most)

    def preempt(self, sequence: Sequence) -> None:
        """Preempts a running sequence: it loses its pages and moves to the head of the queue, to be computed again.
        Also preempts the sequences that wait for its log-probabilities, because they may hold the room it needs.
        """
        if sequence.num_generated == 0:
            for other in sequence.request.sequences[::-1]:
                if other is not sequence and other.waits_for_prompt_logprobs and other.state is SequenceState.RUNNING:
                    self._preempt(other)
        self._preempt(sequence)

    def restart(self, sequence: Sequence) -> None:
        """Moves a running sequence to the head of the queue. It loses its pages."""
        self._release(sequence)
        sequence.state = SequenceState.WAITING
        self.waiting.appendleft(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Ends a sequence in any state and frees its pages. Ending it twice does nothing."""
        if sequence.state is SequenceState.RUNNING:
            self._release(sequence)
        elif sequence.state is SequenceState.WAITING:
            self.waiting.remove(sequence)
            self.manager.swapping.forget(sequence)
        if sequence.is_begun and sequence.state is not SequenceState.FINISHED:
            self._ended.append(sequence.sequence_id)
        sequence.state = SequenceState.FINISHED

    def export(self, sequence: Sequence) -> ExportedSequence:
        """Ends a running sequence that has just sampled a token, and keeps its chunks for another engine."""
        self.calendar.leave(sequence)
        export = self.manager.export(sequence)
        self._remove(sequence)
        self._ended.append(sequence.sequence_id)
        sequence.state = SequenceState.FINISHED
        return export

    def take_ended(self) -> list[int]:
        """Ids of the sequences that have ended since the last call, and that the runner remembers."""
        ended, self._ended = self._ended, []
        return ended

    @property
    def begun(self) -> set[int]:
        """Ids of the sequences that the runner remembers after the last step."""
        live = {each.sequence_id for each in (*self.running, *self.waiting) if each.is_begun}
        return live | {*self._ended}

    def check(self) -> None:
        """Proves the invariant, and the manager's. Settles the calendar's sequences first."""
        for sequence in self.calendar:
            self.calendar.settle(sequence)
        assert all(sequence.state is SequenceState.RUNNING for sequence in self.running), (
            "a sequence that does not run is in the batch"
        )
        assert all(sequence.state is SequenceState.WAITING for sequence in self.waiting), (
            "a sequence that does not wait is queued"
        )
        assert {*self.active, *self.calendar} == {*self.running} and not {*self.active} & {*self.calendar}, (
            "a running sequence is neither active nor in the calendar, or both"
        )
        self.manager.check()

    def _preempt(self, sequence: Sequence) -> None:
        self.calendar.leave(sequence)
        self.manager.swapping.swap_out(sequence)
        self.restart(sequence)
        sequence.num_preemptions += 1
        self.counters.preemptions += 1

    def _release(self, sequence: Sequence) -> None:
        """Removes a running sequence and frees its pages."""
        self.calendar.leave(sequence)
        self._remove(sequence)
        self.manager.release(sequence)

    def _remove(self, sequence: Sequence) -> None:
        self.active.pop(sequence, None)
        self.running.remove(sequence)
        sequence.slice, self.is_changed = None, True
