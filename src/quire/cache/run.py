"""Runs: chunks that leave or enter an arena, with all that is needed to attend to them elsewhere.

A run is packed layer by layer into extents, bytes with a header. Chunks leave an arena in no other form. Pages that a
row does not hold are in no extent. Knows rows of the chunk table and their bytes, not sequences. docs/page-format.md
defines the header.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.cache.arrays import Bools, Int32s
from quire.cache.counts import POSITIONS_BYTES
from quire.cache.ledger import UNIT, Demand
from quire.cache.namespace import FORMAT_VERSION
from quire.cache.table import ALL_SLOTS, ChunkTable
from quire.errors import ExtentError

MAGIC = b"QRUN"
_HEADER = struct.Struct("<4sHHIIIIQ16s32s")
_IS_SHARED = 1


@dataclass(frozen=True, eq=False)
class Run:
    """The description of a run, without its bytes: n rows of the chunk table, which are consecutive chunks of one path
    and then the attachment of their end.

    A shared run has complete chunks that were computed before any retention. It is named by the keys of its chunks and
    may enter a tree. A private run has packed, open or later chunks. It is named by a handle that only its owner knows,
    and ends with its sequence.

    names         keys of the chunks, 16 bytes each; of a private run only the handle
    namespace     namespace of the tokens; None for a private run
    start         index of the first chunk in its sequence
    parent        key of the chunk before; of the namespace if there is none
    is_shared     whether the run is shared
    tokens        int32 [chunks * 64]; empty for a private run
    num_attached  number of rows at the end that are the attachment
    kinds         uint8 [n], kernel ids of the rows' page formats
    masks         uint64 [n, L, H]: the visible slots of each page; 0: the row holds no page there
    placed        bool [n, L, H]: pages with a page of positions for their slots
    bases         int32 [n], as in the chunk table
    has_sidecar   bool [n]
    """

    names: tuple[bytes, ...]
    is_shared: bool
    tokens: Int32s
    num_attached: int
    kinds: NDArray[np.uint8]
    masks: NDArray[np.uint64]
    placed: Bools
    bases: Int32s
    has_sidecar: Bools
    namespace: Hashable = None
    start: int = 0
    parent: bytes = b""

    def ends_with_sums(self, name: bytes) -> bool:
        """Whether the named chunk is the last one and the run has an attachment."""
        return self.num_attached > 0 and self.names[-1] == name


class Pages:
    """The pages of a run in an arena, under a hold: until `release` they neither move nor change, even if the run's
    rows are freed.
    """

    def __init__(self, table: ChunkTable, run: Run, rows: Int32s) -> None:
        self.run = run
        self._table = table
        self._ids = table.pages[rows].copy()
        self._positions = table.positions[rows].copy()
        self._sidecars = table.sidecars[rows].copy()
        self._held = table.hold(rows)

    @classmethod
    def of(
        cls,
        table: ChunkTable,
        names: tuple[bytes, ...],
        rows: Int32s,
        *,
        attached: int = 0,
        tokens: Int32s | None = None,
    ) -> Pages:
        """The pages of some rows of the table. The last `attached` rows are the attachment. tokens: of a shared run."""
        is_shared = tokens is not None
        run = Run(
            names,
            is_shared,
            np.empty(0, np.int32) if tokens is None else tokens,
            attached,
            table.kinds[rows].copy(),
            table.masks[rows],
            table.positions[rows] >= 0,
            table.bases[rows].copy(),
            table.sidecars[rows] >= 0,
        )
        chunks = slice(len(rows) - attached)
        assert not is_shared or ((run.masks[chunks] == ALL_SLOTS).all() and not run.placed.any()), (
            "a shared run is complete"
        )
        return cls(table, run, rows)

    def pack(self, layers: range) -> Iterator[bytes]:
        """The extents of some layers."""
        for layer in layers:
            yield self._extent(layer)

    def release(self) -> None:
        """Ends the hold: the bytes are copied, or not needed."""
        self._table.ledger.release(self._held)

    def _extent(self, layer: int) -> bytes:
        table, run = self._table, self.run
        at = _Layout(table, run, layer)
        body = np.empty(at.num_bytes, np.uint8)
        for page_bytes, held in at.by_size():
            _scatter(body, at.offsets[held], _load(table, self._ids[:, layer][held], page_bytes))
        if at.placed.any():
            images = _load(table, self._positions[:, layer][at.placed], POSITIONS_BYTES)
            _scatter(body, at.positions[at.placed], images)
        for page, start in zip(self._sidecars[run.has_sidecar].tolist(), at.sidecars, strict=True):
            body[start : start + at.beside] = table.arena.read(page * UNIT + layer * at.beside, at.beside)
        return _seal(run, layer, at.head + body.tobytes())


class _Layout:
    """The layout of a layer's extent after the header: the description of the rows (`head`); then for each row and head
    the page and its positions; then the layer's part of each sidecar.

    offsets, positions  int64 [n, H], counted from the end of `head`
    sidecars           such offsets, for the rows with a sidecar
    beside             bytes of a layer's part of a sidecar
    """

    def __init__(self, table: ChunkTable, run: Run, layer: int) -> None:
        masks, self.placed = run.masks[:, layer], run.placed[:, layer]
        self._held, self._sizes = masks != 0, table.sizes[run.kinds][:, layer]
        lengths = np.where(self._held, self._sizes, 0).astype(np.int64) + self.placed * POSITIONS_BYTES
        ends = np.cumsum(lengths.reshape(-1)).reshape(lengths.shape)
        self.offsets, self.positions = ends - lengths, ends - POSITIONS_BYTES
        self.beside = 0 if table.sinks is None else table.sinks.layer_bytes
        num_sidecars, end = int(run.has_sidecar.sum()), int(ends[-1, -1])
        self.sidecars = [end + index * self.beside for index in range(num_sidecars)]
        self.num_bytes = end + num_sidecars * self.beside
        parts = (
            run.kinds,
            run.has_sidecar.astype(np.uint8),
            self.placed.astype(np.uint8),
            run.bases.astype("<i4"),
            masks.astype("<u8"),
        )
        self.head = b"".join(part.tobytes() for part in parts)

    def by_size(self) -> Iterator[tuple[int, Bools]]:
        """Each page size, and which pages have it, bool [n, H]."""
        for page_bytes in np.unique(self._sizes[self._held]).tolist():
            yield page_bytes, self._held & (self._sizes == page_bytes)


def _seal(run: Run, layer: int, rest: bytes) -> bytes:
    n, _, heads = run.masks.shape
    fields = MAGIC, FORMAT_VERSION, run.is_shared * _IS_SHARED, layer, n, run.num_attached, heads, len(rest)
    named = b"".join(run.names) + _HEADER.pack(*fields, bytes(16), bytes(32))
    checksum = hashlib.blake2b(named + rest, digest_size=16).digest()
    return _HEADER.pack(*fields, checksum, bytes(32)) + rest


def demand_of(table: ChunkTable, run: Run) -> Demand:
    """The pages and rows that a run takes in an arena."""
    sizes = table.sizes[run.kinds]
    held = (sizes[run.masks != 0], np.full(int(run.placed.sum()), POSITIONS_BYTES))
    beside = np.full(int(run.has_sidecar.sum()), table.sidecar_bytes)
    return table.demand_of_sizes(np.concatenate((*held, beside)), num_rows=len(run.kinds))


def take_rows(table: ChunkTable, run: Run) -> Int32s:
    """Takes rows of a table, with pages, for a whole run; int32 [n]. Their bytes follow. Raises CacheFullError."""
    rows = np.empty(len(run.kinds), np.int32)
    is_whole = (run.masks == ALL_SLOTS).all((1, 2)) & ~run.placed.any((1, 2)) & ~run.has_sidecar
    for kind in np.unique(run.kinds[is_whole]).tolist():
        alike = np.flatnonzero(is_whole & (run.kinds == kind))
        rows[alike] = table.take(len(alike), table.codecs[kind])
    for index in np.flatnonzero(~is_whole).tolist():
        kind, has_sidecar = int(run.kinds[index]), bool(run.has_sidecar[index])
        rows[index] = table.take_part(kind, run.masks[index], run.placed[index], has_sidecar)
    table.bases[rows] = run.bases
    return rows


def unpack(table: ChunkTable, run: Run, rows: Int32s, extent: bytes) -> int:
    """Writes an extent of a run into pages. Returns its layer. Raises ExtentError, and writes nothing, if the extent is
    damaged, has another format, or is not of this run.

    rows  int32 [n], for each row of the run the row of the table that takes it; -1: not needed
    """
    layer, rest = _open(run, extent)
    at = _Layout(table, run, layer)
    if not rest.startswith(at.head) or len(rest) != len(at.head) + at.num_bytes:
        raise ExtentError(f"layer {layer} holds other pages than its run")
    body = np.frombuffer(rest, np.uint8, offset=len(at.head))
    wanted = (rows >= 0)[:, None]
    for page_bytes, held in at.by_size():
        chosen = held & wanted
        if chosen.any():
            images = _gather(body, at.offsets[chosen], page_bytes)
            table.arena.store(table.pages[rows, layer][chosen], page_bytes, images)
    chosen = at.placed & wanted
    if chosen.any():
        images = _gather(body, at.positions[chosen], POSITIONS_BYTES)
        table.arena.store(table.positions[rows, layer][chosen], POSITIONS_BYTES, images)
    for row, start in zip(rows[run.has_sidecar].tolist(), at.sidecars, strict=True):
        if row >= 0:
            table.arena.write(int(table.sidecars[row]) * UNIT + layer * at.beside, body[start : start + at.beside])
    return layer


def _open(run: Run, extent: bytes) -> tuple[int, bytes]:
    """Checks an extent. Returns its layer, and the bytes after the header."""
    if len(extent) < _HEADER.size:
        raise ExtentError(f"an extent of {len(extent)} bytes has no header")
    magic, version, _, layer, *_ = _HEADER.unpack_from(extent)
    if magic != MAGIC or version != FORMAT_VERSION:
        raise ExtentError(f"an extent of format {magic!r} {version}, and this is {MAGIC!r} {FORMAT_VERSION}")
    rest = extent[_HEADER.size :]
    if layer >= run.masks.shape[1] or extent != _seal(run, layer, rest):
        raise ExtentError(f"the extent of layer {layer} is damaged, or of another run: its checksum is another")
    return layer, rest


def _load(table: ChunkTable, ids: Int32s, page_bytes: int) -> NDArray[np.uint8]:
    found: NDArray[np.uint8] = table.arena.load(ids, page_bytes).cpu().numpy()
    return found


def _scatter(body: NDArray[np.uint8], offsets: NDArray[np.int64], images: NDArray[np.uint8]) -> None:
    for start, image in zip(offsets.tolist(), images, strict=True):
        body[start : start + len(image)] = image


def _gather(body: NDArray[np.uint8], offsets: NDArray[np.int64], page_bytes: int) -> NDArray[np.uint8]:
    found = np.empty((len(offsets), page_bytes), np.uint8)
    for image, start in zip(found, offsets.tolist(), strict=True):
        image[:] = body[start : start + page_bytes]
    return found
