"""The cache manager: what each sequence holds, what may be admitted, what must wait. Knows sequences and chunks, not
batches or text.

Admission reserves the whole prompt and one chunk of growth for every running sequence. A reservation is a count, not
pages: pages are taken when
they are about to be written, so a sequence never holds what it does not use, and the counts keep a growing one from
taking what an admitted prompt
was promised.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from quire.cache.page import PAGE_TOKENS
from quire.cache.segment import ChunkTable, Path, Segment
from quire.cache.tree import PrefixTree


class Holder(Protocol):
    """What the manager needs to know of a sequence."""

    path: Path
    namespace: Hashable
    """What must be equal for two sequences to share pages."""

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
    """Hands out chunks and takes them back. Invariant: chunks of live paths + cached chunks + free chunks = all chunks;
    `check` proves it.

    table  the chunks of the arena
    tree   what is shared and what stays cached
    """

    def __init__(self, table: ChunkTable, tree: PrefixTree) -> None:
        self.table = table
        self.tree = tree
        self._live: dict[Holder, int] = {}  # holder -> chunks it was promised for its prompt
        self._bytes_used = 0
        self._bytes_peak = 0

    def admit(self, holder: Holder) -> Admission | None:
        """Gives the sequence a path and reserves room for its tokens, or returns None and changes nothing if it must
        wait.
        """
        tokens = holder.token_ids
        path = self.tree.match(holder.namespace, tokens) if holder.reads_cache else Path()
        need = chunks_of(len(tokens)) - path.num_chunks
        growth = len(self._live) + 1 if self._live else 0
        if self.table.available(self.table.open_codec) - self._promised() < need + growth:
            return None
        self.tree.lock(path)
        holder.path = path
        self._live[holder] = chunks_of(len(tokens))
        return Admission(path.num_tokens, need)

    def extend(self, holder: Holder, num_tokens: int) -> bool:
        """Makes room for the sequence's first `num_tokens` tokens; False, with nothing changed, if that would take what
        others were promised.
        """
        path = holder.path
        need = chunks_of(num_tokens) - path.num_chunks
        if need <= 0:
            return True
        codec = self.table.open_codec
        if self.table.available(codec) - self._promised(apart_from=holder) < need:
            return False
        path.append(self.table.take(need, codec))
        self._bytes_used += need * self.table.pages_per_chunk * codec.page_bytes
        self._bytes_peak = max(self._bytes_peak, self._bytes_used)
        return True

    def commit(self, holder: Holder, num_tokens: int) -> None:
        """The first `num_tokens` tokens are now stored; chunks they fill are sealed. Dense pages need no encoding:
        sealing is a promise not to write.
        """
        path = holder.path
        assert path.num_tokens <= num_tokens <= path.num_chunks * PAGE_TOKENS, (
            f"{num_tokens} tokens in {path.num_chunks} chunks"
        )
        path.num_tokens = num_tokens
        if num_tokens // PAGE_TOKENS == path.num_sealed:
            return
        first, path.num_sealed = path.num_sealed, num_tokens // PAGE_TOKENS
        start = first * PAGE_TOKENS
        tokens = np.array(holder.token_ids[start : path.num_sealed * PAGE_TOKENS], np.int32)
        locks = np.zeros(self.table.pages.shape[1:], np.int32)
        segment = Segment(tokens, path.chunks[first : path.num_sealed].copy(), start, locks)
        if self.tree.publish(holder.namespace, path, segment):
            self.tree.lock(Path([segment]))
            path.segments.append(segment)
            self._bytes_used -= self.table.bytes_of(segment.chunks)

    def release(self, holder: Holder) -> None:
        """The sequence ends or is preempted: its locks are undone, its own chunks are free."""
        path = holder.path
        private = path.private
        self._bytes_used -= self.table.bytes_of(private)
        self.table.give(private)
        self.tree.unlock(path)
        del self._live[holder]
        holder.path = Path()

    def stats(self) -> dict[str, int]:
        """Bytes of the one arena: total = used by live sequences + cached + free; the peak is of used."""
        total = self.table.pool.num_bytes
        cached = self.table.pool.bytes_out - self._bytes_used
        return {
            "bytes_total": total,
            "bytes_used": self._bytes_used,
            "bytes_cached": cached,
            "bytes_free": total - self._bytes_used - cached,
            "bytes_peak": self._bytes_peak,
        }

    def check(self) -> None:
        """Proves the invariant of the manager, the table and the pool."""
        self.table.check()
        held = [int(chunk) for holder in self._live for chunk in holder.path.private]
        assert len(set(held)) == len(held), "a chunk has two owners"
        used = sum(self.table.bytes_of(holder.path.private) for holder in self._live)
        assert used == self._bytes_used, f"{used} bytes held, {self._bytes_used} counted"
        assert self.table.num_taken == len(held), f"leak: {self.table.num_taken} chunks taken, {len(held)} held"

    def _promised(self, apart_from: Holder | None = None) -> int:
        """Chunks of admitted prompts that are not taken yet."""
        return sum(
            max(0, reserved - holder.path.num_chunks)
            for holder, reserved in self._live.items()
            if holder is not apart_from
        )
