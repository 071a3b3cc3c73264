"""The prefix tree: which sealed chunks may be read by a request that starts with the same tokens (ChunkAttention,
section 3.1).

A radix tree over chunks of 64 tokens, one root for each namespace; a node is a segment. Depth is position, so equal
tokens at equal positions after equal tokens are one copy. Live paths lock their segments, from the root to their tip.
What nobody locks stays cached until memory is wanted, and then goes from the leaves, longest unused first; what is
pinned stays even then.

Differs from the paper: segments of several chunks in place of nodes of one, one tree for all layers, finished
sequences stay, and chunks are found by keys of all tokens up to their end (`cache/keys.py`).

A path that retention has made smaller reads a segment's pages of some heads only. The tree may then drop the segment:
pages that the path still reads have it as their last holder.
"""

from __future__ import annotations

import heapq
import math
import sys
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from quire.cache.keys import ChunkKeys, num_common
from quire.cache.ledger import PAGE_TOKENS
from quire.cache.path import Path
from quire.cache.segment import Segment


@dataclass
class PrefixTree:
    """Segments by namespace and keys. Invariants (`check`): a segment begins where its parent ends; whoever locks or
    pins a segment does so with its parent; the counts are right; no root is empty.

    shape        (L, H) of the pages of a chunk
    now          seconds on the engine's clock, which moves it on: what lifetimes are counted in
    num_chunks   chunks the tree holds
    num_read     chunks that live paths read in all heads
    num_pinned   chunks that somebody asked to keep, read or not
    num_unused   chunks that are neither in any head: they can be evicted
    num_idle     chunks with pages that can be evicted
    num_parted   chunks some heads of which some paths do not read any more
    part_read, part_idle  int64 [L, H], pages of these that are read, and that can be evicted
    num_unread_starts, num_idle_starts  segments at position 0, whose first chunks may have sidecars, that no live path
                 uses; those of them that are not pinned either
    num_sums, num_idle_sums  rows of sums that segments have; those of them that can be evicted
    num_evicted  chunks dropped since start because their memory was wanted
    num_uses     how often paths took or left segments: whose last use is longer ago is evicted first
    num_divided  how often a segment was divided: the one thing that changes the segments of other paths
    """

    shape: tuple[int, int]
    now: float = 0.0
    num_chunks: int = 0
    num_read: int = 0
    num_pinned: int = 0
    num_unused: int = 0
    num_idle: int = 0
    num_parted: int = 0
    num_unread_starts: int = 0
    num_idle_starts: int = 0
    num_sums: int = 0
    num_idle_sums: int = 0
    num_evicted: int = 0
    num_uses: int = 0
    num_divided: int = 0
    _roots: dict[Hashable, Segment] = field(default_factory=dict)
    _pinned: dict[Segment, bool] = field(default_factory=dict)  # in order of their first pin; whether it is protected
    _numbers: int = 0
    _leaves: list[tuple[int, int, Segment]] = field(default_factory=list)  # a heap; stale entries are skipped
    _pushes: int = 0

    def __post_init__(self) -> None:
        self.part_read, self.part_idle = np.zeros((2, *self.shape), np.int64)

    def extend(self, path: Path, keys: ChunkKeys, limit: int, is_hit: bool = True) -> int:
        """Carries a path without chunks of its own on, as far as the tree has the keys, and locks what it takes.
        Returns the chunks it took.

        limit   chunks in all at most
        is_hit  whether it counts as one: a sequence that comes back after a preemption finds what it left
        """
        assert path.num_chunks == path.num_shared, "a path with chunks of its own cannot take others"
        at = path.tip or self._roots.get(keys.namespace)
        first = path.num_shared
        if at is None or first >= limit:
            return 0
        rest = keys.first(limit)[first:]
        while rest and (child := at.children.get(rest[0])) is not None:
            count = num_common(child.keys, rest)
            at = self._divide(child, count) if count < len(child.chunks) else child
            at.hits += is_hit
            self._take(at)
            path.append(at.chunks)
            rest = rest[count:]
        if path.num_chunks > first:
            path.tip, path.num_shared = at, path.num_chunks
        return path.num_chunks - first

    def publish(self, path: Path, keys: ChunkKeys, end: int) -> NDArray[np.int32]:
        """Gives the tree the chunks a path has sealed: those after its shared ones, up to chunk `end`. They are locked
        for the path and shared from now on.

        Where the tree has the same tokens already the path takes the tree's chunks; returns the ids of its own that it
        needs no longer.
        """
        first, count = path.num_shared, end - path.num_shared
        at = path.tip or self._roots.get(keys.namespace)
        if at is None:
            none = np.empty(0, np.int32)
            at = Segment(none, [], none, 0, namespace=keys.namespace)
            self._roots[keys.namespace] = at
        spare = path.chunks[first : first + count].copy()
        taken, new = 0, keys.first(end)[first:]
        while taken < count and (child := at.children.get(new[taken])) is not None:
            common = num_common(child.keys, new[taken:])
            at = self._divide(child, common) if common < len(child.chunks) else child
            at.computed += 1
            self._take(at)
            taken += common
        if taken:
            held = [segment.chunks for segment in Path(at).segments]
            path.replace(first, np.concatenate(held)[first : first + taken])
        if taken < count:
            tokens = keys.tokens(first + taken, end).copy()
            at = self._add(at, path, tokens, new[taken:], path.chunks[first + taken : first + count].copy())
        path.tip, path.num_shared = at, first + count
        return spare[:taken]

    def release(self, path: Path) -> None:
        """The path's sequence is done with it: its locks are undone. What nobody else locks stays, cached."""
        self.num_uses += 1
        for segment, heads in path.reads():
            self._count(segment, -1)
            segment.users -= 1
            if heads is not None and segment.unread is not None:
                segment.unread -= ~heads
                if not segment.unread.any():
                    segment.unread = None
            assert segment.locks.min() >= 0, "unlocked more often than locked"
            segment.last_use, segment.used_at = self.num_uses, self.now
            self._count(segment, 1)
            self._offer(segment)
        path.tip, path.num_shared, path.heads = None, 0, {}

    def loosen(self, path: Path, heads: Mapping[Segment, NDArray[np.bool_]]) -> None:
        """The path goes on to read, of each of its segments, pages of these heads only, bool [L, H]; what else it
        locked may be evicted.
        """
        for segment, held in path.reads():
            kept = heads[segment]
            assert held is None or not (kept & ~held).any(), "a path cannot read again what it has let go of"
            let_go = ~kept if held is None else held & ~kept
            if not let_go.any():
                continue
            self._count(segment, -1)
            segment.unread = let_go.astype(np.int32) if segment.unread is None else segment.unread + let_go
            self._count(segment, 1)
            self._offer(segment)
        path.heads = dict(heads)

    def keep_sums(self, path: Path, num_chunks: int, sums: NDArray[np.int32]) -> NDArray[np.int32]:
        """Gives the tree the sums of a path's first chunks, all of them in the tree: rows int32 [num_chunks], complete
        up to their end. Returns rows that it has no use for, or no more: a prompt that goes on from another has longer
        sums of all that one had, and who else begins so is likely to go on as well. Where others part, and where this
        path has yet to be found, sums stay.
        """
        segment = self._ending_at(path, num_chunks)
        if segment.sums is not None:
            return sums
        self._set_sums(segment, sums)
        given_up = [
            self._set_sums(each, None)
            for each in path.segments
            if each.end < segment.end and len(each.children) < 2 and each.end // PAGE_TOKENS not in path.stops
        ]
        return np.concatenate((np.empty(0, np.int32), *given_up))

    def take_sums(self, path: Path, num_chunks: int) -> NDArray[np.int32]:
        """The rows of sums of a path's first chunks, which the tree has no longer."""
        return self._set_sums(self._ending_at(path, num_chunks), None)

    def drop_sums(self) -> NDArray[np.int32]:
        """All rows of sums, which the tree has no longer. Nobody reads them but to copy them."""
        found = [self._set_sums(segment, None) for _, segment in list(self.segments())]
        return np.concatenate((np.empty(0, np.int32), *found))

    def _set_sums(self, segment: Segment, sums: NDArray[np.int32] | None) -> NDArray[np.int32]:
        """Returns those it had."""
        before = np.empty(0, np.int32) if segment.sums is None else segment.sums
        self._count(segment, -1)
        segment.sums = sums
        self._count(segment, 1)
        return before

    def sums_within(self, keys: ChunkKeys, limit: int) -> tuple[int, NDArray[np.int32]]:
        """The longest beginning of a sequence, `limit` chunks at most, that has sums: its chunks, and their rows."""
        found = 0, np.empty(0, np.int32)
        for segment, count in self.walk(keys, limit):
            if count == len(segment.chunks) and segment.sums is not None:
                found = segment.end // PAGE_TOKENS, segment.sums
        return found

    def evict(self, count: int) -> NDArray[np.int32]:
        """Drops `count` idle chunks, or all of these: leaves first, longest unused first, each from its end. Returns
        their rows and those of their sums, which the tree no longer knows.
        """
        dropped: list[NDArray[np.int32]] = []
        while count > 0 and (leaf := self._oldest_leaf()) is not None:
            gone = min(count, len(leaf.chunks))
            dropped.append(self._drop(leaf, len(leaf.chunks) - gone))
            count -= gone
            self.num_evicted += gone
        return _together(dropped)

    def expire(self, lifetime: float | None) -> NDArray[np.int32]:
        """Ends the pins whose time is over and drops what nobody used for `lifetime` seconds, where that is not None.
        Returns the rows of what it dropped.
        """
        for segment in [each for each in self._pinned if each.pinned_until <= self.now]:
            self._unpin(segment)
        dropped: list[NDArray[np.int32]] = []
        while (
            lifetime is not None and (leaf := self._oldest_leaf()) is not None and leaf.used_at + lifetime <= self.now
        ):
            dropped.append(self._drop(leaf, 0))
        return _together(dropped)

    def pin(self, path: Path, num_chunks: int, until: float) -> None:
        """Keeps the first `num_chunks` chunks of a path, all of them shared, until the clock says so, though others
        want their memory. A pin that is there already is moved, never shortened.
        """
        segment = self._ending_at(path, num_chunks)
        segment.pinned_until = max(segment.pinned_until, until)
        if segment not in self._pinned:
            self._pinned[segment] = False
            self._count_pin(segment, 1)

    def protect(self, keys: ChunkKeys) -> None:
        """Makes the pin of a prompt, which it has, one that nothing ends."""
        *_, (segment, count) = self.walk(keys)
        assert segment in self._pinned and count == len(segment.chunks), "what is protected is pinned"
        segment.pinned_until, self._pinned[segment] = math.inf, True

    def unpin(self, keys: ChunkKeys) -> int:
        """Ends the pins of a prompt and of all that it begins with, but for protected ones; returns how many. What
        they kept counts as used now.
        """
        found = self.walk(keys)
        held = [segment for segment, count in found if count == len(segment.chunks)]
        ended = [each for each in held if self._pinned.get(each) is False]
        if ended:
            self.num_uses += 1
            for each in held[: held.index(ended[-1]) + 1]:
                each.last_use, each.used_at = self.num_uses, self.now
        for each in ended:
            self._unpin(each)
        return len(ended)

    def unpin_oldest(self) -> Segment | None:
        """Ends the unprotected pin that is there for longest and returns the segment; None if there is none."""
        segment = next((each for each, is_protected in self._pinned.items() if not is_protected), None)
        if segment is not None:
            self._unpin(segment)
        return segment

    @property
    def has_ending_pins(self) -> bool:
        """Whether there are pins that time ends."""
        return any(each.pinned_until < math.inf for each in self._pinned)

    @property
    def num_protected(self) -> tuple[int, int]:
        """Chunks that protected pins keep, and how many of them begin a sequence."""
        kept: dict[Segment, None] = {}
        for segment in (each for each, is_protected in self._pinned.items() if is_protected):
            at: Segment | None = segment
            while at is not None and at.parent is not None:
                kept[at] = None
                at = at.parent
        return sum(len(segment.chunks) for segment in kept), sum(segment.start == 0 for segment in kept)

    def walk(self, keys: ChunkKeys, limit: int = sys.maxsize) -> Iterator[tuple[Segment, int]]:
        """(segment, leading chunks of it) that have a sequence's first keys, `limit` at most; changes nothing."""
        at, rest = self._roots.get(keys.namespace), keys.first(limit)
        while at is not None and rest and (at := at.children.get(rest[0])) is not None:
            count = num_common(at.keys, rest)
            yield at, count
            if count < len(at.chunks):
                return
            rest = rest[count:]

    def shared(self, path: Path) -> tuple[tuple[int, int], ...]:
        """(number, chunks) of the path's segments: paths whose tuples begin alike share as much, and sorted by them
        stand side by side.
        """
        known, found = path.shared
        if known != (self.num_divided, path.num_shared):
            found = tuple((segment.number, len(segment.chunks)) for segment in path.segments)
            path.shared = (self.num_divided, path.num_shared), found
        return found

    def children(self, of: Segment | Hashable) -> list[NDArray[np.int32]]:
        """The tokens of the segments that follow one, or that begin a namespace."""
        at = of if isinstance(of, Segment) else self._roots.get(of)
        return [] if at is None else [child.tokens for child in at.children.values()]

    def segments(self) -> Iterator[tuple[Hashable, Segment]]:
        """Every segment with its namespace, parents first."""
        for namespace, root in self._roots.items():
            todo = list(root.children.values())
            while todo:
                segment = todo.pop()
                yield namespace, segment
                todo.extend(segment.children.values())

    def check(self) -> None:
        """Proves the invariants."""
        counted, read, idle = self._counts(), self.part_read.copy(), self.part_idle.copy()
        for _, segment in self.segments():
            parent = segment.parent
            assert not segment.is_dropped, "a dropped segment is in the tree"
            assert parent is not None and segment.start == parent.end, "a segment does not begin where its parent ends"
            assert parent.children[segment.keys[0]] is segment, "a segment is not found by its first chunk"
            assert parent.parent is None or (segment.locks <= parent.locks).all(), (
                "a segment is locked and its parent is not"
            )
            below = sum(child.pins for child in segment.children.values())
            assert segment.pins == below + (segment in self._pinned), "pins are not those below and its own"
            self._count(segment, -1)
        left = self._counts(), bool(self.part_read.any()), bool(self.part_idle.any())
        for _, segment in self.segments():
            self._count(segment, 1)
        assert left == ((0,) * len(counted), False, False), (
            f"counted {counted}, read {read}, idle {idle}; too much: {left}"
        )
        assert all(root.children for root in self._roots.values()), "a root without segments is kept"

    def _counts(self) -> tuple[int, ...]:
        starts, sums = (self.num_unread_starts, self.num_idle_starts), (self.num_sums, self.num_idle_sums)
        return (
            self.num_chunks,
            self.num_read,
            self.num_pinned,
            self.num_unused,
            self.num_idle,
            self.num_parted,
            *starts,
            *sums,
        )

    def _count(self, segment: Segment, by: int) -> None:
        """Takes a segment out of the counts (by = -1) before something changes what it counts as, and in again (1)."""
        if segment.is_dropped:
            return
        num_chunks, num_sums, users = by * len(segment.chunks), by * segment.num_sums, segment.users
        self.num_chunks += num_chunks
        self.num_sums += num_sums
        if segment.unread is not None:
            is_read = segment.unread < users
            self.num_parted += num_chunks
            self.part_read += num_chunks * is_read
            if not segment.pins:
                self.part_idle += num_chunks * ~is_read
        elif users:
            self.num_read += num_chunks
        elif not segment.pins:
            self.num_unused += num_chunks
        if not users and segment.start == 0:
            self.num_unread_starts += by
            if not segment.pins:
                self.num_idle_starts += by
        if segment.pins:
            self.num_pinned += num_chunks
        elif segment.may_go:
            self.num_idle += num_chunks
            self.num_idle_sums += num_sums

    def _take(self, segment: Segment) -> None:
        self._count(segment, -1)
        segment.users += 1
        self.num_uses += 1
        segment.last_use, segment.used_at = self.num_uses, self.now
        self._count(segment, 1)

    def _ending_at(self, path: Path, num_chunks: int) -> Segment:
        """The segment of a path that ends after so many chunks, all of them shared; one is divided if none does."""
        assert 0 < num_chunks <= path.num_shared, f"{num_chunks} chunks of {path.num_shared} in the tree"
        end = num_chunks * PAGE_TOKENS
        segment = next(each for each in path.segments if each.end >= end)
        return segment if segment.end == end else self._divide(segment, (end - segment.start) // PAGE_TOKENS)

    def _add(
        self, at: Segment, path: Path, tokens: NDArray[np.int32], keys: list[bytes], chunks: NDArray[np.int32]
    ) -> Segment:
        """Puts chunks after a segment: at its end where nothing follows and only this path ever had to do with it, else
        as a child.
        """
        alone = at.users == 1 and not at.pins and (at.hits, at.computed) == (0, 1) and at.sums is None
        if at is path.tip and not at.children and alone:
            self._count(at, -1)
            at.tokens = np.concatenate((at.tokens, tokens))
            at.keys = at.keys + keys
            at.chunks = np.concatenate((at.chunks, chunks))
            self._count(at, 1)
            return at
        self.num_uses += 1
        child = Segment(
            tokens, keys, chunks, at.end, self._number(), at, last_use=self.num_uses, used_at=self.now, users=1
        )
        at.children[keys[0]] = child
        self._count(child, 1)
        return child

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _divide(self, segment: Segment, count: int) -> Segment:
        """Splits a segment after `count` chunks and returns the front. The back is the segment itself, which paths
        that read it go on to hold.
        """
        self.num_divided += 1
        parent, cut = segment.parent, count * PAGE_TOKENS
        assert parent is not None and 0 < count < len(segment.chunks), f"{count} of {len(segment.chunks)} chunks"
        self._count(segment, -1)
        front = Segment(
            segment.tokens[:cut],
            segment.keys[:count],
            segment.chunks[:count],
            segment.start,
            self._number(),
            parent,
            last_use=segment.last_use,
            used_at=segment.used_at,
            hits=segment.hits,
            computed=segment.computed,
            pins=segment.pins,
            users=segment.users,
            unread=None if segment.unread is None else segment.unread.copy(),
        )
        parent.children[front.keys[0]] = front
        segment.tokens, segment.keys, segment.chunks, segment.start, segment.parent = (
            segment.tokens[cut:],
            segment.keys[count:],
            segment.chunks[count:],
            front.end,
            front,
        )
        front.children[segment.keys[0]] = segment
        self._count(front, 1)
        self._count(segment, 1)
        return front

    def _offer(self, segment: Segment) -> None:
        """Notes a segment that may now be evicted."""
        if segment.parent is None or segment.is_dropped or segment.children or not segment.may_go:
            return
        if len(self._leaves) > 2 * self.num_chunks + 64:
            # Entries that eviction never met: a server that never runs short would collect them for ever.
            current = [leaf for _, leaf in self.segments() if not leaf.children and leaf.may_go]
            self._leaves = [(leaf.last_use, number, leaf) for number, leaf in enumerate(current)]
            heapq.heapify(self._leaves)
        self._pushes += 1
        heapq.heappush(self._leaves, (segment.last_use, self._pushes, segment))

    def _oldest_leaf(self) -> Segment | None:
        """The leaf to evict next; stays first in the heap."""
        while self._leaves:
            last_use, _, leaf = self._leaves[0]
            if not leaf.is_dropped and leaf.last_use == last_use and not leaf.children and leaf.may_go:
                return leaf
            heapq.heappop(self._leaves)
        return None

    def _drop(self, leaf: Segment, kept: int) -> NDArray[np.int32]:
        """Drops the chunks of a leaf that may go after the first `kept`; with none kept, the leaf and, if that leaves
        it empty, its root. Returns their rows, and those of its sums.
        """
        gone = leaf.chunks[kept:] if leaf.sums is None else np.concatenate((leaf.chunks[kept:], leaf.sums))
        self._count(leaf, -1)
        leaf.sums = None
        if kept:
            leaf.chunks, leaf.tokens, leaf.keys = (
                leaf.chunks[:kept],
                leaf.tokens[: kept * PAGE_TOKENS],
                leaf.keys[:kept],
            )
            self._count(leaf, 1)
            return gone
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.keys[0]]
        leaf.is_dropped = True  # and keeps its parent, for the paths that still go through it
        if parent.parent is None and not parent.children:
            del self._roots[parent.namespace]
        self._offer(parent)
        return gone

    def _unpin(self, segment: Segment) -> None:
        del self._pinned[segment]
        segment.pinned_until = 0.0
        self._count_pin(segment, -1)

    def _count_pin(self, segment: Segment, by: int) -> None:
        """Notes one pin more or less on a segment and all before it."""
        at: Segment | None = segment
        while at is not None and at.parent is not None:
            self._count(at, -1)
            at.pins += by
            self._count(at, 1)
            self._offer(at)
            at = at.parent


def _together(runs: list[NDArray[np.int32]]) -> NDArray[np.int32]:
    return np.concatenate(runs) if runs else np.empty(0, np.int32)
