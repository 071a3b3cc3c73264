"""What retention has left of a path: which token is in which slot. Knows no pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.cache.arrays import Bools
from quire.cache.ledger import PAGE_TOKENS
from quire.cache.retention.policies import Chain


@dataclass
class Retained:
    """Tokens of the sealed rows of a path, by slot. Rows are the path's, in their order.

    chain      what was decided by: policies go by it for as long as the sequence lives
    policies   uint8 [L, H]
    num_prompt tokens of the prompt
    holds_last whether nothing moves into or out of the last row where all of it is kept
    positions  int32 [L, H, rows * 64], of the token in each slot; -1 where there is none that is kept
    in_place   bool [L, H, rows]: pages that are not written, for others may read them
    origins    int32 [rows]: which chunk of the sequence the row was
    """

    chain: Chain
    policies: NDArray[np.uint8]
    num_prompt: int
    holds_last: bool = False

    def __post_init__(self) -> None:
        shape = self.policies.shape
        self.positions = np.empty((*shape, 0), np.int32)
        self.in_place = np.empty((*shape, 0), bool)
        self.origins = np.empty(0, np.int32)

    @property
    def num_rows(self) -> int:
        """Rows of the path that are sealed."""
        return len(self.origins)

    @property
    def kept(self) -> NDArray[np.intp]:
        """Tokens kept in sealed rows, [L, H]."""
        return np.asarray(np.count_nonzero(self.positions >= 0, axis=-1))

    @property
    def stays(self) -> Bools:
        """Pages whose slots are left as they are, bool [L, H, rows]."""
        found = self.in_place
        if self.holds_last and self.num_rows:
            found = found.copy()
            whole = self.origins[-1] * PAGE_TOKENS + np.arange(PAGE_TOKENS)
            found[..., -1] |= (self.positions[..., -PAGE_TOKENS:] == whole).all(-1)
        return found

    def seal(self, first: int, end: int) -> None:
        """Adds rows for chunks [first, end) of the sequence, which are sealed: all their tokens are there."""
        shape, slots = self.policies.shape, np.arange(first * PAGE_TOKENS, end * PAGE_TOKENS, dtype=np.int32)
        self.positions = np.concatenate((self.positions, np.broadcast_to(slots, (*shape, len(slots)))), -1)
        self.in_place = np.concatenate((self.in_place, np.zeros((*shape, end - first), bool)), -1)
        self.origins = np.append(self.origins, np.arange(first, end, dtype=np.int32))

    def drop(self, kept: Bools) -> None:
        """Tokens outside `kept`, bool [L, H, rows * 64], are kept no longer."""
        self.positions = np.where(kept, self.positions, -1)

    def by_row(self, slots: NDArray[Any]) -> NDArray[Any]:
        """An array [L, H, rows * 64] as [L, H, rows, 64]."""
        return slots.reshape(*slots.shape[:-1], self.num_rows, PAGE_TOKENS)
