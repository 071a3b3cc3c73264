"""One step of the Triton backend: its arrays on the device, and the kernels that each layer launches."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
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
from quire.attention.kernels.layout import MAX_PARTIALS, PIECE_INTS, TileLayout, num_advances
from quire.attention.kernels.write import write
from quire.attention.rows import RowSlice, wait_for
from quire.attention.spec import AttentionSpec
from quire.attention.triton_layers import LaunchedLayer
from quire.attention.triton_profile import StepProfile
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
    shares       whether rows share chunks in layers of the first kind
    is_profiled  whether any row adds to column sums
    stages       stages of the launch for single rows in layers of the first kind
    others       `shares` and `stages` of the other kinds
    """

    batch_size: int
    shares: bool
    is_profiled: bool
    stages: int
    others: tuple[tuple[bool, int], ...] = ()


class KindCut(NamedTuple):
    """A step cut for layers of one kind, on the host. short, common: the launches of its short and tall pieces."""

    layout: TileLayout
    short: Launch
    common: Launch


class PlanOffsets(NamedTuple):
    """Where the arrays of a plan begin in its buffer, in int32s. Positions begin at 0.

    kinds  pieces and entries of each kind of layer
    """

    write_chunk: int
    kinds: tuple[tuple[int, int], ...]
    indices: int


@dataclass(frozen=True, slots=True)
class KindPieces:
    """The pieces of a step in layers of one kind.

    short, tall  int32 [n, PIECE_INTS] on the device; in a decode step padded with pieces that do nothing
    num_short, num_tall  pieces without this padding
    entries      int32, see TileLayout
    shares       whether rows share chunks that are read once for them, by tall pieces
    launches     of short and of tall pieces
    """

    short: Tensor
    tall: Tensor
    num_short: int
    num_tall: int
    entries: Tensor
    shares: bool
    launches: tuple[Launch, Launch]


class TritonPlan:
    """One step of the Triton backend.

    slices       slices of the step
    num_rows     R
    batch_size   padded rows of a decode step; None for other steps and for decode steps that are too large, which
                 cannot be graphs. Keys, values and queries have R or batch_size rows; rows beyond R give zeros
    shares       whether rows share chunks in layers of any kind
    is_decode    every slice has one row
    profile      what profiled slices record; None if no slice is profiled
    kinds        the pieces, for each kind of layer
    advances_left  by how many positions the plan can advance: until a row's first chunk leaves a window
    """

    def __init__(
        self,
        backend: TritonAttention,
        slices: Sequence[RowSlice],
        cuts: Sequence[KindCut],
        batch_size: int | None,
        profile: StepProfile | None = None,
        ready: NDArray[np.int32] | None = None,
    ) -> None:
        layout = cuts[0].layout
        self._backend = backend
        self._ready = ready
        self.profile = profile
        self.slices = slices
        self.num_rows = len(layout.positions)
        self.batch_size = batch_size
        self.shares = any(cut.layout.num_common for cut in cuts)
        self.is_decode = layout.is_decode
        self.lse: Tensor | None = None
        """Log-sum-exp of the last layer's rows, float32 [R, H * G], natural log; None unless the backend keeps it."""
        self._new: tuple[int, Tensor, Tensor] | None = None
        self.advances_left = sys.maxsize
        for kind in backend.kinds:
            if kind.window is not None:
                ends = layout.positions.astype(np.int64) + 1
                self.advances_left = min(self.advances_left, num_advances(ends, kind.window) if self.is_decode else 0)
        self._fill_arrays(cuts)
        self._num_seals = len(layout.seals)
        self._staged, self._staged_id = backend.staged(layout.num_staged)
        # Decode steps always use the masks, as their graphs do. Other steps use them only if a slot is hidden.
        mirror = backend.mirror
        is_masked = mirror.masks is not None and self.is_decode
        if mirror.masks is not None and not is_masked:
            is_masked = not mirror.is_whole[layout.indices[layout.indices >= 0]].all()
        self._masks = mirror.masks if is_masked else None

    def _fill_arrays(self, cuts: Sequence[KindCut]) -> None:
        """Copies the step to the device, and sets the arrays that kernels read."""
        backend, batch_size, layout = self._backend, self.batch_size, cuts[0].layout
        rows = self.num_rows if batch_size is None else batch_size
        # The piece of a padded row has no chunks: it reads nothing and writes zeros.
        idle = np.zeros((rows - self.num_rows, PIECE_INTS), np.int32)
        idle[:, 0] = np.arange(self.num_rows, rows)
        idle[:, 1], idle[:, 5] = 1, -1
        room = []
        for kind, (cut, _, _) in zip(backend.kinds, cuts, strict=True):
            most = len(cut.short), len(cut.tall), len(cut.entries)
            if batch_size is not None:
                max_common = kind.tiles.max_common(batch_size) if cut.num_common else 0
                most = kind.tiles.max_short(batch_size), max_common, MAX_PARTIALS
            room.append(most)
        at = plan_offsets(rows, [(short + tall, entries) for short, tall, entries in room])
        at_seals = at.indices + max(1, len(layout.indices))
        used = at_seals + layout.seals.size
        host = torch.zeros(used, dtype=torch.int32, pin_memory=backend.device.type == "cuda")
        ints: NDArray[np.int32] = host.numpy()
        ints[: self.num_rows] = layout.positions
        ints[at.write_chunk : at.write_chunk + self.num_rows] = layout.write_chunk
        for (cut, _, _), (max_short, max_tall, _), (at_pieces, at_entries) in zip(cuts, room, at.kinds, strict=True):
            pieces = ints[at_pieces : at_pieces + (max_short + max_tall) * PIECE_INTS].reshape(-1, PIECE_INTS)
            num_short = len(cut.short)
            pieces[:num_short] = cut.short
            pieces[num_short : num_short + len(idle)] = idle
            pieces[max_short : max_short + len(cut.tall)] = cut.tall
            ints[at_entries : at_entries + len(cut.entries)] = cut.entries
        ints[at.indices : at.indices + len(layout.indices)] = layout.indices
        ints[at_seals:] = layout.seals.reshape(-1)
        device = backend.decode_plans[:used]
        if batch_size is None:
            device = torch.empty(used, dtype=torch.int32, device=backend.device)
        # torch reuses the pinned block only after this copy.
        device.copy_(host, non_blocking=True)
        self.positions = device[:rows]
        self.write_chunk = device[at.write_chunk : at.write_chunk + rows]
        self.kinds = []
        for (cut, *launches), (max_short, max_tall, max_entries), (at_pieces, at_entries) in zip(
            cuts, room, at.kinds, strict=True
        ):
            found = device[at_pieces : at_pieces + (max_short + max_tall) * PIECE_INTS].view(-1, PIECE_INTS)
            self.kinds.append(
                KindPieces(
                    found[:max_short],
                    found[max_short:],
                    len(cut.short),
                    len(cut.tall),
                    device[at_entries : at_entries + max(1, max_entries)],
                    cut.num_common > 0,
                    (launches[0], launches[1]),
                )
            )
        self.indices = device[at.indices :]
        self._seals = device[at_seals:]

    @property
    def graph_key(self) -> GraphKey | None:
        """The key of the step's graph; None if it is no decode step, is too large, or keeps rows for `recovered`."""
        if self.batch_size is None or (self.profile is not None and self.profile.num_kept):
            return None
        (shares, stages), *others = [(each.shares, each.launches[0].stages) for each in self.kinds]
        return GraphKey(self.batch_size, shares, self.profile is not None, stages, tuple(others))

    def profiling_suspended(self) -> AbstractContextManager[None]:
        """A context that adds no column sums: keys and values may be written twice, but sums must be added once."""
        return contextlib.nullcontext() if self.profile is None else self.profile.suspended()

    def advance(self) -> None:
        """Advances all slices by one position."""
        self.positions[: self.num_rows] += 1
        self.advances_left -= 1

    def recovered(self, slice_index: int, kept: NDArray[np.uint64], local: NDArray[np.int64]) -> NDArray[np.float64]:
        """See AttentionPlan."""
        assert self.profile is not None, f"no rows of slice {slice_index} are kept"
        return self.profile.recovered(slice_index, kept, local)

    def seal(self) -> None:
        """Encodes the chunks that a decode step has filled, once, in all layers.

        The last layer's `attend` calls it. Code that replays a graph instead must call it itself.
        """
        if self.is_decode and not self._backend.encodes_by_layer:
            for first_layer, num_layers in self._backend.layers.runs:
                self._encode(first_layer, num_layers)
            self._num_seals = 0

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Stores keys and values, [R, H, D] each, rows strided; then encodes the layer's full pages. Keys are rotated
        first unless sealed chunks are encoded.

        A decode step stores them in `attend` of the same layer. Until then k and v must not change.
        """
        if self.is_decode:
            self._new = layer, k, v
            return
        backend, spec, of = self._backend, self._backend.spec, self._backend.layers.all[layer]
        num_kv_heads = of.layer.num_kv_heads
        for each in (k, v):
            _check(spec, each, num_kv_heads, of.layer.head_dim, self.num_rows)
        write[(num_kv_heads, triton.cdiv(self.num_rows, WRITE_ROWS))](
            k, v, backend.arena, backend.mirror.pages, of.cos, of.sin, self.positions, self.write_chunk,
            self._staged_id, self.num_rows, of.layer.first_lane, k.stride(0), v.stride(0), ROWS=WRITE_ROWS,
            ROTATE=of.cos is not None and not spec.table.encodes, **of.page, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
        self._encode(layer, 1)

    def _encode(self, first_layer: int, num_layers: int) -> None:
        """Encodes the step's full chunks in layers that are alike and follow each other."""
        if not self._num_seals:
            return
        backend, of = self._backend, self._backend.layers.all[first_layer]
        tables, mirror = backend.tables, backend.mirror
        assert tables is not None
        grid = (of.layer.num_kv_heads, self._num_seals, num_layers)
        words, halves, octets = backend.views
        match tables.kernel_id:
            case GroupCodec.kernel_id:
                encode_groups[grid](
                    backend.arena, halves, octets, mirror.pages, self._seals, self._staged_id, tables.key_codebooks,
                    of.layer.first_lane, **of.page, num_warps=ENCODE_WARPS, enable_fp_fusion=False,
                )  # fmt: skip
            case NuqCodec.kernel_id:
                encode_nuq[grid](
                    backend.arena, words, halves, octets, mirror.pages, mirror.sidecars, self._seals, self._staged_id,
                    tables.heads, tables.pairs, tables.edges, tables.key_codebooks, tables.weight, tables.value_edges,
                    tables.value_codebooks, of.layer.first_lane, HP=of.codes["HP"], SINKS=of.codes["SINKS"],
                    **of.page, num_warps=ENCODE_WARPS, enable_fp_fusion=False,
                )  # fmt: skip
            case other:
                raise AssertionError(f"no kernel encodes pages of kernel id {other}")

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """Attention of un-rotated queries [R, H * G, D], rows strided -> [R, H * G * D]."""
        backend, of = self._backend, self._backend.layers.all[layer]
        wait_for(self._ready, layer)
        rows = self.num_rows if len(q) != self.batch_size else self.batch_size
        _check(backend.spec, q, of.layer.num_heads, of.layer.head_dim, rows)
        k = v = None
        if self.is_decode:
            assert self._new is not None and self._new[0] == layer, f"attend of layer {layer} without its write"
            _, k, v = self._new
            self._new = None
            for each in (k, v):
                _check(backend.spec, each, of.layer.num_kv_heads, of.layer.head_dim, rows)
        out = torch.empty(rows, of.layer.num_heads * of.layer.head_dim, dtype=q.dtype, device=q.device)
        found_lse = None  # in base 2
        if backend.keeps_lse:
            found_lse = torch.empty(rows, of.layer.num_heads, device=q.device)
        lse = found_lse if self.profile is None else self.profile.lse
        self._launch(of, q, k, v, out, lse)
        if self.profile is not None:
            self.profile.add(layer, q, self.positions, self._staged_id)
        if found_lse is not None:
            self.lse = found_lse * math.log(2)
        if self.is_decode and backend.encodes_by_layer:
            self._encode(layer, 1)
        if layer == backend.spec.num_layers - 1:
            self.seal()
        return out

    def _launch(
        self, of: LaunchedLayer, q: Tensor, k: Tensor | None, v: Tensor | None, out: Tensor, lse: Tensor | None
    ) -> None:
        """Launches the attention of a layer: tall pieces before short ones, which merge the partials of tall ones."""
        backend, partials, step = self._backend, self._backend.partials, self.kinds[of.kind]
        reads = backend.reads
        assert reads is None or reads.shape[1] == of.layer.num_kv_heads, f"reads of {reads.shape[1]} heads"
        # Pieces of padded rows follow the step's own.
        padded = self.batch_size is None or len(q) == self.batch_size
        short = step.short if padded else step.short[: step.num_short]
        tall = step.tall if padded else step.tall[: step.num_tall]
        for pieces, launch, is_short in ((tall, step.launches[1], False), (short, step.launches[0], True)):
            if not len(pieces):
                continue
            append = is_short and self.is_decode
            inputs = q, k if append else None, v if append else None, out
            lists = self.positions, self.indices, pieces, step.entries
            left = partials.o, partials.lse, partials.arrivals
            strides = of.layer.first_lane, q.stride(0), 0 if k is None else k.stride(0), 0 if v is None else v.stride(0)
            options: dict[str, int | float] = of.page | of.scores | {
                "G": of.layer.group_size, "ROWS": launch.rows, "ROTATE": of.cos is not None, "APPEND": append,
                "SEEDED": is_short and step.shares, "num_warps": launch.warps, "num_stages": launch.stages,
                "enable_fp_fusion": True,
            }  # fmt: skip
            grid = (of.layer.num_kv_heads, len(pieces))
            if backend.tables is None:
                del options["PAGE"]
                options["OVERLAPS"] = backend.overlaps and step.shares and self.is_decode
                if options["OVERLAPS"] and is_short:
                    options["launch_pdl"] = True
                attend[grid](
                    *inputs, backend.arena, backend.mirror.pages, self._masks, of.cos, of.sin, *lists, *left, lse,
                    reads, *strides, **options,
                )  # fmt: skip
                continue
            tables, mirror = backend.tables, backend.mirror
            placed = (None, None) if self._masks is None else (mirror.positions, mirror.bases)
            attend_encoded[grid](
                *inputs, backend.arena, backend.views[0], mirror.pages, self._masks, *placed, mirror.sidecars, of.cos,
                of.sin, of.turns, tables.heads, tables.pairs, tables.read_keys, tables.read_values, *lists, *left, lse,
                reads, self._staged_id, *strides, **of.codes, **options,
            )  # fmt: skip


def plan_offsets(num_rows: int, room: Sequence[tuple[int, int]]) -> PlanOffsets:
    """The offsets of a plan's arrays. room: for each kind of layer, most pieces and entries."""

    def after(at: int, count: int) -> int:
        return -(-(at + count) // _ALIGN) * _ALIGN

    write_chunk = after(0, num_rows)
    at = after(write_chunk, num_rows)
    kinds = []
    for num_pieces, num_entries in room:
        entries = after(at, num_pieces * PIECE_INTS)
        kinds.append((at, entries))
        at = after(entries, max(1, num_entries))
    return PlanOffsets(write_chunk, tuple(kinds), at)


def _check(spec: AttentionSpec, x: Tensor, heads: int, head_dim: int, rows: int) -> None:
    assert x.shape == (rows, heads, head_dim), f"{tuple(x.shape)} where [{rows}, {heads}, {head_dim}] belongs"
    assert x.dtype == spec.dtype and x.stride(2) == 1 and (heads == 1 or x.stride(1) == head_dim), (
        f"{x.dtype} with strides {x.stride()}"
    )
