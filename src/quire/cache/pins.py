"""Pins: prefixes that are protected from eviction until a given time."""

from __future__ import annotations

import math
import sys

from quire.cache.holder import Holder
from quire.cache.keys import ChunkKeys
from quire.cache.ledger import PAGE_TOKENS
from quire.cache.segment import Segment
from quire.cache.tree import PrefixTree


class Pins:
    """The pinned segments of a tree, in the order of their first pins, and whether each pin is protected: permanent.

    most  most chunks that may be pinned
    """

    def __init__(self, tree: PrefixTree, most: int) -> None:
        self.tree = tree
        self.most = most
        self._is_protected: dict[Segment, bool] = {}

    def has_room(self, keys: ChunkKeys, count: int) -> bool:
        """Whether the first `count` chunks of a prompt may be pinned."""
        pinned = sum(found for segment, found in self.tree.walk(keys, count) if segment.pins)
        return self.tree.num_pinned + count - pinned <= self.most

    def add(self, holder: Holder, num_tokens: int, seconds: float) -> bool:
        """Pins the whole chunks of a sequence's first `num_tokens` tokens, which are computed, for some seconds.
        Extends an earlier pin, but never shortens it. If there is no room, returns False and pins nothing.
        """
        count = num_tokens // PAGE_TOKENS
        if not self.tree.shares or count == 0 or not self.has_room(holder.keys, count):
            return False
        segment = self.tree.boundary(holder.path, count)
        segment.pinned_until = max(segment.pinned_until, self.tree.now + seconds)
        if segment not in self._is_protected:
            self._is_protected[segment] = False
            self.tree.add_pins(segment, 1)
        return True

    def protect(self, keys: ChunkKeys) -> None:
        """Makes the existing pin of a prompt permanent."""
        *_, (segment, count) = self.tree.walk(keys)
        assert segment in self._is_protected and count == len(segment.chunks), "what is protected is pinned"
        segment.pinned_until, self._is_protected[segment] = math.inf, True

    def end(self, keys: ChunkKeys) -> int:
        """Ends the unprotected pins of a prompt and of its prefixes. Returns their number. Their segments count as used
        now.
        """
        return self.end_of(keys.first(sys.maxsize))

    def end_of(self, names: list[bytes], after: int = 0) -> int:
        """Like `end`, for a prompt given by the keys of its chunks. Pins of prefixes of at most `after` chunks stay."""
        tree = self.tree
        found = [
            segment for segment, count in tree.match(names) if count == len(segment.chunks) and segment.end > after
        ]
        ended = [segment for segment in found if self._is_protected.get(segment) is False]
        if ended:
            tree.num_uses += 1
            for each in ended[-1].branch:
                each.last_use, each.used_at = tree.num_uses, tree.now
        for each in ended:
            self._end(each)
        return len(ended)

    def end_oldest(self) -> Segment | None:
        """Ends the oldest unprotected pin and returns its segment; None if there is none."""
        segment = next((each for each, is_protected in self._is_protected.items() if not is_protected), None)
        if segment is not None:
            self._end(segment)
        return segment

    def expire(self) -> None:
        """Ends the pins whose time is over."""
        if not self._is_protected:
            return
        for segment in [each for each in self._is_protected if each.pinned_until <= self.tree.now]:
            self._end(segment)

    @property
    def has_ending(self) -> bool:
        """Whether any pin ends by time."""
        return any(each.pinned_until < math.inf for each in self._is_protected)

    @property
    def num_protected(self) -> tuple[int, int]:
        """Number of chunks under protected pins, and number of their segments that begin a sequence."""
        protected = (segment for segment, is_protected in self._is_protected.items() if is_protected)
        kept = {each for segment in protected for each in segment.branch}
        return sum(len(segment.chunks) for segment in kept), sum(segment.start == 0 for segment in kept)

    def check(self) -> None:
        """Proves that these are the pinned segments of the tree."""
        pinned = {segment for segment in self.tree.segments() if segment.pinned_until}
        assert pinned == self._is_protected.keys(), "pins are not those of the tree"

    def _end(self, segment: Segment) -> None:
        del self._is_protected[segment]
        segment.pinned_until = 0.0
        self.tree.add_pins(segment, -1)
