"""The scheduling policy: which rows run in the next step. First come, first served, under a budget of rows.

Decode rows come first. Prompts take the rest, in whole chunks, and then waiting sequences are admitted. This is
continuous batching with chunked prefill, with one difference: a prompt waits for a step if another sequence is
computing its next chunk, and then finds that chunk in the cache.
"""

from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass
from typing import NamedTuple

from quire.cache.ledger import PAGE_TOKENS
from quire.engine.batch import Batch
from quire.engine.request import Sequence, SequenceState
from quire.errors import ConfigError
from quire.structured.guide import GuideProposal

log = logging.getLogger("quire")

NUM_PREFETCHED = 4
"""Sequences at the head of the queue for which chunks are fetched before their admission."""


class Rows(NamedTuple):
    """Rows of an active sequence in a step, and its guide's proposal for them."""

    sequence: Sequence
    start: int
    num_rows: int
    proposal: GuideProposal | None = None

    @property
    def end(self) -> int:
        """Position after the last row."""
        return self.start + self.num_rows

    @property
    def samples(self) -> bool:
        """Whether the last row yields a token."""
        return self.end == len(self.sequence.token_ids)


def check_budget(token_budget: int, max_running: int) -> None:
    """Raises ConfigError for a budget under which a full batch never admits a sequence."""
    if token_budget < max_running + PAGE_TOKENS:
        raise ConfigError(
            f"scheduler.token_budget is {token_budget}; with scheduler.max_running {max_running} it must be at least"
            f" {max_running + PAGE_TOKENS}, or a full batch leaves prefill no room for a chunk"
        )


@dataclass
class Policy:
    """Decides steps of a batch.

    token_budget  most rows of a step
    max_running   most sequences in the batch
    prompt_rows   most rows of a group of prompts, which is filled first come, first served; a prompt with at least as
                  many rows left runs alone. None: prompts take the rows that a step has left
    """

    batch: Batch
    token_budget: int
    max_running: int
    prompt_rows: int | None = None

    def __post_init__(self) -> None:
        check_budget(self.token_budget, self.max_running)
        self._manager = self.batch.manager

    def decide(self) -> list[Rows]:
        """Admits, preempts and takes slots: all changes of a step except the computed tokens. Returns the rows of
        active sequences.
        """
        batch = self.batch
        rows: list[Rows] = []
        underway: set[bytes] = set()
        num_preempted = batch.counters.preemptions
        prompts, num_rows = self._decide_decodes(rows, batch.wake())
        for sequence in prompts:
            if sequence.state is SequenceState.RUNNING and self._is_ready(sequence, underway):
                num_rows += self._add_prompt(rows, sequence, self._left(num_rows))
        # A preempted sequence would be admitted straight away into the room that its own pages left.
        while self.may_admit and batch.counters.preemptions == num_preempted:
            sequence = batch.waiting[0]
            if self._left(num_rows) < min(PAGE_TOKENS, sequence.num_pending):
                break
            if self.prompt_rows is not None and self._must_run_later(sequence, self.prompt_rows):
                break
            if not batch.admit(sequence):
                break
            is_ready = not sequence.waits_for_prompt_logprobs and sequence.path.transfer is None
            if is_ready and self._is_ready(sequence, underway):
                num_rows += self._add_prompt(rows, sequence, self._left(num_rows))
        for sequence in itertools.islice(batch.waiting, NUM_PREFETCHED):
            self._prefetch(sequence)
        if batch.counters.preemptions != num_preempted:
            # A sequence may be preempted after its rows got slots.
            rows = [each for each in rows if each.sequence.state is SequenceState.RUNNING]
        return rows

    def decide_behind_fetch(self, sequence: Sequence) -> list[Rows]:
        """The rows of a sequence whose chunks are in transfer, as if they had arrived. If there is no room, the
        sequence is preempted: its state is WAITING afterwards.
        """
        rows: list[Rows] = []
        self._manager.fetching.assume_arrived(sequence)
        self._add_prompt(rows, sequence, self._left(0))
        return rows

    def can_run_behind_fetch(self, sequence: Sequence) -> bool:
        """Whether rows of a sequence may run while its earlier chunks are still arriving. Not if column sums arrive
        with them: other requests will read these sums, and the rows would add to them.
        """
        is_plain = not len(sequence.path.retention.sums) and not sequence.waits_for_prompt_logprobs
        return is_plain and self._manager.fetching.can_overlap(sequence.path)

    @property
    def may_admit(self) -> bool:
        """Whether the batch has a place for a waiting sequence."""
        return bool(self.batch.waiting) and len(self.batch.running) < self.max_running

    def is_fetching(self, sequence: Sequence) -> bool:
        """Whether chunks of a sequence are in transfer. Ends a transfer that is over: its tokens count as computed, or,
        if some did not arrive, the sequence starts again.
        """
        transfer, num_shared = sequence.path.transfer, sequence.path.num_shared
        if transfer is None:
            return False
        if not transfer.is_over:
            return True
        if not self._manager.end_fetch(sequence):
            log.debug("request %s: its cached chunks did not arrive: %s", sequence.name, transfer.error)
            self.batch.restart(sequence)
            if not sequence.num_preemptions:
                sequence.num_cached_tokens = 0  # it is counted again
            return True
        self.batch.counters.count_cached(sequence, sequence.path.num_tokens - num_shared * PAGE_TOKENS)
        return False

    def _decide_decodes(self, rows: list[Rows], sequences: list[Sequence]) -> tuple[list[Sequence], int]:
        """Adds the rows of decoding sequences. Returns the sequences with prompts to compute, and the number
        of rows.
        """
        prompts: list[Sequence] = []
        num_rows = 0
        for sequence in sequences:
            if (
                sequence.state is not SequenceState.RUNNING
                or sequence.waits_for_prompt_logprobs
                or self.is_fetching(sequence)
            ):
                continue
            if not _decodes(sequence):
                prompts.append(sequence)
                continue
            start = sequence.path.num_tokens
            count = min(self._slice_rows(sequence, self._left(num_rows)), 1)
            if count and self.batch.make_room(sequence, start + 1):
                proposal, num_rows = None, num_rows + 1
                if sequence.guide is not None and start + 1 == len(sequence.token_ids):
                    # Drafts leave a row to every other sequence, and a chunk to prompts.
                    left = self._left(num_rows - 1) - len(self.batch.active) - PAGE_TOKENS
                    proposal = _proposed(sequence, self._most_drafts(sequence, left))
                    num_rows += len(proposal.drafts)
                rows.append(Rows(sequence, start, 1, proposal))
        return prompts, num_rows

    def _add_prompt(self, rows: list[Rows], sequence: Sequence, budget: int) -> int:
        """Adds the next rows of a prompt, at most `budget`. Returns their number."""
        count = self._slice_rows(sequence, budget)
        if not count or not self.batch.make_room(sequence, sequence.num_computed + count):
            return 0
        found = Rows(sequence, sequence.num_computed, count)
        if sequence.guide is not None and found.samples:
            found = found._replace(proposal=_proposed(sequence, 0))
        rows.append(found)
        return count

    def _left(self, num_rows: int) -> int:
        """Rows left in a step with `num_rows` rows of active sequences."""
        return self.token_budget - len(self.batch.calendar) - num_rows

    def _must_run_later(self, sequence: Sequence, prompt_rows: int) -> bool:
        """Whether a prompt would make the group of prompts that are being computed larger than `prompt_rows`. Cached
        tokens of a prompt do not count.
        """
        before = sum(each.num_pending for each in self.batch.active if not _decodes(each))
        if not before:
            return False
        found = sum(count for _, count in self._manager.tree.walk(sequence.keys)) if sequence.reads_cache else 0
        return before + max(1, sequence.num_pending - found * PAGE_TOKENS) > prompt_rows

    def _prefetch(self, sequence: Sequence) -> None:
        """Starts to fetch the cached chunks of a sequence before its admission, once."""
        if not sequence.is_prefetched and sequence.swapped is None:
            sequence.is_prefetched = True
            self._manager.prefetch(sequence)

    def _is_ready(self, sequence: Sequence, underway: set[bytes]) -> bool:
        """Extends a prompt over newly cached chunks. False if another sequence computes the prompt's next chunk in this
        step: it waits, and finds the chunk in the cache in the next step.
        """
        found = self._manager.paths.match(sequence)
        self.batch.counters.count_cached(sequence, found)
        if found:
            log.debug("request %s: %d tokens more, just computed for others", sequence.name, found)
        if self._manager.retention.must_wait(sequence):
            return False
        chunk = self._manager.next_chunk(sequence)
        if chunk is None:
            return True
        if chunk in underway or chunk in self._manager.fetching.arriving:
            return False
        underway.add(chunk)
        return True

    def _slice_rows(self, sequence: Sequence, budget: int) -> int:
        """Rows of the sequence's next slice: all pending ones, or the whole chunks that fit the budget. The rows over
        which retention decides stay in one slice.
        """
        start, (end, undivided) = sequence.num_computed, self._manager.retention.slice_limits(sequence)
        if end - start <= budget:
            return end - start
        end = min(end, undivided)
        return max(0, min(end, (start + budget) // PAGE_TOKENS * PAGE_TOKENS) - start)

    def _most_drafts(self, sequence: Sequence, budget: int) -> int:
        """Most drafts after the next row of a sequence, under a budget."""
        path = sequence.path
        if sequence.will_hand_over:
            return 0  # another engine continues it after its next token
        if self._manager.retention.profiling(sequence, path.num_tokens + 1) is not None:
            return 0  # the attention of a refused row could not be taken out of the column sums
        # The row that fills a chunk is not a draft: the chunk is sealed with it.
        left = sequence.max_tokens - sequence.num_generated - 1
        return max(0, min(path.next_seal - path.num_tokens - 2, left, budget))


def _decodes(sequence: Sequence) -> bool:
    """Whether its next row is a decode row: of a new token, or of a replayed one."""
    return sequence.num_pending == 1 or sequence.path.retention.is_decided


def _proposed(sequence: Sequence, most: int) -> GuideProposal:
    """The guide's proposal: at most `most` drafts; a set of allowed tokens, or None, for each row."""
    assert sequence.guide is not None
    drafts, allowed = sequence.guide.propose(sequence.token_ids, most)
    assert len(drafts) <= most, f"{len(drafts)} drafts, and {most} fit"
    assert len(allowed) in (0, len(drafts) + 1), f"{len(allowed)} sets of tokens after {len(drafts)} drafts"
    return GuideProposal(drafts, allowed or [None] * (len(drafts) + 1))
