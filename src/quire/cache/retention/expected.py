"""How much memory the sequences that retention has yet to decide on will hold, from what others kept."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from quire.cache.path import Path
from quire.cache.segment import Segment

QUANTILE = 0.9
LEAST_KNOWN = 8
"""Requests that must have been decided on before others are expected to keep less than everything."""


class Ahead(NamedTuple):
    """Chunks of a sequence that retention will make smaller.

    own_before    of its own, until it is decided on
    total_before  all it reads, until it is decided on
    own_in_tree   of these, in the tree and read by no other sequence
    held_now      of its own, now
    """

    own_before: int
    total_before: int
    own_in_tree: int
    held_now: int

    @classmethod
    def of(cls, path: Path, num_unsealed: int, found: Iterable[tuple[Segment, int]], num_readers: int) -> Ahead:
        """Of a path that lacks `num_unsealed` sealed chunks and reads what was found. The path is one of the readers
        (1) or not yet (0).
        """
        held = path.num_stored - path.num_shared
        alone = sum(count for segment, count in found if not segment.pins and segment.locks.max() <= num_readers)
        return cls(held + num_unsealed, path.num_begun + num_unsealed, alone, held)


@dataclass
class KeepRatio:
    """What requests kept of their prompts, to expect of the next ones.

    seen  the shares of their pages that the last requests kept
    """

    seen: deque[float] = field(default_factory=lambda: deque(maxlen=256))

    @property
    def expected(self) -> float:
        """A share that only a tenth of the requests exceeded; 1 while too few are known."""
        if len(self.seen) < LEAST_KNOWN:
            return 1.0
        return sorted(self.seen)[math.ceil(QUANTILE * len(self.seen)) - 1]

    def at_most(self, ahead: Iterable[Ahead]) -> int:
        """Chunks that sequences will hold at most, beyond those they hold, if each in turn is computed and then made
        as small as most requests are. With an expected ratio of 1, all that they lack together.
        """
        ratio, most, before = self.expected, 0.0, 0.0
        for each in ahead:
            # Packing copies a part of what was found. What was found is then idle, if nobody else reads it.
            after = ratio * each.total_before - each.own_in_tree
            most = max(most, before + max(each.own_before, after) - each.held_now)
            before += after - each.held_now
        return math.ceil(most)
