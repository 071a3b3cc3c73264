"""One step of the Triton backend: its arrays on the device, and the kernels that each layer launches."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from quire.attention.kernels.attend import attend
from quire.attention.kernels.encode import encode_groups, encode_nuq
from quire.attention.kernels.encoded import attend_encoded
from quire.attention.kernels.launch import Launch
from quire.attention.kernels.layout import MAX_PARTIALS, PIECE_INTS, TileLayout
from quire.attention.kernels.write import write
from quire.attention.rows import RowSlice, wait_for
from quire.attention.spec import AttentionSpec
from quire.attention.triton_profile import StepProfile, page_sizes
from quire.cache.codecs.group import GroupCodec
from quire.cache.codecs.nuq import NuqCodec
from quire.cache.ledger import PAGE_TOKENS

if TYPE_CHECKING:
    from quire.attention.triton import TritonAttention

WRITE_ROWS = 16
"""Query rows per program of `write`."""

ENCODE_WARPS = PAGE_TOKENS // 32
"""One thread per token slot."""

_ALIGN = 32
"""Arrays in a plan buffer start at multiples of this many int32s: 128 bytes."""


class GraphKey(NamedTuple):
    """Plans with equal keys have their arrays at the same addresses and in the same shapes.

    batch_size   padded rows
    shares       see TritonPlan
    is_profiled  whether any row adds to column sums
    stages       stages of the launch for single rows
    """

    batch_size: int
    shares: bool
    is_profiled: bool
    stages: int


class TritonPlan:
    """One step of the Triton backend.

    slices       slices of the step
    num_rows     R
    batch_size   padded rows of a decode step; None for other steps and for decode steps that are too large, which
                 cannot be graphs. Keys, values and queries have R or batch_size rows; rows beyond R give zeros
    shares       whether rows share chunks that are read once for them, by tall pieces
    is_decode    every slice has one row
    profile      what profiled slices record; None if no slice is profiled
    short, tall  int32 [n, PIECE_INTS] on the device; in a decode step padded with pieces that do nothing
    """

    def __init__(
        self,
        backend: TritonAttention,
        slices: Sequence[RowSlice],
        layout: TileLayout,
        batch_size: int | None,
        launches: tuple[Launch, Launch],
        profile: StepProfile | None = None,
        ready: NDArray[np.int32] | None = None,
    ) -> None:
        self._backend = backend
        self._ready = ready
        self._launches = launches
        self.profile = profile
        self.slices = slices
        self.num_rows = len(layout.positions)
        self.batch_size = batch_size
        self.shares = layout.num_common > 0
        self.is_decode = layout.is_decode
        self.lse: Tensor | None = None
        """Log-sum-exp of the last layer's rows, float32 [R, H * G], natural log; None unless the backend keeps it."""
        self._new: tuple[int, Tensor, Tensor] | None = None
        short, tall, num_entries = layout.short, layout.tall, len(layout.entries)
        rows, max_short, max_tall, max_entries = self.num_rows, len(short), len(tall), num_entries
        if batch_size is not None:
            max_short = backend.tiles.max_short(batch_size)
            max_tall = backend.tiles.max_common(batch_size) if self.shares else 0
            rows, max_entries = batch_size, MAX_PARTIALS
            # The piece of a padded row has no chunks: it reads nothing and writes zeros.
            idle = np.zeros((batch_size - self.num_rows, PIECE_INTS), np.int32)
            idle[:, 0] = np.arange(self.num_rows, batch_size)
            idle[:, 1], idle[:, 5] = 1, -1
            short = np.concatenate((short, idle))
        at = plan_offsets(rows, max_short + max_tall, max_entries)
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
        device = backend.decode_plans[:used]
        if batch_size is None:
            device = torch.empty(used, dtype=torch.int32, device=backend.device)
        # torch reuses the pinned block only after this copy.
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
        # Decode steps always use the masks, as their graphs do. Other steps use them only if a slot is hidden.
        mirror = backend.mirror
        is_masked = mirror.masks is not None and self.is_decode
        if mirror.masks is not None and not is_masked:
            is_masked = not mirror.is_whole[layout.indices[layout.indices >= 0]].all()
        self._masks = mirror.masks if is_masked else None

    @property
    def graph_key(self) -> GraphKey | None:
        """The key of the step's graph; None if it is no decode step, is too large, or keeps rows for `recovered`."""
        if self.batch_size is None or (self.profile is not None and self.profile.num_kept):
            return None
        return GraphKey(self.batch_size, self.shares, self.profile is not None, self._launches[0].stages)

    def profiling_suspended(self) -> AbstractContextManager[None]:
        """A context that adds no column sums: keys and values may be written twice, but sums must be added once."""
        return contextlib.nullcontext() if self.profile is None else self.profile.suspended()

    def advance(self) -> None:
        """Advances all slices by one position."""
        self.positions[: self.num_rows] += 1

    def recovered(self, slice_index: int, kept: NDArray[np.uint64], local: NDArray[np.int64]) -> NDArray[np.float64]:
        """See AttentionPlan."""
        assert self.profile is not None, f"no rows of slice {slice_index} are kept"
        return self.profile.recovered(slice_index, kept, local)

    def seal(self) -> None:
        """Encodes the chunks that a decode step has filled, once, in all layers.

        The last layer's `attend` calls it. Code that replays a graph instead must call it itself.
        """
        if self.is_decode and not self._backend.encodes_by_layer:
            self._encode(0, self._backend.spec.num_layers)
            self._num_seals = 0

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Stores keys and values, [R, H, D] each, rows strided; then encodes the layer's full pages. Keys are rotated
        first unless sealed chunks are encoded.

        A decode step stores them in `attend` of the same layer. Until then k and v must not change.
        """
        if self.is_decode:
            self._new = layer, k, v
            return
        backend, spec = self._backend, self._backend.spec
        _check(spec, k, spec.only.num_kv_heads, self.num_rows)
        _check(spec, v, spec.only.num_kv_heads, self.num_rows)
        write[(spec.only.num_kv_heads, triton.cdiv(self.num_rows, WRITE_ROWS))](
            k, v, backend.arena, backend.mirror.pages, spec.only.cos, spec.only.sin, self.positions, self.write_chunk,
            self._staged_id, self.num_rows, layer, k.stride(0), v.stride(0), ROWS=WRITE_ROWS,
            ROTATE=spec.only.cos is not None and not spec.table.encodes, **page_sizes(spec), num_warps=4,
            enable_fp_fusion=True,
        )  # fmt: skip
        self._encode(layer, 1)

    def _encode(self, first_layer: int, num_layers: int) -> None:
        if not self._num_seals:
            return
        backend, spec = self._backend, self._backend.spec
        tables, mirror, sinks = backend.tables, backend.mirror, spec.table.sinks
        assert tables is not None
        grid = (spec.only.num_kv_heads, self._num_seals, num_layers)
        words, halves, octets = backend.views
        match tables.kernel_id:
            case GroupCodec.kernel_id:
                encode_groups[grid](
                    backend.arena, halves, octets, mirror.pages, self._seals, self._staged_id, tables.key_codebooks,
                    first_layer, **page_sizes(spec), num_warps=ENCODE_WARPS, enable_fp_fusion=False,
                )  # fmt: skip
            case NuqCodec.kernel_id:
                encode_nuq[grid](
                    backend.arena, words, halves, octets, mirror.pages, mirror.sidecars, self._seals, self._staged_id,
                    tables.heads, tables.pairs, tables.edges, tables.key_codebooks, tables.weight, tables.value_edges,
                    tables.value_codebooks, first_layer,
                    HP=tables.pairs_padded, SINKS=sinks.num_tokens if sinks is not None else 0,
                    **page_sizes(spec), num_warps=ENCODE_WARPS, enable_fp_fusion=False,
                )  # fmt: skip
            case other:
                raise AssertionError(f"no kernel encodes pages of kernel id {other}")

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """Attention of un-rotated queries [R, H * G, D], rows strided -> [R, H * G * D]."""
        backend, spec, partials = self._backend, self._backend.spec, self._backend.partials
        wait_for(self._ready, layer)
        rows = self.num_rows if len(q) != self.batch_size else self.batch_size
        _check(spec, q, spec.only.num_kv_heads * spec.only.group_size, rows)
        k = v = None
        if self.is_decode:
            assert self._new is not None and self._new[0] == layer, f"attend of layer {layer} without its write"
            _, k, v = self._new
            self._new = None
            _check(spec, k, spec.only.num_kv_heads, rows)
            _check(spec, v, spec.only.num_kv_heads, rows)
        out = torch.empty(
            rows, spec.only.num_kv_heads * spec.only.group_size * spec.only.head_dim, dtype=q.dtype, device=q.device
        )
        found_lse = None  # in base 2
        if backend.keeps_lse:
            found_lse = torch.empty(rows, spec.only.num_kv_heads * spec.only.group_size, device=q.device)
        # Pieces of padded rows follow the step's own.
        padded = self.batch_size is None or rows == self.batch_size
        short = self.short if padded else self.short[: self._num_short]
        tall = self.tall if padded else self.tall[: self._num_tall]
        short_launch, tall_launch = self._launches
        # Tall before short, because short pieces merge the partials of tall ones.
        for pieces, launch, is_short in ((tall, tall_launch, False), (short, short_launch, True)):
            if not len(pieces):
                continue
            append = is_short and self.is_decode
            inputs = q, k if append else None, v if append else None, out
            lists = self.positions, self.indices, pieces, self.entries
            left = partials.o, partials.lse, partials.arrivals
            lse = found_lse if self.profile is None else self.profile.lse
            strides = layer, q.stride(0), 0 if k is None else k.stride(0), 0 if v is None else v.stride(0)
            options = page_sizes(spec) | {
                "G": spec.only.group_size, "ROWS": launch.rows, "WINDOW": spec.only.window or 0, "ROTATE": spec.only.cos is not None,
                "SCALE": math.log2(math.e) / math.sqrt(spec.only.head_dim), "APPEND": append,
                "SEEDED": is_short and self.shares, "num_warps": launch.warps, "num_stages": launch.stages,
                "enable_fp_fusion": True,
            }  # fmt: skip
            grid = (spec.only.num_kv_heads, len(pieces))
            if backend.tables is None:
                del options["PAGE"]
                options["OVERLAPS"] = backend.overlaps and self.shares and self.is_decode
                if options["OVERLAPS"] and is_short:
                    options["launch_pdl"] = True
                attend[grid](
                    *inputs, backend.arena, backend.mirror.pages, self._masks, spec.only.cos, spec.only.sin, *lists, *left,
                    lse, backend.reads, *strides, **options,
                )  # fmt: skip
                continue
            tables, sinks = backend.tables, spec.table.sinks
            mirror = backend.mirror
            placed = (None, None) if self._masks is None else (mirror.positions, mirror.bases)
            attend_encoded[grid](
                *inputs, backend.arena, backend.views[0], mirror.pages, self._masks, *placed, mirror.sidecars, spec.only.cos,
                spec.only.sin, backend.turns, tables.heads, tables.pairs, tables.read_keys, tables.read_values, *lists,
                *left, lse, backend.reads, self._staged_id, *strides, HP=tables.pairs_padded,
                SINKS=sinks.num_tokens if sinks is not None else 0, KIND=tables.kernel_id,
                KEY_PARTS=tables.key_parts, VALUE_PARTS=tables.value_parts,
                MOST_KEY_SLOTS=tables.key_slots, MOST_VALUE_SLOTS=tables.value_slots, **options,
            )  # fmt: skip
        if self.profile is not None:
            self.profile.add(layer, q, self.positions, self._staged_id)
        if found_lse is not None:
            self.lse = found_lse * math.log(2)
        if self.is_decode and backend.encodes_by_layer:
            self._encode(layer, 1)
        if layer == spec.num_layers - 1:
            self.seal()
        return out


def plan_offsets(num_rows: int, num_pieces: int, num_entries: int) -> tuple[int, int, int, int]:
    """Offsets of write chunks, pieces, entries and indices in a plan buffer, in int32s. Positions start at 0."""

    def after(at: int, count: int) -> int:
        return -(-(at + count) // _ALIGN) * _ALIGN

    write_chunk = after(0, num_rows)
    pieces = after(write_chunk, num_rows)
    entries = after(pieces, num_pieces * PIECE_INTS)
    return write_chunk, pieces, entries, after(entries, max(1, num_entries))


def _check(spec: AttentionSpec, x: Tensor, heads: int, rows: int) -> None:
    assert x.shape == (rows, heads, spec.only.head_dim), (
        f"{tuple(x.shape)} where [{rows}, {heads}, {spec.only.head_dim}] belongs"
    )
    assert x.dtype == spec.dtype and x.stride(2) == 1 and (heads == 1 or x.stride(1) == spec.only.head_dim), (
        f"{x.dtype} with strides {x.stride()}"
    )
