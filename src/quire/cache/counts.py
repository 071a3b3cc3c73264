"""Chunks by id and the demand of their pages, which is all that admission, growth and eviction need. `cache/table.py`
has the addresses of pages.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np

from quire.cache.arrays import Bools, Int32s, Int64s
from quire.cache.codecs.sums import SumsCodec
from quire.cache.ledger import PAGE_TOKENS, Demand, PageCounts
from quire.errors import CacheFullError, ConfigError

if TYPE_CHECKING:
    from quire.cache.codecs import Codec, PageFormat
    from quire.cache.codecs.dense import DenseCodec
    from quire.cache.sinks import Sinks

POSITIONS_BYTES = 4 * PAGE_TOKENS
"""Bytes of a page that holds the positions of another page's slots, int32 [64]."""

RETAINED_ROWS = 8
"""With retention, rows of the table for each whole chunk that fits the arena. They add 1 % to the arena's bytes for
SmolLM2's dense pages."""


class ChunkCounts:
    """Chunks of an arena by id; an id is a row of a table. Invariant: a row is either free, or the ledger counts the
    pages of its codec, and its sidecar, as taken.

    ledger         counts pages
    shape          (L, H): layers and kv heads
    open_codec     the dense codec of open chunks
    sealed_codec   the codec of full chunks: the first of `sealed_codecs`, or `open_codec` if there are none
    encodes        whether the two differ
    codecs         the page formats of rows, by kernel id: codecs, and column sums with retention
    sinks          which tokens sidecars keep exact; None: no chunk has a sidecar
    sums           the format of column sums, which have rows of their own; None without retention
    sidecar_bytes  bytes of one sidecar; 0 without sinks
    capacity       number of rows
    sizes          int32 [formats, L, H], bytes of the pages of each format, by kernel id; always includes column sums
    kinds          uint8 [capacity]; kernel id of the chunk's codec
    sidecars       int32 [capacity]; page id of the chunk's sidecar, or 0 in a table without pages; -1 without a sidecar
    Raises ConfigError if a page or a sidecar does not fit a slab of the ledger.
    """

    def __init__(
        self,
        ledger: PageCounts,
        num_layers: int,
        num_heads: int,
        open_codec: DenseCodec,
        *sealed_codecs: Codec,
        sinks: Sinks | None = None,
        sums: SumsCodec | None = None,
    ) -> None:
        self.ledger = ledger
        self.shape = num_layers, num_heads
        self.sinks = sinks
        self.sums = sums
        self.sidecar_bytes = 0 if sinks is None else sinks.sidecar_bytes
        if self.sidecar_bytes > ledger.slab_bytes:
            raise ConfigError(
                f"a sidecar of {self.sidecar_bytes} bytes must fit a slab of {ledger.slab_bytes}; raise cache.memory"
            )
        codecs: tuple[Codec, ...] = (open_codec, *sealed_codecs)
        self.open_codec = open_codec
        self.sealed_codec: Codec = sealed_codecs[0] if sealed_codecs else open_codec
        self.encodes = bool(sealed_codecs)
        formats: tuple[PageFormat, ...] = codecs if sums is None else (*codecs, sums)
        self.codecs = {each.kernel_id: each for each in formats}
        # Runs from a store may have column sums even if this engine does not retain.
        self.sizes = np.zeros((max(*self.codecs, SumsCodec.kernel_id) + 1, *self.shape), np.int32)
        self.sizes[SumsCodec.kernel_id] = SumsCodec.page_bytes
        for each in formats:
            self.sizes[each.kernel_id] = each.page_bytes
        sizes = {*self.sizes[list(self.codecs)].flat, self.sidecar_bytes, *([POSITIONS_BYTES] if sums else [])}
        for size in sorted(map(int, sizes - {0})):
            ledger.size_class(size)
        # Enough for the smallest chunks: bytes run out before ids do. With retention, rows may hold few pages, or sums.
        most = ledger.num_bytes // min(self.chunk_bytes(codec) for codec in codecs)
        self.capacity = most if sums is None else RETAINED_ROWS * most
        self.kinds = np.zeros(self.capacity, np.uint8)
        self.sidecars = np.full(self.capacity, -1, np.int32)
        self._free = list(range(self.capacity - 1, -1, -1))
        self.zero_demand = Demand([0] * (len(ledger.page_sizes) + 1))
        self._costs = {kind: self.demand_of_sizes(self.sizes[kind], num_rows=1) for kind in self.codecs}
        of_row = Demand([*self.zero_demand[:-1], 1])
        # A retained path has rows of its own for pages of sealed chunks that the tree has too.
        of_sealed = self.cost(self.sealed_codec) if sums is None else self.cost(self.sealed_codec) + of_row
        self._of_sidecar = self.demand_of_sizes(np.array([self.sidecar_bytes])) if sinks else self.zero_demand
        of_sums = self.cost(sums) if sums else self.zero_demand
        self._units = of_sealed, self.cost(open_codec), self._of_sidecar, of_sums, of_row
        self._demand = functools.lru_cache(4096)(self._sum_of_units)

    def cost(self, codec: PageFormat) -> Demand:
        """The demand of one chunk of a codec, without a sidecar."""
        return self._costs[codec.kernel_id]

    def demand(self, sealed: int = 0, open: int = 0, sidecars: int = 0, sums: int = 0, rows: int = 0) -> Demand:
        """The demand of sealed chunks, open chunks of another codec, sidecars, rows of sums, and further rows of the
        table.
        """
        return self._demand(sealed, open, sidecars, sums, rows)

    def num_sealed_for(self, num_tokens: int) -> int:
        """Chunks of the sealed codec in a sequence of `num_tokens` tokens."""
        return num_tokens // PAGE_TOKENS if self.encodes else -(-num_tokens // PAGE_TOKENS)

    def demand_of_pages(self, num_pages: Int64s, num_rows: int = 0) -> Demand:
        """The demand of sealed chunks' pages, given their number for each layer and head, int64 [L, H]."""
        return self.demand_of_sizes(self.page_sizes(self.sealed_codec), num_pages, num_rows)

    def demand_of_sizes(self, sizes: Int32s, count: Int64s | int = 1, num_rows: int = 0) -> Demand:
        """The demand of `count` pages of each of some sizes, and of rows of the table."""
        return Demand([*(int(((sizes == size) * count).sum()) for size in self.ledger.page_sizes), num_rows])

    def fits(self, demand: Demand) -> bool:
        """Whether a demand fits now, without eviction."""
        return demand[-1] <= len(self._free) and self.ledger.has_room(demand)

    def shortage(self, demand: Demand, each: Demand) -> int:
        """Least number of times that `each` must be given back until a demand fits: a lower bound."""
        return max(-(-(demand[-1] - len(self._free)) // each[-1]), self.ledger.shortage(demand, each))

    def take(self, count: int, codec: PageFormat, *, sidecar: bool = False) -> Int32s:
        """Takes `count` chunks with pages of a codec. Returns their ids, int32 [count]. Raises CacheFullError and takes
        nothing if they do not fit.

        sidecar  whether the first chunk gets one, if the table has sinks
        """
        sidecar = sidecar and count > 0 and self.sinks is not None
        demand = self.cost(codec) * count
        if sidecar:
            demand += self._of_sidecar
        if not self.fits(demand):
            raise CacheFullError(
                f"{count} chunks of {codec.name}{' and a sidecar' if sidecar else ''} do not fit beside"
                f" {self.ledger.allocated_bytes} of {self.ledger.num_bytes} bytes (cache.memory)"
            )
        return self._take(count, codec, sidecar, demand)

    def copy(self, source: int, target: int) -> None:
        """Copies the contents of a whole chunk to another of the same codec. Nothing to do without pages."""

    def free(self, chunks: Int32s) -> None:
        """Frees chunks and their sidecars."""
        if not len(chunks):
            return
        kinds = self.kinds[chunks].tolist() if len(self._costs) > 1 else [self.open_codec.kernel_id] * len(chunks)
        for kind in {*kinds}:
            self.ledger.count(self._costs[kind] * kinds.count(kind), -1)
        if self.sinks is not None:
            self.ledger.count(self._of_sidecar * int((self.sidecars[chunks] >= 0).sum()), -1)
            self.sidecars[chunks] = -1
        self._free.extend(chunks.tolist())

    @property
    def num_taken(self) -> int:
        """Chunks taken and not given back."""
        return self.capacity - len(self._free)

    def chunk_bytes(self, codec: PageFormat) -> int:
        """Bytes of a chunk's pages, without a sidecar."""
        return int(self.page_sizes(codec).sum())

    def page_sizes(self, codec: PageFormat) -> Int32s:
        """Bytes of a chunk's pages, int32 [L, H]."""
        return np.asarray(self.sizes[codec.kernel_id])

    def check(self) -> None:
        """Proves the invariant, and that the ledger is whole."""
        assert len(set(self._free)) == len(self._free), "a free chunk is listed twice"
        assert (self.sidecars[self._free] == -1).all(), "a free chunk has a sidecar"
        self.ledger.check()
        self._check_pages()

    def _check_pages(self) -> None:
        taken = np.flatnonzero(self._is_taken())
        total = self._of_sidecar * int((self.sidecars[taken] >= 0).sum())
        for kind, count in enumerate(np.bincount(self.kinds[taken]).tolist()):
            if count:
                total += self._costs[kind] * count
        assert [self.ledger.out(size) for size in self.ledger.page_sizes] == list(total[:-1]), "pages are miscounted"

    def _take(self, count: int, codec: PageFormat, sidecar: bool, demand: Demand) -> Int32s:
        chunks = self._blank(count, codec.kernel_id)
        self.ledger.count(demand, 1)
        if sidecar:
            self.sidecars[chunks[0]] = 0
        return chunks

    def _blank(self, count: int, kind: int) -> Int32s:
        """Takes rows for a page format, without pages."""
        if len(self._free) < count:
            raise CacheFullError(f"all {self.capacity} rows of the chunk table are taken")
        chunks = np.array(self._free[: -count - 1 : -1], np.int32)
        del self._free[len(self._free) - count :]
        self.kinds[chunks if count != 1 else chunks[0]] = kind
        return chunks

    def _is_taken(self) -> Bools:
        is_taken = np.ones(self.capacity, bool)
        is_taken[self._free] = False
        return is_taken

    def _sum_of_units(self, *counts: int) -> Demand:
        total = self.zero_demand
        for unit, count in zip(self._units, counts, strict=True):
            total = total + unit * count
        return total
