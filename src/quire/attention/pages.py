"""The part of a chunk table that attention and its kernels read. It is the same for offloaded chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from quire.cache.arena import Arena
    from quire.cache.arrays import Int32s, Int64s
    from quire.cache.codecs import Codec, PageFormat
    from quire.cache.codecs.dense import DenseCodec
    from quire.cache.codecs.sums import SumsCodec
    from quire.cache.sinks import Sinks


class PageTable(Protocol):
    """The pages of chunks by row. All attributes are those of `ChunkTable`, which has them, and of `ChunkCounts`."""

    shape: tuple[int, int]
    capacity: int
    open_codec: DenseCodec
    sealed_codec: Codec
    encodes: bool
    codecs: dict[int, PageFormat]
    sinks: Sinks | None
    sums: SumsCodec | None
    arena: Arena
    kinds: NDArray[np.uint8]
    pages: Int32s
    masks: NDArray[np.uint64]
    positions: Int32s
    bases: Int32s
    sidecars: Int32s
    takes: Int64s
    num_moved_pages: int

    @property
    def has_gaps(self) -> bool:
        """Whether paths may lack chunks or slots, so that masks and bases are read."""

    def page_sizes(self, codec: PageFormat) -> Int32s:
        """Bytes of a chunk's pages, int32 [L, H]."""

    def chunk_bytes(self, codec: PageFormat) -> int:
        """Bytes of a chunk's pages, without a sidecar."""
