"""The scheduler: which rows run next. No torch and no clock of its own; a simulator drives this very class.

    Policy.decide --rows--> StepBuilder.build --Step--> runner --Result--> Scheduler.commit --> Batch

`FastForward` decides and commits the same way, without steps and a runner.
"""

from __future__ import annotations

import itertools
import logging
import operator
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from quire.cache.ledger import PAGE_TOKENS
from quire.cache.manager import PINNED_SHARE, CacheManager
from quire.cache.retention.decisions import RetentionDecision
from quire.engine.admission import queue_full
from quire.engine.batch import Batch, SchedulerCounters
from quire.engine.outputs import Logprob
from quire.engine.policy import Policy
from quire.engine.request import Sequence, SequenceState
from quire.engine.retention_report import summary_of
from quire.engine.step import NO_TOKEN, Result, Slice, Step, Wait
from quire.engine.step_builder import StepBuilder

log = logging.getLogger("quire")

Logprobs = dict[int, Logprob] | None


class SampledToken(NamedTuple):
    """A token of this step, whether the sequence reaches its length with it, and its log-probabilities."""

    sequence: Sequence
    token_id: int
    finished_by_length: bool
    logprobs: Logprobs


class Scheduler:
    """Queues sequences, makes steps of them and takes the results.

    max_queue  most sequences that wait
    others     see `Policy` and `Batch`
    """

    def __init__(self, manager: CacheManager, token_budget: int, max_running: int, max_queue: int) -> None:
        self.manager = manager
        self.max_queue = max_queue
        self.batch = Batch(manager)
        self.policy = Policy(self.batch, token_budget, max_running)
        self.builder = StepBuilder(self.batch)
        self.waiting, self.running, self.calendar = self.batch.waiting, self.batch.running, self.batch.calendar
        self.finish, self.export, self.preempt = self.batch.finish, self.batch.export, self.batch.preempt
        self.check = self.batch.check

    @property
    def counters(self) -> SchedulerCounters:
        """Counts since start."""
        return self.batch.counters

    def add(self, sequences: SequenceOf[Sequence], *, is_counted: bool = False) -> None:
        """Queues the sequences of one request. Raises QueueFullError, queueing none, if they do not all fit.

        is_counted  whether they passed the limit before: a router counts what waits everywhere
        """
        if not (is_counted or self.has_room(len(sequences))):
            raise queue_full(len(self.waiting), self.max_queue)
        self.batch.queue(sequences)

    def has_room(self, count: int) -> bool:
        """Whether `count` more sequences may be queued."""
        return len(self.waiting) + count <= self.max_queue

    def next_step(self) -> Step | Wait | None:
        """The next step, with its cache slots taken; None if there is nothing to do. Preempts and admits."""
        rows = self.policy.decide()
        if self.calendar or rows:
            return self.builder.build(rows)
        for sequence in self.batch.active:
            if self.policy.can_run_behind_fetch(sequence):
                return self._step_behind_fetch(sequence)
        transfer = self.manager.fetching.transfer
        return None if transfer is None else Wait(transfer)

    def _step_behind_fetch(self, sequence: Sequence) -> Step | Wait | None:
        """The step of a sequence with chunks in transfer, when no other sequence has rows. Once the first layer has
        arrived, the rows after these chunks run layer by layer behind the transfer.
        """
        transfer = sequence.path.transfer
        assert transfer is not None
        rows = self.policy.decide_behind_fetch(sequence)
        if sequence.state is not SequenceState.RUNNING:
            return None
        if not rows:
            return Wait(transfer)
        step = self.builder.build(rows)
        step.ready = transfer.ready
        return step

    def sequence_of(self, index: int) -> Sequence:
        """The sequence of a slice of the last step."""
        return self.builder.sequences[index]

    def commit(self, step: Step, result: Result) -> list[SampledToken]:
        """Appends the sampled tokens, seals chunks, takes refused drafts back, and ends sequences that reached their
        length. Skips sequences that ended since the step was made.
        """
        sampled: list[SampledToken] = []
        active: list[tuple[Sequence, Slice, int, Logprobs, RetentionDecision | None]] = []
        quiet, tokens = self.calendar.members, iter(result.token_ids)
        logprobs = iter(result.logprobs) if result.logprobs else itertools.repeat(None)
        for index, sequence in enumerate(self.builder.sequences):
            if sequence in quiet:
                token_id = next(tokens)
                sequence.token_ids.append(token_id)
                sampled.append(SampledToken(sequence, token_id, False, next(logprobs)))
                continue
            piece = step.slices[index]
            token_id, beside = (next(tokens), next(logprobs)) if piece.samples else (NO_TOKEN, None)
            if sequence.state is SequenceState.RUNNING:
                active.append((sequence, piece, token_id, beside, result.decided.get(index)))
        self.pass_steps(1)
        self.builder.sampled = result.token_ids
        # In the order of admission, as FastForward does: if two sequences fill equal chunks in one step, the tree keeps
        # those of the one admitted first.
        active.sort(key=lambda each: each[0].admitted)
        for sequence, group in itertools.groupby(active, key=operator.itemgetter(0)):
            rows = list(group)
            accepted = [(token_id, beside) for _, _, token_id, beside, _ in rows if token_id != NO_TOKEN]
            first, decided = rows[0][1], rows[0][4]
            count = first.num_rows if len(rows) == 1 else len(accepted)
            sampled += self.commit_rows(sequence, first.start + count, count, accepted, decided)
        return sampled

    def pass_steps(self, count: int) -> None:
        """Counts steps that the calendar's sequences have taken."""
        self.counters.steps += count
        self.counters.decode_tokens += count * len(self.calendar)
        self.calendar.clock += count

    def commit_rows(
        self,
        sequence: Sequence,
        end: int,
        count: int,
        tokens: Iterable[tuple[int, Logprobs]],
        decided: RetentionDecision | None = None,
    ) -> list[SampledToken]:
        """Commits an active sequence: its tokens before `end` are computed, the last `count` of them in this step, and
        `tokens` are sampled.
        """
        generated, path = sequence.num_generated, sequence.path
        if path.transfer is not None and self.policy.is_fetching(sequence):
            self.batch.is_changed = True
            return []  # the rows read chunks that did not arrive
        self.counters.count_computed(sequence, end, count)
        if end < path.next_seal:
            path.num_tokens = end
        else:
            self.manager.paths.commit(sequence, end)
        sampled = []
        for token_id, logprobs in tokens:
            if not generated:
                self._pin(sequence)
            sequence.token_ids.append(token_id)
            generated += 1
            sampled.append(SampledToken(sequence, token_id, generated >= sequence.max_tokens, logprobs))
        if decided is not None:
            if log.isEnabledFor(logging.DEBUG):
                log.debug("request %s: %s", sequence.name, summary_of(decided))
            sequence.kept_fraction = decided.kept_fraction
            self.manager.retain(sequence, decided)
        if sampled and sampled[-1].finished_by_length:
            self.finish(sequence)
        else:
            self.batch.rest(sequence)
        return sampled

    def _pin(self, sequence: Sequence) -> None:
        """Pins the computed prompt of a sequence whose request asked for it."""
        request = sequence.request
        seconds = request.hints.cache_pin
        if not seconds or request.num_pinned_tokens is not None or request.hints.pin_tier != "arena":
            return
        num_tokens = len(request.prompt_ids)
        if self.manager.pins.add(sequence, num_tokens, seconds):
            request.num_pinned_tokens = num_tokens // PAGE_TOKENS * PAGE_TOKENS
        else:
            request.num_pinned_tokens = 0
            log.warning(
                "request %s: its prompt of %d tokens is not pinned: together with the existing pins it would exceed"
                " %.0f %% of the cache",
                request.request_id,
                num_tokens,
                100 * PINNED_SHARE,
            )
