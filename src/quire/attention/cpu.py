"""The CPU backend: C++ kernels that read pages in place. Plans on the host, one foreign call per layer for the write
and one for attention.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch

from quire.attention.plan import AttentionSpec, Layout, RowSlice, lay_out
from quire.kernels import runtime

_POINTERS = (
    "arena table kinds cos sin positions write_chunk indices pieces merges merge_parts partial_o partial_lse".split()
)
_INTS = "num_pieces num_merges num_rows L H G D window kind".split()


class _Plan(ctypes.Structure):
    """Mirror of `Plan` in kernels/attention.cpp."""

    _fields_ = [(name, ctypes.c_void_p) for name in _POINTERS] + [(name, ctypes.c_int32) for name in _INTS]


class CpuAttention:
    """Attention on CPU pages in bfloat16, float16 or float32; sums in float32."""

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        self.kernels = runtime.kernels()
        assert ctypes.sizeof(_Plan) == self.kernels.quire_plan_bytes(), (
            "the kernels were built from another version of attention.cpp"
        )
        # A tall piece reuses each page's scratch tiles; more than about 192 query rows of it leave the second-level
        # cache.
        self.block_rows = 64 if spec.group_size <= 4 else 32
        self._fixed = _Plan(
            arena=spec.table.pool.arena.data_ptr(),
            table=spec.table.pages.ctypes.data,
            kinds=spec.table.kinds.ctypes.data,
            cos=spec.cos.data_ptr() if spec.cos is not None else None,
            sin=spec.sin.data_ptr() if spec.sin is not None else None,
            L=spec.num_layers,
            H=spec.num_kv_heads,
            G=spec.group_size,
            D=spec.head_dim,
            window=spec.window or 0,
            kind=runtime.DTYPE_IDS[spec.dtype],
        )

    def plan(self, slices: Sequence[RowSlice]) -> CpuPlan:
        """See AttentionBackend."""
        spec = self.spec
        layout = lay_out(
            slices,
            block_rows=self.block_rows,
            num_heads=spec.num_kv_heads,
            workers=runtime.num_threads(),
            window=spec.window,
        )
        return CpuPlan(self, layout)


class CpuPlan:
    """One step of the CPU backend. Keeps the layout's arrays alive for as long as the kernels may read them."""

    def __init__(self, backend: CpuAttention, layout: Layout) -> None:
        spec = backend.spec
        self._layout = layout
        self._backend = backend
        plan = _Plan.from_buffer_copy(backend._fixed)
        for name in ("positions", "write_chunk", "indices", "pieces", "merges", "merge_parts"):
            setattr(plan, name, getattr(layout, name).ctypes.data)
        plan.num_pieces, plan.num_merges, plan.num_rows = len(layout.pieces), len(layout.merges), len(layout.positions)
        if layout.num_partials:
            heads = spec.num_kv_heads * spec.group_size
            self._partial_o = np.empty((layout.num_partials, heads, spec.head_dim), np.float32)
            self._partial_lse = np.empty((layout.num_partials, heads), np.float32)
            plan.partial_o, plan.partial_lse = self._partial_o.ctypes.data, self._partial_lse.ctypes.data
        self._plan = plan
        self._num_rows = plan.num_rows
        self._address = ctypes.addressof(plan)
        self._write = backend.kernels.quire_write
        self._attend = backend.kernels.quire_attend
        self._width = spec.num_kv_heads * spec.group_size * spec.head_dim

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Rotates keys and stores them and the values, [R, H, D] each, rows strided."""
        self._write(self._address, layer, k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0))

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Attention of un-rotated queries [R, H * G, D], rows strided -> [R, H * G * D]."""
        # Rows past the step's own are padding: they attend to nothing, but what stands there goes through the model.
        make = torch.empty if len(q) == self._num_rows else torch.zeros
        out = make(len(q), self._width, dtype=q.dtype)
        self._attend(self._address, layer, q.data_ptr(), q.stride(0), out.data_ptr())
        return out
