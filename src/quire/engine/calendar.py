"""Decoding sequences, by the step of their next event. Until that step the host does no work for them. No torch."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator

from quire.engine.request import Sequence

_LEAST_TOKEN = -(1 << 31)
_MOST_POSITIONS = 1 << 24


def placeholder_tokens(sequence: Sequence, start: int, count: int) -> Iterable[int]:
    """Stand-ins for the tokens that a model would sample for positions [start, start + count). They are negative, so
    in no vocabulary. They differ between sequences if the keys of chunks depend on tokens.
    """
    if not sequence.keys.reads_tokens:
        return itertools.repeat(_LEAST_TOKEN, count)
    first = _LEAST_TOKEN + sequence.sequence_id * 1_000_003 % (-_LEAST_TOKEN - _MOST_POSITIONS)
    return range(first + start, first + start + count)


class Calendar:
    """Sequences that take one row in every step until their next event: a chunk begins or is full, or their length is
    reached. Their number of computed tokens follows from the clock; `settle` stores it in the sequence.

    clock      steps so far
    members    the sequences, each with the clock of its next event
    sum_clock_offsets  sum of the members' clock offsets
    """

    def __init__(self) -> None:
        self.clock = 0
        self.sum_clock_offsets = 0
        self.members: dict[Sequence, int] = {}
        self._events: list[tuple[int, int, int, Sequence]] = []  # a heap; entries of those that left are skipped
        self._pushes = itertools.count()

    def __len__(self) -> int:
        return len(self.members)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self.members)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self.members

    def join(self, sequence: Sequence, steps: int) -> None:
        """Adds a sequence whose next `steps` steps only add a token each."""
        assert steps > 0 and sequence.num_pending == 1, f"{steps} steps of {sequence.num_pending} rows"
        event = self.clock + steps
        sequence.clock_offset, sequence.is_quiet = sequence.path.num_tokens - self.clock, True
        self.sum_clock_offsets += sequence.clock_offset
        self.members[sequence] = event
        heapq.heappush(self._events, (event, sequence.admitted, next(self._pushes), sequence))

    def leave(self, sequence: Sequence) -> None:
        """Removes a sequence, if it is a member."""
        if self.members.get(sequence) is not None:
            self.settle(sequence)
            del self.members[sequence]
            self.sum_clock_offsets -= sequence.clock_offset
            sequence.is_quiet = False

    def due(self) -> list[Sequence]:
        """Removes the sequences with an event in the next step, in the order of admission."""
        found = []
        while self._next_event() == self.clock:
            sequence = self._events[0][-1]
            self.leave(sequence)
            found.append(sequence)
        return found

    @property
    def context(self) -> int:
        """Tokens that the members' next rows attend to, these rows included."""
        return self.sum_clock_offsets + len(self.members) * (self.clock + 1)

    @property
    def quiet_steps(self) -> int:
        """Steps from now without an event. There must be a member."""
        event = self._next_event()
        assert event is not None, "nobody decodes"
        return event - self.clock

    def settle(self, sequence: Sequence) -> None:
        """Stores a member's number of computed tokens in it. Skipped steps get placeholder tokens."""
        num_tokens = sequence.clock_offset + self.clock
        sequence.path.num_tokens = sequence.high_water = num_tokens
        missing = num_tokens + 1 - len(sequence.token_ids)
        if missing:
            sequence.token_ids.extend(placeholder_tokens(sequence, len(sequence.token_ids), missing))

    def _next_event(self) -> int | None:
        """The clock of the next event, whose entry becomes the first of the heap."""
        while self._events:
            event, _, _, sequence = self._events[0]
            if self.members.get(sequence) == event:
                return event
            heapq.heappop(self._events)
        return None
