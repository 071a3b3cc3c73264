"""The CPU backend: C++ kernels that read pages in place. A step has one plan, and each layer one foreign call."""

from __future__ import annotations

import copy
import ctypes
import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from quire.attention.columns import profiled_columns
from quire.attention.plan import StepLayout, lay_out, sparse_singles
from quire.attention.rows import RowSlice
from quire.attention.spec import AttentionSpec
from quire.cache.codecs import CODECS, load
from quire.cache.ledger import PAGE_TOKENS
from quire.kernels import runtime
from quire.kernels.memory import HugePageAllocator

_POINTERS = (
    "arena", "table", "kinds", "masks", "cos", "sin", "positions", "write_chunk", "indices", "pieces", "merges",
    "merge_parts", "partial_o", "partial_lse", "k", "v", "reads", "codec", "turns", "angles", "sidecars",
    "slot_positions", "bases", "seals", "ready", "lse", "scored_rows", "scores", "profiled_rows", "profiles", "columns",
    "kept_chunks", "queries", "limits", "kept_queries", "kept_limits", "kept_keys", "staged",
    "sparse_rows", "sparse_scores", "sparse_slots", "value_reads",
)  # fmt: skip
_NUMBERS = (
    "num_pieces", "num_merges", "num_rows", "num_seals", "num_profiled_rows", "num_columns", "num_kept_rows",
    "num_kept_pages", "L", "H", "G", "D", "window", "sinks", "kind", "dense_page", "decode",
    "num_sparse_rows",
)  # fmt: skip


class _Plan(ctypes.Structure):
    """Mirror of `Plan` in kernels/attention.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_double) for name in ("scale", "soft_cap", "sparse_values")),
        *((name, ctypes.c_int64) for name in ("k_stride", "v_stride")),
        *((name, ctypes.c_int32) for name in _NUMBERS),
    )


class CpuAttention:
    """Attention on CPU pages in bfloat16, float16 or float32; sums in float32.

    plans_built  number of plans laid out; other steps advanced the last plan
    reads        int32 [C, H], or None. Every layer's kernels add 1 for each page they read, beginning with the next
                 plan that is laid out
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
        # A tall piece reuses a page's scratch tiles. Beyond about 192 query rows, it leaves the second-level cache.
        self.block_rows = 64 if spec.alike.group_size <= 4 else 32
        table = spec.table
        place = CODECS[table.sealed_codec.name].cases["cpu"] if table.encodes else ""
        self._codec = load(place)(table.sealed_codec) if place else None
        self._turns = _turns(spec) if table.encodes else None
        self._angles = _angles(spec) if table.encodes and spec.dtype == torch.bfloat16 else None
        self._scratch: dict[str, torch.Tensor] = {}
        scoring = spec.layers[0].scoring
        self._fixed = _Plan(
            arena=table.arena.data.data_ptr(),
            table=table.pages.ctypes.data,
            kinds=table.kinds.ctypes.data,
            masks=table.masks.ctypes.data if table.sums is not None else None,
            sidecars=table.sidecars.ctypes.data,
            slot_positions=table.positions.ctypes.data,
            bases=table.bases.ctypes.data,
            codec=self._codec.address if self._codec is not None else None,
            turns=self._turns.data_ptr() if self._turns is not None else None,
            angles=self._angles.data_ptr() if self._angles is not None else None,
            sinks=table.sinks.num_tokens if table.sinks is not None else 0,
            dense_page=table.open_codec.page_bytes,
            cos=spec.alike.cos.data_ptr() if spec.alike.cos is not None else None,
            sin=spec.alike.sin.data_ptr() if spec.alike.sin is not None else None,
            L=spec.num_layers,
            H=spec.alike.num_kv_heads,
            G=spec.alike.group_size,
            D=spec.alike.head_dim,
            window=spec.alike.window or 0,
            kind=runtime.DTYPE_IDS[spec.dtype],
            scale=scoring.scale_of(spec.alike.head_dim) * math.log2(math.e),
            soft_cap=(scoring.soft_cap or 0) * math.log2(math.e),
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
        spec = self.spec
        last = self._last
        if moved is not None and last is not None and last.advance(slices, moved):
            return last
        layout = lay_out(
            slices,
            block_rows=self.block_rows,
            num_heads=spec.alike.num_kv_heads,
            workers=runtime.num_threads(),
            window=spec.alike.window,
            encodes=spec.table.encodes,
            strict=spec.strict,
        )
        self.plans_built += 1
        self._last = CpuPlan(self, layout, slices, ready)
        return self._last

    def refresh(self, chunks: NDArray[np.int32]) -> None:
        """Does nothing: the kernels read the table itself."""

    def read_only_plan(self, slices: Sequence[RowSlice]) -> CpuPlan:
        """A plan of rows that only read, one a slice: all chunks of a slice precede its row and have bases."""
        spec = self.spec
        layout = lay_out(
            slices,
            block_rows=self.block_rows,
            num_heads=spec.alike.num_kv_heads,
            workers=runtime.num_threads(),
            window=None,
        )
        layout.pieces[:, 4] = 0  # so that no piece ends after its row, and none writes
        return CpuPlan(self, layout, slices, only_reads=True)

    def scratch_buffer(self, name: str, num_bytes: int) -> torch.Tensor:
        """A buffer of at least `num_bytes`, initially zero. The next call with the same name may return it again."""
        if name not in self._scratch or len(self._scratch[name]) < num_bytes:
            self._scratch[name] = HugePageAllocator().take(num_bytes)
        return self._scratch[name]


def _turns(spec: AttentionSpec) -> torch.Tensor:
    """The rotation of keys by slot, bfloat16 [D / 2, 2, P, 2]: (cos, -sin), then (sin, cos)."""
    half = spec.alike.head_dim // 2
    if spec.alike.cos is None or spec.alike.sin is None:
        cos, sin = torch.ones(half, PAGE_TOKENS), torch.zeros(half, PAGE_TOKENS)
    else:
        # If the context is shorter than a page, the last slots have no angle. They are never filled.
        cos, sin = (
            functional.pad(part[:PAGE_TOKENS].T, (0, max(0, PAGE_TOKENS - len(part))))
            for part in (spec.alike.cos, spec.alike.sin)
        )
    both = torch.stack((torch.stack((cos, -sin), -1), torch.stack((sin, cos), -1)), 1)
    return both.to(torch.bfloat16).contiguous()


def _angles(spec: AttentionSpec) -> torch.Tensor | None:
    """Cosines and sines of all positions, interleaved, bfloat16 [positions, D / 2, 2]. They rotate the keys of slots
    that have positions of their own.
    """
    if spec.alike.cos is None or spec.alike.sin is None:
        return None
    return torch.stack((spec.alike.cos, spec.alike.sin), -1).to(torch.bfloat16)


class CpuPlan:
    """One step of the CPU backend. It keeps alive everything that the kernels read: layout, table and arena."""

    def __init__(
        self,
        backend: CpuAttention,
        layout: StepLayout,
        slices: Sequence[RowSlice],
        ready: NDArray[np.int32] | None = None,
        *,
        only_reads: bool = False,
    ) -> None:
        self._backend = backend  # kernels read its tables until the step is done
        spec = backend.spec
        self._layout = layout
        self._ready = ready
        self.slices = slices
        plan = _Plan.from_buffer_copy(backend._fixed)
        for name in ("positions", "write_chunk", "indices", "pieces", "merges", "merge_parts", "seals"):
            setattr(plan, name, getattr(layout, name).ctypes.data)
        plan.num_pieces, plan.num_merges, plan.num_rows = len(layout.pieces), len(layout.merges), len(layout.positions)
        plan.num_seals = len(layout.seals)
        if ready is not None:
            plan.ready = ready.ctypes.data
        # The thread that attends with a row of a decode step also writes its key and value. So every row must have a
        # chunk of its own to write to.
        written = layout.write_chunk.tolist()
        plan.decode = only_reads or (not plan.num_seals and len(written) == len(slices) == len({*written}))
        self._scratch: dict[str, torch.Tensor] = {}  # buffers of the backend that kernels write, by field of the plan
        if layout.num_staged:
            page_bytes = spec.alike.num_kv_heads * spec.table.open_codec.page_bytes
            self._take_scratch(plan, staged=layout.num_staged * page_bytes)
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
        if layout.num_partials:
            heads = spec.alike.num_kv_heads * spec.alike.group_size
            self._partial_o = np.empty((layout.num_partials, heads, spec.alike.head_dim), np.float32)
            self._partial_lse = np.empty((layout.num_partials, heads), np.float32)
            plan.partial_o, plan.partial_lse = self._partial_o.ctypes.data, self._partial_lse.ctypes.data
        self.lse: torch.Tensor | None = None
        """Log-sum-exp of the last layer's rows, float32 [R, H * G], natural log; None unless the backend keeps it."""
        if backend.keeps_lse:
            self.lse = torch.empty(plan.num_rows, spec.alike.num_kv_heads * spec.alike.group_size)
            plan.lse = self.lse.data_ptr()
        self._plan = plan
        self.address = ctypes.addressof(plan)
        self._attend = backend.kernels.quire_attend
        self._width = spec.alike.num_kv_heads * spec.alike.group_size * spec.alike.head_dim
        self._out: torch.Tensor | None = None

    def _take_scratch(self, plan: _Plan, **num_bytes: int) -> None:
        for name, size in num_bytes.items():
            self._scratch[name] = self._backend.scratch_buffer(name, size)
            setattr(plan, name, self._scratch[name].data_ptr())

    def _choose_values(self, plan: _Plan, singles: Sequence[RowSlice]) -> None:
        """Makes the kernels choose the values that each of these rows adds up."""
        spec = self._backend.spec
        starts = np.array([piece.start for piece in singles], np.int64)
        dropped = np.array([piece.num_dropped for piece in singles], np.int64)
        low = (
            np.maximum(0, starts + 1 - spec.alike.window) // PAGE_TOKENS
            if spec.alike.window is not None
            else 0 * starts
        )
        # With room for one more column, as the layout has.
        columns = starts // PAGE_TOKENS + 2 - dropped - low
        rows = np.empty((len(singles), 4), np.int64)
        rows[:, 0] = (np.cumsum(columns) - columns) * PAGE_TOKENS
        rows[:, 1] = (low + dropped) * PAGE_TOKENS
        rows[:, 2] = columns
        rows[:, 3] = [piece.reads_all for piece in singles]
        self._sparse_rows = rows
        plan.sparse_rows, plan.num_sparse_rows = rows.ctypes.data, len(rows)
        places = int(columns.sum()) * spec.alike.num_kv_heads * spec.alike.group_size
        self._take_scratch(plan, sparse_scores=places * PAGE_TOKENS * 4, sparse_slots=places * 8)

    def _profile(self, plan: _Plan) -> None:
        """Makes the kernels sum the attention of the profiled slices, and keep the queries and keys for `recovered`."""
        spec = self._backend.spec
        assert spec.table.sums is not None, "a slice is profiled, and the chunk table has no column sums"
        found = self._columns = profiled_columns(
            self.slices, window=spec.alike.window, encodes=spec.table.encodes, strict=spec.strict
        )
        heads = spec.alike.num_kv_heads * spec.alike.group_size
        plan.scored_rows = found.scored.ctypes.data
        plan.profiled_rows, plan.num_profiled_rows = found.rows.ctypes.data, len(found.rows)
        plan.profiles, plan.columns = found.profiles.ctypes.data, found.columns.ctypes.data
        plan.num_columns, plan.num_kept_rows = len(found.columns), found.num_kept
        plan.kept_chunks, plan.num_kept_pages = found.kept_chunks.ctypes.data, len(found.kept_chunks)
        steps = self._backend.kernels.quire_query_steps(ctypes.addressof(plan))
        kept = spec.num_layers * found.num_kept * heads
        key_bytes = PAGE_TOKENS * spec.alike.head_dim * spec.dtype.itemsize
        self._take_scratch(
            plan,
            lse=plan.num_rows * heads * 4,
            scores=found.num_scores * heads * 4,
            queries=plan.num_rows * heads * steps * 4,
            limits=plan.num_rows * heads * 4,
            kept_queries=kept * steps * 4,
            kept_limits=kept * 4,
            kept_keys=spec.num_layers * spec.alike.num_kv_heads * len(found.kept_chunks) * key_bytes,
        )

    def recovered(self, slice_index: int, kept: NDArray[np.uint64], local: NDArray[np.int64]) -> NDArray[np.float64]:
        """See AttentionPlan."""
        spec, profiled = self._backend.spec, self.slices[slice_index].profiled
        assert profiled is not None and profiled.last_rows, f"no rows of slice {slice_index} are kept"
        shape = spec.num_layers, spec.alike.num_kv_heads
        assert kept.shape[:2] == shape == local.shape, f"{kept.shape} and {local.shape} for {shape} layers and heads"
        kept, local = np.ascontiguousarray(kept, np.uint64), np.ascontiguousarray(local, np.int64)
        found = np.empty(shape)
        self._backend.kernels.quire_recover(
            self.address,
            self._columns.index[slice_index],
            kept.ctypes.data,
            kept.shape[2],
            local.ctypes.data,
            found.ctypes.data,
        )
        return found

    def advance(self, slices: Sequence[RowSlice], moved: Sequence[int]) -> bool:
        """See StepLayout.advance."""
        before, self.slices = self.slices, slices
        if any(before[row].reads_all != slices[row].reads_all for row in moved):
            return False
        return self._layout.advance(before, slices, moved)

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Takes the layer's keys and values, [R, H, D] each, rows strided; `attend` stores and encodes them."""
        plan = self._plan
        plan.k, plan.k_stride, plan.v, plan.v_stride = k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0)

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Attention of un-rotated queries [R, H * G, D], rows strided; overwritten by the next call."""
        out = self._out
        if out is None or len(out) != len(q):
            # Rows beyond the step's own are padding. They attend to nothing but pass through the model.
            out = self._out = torch.zeros(len(q), self._width, dtype=q.dtype)
        self._attend(self.address, layer, q.data_ptr(), q.stride(0), out.data_ptr())
        return out
