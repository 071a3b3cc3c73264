"""Which tokens each head keeps: the settings, a model's markers, and the decisions of a request, one after its prompt
and one with every chunk it seals.

`policies` and `budget` have the rules, `retained` has the slots. A decision depends on the request's tokens and these
settings alone, never on the cache.
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
from quire.cache.retention.policies import PolicyChain, decide, occurrences, select_while_decoding
from quire.cache.retention.policies import RetentionDecision as RetentionDecision
from quire.cache.retention.retained import RetainedTokens, words_of

PROFILED_SHARE = 4
"""At most one row in 4 of a prompt is profiled, so that short prompts benefit from the cache too."""

RANKED = PolicyChain(0.0, 0.0, 0.0, ("frequent",))
"""The chain of all heads within a budget, which ranks tokens by the attention they get."""

Recover = Callable[[NDArray[np.uint64], Int64s], NDArray[np.float64]]
"""Recovery of every head over the last rows of the prompt, float64 [L, H]. The heads keep the columns of a mask, uint64
[L, H, chunks], and a number of last tokens before each row, int64 [L, H]."""


@dataclass(frozen=True)
class PageBytes:
    """Bytes of a head's pages.

    sealed  int64 [L, H], of a sealed page
    beside  int64 [L, H], additional bytes of a packed page: its sums or peaks, and its positions if chunks are encoded
    open    bytes of an open page
    sums    additional bytes of an open page: its sums
    """

    sealed: Int64s
    beside: int
    open: int
    sums: int


@dataclass(frozen=True)
class Retention:
    """The retention settings of a model's requests.

    chain         members, threshold and shares; with a budget `RANKED`
    special       markers, each of one token or more in a row
    punctuation   token ids
    profile_rows  number of last rows of a prompt, at most, that judge `local` or rank tokens for a budget
    num_first     number of first tokens of a sequence that are always special: they are attention sinks
    budget        share of a sequence's bytes that is kept, whatever attention it recovers; None: the threshold decides
    page_bytes    sizes of the pages in which sequences are kept; only a budget needs them
    """

    chain: PolicyChain
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
        """Number of last rows of a prompt that are profiled together. They are computed even if they are cached."""
        return min(self.profile_rows, -(-num_prompt // PROFILED_SHARE))

    def num_reusable(self, num_prompt: int) -> int:
        """Number of first chunks of a prompt that need not be computed if they are cached, with a threshold also their
        sums.
        """
        return (num_prompt - self.num_profiled(num_prompt)) // PAGE_TOKENS

    def marks(self, tokens: Sequence[int] | Int32s) -> Mapping[str, Bools]:
        """The tokens that are special and those that are punctuation, bool [n] each."""
        punctuation = np.isin(np.asarray(tokens, np.int64), self._punctuation)
        return {"special": self._special(tokens), "punctuation": punctuation}

    def _special(self, tokens: Sequence[int] | Int32s) -> Bools:
        special = occurrences(tokens, self.special)
        special[: self.num_first] = True
        return special

    def decide(self, tokens: Sequence[int], sums: Floats, recover: Recover | None) -> RetentionDecision:
        """Decides which tokens of a prompt to keep. Tokens of its open chunk are not dropped yet.

        sums     float32 [L, H, n], the attention that each of its tokens got from all its rows, or its peak
        recover  None only with a budget; the recovery is then unknown
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
        return RetentionDecision(policies, kept, recovery, self.chain, self.budget)

    def _allocated(self, tokens: Sequence[int] | Int32s, peaks: Floats, positions: Int32s) -> Bools:
        """The sealed tokens that heads keep, bool [L, H, slots] like the other arrays. Until it seals the next chunk,
        the sequence stays within the budget with its pages, their sums and positions, and its open chunk.
        """
        page_bytes = self.page_bytes
        assert self.budget is not None and page_bytes is not None
        sealed = page_bytes.sealed.ravel()
        num_heads, num_chunks = len(sealed), len(tokens) // PAGE_TOKENS
        # The open chunk counts in full: it exists, or the next token begins it.
        most = self.budget * (int(sealed.sum()) * num_chunks + num_heads * page_bytes.open)
        most -= num_heads * (page_bytes.open + page_bytes.sums)
        end = num_chunks * PAGE_TOKENS
        # A marker may continue in the open chunk.
        special, at = self._special(tokens)[:end], positions.reshape(num_heads, -1)
        scores = scores_of(peaks.reshape(at.shape), at, end)
        return allocate(scores, at, special, sealed + page_bytes.beside, PAGE_TOKENS, most).reshape(peaks.shape)

    def select_while_decoding(self, retained: RetainedTokens, tokens: Int32s, sums: Floats) -> Bools:
        """The tokens to keep of a sequence that has just sealed a chunk, bool [L, H, slots].

        sums  float32 [L, H, slots], the attention that the tokens in these slots got so far, or their peaks
        """
        positions = retained.positions.reshape(sums.shape)
        if self.budget is not None:
            return self._allocated(tokens, sums, positions)
        marks, num_prompt = self.marks(tokens), retained.num_prompt
        return select_while_decoding(retained.chain, retained.policies, positions, marks, sums, num_prompt, len(tokens))
