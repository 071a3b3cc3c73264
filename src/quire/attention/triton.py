"""The Triton backend: attention on pages in GPU memory, planned on the host and ready for CUDA graphs.

A decode step's arrays lie in buffers whose addresses and shapes depend on its padded batch size and on whether rows
share anything, so a graph captured once for each reads the plan of every later step. All arrays of a step travel in one
copy, and none while only positions move on: these advance on the device. Page ids are mirrored there, a row when its
chunk is new.

Where sealed chunks are encoded, a prefill step encodes what it fills in every layer, before the layer attends; a decode
step at its end, in all layers at once and outside its graph: no row of it reads what it fills.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from quire.attention.encoded import EncodedTables
from quire.attention.kernels.attend import attend
from quire.attention.kernels.encode import encode_groups, encode_nuq
from quire.attention.kernels.encoded import attend_encoded
from quire.attention.kernels.launch import Launch, common_launch, encoded_launches, launches
from quire.attention.kernels.layout import MAX_PARTIALS, PIECE_INTS, TileLayout, Tiles, lay_out
from quire.attention.kernels.write import write
from quire.attention.plan import AttentionSpec, RowSlice, moves_on
from quire.attention.triton_memory import Partials, TableMirror
from quire.cache.page import PAGE_TOKENS, UNIT

BATCH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Padded sizes of decode steps; a larger step runs, but not as a graph."""

MAX_DECODE_INDICES = 1 << 19
"""Chunk ids a decode plan holds (2 MiB): 256 sequences of 131,072 tokens. A longer step runs, but not as a graph."""

PIECES_PER_PROCESSOR = 2
"""Programs a multiprocessor holds at once: three stages of a bf16 page of head size 128 are 96 of its 227 KiB."""

MIN_SAVED_BYTES = 8 << 20
"""Bytes that a decode step must not read again, or its rows are read apart. A guess, not measured: two microseconds of
an H200's memory, for a second launch in a graph."""

WRITE_ROWS = 16
"""Rows of a program of `write`."""

ENCODE_WARPS = PAGE_TOKENS // 32
"""A thread for each token slot."""

_ALIGN = 32
"""int32s between the starts of arrays in a plan buffer are a multiple of this: 128 bytes."""


_NO_PROFILES = "the triton backend does not profile prompts yet; use attention.backend cpu or reference on a CPU"


class TritonAttention:
    """Attention on GPU pages in bfloat16, float16 or float32; sums in float32.

    batch_sizes  the padded sizes of decode steps, in rising order
    plans_built  plans laid out; other steps moved the last one on
    copies       from the host to the device so far: of plans, and of rows of the mirror
    reads        int32 [C, H] on the device, or None: the kernels of every layer add one for each page they read
    """

    def __init__(self, spec: AttentionSpec) -> None:
        table = spec.table
        device = table.pool.device
        assert spec.dtype == table.open_codec.dtype, f"queries in {spec.dtype}, pages in {table.open_codec.dtype}"
        for angles in (spec.cos, spec.sin):
            if angles is not None:
                assert angles.device.type == device.type and angles.dtype == torch.float32 and angles.is_contiguous()
        self.spec = spec
        self.device = device
        self.batch_sizes = BATCH_SIZES
        self.tables = EncodedTables(table.sealed_codec, spec.head_dim, device) if table.encodes else None
        choose = encoded_launches if table.encodes else launches
        self.launches = choose(spec.dtype, spec.group_size, spec.head_dim)
        # Off the GPU, in the interpreter, 8 stand for a small machine: enough to split and merge.
        on_gpu = device.type == "cuda"
        processors = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 8
        short, tall = self.launches
        # Tiles made in registers leave room for eight warps of a multiprocessor.
        at_once = 8 // short.warps if table.encodes else PIECES_PER_PROCESSOR
        self.tiles = Tiles(
            spec.group_size,
            spec.num_kv_heads,
            short.rows,
            min(tall.rows, PAGE_TOKENS * spec.group_size) if table.encodes else tall.rows,
            processors * at_once,
            processors,
            MIN_SAVED_BYTES * spec.num_layers // table.chunk_bytes(table.sealed_codec) if on_gpu else 0,
        )
        arena = table.pool.arena
        self.arena = arena.view(spec.dtype)
        # The same bytes as codes, ranges and channels are read.
        self.views = arena.view(torch.int32), arena.view(torch.float16), arena
        self.turns = _turns(spec) if table.encodes else None
        self.mirror = TableMirror(table)
        self._staged = torch.empty(0, dtype=torch.uint8, device=device)
        self.partials = Partials(spec)
        self.plans_built = self._plan_copies = 0
        self.reads: Tensor | None = None
        self._last: TritonPlan | None = None
        self._num_moved = 0  # pages of the table at the last plan
        largest = self.batch_sizes[-1]
        self._decode = torch.zeros(
            _offsets(largest, self.max_pieces(largest), MAX_PARTIALS)[-1] + MAX_DECODE_INDICES + 2 * largest,
            dtype=torch.int32,
            device=device,
        )

    @property
    def copies(self) -> int:
        """See the class."""
        return self._plan_copies + self.mirror.copies

    def plan(self, slices: Sequence[RowSlice]) -> TritonPlan:
        """See AttentionBackend. A decode step of the same sequences and chunks takes the last plan one further.

        Raises NotImplementedError for slices that are profiled.
        """
        if any(piece.profiled is not None for piece in slices):
            raise NotImplementedError(_NO_PROFILES)
        if self._num_moved != self.spec.table.num_moved_pages:
            # Rows of the mirror may be old, which only a new plan looks for.
            self._last, self._num_moved = None, self.spec.table.num_moved_pages
        if self._last is not None and self.spec.window is None and moves_on(self._last.slices, slices):
            self._last.advance(slices)
            return self._last
        batch_size, common = None, self.launches[1]
        if all(piece.num_rows == 1 for piece in slices):
            batch_size = next((size for size in self.batch_sizes if size >= len(slices)), None)
        if batch_size is not None:
            common = common_launch(common, self.spec.group_size, batch_size, common.warps if self.tables else 4)
        spec = self.spec
        layout = lay_out(
            slices,
            self.tiles,
            spec.window,
            max(1, common.rows // spec.group_size),
            encodes=spec.table.encodes,
            strict=spec.strict,
        )
        self.mirror.refresh(layout.indices[layout.indices >= 0])
        if len(layout.indices) > MAX_DECODE_INDICES:
            batch_size = None
        self.plans_built += 1
        self._plan_copies += 1
        self._last = TritonPlan(self, slices, layout, batch_size, (self.launches[0], common))
        return self._last

    def max_pieces(self, batch_size: int) -> int:
        """Pieces of a decode step of so many padded rows at most."""
        return self.tiles.max_short(batch_size) + self.tiles.max_common(batch_size)

    def decode_buffer(self, num_ints: int) -> Tensor:
        """The start of the one buffer of decode plans."""
        return self._decode[:num_ints]

    def staged(self, count: int) -> tuple[Tensor, int]:
        """Room for so many dense chunks of one layer, which the next call may give again, and the id that the first of
        its pages has as seen from the arena.
        """
        table = self.spec.table
        size = count * self.spec.num_kv_heads * table.open_codec.page_bytes
        if len(self._staged) < size + UNIT:
            self._staged = torch.empty(size + UNIT, dtype=torch.uint8, device=self.device)
        distance = self._staged.data_ptr() - table.pool.arena.data_ptr()
        return self._staged, -(-distance // UNIT)


class TritonPlan:
    """One step of the Triton backend.

    slices       of the step
    num_rows     R
    batch_size   padded rows of a decode step; None for a step that is none or too large, which cannot be a graph. Keys,
                 values and queries have either R rows or batch_size of them; rows past R give zeros
    shares       some rows share chunks that are read for them together, among the tall pieces
    is_decode    every slice has one row
    short, tall  int32 [n, PIECE_INTS] on the device; of a decode step, padded with pieces of no rows
    """

    def __init__(
        self,
        backend: TritonAttention,
        slices: Sequence[RowSlice],
        layout: TileLayout,
        batch_size: int | None,
        launches: tuple[Launch, Launch],
    ) -> None:
        self._backend = backend
        self._launches = launches
        self.slices = slices
        self.num_rows = len(layout.positions)
        self.batch_size = batch_size
        self.shares = layout.num_common > 0
        self.is_decode = layout.is_decode
        self._new: tuple[int, Tensor, Tensor] | None = None
        short, tall, num_entries = layout.short, layout.tall, len(layout.entries)
        rows, max_short, max_tall, max_entries = self.num_rows, len(short), len(tall), num_entries
        if batch_size is not None:
            max_short = backend.tiles.max_short(batch_size)
            max_tall = backend.tiles.max_common(batch_size) if self.shares else 0
            rows, max_entries = batch_size, MAX_PARTIALS
            # A padded row has a piece without chunks: it reads nothing and writes zeros.
            idle = np.zeros((batch_size - self.num_rows, PIECE_INTS), np.int32)
            idle[:, 0] = np.arange(self.num_rows, batch_size)
            idle[:, 1], idle[:, 5] = 1, -1
            short = np.concatenate((short, idle))
        at = _offsets(rows, max_short + max_tall, max_entries)
        at_seals = at[-1] + max(1, len(layout.indices))
        used = at_seals + layout.seals.size
        host = torch.zeros(used, dtype=torch.int32, pin_memory=backend.device.type == "cuda")
        ints: NDArray[np.int32] = host.numpy()
        ints[: self.num_rows] = layout.positions
        ints[at[0] : at[0] + self.num_rows] = layout.write_chunk
        pieces = ints[at[1] : at[1] + (max_short + max_tall) * PIECE_INTS].reshape(-1, PIECE_INTS)
        pieces[: len(short)] = short
        pieces[max_short : max_short + len(tall)] = tall
        ints[at[2] : at[2] + num_entries] = layout.entries
        ints[at[3] : at[3] + len(layout.indices)] = layout.indices
        ints[at_seals:] = layout.seals.reshape(-1)
        device = (
            torch.empty(used, dtype=torch.int32, device=backend.device)
            if batch_size is None
            else backend.decode_buffer(used)
        )
        # The pinned block is reused by torch only once this copy is over.
        device.copy_(host, non_blocking=True)
        self.positions = device[:rows]
        self.write_chunk = device[at[0] : at[0] + rows]
        all_pieces = device[at[1] : at[1] + (max_short + max_tall) * PIECE_INTS].view(-1, PIECE_INTS)
        self.short, self.tall = all_pieces[:max_short], all_pieces[max_short:]
        self.entries = device[at[2] : at[2] + max(1, max_entries)]
        self.indices = device[at[3] :]
        self._num_seals = len(layout.seals)
        self._seals = device[at_seals:]
        self._staged, self._staged_id = backend.staged(layout.num_staged)
        self._num_short, self._num_tall = len(layout.short), len(layout.tall)

    @property
    def graph_key(self) -> tuple[int, bool] | None:
        """What must be equal for two plans to have their arrays at the same addresses and in the same shapes; None for
        a step that cannot be a graph.
        """
        return None if self.batch_size is None else (self.batch_size, self.shares)

    def advance(self, slices: Sequence[RowSlice]) -> None:
        """Makes it the plan of the slices, which are its own one position on."""
        self.positions[: self.num_rows] += 1
        self.slices = slices

    def recovered(self, slice_index: int, kept: NDArray[np.uint64], local: NDArray[np.int64]) -> NDArray[np.float64]:
        """See AttentionPlan: no slice of this backend is profiled. Raises NotImplementedError."""
        raise NotImplementedError(_NO_PROFILES)

    def seal(self) -> None:
        """Encodes what a decode step has filled, in all layers, once: the last layer's `attend` does it, or whoever
        replays a graph in its place.
        """
        if self.is_decode:
            self._encode(0, self._backend.spec.num_layers)
            self._num_seals = 0

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Stores keys, rotated unless sealed chunks are encoded, and values, [R, H, D] each, rows strided; then encodes
        the layer's pages that are full.

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
            self._staged_id, self.num_rows, layer, k.stride(0), v.stride(0), ROWS=WRITE_ROWS,
            ROTATE=spec.cos is not None and not spec.table.encodes, **_page_sizes(spec), num_warps=4,
            enable_fp_fusion=True,
        )  # fmt: skip
        self._encode(layer, 1)

    def _encode(self, first_layer: int, num_layers: int) -> None:
        if not self._num_seals:
            return
        backend, spec = self._backend, self._backend.spec
        tables, mirror, sinks = backend.tables, backend.mirror, spec.table.sinks
        assert tables is not None
        grid = (spec.num_kv_heads, self._num_seals, num_layers)
        words, halves, octets = backend.views
        if tables.heads is None:
            encode_groups[grid](
                backend.arena, halves, octets, mirror.pages, self._seals, self._staged_id, first_layer,
                **_page_sizes(spec), num_warps=ENCODE_WARPS, enable_fp_fusion=False,
            )  # fmt: skip
            return
        encode_nuq[grid](
            backend.arena, words, halves, octets, mirror.pages, mirror.sidecars, self._seals, self._staged_id,
            tables.heads, tables.pairs, tables.edges, tables.books, tables.weight, tables.value_edges,
            tables.value_books, first_layer,
            HP=tables.pairs_padded, SINKS=sinks.num_tokens if sinks is not None else 0,
            **_page_sizes(spec), num_warps=ENCODE_WARPS, enable_fp_fusion=False,
        )  # fmt: skip

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """Attention of un-rotated queries [R, H * G, D], rows strided -> [R, H * G * D]."""
        backend, spec, partials = self._backend, self._backend.spec, self._backend.partials
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
        # Pieces of padded rows come after the step's own.
        padded = self.batch_size is None or rows == self.batch_size
        short = self.short if padded else self.short[: self._num_short]
        tall = self.tall if padded else self.tall[: self._num_tall]
        short_launch, tall_launch = self._launches
        # Tall before short: what short pieces merge of the others must be there.
        for pieces, launch, is_short in ((tall, tall_launch, False), (short, short_launch, True)):
            if not len(pieces):
                continue
            append = is_short and self.is_decode
            inputs = q, k if append else None, v if append else None, out
            lists = self.positions, self.indices, pieces, self.entries
            sums = partials.o, partials.lse, partials.arrivals, backend.reads
            strides = layer, q.stride(0), 0 if k is None else k.stride(0), 0 if v is None else v.stride(0)
            options = _page_sizes(spec) | {
                "G": spec.group_size, "ROWS": launch.rows, "WINDOW": spec.window or 0, "ROTATE": spec.cos is not None,
                "SCALE": math.log2(math.e) / math.sqrt(spec.head_dim), "APPEND": append,
                "SEEDED": is_short and self.shares, "num_warps": launch.warps, "num_stages": launch.stages,
                "enable_fp_fusion": True,
            }  # fmt: skip
            grid = (spec.num_kv_heads, len(pieces))
            if backend.tables is None:
                del options["PAGE"]
                attend[grid](
                    *inputs, backend.arena, backend.mirror.pages, spec.cos, spec.sin, *lists, *sums, *strides, **options
                )
                continue
            tables, sinks = backend.tables, spec.table.sinks
            attend_encoded[grid](
                *inputs, backend.arena, *backend.views, backend.mirror.pages, backend.mirror.sidecars, spec.cos,
                spec.sin, backend.turns, tables.heads, tables.pairs, tables.read_keys, tables.read_values, *lists,
                *sums, self._staged_id, *strides, HP=tables.pairs_padded,
                SINKS=sinks.num_tokens if sinks is not None else 0, KIND=tables.kernel_id,
                KEY_PARTS=tables.key_parts, VALUE_PARTS=tables.value_parts,
                MOST_KEY_SLOTS=tables.key_slots, MOST_VALUE_SLOTS=tables.value_slots, **options,
            )  # fmt: skip
        if layer == spec.num_layers - 1:
            self.seal()
        return out


def _offsets(num_rows: int, num_pieces: int, num_entries: int) -> tuple[int, int, int, int]:
    """Where the write chunks, the pieces, the entries and the indices start in a plan buffer, in int32s; positions
    start at 0.
    """

    def after(at: int, count: int) -> int:
        return -(-(at + count) // _ALIGN) * _ALIGN

    write_chunk = after(0, num_rows)
    pieces = after(write_chunk, num_rows)
    entries = after(pieces, num_pieces * PIECE_INTS)
    return write_chunk, pieces, entries, after(entries, max(1, num_entries))


def _turns(spec: AttentionSpec) -> Tensor | None:
    """Cosines and sines of the first positions, by which keys of a page turn, float32 [2, D / 2, P]."""
    if spec.cos is None or spec.sin is None:
        return None
    turns = torch.zeros(2, spec.head_dim // 2, PAGE_TOKENS, device=spec.cos.device)
    # A context shorter than a page leaves slots without an angle, and never fills them.
    for turn, angles in zip(turns, (spec.cos, spec.sin), strict=True):
        turn[:, : len(angles)] = angles[:PAGE_TOKENS].T
    return turns


def _page_sizes(spec: AttentionSpec) -> dict[str, int]:
    """The compile-time constants that say how pages lie."""
    return {
        "L": spec.num_layers, "H": spec.num_kv_heads, "D": spec.head_dim, "P": PAGE_TOKENS,
        "DP": triton.next_power_of_2(spec.head_dim), "UNIT": UNIT // spec.dtype.itemsize,
        "PAGE": spec.table.open_codec.page_bytes // UNIT,
    }  # fmt: skip


def _check(spec: AttentionSpec, x: Tensor, heads: int, rows: int) -> None:
    assert x.shape == (rows, heads, spec.head_dim), f"{tuple(x.shape)} where [{rows}, {heads}, {spec.head_dim}] belongs"
    assert x.dtype == spec.dtype and x.stride(2) == 1 and (heads == 1 or x.stride(1) == spec.head_dim), (
        f"{x.dtype} with strides {x.stride()}"
    )
