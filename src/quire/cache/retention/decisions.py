"""Which tokens each head keeps: the settings, a model's marks, and the two moments of a request when they are asked.

`policies` and `budget` have the rules and `retained` the pages. What is decided depends on the request's tokens and
these settings alone, never on what the cache holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from quire.cache.arrays import Bools, Floats, Int32s, Int64s
from quire.cache.ledger import PAGE_TOKENS
from quire.cache.retention.budget import allocate, scores_of
from quire.cache.retention.policies import Chain, decide, keep_on, occurrences
from quire.cache.retention.policies import Decided as Decided
from quire.cache.retention.retained import Retained, words_of

PROFILED_SHARE = 4
"""Of a short prompt only this part of the rows is profiled, the last ones, so that it may be found in the cache too."""

RANKED = Chain(0.0, 0.0, 0.0, ("frequent",))
"""What all heads go by within a budget: tokens are kept for how much they are looked at, and nothing else is asked."""

Recover = Callable[[NDArray[np.uint64], Int64s], NDArray[np.float64]]
"""Recovery of every head, float64 [L, H], over the last rows of the prompt, which keeps the columns of a mask, uint64
[L, H, chunks], and so many of the last tokens, int64 [L, H]."""


@dataclass(frozen=True)
class PageBytes:
    """What a head's pages take.

    sealed  int [L, H]
    beside  what stands beside each of those that are packed: sums or peaks, and positions where chunks are encoded
    open    of every head
    sums    of them, what stands beside an open page
    """

    sealed: Int64s
    beside: int
    open: int
    sums: int


@dataclass(frozen=True)
class Retention:
    """How a model's requests retain.

    chain         members, threshold and shares; with a budget `RANKED`
    special       markers, each of one token or more in a row
    punctuation   token ids
    profile_rows  last rows of a prompt, at most, over which `local` is judged, or that rank tokens for a budget
    num_first     first tokens of a sequence that count as special whatever they are: attention rests on them
    budget        share of a sequence's bytes that is kept, whatever attention that recovers
    page_bytes    of the pages in which sequences are kept; only a budget needs them
    """

    chain: Chain
    special: Sequence[Sequence[int]] = ()
    punctuation: frozenset[int] = frozenset()
    profile_rows: int = 256
    num_first: int = 1
    budget: float | None = None
    page_bytes: PageBytes | None = None

    def __post_init__(self) -> None:
        assert self.budget is None or self.chain is RANKED, "a budget goes by no chain"

    @cached_property
    def _punctuation(self) -> Int64s:
        return np.array([*self.punctuation], np.int64)

    def num_profiled(self, num_prompt: int) -> int:
        """Last rows of a prompt that are profiled together: they are computed even if they are cached."""
        return min(self.profile_rows, -(-num_prompt // PROFILED_SHARE))

    def num_reusable(self, num_prompt: int) -> int:
        """Chunks at the beginning of a prompt that need not be computed if they, and with a threshold their sums, are
        cached.
        """
        return (num_prompt - self.num_profiled(num_prompt)) // PAGE_TOKENS

    def marks(self, tokens: Sequence[int]) -> Mapping[str, Bools]:
        """Which tokens are special, and which punctuation, bool [n] each."""
        punctuation = np.isin(np.asarray(tokens, np.int64), self._punctuation)
        return {"special": self._special(tokens), "punctuation": punctuation}

    def _special(self, tokens: Sequence[int]) -> Bools:
        special = occurrences(tokens, self.special)
        special[: self.num_first] = True
        return special

    def decide(self, tokens: Sequence[int], sums: Floats, recover: Recover | None) -> Decided:
        """What to keep of a prompt. Tokens of its open chunk are not dropped yet.

        sums     float32 [L, H, n], the attention each of its tokens has had from all its rows, or its peak
        recover  None only with a budget: then nothing says what is recovered
        """
        n, *shape = len(tokens), *sums.shape[:-1]
        end, full = n // PAGE_TOKENS * PAGE_TOKENS, self.chain.full
        if self.budget is None:
            assert recover is not None
            found = decide(
                self.chain,
                self.marks(tokens),
                sums.astype(np.float64),
                lambda columns, window: recover(words_of(columns), np.full(shape, window)),
            )
            found.kept[..., end:] = True
            return found
        policies, kept = np.full(shape, full * (self.budget == 1.0), np.uint8), np.ones(sums.shape, bool)
        recovery = np.full((*shape, full + 1), np.nan)
        if self.budget == 1.0:
            recovery[..., full] = 1.0
        else:
            positions = np.broadcast_to(np.arange(end, dtype=np.int32), (*shape, end))
            kept[..., :end] = self._allocated(tokens, sums[..., :end], positions)
            if recover is not None:
                recovery[..., 0] = recover(words_of(kept), np.zeros(shape, np.int64))
        return Decided(policies, kept, recovery, self.chain, self.budget)

    def _allocated(self, tokens: Sequence[int], peaks: Floats, positions: Int32s) -> Bools:
        """What heads keep of sealed tokens, bool [L, H, slots] as the others are. Until the next chunk is sealed the
        pages, what stands beside them and the open chunk stay within the budget.
        """
        page_bytes = self.page_bytes
        assert self.budget is not None and page_bytes is not None
        sealed = page_bytes.sealed.ravel()
        num_heads, num_chunks = len(sealed), len(tokens) // PAGE_TOKENS
        # There is an open chunk, or the next token begins one; it is not dropped.
        most = self.budget * (int(sealed.sum()) * num_chunks + num_heads * page_bytes.open)
        most -= num_heads * (page_bytes.open + page_bytes.sums)
        end = num_chunks * PAGE_TOKENS
        # A marker may go on in the open chunk.
        special, at = self._special(tokens)[:end], positions.reshape(num_heads, -1)
        scores = scores_of(peaks.reshape(at.shape), at, end)
        return allocate(scores, at, special, end, sealed + page_bytes.beside, PAGE_TOKENS, most).reshape(peaks.shape)

    def keep_on(self, retained: Retained, tokens: Sequence[int], sums: Floats) -> Bools:
        """What to keep of a sequence whose tokens are all sealed now, bool [L, H, slots].

        sums  float32 [L, H, slots], the attention that the tokens in these slots have had, or its peak
        """
        positions = retained.positions.reshape(sums.shape)
        if self.budget is not None:
            return self._allocated(tokens, sums, positions)
        marks, num_prompt = self.marks(tokens), retained.num_prompt
        return keep_on(retained.chain, retained.policies, positions, marks, sums, num_prompt, len(tokens))
