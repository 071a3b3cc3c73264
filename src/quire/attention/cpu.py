"""The CPU backend: C++ kernels that read pages in place. A step has one plan, and each layer one foreign call."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from quire.attention.columns import profiled_columns
from quire.attention.cpu_layers import CpuLayers, LayoutRecord, Reach
from quire.attention.plan import StepLayout, lay_out, sparse_singles
from quire.attention.rows import RowSlice
from quire.attention.spec import AttentionSpec
from quire.cache.codecs import CODECS, load
from quire.cache.ledger import PAGE_TOKENS
from quire.kernels import runtime
from quire.kernels.memory import HugePageAllocator

_POINTERS = (
    "arena", "table", "kinds", "masks", "positions", "layers", "layouts", "partial_o", "partial_lse", "k", "v", "reads",
    "codec", "sidecars", "slot_positions", "bases", "ready", "lse", "scores", "queries", "limits", "kept_queries",
    "kept_limits", "kept_keys", "staged", "sparse_scores", "sparse_slots", "value_reads",
)  # fmt: skip
_NUMBERS = (
    "num_rows", "num_kept_rows", "num_kept_pages", "num_sparse_rows", "lanes", "most_heads", "sinks", "kind",
)  # fmt: skip


class _Plan(ctypes.Structure):
    """Mirror of `Plan` in kernels/attention.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        ("sparse_values", ctypes.c_double),
        *((name, ctypes.c_int64) for name in ("k_stride", "v_stride")),
        *((name, ctypes.c_int32) for name in _NUMBERS),
    )


class CpuAttention:
    """Attention on CPU pages in bfloat16, float16 or float32; sums in float32.

    plans_built  number of plans laid out, whole or for some windows; other steps advanced the last plan
    reads        int32 [C, H] for the largest H of a layer, or None. Every layer's kernels add 1 for each page they
                 read, beginning with the next plan that is laid out
    value_reads  int32 [C, H, 2], or None: as `reads`, for rows with sparse values. The kernels add 1 for each page
                 whose values they read, and the number of its slots that query heads choose
    keeps_lse    whether plans keep the log-sum-exp of their rows, so that the output is a partial
    encodes_by_layer  always true: the kernels encode the pages that a layer fills within that layer
    """

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        self.kernels = runtime.kernels()
        runtime.check_mirrors(_Plan)
        self.plans_built = 0
        self.reads: torch.Tensor | None = None
        self.value_reads: torch.Tensor | None = None
        self.keeps_lse = False
        self.encodes_by_layer = True
        self._last: CpuPlan | None = None
        table = spec.table
        place = CODECS[table.sealed_codec.name].cases["cpu"] if table.encodes else ""
        self._codec = load(place)(table.sealed_codec) if place else None
        self.layers = CpuLayers(spec)
        self._scratch: dict[str, torch.Tensor] = {}
        self._fixed = _Plan(
            arena=table.arena.data.data_ptr(),
            table=table.pages.ctypes.data,
            kinds=table.kinds.ctypes.data,
            masks=table.masks.ctypes.data if table.sums is not None else None,
            sidecars=table.sidecars.ctypes.data,
            slot_positions=table.positions.ctypes.data,
            bases=table.bases.ctypes.data,
            codec=self._codec.address if self._codec is not None else None,
            sinks=table.sinks.num_tokens if table.sinks is not None else 0,
            layers=self.layers.address,
            lanes=spec.num_lanes,
            most_heads=max(layer.num_kv_heads for layer in spec.layers),
            kind=runtime.DTYPE_IDS[spec.dtype],
            sparse_values=spec.sparse_values,
        )

    def clone(self) -> CpuAttention:
        """A backend of the same table with plans and scratch of its own: both plans may be alive."""
        found = copy.copy(self)
        found._last, found._scratch = None, {}
        return found

    def plan(
        self, slices: Sequence[RowSlice], moved: Sequence[int] | None = None, ready: NDArray[np.int32] | None = None
    ) -> CpuPlan:
        """See AttentionBackend."""
        reaches, last = self.layers.reaches, self._last
        kept = last.advance(slices, moved) if moved is not None and last is not None else [None] * len(reaches)
        if last is not None and None not in kept:
            return last
        layouts = [layout or self._lay_out(slices, reach) for layout, reach in zip(kept, reaches, strict=True)]
        self.plans_built += 1
        # Layouts of the step before are in the last plan's positions, which are advanced already.
        layouts = _at(next(filter(None, kept), layouts[0]).positions, layouts)
        self._last = CpuPlan(self, layouts, slices, ready)
        return self._last

    def _lay_out(self, slices: Sequence[RowSlice], reach: Reach, *, only_reads: bool = False) -> StepLayout:
        return lay_out(
            slices,
            block_rows=reach.block_rows,
            num_heads=reach.num_heads,
            workers=runtime.num_threads(),
            window=None if only_reads else reach.window,
            encodes=self.spec.table.encodes and not only_reads,
            strict=self.spec.strict,
        )

    def refresh(self, chunks: NDArray[np.int32]) -> None:
        """Does nothing: the kernels read the table itself."""

    def read_only_plan(self, slices: Sequence[RowSlice]) -> CpuPlan:
        """A plan of rows that only read, one a slice: all chunks of a slice precede its row and have bases."""
        layouts = [self._lay_out(slices, reach, only_reads=True) for reach in self.layers.reaches]
        for layout in layouts:
            layout.pieces[:, 4] = 0  # so that no piece ends after its row, and none writes
        return CpuPlan(self, _at(layouts[0].positions, layouts), slices, only_reads=True)

    def scratch_buffer(self, name: str, num_bytes: int) -> torch.Tensor:
        """A buffer of at least `num_bytes`, initially zero. The next call with the same name may return it again."""
        if name not in self._scratch or len(self._scratch[name]) < num_bytes:
            self._scratch[name] = HugePageAllocator().take(num_bytes)
        return self._scratch[name]


class CpuPlan:
    """One step of the CPU backend. It keeps alive everything that the kernels read: layouts, table and arena.

    layouts  one for each reach of `CpuLayers`, with one array of positions
    """

    def __init__(
        self,
        backend: CpuAttention,
        layouts: Sequence[StepLayout],
        slices: Sequence[RowSlice],
        ready: NDArray[np.int32] | None = None,
        *,
        only_reads: bool = False,
    ) -> None:
        self._backend = backend  # kernels read its tables until the step is done
        spec, layers = backend.spec, backend.layers
        self.layouts = layouts
        self._ready = ready
        self.slices = slices
        plan = _Plan.from_buffer_copy(backend._fixed)
        positions = layouts[0].positions
        plan.positions, plan.num_rows = positions.ctypes.data, len(positions)
        self._records = (LayoutRecord * len(layouts))()
        plan.layouts = ctypes.addressof(self._records)
        for record, layout in zip(self._records, layouts, strict=True):
            for name in ("write_chunk", "indices", "pieces", "merges", "merge_parts", "seals"):
                setattr(record, name, getattr(layout, name).ctypes.data)
            record.num_pieces, record.num_merges = len(layout.pieces), len(layout.merges)
            record.num_seals = len(layout.seals)
            # The thread that attends with a row of a decode step also writes its key and value. So every row must have
            # a chunk of its own to write to.
            written = layout.write_chunk.tolist()
            record.decode = only_reads or (not record.num_seals and len(written) == len(slices) == len({*written}))
        if ready is not None:
            plan.ready = ready.ctypes.data
        self._scratch: dict[str, torch.Tensor] = {}  # buffers of the backend that kernels write, by field of the plan
        if num_staged := layouts[0].num_staged:
            self._take_scratch(plan, staged=num_staged * max(r.H * r.dense_page for r in layers.records))
        if any(piece.profiled is not None for piece in slices):
            self._profile(plan)
        if num_sparse := sparse_singles(slices, spec.sparse_values):
            self._choose_values(plan, slices[:num_sparse])
        if backend.reads is not None:
            self._reads = backend.reads
            plan.reads = self._reads.data_ptr()
        if backend.value_reads is not None:
            self._value_reads = backend.value_reads
            plan.value_reads = self._value_reads.data_ptr()
        if any(layout.num_partials for layout in layouts):
            of = tuple(zip(layouts, layers.reaches, strict=True))
            self._partial_o = np.empty(max(layout.num_partials * reach.widest for layout, reach in of), np.float32)
            self._partial_lse = np.empty(
                max(layout.num_partials * reach.most_heads for layout, reach in of), np.float32
            )
            plan.partial_o, plan.partial_lse = self._partial_o.ctypes.data, self._partial_lse.ctypes.data
        self._lse: torch.Tensor | None = None
        if backend.keeps_lse:
            self._lse = torch.empty(plan.num_rows * layers.most_heads)
            plan.lse = self._lse.data_ptr()
        self._plan = plan
        self.address = ctypes.addressof(plan)
        self._attend = backend.kernels.quire_attend
        self._layer = 0
        self._out: dict[int, torch.Tensor] = {}

    @property
    def lse(self) -> torch.Tensor | None:
        """Log-sum-exp of the last layer's rows, float32 [R, H * G], natural log; None unless the backend keeps it."""
        if self._lse is None:
            return None
        heads = self._backend.spec.layers[self._layer].num_heads
        return self._lse[: self._plan.num_rows * heads].view(-1, heads)

    def _take_scratch(self, plan: _Plan, **num_bytes: int) -> None:
        for name, size in num_bytes.items():
            self._scratch[name] = self._backend.scratch_buffer(name, size)
            setattr(plan, name, self._scratch[name].data_ptr())

    def _choose_values(self, plan: _Plan, singles: Sequence[RowSlice]) -> None:
        """Makes the kernels choose the values that each of these rows adds up."""
        starts = np.array([piece.start for piece in singles], np.int64)
        dropped = np.array([piece.num_dropped for piece in singles], np.int64)
        self._sparse_rows, places = [], 0
        for record, reach in zip(self._records, self._backend.layers.reaches, strict=True):
            low = np.maximum(0, starts + 1 - reach.window) // PAGE_TOKENS if reach.window is not None else 0 * starts
            # With room for one more column, as the layout has.
            columns = starts // PAGE_TOKENS + 2 - dropped - low
            rows = np.empty((len(singles), 4), np.int64)
            rows[:, 0] = (np.cumsum(columns) - columns) * PAGE_TOKENS
            rows[:, 1] = (low + dropped) * PAGE_TOKENS
            rows[:, 2] = columns
            rows[:, 3] = [piece.reads_all for piece in singles]
            self._sparse_rows.append(rows)
            record.sparse_rows = rows.ctypes.data
            places = max(places, int(columns.sum()) * reach.most_heads)
        plan.num_sparse_rows = len(singles)
        self._take_scratch(plan, sparse_scores=places * PAGE_TOKENS * 4, sparse_slots=places * 8)

    def _profile(self, plan: _Plan) -> None:
        """Makes the kernels sum the attention of the profiled slices, and keep the queries and keys for `recovered`."""
        spec, layers = self._backend.spec, self._backend.layers
        assert spec.table.sums is not None, "a slice is profiled, and the chunk table has no column sums"
        self._columns = [
            profiled_columns(self.slices, window=reach.window, encodes=spec.table.encodes, strict=spec.strict)
            for reach in layers.reaches
        ]
        for record, found in zip(self._records, self._columns, strict=True):
            record.scored_rows = found.scored.ctypes.data
            record.profiled_rows, record.num_profiled_rows = found.rows.ctypes.data, len(found.rows)
            record.profiles, record.columns = found.profiles.ctypes.data, found.columns.ctypes.data
            record.num_columns, record.kept_chunks = len(found.columns), found.kept_chunks.ctypes.data
        [(num_kept, num_pages)] = {(found.num_kept, len(found.kept_chunks)) for found in self._columns}
        plan.num_kept_rows, plan.num_kept_pages = num_kept, num_pages
        heads = layers.most_heads
        steps = max(layer.num_heads * count for layer, count in zip(spec.layers, layers.steps, strict=True))
        scores = max(
            found.num_scores * reach.most_heads for found, reach in zip(self._columns, layers.reaches, strict=True)
        )
        self._take_scratch(
            plan,
            lse=plan.num_rows * heads * 4,
            scores=scores * 4,
            queries=plan.num_rows * steps * 4,
            limits=plan.num_rows * heads * 4,
            kept_queries=num_kept * layers.query_steps * 4,
            kept_limits=num_kept * layers.num_heads * 4,
            kept_keys=num_pages * layers.key_bytes,
        )

    def recovered(self, slice_index: int, kept: NDArray[np.uint64], local: NDArray[np.int64]) -> NDArray[np.float64]:
        """See AttentionPlan."""
        table, profiled = self._backend.spec.table, self.slices[slice_index].profiled
        assert profiled is not None and profiled.last_rows, f"no rows of slice {slice_index} are kept"
        shape = table.shape
        assert kept.shape[:2] == shape == local.shape, f"{kept.shape} and {local.shape} for {shape} layers and heads"
        kept, local = np.ascontiguousarray(kept, np.uint64), np.ascontiguousarray(local, np.int64)
        found = np.empty(shape)
        self._backend.kernels.quire_recover(
            self.address,
            self._columns[0].index[slice_index],
            kept.ctypes.data,
            kept.shape[2],
            local.ctypes.data,
            found.ctypes.data,
        )
        return found

    def advance(self, slices: Sequence[RowSlice], moved: Sequence[int]) -> list[StepLayout | None]:
        """Advances the layouts by one position: see StepLayout.advance. Returns them, with None in place of those that
        must be laid out again. If there are some, the plan must be discarded.
        """
        before, self.slices = self.slices, slices
        if any(before[row].reads_all != slices[row].reads_all for row in moved):
            return [None] * len(self.layouts)
        positions = self.layouts[0].positions
        positions += 1
        return [layout if layout.advance(before, slices, moved) else None for layout in self.layouts]

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Takes the layer's keys and values, [R, H, D] each, rows strided; `attend` stores and encodes them."""
        plan = self._plan
        plan.k, plan.k_stride, plan.v, plan.v_stride = k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0)

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Attention of un-rotated queries [R, H * G, D], rows strided; overwritten by the next call."""
        width, self._layer = self._backend.layers.widths[layer], layer
        out = self._out.get(width)
        if out is None or len(out) != len(q):
            # Rows beyond the step's own are padding. They attend to nothing but pass through the model.
            out = self._out[width] = torch.zeros(len(q), width, dtype=q.dtype)
        self._attend(self.address, layer, q.data_ptr(), q.stride(0), out.data_ptr())
        return out


def _at(positions: NDArray[np.int32], layouts: Sequence[StepLayout]) -> list[StepLayout]:
    """The layouts of a step with one array of positions in common. Each has this array already, or an equal one."""
    return [layout if layout.positions is positions else replace(layout, positions=positions) for layout in layouts]
