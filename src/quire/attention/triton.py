"""The Triton backend: attention on pages in GPU memory, planned on the host and ready for CUDA graphs.

A decode step's arrays lie in buffers whose addresses and shapes depend on its padded batch size and on whether rows
share anything, so a graph captured once for each reads the plan of every later step. All arrays of a step travel in one
copy, and none while only positions move on: these advance on the device. Page ids are mirrored there, a row when its
chunk is new.

With retention, decode steps are graphs too: pages are read through masks, and column sums are added to by programs of
which a graph has as many whatever columns there are. A step that keeps rows for `recovered` is none.

Where sealed chunks are encoded, a prefill step encodes what it fills in every layer, before the layer attends; a decode
step at its end, in all layers at once and outside its graph: no row of it reads what it fills.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.attention.encoded import EncodedTables
from quire.attention.kernels.launch import common_launch, encoded_launches, launches
from quire.attention.kernels.layout import MAX_PARTIALS, Tiles, lay_out
from quire.attention.plan import AttentionSpec
from quire.attention.rows import RowSlice
from quire.attention.triton_memory import Partials, TableMirror
from quire.attention.triton_plan import TritonPlan, plan_offsets
from quire.attention.triton_profile import ProfileMemory, StepProfile, page_id_of
from quire.cache.ledger import PAGE_TOKENS, UNIT

BATCH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Padded sizes of decode steps; a larger step runs, but not as a graph."""

MAX_DECODE_INDICES = 1 << 19
"""Chunk ids a decode plan holds (2 MiB): 256 sequences of 131,072 tokens. A longer step runs, but not as a graph."""

PIECES_PER_PROCESSOR = 2
"""Programs a multiprocessor holds at once: three stages of a bf16 page of head size 128 are 96 of its 227 KiB."""

MIN_SAVED_BYTES = 8 << 20
"""Bytes that a decode step must not read again, or its rows are read apart. A guess, not measured: two microseconds of
an H200's memory, for a second launch in a graph."""


class TritonAttention:
    """Attention on GPU pages in bfloat16, float16 or float32; sums in float32.

    batch_sizes  the padded sizes of decode steps, in rising order
    plans_built  plans laid out; other steps moved the last one on
    copies       from the host to the device so far: of plans, and of rows of the mirror
    reads        int32 [C, H] on the device, or None: attention of every layer adds one for each page it reads
    """

    def __init__(self, spec: AttentionSpec) -> None:
        table = spec.table
        device = table.arena.device
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
        arena = table.arena.data
        self.arena = arena.view(spec.dtype)
        # The same bytes as codes, ranges and channels are read.
        self.views = arena.view(torch.int32), arena.view(torch.float16), arena
        self.turns = _turns(spec) if table.encodes else None
        self.mirror = TableMirror(table)
        self._staged = torch.empty(0, dtype=torch.uint8, device=device)
        self.partials = Partials(spec)
        self.profiles = None
        if table.sums is not None:
            self.profiles = ProfileMemory(
                spec, self.mirror, self.tables, processors, self.batch_sizes[-1], MAX_DECODE_INDICES
            )
        self.plans_built = self._plan_copies = 0
        self.reads: Tensor | None = None
        self._last: TritonPlan | None = None
        self._num_moved = 0  # pages of the table at the last plan
        largest = self.batch_sizes[-1]
        self._decode = torch.zeros(
            plan_offsets(largest, self.max_pieces(largest), MAX_PARTIALS)[-1] + MAX_DECODE_INDICES + 2 * largest,
            dtype=torch.int32,
            device=device,
        )

    @property
    def copies(self) -> int:
        """See the class."""
        return self._plan_copies + self.mirror.copies

    def plan(
        self, slices: Sequence[RowSlice], moved: Sequence[int] | None = None, ready: NDArray[np.int32] | None = None
    ) -> TritonPlan:
        """See AttentionBackend."""
        profiles = any(piece.profiled is not None for piece in slices)
        if self._num_moved != self.spec.table.num_moved_pages:
            # Rows of the mirror may be old, which only a new plan looks for.
            self._last, self._num_moved = None, self.spec.table.num_moved_pages
        if moved is not None and not moved and self._last is not None and self.spec.window is None:
            self._last.advance()
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
        profile = None
        if profiles:
            assert self.profiles is not None, "a slice is profiled, and the chunk table has no column sums"
            profile = StepProfile(self.profiles, slices, layout.own, batch_size)
            self._plan_copies += 1
        self._last = TritonPlan(self, slices, layout, batch_size, (self.launches[0], common), profile, ready)
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
        return self._staged, page_id_of(self._staged, table)


def _turns(spec: AttentionSpec) -> Tensor | None:
    """Cosines and sines of the first positions, by which keys of a page turn, float32 [2, D / 2, P]."""
    if spec.cos is None or spec.sin is None:
        return None
    turns = torch.zeros(2, spec.head_dim // 2, PAGE_TOKENS, device=spec.cos.device)
    # A context shorter than a page leaves slots without an angle, and never fills them.
    for turn, angles in zip(turns, (spec.cos, spec.sin), strict=True):
        turn[:, : len(angles)] = angles[:PAGE_TOKENS].T
    return turns
