"""Which tokens each head keeps: the settings, a model's marks, and the two moments of a request when they are asked.

`policies` has the rules and `retained` the pages. What is decided depends on the request's tokens and these settings
alone, never on what the cache holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.cache.codecs.sums import SumsCodec
from quire.cache.page import PAGE_TOKENS
from quire.cache.policies import Chain, LocalRecovery, Mask, decide, keep_on, occurrences, solve
from quire.cache.retained import Retained
from quire.cache.retention_report import RetentionReport

PROFILED_SHARE = 4
"""Of a short prompt only this part of the rows is profiled, the last ones, so that it may be found in the cache too."""

Recover = Callable[[NDArray[np.uint64], NDArray[np.int64]], NDArray[np.float64]]
"""Recovery of every head, float64 [L, H], over the last rows of the prompt, which keeps the columns of a mask, uint64
[L, H, chunks], and so many of the last tokens, int64 [L, H]."""


@dataclass(frozen=True)
class Decided:
    """What heads keep of a prompt of n tokens, and why.

    policies  uint8 [L, H]
    kept      bool [L, H, n]
    recovery  float64 [L, H, chain + 1]; nan for what was not tried
    chain     by which it was decided
    """

    policies: NDArray[np.uint8]
    kept: NDArray[np.bool_]
    recovery: NDArray[np.float64]
    chain: Chain

    @property
    def kept_fraction(self) -> float:
        """Of all tokens of all heads."""
        return float(self.kept.mean())

    def report(self, bytes_full: int, bytes_kept: int) -> RetentionReport:
        """What was decided, to be shown, with the bytes of the prompt's pages before and after."""
        return RetentionReport(
            self.kept.shape[-1],
            self.chain.members,
            self.chain.threshold,
            self.chain.frequent,
            self.chain.local,
            self.policies,
            self.kept.sum(-1),
            self.recovery,
            bytes_full,
            bytes_kept,
        )

    def summary(self) -> str:
        """What was decided, in a line."""
        chain = self.chain
        counts = np.bincount(self.policies.reshape(-1), minlength=chain.full + 1)
        heads = ", ".join(
            f"{count} {name}" for count, name in zip(counts.tolist(), (*chain.members, "full"), strict=True) if count
        )
        return f"keeps {self.kept_fraction:.1%} of a prompt of {self.kept.shape[-1]} tokens; heads up to: {heads}"


@dataclass(frozen=True)
class Retention:
    """How a model's requests retain.

    chain         members, threshold and shares
    special       markers, each of one token or more in a row
    punctuation   token ids
    profile_rows  last rows of a prompt over which `local` is judged, at most
    num_first     first tokens of a sequence that count as special whatever they are: attention rests on them
    budget        share of a prompt's bytes that is kept, which the chain's threshold and shares are then solved for
    """

    chain: Chain
    special: Sequence[Sequence[int]] = ()
    punctuation: frozenset[int] = frozenset()
    profile_rows: int = 256
    num_first: int = 1
    budget: float | None = None
    _punctuation: NDArray[np.int64] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_punctuation", np.array(sorted(self.punctuation), np.int64))

    def num_profiled(self, num_prompt: int) -> int:
        """Last rows of a prompt that are profiled for `local`: they are computed even if they are cached."""
        return min(self.profile_rows, -(-num_prompt // PROFILED_SHARE))

    def num_reusable(self, num_prompt: int) -> int:
        """Chunks at the beginning of a prompt that need not be computed if they, and their sums, are cached."""
        return (num_prompt - self.num_profiled(num_prompt)) // PAGE_TOKENS

    def marks(self, tokens: Sequence[int]) -> Mapping[str, Mask]:
        """Which tokens are special, and which punctuation, bool [n] each."""
        special = occurrences(tokens, self.special)
        special[: self.num_first] = True
        return {"special": special, "punctuation": np.isin(np.asarray(tokens, np.int64), self._punctuation)}

    def decide(
        self, tokens: Sequence[int], sums: NDArray[np.float32], recover: Recover, page_bytes: NDArray[np.int32]
    ) -> Decided:
        """What to keep of a prompt.

        sums        float32 [L, H, n], the attention each of its tokens has had from all its rows
        page_bytes  int32 [L, H], of the pages it will be kept in
        """
        num_layers, num_heads, n = sums.shape
        shape = num_layers, num_heads

        def local_recovery(heads: NDArray[np.int64], columns: Mask, window: int) -> NDArray[np.float64]:
            kept = np.zeros((num_layers * num_heads, -(-n // PAGE_TOKENS) * PAGE_TOKENS), bool)
            kept[heads, :n] = columns
            bits = np.packbits(kept, axis=-1, bitorder="little").view("<u8").astype(np.uint64)
            return recover(bits.reshape(*shape, -1), np.full(shape, window, np.int64)).reshape(-1)[heads]

        chain, given = self.chain, (self.marks(tokens), sums.reshape(-1, n).astype(np.float64), n, local_recovery)
        if self.budget is not None:
            chain = self._solve(given, page_bytes.reshape(-1, 1).astype(np.int64), n)
        found = decide(chain, *given)
        return Decided(
            found.policies.reshape(shape), found.kept.reshape(*shape, n), found.recovery.reshape(*shape, -1), chain
        )

    def _solve(
        self, given: tuple[Mapping[str, Mask], NDArray[np.float64], int, LocalRecovery], page_bytes: Any, n: int
    ) -> Chain:
        """The chain whose sealed pages, sums and open chunk together keep to the budget. page_bytes int64 [heads, 1]"""
        assert self.budget is not None
        policies = np.arange(self.chain.full + 1, dtype=np.uint8)
        sums = self.has_sums(policies) * SumsCodec.page_bytes
        whole = self.budget * page_bytes.sum() * -(-n // PAGE_TOKENS)
        is_open = n % PAGE_TOKENS > 0
        # What is open is not dropped. Whether a head will need sums of it is not known: they are a hundredth.
        most = float(whole - is_open * page_bytes.sum())
        return solve(self.chain, self.budget, *given, page_bytes + sums, PAGE_TOKENS, most)

    def keep_on(self, retained: Retained, tokens: Sequence[int], sums: NDArray[np.float32]) -> Mask:
        """What to keep of a sequence whose tokens are all sealed now, bool [L, H, slots].

        sums  float32 [L, H, slots], the attention that what is in them has had
        """
        num_slots = retained.positions.shape[-1]
        kept = keep_on(
            retained.chain,
            retained.policies.reshape(-1),
            retained.positions.reshape(-1, num_slots),
            self.marks(tokens),
            sums.reshape(-1, num_slots),
            retained.num_prompt,
            len(tokens),
        )
        return kept.reshape(retained.positions.shape)

    def has_sums(self, policies: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Which heads go on needing the attention their tokens get."""
        if "frequent" not in self.chain.members:
            return np.zeros(policies.shape, bool)
        return (policies < self.chain.full) & (policies >= self.chain.members.index("frequent"))


@dataclass
class KeepRatio:
    """What requests kept of their prompts, to expect of the next ones. Knows the last `size` of them."""

    size: int = 256
    quantile: float = 0.9
    least: int = 8
    _seen: list[float] = field(default_factory=list)

    def learn(self, ratio: float) -> None:
        """One request kept this share of its pages."""
        self._seen = [*self._seen[-self.size + 1 :], ratio]

    @property
    def expected(self) -> float:
        """A share that only a tenth of the requests exceeded; 1 while too few are known."""
        if len(self._seen) < self.least:
            return 1.0
        return sorted(self._seen)[math.ceil(self.quantile * len(self._seen)) - 1]
