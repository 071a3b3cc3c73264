"""Retention by counts: how many pages sequences keep of each head, without pages. Decides as the cache's own retention.

For schedulers without a model, which know no attention. Heads of one class keep the same tokens in every sequence; of
the candidates for `frequent` the first are kept. A decision on a prompt has rows for classes instead of heads: policies
[classes, 1] and tokens [classes, 1, n]. There is no budget, because a budget ranks tokens by their attention.

A set of classes is an int with a bit for each class. So is a set of pages of a row: bit c for the pages of class c, the
next bit for a sidecar, then a bit for each class's pages of positions.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quire.cache.arrays import Bools, Floats, Int32s, Int64s
from quire.cache.codecs.sums import SumsCodec
from quire.cache.counts import POSITIONS_BYTES, ChunkCounts
from quire.cache.eviction import Eviction
from quire.cache.ledger import PAGE_TOKENS, Demand, PageCounts
from quire.cache.path import Path
from quire.cache.retention.decisions import Decided, Retention
from quire.cache.retention.prefix_sums import SharingRetainer
from quire.cache.retention.retained import Retained
from quire.cache.segment import Segment

if TYPE_CHECKING:
    from quire.cache.codecs import Codec
    from quire.cache.codecs.dense import DenseCodec
    from quire.cache.sinks import Sinks

MOST_CLASSES = 31
"""So that a set of pages is a number of 64 bits."""


class Classes:
    """The classes of a model's heads.

    of     int [L, H], the class of each head
    count  number of classes
    all    the set of all classes
    """

    def __init__(self, of: Int64s) -> None:
        self.of = of
        self.count = int(of.max()) + 1
        assert self.count <= MOST_CLASSES, f"{self.count} classes of heads"
        self.all = (1 << self.count) - 1
        self.heads = functools.cache(self._heads)

    def _heads(self, classes: int) -> Bools:
        """The heads of a set of classes, bool [L, H]."""
        return np.asarray(classes >> self.of & 1, bool)

    def read_by_others(self, segment: Segment) -> int:
        """The classes whose pages in a segment cannot be freed: several paths read them, or a pin protects them."""
        if segment.pins or segment.unread is None:
            return self.all * (segment.pins > 0 or segment.users > 1)
        locks = segment.locks
        return bits(locks[self.heads(1 << each)].max() > 1 for each in range(self.count))


def bits(flags: Iterable[object]) -> int:
    """The set of the classes whose flags are true."""
    found, bit = 0, 1
    for flag in flags:
        if flag:
            found |= bit
        bit <<= 1
    return found


@dataclass(eq=False, slots=True)
class _Part:
    """The pages of a partial row: some were dropped, or other rows share them.

    own      pages of this row alone
    shared   pages that others in `sharers` may hold, too
    sharers  the parts of all rows that share pages, this one among them
    """

    own: int
    shared: int = 0
    sharers: list[_Part] = field(default_factory=list)

    def of_others(self) -> int:
        """The pages that others hold."""
        found = 0
        for part in self.sharers:
            if part is not self:
                found |= part.shared
        return found


class CountedTable(ChunkCounts):
    """A chunk table that counts pages by class of heads. A row may hold some pages of a chunk only."""

    def __init__(
        self,
        ledger: PageCounts,
        classes: Classes,
        open_codec: DenseCodec,
        *sealed_codecs: Codec,
        sinks: Sinks | None = None,
    ) -> None:
        super().__init__(ledger, *classes.of.shape, open_codec, *sealed_codecs, sinks=sinks, sums=SumsCodec())
        self.classes = classes
        self.sidecar = classes.all + 1
        self.cost_of = functools.cache(self._cost_of)
        self._parts: dict[int, _Part] = {}

    def pages(self, row: int) -> tuple[int, int]:
        """The pages that a row holds alone, and those that others may hold, too."""
        part = self._parts.get(row)
        return (self._whole(row), 0) if part is None else (part.own, part.shared)

    def held_by_others(self, row: int) -> int:
        """The pages of a row that another row holds, too."""
        part = self._parts.get(row)
        return 0 if part is None else part.shared & part.of_others()

    def borrow(self, chunks: Int32s) -> Int32s:
        """Takes rows that share the pages and sidecars of other chunks, int32 [n]."""
        rows, parts = self._blank(len(chunks), self.sealed_codec.kernel_id), self._parts
        self.sidecars[rows] = self.sidecars[chunks]
        for chunk, row in zip(chunks.tolist(), rows.tolist(), strict=True):
            lender = parts.get(chunk)
            if lender is None:
                lender = parts[chunk] = _Part(0, self._whole(chunk))
                lender.sharers.append(lender)
            assert not lender.own, "only chunks of the tree are borrowed"
            parts[row] = part = _Part(0, lender.shared, lender.sharers)
            lender.sharers.append(part)
        return rows

    def put(self, rows: Iterable[tuple[int, int, int]], kind: int) -> None:
        """Changes the pages of rows of a format, each given with its own and its shared pages. Sidecars stay."""
        parts, sidecar = self._parts, self.sidecar
        changes: dict[tuple[int, int], int] = {}
        for row, own, shared in rows:
            part = parts.get(row)
            if part is None:
                part = parts[row] = _Part(self._whole(row))
            own |= part.own & sidecar
            shared |= part.shared & sidecar
            if own != part.own or shared != part.shared:
                self._change(part, own, shared, changes)
        self._count_changes(kind, changes)

    def give(self, chunks: Int32s) -> None:
        """Gives chunks back, with their pages and sidecars."""
        whole: list[int] = []
        changes: dict[int, dict[tuple[int, int], int]] = {}
        for row, kind in zip(chunks.tolist(), self.kinds[chunks].tolist(), strict=True):
            part = self._parts.pop(row, None)
            if part is None:
                whole.append(row)
                continue
            self._change(part, 0, 0, changes.setdefault(kind, {}))
            if part.sharers:
                part.sharers.remove(part)
            self.sidecars[row] = -1
            self._free.append(row)
        for kind, of_kind in changes.items():
            self._count_changes(kind, of_kind)
        super().give(np.array(whole, np.int32) if changes else chunks)

    def _whole(self, row: int) -> int:
        all_pages = self.classes.all
        return all_pages if self.sinks is None or self.sidecars[row] < 0 else all_pages | self.sidecar

    def _change(self, part: _Part, own: int, shared: int, changes: dict[tuple[int, int], int]) -> None:
        """Changes the pages of a part, and notes which are taken and given back."""
        freed, let_go = part.own & ~own, part.shared & ~shared
        if let_go:
            freed |= let_go & ~part.of_others()
        change = own & ~part.own, freed
        changes[change] = changes.get(change, 0) + 1
        part.own, part.shared = own, shared

    def _count_changes(self, kind: int, changes: dict[tuple[int, int], int]) -> None:
        for (taken, freed), count in changes.items():
            if taken != freed:
                self.ledger.count(self.cost_of(kind, taken, freed), count)

    def _cost_of(self, kind: int, pages: int, freed: int = 0) -> Demand:
        """The demand of the pages in one set, minus that of the pages in `freed`."""
        if freed:
            return self.cost_of(kind, pages) - self.cost_of(kind, freed)
        placed = int(self.classes.heads(pages >> self.classes.count + 1).sum())
        total = self.demand_of_sizes(self.sizes[kind][self.classes.heads(pages)])
        total += self.demand_of_sizes(np.full(placed, POSITIONS_BYTES))
        return total + self._of_sidecar * bool(pages & self.sidecar)

    def _check_pages(self) -> None:
        total, lists = self.nothing, {id(part.sharers): part.sharers for part in self._parts.values()}
        for row in np.flatnonzero(self._is_taken()).tolist():
            total += self.cost_of(int(self.kinds[row]), self.pages(row)[0])
        for sharers in lists.values():
            shared = functools.reduce(int.__or__, (part.shared for part in sharers), 0)
            total += self.cost_of(self.sealed_codec.kernel_id, shared)
        assert [self.ledger.out(size) for size in self.ledger.page_sizes] == list(total[:-1]), "pages are miscounted"


class CountedTokens(Retained):
    """How many tokens and pages retention has left of a path. Tokens keep the places of their chunks; pages that are
    packed only count.

    in_place   int64 [rows], sets of classes
    pages      by row, the classes that have a page
    tokens     by class and chunk, the number of kept tokens
    here       by row, the classes that keep tokens of its chunk
    packed     the classes that do not keep everything
    summed     the classes that keep column sums
    """

    def __init__(self, decided: Decided, num_prompt: int, keeps_first: bool, classes: Classes) -> None:
        super().__init__(decided.chain, decided.policies, num_prompt, keeps_first=keeps_first)
        self.classes = classes
        self.in_place = np.empty(0, np.int64)
        self.pages: list[int] = []
        self.tokens: list[list[int]] = []
        self.here: list[int] = []
        self.packed, self.summed = (bits(each[:, 0].tolist()) for each in (self.is_packed, self.has_sums))

    @property
    def num_pages(self) -> Int64s:
        """See `Retained`."""
        counts = [0] * self.classes.count
        for pages, count in Counter(self.pages).items():
            for each in range(self.classes.count):
                counts[each] += count * (pages >> each & 1)
        return np.array(counts)[self.classes.of]

    def seal(self, first: int, end: int) -> None:
        """See `Retained`."""
        tokens = np.arange(first * PAGE_TOKENS, end * PAGE_TOKENS, dtype=np.int32).reshape(1, 1, -1, PAGE_TOKENS)
        self.positions = np.concatenate((self.positions, np.repeat(tokens, len(self.policies), 0)), 2)
        self.origins = np.append(self.origins, np.arange(first, end, dtype=np.int32))
        self.in_place = np.append(self.in_place, np.zeros(end - first, np.int64))
        self.pages += [self.classes.all] * (end - first)

    def drop(self, kept: Bools) -> None:
        """See `Retained`."""
        super().drop(kept)
        self.tokens = self.alive.sum(-1)[:, 0].tolist()
        by_chunk = [bits(column) for column in zip(*self.tokens, strict=True)]
        self.here = [by_chunk[origin] for origin in self.origins.tolist()]

    def leave_in_place(self, segments: Sequence[Segment]) -> NDArray[Any]:
        """See `Retained`."""
        stays, in_place, stuck = self.classes.all, self.in_place.tolist(), [0] * self.num_rows
        for segment in segments:
            first, end = segment.start, segment.end
            most = PAGE_TOKENS * (end - first)
            stays &= bits(segment.users * sum(tokens[first:end]) >= most for tokens in self.tokens)
            others = self.classes.read_by_others(segment) & ~stays
            for row in range(first, end):
                in_place[row] |= stays & self.here[row]
                stuck[row] |= others & self.here[row]
        self.in_place = np.array(in_place, np.int64)
        return np.array(stuck, np.int64)

    def written(self) -> list[int]:
        """By row, the classes whose pages will hold tokens once they are packed, without those in place. Valid before
        packing, while every page holds tokens of its own chunk.
        """
        in_place, found = self.in_place.tolist(), [0] * self.num_rows
        for each, tokens in enumerate(self.tokens):
            rows = [row for row, count in enumerate(tokens) if count and not in_place[row] >> each & 1]
            num_pages = -(-sum(tokens[row] for row in rows) // PAGE_TOKENS)
            if self.keeps_first and rows[:1] == [0]:
                found[rows.pop(0)] |= 1 << each
                num_pages -= 1
            for row in rows[len(rows) - num_pages :]:
                found[row] |= 1 << each
        return found

    def count(self) -> Int64s:
        """Counts the pages that packing leaves. Returns the indices of rows without pages, which `forget` removes."""
        origins, in_place = self.origins.tolist(), self.in_place.tolist()
        pages = [0] * len(origins)
        for each, tokens in enumerate(self.tokens):
            bit, left, free = 1 << each, sum(tokens), []
            for row, origin in enumerate(origins):
                if not in_place[row] & bit:
                    free.append(row)
                elif tokens[origin]:
                    pages[row] |= bit
                    left -= tokens[origin]
            for row in free[: -(-left // PAGE_TOKENS)]:
                pages[row] |= bit
        self.pages = pages
        return np.array([row for row, held in enumerate(pages) if not held], np.int64)

    def forget(self, rows: NDArray[np.intp]) -> None:
        """See `Retained`. Tokens keep their places."""
        self.in_place, self.origins = np.delete(self.in_place, rows), np.delete(self.origins, rows)
        self.pages = [each for each in self.pages if each]


class CountedRetainer(SharingRetainer):
    """Retention of all sequences of a scheduler without a model, over a `CountedTable`."""

    table: CountedTable  # type: ignore[assignment]

    def __init__(self, retention: Retention, eviction: Eviction) -> None:
        super().__init__(retention, eviction)
        assert retention.budget is None, "a budget ranks tokens by their attention, which nobody knows"
        assert self.tree.shares, "prompts are published in a tree"
        self.kind = self.table.sealed_codec.kernel_id

    def check(self, path: Path) -> None:
        """Proves that rows hold the pages that are counted."""
        retained = path.retained
        if retained is None:
            return
        assert isinstance(retained, CountedTokens)
        for row, *expected in self._rows(path, retained):
            held = [pages & ~self.table.sidecar for pages in self.table.pages(row)]
            assert held == expected, f"row {row} holds {held}, not {expected}"
        for row, pages in zip(path.sums.tolist(), retained.pages, strict=False):
            assert self.table.pages(row)[0] == pages & retained.summed, "sums are not those of the pages"

    def _begin(self, decided: Decided, num_prompt: int) -> Retained:
        return CountedTokens(decided, num_prompt, self.table.sinks is not None, self.table.classes)

    def _new_sums(self, count: int) -> Int32s:
        return self.table.take(count, self.sums)

    def _copy(self, rows: Int32s) -> Int32s:
        return self.table.take(len(rows), self.sums)

    def _sums_of(self, path: Path, retained: Retained) -> Floats:
        return np.zeros((*retained.policies.shape, retained.positions[0].size), np.float32)

    def _grow(self, path: Path, retained: Retained, num_sealed: int, sums: Int32s) -> None:
        assert isinstance(retained, CountedTokens)
        if num_sealed and self.table.encodes:
            row = int(path.chunks[path.num_stored - 1 - path.num_dropped])
            self.table.put([(row, self.table.classes.all | self._placed(retained.packed), 0)], self.kind)
        self._put_sums(sums, retained, [self.table.classes.all] * len(sums))

    def _copies(self, pages: NDArray[Any]) -> Demand:
        table = self.table
        total = table.demand(sums=len(pages) * table.encodes)
        for each, count in Counter(pages.tolist()).items():
            if each:
                total += table.cost_of(self.kind, each) * count
        return total

    def _to_own(self, path: Path, retained: Retained) -> NDArray[Any]:
        assert isinstance(retained, CountedTokens)
        rows = zip(path.chunks.tolist(), retained.written(), strict=False)
        return np.array([pages and pages & self.table.held_by_others(row) for row, pages in rows], np.int64)

    def _own(self, path: Path, retained: Retained) -> None:
        """Copies become pages of their own in `_move`."""
        assert isinstance(retained, CountedTokens)
        self._put_sums(path.sums, retained, [self.table.classes.all] * len(path.sums))

    def _let_go(self, path: Path, retained: Retained) -> None:
        assert isinstance(retained, CountedTokens)
        table, read = self.table, [*map(int.__and__, retained.here, retained.in_place.tolist())]
        rows = [(row, *table.pages(row), here) for row, here in zip(path.chunks.tolist(), retained.here, strict=False)]
        table.put([(row, own, shared & here) for row, own, shared, here in rows if shared & ~here], self.kind)
        heads, below, at = {}, 0, retained.num_rows
        for segment in reversed(path.segments):
            while at and retained.origins[at - 1] >= segment.start:
                at -= 1
                below |= read[at]
            heads[segment] = table.classes.heads(below)
        self.tree.loosen(path, heads)

    def _move(self, path: Path, retained: Retained) -> None:
        assert isinstance(retained, CountedTokens)
        empty = retained.count()
        self.table.put(self._rows(path, retained), self.kind)
        self._put_sums(path.sums, retained, retained.pages)
        if len(empty):
            self.table.give(path.forget(empty))
            retained.forget(empty)

    def _rows(self, path: Path, retained: CountedTokens) -> Iterator[tuple[int, int, int]]:
        """Each row, with the pages that are its own and those in place."""
        in_place = retained.in_place.tolist()
        for row, pages, stays in zip(path.chunks.tolist(), retained.pages, in_place, strict=False):
            own = pages & ~stays
            yield row, own | self._placed(own & retained.packed), pages & stays

    def _put_sums(self, rows: Int32s, retained: CountedTokens, pages: list[int]) -> None:
        held = zip(rows.tolist(), pages, strict=False)
        self.table.put([(row, each & retained.summed, 0) for row, each in held], self.sums.kernel_id)

    def _placed(self, classes: int) -> int:
        """The pages of positions of some classes."""
        return classes << self.table.classes.count + 1 if self.table.encodes else 0
