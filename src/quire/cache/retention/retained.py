"""The tokens of a path that retention keeps, by slot, and the plan to pack them. Knows no page ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.cache.arrays import Bools, Indices, Int64s
from quire.cache.ledger import PAGE_TOKENS
from quire.cache.retention.policies import PolicyChain
from quire.cache.segment import Segment

SlotIndices = tuple[Indices, ...]
"""Layer, head, row and slot of m tokens, [m] each."""


@dataclass
class RetainedTokens:
    """Tokens of the sealed rows of a path, by slot. Rows are the path's, in the path's order.

    chain       the chain of the prompt's decision, which also decides on later chunks
    policies    uint8 [L, H]
    num_prompt  tokens of the prompt
    holds_last  whether a head that keeps the whole last row leaves it in that row
    keeps_first whether a head's first page stays in the first row, because the sidecar belongs to that row
    has_sums    bool [L, H]: heads that still need column sums
    is_packed   bool [L, H]: heads that do not keep everything
    positions   int32 [L, H, rows, 64], of the token in each slot; -1 in a slot without a kept token
    in_place    bool [L, H, rows]: pages that are never written, because others may read them
    origins     int32 [rows]: the chunk of the sequence that the row was
    """

    chain: PolicyChain
    policies: NDArray[np.uint8]
    num_prompt: int
    holds_last: bool = False
    keeps_first: bool = False

    def __post_init__(self) -> None:
        shape, chain = self.policies.shape, self.chain
        self.has_sums = chain.has(self.policies, "frequent")
        self.is_packed = self.policies < chain.full
        self.positions = np.empty((*shape, 0, PAGE_TOKENS), np.int32)
        self.in_place = np.empty((*shape, 0), bool)
        self.origins = np.empty(0, np.int32)

    @property
    def num_rows(self) -> int:
        """Number of sealed rows of the path."""
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
    def num_pages(self) -> Int64s:
        """Number of pages that hold a kept token, int64 [L, H]."""
        return np.asarray(self.held.sum(-1), np.int64)

    @property
    def stays(self) -> Bools:
        """Pages whose slots stay as they are, bool [L, H, rows]. Only valid before packing, while the last row holds
        tokens of its own chunk alone.
        """
        found = self.in_place.copy()
        if self.holds_last:
            found[..., -1:] |= self.alive[..., -1:, :].all(-1)
        return found

    def rows_of(self, segment: Segment) -> Bools:
        """Rows that were chunks of a segment, bool [rows]."""
        return (self.origins >= segment.start) & (self.origins < segment.end)

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

    def leave_in_place(self, segments: Sequence[Segment]) -> NDArray[Any]:
        """Leaves a shared page in place if copies for all its users would take more bytes than the page. Returns the
        pages to be copied although eviction cannot free the originals, bool [L, H, rows]: others read or pin them.
        """
        stays, stuck = np.ones_like(self.is_packed), np.zeros_like(self.in_place)
        for segment in segments:
            rows = self.rows_of(segment)
            # Pages after a copied page are copied too: the tree could not evict the original before them.
            alive = self.alive[:, :, rows]
            stays = stays & (segment.users * alive.sum((-2, -1)) >= alive[0, 0].size)
            others = (segment.locks > 1) | (segment.pins > 0)
            here = self.held & rows
            self.in_place |= stays[..., None] & here
            stuck |= (others & ~stays)[..., None] & here
        return stuck

    @property
    def targets(self) -> Bools:
        """Pages that will hold a head's tokens once they are packed, bool [L, H, rows], without pages that stay.

        They are a head's last pages, and with `keeps_first` its first page. If memory is short, the tree evicts the end
        of a prompt first, and a page that only this path holds needs no copy.
        """
        num_tokens = np.where(self.stays, 0, self.alive.sum(-1))
        is_writable = num_tokens > 0
        rank = np.cumsum(is_writable[..., ::-1], -1)[..., ::-1]
        if self.keeps_first:
            rank = rank + is_writable[..., :1]
            rank[..., :1] = 1
        return np.asarray(is_writable & (rank <= -(-num_tokens.sum(-1, keepdims=True) // PAGE_TOKENS)))

    def pack(self) -> tuple[SlotIndices, SlotIndices, Indices]:
        """Moves tokens into the holes of target pages, until the first slots of these hold all tokens of a head. Then
        moves pages into the first rows. Pages that stay are not touched.

        Returns the slots that tokens come from, the slots they fill, and the row that each row's page comes from, [L,
        H, rows].
        """
        stays, is_target = self.stays, self.targets
        is_moving = self.alive & ~stays[..., None]
        index = (np.cumsum(is_target, -1)[..., None] - 1) * PAGE_TOKENS + np.arange(PAGE_TOKENS)
        is_filled = is_target[..., None] & (index < is_moving.sum((-2, -1), keepdims=True))
        holes, sources = np.nonzero(is_filled & ~self.alive), np.nonzero(is_moving & ~is_filled)
        assert all(map(np.array_equal, holes[:2], sources[:2])), "not as many holes as tokens"
        self.positions[holes] = self.positions[sources]
        self.positions[sources] = -1
        rows, pages = (np.argsort(keys, -1, kind="stable") for keys in (stays, np.where(stays, 2, ~self.held)))
        order = np.empty_like(rows)
        np.put_along_axis(order, rows, pages, -1)
        self.positions = np.take_along_axis(self.positions, order[..., None], 2)
        return sources, holes, order

    def forget(self, rows: Indices) -> None:
        """Removes rows without a page."""
        self.positions, self.in_place = (np.delete(each, rows, 2) for each in (self.positions, self.in_place))
        self.origins = np.delete(self.origins, rows)


def words_of(columns: Bools) -> NDArray[np.uint64]:
    """Columns [L, H, ...], n in all, as words, uint64 [L, H, ceil(n / 64)]: bit t of word c is column c * 64 + t."""
    bits = np.packbits(columns.reshape(*columns.shape[:2], -1), -1, bitorder="little")
    return np.pad(bits, ((0, 0), (0, 0), (0, -bits.shape[-1] % 8))).view(np.uint64)
