"""The prefix tree: which sealed chunks may be read by a request that starts with the same tokens (ChunkAttention,
section 3.1).

A radix tree over chunks of 64 tokens, one root for each namespace; a node is a segment. Depth is position, so equal
tokens at equal positions after equal tokens are one copy. Live paths lock their segments, from the root to their tip;
what nobody locks stays cached until memory is wanted, and then goes from the leaves, longest unused first.

Differs from the paper: segments of several chunks in place of nodes of one, one tree for all layers, and finished
sequences stay.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from quire.cache.page import PAGE_TOKENS
from quire.cache.segment import Path, Segment


@dataclass
class PrefixTree:
    """Segments by namespace and tokens. Invariants (`check`): a segment begins where its parent ends; whoever locks a
    segment locks its parent;
    num_idle counts the chunks of segments that nobody locks.

    shape       (L, H) of the locks
    num_chunks  chunks the tree holds
    version     changes whenever a live path's segments do
    num_idle    those of them that no live path reads: they can be evicted
    """

    shape: tuple[int, int]
    num_chunks: int = 0
    num_idle: int = 0
    version: int = 0
    _roots: dict[Hashable, Segment] = field(default_factory=dict)
    _clock: int = 0
    _names: int = 0
    _leaves: list[tuple[int, int, Segment]] = field(default_factory=list)  # a heap; stale entries are skipped
    _pushes: int = 0

    def extend(self, namespace: Hashable, path: Path, tokens: Sequence[int]) -> int:
        """Carries a path without chunks of its own on, as far as the tree holds the tokens, and locks what it takes.
        Returns the chunks it took.

        Never beyond floor((len(tokens) - 1) / 64) chunks in all: the last token is computed, or there would be no
        logits.
        """
        assert path.num_chunks == path.num_shared, "a path with chunks of its own cannot take others"
        at = path.tip or self._roots.get(namespace)
        first, limit = path.num_shared, (len(tokens) - 1) // PAGE_TOKENS
        if at is None or first >= limit:
            return 0
        rest = np.array(tokens[first * PAGE_TOKENS : limit * PAGE_TOKENS], np.int32)
        while len(rest) and (child := at.children.get(rest[:PAGE_TOKENS].tobytes())) is not None:
            count = _common_chunks(child.tokens, rest)
            at = self._divide(child, count) if count < len(child.chunks) else child
            self._take(at)
            path.append(at.chunks)
            rest = rest[count * PAGE_TOKENS :]
        if path.num_chunks > first:
            path.tip, path.num_shared = at, path.num_chunks
        return path.num_chunks - first

    def publish(self, namespace: Hashable, path: Path, tokens: NDArray[np.int32]) -> NDArray[np.int32]:
        """Gives the tree the chunks a path has sealed: those after its shared ones that hold `tokens`, int32 [n *
        64]. They are locked for the path
        and shared from now on.

        Where the tree has the same tokens already the path takes the tree's chunks; returns the ids of its own that
        it needs no longer.
        """
        first, count = path.num_shared, len(tokens) // PAGE_TOKENS
        at = path.tip or self._roots.get(namespace)
        if at is None:
            none = np.empty(0, np.int32)
            at = self._roots[namespace] = Segment(none, none, 0, np.zeros(self.shape, np.int32))
        spare = path.chunks[first : first + count].copy()
        taken = 0
        while (
            taken < count
            and (child := at.children.get(tokens[taken * PAGE_TOKENS :][:PAGE_TOKENS].tobytes())) is not None
        ):
            common = _common_chunks(child.tokens, tokens[taken * PAGE_TOKENS :])
            at = self._divide(child, common) if common < len(child.chunks) else child
            self._take(at)
            taken += common
        if taken:
            held = [segment.chunks for segment in Path(at).segments]
            path.replace(first, np.concatenate(held)[first : first + taken])
        if taken < count:
            at = self._add(at, path, tokens[taken * PAGE_TOKENS :], path.chunks[first + taken : first + count].copy())
        path.tip, path.num_shared = at, first + count
        return spare[:taken]

    def release(self, path: Path) -> None:
        """The path's sequence is done with it: its locks are undone. What nobody else locks stays, cached."""
        self._clock += 1
        for segment in path.segments:
            segment.locks -= 1
            assert segment.locks.min() >= 0, "unlocked more often than locked"
            segment.last_use = self._clock
            if not segment.locks.any():
                self.num_idle += len(segment.chunks)
        if path.tip is not None:
            self._offer(path.tip)
        path.tip, path.num_shared = None, 0

    def evict(self, count: int) -> NDArray[np.int32]:
        """Drops `count` chunks that nobody locks, or all of these: leaves first, longest unused first, each from its
        end. Returns their ids,
        which the tree no longer knows.
        """
        dropped: list[NDArray[np.int32]] = []
        while count > 0 and self._leaves:
            last_use, _, leaf = heapq.heappop(self._leaves)
            if leaf.parent is None or leaf.last_use != last_use or leaf.children or leaf.locks.any():
                continue
            kept = max(0, len(leaf.chunks) - count)
            gone = leaf.chunks[kept:]
            dropped.append(gone)
            count -= len(gone)
            self.num_chunks -= len(gone)
            self.num_idle -= len(gone)
            if kept:
                leaf.chunks, leaf.tokens = leaf.chunks[:kept], leaf.tokens[: kept * PAGE_TOKENS]
                self._offer(leaf)
                continue
            parent = leaf.parent
            del parent.children[leaf.key]
            leaf.parent = None
            self._offer(parent)
        return np.concatenate(dropped) if dropped else np.empty(0, np.int32)

    def shared(self, path: Path) -> tuple[tuple[int, int], ...]:
        """(name, chunks) of the path's segments: paths whose tuples begin alike share as much, and sorted by them
        stand side by side.
        """
        version, found = path.shared
        if version != self.version:
            found = tuple((segment.name, len(segment.chunks)) for segment in path.segments)
            path.shared = self.version, found
        return found

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
        num_chunks = num_idle = 0
        for _, segment in self.segments():
            parent = segment.parent
            assert parent is not None and segment.start == parent.end, "a segment does not begin where its parent ends"
            assert parent.children[segment.key] is segment, "a segment is not found by its first chunk"
            assert parent.parent is None or (segment.locks <= parent.locks).all(), (
                "a segment is locked and its parent is not"
            )
            num_chunks += len(segment.chunks)
            num_idle += 0 if segment.locks.any() else len(segment.chunks)
        assert (num_chunks, num_idle) == (self.num_chunks, self.num_idle), (
            f"{num_chunks} chunks, {num_idle} idle; counted {self.num_chunks}, {self.num_idle}"
        )

    def _take(self, segment: Segment) -> None:
        if not segment.locks.any():
            self.num_idle -= len(segment.chunks)
        segment.locks += 1
        self.version += 1
        self._clock += 1
        segment.last_use = self._clock

    def _add(self, at: Segment, path: Path, tokens: NDArray[np.int32], chunks: NDArray[np.int32]) -> Segment:
        """Puts chunks after a segment: at its end where the path is its only reader and nothing follows, else as a
        child.
        """
        self.num_chunks += len(chunks)
        if at is path.tip and not at.children and at.locks.max() == 1:
            at.tokens = np.concatenate((at.tokens, tokens))
            at.chunks = np.concatenate((at.chunks, chunks))
            self.version += 1
            return at
        self._clock += 1
        locks = np.ones(self.shape, np.int32)
        child = Segment(tokens, chunks, at.end, locks, self._name(), at, last_use=self._clock)
        at.children[child.key] = child
        return child

    def _name(self) -> int:
        self.version += 1
        self._names += 1
        return self._names

    def _divide(self, segment: Segment, count: int) -> Segment:
        """Splits a segment after `count` chunks and returns the front. The back is the segment itself, which paths
        that read it go on to hold.
        """
        parent, cut = segment.parent, count * PAGE_TOKENS
        assert parent is not None and 0 < count < len(segment.chunks), f"{count} of {len(segment.chunks)} chunks"
        front = Segment(
            segment.tokens[:cut],
            segment.chunks[:count],
            segment.start,
            segment.locks.copy(),
            self._name(),
            parent,
            last_use=segment.last_use,
        )
        parent.children[front.key] = front
        segment.tokens, segment.chunks, segment.start, segment.parent = (
            segment.tokens[cut:],
            segment.chunks[count:],
            front.end,
            front,
        )
        front.children[segment.key] = segment
        return front

    def _offer(self, segment: Segment) -> None:
        """Notes a segment that may now be evicted."""
        if segment.parent is None or segment.children or segment.locks.any():
            return
        if len(self._leaves) > 2 * self.num_chunks + 64:
            # Entries that eviction never met: a server that never runs short would collect them for ever.
            current = {id(leaf): leaf for _, leaf in self.segments() if not leaf.children and not leaf.locks.any()}
            self._leaves = [(leaf.last_use, number, leaf) for number, leaf in enumerate(current.values())]
            heapq.heapify(self._leaves)
        self._pushes += 1
        heapq.heappush(self._leaves, (segment.last_use, self._pushes, segment))


def _common_chunks(left: NDArray[np.int32], right: NDArray[np.int32]) -> int:
    """Leading chunks in which two runs of tokens are equal."""
    count = min(len(left), len(right)) // PAGE_TOKENS
    differ = (left[: count * PAGE_TOKENS] != right[: count * PAGE_TOKENS]).reshape(count, PAGE_TOKENS).any(axis=1)
    return int(differ.argmax()) if differ.any() else count
