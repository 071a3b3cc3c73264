"""The Triton backend: attention on pages in GPU memory, planned on the host and ready for CUDA graphs.

The addresses and shapes of a decode step's arrays depend only on its `GraphKey`, such as the padded batch size. So a
graph captured once for each key reads the plan of every later step. All arrays of a step travel in one copy. If only
positions change there is no copy: they advance on the device. Page ids are mirrored there; a chunk's row is copied when
the chunk is new.

Layers of different kinds have pieces of their own in the same plan. If a kind has a window, a plan also ends when a
row's first chunk leaves the window, about every 64 steps.

With retention, decode steps are graphs too. Pages are read through masks. A fixed number of programs adds to the column
sums, however many columns there are. A step that keeps rows for `recovered` is not captured.

If sealed chunks are encoded, a prefill step encodes the chunks it fills in every layer, before the layer attends. A
decode step encodes at its end, in all layers at once and outside its graph, because none of its rows reads an encoded
chunk that it fills.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.attention.kernels.launch import WIDE, common_launch
from quire.attention.kernels.layout import MAX_PARTIALS, StepRows, lay_out
from quire.attention.rows import RowSlice
from quire.attention.spec import AttentionSpec
from quire.attention.triton_layers import LayerKind, Layers
from quire.attention.triton_memory import Partials, TableMirror
from quire.attention.triton_plan import KindCut, TritonPlan, plan_offsets
from quire.attention.triton_profile import ProfileMemory, StepProfile, page_id_of
from quire.cache.ledger import UNIT

BATCH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Padded sizes of decode steps. A larger step runs without a graph."""

MAX_DECODE_INDICES = 1 << 19
"""Most chunk ids of a decode plan (2 MiB): 256 sequences of 131,072 tokens. A step with more runs without a graph."""

FEW_CHUNKS = 8
"""A step with shared runs uses the launch `seeded` if its rows have at most this many own chunks on average; larger
numbers were not measured. Long contexts need more stages."""

FIRST_THAT_OVERLAPS = (9, 0)
"""The first compute capability on which a launch can begin during the one before it (programmatic dependent launch)."""


class TritonAttention:
    """Attention on GPU pages in bfloat16, float16 or float32; sums in float32.

    kinds             kinds of layers, each with its launches and tiles
    batch_sizes       the padded sizes of decode steps, in rising order
    decode_plans      the one buffer of decode plans, which begin at its start
    plans_built       number of plans laid out; other steps advanced the last plan
    copies            number of copies from host to device so far: of plans, and of rows of the mirror
    reads             int32 [C, H] on the device, or None: attention of every layer adds 1 for each page it reads. All
                      layers have H kv heads then
    overlaps          whether, on dense pages, the launch for single rows begins during the launch for shared runs
    keeps_lse         whether plans keep the log-sum-exp of their rows, so that the output is a partial
    encodes_by_layer  whether a decode step encodes the chunks it fills in each layer, instead of at its end
    """

    def __init__(self, spec: AttentionSpec) -> None:
        assert spec.sparse_values == 1, "the Triton kernels read all values"
        table = spec.table
        device = table.arena.device
        assert spec.dtype == table.open_codec.dtype, f"queries in {spec.dtype}, pages in {table.open_codec.dtype}"
        for angles in (each for pair in spec.rotations for each in pair):
            assert angles.device.type == device.type and angles.dtype == torch.float32 and angles.is_contiguous()
        self.spec = spec
        self.device = device
        self.batch_sizes = BATCH_SIZES
        # The interpreter runs without a GPU. Eight processors are enough there to split and merge.
        on_gpu = device.type == "cuda"
        processors = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 8
        self.overlaps = (
            on_gpu and torch.version.hip is None and torch.cuda.get_device_capability(device) >= FIRST_THAT_OVERLAPS
        )
        self.layers = Layers(spec, processors, on_gpu)
        self.kinds = self.layers.kinds
        self.tables = self.layers.tables
        arena = table.arena.data
        self.arena = arena.view(spec.dtype)
        # The arena again, in the types of codes, ranges and channels.
        self.views = arena.view(torch.int32), arena.view(torch.float16), arena
        self.mirror = TableMirror(table)
        self._staged = torch.empty(0, dtype=torch.uint8, device=device)
        self.partials = Partials(self.layers, device)
        self.profiles = None
        if table.sums is not None:
            self.profiles = ProfileMemory(
                spec, self.layers, self.mirror, processors, self.batch_sizes[-1], MAX_DECODE_INDICES
            )
        self.plans_built = self._plan_copies = 0
        self.reads: Tensor | None = None
        self.keeps_lse = self.encodes_by_layer = False
        self._last: TritonPlan | None = None
        self._num_moved = 0  # the table's `num_moved_pages` at the last plan
        self.decode_plans = self._new_decode_plans()

    def clone(self) -> TritonAttention:
        """A backend of the same table with plans of its own: both plans may be alive. They share the memory that the
        launches of one layer use.
        """
        found = copy.copy(self)
        found._last, found.decode_plans = None, self._new_decode_plans()
        return found

    def refresh(self, chunks: NDArray[np.int32]) -> None:
        """Uploads the table's new pages of some chunks. Existing plans use them too."""
        self.mirror.refresh(chunks)

    def _new_decode_plans(self) -> Tensor:
        largest = self.batch_sizes[-1]
        regions = [
            (kind.tiles.max_short(largest) + kind.tiles.max_common(largest), MAX_PARTIALS) for kind in self.kinds
        ]
        num_ints = plan_offsets(largest, regions).indices + MAX_DECODE_INDICES + 2 * largest
        return torch.zeros(num_ints, dtype=torch.int32, device=self.device)

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
            # Rows of the mirror may be stale, and only a new plan refreshes them.
            self._last, self._num_moved = None, self.spec.table.num_moved_pages
        if moved is not None and not moved and self._last is not None and self._last.advances_left > 0:
            self._last.advance()
            return self._last
        rows = StepRows(slices, self.spec.table.encodes)
        batch_size = None
        if (rows.counts == 1).all():
            batch_size = next((size for size in self.batch_sizes if size >= len(slices)), None)
        cuts = [self._cut(kind, rows, slices, batch_size) for kind in self.kinds]
        if len(rows.indices) > MAX_DECODE_INDICES:
            batch_size = None
        self.mirror.refresh(rows.indices[rows.indices >= 0])
        self.plans_built += 1
        self._plan_copies += 1
        profile = None
        if profiles:
            assert self.profiles is not None, "a slice is profiled, and the chunk table has no column sums"
            profile = StepProfile(self.profiles, slices, rows.apart, batch_size)
            self._plan_copies += 1
        self._last = TritonPlan(self, slices, cuts, batch_size, profile, ready)
        return self._last

    def _cut(self, kind: LayerKind, rows: StepRows, slices: Sequence[RowSlice], batch_size: int | None) -> KindCut:
        """The step's pieces in layers of a kind."""
        short, seeded, common, tallest = kind.launches
        if batch_size is not None:
            warps = 4 if self.tables is None and kind.head_dim <= WIDE else tallest.warps
            common = common_launch(tallest, kind.group_size, batch_size, warps)
        layout = lay_out(
            slices,
            kind.tiles,
            kind.window,
            max(1, common.rows // kind.group_size),
            encodes=rows.encodes,
            strict=self.spec.strict,
            rows=rows,
        )
        num_own = int(layout.short[:, 3].sum())
        if layout.num_common and num_own <= FEW_CHUNKS * len(slices):
            short = seeded
        return KindCut(layout, short, common)

    def staged(self, count: int) -> tuple[Tensor, int]:
        """A buffer for `count` dense chunks of one layer, and the id of its first page relative to the arena. The next
        call may return the same buffer.
        """
        size = count * self.layers.staged_bytes
        if len(self._staged) < size + UNIT:
            self._staged = torch.empty(size + UNIT, dtype=torch.uint8, device=self.device)
        return self._staged, page_id_of(self._staged, self.spec.table)
