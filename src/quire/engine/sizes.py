"""Computes what fits into memory before anything starts: bytes of weights and cache, tokens and sequences. Arithmetic
on a model's shape, without tensors.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from quire.cache.ledger import PAGE_TOKENS, UNIT
from quire.options import format_bytes, parse_bytes

_SLAB_BYTES = 1 << 20

_SLABS = 128
"""Least number of slabs in an arena: each of a dozen page sizes leaves half a slab empty on average."""


def slab_bytes(page_bytes: int, memory: int, largest: int = 0) -> int:
    """Bytes of a slab: whole open pages, at most 1 MiB and a 128th of the arena, unless the largest page needs more.

    page_bytes  bytes of an open page, which fills slabs without waste; other sizes waste less than a page of each slab
    largest     bytes of the largest page of another size, or of a sidecar
    """
    pages = max(1, min(_SLAB_BYTES, memory // _SLABS) // page_bytes, -(-largest // page_bytes))
    return pages * page_bytes


def page_counts(page_bytes: int | NDArray[np.int32], num_layers: int, num_heads: int) -> dict[int, int]:
    """The pages of one chunk of a codec: size -> number of pages."""
    sizes, counts = np.unique(np.broadcast_to(np.asarray(page_bytes), (num_layers, num_heads)), return_counts=True)
    return dict(zip(sizes.tolist(), counts.tolist(), strict=True))


@dataclass(frozen=True)
class ArenaCapacity:
    """The capacity of an arena that does not exist yet, counted like `PageCounts.has_room`.

    num_bytes      bytes of the arena, in whole slabs
    slab_bytes     bytes of a slab
    sealed         pages of a sealed chunk: size -> number
    open           pages of an open chunk, if these have another codec; else empty
    sidecar_bytes  bytes of the sidecar of a sequence's first chunk
    beside         further pages of every chunk, such as column sums: size -> number
    """

    num_bytes: int
    slab_bytes: int
    sealed: Mapping[int, int]
    open: Mapping[int, int] = field(default_factory=dict)
    sidecar_bytes: int = 0
    beside: Mapping[int, int] = field(default_factory=dict)

    def fits(self, num_sealed: int, num_open: int, num_sidecars: int) -> bool:
        """Whether these numbers of chunks and sidecars fit."""
        needs = {self.sidecar_bytes: num_sidecars} if self.sidecar_bytes else {}
        for pages, count in ((self.sealed, num_sealed), (self.open, num_open), (self.beside, num_sealed + num_open)):
            for size, number in pages.items():
                needs[size] = needs.get(size, 0) + number * count
        slabs = sum(-(-count // (self.slab_bytes // size)) for size, count in needs.items())
        return slabs <= self.num_bytes // self.slab_bytes

    def sequences(self, length: int) -> int:
        """Number of sequences of `length` tokens that fit at once, each with the chunk it writes to."""
        sealed, is_open = divmod(length, PAGE_TOKENS) if self.open else (-(-length // PAGE_TOKENS), 0)
        most = self.num_bytes // max(1, sealed * _bytes_of(self.sealed) + bool(is_open) * _bytes_of(self.open))
        return _largest(most, lambda count: self.fits(count * sealed, count * bool(is_open), count))

    @property
    def num_chunks(self) -> int:
        """Most sealed chunks of one sequence."""
        most = self.num_bytes // _bytes_of(self.sealed)
        return _largest(most, lambda count: self.fits(count, bool(self.open), 1))


def _bytes_of(pages: Mapping[int, int]) -> int:
    return sum(size * count for size, count in pages.items())


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `most` that fits."""
    return bisect.bisect_left(range(1, most + 1), True, key=lambda count: not fits(count))


@dataclass(frozen=True)
class ArenaPages:
    """The page sizes of a cache's chunks.

    open           bytes of the pages of an open chunk, int32 [L, H], all of one size
    sealed         the same for a sealed chunk; None: as for an open one
    sidecar_bytes  bytes of the sidecar of a sequence's first chunk
    beside         further pages of every chunk, such as column sums: size -> number
    """

    open: NDArray[np.int32]
    sealed: NDArray[np.int32] | None
    sidecar_bytes: int
    beside: Mapping[int, int]

    @property
    def sizes(self) -> tuple[NDArray[np.int32], NDArray[np.int32] | None]:
        """The pages of a sealed chunk, and those of an open one if they differ."""
        return (self.open, None) if self.sealed is None else (self.sealed, self.open)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of the pages of a sealed chunk."""
        return int(self.sizes[0].sum())

    @property
    def open_bytes(self) -> int:
        """Bytes of the pages of an open chunk if they differ, else 0."""
        return 0 if self.sealed is None else int(self.open.sum())

    def arena(self, memory: int) -> ArenaCapacity:
        """The arena that `memory` bytes hold: whole slabs of whole pages. The remainder is not allocated."""
        sealed = page_counts(self.sizes[0], *self.open.shape)
        slab = slab_bytes(int(self.open.max()), memory, max(*sealed, self.sidecar_bytes))
        open_ = {} if self.sealed is None else page_counts(self.open, *self.open.shape)
        return ArenaCapacity(memory // slab * slab, slab, sealed, open_, self.sidecar_bytes, self.beside)

    def enough_for(self, num_chunks: int, memory: int) -> str:
        """About the smallest memory whose arena holds `num_chunks`, as text for a setting; `memory` holds fewer."""
        low, high = memory, max(2 * memory, UNIT)
        while self.arena(high).num_chunks < num_chunks:
            low, high = high, 2 * high
        while high - low > high // 256:
            middle = (low + high) // 2
            low, high = (low, middle) if self.arena(middle).num_chunks >= num_chunks else (middle, high)
        # The text is rounded, and slabs grow with the memory, so that a little more memory may hold fewer chunks.
        while self.arena(parse_bytes(format_bytes(high))).num_chunks < num_chunks:
            high += high // 256 + 1
        return format_bytes(high)


@dataclass(frozen=True)
class EngineSizes:
    """Bytes and counts of one model on one cache.

    weight_bytes         all weights in the chosen dtype, times the number of copies that the backend holds
    cache_bytes          the arena, in whole slabs
    disk_bytes           the part of cache_bytes that is not in memory
    bytes_per_token      sealed keys and values of one token in all layers and heads, page padding included
    chunk_bytes          the same for 64 tokens: the unit of allocation
    open_chunk_bytes     the same for the chunk that a sequence writes to
    num_chunks           sealed chunks that the arena holds, besides one open chunk
    max_context          most tokens of one sequence: the smaller of the model's limit and the arena's
    model_context        the model's own limit
    arena                the arena's capacity, from which the other numbers follow
    available_bytes      memory of the machine that is free now, or None if it is not known
    """

    weight_bytes: int
    cache_bytes: int
    bytes_per_token: float
    chunk_bytes: int
    open_chunk_bytes: int
    num_chunks: int
    max_context: int
    model_context: int
    arena: ArenaCapacity
    available_bytes: int | None = None
    disk_bytes: int = 0

    @property
    def memory_bytes(self) -> int:
        """Memory for weights and cache."""
        return self.weight_bytes + self.cache_bytes - self.disk_bytes

    @property
    def cache_text(self) -> str:
        """The cache's size for people."""
        size = format_bytes(self.cache_bytes)
        return f"{size} ({format_bytes(self.cache_bytes - self.disk_bytes)} in memory)" if self.disk_bytes else size

    @property
    def tokens(self) -> int:
        """Tokens that fit, if every chunk is full."""
        return self.num_chunks * PAGE_TOKENS

    def sequences(self, length: int) -> int:
        """Number of sequences of `length` tokens that fit at once."""
        return self.arena.sequences(length)

    @property
    def fit_the_machine(self) -> bool:
        """Whether weights and arena fit into the memory that is free now."""
        return self.available_bytes is None or self.memory_bytes <= self.available_bytes

    @property
    def fails_first(self) -> str:
        """The limit that growing load reaches first, in one sentence."""
        need = self.memory_bytes
        if self.available_bytes is not None and self.weight_bytes >= self.available_bytes:
            return (
                f"memory: weights need {format_bytes(self.weight_bytes)}, and {format_bytes(self.available_bytes)} are"
                " free; model.dtype bfloat16 and model.weights g4 need less"
            )
        if self.available_bytes is not None and not self.fit_the_machine:
            return (
                f"memory: weights and cache need {format_bytes(need)}, and {format_bytes(self.available_bytes)}"
                " are free; lower cache.memory"
            )
        if self.num_chunks * PAGE_TOKENS < self.model_context:
            return (
                f"long requests: the cache holds {self.tokens} tokens and the model could use {self.model_context};"
                f" prompts beyond {self.max_context} tokens"
                " are refused"
            )
        full = self.sequences(self.model_context)
        return (
            f"concurrency: beyond {full} sequence{'s' if full != 1 else ''} of {self.model_context} tokens,"
            " new requests wait and the youngest running one is preempted"
        )


def sizes(
    arena: ArenaCapacity, *, model_context: int, weight_bytes: int, available_bytes: int | None = None
) -> EngineSizes:
    """The sizes of a model with an arena for its cache."""
    num_chunks = arena.num_chunks
    chunk_bytes = _bytes_of(arena.sealed)
    return EngineSizes(
        weight_bytes=weight_bytes,
        cache_bytes=arena.num_bytes,
        bytes_per_token=chunk_bytes / PAGE_TOKENS,
        chunk_bytes=chunk_bytes,
        open_chunk_bytes=_bytes_of(arena.open) if arena.open else chunk_bytes,
        num_chunks=num_chunks,
        max_context=min(model_context, num_chunks * PAGE_TOKENS),
        model_context=model_context,
        arena=arena,
        available_bytes=available_bytes,
    )
