"""The Triton backend: attention on pages in GPU memory, planned on the host and ready for CUDA graphs.

A decode step's arrays lie in buffers whose addresses and shapes depend on its padded batch size alone, so a graph
captured once reads the plan of every later step. All arrays of a step travel in one copy; page ids are mirrored on the
device, a row when its chunk is new.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from quire.attention.kernels.attend import attend
from quire.attention.kernels.layout import PIECE_INTS, TileLayout, Tiles, lay_out
from quire.attention.kernels.write import write
from quire.attention.plan import AttentionSpec, RowSlice
from quire.cache.page import PAGE_TOKENS, UNIT
from quire.cache.segment import ChunkTable

BATCH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Padded sizes of decode steps; a larger step runs, but not as a graph."""

MAX_DECODE_INDICES = 1 << 19
"""Chunk ids a decode plan holds (2 MiB): 256 sequences of 131,072 tokens. A longer step runs, but not as a graph."""

PIECES_PER_PROCESSOR = 2
"""Programs a multiprocessor holds at once: three stages of a bf16 page of head size 128 are 96 of its 227 KiB."""

WRITE_ROWS = 16
"""Rows of a program of `write`."""

_ALIGN = 32
"""int32s between the starts of arrays in a plan buffer are a multiple of this: 128 bytes."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How the attention kernel is launched for one kind of block."""

    rows: int
    warps: int
    stages: int


def launches(dtype: torch.dtype, group_size: int, head_dim: int) -> tuple[Launch, Launch]:
    """The launches of (short, tall) blocks: tiles of query rows x G.

    Chosen by registers and shared memory (tests/kernels/test_triton_compile.py prints them); `scripts/gpu.sh attention`
    measures them against others.
    """
    least = triton.next_power_of_2(group_size)
    if dtype == torch.float32:
        # Float32 products run outside the tensor cores, their operands in registers: a larger tile spills.
        return Launch(max(16, least), 8, 2), Launch(max(16, least), 8, 2)
    return Launch(max(16, least), 4, 3), Launch(max(128 if head_dim > 32 else 64, least), 8 if head_dim > 32 else 4, 3)


class TritonAttention:
    """Attention on GPU pages in bfloat16, float16 or float32; sums in float32.

    `batch_sizes` are the padded sizes of decode steps, in rising order.
    """

    def __init__(self, spec: AttentionSpec) -> None:
        table = spec.table
        device = table.pool.device
        assert set(table.codecs) == {table.open_codec.kernel_id}, (
            f"the triton backend reads dense pages only, not {list(table.codecs)}"
        )
        assert spec.dtype == table.open_codec.dtype, f"queries in {spec.dtype}, pages in {table.open_codec.dtype}"
        for angles in (spec.cos, spec.sin):
            if angles is not None:
                assert angles.device.type == device.type and angles.dtype == torch.float32 and angles.is_contiguous()
        self.spec = spec
        self.device = device
        self.batch_sizes = BATCH_SIZES
        self.launches = launches(spec.dtype, spec.group_size, spec.head_dim)
        # Off the GPU, in the interpreter, 16 stands for a small machine: enough to split and merge.
        workers = (
            torch.cuda.get_device_properties(device).multi_processor_count * PIECES_PER_PROCESSOR
            if device.type == "cuda"
            else 16
        )
        short, tall = self.launches
        self.tiles = Tiles(spec.group_size, spec.num_kv_heads, short.rows, tall.rows, workers)
        self.arena = table.pool.arena.view(spec.dtype)
        self.mirror = TableMirror(table)
        self.partials = (Partials(self, short.rows), Partials(self, tall.rows))
        largest = self.batch_sizes[-1]
        self._decode = torch.zeros(
            _offsets(largest, largest, self.tiles.max_pieces(largest))[-1] + MAX_DECODE_INDICES,
            dtype=torch.int32,
            device=device,
        )

    def plan(self, slices: Sequence[RowSlice]) -> TritonPlan:
        """See AttentionBackend."""
        layout = lay_out(slices, self.tiles, self.spec.window)
        self.mirror.refresh(layout.indices)
        batch_size = None
        if layout.is_decode and len(layout.indices) <= MAX_DECODE_INDICES:
            batch_size = next((size for size in self.batch_sizes if size >= len(slices)), None)
        return TritonPlan(self, layout, batch_size)

    def decode_buffer(self, num_ints: int) -> Tensor:
        """The start of the one buffer of decode plans."""
        return self._decode[:num_ints]


class TritonPlan:
    """One step of the Triton backend.

    num_rows    R
    batch_size  padded rows of a decode step; None for a step that is none or too large, which cannot be a graph. Keys,
                values and queries have either R rows or batch_size of them; rows past R give zeros
    is_decode   every slice has one row
    """

    def __init__(self, backend: TritonAttention, layout: TileLayout, batch_size: int | None) -> None:
        self._backend = backend
        self.num_rows = len(layout.positions)
        self.batch_size = batch_size
        self.is_decode = layout.is_decode
        self._new: tuple[int, Tensor, Tensor] | None = None
        rows = self.num_rows if batch_size is None else batch_size
        short, tall = layout.short, layout.tall
        capacity = len(short) + len(tall)
        if batch_size is not None:
            capacity = backend.tiles.max_pieces(batch_size)
            # A padded row has a piece without chunks: it reads nothing and writes zeros.
            idle = np.zeros((batch_size - self.num_rows, PIECE_INTS), np.int32)
            idle[:, 0] = np.arange(self.num_rows, batch_size)
            idle[:, [1, 7]] = 1
            short = np.concatenate((short, idle))
        at = _offsets(rows, rows, capacity)
        used = at[-1] + max(1, len(layout.indices))
        host = torch.zeros(used, dtype=torch.int32, pin_memory=backend.device.type == "cuda")
        ints: NDArray[np.int32] = host.numpy()
        ints[: self.num_rows] = layout.positions
        ints[at[0] : at[0] + self.num_rows] = layout.write_chunk
        pieces = ints[at[1] : at[1] + capacity * PIECE_INTS].reshape(capacity, PIECE_INTS)
        pieces[: len(short)] = short
        pieces[len(short) : len(short) + len(tall)] = tall
        ints[at[2] : at[2] + len(layout.indices)] = layout.indices
        device = (
            torch.empty(used, dtype=torch.int32, device=backend.device)
            if batch_size is None
            else backend.decode_buffer(used)
        )
        # The pinned block is reused by torch only once this copy is over.
        device.copy_(host, non_blocking=True)
        self.positions = device[:rows]
        self.write_chunk = device[at[0] : at[0] + rows]
        all_pieces = device[at[1] : at[1] + capacity * PIECE_INTS].view(capacity, PIECE_INTS)
        self.indices = device[at[2] :]
        if batch_size is None:
            self.pieces = (all_pieces[: len(short)], all_pieces[len(short) :])
        else:
            self.pieces = (all_pieces, all_pieces[:0])
        self._num_short = len(layout.short)
        for partials, kind in zip(backend.partials, (short, tall), strict=True):
            partials.reserve(int(np.where(kind[:, 7] > 1, kind[:, 5] + 1, 0).max(initial=0)))

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Rotates keys and stores them and the values, [R, H, D] each, rows strided.

        A decode step stores them in `attend` of the same layer, until when k and v must stay as they are.
        """
        if self.is_decode:
            self._new = layer, k, v
            return
        backend, spec = self._backend, self._backend.spec
        _check(spec, k, spec.num_kv_heads, self.num_rows)
        _check(spec, v, spec.num_kv_heads, self.num_rows)
        write[(spec.num_kv_heads, triton.cdiv(self.num_rows, WRITE_ROWS))](
            k, v, backend.arena, backend.mirror.pages, spec.cos, spec.sin, self.positions, self.write_chunk,
            self.num_rows, layer, k.stride(0), v.stride(0),
            L=spec.num_layers, H=spec.num_kv_heads, D=spec.head_dim, P=PAGE_TOKENS,
            DP=triton.next_power_of_2(spec.head_dim), ROWS=WRITE_ROWS, UNIT=UNIT // spec.dtype.itemsize,
            ROTATE=spec.cos is not None, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """Attention of un-rotated queries [R, H * G, D], rows strided -> [R, H * G * D]."""
        backend, spec = self._backend, self._backend.spec
        rows = self.num_rows if len(q) != self.batch_size else self.batch_size
        _check(spec, q, spec.num_kv_heads * spec.group_size, rows)
        k = v = None
        if self.is_decode:
            assert self._new is not None and self._new[0] == layer, f"attend of layer {layer} without its write"
            _, k, v = self._new
            self._new = None
            _check(spec, k, spec.num_kv_heads, rows)
            _check(spec, v, spec.num_kv_heads, rows)
        out = torch.empty(rows, spec.num_kv_heads * spec.group_size * spec.head_dim, dtype=q.dtype, device=q.device)
        for kind, partials, launch in zip(self.pieces, backend.partials, backend.launches, strict=True):
            # Pieces of padded rows come after the step's own.
            pieces = kind[: self._num_short] if self.batch_size is not None and rows != self.batch_size else kind
            if not len(pieces):
                continue
            attend[(spec.num_kv_heads, len(pieces))](
                q, k, v, out, backend.arena, backend.mirror.pages, spec.cos, spec.sin, self.positions, self.indices,
                pieces,
                partials.o, partials.lse, partials.arrivals,
                layer, q.stride(0), 0 if k is None else k.stride(0), 0 if v is None else v.stride(0),
                L=spec.num_layers, H=spec.num_kv_heads, G=spec.group_size, D=spec.head_dim, P=PAGE_TOKENS,
                DP=triton.next_power_of_2(spec.head_dim), ROWS=launch.rows, UNIT=UNIT // spec.dtype.itemsize,
                SCALE=math.log2(math.e) / math.sqrt(spec.head_dim), WINDOW=spec.window or 0,
                ROTATE=spec.cos is not None, APPEND=self.is_decode, num_warps=launch.warps, num_stages=launch.stages,
                enable_fp_fusion=True,
            )  # fmt: skip
        return out


class TableMirror:
    """`ChunkTable.pages` on the device, at one address.

    pages  int32 [C, L, H] on the device; rows of chunks that no plan has named yet are undefined
    """

    def __init__(self, table: ChunkTable) -> None:
        self._table = table
        self._seen = np.zeros(table.capacity, np.int64)
        self.pages = torch.zeros(table.pages.shape, dtype=torch.int32, device=table.pool.device)

    def refresh(self, chunks: NDArray[np.int32]) -> int:
        """Uploads the rows of those chunks that changed since they were last uploaded; returns how many."""
        ids = chunks[self._seen[chunks] != self._table.takes[chunks]]
        count = len(ids)
        if count == 0:
            return 0
        self._seen[ids] = self._table.takes[ids]
        rows = self._table.pages[ids]
        row_ints = self._table.pages_per_chunk
        host = torch.empty(count * (2 + row_ints), dtype=torch.int32, pin_memory=self.pages.device.type == "cuda")
        host[: 2 * count].view(torch.int64).numpy()[:] = ids
        host[2 * count :].numpy()[:] = rows.reshape(-1)
        sent = host.to(self.pages.device, non_blocking=True)
        # A chunk that several sequences share is named several times, with the same row.
        self.pages.view(-1, row_ints).index_copy_(
            0, sent[: 2 * count].view(torch.int64), sent[2 * count :].view(count, row_ints)
        )
        return count


class Partials:
    """Where the pieces of split blocks leave their partials.

    o         f32 [tiles, H, ROWS, D]
    lse       f32 [tiles, H, ROWS]
    arrivals  int32 [tiles, H], zero between launches

    The short kind is allocated once at its largest, because graphs hold its addresses; the tall kind when first needed.
    """

    def __init__(self, backend: TritonAttention, rows: int) -> None:
        self._spec, self._device, self._rows = backend.spec, backend.device, rows
        self._limit = backend.tiles.max_partial_tiles
        self._allocate(self._limit if rows == backend.tiles.short else 1)

    def _allocate(self, num_tiles: int) -> None:
        spec = self._spec
        self.o = torch.empty(
            num_tiles, spec.num_kv_heads, self._rows, spec.head_dim, dtype=torch.float32, device=self._device
        )
        self.lse = torch.empty(num_tiles, spec.num_kv_heads, self._rows, dtype=torch.float32, device=self._device)
        self.arrivals = torch.zeros(num_tiles, spec.num_kv_heads, dtype=torch.int32, device=self._device)

    def reserve(self, num_tiles: int) -> None:
        """Makes room for so many tiles."""
        assert num_tiles <= self._limit, f"{num_tiles} partial tiles, at most {self._limit}"
        if num_tiles > len(self.arrivals):
            self._allocate(self._limit)


def _offsets(num_positions: int, num_chunks: int, num_pieces: int) -> tuple[int, int, int]:
    """Where the write chunks, the pieces and the indices start in a plan buffer, in int32s; positions start at 0."""

    def after(at: int, count: int) -> int:
        return -(-(at + count) // _ALIGN) * _ALIGN

    write_chunk = after(0, num_positions)
    pieces = after(write_chunk, num_chunks)
    return write_chunk, pieces, after(pieces, num_pieces * PIECE_INTS)


def _check(spec: AttentionSpec, x: Tensor, heads: int, rows: int) -> None:
    assert x.shape == (rows, heads, spec.head_dim), f"{tuple(x.shape)} where [{rows}, {heads}, {spec.head_dim}] belongs"
    assert x.dtype == spec.dtype and x.stride(2) == 1 and (heads == 1 or x.stride(1) == spec.head_dim), (
        f"{x.dtype} with strides {x.stride()}"
    )
