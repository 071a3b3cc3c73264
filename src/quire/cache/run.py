"""Runs: chunks that leave or enter an arena, with everything another arena needs to attend to them.

A run is packed layer by layer into extents, bytes with a header. Chunks leave an arena in no other form. Pages that a
row does not hold are in no extent. Knows rows of the chunk table and their bytes, not sequences.
docs/reference/page-format.md defines the header. Checksum and MAC are zero here: the code that sends extents out of the
process signs them.
"""

from __future__ import annotations

import copy
import itertools
import struct
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.cache.arrays import Bools, Bytes, Int32s
from quire.cache.counts import POSITIONS_BYTES
from quire.cache.ledger import PAGE_TOKENS, UNIT, Demand
from quire.cache.namespace import FORMAT_VERSION
from quire.cache.table import ALL_SLOTS, ChunkTable
from quire.errors import ExtentError

MAGIC = b"QRUN"
_HEADER = struct.Struct("<4sHHIIIIQ16s32s")
_IS_SHARED = 1
CHECKSUM, MAC = slice(32, 48), slice(48, 80)
"""The bytes of an extent's header that are reserved for its checksum and MAC."""

NO_TOKENS = np.empty(0, np.int32)

RUN_BYTES, RUN_CHUNKS = 4 << 20, 16
"""A run that is demoted to a tier has at most this many bytes, or one chunk, and at most this many chunks. Copying
4 MiB out of the arena takes 1.5 ms of the engine's thread, which a decode step can spare, and a disk reads pieces of
1 MiB nearly as fast as larger ones."""


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
    is_divisible  whether any of its chunks can be sent alone. Otherwise its extents are sent as they are stored
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
    is_divisible: bool = False

    def part(self, wanted: Bools) -> Run:
        """A run of some of its rows, bool [n], for a source that packs only the requested chunks."""
        chunks = wanted[: len(wanted) - self.num_attached]
        first = int(np.argmax(chunks))
        return replace(
            self,
            names=tuple(itertools.compress(self.names, chunks)) if self.is_shared else self.names,
            tokens=self.tokens.reshape(-1, PAGE_TOKENS)[chunks].reshape(-1) if self.is_shared else self.tokens,
            num_attached=int(wanted[len(chunks) :].sum()),
            kinds=self.kinds[wanted],
            masks=self.masks[wanted],
            placed=self.placed[wanted],
            bases=self.bases[wanted],
            has_sidecar=self.has_sidecar[wanted],
            start=self.start + first,
            parent=self.names[first - 1] if first else self.parent,
        )

    def ends_with_sums(self, name: bytes) -> bool:
        """Whether the named chunk is the last one and the run has an attachment."""
        return self.num_attached > 0 and self.names[-1] == name


class RunIdentity(NamedTuple):
    """The names and the origin of a run; the fields are those of `Run`. A private run has only a handle."""

    names: tuple[bytes, ...]
    tokens: Int32s = NO_TOKENS
    namespace: Hashable = None
    start: int = 0
    parent: bytes = b""

    def part(self, first: int, end: int) -> RunIdentity:
        """The origin of its chunks [first, end)."""
        parent = self.names[first - 1] if first else self.parent
        tokens = self.tokens[first * PAGE_TOKENS : end * PAGE_TOKENS]
        return RunIdentity(self.names[first:end], tokens, self.namespace, self.start + first, parent)

    def subset(self, chunks: list[int]) -> RunIdentity:
        """The origin of some of its chunks, by rising index."""
        first = chunks[0]
        parent = self.names[first - 1] if first else self.parent
        tokens = self.tokens.reshape(-1, PAGE_TOKENS)[chunks].reshape(-1)
        names = tuple(self.names[chunk] for chunk in chunks)
        return RunIdentity(names, tokens, self.namespace, self.start + first, parent)


class HeldPages:
    """The pages of a run in an arena, under a hold: until `release` they neither move nor change, even if the run's
    rows are freed.
    """

    def __init__(self, table: ChunkTable, identity: RunIdentity, rows: Int32s, *, attached: int = 0) -> None:
        """The pages of some rows of the table. The last `attached` rows are the attachment."""
        is_shared, chunks = len(identity.tokens) > 0, slice(len(rows) - attached)
        self.run = run = Run(
            **identity._asdict(), is_shared=is_shared, num_attached=attached, kinds=table.kinds[rows],
            masks=table.masks[rows], placed=table.positions[rows] >= 0, bases=table.bases[rows],
            has_sidecar=table.sidecars[rows] >= 0,
        )  # fmt: skip
        assert not is_shared or ((run.masks[chunks] == ALL_SLOTS).all() and not run.placed.any()), (
            "a shared run is complete"
        )
        self._table = table
        self._ids, self._positions, self._sidecars = table.pages[rows], table.positions[rows], table.sidecars[rows]
        self._held = table.hold(rows)

    def part(self, wanted: Bools) -> HeldPages:
        """The pages of some rows, bool [n], which are valid as long as these are held."""
        found = copy.copy(self)
        found.run = self.run.part(wanted)
        found._ids, found._positions = self._ids[wanted], self._positions[wanted]
        found._sidecars, found._held = self._sidecars[wanted], self._held[:0]
        return found

    def pack(self, layers: range) -> Iterator[memoryview]:
        """The extents of some layers, each valid until the next one is taken."""
        at = extent_layout(self._table, self.run)
        buffer = np.empty(max(at.num_bytes[layer] for layer in layers), np.uint8)
        for layer in layers:
            extent = buffer[: at.num_bytes[layer]]
            extent[: len(at.heads[layer])] = np.frombuffer(at.heads[layer], np.uint8)
            self._fill(layer, at, extent)
            yield extent.data

    @property
    def num_bytes(self) -> int:
        """Bytes of the pages and of their positions."""
        return run_bytes(self._table, self.run)

    def release(self) -> None:
        """Ends the hold, once the bytes are copied or no longer needed."""
        self._table.ledger.release(self._held)

    def _fill(self, layer: int, at: ExtentLayout, extent: Bytes) -> None:
        """Copies the pages of a layer, their positions and the layer's part of sidecars."""
        arena = self._table.arena
        for ids, group in _pieces(self._ids, self._positions, at, layer):
            _windows(extent, group.page_bytes)[group.offsets] = arena.images(ids, group.page_bytes)
        for index, page in enumerate(self._sidecars[self.run.has_sidecar].tolist()):
            start = at.sidecars[layer] + index * at.beside
            extent[start : start + at.beside] = arena.read(page * UNIT + layer * at.beside, at.beside)


def complete_run(table: ChunkTable, identity: RunIdentity) -> Run:
    """The run of complete chunks that are sealed in another arena of the same format. Any of them may be sent alone."""
    n, shape = len(identity.names), table.shape
    starts = np.arange(identity.start, identity.start + n) == 0
    return Run(
        **identity._asdict(), is_shared=True, num_attached=0, is_divisible=True,
        kinds=np.full(n, table.sealed_codec.kernel_id, np.uint8), masks=np.full((n, *shape), ALL_SLOTS, np.uint64),
        placed=np.zeros((n, *shape), bool), bases=np.full(n, -1, np.int32),
        has_sidecar=starts & (table.sidecar_bytes > 0),
    )  # fmt: skip


class PageGroup:
    """Pages of one size in an extent.

    held     which of the run's pages they are, bool [n, H]
    offsets  their offsets in the extent, int64 [k]
    step     bytes from one page to the next if this is constant, otherwise None
    """

    def __init__(self, page_bytes: int, held: Bools, starts: NDArray[np.int64]) -> None:
        """starts: the offset of every page of the run, int64 [n, H]."""
        self.page_bytes, self.held = page_bytes, held
        self.offsets: NDArray[np.int64] = starts[held]
        steps = np.diff(self.offsets)
        self.step = None if (steps != steps[:1]).any() else int(steps[0]) if len(steps) else page_bytes

    def images(self, body: Bytes) -> Bytes:
        """The pages, uint8 [k, page_bytes]: a view where they lie at equal distances, otherwise a copy."""
        if self.step is None:
            return _windows(body, self.page_bytes)[self.offsets]
        shape, first = (len(self.offsets), self.page_bytes), int(self.offsets[0])
        return np.ndarray(shape, np.uint8, body, first, (self.step, 1))


class ExtentLayout:
    """The layout of a run's extents. After the header: the description of the rows; then for each row and head the page
    and its positions; then the layer's part of each sidecar.

    heads      by layer: the header without checksum and MAC, and the description of the rows
    num_bytes  by layer: bytes of a whole extent
    groups     by layer: a group for each page size
    placed     by layer: the group of pages of positions; None: no page has positions
    sidecars   by layer: the offset of the first sidecar's part; those of further rows follow it
    beside     bytes of a layer's part of a sidecar
    """

    def __init__(self, table: ChunkTable, run: Run) -> None:
        masks, placed = run.masks.transpose(1, 0, 2), run.placed.transpose(1, 0, 2)  # [L, n, H]
        held, sizes = masks != 0, table.sizes[run.kinds].transpose(1, 0, 2)
        num_layers, n, num_heads = masks.shape
        lengths = np.where(held, sizes, 0).astype(np.int64) + placed * POSITIONS_BYTES
        ends = np.cumsum(lengths.reshape(num_layers, -1), 1).reshape(lengths.shape)
        self.heads: list[bytes] = []
        self.num_bytes: list[int] = []
        self.groups: list[list[PageGroup]] = [[] for _ in range(num_layers)]
        self.placed: list[PageGroup | None] = [None] * num_layers
        self.beside = 0 if table.sinks is None else table.sinks.layer_bytes
        alike = run.kinds.tobytes() + run.has_sidecar.astype(np.uint8).tobytes()
        bases, beside = run.bases.astype("<i4").tobytes(), int(run.has_sidecar.sum()) * self.beside
        flags, fixed = run.is_shared * _IS_SHARED, _HEADER.size + n * (1 + 1 + 4 + num_heads * 9)
        starts = ends - lengths + fixed
        self.sidecars: list[int] = (ends[:, -1, -1] + fixed).tolist()
        for layer, end in enumerate(self.sidecars):
            self.num_bytes.append(end + beside)
            size = end + beside - _HEADER.size
            fields = MAGIC, FORMAT_VERSION, flags, layer, n, run.num_attached, num_heads, size
            parts = placed[layer].astype(np.uint8).tobytes(), bases, masks[layer].astype("<u8").tobytes()
            self.heads.append(b"".join((_HEADER.pack(*fields, bytes(16), bytes(32)), alike, *parts)))
            if placed[layer].any():
                self.placed[layer] = PageGroup(POSITIONS_BYTES, placed[layer], ends[layer] + fixed - POSITIONS_BYTES)
        for page_bytes in np.unique(sizes[held]).tolist():
            group = held & (sizes == page_bytes)
            for layer in np.flatnonzero(group.any((1, 2))).tolist():
                self.groups[layer].append(PageGroup(page_bytes, group[layer], starts[layer]))


def extent_layout(table: ChunkTable, run: Run) -> ExtentLayout:
    """The layout of a run's extents. It takes 0.5 ms to compute, so layouts of short runs of complete chunks, which
    recur, are cached. Long runs, which come from other instances, have too many different lengths.
    """
    if not run.is_shared or run.num_attached or len(run.kinds) > RUN_CHUNKS:
        return ExtentLayout(table, run)
    key = run.kinds.tobytes(), run.has_sidecar.tobytes(), run.bases.tobytes()
    if (known := table.layouts.get(key)) is None:
        known = table.layouts[key] = ExtentLayout(table, run)
    return known


def demand_of(table: ChunkTable, run: Run) -> Demand:
    """The pages and rows that a run takes in an arena."""
    sizes = table.sizes[run.kinds]
    held = (sizes[run.masks != 0], np.full(int(run.placed.sum()), POSITIONS_BYTES))
    beside = np.full(int(run.has_sidecar.sum()), table.sidecar_bytes)
    return table.demand_of_sizes(np.concatenate((*held, beside)), num_rows=len(run.kinds))


def run_bytes(table: ChunkTable, run: Run) -> int:
    """Bytes of the pages of a run."""
    pages = table.sizes[run.kinds][run.masks != 0].sum()
    return int(pages) + POSITIONS_BYTES * int(run.placed.sum())


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


class RunUnpacker:
    """A run that arrives in an arena.

    rows  int32 [n], for each row of the run the row of the table that takes it; -1: not needed
    """

    def __init__(self, table: ChunkTable, run: Run, rows: Int32s) -> None:
        self.rows = rows
        self._table = table
        self._run = run
        self._at = extent_layout(table, run)
        self._ids, self._positions = table.pages[rows], table.positions[rows]
        self._is_wanted = None if (rows >= 0).all() else np.broadcast_to((rows >= 0)[:, None], self._ids[:, 0].shape)

    def unpack(self, extent: memoryview | bytes) -> int:
        """Writes an extent of the run into pages. Returns its layer. Raises ExtentError, and writes nothing, if it has
        another format or belongs to another run. Does not verify the checksum of its pages; that is the caller's task.
        """
        table, at, layer = self._table, self._at, layer_of(extent)
        if layer >= len(at.heads):
            raise ExtentError(f"an extent of layer {layer}, and the model has {len(at.heads)}")
        head = at.heads[layer]
        if (
            len(extent) != at.num_bytes[layer]
            or extent[: CHECKSUM.start] != head[: CHECKSUM.start]
            or extent[MAC.stop : len(head)] != head[MAC.stop :]
        ):
            raise ExtentError(f"the extent of layer {layer} is of another run")
        body = np.frombuffer(extent, np.uint8)
        for ids, group in _pieces(self._ids, self._positions, at, layer):
            images = group.images(body)
            if self._is_wanted is not None:
                wanted = self._is_wanted[group.held]
                ids, images = ids[wanted], images[wanted]
            table.arena.store(ids, group.page_bytes, images)
        for index, row in enumerate(self.rows[self._run.has_sidecar].tolist()):
            start = at.sidecars[layer] + index * at.beside
            if row >= 0:
                part = body[start : start + at.beside]
                table.arena.write(int(table.sidecars[row]) * UNIT + layer * at.beside, part)
        return layer


def layer_of(extent: memoryview | bytes) -> int:
    """The layer of an extent. Raises ExtentError if it has another format."""
    if len(extent) < _HEADER.size:
        raise ExtentError(f"an extent of {len(extent)} bytes has no header")
    magic, version, _, layer, *_ = _HEADER.unpack_from(extent)
    if magic != MAGIC or version != FORMAT_VERSION:
        raise ExtentError(f"an extent of format {magic!r} {version}, and this is {MAGIC!r} {FORMAT_VERSION}")
    return int(layer)


def _pieces(ids: Int32s, positions: Int32s, at: ExtentLayout, layer: int) -> Iterator[tuple[Int32s, PageGroup]]:
    """The groups of a layer, with the ids of their pages in an arena. ids, positions: int32 [n, L, H], of the run."""
    for group in at.groups[layer]:
        yield ids[:, layer][group.held], group
    if (placed := at.placed[layer]) is not None:
        yield positions[:, layer][placed.held], placed


def _windows(body: Bytes, page_bytes: int) -> Bytes:
    """The pages of an extent by their offsets, uint8 [offsets, page_bytes], which overlap. Indexing copies whole pages
    without a loop in Python.
    """
    return np.ndarray((len(body) - page_bytes + 1, page_bytes), np.uint8, body, 0, (1, 1))
