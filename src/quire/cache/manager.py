"""The cache manager: what each sequence holds, what may be admitted, what must wait. Knows sequences and chunks, not
batches or text.

Admission reserves the whole prompt and one chunk of growth for every running sequence. A reservation is a count, not
pages: pages are taken when they are about to be written, so a sequence never holds what it does not use, and the counts
keep a growing one from taking what an admitted prompt was promised.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from quire.cache.page import PAGE_TOKENS
from quire.cache.prefixes import explain
from quire.cache.segment import ChunkTable, Path
from quire.cache.tree import PrefixTree

log = logging.getLogger("quire")

PINNED_SHARE = 0.5
"""Share of the arena that pins may keep: the rest goes on serving everybody."""


class Holder(Protocol):
    """What the manager needs to know of a sequence."""

    path: Path

    @property
    def namespace(self) -> Hashable:
        """What must be equal for two sequences to share pages."""
        ...

    num_preemptions: int

    @property
    def reads_cache(self) -> bool:
        """Whether its prompt may be matched; not if every prompt row is wanted."""
        ...

    @property
    def token_ids(self) -> list[int]:
        """Prompt and generated tokens so far."""
        ...


def chunks_of(num_tokens: int) -> int:
    """Chunks that hold so many tokens, the last perhaps open."""
    return -(-num_tokens // PAGE_TOKENS)


@dataclass(frozen=True, slots=True)
class Admission:
    """What an admitted sequence starts with: tokens found in the cache, and chunks reserved for it in all."""

    cached_tokens: int
    reserved_chunks: int


class CacheManager:
    """Hands out chunks and takes them back. Invariant: chunks of live paths + chunks of the tree + free chunks = all
    chunks; `check` proves it.

    table     the chunks of the arena
    tree      what is shared and what stays cached; None: every sequence has its own chunks, free when it ends
    lifetime  seconds after which the tree drops what nobody used; None: it stays until its memory is wanted
    """

    def __init__(self, table: ChunkTable, tree: PrefixTree | None, lifetime: float | None = None) -> None:
        self.table = table
        self.tree = tree
        self.lifetime = lifetime
        self._live: dict[Holder, int] = {}  # holder -> chunks it was promised for its prompt
        self._bytes_peak = 0
        self._refused: object = None  # who was last refused, and what it depended on

    def admit(self, holder: Holder) -> Admission | None:
        """Gives the sequence a path and reserves room for its tokens, or returns None and changes nothing if it must
        wait.
        """
        tokens = holder.token_ids
        tree = (self.tree.num_uses, self.tree.num_chunks) if self.tree is not None else None
        state = holder, len(self._live), self._available(), self._promised(), tree
        if state == self._refused:
            return None
        while (need := self._fits(holder)) is None:
            # Alone, it would wait for ever on what is pinned: nobody is there who could end and make room.
            if self._live or self.tree is None or (given_up := self.tree.unpin_oldest()) is None:
                self._refused = state
                return None
            log.warning(
                "the pin of a prefix of %d tokens is given up: a request of %d tokens needs more memory than the pins"
                " leave",
                given_up.end,
                len(tokens),
            )
        self._refused = None
        path = Path()
        if self.tree is not None and holder.reads_cache:
            self.tree.extend(holder.namespace, path, tokens, is_hit=not holder.num_preemptions)
        path.num_sealed = path.num_shared
        path.num_tokens = path.num_shared * PAGE_TOKENS
        holder.path = path
        self._live[holder] = chunks_of(len(tokens))
        self._note_peak()
        return Admission(path.num_tokens, need)

    def _fits(self, holder: Holder) -> int | None:
        """Chunks to reserve for a sequence beyond those the tree has for it, or None if they are not there. Looks
        without taking: who waits is no sharer, and has no hits.
        """
        need, taken = chunks_of(len(holder.token_ids)), 0
        if self.tree is not None and holder.reads_cache:
            limit = (len(holder.token_ids) - 1) // PAGE_TOKENS
            for segment, count in self.tree.walk(holder.namespace, holder.token_ids, limit):
                need -= count
                taken += count * segment.is_idle
        growth = len(self._live) + 1 if self._live else 0
        return need if self._available() - taken - self._promised() >= need + growth else None

    def match_again(self, holder: Holder) -> int:
        """Takes what others have put into the tree since: tokens the sequence need not compute. Only between slices
        that end on a chunk boundary.
        """
        path = holder.path
        if self.tree is None or not holder.reads_cache or path.num_chunks != path.num_shared:
            return 0
        found = self.tree.extend(holder.namespace, path, holder.token_ids, is_hit=not holder.num_preemptions)
        path.num_sealed = path.num_shared
        path.num_tokens = path.num_shared * PAGE_TOKENS
        return found * PAGE_TOKENS

    def pin(self, holder: Holder, num_tokens: int, seconds: float) -> bool:
        """Keeps the whole chunks of the sequence's first `num_tokens` tokens, all computed, for so long from now.
        False, and nothing kept, if pins would then hold more than `PINNED_SHARE` of the arena.
        """
        count = num_tokens // PAGE_TOKENS
        if self.tree is None or count == 0:
            return False
        if not self.may_pin(holder.namespace, holder.token_ids[:num_tokens]):
            return False
        self.tree.pin(holder.path, count, self.tree.now + seconds)
        return True

    def unpin(self, namespace: Hashable, tokens: Sequence[int]) -> int:
        """Ends the pins of a prompt and of what it begins with; returns how many."""
        return 0 if self.tree is None else self.tree.unpin(namespace, tokens)

    def may_pin(self, namespace: Hashable, tokens: Sequence[int]) -> bool:
        """Whether pins have room for the whole chunks of these tokens."""
        assert self.tree is not None
        count = len(tokens) // PAGE_TOKENS
        pinned = sum(found for segment, found in self.tree.walk(namespace, tokens, count) if segment.pins)
        return self.tree.num_pinned + count - pinned <= self.max_pinned

    def tick(self, now: float) -> None:
        """Moves the clock of lifetimes on: pins end, and what is too old is dropped."""
        if self.tree is not None:
            self.tree.now = now
            self.table.give(self.tree.expire(self.lifetime))

    def explain(self, holder: Holder) -> str:
        """Why a sequence finds in the cache what it finds, in a sentence."""
        if self.tree is None:
            return "cache.share is off"
        if not holder.reads_cache:
            return "log-probabilities of the prompt are wanted, so all of it is computed"
        return explain(self.tree, holder.namespace, holder.token_ids)

    def next_chunk(self, holder: Holder) -> Hashable:
        """What the next whole chunk of a prompt is known by, so that two sequences about to compute the same one can
        be told; None where it is not to be shared.
        """
        path = holder.path
        start = path.num_tokens
        if (
            self.tree is None
            or not holder.reads_cache
            or path.num_chunks != path.num_shared
            or start + PAGE_TOKENS >= len(holder.token_ids)
        ):
            return None
        return holder.namespace, id(path.tip), tuple(holder.token_ids[start : start + PAGE_TOKENS])

    def extend(self, holder: Holder, num_tokens: int) -> bool:
        """Makes room for the sequence's first `num_tokens` tokens; False, with nothing changed, if that would take what
        others were promised.
        """
        path = holder.path
        need = chunks_of(num_tokens) - path.num_chunks
        if need <= 0:
            return True
        if self._available() - self._promised(apart_from=holder) < need:
            return False
        codec = self.table.open_codec
        missing = need - self.table.available(codec)
        if missing > 0:
            assert self.tree is not None
            self.table.give(self.tree.evict(missing))
        path.append(self.table.take(need, codec))
        self._note_peak()
        return True

    def commit(self, holder: Holder, num_tokens: int) -> None:
        """The first `num_tokens` tokens are now stored; chunks they fill are sealed, and the tree gets them. Dense
        pages need no encoding: sealing is a promise not to write.
        """
        path = holder.path
        assert path.num_tokens <= num_tokens <= path.num_chunks * PAGE_TOKENS, (
            f"{num_tokens} tokens in {path.num_chunks} chunks"
        )
        path.num_tokens = num_tokens
        if num_tokens // PAGE_TOKENS == path.num_sealed:
            return
        first, path.num_sealed = path.num_sealed, num_tokens // PAGE_TOKENS
        if self.tree is not None:
            tokens = np.array(holder.token_ids[first * PAGE_TOKENS : path.num_sealed * PAGE_TOKENS], np.int32)
            self.table.give(self.tree.publish(holder.namespace, path, tokens))

    def shared(self, holder: Holder) -> tuple[tuple[int, int], ...]:
        """See PrefixTree.shared; nothing without a tree."""
        return () if self.tree is None else self.tree.shared(holder.path)

    def release(self, holder: Holder) -> None:
        """The sequence ends or is preempted: its locks are undone, its own chunks are free; what it gave to the tree
        stays there.
        """
        path = holder.path
        self.table.give(path.private)
        if self.tree is not None:
            self.tree.release(path)
        del self._live[holder]
        holder.path = Path()

    def stats(self) -> dict[str, int]:
        """Bytes of the one arena: total = used by live sequences + cached + free; the peak is of used. Of the bytes
        cached or used some are pinned; saved are those that live sequences would take on top, did they share nothing.
        """
        total, cached = self.table.pool.num_bytes, self._bytes_cached
        chunk_bytes, tree = self.chunk_bytes, self.tree
        # Others may ask while the engine works: of what changes meanwhile, what was there is good enough.
        read = sum(holder.path.num_shared for holder in list(self._live))
        return {
            "bytes_total": total,
            "bytes_used": self.table.pool.bytes_out - cached,
            "bytes_cached": cached,
            "bytes_free": total - self.table.pool.bytes_out,
            "bytes_peak": self._bytes_peak,
            "bytes_pinned": 0 if tree is None else tree.num_pinned * chunk_bytes,
            "bytes_saved": 0 if tree is None else max(0, read - tree.num_read) * chunk_bytes,
            "bytes_evicted": 0 if tree is None else tree.num_evicted * chunk_bytes,
        }

    def check(self) -> None:
        """Proves the invariant of the manager, the tree, the table and the pool."""
        self.table.check()
        held = [int(chunk) for holder in self._live for chunk in holder.path.private]
        if self.tree is not None:
            self.tree.check()
            held += [int(chunk) for _, segment in self.tree.segments() for chunk in segment.chunks]
            for holder in self._live:
                path = holder.path
                shared = [chunk for segment in path.segments for chunk in segment.chunks.tolist()]
                assert shared == path.chunks[: path.num_shared].tolist(), "a path does not read the tree's chunks"
        assert len(set(held)) == len(held), "a chunk has two owners"
        assert self.table.num_taken == len(held), f"leak: {self.table.num_taken} chunks taken, {len(held)} held"

    @property
    def max_pinned(self) -> int:
        """Chunks that pins may keep in all."""
        return int(self.table.capacity * PINNED_SHARE)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one dense chunk's pages."""
        return self.table.pages_per_chunk * self.table.open_codec.page_bytes

    @property
    def _bytes_cached(self) -> int:
        return 0 if self.tree is None else (self.tree.num_chunks - self.tree.num_read) * self.chunk_bytes

    def _note_peak(self) -> None:
        self._bytes_peak = max(self._bytes_peak, self.table.pool.bytes_out - self._bytes_cached)

    def _available(self) -> int:
        """Chunks that are free or would be after eviction."""
        return self.table.available(self.table.open_codec) + (0 if self.tree is None else self.tree.num_idle)

    def _promised(self, apart_from: Holder | None = None) -> int:
        """Chunks of admitted prompts that are not taken yet."""
        return sum(
            max(0, reserved - holder.path.num_chunks)
            for holder, reserved in self._live.items()
            if holder is not apart_from
        )
