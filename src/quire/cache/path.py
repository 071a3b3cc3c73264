"""What a sequence attends to: sealed chunks from the root of the tree, then at most one open chunk, which alone is
appended to.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from quire.cache.ledger import PAGE_TOKENS
from quire.cache.segment import Segment

if TYPE_CHECKING:
    from quire.cache.retained import Retained


@dataclass(eq=False)
class Path:
    """What one sequence attends to: the tree from its root to one segment, then chunks of its own, the last of which
    is open.

    tip         the last segment of the tree on the path, locked with all before it; None while it is in no tree
    heads       bool [L, H] by segment: of which heads retention has left it pages; empty before
    num_shared  leading chunks that belong to the tree
    num_tokens  tokens whose keys and values are stored; while a scheduler lets a sequence decode and looks at it only
                when a chunk ends, those at the last look
    num_sealed  leading chunks that are sealed; num_sealed * 64 <= num_tokens
    num_stored  leading chunks that have, or get in this step, the codec of sealed ones; where that is the codec of open
                ones too, all
    free_until  tokens it may have without anything being taken, encoded or given back
    next_seal   tokens with which the next chunk is full
    filled      open chunk that the step at hand fills and whose place `chunks` has given to the one it is encoded into;
                -1 if there is none
    shared      what `PrefixTree.shared` found, after how many divisions and for how many shared chunks
    stops       with retention, after how many chunks of a prompt its sums are to be kept for others
    is_decided  whether retention has decided what to keep of the prompt
    retained    what it has left of the sealed chunks; None if that is all
    num_gone    chunks that `chunks` has fewer than the sequence since: chunk i of those that are not retained is the
                sequence's chunk i + num_gone
    sums        int32 [num_chunks], rows with the attention that the slots of each chunk have had; empty without
                retention
    """

    tip: Segment | None = None
    heads: dict[Segment, NDArray[np.bool_]] = field(default_factory=dict)
    num_shared: int = 0
    num_tokens: int = 0
    num_sealed: int = 0
    num_stored: int = 0
    num_chunks: int = 0
    free_until: int = 0
    next_seal: int = PAGE_TOKENS
    filled: int = -1
    shared: tuple[tuple[int, int], tuple[tuple[int, int], ...]] = ((-1, -1), ())
    stops: tuple[int, ...] = ()
    is_decided: bool = False
    retained: Retained | None = None
    num_gone: int = 0
    sums: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    _chunks: NDArray[np.int32] = field(default_factory=lambda: np.empty(8, np.int32))

    @property
    def chunks(self) -> NDArray[np.int32]:
        """Chunk ids in order of position, int32 [num_chunks]: a view that later appends leave valid or replace."""
        return self._chunks[: self.num_chunks]

    @property
    def segments(self) -> list[Segment]:
        """The segments of the tree on the path, from its beginning."""
        found = []
        segment = self.tip
        while segment is not None and segment.parent is not None:
            found.append(segment)
            segment = segment.parent
        return found[::-1]

    def reads(self) -> list[tuple[Segment, NDArray[np.bool_] | None]]:
        """The segments of the tree that it uses, from its beginning, and the heads whose pages it reads of each; None:
        all.
        """
        if not self.heads:
            return [(segment, None) for segment in self.segments]
        found: list[tuple[Segment, NDArray[np.bool_] | None]] = []
        heads: NDArray[np.bool_] | None = None
        for segment in reversed(self.segments):
            # A front that was divided off since is read as what is left of it.
            heads = self.heads.get(segment, heads)
            found.append((segment, heads))
        return found[::-1]

    @property
    def private(self) -> NDArray[np.int32]:
        """The chunks of this sequence alone."""
        return self.chunks[self.num_shared :]

    def append(self, chunks: NDArray[np.int32]) -> None:
        """Adds chunks at the end."""
        need = self.num_chunks + len(chunks)
        if need > len(self._chunks):
            grown = np.empty(max(need, 2 * len(self._chunks)), np.int32)
            grown[: self.num_chunks] = self.chunks
            self._chunks = grown
        self._chunks[self.num_chunks : need] = chunks
        self.num_chunks = need

    def replace(self, first: int, chunks: NDArray[np.int32]) -> None:
        """Puts other chunks, with the same contents, in the place of those from index `first` on: in a new array, so
        that whoever kept the old one sees that it is old.
        """
        self._chunks = self._chunks.copy()
        self._chunks[first : first + len(chunks)] = chunks

    def forget(self, indices: NDArray[np.intp]) -> NDArray[np.int32]:
        """Takes chunks out of it, which hold nothing any more: their rows, and those of their sums."""
        rows = np.concatenate((self.chunks[indices], self.sums[indices]))
        self.sums = np.delete(self.sums, indices)
        self._chunks = np.delete(self.chunks, indices)
        self.num_chunks -= len(indices)
        self.num_gone += len(indices)
        return rows
