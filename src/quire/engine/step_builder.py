"""Builds a step from its rows. If nothing but tokens changes, the next step reuses the last one's slices."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from quire.attention.rows import Profiled
from quire.engine.batch import Batch
from quire.engine.policy import Rows
from quire.engine.request import Sequence
from quire.engine.step import NO_TOKEN, NewSequence, Slice, Step


class StepBuilder:
    """Builds the steps of a batch.

    sequences  sequences of the last step, in the order of its slices
    sampled    tokens of the last step
    """

    def __init__(self, batch: Batch) -> None:
        self.sequences: list[Sequence] = []
        self.sampled: list[int] = []
        self._batch, self._manager = batch, batch.manager
        self._indices: dict[Sequence, int] = {}
        self._slices: list[Slice] = []
        self._positions: NDArray[np.int64] = np.empty(0, np.int64)

    def build(self, work: list[Rows]) -> Step:
        """The step of all rows, including the calendar's."""
        batch = self._batch
        begun = [_begin(each.sequence) for each in work if not each.sequence.is_begun]
        ended = batch.take_ended()
        singles: list[tuple[Sequence, Slice]] = []
        tall: list[tuple[Sequence, Slice]] = []
        for each in work:
            (singles if each.num_rows == 1 else tall).extend((each.sequence, piece) for piece in self._as_slices(each))
        joined = [(sequence, self._row(sequence)) for sequence in batch.joined if sequence in batch.calendar]
        batch.joined.clear()
        if not (batch.is_changed or tall or len(batch.calendar) + len(singles) != len(self._slices)):
            moved = self._replace(joined + singles)
            if moved is not None:
                self._positions = self._positions + 1
                for piece, start in zip(self._slices, self._positions.tolist(), strict=True):
                    piece.start = start
                return Step(self._slices, np.array(self.sampled, np.int64), self._positions, begun, ended, moved)
        rows = [(sequence, self._quiet_row(sequence)) for sequence in batch.calendar] + singles
        # Sequences that share chunks become neighbours: attention reads a shared chunk once for all of them.
        for sequence, piece in rows:
            piece.shared = self._manager.tree.shared(sequence.path)
        rows.sort(key=_shared)
        rows += tall
        self.sequences, self._slices = [sequence for sequence, _ in rows], [piece for _, piece in rows]
        self._indices = {sequence: index for index, sequence in enumerate(self.sequences)}
        ids, positions = _tokens_of(rows)
        self._positions = np.array(positions, np.int64)
        # The next step may advance this one only if every row yields a token.
        batch.is_changed = bool(tall) or not all(piece.samples and piece.draft == NO_TOKEN for _, piece in singles)
        return Step(self._slices, np.array(ids, np.int64), self._positions, begun, ended)

    def forget(self) -> None:
        """Drops the slices of sequences that joined the calendar: skipped steps have made them stale."""
        self._batch.is_changed = True
        for sequence in self._batch.joined:
            sequence.slice = None
        self._batch.joined.clear()

    def _as_slices(self, rows: Rows) -> list[Slice]:
        """Rows as slices: a slice for each draft."""
        sequence, start, count, proposal = rows
        first = self._row(sequence) if count == 1 else self._slice(sequence, start, count)
        if proposal is None:
            return [first]
        self._batch.is_changed = True
        drafts = enumerate(proposal.drafts, 1)
        # Drafts need neither log-probabilities of the prompt nor pooling.
        row = replace(first, scores=False, pools="")
        slices = [first, *(replace(row, start=start + place, draft=draft) for place, draft in drafts)]
        for piece, tokens in zip(slices, proposal.allowed, strict=True):
            piece.allowed = tokens
        return slices

    def _row(self, sequence: Sequence) -> Slice:
        """The next row of a sequence: the same object as last time while the sequence stays in the same chunks."""
        row, last = self._slice(sequence, sequence.path.num_tokens, 1), sequence.slice
        if last is not None and last.can_advance_to(row):
            last.start = row.start
            return last
        sequence.slice = row
        return row

    def _quiet_row(self, sequence: Sequence) -> Slice:
        """The next row of a sequence of the calendar."""
        row, calendar = sequence.slice, self._batch.calendar
        if row is None:
            calendar.settle(sequence)
            row = self._row(sequence)
        row.start = sequence.clock_offset + calendar.clock
        return row

    def _slice(self, sequence: Sequence, start: int, count: int) -> Slice:
        path, end = sequence.path, start + count
        profiling = self._manager.retention.profiling(sequence, end)
        return Slice(
            start,
            count,
            path.chunks,
            filled=path.reservation.filled,
            profiled=None
            if profiling is None
            else Profiled(path.retention.sums, profiling.last_rows, profiling.peaks, profiling.near),
            num_dropped=path.retention.num_dropped,
            reads_all=end <= sequence.num_prompt,
            sequence_id=sequence.sequence_id,
            samples=end == len(sequence.token_ids),
            decides=profiling is not None and profiling.decides,
            scores=sequence.wants_prompt_logprobs,
            pools=sequence.pooling,
        )

    def _replace(self, rows: list[tuple[Sequence, Slice]]) -> list[int] | None:
        """Replaces slices of the last step by new ones of the same sequences. Returns their indices; None if a sequence
        was not in the last step, or now shares other chunks.
        """
        found: dict[int, Slice] = {}
        for sequence, piece in rows:
            index = self._indices.get(sequence)
            if index is None or not piece.samples:
                return None
            if piece is not self._slices[index]:
                piece.shared, before = self._manager.tree.shared(sequence.path), self._slices[index].shared
                if [number for number, _ in piece.shared] != [number for number, _ in before]:
                    return None
                found[index] = piece
        if found:
            self._slices = [found.get(index, piece) for index, piece in enumerate(self._slices)]
        return list(found)


def _shared(row: tuple[Sequence, Slice]) -> tuple[tuple[int, int], ...]:
    return row[1].shared


def _tokens_of(rows: list[tuple[Sequence, Slice]]) -> tuple[list[int], list[int]]:
    """Token ids and positions of all rows."""
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
    return ids, positions


def _begin(sequence: Sequence) -> NewSequence:
    sequence.is_begun = True
    request = sequence.request
    output_ids = sequence.token_ids[sequence.num_prompt :]
    return NewSequence(sequence.sequence_id, request.params, request.prompt_ids, sequence.seed, output_ids)
