"""The scheduler: which rows run next. No torch and no clock of its own; a simulator drives this very class.

waiting --admit--> running --commit--> finished
   ^                  |
   +---- preempt -----+          youngest first; its generated tokens are replayed after the next admission

A running sequence is either active, and every step examines it, or it rests in the calendar until its next event.
"""

from __future__ import annotations

import itertools
import logging
import operator
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.attention.rows import Profiled
from quire.cache.exports import Export
from quire.cache.ledger import PAGE_TOKENS
from quire.cache.manager import PINNED_SHARE, CacheManager
from quire.cache.retention.decisions import Decided
from quire.engine.calendar import Calendar, imagined_tokens
from quire.engine.explain import explain
from quire.engine.outputs import Logprob
from quire.engine.request import Sequence, State
from quire.engine.retention_report import summary_of
from quire.engine.step import NO_TOKEN, Begun, Proposal, Result, Slice, Step, Wait
from quire.errors import ConfigError, QueueFullError

log = logging.getLogger("quire")

_by_admission = operator.attrgetter("admitted")


def _shared(row: tuple[Sequence, Slice]) -> tuple[tuple[int, int], ...]:
    return row[1].shared


Logprobs = dict[int, Logprob] | None

NUM_PREFETCHED = 4
"""Sequences at the head of the queue for which chunks are fetched before their admission."""


class Sampled(NamedTuple):
    """A token of this step, whether the sequence reaches its length with it, and its log-probabilities."""

    sequence: Sequence
    token_id: int
    finished_by_length: bool
    logprobs: Logprobs


@dataclass(slots=True)
class Passed:
    """What the last call of `Scheduler.advance` computed.

    num_quiet  rows of sequences in the calendar, in the last step
    context    tokens that these attend to, in the last step
    prompts    first position and number of rows of each prompt's slice
    decodes    positions of rows of other decoding sequences, of all steps
    sampled    tokens of prompts and of these sequences, of all steps
    """

    num_quiet: int = 0
    context: int = 0
    prompts: list[tuple[int, int]] = field(default_factory=list)
    decodes: list[int] = field(default_factory=list)
    sampled: list[Sampled] = field(default_factory=list)


class _Rows(NamedTuple):
    """Rows of an active sequence in a step, and its guide's proposal for them."""

    sequence: Sequence
    start: int
    num_rows: int
    proposal: Proposal | None = None

    @property
    def end(self) -> int:
        return self.start + self.num_rows

    @property
    def samples(self) -> bool:
        return self.end == len(self.sequence.token_ids)


@dataclass
class Counters:
    """Counts since start. A token counts once, as prefilled, cached or decoded. Computed again after a preemption, it
    counts as replayed.
    """

    prefill_tokens_computed: int = 0
    prefill_tokens_cached: int = 0
    decode_tokens: int = 0
    replayed_tokens: int = 0
    preemptions: int = 0
    steps: int = 0


def check_budget(token_budget: int, max_running: int) -> None:
    """Raises ConfigError for a budget under which a full batch never admits a sequence."""
    if token_budget < max_running + PAGE_TOKENS:
        raise ConfigError(
            f"scheduler.token_budget is {token_budget}; with scheduler.max_running {max_running} it must be at least"
            f" {max_running + PAGE_TOKENS}, or a full batch leaves prefill no room for a chunk"
        )


@dataclass
class Scheduler:
    """First come, first served, under a budget of rows per step. Invariant: every sequence is in exactly one of
    waiting, running, neither (finished).

    token_budget  most rows of a step; decode rows come first, prefill slices take the rest in whole chunks
    max_running   most sequences in the batch
    max_queue     most sequences that wait
    prompt_rows   prompts are grouped, first come, first served, until they have so many rows together; one that has as
                  many left runs alone. None: prompts take the rows that a step has left
    """

    manager: CacheManager
    token_budget: int
    max_running: int
    max_queue: int
    prompt_rows: int | None = None
    waiting: deque[Sequence] = field(default_factory=deque)
    running: list[Sequence] = field(default_factory=list)
    counters: Counters = field(default_factory=Counters)
    calendar: Calendar = field(default_factory=Calendar)
    passed: Passed = field(default_factory=Passed)
    _active: dict[Sequence, None] = field(default_factory=dict)
    _queued: int = 0
    _admitted: int = 0
    _ended: list[int] = field(default_factory=list)
    _joined: list[Sequence] = field(default_factory=list)  # the calendar, since the last step was made
    # The last step: its sequences, slices, positions and sampled tokens. A step with the same rows reuses them.
    _sequences: list[Sequence] = field(default_factory=list)
    _indices: dict[Sequence, int] = field(default_factory=dict)
    _slices: list[Slice] = field(default_factory=list)
    _positions: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    _sampled: list[int] = field(default_factory=list)
    _is_changed: bool = True

    def __post_init__(self) -> None:
        check_budget(self.token_budget, self.max_running)

    def add(self, sequences: SequenceOf[Sequence], *, is_admitted: bool = False) -> None:
        """Queues the sequences of one request. Raises QueueFullError, queueing none, if they do not all fit.

        is_admitted  whether a router has queued them already, which counts what waits everywhere
        """
        if not (is_admitted or self.has_room(len(sequences))):
            raise QueueFullError(
                f"{len(self.waiting)} sequences wait and scheduler.max_queue is {self.max_queue}; try again later",
                retry_after=1.0,
            )
        for sequence in sequences:
            sequence.sequence_id = self._queued
            self._queued += 1
        self.waiting.extend(sequences)

    def has_room(self, count: int) -> bool:
        """Whether `count` more sequences may be queued."""
        return len(self.waiting) + count <= self.max_queue

    def next_step(self) -> Step | Wait | None:
        """The next step, with its cache slots taken; None if there is nothing to do. Preempts and admits."""
        rows = self._decide()
        if self.calendar or rows:
            return self._compose(rows)
        for sequence in self._active:
            if self._may_follow(sequence):
                return self._follow_fetch(sequence)
        transfer = self.manager.fetching.transfer
        return None if transfer is None else Wait(transfer)

    def _may_follow(self, sequence: Sequence) -> bool:
        """Whether rows of a sequence may run while its earlier chunks are still arriving. Not if column sums arrive
        with them: other requests will read these sums, and the rows would add to them.
        """
        is_plain = not len(sequence.path.sums) and not sequence.awaits_scores
        return is_plain and self.manager.fetching.may_follow(sequence.path)

    def _follow_fetch(self, sequence: Sequence) -> Step | Wait | None:
        """The step of a sequence with chunks in transfer, when no other sequence has rows. Once the first layer has
        arrived, the rows after these chunks run layer by layer behind the transfer.
        """
        path, rows = sequence.path, list[_Rows]()
        assert path.transfer is not None
        self.manager.fetching.assume(sequence)
        self._add_prompt(rows, sequence, self._left(0))
        if sequence.state is not State.RUNNING:  # it had no room, and begins again
            return None
        if not rows:
            return Wait(path.transfer)
        step = self._compose(rows)
        step.ready = path.transfer.ready
        return step

    def commit(self, step: Step, result: Result) -> list[Sampled]:
        """Appends the sampled tokens, seals chunks, takes refused drafts back, and ends sequences that reached their
        length. Skips sequences that ended since the step was made.
        """
        sampled: list[Sampled] = []
        active: list[tuple[Sequence, Slice, int, Logprobs, Decided | None]] = []
        quiet, tokens = self.calendar.members, iter(result.token_ids)
        logprobs = iter(result.logprobs) if result.logprobs else itertools.repeat(None)
        for index, sequence in enumerate(self._sequences):
            if sequence in quiet:
                token_id = next(tokens)
                sequence.token_ids.append(token_id)
                sampled.append(Sampled(sequence, token_id, False, next(logprobs)))
                continue
            piece = step.slices[index]
            token_id, beside = (next(tokens), next(logprobs)) if piece.samples else (NO_TOKEN, None)
            if sequence.state is State.RUNNING:
                active.append((sequence, piece, token_id, beside, result.decided.get(index)))
        self._pass_steps(1)
        self._sampled = result.token_ids
        # In the order of admission, as `advance` does: of two that fill equal chunks at once, the first one's stay.
        active.sort(key=lambda each: each[0].admitted)
        for sequence, group in itertools.groupby(active, key=operator.itemgetter(0)):
            rows = list(group)
            accepted = [(token_id, beside) for _, _, token_id, beside, _ in rows if token_id != NO_TOKEN]
            first, decided = rows[0][1], rows[0][4]
            count = first.num_rows if len(rows) == 1 else len(accepted)
            sampled += self._commit(sequence, first.start + count, count, accepted, decided)
        return sampled

    def advance(self, steps: int = 1, decide: Callable[[Sequence], Decided] | None = None) -> int:
        """Takes steps without a runner, with imagined tokens. Makes the same decisions as `next_step` and `commit`.

        Takes up to `steps` steps in which the whole batch decodes, and stops before an admission, a prompt's slice, an
        end or a preemption. If the next step has one of these, takes that step alone. Returns the number of steps; 0
        if there is nothing to do but wait.

        decide  answers for retention what it keeps of a prompt; needed only with retention
        """
        steps = self._advance(steps, decide)
        self._is_changed = True
        for sequence in self._joined:
            sequence.slice = None
        self._joined.clear()
        return steps

    @property
    def num_quiet(self) -> int:
        """Number of next steps in which nothing happens but that each sequence of the batch gets a token."""
        may_admit = self.waiting and len(self.running) < self.max_running
        if self._active or not self.calendar or (may_admit and not self.manager.refuses(self.waiting[0])):
            return 0
        return self.calendar.quiet_steps

    def _advance(self, steps: int, decide: Callable[[Sequence], Decided] | None) -> int:
        self.passed = Passed()
        num_running, done = len(self.running), 0
        while done < steps and len(self.running) == num_running:
            passed = self._skip(steps - done)
            if not passed:
                break
            done += passed
        if done:
            return done
        rows = self._decide()
        if not (self.calendar or rows):
            return 0
        self._pass_steps(1)
        for each in sorted(rows, key=lambda each: each.sequence.admitted):
            sequence, end, decided = each.sequence, each.end, None
            if self.manager.retention.last_rows(sequence, end):
                assert decide is not None, "nobody says what retention keeps"
                decided = decide(sequence)
            tokens = [(token_id, None) for token_id in imagined_tokens(sequence, end, int(each.samples))]
            if each.num_rows > 1 or each.start < sequence.num_prompt:
                self.passed.prompts.append((each.start, each.num_rows))
            else:
                self.passed.decodes.append(each.start)
            self.passed.sampled += self._commit(sequence, end, each.num_rows, tokens, decided)
        return 1

    def sequence_of(self, index: int) -> Sequence:
        """The sequence of a slice of the last step."""
        return self._sequences[index]

    @property
    def begun(self) -> set[int]:
        """Ids of the sequences that the runner remembers after the last step."""
        live = {each.sequence_id for each in (*self.running, *self.waiting) if each.is_begun}
        return live | {*self._ended}

    def finish(self, sequence: Sequence) -> None:
        """Ends a sequence in any state and frees its pages. Ending it twice does nothing."""
        if sequence.state is State.RUNNING:
            self._leave(sequence)
        elif sequence.state is State.WAITING:
            self.waiting.remove(sequence)
            self.manager.swapping.forget(sequence)
        if sequence.is_begun and sequence.state is not State.FINISHED:
            self._ended.append(sequence.sequence_id)
        sequence.state = State.FINISHED

    def export(self, sequence: Sequence) -> Export:
        """Ends a running sequence that has just sampled a token, and keeps its chunks for another engine."""
        self.calendar.leave(sequence)
        export = self.manager.exports.add(sequence)
        self._remove(sequence)
        self._ended.append(sequence.sequence_id)
        sequence.state = State.FINISHED
        return export

    def preempt(self, sequence: Sequence) -> None:
        """Preempts a running sequence: it loses its pages and waits, before all others, to be computed again. So do the
        sequences that wait for its log-probabilities, because they may hold the room that it needs.
        """
        if sequence.num_generated == 0:
            for other in sequence.request.sequences[::-1]:
                if other is not sequence and other.awaits_scores and other.state is State.RUNNING:
                    self._preempt(other)
        self._preempt(sequence)

    def check(self) -> None:
        """Proves the invariant, and the manager's. Settles the calendar's sequences first."""
        for sequence in self.calendar:
            self.calendar.settle(sequence)
        assert all(sequence.state is State.RUNNING for sequence in self.running), (
            "a sequence that does not run is in the batch"
        )
        assert all(sequence.state is State.WAITING for sequence in self.waiting), (
            "a sequence that does not wait is queued"
        )
        assert {*self._active, *self.calendar} == {*self.running} and not {*self._active} & {*self.calendar}, (
            "a running sequence is neither active nor in the calendar, or both"
        )
        self.manager.check()

    # ---- decisions -------------------------------------------------------------------------------------------------

    def _decide(self) -> list[_Rows]:
        """Admits, preempts and takes slots: all changes of a step except the computed tokens. Returns the rows of
        active sequences.
        """
        self._active.update(dict.fromkeys(self.calendar.due()))
        rows: list[_Rows] = []
        underway: set[bytes] = set()
        num_preempted, num_rows = self.counters.preemptions, 0
        prompts: list[Sequence] = []
        for sequence in sorted(self._active, key=_by_admission):
            if sequence.state is not State.RUNNING or sequence.awaits_scores or self._is_fetching(sequence):
                continue
            if not self._decodes(sequence):
                prompts.append(sequence)
                continue
            start = sequence.path.num_tokens
            count = min(self._slice_rows(sequence, self._left(num_rows)), 1)
            if count and self._make_room(sequence, start + 1):
                proposal, num_rows = None, num_rows + 1
                if sequence.guide is not None and start + 1 == len(sequence.token_ids):
                    # Drafts leave a row to every other sequence, and a chunk to prompts.
                    left = self._left(num_rows - 1) - len(self._active) - PAGE_TOKENS
                    proposal = self._proposed(sequence, self._most_drafts(sequence, left))
                    num_rows += len(proposal.drafts)
                rows.append(_Rows(sequence, start, 1, proposal))
        for sequence in prompts:
            if sequence.state is State.RUNNING and self._ready(sequence, underway):
                num_rows += self._add_prompt(rows, sequence, self._left(num_rows))
        # A preempted sequence would be admitted straight away into the room that its own pages left.
        while self.waiting and len(self.running) < self.max_running and self.counters.preemptions == num_preempted:
            sequence = self.waiting[0]
            if self._left(num_rows) < min(PAGE_TOKENS, sequence.num_pending):
                break
            if self.prompt_rows is not None and self._must_run_later(sequence):
                break
            if not self._admit(sequence):
                break
            is_ready = not sequence.awaits_scores and sequence.path.transfer is None
            if is_ready and self._ready(sequence, underway):
                num_rows += self._add_prompt(rows, sequence, self._left(num_rows))
        for sequence in itertools.islice(self.waiting, NUM_PREFETCHED):
            self._prefetch(sequence)
        if self.counters.preemptions != num_preempted:
            # A sequence may be preempted after its rows got slots.
            rows = [each for each in rows if each.sequence.state is State.RUNNING]
        return rows

    def _must_run_later(self, sequence: Sequence) -> bool:
        """Whether a prompt would make the group of prompts that are being computed larger than `prompt_rows`. What is
        cached of a prompt does not count.
        """
        assert self.prompt_rows is not None
        before = sum(each.num_pending for each in self._active if not self._decodes(each))
        if not before:
            return False
        found = sum(count for _, count in self.manager.tree.walk(sequence.keys)) if sequence.reads_cache else 0
        return before + max(1, sequence.num_pending - found * PAGE_TOKENS) > self.prompt_rows

    def _prefetch(self, sequence: Sequence) -> None:
        """Fetches for a sequence that is not admitted, once."""
        if not sequence.is_prefetched and sequence.swapped is None:
            sequence.is_prefetched = True
            self.manager.fetching.prefetch(sequence)

    def _is_fetching(self, sequence: Sequence) -> bool:
        """Whether chunks of a sequence are in transfer. Ends a transfer that is over: its tokens count as computed, or,
        if some did not arrive, the sequence starts again.
        """
        transfer, num_shared = sequence.path.transfer, sequence.path.num_shared
        if transfer is None:
            return False
        if not transfer.is_over:
            return True
        if not self.manager.fetching.end(sequence):
            log.debug("request %s: what was cached of it did not arrive: %s", sequence.name, transfer.error)
            self._restart(sequence)
            if not sequence.num_preemptions:
                sequence.num_cached_tokens = 0  # it is counted again
            return True
        self._count_found(sequence, sequence.path.num_tokens - num_shared * PAGE_TOKENS)
        return False

    def _left(self, num_rows: int) -> int:
        """Rows left in a step with `num_rows` rows of active sequences."""
        return self.token_budget - len(self.calendar) - num_rows

    def _decodes(self, sequence: Sequence) -> bool:
        """Whether its next row is a decode row: of a new token, or of a replayed one."""
        return sequence.num_pending == 1 or sequence.path.is_decided

    def _admit(self, sequence: Sequence) -> bool:
        """Admits the first waiting sequence if it fits."""
        if not self.manager.admit(sequence):
            return False
        self.waiting.popleft()
        self.running.append(sequence)
        self._active[sequence] = None
        self._admitted += 1
        sequence.admitted = self._admitted
        sequence.state = State.RUNNING
        self._count_found(sequence, sequence.path.num_tokens)
        if log.isEnabledFor(logging.DEBUG):
            log.debug(
                "request %s: %d of %d tokens found in the cache: %s",
                sequence.name,
                sequence.path.num_tokens,
                len(sequence.token_ids),
                explain(self.manager, sequence),
            )
        return True

    def _add_prompt(self, rows: list[_Rows], sequence: Sequence, budget: int) -> int:
        """Adds the next rows of a prompt, at most `budget`. Returns their number."""
        count = self._slice_rows(sequence, budget)
        if not count or not self._make_room(sequence, sequence.num_computed + count):
            return 0
        found = _Rows(sequence, sequence.num_computed, count)
        if sequence.guide is not None and found.samples:
            found = found._replace(proposal=self._proposed(sequence, 0))
        rows.append(found)
        return count

    def _most_drafts(self, sequence: Sequence, budget: int) -> int:
        """Most drafts after the next row of a sequence, under a budget."""
        path = sequence.path
        if sequence.leaves:
            return 0  # another engine goes on behind its next token
        if self.manager.retention.profiling(path, 0) is not None:
            return 0  # the attention of a refused row could not be taken out of the column sums
        # The row that fills a chunk is not a draft: the chunk is sealed with it.
        left = sequence.max_tokens - sequence.num_generated - 1
        return max(0, min(path.next_seal - path.num_tokens - 2, left, budget))

    def _proposed(self, sequence: Sequence, most: int) -> Proposal:
        """The guide's proposal: at most `most` drafts; a set of allowed tokens, or None, for each row."""
        assert sequence.guide is not None
        drafts, allowed = sequence.guide.propose(sequence.token_ids, most)
        assert len(drafts) <= most, f"{len(drafts)} drafts, and {most} fit"
        assert len(allowed) in (0, len(drafts) + 1), f"{len(allowed)} sets of tokens after {len(drafts)} drafts"
        return Proposal(drafts, allowed or [None] * (len(drafts) + 1))

    def _as_slices(self, rows: _Rows) -> list[Slice]:
        """Rows as slices: a slice for each draft."""
        sequence, start, count, proposal = rows
        first = self._row(sequence) if count == 1 else self._slice(sequence, start, count)
        if proposal is None:
            return [first]
        self._is_changed = True
        drafts = enumerate(proposal.drafts, 1)
        # What is wanted of the prompt's rows is not wanted of drafts.
        row = replace(first, scores=False, pools="")
        slices = [first, *(replace(row, start=start + place, draft=draft) for place, draft in drafts)]
        for piece, tokens in zip(slices, proposal.allowed, strict=True):
            piece.allowed = tokens
        return slices

    def _row(self, sequence: Sequence) -> Slice:
        """The next row of a sequence: the same object as last time while the sequence stays in the same chunks."""
        row, last = self._slice(sequence, sequence.path.num_tokens, 1), sequence.slice
        if last is not None and last.goes_on_as(row):
            last.start = row.start
            return last
        sequence.slice = row
        return row

    def _slice(self, sequence: Sequence, start: int, count: int) -> Slice:
        path, end = sequence.path, start + count
        last_rows = self.manager.retention.last_rows(sequence, end)
        profiling = self.manager.retention.profiling(path, last_rows)
        return Slice(
            start,
            count,
            path.chunks,
            filled=path.filled,
            profiled=None if profiling is None else Profiled(path.sums, *profiling),
            num_dropped=path.num_dropped,
            reads_all=end <= sequence.num_prompt,
            sequence_id=sequence.sequence_id,
            samples=end == len(sequence.token_ids),
            decides=last_rows > 0,
            scores=sequence.wants_prompt_logprobs,
            pools=sequence.pooling,
        )

    def _ready(self, sequence: Sequence, underway: set[bytes]) -> bool:
        """Extends a prompt over chunks cached since. False if another sequence computes its next chunk in this step:
        the prompt finds it in the next one.
        """
        found = self.manager.match(sequence)
        self._count_found(sequence, found)
        if found:
            log.debug("request %s: %d tokens more, just computed for others", sequence.name, found)
        if self.manager.retention.must_wait(sequence):
            return False
        chunk = self.manager.next_chunk(sequence)
        if chunk is None:
            return True
        if chunk in underway or chunk in self.manager.fetching.arriving:
            return False
        underway.add(chunk)
        return True

    def _slice_rows(self, sequence: Sequence, budget: int) -> int:
        """Rows of the sequence's next slice: all pending ones, or the whole chunks that fit the budget. The rows over
        which retention decides stay in one slice.
        """
        start, end = sequence.num_computed, self.manager.retention.slice_end(sequence)
        if end - start <= budget:
            return end - start
        end = min(end, self.manager.retention.undivided(sequence))
        return max(0, min(end, (start + budget) // PAGE_TOKENS * PAGE_TOKENS) - start)

    # ---- the step as data ------------------------------------------------------------------------------------------

    def _compose(self, work: list[_Rows]) -> Step:
        """The step of all rows, including the calendar's."""
        begun = [self._begin(each.sequence) for each in work if not each.sequence.is_begun]
        ended, self._ended = self._ended, []
        singles: list[tuple[Sequence, Slice]] = []
        tall: list[tuple[Sequence, Slice]] = []
        for each in work:
            (singles if each.num_rows == 1 else tall).extend((each.sequence, piece) for piece in self._as_slices(each))
        joined = [(sequence, self._row(sequence)) for sequence in self._joined if sequence in self.calendar]
        self._joined.clear()
        if not (self._is_changed or tall or len(self.calendar) + len(singles) != len(self._slices)):
            moved = self._moved(joined + singles)
            if moved is not None:
                self._positions = self._positions + 1
                for piece, start in zip(self._slices, self._positions.tolist(), strict=True):
                    piece.start = start
                return Step(self._slices, np.array(self._sampled, np.int64), self._positions, begun, ended, moved)
        rows = [(sequence, self._quiet_row(sequence)) for sequence in self.calendar] + singles
        # Sequences that share chunks become neighbours: attention reads a shared chunk once for all of them.
        for sequence, piece in rows:
            piece.shared = self.manager.tree.shared(sequence.path)
        rows.sort(key=_shared)
        rows += tall
        self._sequences, self._slices = [sequence for sequence, _ in rows], [piece for _, piece in rows]
        self._indices = {sequence: index for index, sequence in enumerate(self._sequences)}
        ids: list[int] = []
        positions: list[int] = []
        for sequence, piece in rows:
            start = piece.start
            if piece.draft != NO_TOKEN:
                ids.append(piece.draft)
                positions.append(start)
            elif piece.num_rows == 1:
                ids.append(sequence.token_ids[start])
                positions.append(start)
            else:
                ids.extend(sequence.token_ids[start : start + piece.num_rows])
                positions.extend(range(start, start + piece.num_rows))
        self._positions = np.array(positions, np.int64)
        # The next step may advance this one only if every row yields a token.
        self._is_changed = bool(tall) or not all(piece.samples and piece.draft == NO_TOKEN for _, piece in singles)
        return Step(self._slices, np.array(ids, np.int64), self._positions, begun, ended)

    def _moved(self, rows: list[tuple[Sequence, Slice]]) -> list[int] | None:
        """Replaces slices of the last step by new ones of the same sequences. Returns their indices; None if a sequence
        was not in the last step, or now shares other chunks.
        """
        found: dict[int, Slice] = {}
        for sequence, piece in rows:
            index = self._indices.get(sequence)
            if index is None or not piece.samples:
                return None
            if piece is not self._slices[index]:
                piece.shared, before = self.manager.tree.shared(sequence.path), self._slices[index].shared
                if [number for number, _ in piece.shared] != [number for number, _ in before]:
                    return None
                found[index] = piece
        if found:
            self._slices = [found.get(index, piece) for index, piece in enumerate(self._slices)]
        return list(found)

    def _quiet_row(self, sequence: Sequence) -> Slice:
        """The next row of a sequence of the calendar."""
        row = sequence.slice
        if row is None:
            self.calendar.settle(sequence)
            row = self._row(sequence)
        row.start = sequence.lead + self.calendar.clock
        return row

    def _begin(self, sequence: Sequence) -> Begun:
        sequence.is_begun = True
        request = sequence.request
        output_ids = sequence.token_ids[sequence.num_prompt :]
        return Begun(sequence.sequence_id, request.params, request.prompt_ids, sequence.seed, output_ids)

    # ---- results ---------------------------------------------------------------------------------------------------

    def _pass_steps(self, count: int) -> None:
        """Counts steps that the calendar's sequences have taken."""
        self.passed.num_quiet, self.passed.context = len(self.calendar), self.calendar.context
        self.counters.steps += count
        self.counters.decode_tokens += count * len(self.calendar)
        self.calendar.clock += count

    def _commit(
        self,
        sequence: Sequence,
        end: int,
        count: int,
        tokens: Iterable[tuple[int, Logprobs]],
        decided: Decided | None = None,
    ) -> list[Sampled]:
        """Commits an active sequence: its tokens before `end` are computed, the last `count` of them in this step, and
        `tokens` are sampled.
        """
        generated, path = sequence.num_generated, sequence.path
        if path.transfer is not None and self._is_fetching(sequence):
            self._is_changed = True
            return []  # the rows read chunks that did not arrive
        self._count(sequence, end, count)
        if end < path.next_seal:
            path.num_tokens = end
        else:
            self.manager.commit(sequence, end)
        sampled = []
        for token_id, logprobs in tokens:
            if not generated:
                self._pin(sequence)
            sequence.token_ids.append(token_id)
            generated += 1
            sampled.append(Sampled(sequence, token_id, generated >= sequence.max_tokens, logprobs))
        if decided is not None:
            if log.isEnabledFor(logging.DEBUG):
                log.debug("request %s: %s", sequence.name, summary_of(decided))
            sequence.kept_fraction = decided.kept_fraction
            self.manager.retain(sequence, decided)
        if sampled and sampled[-1].finished_by_length:
            self.finish(sequence)
        else:
            self._rest(sequence)
        return sampled

    def _rest(self, sequence: Sequence) -> None:
        """Moves an active sequence to the calendar if its next step only adds a token. If the next row begins a chunk,
        takes that chunk now. A packed path waits: its budget counts only chunks with tokens. So do a sequence with its
        first token, whose bytes are those of its prompt, and one that another engine goes on with.
        """
        path = sequence.path
        if not sequence.adds_a_token or sequence.guide is not None:
            return
        if path.free_until <= path.num_tokens:
            waits = path.retained is not None or sequence.num_generated == 1 or sequence.leaves
            if waits or not self.manager.extend(sequence, path.num_tokens + 1):
                return
        most = min(path.free_until, path.next_seal - 1, sequence.num_prompt + sequence.max_tokens - 2) - path.num_tokens
        if most > 0:
            self._joined.append(sequence)
            del self._active[sequence]
            self.calendar.join(sequence, most)

    def _skip(self, limit: int) -> int:
        """Takes decode steps of the whole batch: all steps without events at once, or one step with events. Returns
        their number; 0 if the next step is not a decode step of the whole batch.
        """
        if self.waiting and len(self.running) < self.max_running and not self.manager.refuses(self.waiting[0]):
            return 0
        if not self._active and self.calendar:
            count = min(limit, self.calendar.quiet_steps)
            if count:
                self._pass_steps(count)
                return count
        self._active.update(dict.fromkeys(self.calendar.due()))
        active = sorted(self._active, key=_by_admission)
        for sequence in active:
            if (
                not sequence.adds_a_token
                or sequence.path.transfer is not None
                or sequence.guide is not None
                or not self.manager.extend(sequence, sequence.num_computed + 1)
            ):
                return 0
        if not active:
            return 0
        self._pass_steps(1)
        for sequence in active:
            end = sequence.num_computed + 1
            tokens = [(token_id, None) for token_id in imagined_tokens(sequence, end, 1)]
            self.passed.decodes.append(end - 1)
            self.passed.sampled += self._commit(sequence, end, 1, tokens)
        return 1

    def _count(self, sequence: Sequence, end: int, count: int) -> None:
        new = end - sequence.high_water
        if new < count:
            new = max(0, new)
            self.counters.replayed_tokens += count - new
        sequence.high_water += new
        # All prompt tokens are computed before the first generated one.
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
                "request %s: its prompt of %d tokens is not pinned: with the pins that are there, over %.0f %% of the"
                " cache would be",
                request.request_id,
                num_tokens,
                100 * PINNED_SHARE,
            )

    def _make_room(self, sequence: Sequence, num_tokens: int) -> bool:
        """Extends the sequence. Preempts the youngest sequences until it fits; False if that is this one."""
        while not self.manager.extend(sequence, num_tokens):
            if self.manager.fetching.make_way():
                continue
            youngest = max(self.running, key=lambda running: running.sequence_id)
            self.preempt(youngest)
            if youngest is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.calendar.leave(sequence)
        self.manager.swapping.take_out(sequence)
        self._restart(sequence)
        sequence.num_preemptions += 1
        self.counters.preemptions += 1

    def _restart(self, sequence: Sequence) -> None:
        """Moves a running sequence to the head of the queue."""
        self._leave(sequence)
        sequence.state = State.WAITING
        self.waiting.appendleft(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """Takes a sequence out of the batch and frees its pages."""
        self.calendar.leave(sequence)
        self._remove(sequence)
        self.manager.release(sequence)

    def _remove(self, sequence: Sequence) -> None:
        self._active.pop(sequence, None)
        self.running.remove(sequence)
        sequence.slice, self._is_changed = None, True
