"""The layers of a model as the CPU kernels read them, and the Python mirrors of the kernels' structures."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from quire.attention.spec import Angles, AttentionLayer, AttentionSpec
from quire.cache.ledger import PAGE_TOKENS
from quire.kernels import runtime

_LOG2_E = math.log2(math.e)


def _fields(kind: type, names: str) -> tuple[tuple[str, type], ...]:
    return tuple((name, kind) for name in names.split())


class LayerRecord(ctypes.Structure):
    """Mirror of `LayerRecord` in kernels/attention.h."""

    _fields_ = (
        *_fields(ctypes.c_void_p, "cos sin turns angles"),
        *_fields(ctypes.c_double, "scale soft_cap"),
        *_fields(ctypes.c_int64, "heads_before queries_before key_bytes_before"),
        *_fields(ctypes.c_int32, "first_lane H G D window dense_page layout"),
    )


class LayoutRecord(ctypes.Structure):
    """Mirror of `LayoutRecord` in kernels/attention.h."""

    _fields_ = (
        *_fields(ctypes.c_void_p, "write_chunk indices pieces merges merge_parts seals"),
        *_fields(ctypes.c_void_p, "scored_rows profiled_rows profiles columns kept_chunks sparse_rows"),
        *_fields(ctypes.c_int32, "num_pieces num_merges num_seals num_profiled_rows num_columns decode"),
    )


@dataclass(frozen=True)
class Reach:
    """The layers that read a step in the same pieces: those with the same window, or with none.

    window  see Scoring
    """

    window: int | None
    layers: tuple[AttentionLayer, ...]

    @property
    def num_heads(self) -> int:
        """Fewest kv heads of a layer."""
        return min(layer.num_kv_heads for layer in self.layers)

    @property
    def block_rows(self) -> int:
        """Most rows of a piece."""
        # A tall piece reuses a page's scratch tiles. Beyond about 192 query rows, it leaves the second-level cache.
        return 64 if max(layer.group_size for layer in self.layers) <= 4 else 32

    @property
    def most_heads(self) -> int:
        """Most query heads of a layer."""
        return max(layer.num_heads for layer in self.layers)

    @property
    def widest(self) -> int:
        """Most numbers of a row's queries in a layer."""
        return max(layer.num_heads * layer.head_dim for layer in self.layers)


class CpuLayers:
    """All layers of a model, and the tensors that their records point into.

    reaches    in the order of their first layers
    records    a structure for each layer
    widths     numbers of a row's queries, of each layer
    most_heads  most query heads of a layer
    steps      32-bit elements of a query row for the product, of each layer
    num_heads, query_steps, key_bytes  of all layers together: query heads, `steps` of all query heads, and bytes of the
               keys of a dense chunk
    """

    def __init__(self, spec: AttentionSpec) -> None:
        runtime.check_mirrors(LayerRecord, LayoutRecord)
        table = spec.table
        sizes = {layer.head_dim for layer in spec.layers}
        assert table.sinks is None or len(sizes) == 1, "exact tokens need layers with equal head sizes"
        windows = list(dict.fromkeys(layer.scoring.window for layer in spec.layers))
        self.reaches = tuple(
            Reach(window, tuple(layer for layer in spec.layers if layer.scoring.window == window)) for window in windows
        )
        self._turns = {
            (rotation, dim): _turns(None if rotation is None else spec.rotations[rotation], dim)
            for rotation, dim in {(layer.rotation, layer.head_dim) for layer in spec.layers if table.encodes}
        }
        has_pairs = table.encodes and spec.dtype == torch.bfloat16
        self._angles = [torch.stack(angles, -1).to(torch.bfloat16) for angles in spec.rotations if has_pairs]
        self._rotations = spec.rotations
        self.records = (LayerRecord * spec.num_layers)()
        for record, layer in zip(self.records, spec.layers, strict=True):
            self._fill(record, layer, spec.dtype)
            record.layout = windows.index(layer.scoring.window)
        self.steps = self._count_before(spec)
        self.widths = [layer.num_heads * layer.head_dim for layer in spec.layers]
        self.most_heads = max(reach.most_heads for reach in self.reaches)

    def _fill(self, record: Any, layer: AttentionLayer, dtype: torch.dtype) -> None:
        if layer.rotation is not None:
            record.cos, record.sin = (part.data_ptr() for part in self._rotations[layer.rotation])
            if self._angles:
                record.angles = self._angles[layer.rotation].data_ptr()
        if self._turns:
            record.turns = self._turns[layer.rotation, layer.head_dim].data_ptr()
        scoring = layer.scoring
        record.scale = scoring.scale_of(layer.head_dim) * _LOG2_E
        record.soft_cap = (scoring.soft_cap or 0) * _LOG2_E
        record.first_lane, record.H, record.G = layer.first_lane, layer.num_kv_heads, layer.group_size
        record.D, record.window = layer.head_dim, scoring.window or 0
        record.dense_page = 2 * PAGE_TOKENS * layer.head_dim * dtype.itemsize

    def _count_before(self, spec: AttentionSpec) -> list[int]:
        """Sets what the records count of earlier layers. Returns `steps`."""
        steps_of, kind = runtime.kernels().quire_query_steps, runtime.DTYPE_IDS[spec.dtype]
        steps = [steps_of(kind, ctypes.addressof(record)) for record in self.records]
        self.num_heads = self.query_steps = self.key_bytes = 0
        for record, layer, count in zip(self.records, spec.layers, steps, strict=True):
            record.heads_before, record.queries_before = self.num_heads, self.query_steps
            record.key_bytes_before = self.key_bytes
            self.num_heads += layer.num_heads
            self.query_steps += layer.num_heads * count
            self.key_bytes += layer.num_kv_heads * record.dense_page // 2
        return steps

    @property
    def address(self) -> int:
        """Address of the first record."""
        return ctypes.addressof(self.records)


def _turns(angles: Angles | None, dim: int) -> torch.Tensor:
    """The rotation of keys by slot, bfloat16 [D / 2, 2, P, 2]: (cos, -sin), then (sin, cos)."""
    if angles is None:
        cos, sin = torch.ones(dim // 2, PAGE_TOKENS), torch.zeros(dim // 2, PAGE_TOKENS)
    else:
        # If the context is shorter than a page, the last slots have no angle. They are never filled.
        cos, sin = (functional.pad(part[:PAGE_TOKENS].T, (0, max(0, PAGE_TOKENS - len(part)))) for part in angles)
    both = torch.stack((torch.stack((cos, -sin), -1), torch.stack((sin, cos), -1)), 1)
    return both.to(torch.bfloat16).contiguous()
