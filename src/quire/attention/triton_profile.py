"""Profiling of a step's slices on a GPU: column sums, and the rows that `recovered` reads again.

A step has two kinds of columns, like short and tall pieces. Columns of slices of one row do little but read keys.
Columns of many rows are a matrix product each. Arrays of decode steps have fixed addresses, which graphs hold.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from quire.attention.kernels.launch import Launch, profile_launch, single_profile_launch
from quire.attention.kernels.profile import keep_keys, place_queries, recover, sum_columns, sum_single_columns
from quire.attention.pages import PageTable
from quire.attention.profile import FAR_TOKENS
from quire.attention.rows import RowSlice
from quire.attention.spec import AttentionSpec
from quire.attention.triton_layers import LaunchedLayer, Layers
from quire.attention.triton_memory import TableMirror
from quire.cache.ledger import PAGE_TOKENS, UNIT

COLUMN_INTS = 8
"""See `kernels.profile`."""

_ALWAYS = np.iinfo(np.int32).max
"""A position that no row reaches: all rows see the chunk as it was computed."""

PLACE_ROWS = 32
"""Query rows x G per program of `place_queries`."""

SINGLES_PER_PROCESSOR = 8
"""Programs for columns of one row that a multiprocessor holds at once, so that several loads are in flight. A guess,
not measured: each loads 16 KiB of keys at head size 128."""

_HEADER = 32
"""int32s before the columns in their buffer (128 bytes). The first is the number of columns of slices of one row."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """The last rows of a slice, which `recovered` reads again.

    first_index     index of the first row among all kept rows of the step
    count           number of rows
    first_position  position of the first row
    chunks          int32 [n, KEPT_INTS], the chunks that the rows see, as in `kernels.profile`
    first_start     position of the first slot of the first chunk
    """

    first_index: int
    count: int
    first_position: int
    chunks: NDArray[np.int32]
    first_start: int


class ProfileMemory:
    """GPU memory that profiles keep from step to step. Buffers of decode steps never move, because graphs hold them.

    sums          the arena as float32
    lse           f32 [batch, H, G] of decode steps, base 2; a layer uses the beginning, in its own shape
    queries       [H * batch * G * D] of decode steps, rotated and scaled, likewise
    columns       int32, the one buffer of all decode steps' columns
    num_programs  programs for columns of slices of one row, of all kv heads together
    launches, single_launches  of each kind of layer, for slices of many rows and of one row
    window        the longest one of any layer; None if a layer sees all tokens
    """

    def __init__(
        self,
        spec: AttentionSpec,
        layers: Layers,
        mirror: TableMirror,
        processors: int,
        batch_size: int,
        max_columns: int,
    ) -> None:
        self.spec = spec
        self.layers = layers
        self.mirror = mirror
        self.device = spec.table.arena.device
        arena = spec.table.arena.data
        self.arena, self.sums = arena.view(spec.dtype), arena.view(torch.float32)
        self._words = None if layers.tables is None else arena.view(torch.int32)
        self.lse = torch.empty(batch_size * layers.most_heads, dtype=torch.float32, device=self.device)
        self.queries = torch.empty(batch_size * layers.widest, dtype=spec.dtype, device=self.device)
        self.num_programs = SINGLES_PER_PROCESSOR * processors
        self.launches = [profile_launch(spec.dtype, kind.group_size, kind.head_dim) for kind in layers.kinds]
        self.single_launches = [
            single_profile_launch(spec.dtype, kind.group_size, kind.head_dim) for kind in layers.kinds
        ]
        self.columns = torch.zeros(_HEADER + COLUMN_INTS * max_columns, dtype=torch.int32, device=self.device)
        self._scratch: dict[str, Tensor] = {}
        windows = [kind.window for kind in layers.kinds]
        self.window = None if None in windows else max(window for window in windows if window is not None)

    def scratch_buffer(self, name: str, count: int, dtype: torch.dtype) -> Tensor:
        """A buffer of at least `count` elements. The next call with the same name may return it again."""
        if name not in self._scratch or len(self._scratch[name]) < count:
            self._scratch[name] = torch.empty(count, dtype=dtype, device=self.device)
        return self._scratch[name]

    @property
    def pages(self) -> tuple[Tensor | None, ...]:
        """The kernels' arguments from `arena` to `masks`, without `sums`."""
        return self.arena, self._words, self.mirror.pages, self.mirror.masks

    def encoded(self, of: LaunchedLayer) -> tuple[Tensor | None, ...]:
        """The kernels' arguments about encoded pages, from `slot_positions` on."""
        tables, mirror = self.layers.tables, self.mirror
        if tables is None:
            return (None,) * 8
        positions = mirror.positions, mirror.bases, mirror.sidecars
        return *positions, of.cos, of.sin, tables.heads, tables.pairs, tables.read_keys


def page_id_of(scratch_buffer: Tensor, table: PageTable) -> int:
    """The id, relative to the arena, of the first page in a separate buffer that has `UNIT` bytes to spare."""
    return -((table.arena.data.data_ptr() - scratch_buffer.data_ptr()) // UNIT)


class StepProfile:
    """The profile of one step.

    own       for each slice the chunks that its rows write, see TileLayout
    lse       f32 [R or more, H, G], base 2, of the last layer, which attention fills
    num_kept  number of kept rows
    """

    def __init__(
        self,
        memory: ProfileMemory,
        slices: Sequence[RowSlice],
        own: Sequence[NDArray[np.int32]],
        batch_size: int | None,
    ) -> None:
        spec = memory.spec
        self._memory = memory
        columns, kept_indices, self._kept, kept_chunks = _columns_of(slices, own, spec, memory.window)
        is_single = columns[:, 1] == 1
        named = np.concatenate((columns[:, 2:5].reshape(-1), kept_chunks))
        memory.mirror.refresh(named[named >= 0])
        self.num_kept = sum(kept.count for kept in self._kept.values())
        self._num_singles = int(is_single.sum())
        self._num_tall = len(columns) - self._num_singles
        at_indices = _HEADER + columns.size
        host = torch.empty(
            at_indices + len(kept_indices) * (self.num_kept > 0),
            dtype=torch.int32,
            pin_memory=memory.device.type == "cuda",
        )
        ints: NDArray[np.int32] = host.numpy()
        ints[0] = self._num_singles
        ints[_HEADER:at_indices] = np.concatenate((columns[is_single], columns[~is_single])).reshape(-1)
        if self.num_kept:
            ints[at_indices:] = kept_indices
        if batch_size is None or self.num_kept:
            device = torch.empty(len(host), dtype=torch.int32, device=memory.device)
        else:
            device = memory.columns[: len(host)]
        device.copy_(host, non_blocking=True)
        self._num_columns = device[:1]
        self._singles = device[_HEADER:]
        self._tall = device[_HEADER + COLUMN_INTS * self._num_singles :]
        self._kept_indices = device[at_indices:] if self.num_kept else None
        layers = memory.layers
        self.lse, self._queries = memory.lse, memory.queries
        if batch_size is None:
            num_rows = len(kept_indices)
            self.lse = memory.scratch_buffer("lse", num_rows * layers.most_heads, torch.float32)
            self._queries = memory.scratch_buffer("queries", num_rows * layers.widest, spec.dtype)
        # Where the kept rows of each layer begin, and where those of the last layer end.
        self._at_lse = _ends(self.num_kept * each.layer.num_heads for each in layers.all)
        self._at_queries = _ends(self.num_kept * each.layer.num_heads * each.layer.head_dim for each in layers.all)
        self._kept_queries = self._kept_lse = None
        if self.num_kept:
            self._kept_queries = memory.scratch_buffer("kept_queries", self._at_queries[-1], spec.dtype)
            self._kept_lse = memory.scratch_buffer("kept_lse", self._at_lse[-1], torch.float32)
        self._num_pages = len(kept_chunks)
        self._kept_chunks = torch.from_numpy(kept_chunks).to(memory.device) if self._num_pages else None
        self._kept_pages: list[int] = []
        if self._num_pages:
            # Half a dense page for each lane. Few steps need it, so it is not kept from step to step.
            sizes = [self._num_pages * each.layer.num_kv_heads * (each.page["PAGE"] // 2) for each in layers.all]
            ends = _ends(sizes)
            self._kept_keys = torch.empty((ends[-1] + 1) * UNIT, dtype=torch.uint8, device=memory.device)
            first = page_id_of(self._kept_keys, spec.table)
            self._kept_pages = [first + end for end in ends]

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """A context in which a decode step has no columns and thus adds no sums."""
        count = self._num_columns.clone()
        self._num_columns.zero_()
        yield
        self._num_columns.copy_(count)

    def add(self, layer: int, q: Tensor, positions: Tensor, staged: int) -> None:
        """Adds the attention of profiled rows to their column sums, and keeps the last rows. Needs the lse of the
        layer's attention, so it runs after that.

        q       un-rotated [R, H * G, D], rows strided
        staged  page id of the first staged page
        """
        memory, of = self._memory, self._memory.layers.all[layer]
        num_kv_heads, group_size = of.layer.num_kv_heads, of.layer.group_size
        kept: tuple[Tensor | None, Tensor | None] = (None, None)
        if self._kept_queries is not None and self._kept_lse is not None:
            kept = self._kept_queries[self._at_queries[layer] :], self._kept_lse[self._at_lse[layer] :]
        place_queries[(num_kv_heads, triton.cdiv(len(q) * group_size, PLACE_ROWS))](
            q, self._queries, self.lse, self._kept_indices, *kept, of.cos, of.sin, positions, len(q), self.num_kept,
            q.stride(0), H=num_kv_heads, G=group_size, D=of.layer.head_dim, DP=of.page["DP"], ROWS=PLACE_ROWS,
            SCALE=of.scores["SCALE"], ROTATE=of.cos is not None, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
        if self._num_pages:
            keep_keys[(num_kv_heads, self._num_pages)](
                memory.arena, memory.mirror.pages, self._kept_chunks, staged, self._kept_pages[layer],
                of.layer.first_lane, **of.page, num_warps=4,
            )  # fmt: skip
        arena, words, *mirror = memory.pages
        inputs = (
            self._queries, self.lse, arena, words, memory.sums, *mirror, *memory.encoded(of), positions,
        )  # fmt: skip
        numbers = staged, of.layer.first_lane, len(q)
        if self._num_singles:
            num_programs = -(-memory.num_programs // num_kv_heads)
            options = self._options(of, memory.single_launches[of.kind])
            sum_single_columns[(num_kv_heads, num_programs)](
                *inputs, self._num_columns, self._singles, *numbers, **options
            )
        if self._num_tall:
            options = self._options(of, memory.launches[of.kind])
            sum_columns[(num_kv_heads, self._num_tall)](*inputs, self._tall, *numbers, **options)

    def recovered(self, slice_index: int, kept: NDArray[np.uint64], local: NDArray[np.int64]) -> NDArray[np.float64]:
        """See AttentionPlan."""
        assert slice_index in self._kept, f"no rows of slice {slice_index} are kept"
        memory, spec, rows = self._memory, self._memory.spec, self._kept[slice_index]
        shape, num_words = kept.shape[:-1], kept.shape[-1]
        assert math.prod(shape) == spec.num_lanes and shape == local.shape, (
            f"{kept.shape} and {local.shape} for {spec.num_lanes} lanes"
        )
        assert self._kept_queries is not None and self._kept_lse is not None
        out = torch.empty(spec.num_lanes, len(rows.chunks), dtype=torch.float32, device=memory.device)
        words, nearest, chunks = (
            torch.from_numpy(np.ascontiguousarray(array)).to(memory.device)
            for array in (kept.astype(np.uint64).view(np.int64), local.astype(np.int64), rows.chunks)
        )
        words, nearest = words.view(spec.num_lanes, num_words), nearest.view(spec.num_lanes)
        num_queries = np.empty(spec.num_lanes)
        for first_layer, num_layers in memory.layers.runs:
            of = memory.layers.all[first_layer]
            lane = of.layer.first_lane
            num_lanes = num_layers * of.layer.num_kv_heads
            num_queries[lane : lane + num_lanes] = of.layer.group_size * rows.count
            recover[(num_lanes, len(rows.chunks))](
                self._kept_queries[self._at_queries[first_layer] :], self._kept_lse[self._at_lse[first_layer] :],
                *memory.pages, *memory.encoded(of), chunks, words[lane:], nearest[lane:], out[lane:],
                self._kept_pages[first_layer] if self._num_pages else 0, self._num_pages, self.num_kept,
                rows.first_index, rows.count, rows.first_position, rows.first_start, num_words, lane,
                **self._options(of, memory.launches[of.kind]),
            )  # fmt: skip
        found: NDArray[np.float64] = out.double().sum(-1).cpu().numpy() / num_queries
        return found.reshape(shape)

    def _options(self, of: LaunchedLayer, launch: Launch) -> dict[str, int | float]:
        codes = {name: of.codes[name] for name in ("HP", "SINKS", "KIND", "KEY_PARTS", "MOST_KEY_SLOTS")}
        return {
            **of.page, **codes, "G": of.layer.group_size, "ROWS": launch.rows, "WINDOW": of.scores["WINDOW"],
            "SOFT_CAP": of.scores["SOFT_CAP"],
            "ROTATE": self._memory.layers.tables is not None and of.cos is not None,
            "num_warps": launch.warps, "num_stages": launch.stages, "enable_fp_fusion": True,
        }  # fmt: skip


def _ends(sizes: Iterable[int]) -> list[int]:
    """Where arrays of these sizes begin, one after the other, and where the last one ends."""
    return [0, *itertools.accumulate(sizes)]


class _StepColumns(NamedTuple):
    """The columns that a step's profiled slices see.

    columns      int32 [n, COLUMN_INTS]
    kept_indices  int32 [R], for every row its index among the kept rows, or -1
    kept         slice -> its kept rows
    kept_chunks  int32, named as in `StagedWrites`: chunks that the kept rows saw as computed, and that exist so only in
                 this step
    """

    columns: NDArray[np.int32]
    kept_indices: NDArray[np.int32]
    kept: dict[int, _Kept]
    kept_chunks: NDArray[np.int32]


def _columns_of(
    slices: Sequence[RowSlice], written: Sequence[NDArray[np.int32]], spec: AttentionSpec, window: int | None
) -> _StepColumns:
    """window: the longest one of any layer; None if a layer sees all tokens."""
    counts = np.array([piece.num_rows for piece in slices], np.int64)
    first_rows = np.cumsum(counts) - counts
    numbers = [number for number, piece in enumerate(slices) if piece.profiled is not None]
    starts = np.array([slices[number].start for number in numbers], np.int64)
    num_dropped = np.array([slices[number].num_dropped for number in numbers], np.int64)
    low = np.zeros_like(starts) if window is None else np.maximum(0, starts + 1 - window) // PAGE_TOKENS
    high = -(-(starts + counts[numbers]) // PAGE_TOKENS) - num_dropped
    lengths = high - low
    bounds = list(zip(numbers, low.tolist(), high.tolist(), strict=True))
    columns = np.empty((int(lengths.sum()), COLUMN_INTS), np.int32)
    profiles = [profiled for piece in slices if (profiled := piece.profiled) is not None]
    peaks = np.array([profiled.peaks for profiled in profiles], np.int64)
    skipped = np.where(peaks > 0, counts[numbers] - peaks, 0)
    columns[:, 0] = np.repeat(first_rows[numbers] + skipped, lengths)
    columns[:, 1] = np.repeat(counts[numbers] - skipped, lengths)
    columns[:, 2] = np.concatenate([slices[number].chunks[first:end] for number, first, end in bounds])
    columns[:, 3] = columns[:, 2]
    columns[:, 4] = np.concatenate(
        [profiled.sums[first:end] for profiled, (_, first, end) in zip(profiles, bounds, strict=True)]
    )
    ends = np.cumsum(lengths)
    ordinal = np.arange(len(columns)) - np.repeat(ends - lengths, lengths)
    columns[:, 5] = (np.repeat(low + num_dropped, lengths) + ordinal) * PAGE_TOKENS
    near = np.minimum(lengths, [profiled.near for profiled in profiles])
    columns[:, 6] = np.where(ordinal >= np.repeat(lengths - near, lengths), FAR_TOKENS, 0)
    columns[np.repeat(peaks == 0, lengths), 6] = -1
    columns[:, 7] = _ALWAYS
    if spec.table.encodes:
        own = [written[number] for number in numbers]
        sizes = np.array([len(chunks) for chunks in own])
        at = np.arange(int(sizes.sum())) + np.repeat(ends - np.cumsum(sizes), sizes)
        columns[:, 7] = 0
        columns[at, 2] = np.concatenate(own)
        # Rows of a chunk that the step fills see it as computed; if not strict, all rows of the slice do.
        filled = columns[at, 2] != columns[at, 3]
        columns[at, 7] = np.where(filled & spec.strict, columns[at, 5] + PAGE_TOKENS, _ALWAYS)
    kept_indices = np.full(int(counts.sum()), -1, np.int32)
    kept: dict[int, _Kept] = {}
    kept_chunks: list[int] = []
    num_kept = 0
    for index, (number, first, _) in enumerate(bounds):
        piece = slices[number]
        if piece.profiled is not None and (last_rows := piece.profiled.last_rows):
            after = int(first_rows[number]) + piece.num_rows
            kept_indices[after - last_rows : after] = np.arange(num_kept, num_kept + last_rows)
            position = piece.start + piece.num_rows - last_rows
            seen = columns[ends[index] - lengths[index] : ends[index]][:, [2, 3, 7]].copy()
            # Chunks that are encoded by now. As computed, they exist for one layer at a time.
            beside = (seen[:, 0] != seen[:, 1]) & (seen[:, 2] > position)
            names = seen[beside, 0].tolist()
            seen[beside, 0] = ~np.arange(len(kept_chunks), len(kept_chunks) + len(names), dtype=np.int32)
            kept_chunks += names
            kept[number] = _Kept(num_kept, last_rows, position, seen, (first + piece.num_dropped) * PAGE_TOKENS)
            num_kept += last_rows
    return _StepColumns(columns, kept_indices, kept, np.array(kept_chunks, np.int32))
