"""The prefix tree: sealed chunks that requests with the same first tokens share (ChunkAttention, section 3.1).

A radix tree over chunks of 64 tokens; a node is a segment. Keys differ between namespaces, so one root serves all of
them. Live paths lock their segments, from the root to their tip. Segments without a lock stay cached until their memory
is needed. Eviction then starts at the leaves, least recently used first. Pinned segments are not evicted.

Differs from the paper: a node has several chunks, one tree serves all layers, finished sequences stay cached, and a
chunk is found by a key of all tokens up to its end (`cache/keys.py`).

With retention, a path may read a segment's pages of some heads only. The tree may then drop the segment; the pages that
the path still reads live on, with the path as their last holder.

The end of a segment may have an attachment: rows of the chunk table that are evicted with it. The tree counts these
rows and does not know what they hold.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from quire.cache.arrays import Bools, Int32s
from quire.cache.eviction_order import EvictionOrder
from quire.cache.keys import ChunkKeys, num_common
from quire.cache.ledger import PAGE_TOKENS
from quire.cache.path import Path
from quire.cache.run import RunIdentity
from quire.cache.segment import NO_ROWS, Segment
from quire.cache.tree_counts import TreeCounts


class DroppedChunks(NamedTuple):
    """Consecutive chunks that the tree dropped, and their rows of the chunk table. The last `num_attached` rows are the
    attachment of their end. lifetime: see `Segment`.
    """

    identity: RunIdentity
    rows: Int32s
    num_attached: int
    lifetime: float | None = None


@dataclass
class PrefixTree(TreeCounts):
    """Segments by namespace and keys. Invariants (`check`): a segment begins where its parent ends; a locked or pinned
    segment has a locked or pinned parent; the counts are right.

    lifetime     seconds after which unused segments are dropped; None: when their memory is needed
    shares       whether sequences share the chunks they compute. Otherwise the tree stays empty: every sequence has its
                 own chunks, which are freed when it ends
    now          seconds on the engine's clock, for lifetimes
    num_evicted  chunks dropped since start because their memory was needed
    num_uses     how often paths took or left segments; the smallest `last_use` is evicted first
    num_divided  how often a segment was divided; nothing else changes the segments of other paths
    """

    lifetime: float | None = None
    shares: bool = True
    now: float = 0.0
    num_evicted: int = 0
    num_uses: int = 0
    num_divided: int = 0
    _root: Segment = field(default_factory=lambda: Segment(NO_ROWS, [], NO_ROWS, 0))
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def __post_init__(self) -> None:
        super().__post_init__()
        self._order = EvictionOrder(self.lifetime_of)

    def extend(self, path: Path, keys: ChunkKeys, limit: int, is_hit: bool = True) -> int:
        """Extends a path over cached chunks and locks them. Returns how many it took. The path has no chunks of its
        own.

        limit   most chunks of the path
        is_hit  whether this counts as a hit; not if a preempted sequence finds its own chunks
        """
        first = path.num_shared
        assert path.is_all_shared, "a path with chunks of its own cannot take others"
        for segment in self._follow(path, path.tip or self._root, keys.first(limit)[first:]):
            segment.hits += is_hit
            path.append(segment.chunks)
            path.tip, path.num_shared = segment, len(path.chunks)
        return path.num_shared - first

    def publish(self, path: Path, keys: ChunkKeys, end: int) -> Int32s:
        """Puts a path's sealed chunks into the tree, from its last shared one up to chunk `end`, and locks them.

        If the tree already has some of them, the path takes the tree's. Returns the rows it no longer needs; the caller
        frees them.
        """
        if not self.shares:
            return NO_ROWS
        at, first, spare = path.tip or self._root, path.num_shared, NO_ROWS
        for segment in self._follow(path, at, keys.first(end)[first:]):
            segment.computed += 1
            spare = np.concatenate((spare, path.replace(first, segment.chunks)))
            at, first = segment, first + len(segment.chunks)
        if first < end:
            at = self._add(at, path, keys, path.chunks[first:end])
        path.tip, path.num_shared = at, end
        return spare

    def release(self, path: Path) -> Int32s:
        """Unlocks a path's segments. They stay cached. Returns the rows of its own chunks; the caller frees them."""
        rows = path.own_rows
        self.num_uses += 1
        for segment, heads in path.reads():
            self._count(segment, -1)
            segment.users -= 1
            if heads is not None and segment.unread is not None:
                segment.unread -= ~heads
                if not segment.unread.any():
                    segment.unread = None
            assert segment.users >= 0, "unlocked more often than locked"
            assert segment.unread is None or (segment.unread <= segment.users).all(), "unlocked more often than locked"
            segment.last_use, segment.used_at = self.num_uses, self.now
            self._count(segment, 1)
            self._order.offer(segment, self.num_chunks)
        path.tip, path.num_shared, path.retention.heads, path.reservation.filled = None, 0, {}, -1
        path.chunks = path.retention.sums = NO_ROWS
        return rows

    def unlock_heads(self, path: Path, heads: Mapping[Segment, Bools]) -> None:
        """Unlocks a path's segments except the given heads of each, bool [L, H]. Other pages may then be evicted."""
        for segment, held in path.reads():
            kept = heads[segment]
            assert held is None or not (kept & ~held).any(), "a path cannot read again what it has let go of"
            unlocked = ~kept if held is None else held & ~kept
            if unlocked.any():
                self._count(segment, -1)
                segment.unread = unlocked.astype(np.int32) if segment.unread is None else segment.unread + unlocked
                self._count(segment, 1)
                self._order.offer(segment, self.num_chunks)
        path.retention.heads = dict(heads)

    def boundary(self, path: Path, num_chunks: int) -> Segment:
        """The segment of a path that ends after `num_chunks` shared chunks. Divides one if none ends there."""
        assert 0 < num_chunks <= path.num_shared, f"{num_chunks} chunks of {path.num_shared} in the tree"
        segment = next(each for each in path.segments if each.end >= num_chunks)
        return segment if segment.end == num_chunks else self._divide(segment, num_chunks - segment.start)

    def attach(self, segment: Segment, rows: Int32s) -> Int32s:
        """Replaces the attachment of a segment's end. Returns the rows of the old one; the caller frees them."""
        before = segment.attached
        self._count(segment, -1)
        segment.attached = rows
        self._count(segment, 1)
        return before

    def detach_all(self) -> Int32s:
        """Ends all attachments. Returns their rows; the caller frees them."""
        return np.concatenate([NO_ROWS, *(self.attach(segment, NO_ROWS) for segment in self.segments())])

    def evict(self, count: int) -> list[DroppedChunks]:
        """Drops `count` idle chunks, or all: from the ends of leaves, the lowest priority and the least recently used
        first. The caller frees their rows.
        """
        dropped: list[DroppedChunks] = []
        while count > 0 and (leaf := self._order.oldest()) is not None:
            num_dropped = min(count, len(leaf.chunks))
            dropped.append(self._drop(leaf, len(leaf.chunks) - num_dropped))
            count -= num_dropped
            self.num_evicted += num_dropped
        return dropped

    def expire(self) -> list[DroppedChunks]:
        """Drops segments that were not used for their lifetimes. The caller frees their rows."""
        dropped: list[DroppedChunks] = []
        while (leaf := self._order.take_ended(self.now)) is not None:
            dropped.append(self._drop(leaf, 0))
        return dropped

    @property
    def has_ending(self) -> bool:
        """Whether a segment may be dropped because its lifetime ends."""
        return self._order.has_ending or (self.lifetime is not None and self.num_chunks > 0)

    def lifetime_of(self, segment: Segment | Path) -> float:
        """Seconds for which a segment stays without use."""
        lifetime = self.lifetime if segment.lifetime is None else segment.lifetime
        return math.inf if lifetime is None else lifetime

    def discard(self, names: list[bytes]) -> list[DroppedChunks]:
        """Drops the idle chunks of a prefix, given by the keys of its chunks: the segment where it ends and all after
        it, then those before it that have no other child. The caller frees their rows.
        """
        found = [segment for segment, _ in self.match(names)]
        if not found or names[-1] not in found[-1].keys:
            return []
        branch = found[:-1]
        below = [found[-1]]
        for segment in below:  # grows as it runs
            below.extend(segment.children.values())
        return [self._drop(segment, 0) for segment in (*below[::-1], *branch[::-1]) if segment.is_evictable]

    def names_along(self, names: list[bytes]) -> set[bytes]:
        """The keys of a prefix's chunks that the tree has."""
        return {name for segment, count in self.match(names) for name in segment.keys[:count]}

    def add_pins(self, segment: Segment, by: int) -> None:
        """Adds a pin (by = 1) to a segment and all its ancestors, or removes one (-1)."""
        for each in segment.branch:
            self._count(each, -1)
            each.pins += by
            self._count(each, 1)
            self._order.offer(each, self.num_chunks)

    def walk(self, keys: ChunkKeys, limit: int = sys.maxsize) -> Iterator[tuple[Segment, int]]:
        """Finds a sequence's first chunks, at most `limit`: (segment, number of its chunks found). Changes nothing."""
        return self.match(keys.first(limit))

    def match(self, names: list[bytes], after: Segment | None = None) -> Iterator[tuple[Segment, int]]:
        """Like `walk`, for a sequence given by the keys of its chunks. after: the segment that they follow."""
        at = after or self._root
        while names and (child := at.children.get(names[0])) is not None:
            at, count = child, num_common(child.keys, names)
            names = names[count:] if count == len(at.chunks) else []
            yield at, count

    def shared(self, path: Path) -> tuple[tuple[int, int], ...]:
        """(number, chunks) of the path's segments. Sorting paths by this makes neighbours of paths with a common
        prefix. Empty after retention has packed the path.
        """
        now = self.num_divided, path.num_shared
        if path.shared[0] != now:
            segments = path.segments if path.num_shared else ()
            path.shared = now, tuple((segment.number, len(segment.chunks)) for segment in segments)
        return path.shared[1]

    def segments(self) -> Iterator[Segment]:
        """Every segment, parents first."""
        todo = list(self._root.children.values())
        while todo:
            segment = todo.pop()
            yield segment
            todo.extend(segment.children.values())

    def check(self) -> None:
        """Proves the invariants."""
        counted = TreeCounts(self.shape)
        for segment in self.segments():
            parent = segment.parent
            assert not segment.is_dropped, "a dropped segment is in the tree"
            assert parent is not None and segment.start == parent.end, "a segment does not begin where its parent ends"
            assert parent.children[segment.keys[0]] is segment, "a segment is not found by its first chunk"
            assert parent.parent is None or (segment.locks <= parent.locks).all(), (
                "a segment is locked and its parent is not"
            )
            below = sum(child.pins for child in segment.children.values())
            assert segment.pins == below + (segment.pinned_until > 0), "pins are not those below and its own"
            counted._count(segment, 1)
        for name, value in vars(counted).items():
            assert np.array_equal(getattr(self, name), value), f"{name}: {getattr(self, name)} counted, {value} there"

    def _follow(self, path: Path, at: Segment, keys: list[bytes]) -> Iterator[Segment]:
        """Locks the segments after one that match the keys. Divides the last one where the keys differ."""
        for segment, count in self.match(keys, at):
            at = self._divide(segment, count) if count < len(segment.chunks) else segment
            self._count(at, -1)
            at.users += 1
            self.num_uses += 1
            at.last_use, at.used_at = self.num_uses, self.now
            at.priority = max(at.priority, path.priority)
            if self.lifetime_of(path) > self.lifetime_of(at):
                at.lifetime = path.lifetime
            self._count(at, 1)
            yield at

    def _add(self, at: Segment, path: Path, keys: ChunkKeys, chunks: Int32s) -> Segment:
        """Puts chunks after a segment: at its end if it has no child and no other user so far, else as a child."""
        first, end = at.end, at.end + len(chunks)
        new = keys.first(end)[first:]
        is_own = at is path.tip and (at.users, at.hits, at.computed) == (1, 0, 1)
        if is_own and not at.children and not at.pins and not len(at.attached):
            self._count(at, -1)
            at.tokens, at.keys = keys.tokens(at.start, end), at.keys + new
            at.chunks = np.concatenate((at.chunks, chunks))
            self._count(at, 1)
            return at
        self.num_uses += 1
        child = Segment(
            keys.tokens(first, end),
            new,
            chunks.copy(),
            first,
            next(self._numbers),
            at,
            keys.namespace,
            last_use=self.num_uses,
            used_at=self.now,
            priority=path.priority,
            lifetime=path.lifetime,
            users=1,
        )
        at.children[new[0]] = child
        self._count(child, 1)
        return child

    def _divide(self, segment: Segment, count: int) -> Segment:
        """Splits a segment after `count` chunks and returns the new front. The segment itself becomes the back, so that
        paths keep it as their tip.
        """
        self.num_divided += 1
        parent, cut = segment.parent, count * PAGE_TOKENS
        assert parent is not None and 0 < count < len(segment.chunks), f"{count} of {len(segment.chunks)} chunks"
        self._count(segment, -1)
        front = replace(
            segment,
            tokens=segment.tokens[:cut],
            keys=segment.keys[:count],
            chunks=segment.chunks[:count],
            number=next(self._numbers),
            children={segment.keys[count]: segment},
            pinned_until=0.0,
            unread=None if segment.unread is None else segment.unread.copy(),
            attached=NO_ROWS,
        )
        parent.children[front.keys[0]] = front
        segment.tokens, segment.keys = segment.tokens[cut:], segment.keys[count:]
        segment.chunks = segment.chunks[count:]
        segment.start, segment.parent = front.end, front
        self._count(front, 1)
        self._count(segment, 1)
        return front

    def _drop(self, leaf: Segment, num_kept: int) -> DroppedChunks:
        """Drops the chunks of an evictable leaf after the first `num_kept`; the whole leaf if that is 0."""
        rows = leaf.chunks[num_kept:]
        if len(leaf.attached):
            rows = np.concatenate((rows, leaf.attached))
        identity = leaf.identity.part(num_kept, len(leaf.keys))
        dropped_chunks = DroppedChunks(identity, rows, len(leaf.attached), leaf.lifetime)
        self._count(leaf, -1)
        leaf.attached = NO_ROWS
        if num_kept:
            leaf.chunks, leaf.keys = leaf.chunks[:num_kept], leaf.keys[:num_kept]
            leaf.tokens = leaf.tokens[: num_kept * PAGE_TOKENS]
            self._count(leaf, 1)
            return dropped_chunks
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.keys[0]]
        leaf.is_dropped = True  # it keeps its parent, for paths that still read it
        self._order.offer(parent, self.num_chunks)
        return dropped_chunks
