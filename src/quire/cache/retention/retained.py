"""What retention has left of a path: the token in each slot, and the plan to pack these tokens. Knows no page ids."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.cache.arrays import Bools, Int64s
from quire.cache.ledger import PAGE_TOKENS
from quire.cache.retention.policies import Chain
from quire.cache.segment import Segment

Slots = tuple[NDArray[np.intp], ...]
"""Layer, head, row and slot of m tokens, [m] each."""


@dataclass
class Retained:
    """Tokens of the sealed rows of a path, by slot. Rows are the path's, in the path's order.

    chain       by which the prompt was decided on; the policies go by it until the sequence ends
    policies    uint8 [L, H]
    num_prompt  tokens of the prompt
    holds_last  whether a head that keeps all of the last row keeps it there
    has_sums    bool [L, H]: heads that go on needing the attention their tokens get
    is_packed   bool [L, H]: heads that do not keep everything
    positions   int32 [L, H, rows, 64], of the token in each slot; -1 in a slot without a kept token
    in_place    bool [L, H, rows]: pages that are never written, because others may read them
    origins     int32 [rows]: the chunk of the sequence that the row was
    """

    chain: Chain
    policies: NDArray[np.uint8]
    num_prompt: int
    holds_last: bool = False

    def __post_init__(self) -> None:
        shape, chain = self.policies.shape, self.chain
        needs_sums = [chain.has(policy, "frequent") for policy in range(chain.full)]
        self.has_sums: Bools = np.array([*needs_sums, False])[self.policies]
        self.is_packed: Bools = self.policies < chain.full
        self.positions = np.empty((*shape, 0, PAGE_TOKENS), np.int32)
        self.in_place = np.empty((*shape, 0), bool)
        self.origins = np.empty(0, np.int32)

    @property
    def num_rows(self) -> int:
        """Rows of the path that are sealed."""
        return len(self.origins)

    @property
    def alive(self) -> Bools:
        """Slots that hold a kept token, bool [L, H, rows, 64]."""
        return self.positions >= 0

    @property
    def held(self) -> Bools:
        """Pages that hold a kept token, bool [L, H, rows]."""
        return np.asarray(self.alive.any(-1))

    @property
    def words(self) -> NDArray[np.uint64]:
        """The masks of its pages, uint64 [L, H, rows]; bit t says whether slot t holds a kept token."""
        return words_of(self.alive.reshape(*self.policies.shape, -1))

    @property
    def num_pages(self) -> Int64s:
        """Number of these pages, int64 [L, H]."""
        return np.asarray(self.held.sum(-1))

    @property
    def stays(self) -> Bools:
        """Pages whose slots stay as they are, bool [L, H, rows]."""
        found = self.in_place
        if self.holds_last and self.num_rows:
            found = found.copy()
            whole = self.origins[-1] * PAGE_TOKENS + np.arange(PAGE_TOKENS)
            found[..., -1] |= (self.positions[..., -1, :] == whole).all(-1)
        return found

    def rows_of(self, segment: Segment) -> Bools:
        """Rows that were chunks of a segment, bool [rows]."""
        at = self.origins * PAGE_TOKENS
        return np.asarray((at >= segment.start) & (at < segment.end))

    def seal(self, first: int, end: int) -> None:
        """Adds rows for the sequence's sealed chunks [first, end), with all their tokens."""
        chunks = np.arange(first, end, dtype=np.int32)
        tokens = chunks[:, None] * PAGE_TOKENS + np.arange(PAGE_TOKENS, dtype=np.int32)
        self.positions = np.concatenate((self.positions, np.tile(tokens, (*self.policies.shape, 1, 1))), 2)
        self.in_place = np.pad(self.in_place, ((0, 0), (0, 0), (0, len(chunks))))
        self.origins = np.append(self.origins, chunks)

    def drop(self, kept: Bools) -> None:
        """Drops the tokens outside `kept`, bool [L, H, rows * 64]."""
        self.positions[~kept.reshape(self.positions.shape)] = -1

    def targets(self, keeps_first: bool) -> Bools:
        """Pages that will hold a head's tokens once they are packed, bool [L, H, rows], without pages that stay.

        These are the last ones. Where memory is short, the tree evicts a prompt's end first, and a page that nobody
        else holds needs no copy.

        keeps_first  whether the first page is a target before them: exact first tokens stand beside it
        """
        num_tokens = np.where(self.stays, 0, self.alive.sum(-1))
        is_writable = num_tokens > 0
        needed = -(-num_tokens.sum(-1) // PAGE_TOKENS)
        rank = np.cumsum(is_writable[..., ::-1], -1)[..., ::-1]
        if keeps_first and self.num_rows:
            rank = rank + is_writable[..., :1]
            rank[..., 0] = 1
        return np.asarray(is_writable & (rank <= needed[..., None]))

    def fill(self, keeps_first: bool) -> tuple[Slots, Slots]:
        """Moves tokens into the holes of target pages. Returns the slots they came from and those they fill: of each
        head the first slots of its target pages hold all its tokens then, apart from those that stay.
        """
        is_target, is_moving = self.targets(keeps_first), self.alive & ~self.stays[..., None]
        index = (np.cumsum(is_target, -1)[..., None] - 1) * PAGE_TOKENS + np.arange(PAGE_TOKENS)
        is_filled = is_target[..., None] & (index < is_moving.sum((-2, -1), keepdims=True))
        holes, sources = np.nonzero(is_filled & ~self.alive), np.nonzero(is_moving & ~is_filled)
        assert all(map(np.array_equal, holes[:2], sources[:2])), "not as many holes as tokens"
        self.positions[holes] = self.positions[sources]
        self.positions[sources] = -1
        return sources, holes

    def order(self) -> NDArray[np.intp]:
        """For each row the row whose page it is to hold, [L, H, rows]: a head's pages stand in the first rows, apart
        from pages that stay.
        """
        stays = self.stays
        rows, pages = (np.argsort(keys, -1, kind="stable") for keys in (stays, np.where(stays, 2, ~self.held)))
        found = np.empty_like(rows)
        np.put_along_axis(found, rows, pages, -1)
        return found

    def permute(self, order: NDArray[np.intp]) -> None:
        """Puts the tokens of pages into the rows that `order` names."""
        self.positions = np.take_along_axis(self.positions, order[..., None], 2)

    def forget(self, rows: NDArray[np.intp]) -> None:
        """Removes rows without a page."""
        self.positions, self.in_place = np.delete(self.positions, rows, 2), np.delete(self.in_place, rows, 2)
        self.origins = np.delete(self.origins, rows)


def words_of(columns: Bools) -> NDArray[np.uint64]:
    """Columns [L, H, n] as words of 64, uint64 [L, H, ceil(n / 64)]; bit t of word c is column c * 64 + t."""
    padded = np.pad(columns, ((0, 0), (0, 0), (0, -columns.shape[-1] % PAGE_TOKENS)))
    return np.packbits(padded, -1, bitorder="little").view("<u8").astype(np.uint64)
