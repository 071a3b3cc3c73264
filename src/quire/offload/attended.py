"""Attention of decoded rows to chunks in the host's memory: the host computes it, and the device merges the two
partials. Queries and partials cross the link, not keys and values.

    queries ---------> near chunks on the device ---> (o, lse) --.
       |                                                          merged
       '--> crosses -> far chunks on the host ------> (o, lse) --'

Source: FlexGen, arXiv 2303.06865, section 4.1 (delegation of attention to the CPU). Ours differs: the host attends only
to far chunks; encoded chunks stay encoded there; and rows that share far chunks read them together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from quire.attention.rows import RowSlice
from quire.cache.ledger import PAGE_TOKENS

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from quire.attention.cpu import CpuAttention, CpuPlan
    from quire.attention.pages import PageTable
    from quire.attention.spec import AttentionSpec
    from quire.attention.triton_plan import TritonPlan
    from quire.cache.arrays import Bools
    from quire.offload.host import HostMemory


def split_near_far(piece: RowSlice, is_far: Bools) -> tuple[RowSlice, RowSlice]:
    """Splits a slice of one row into one over its near chunks and one over its far chunks. is_far: bool, for each chunk
    before the row's own.

    Both slices have gaps, so the table must have the bases of all chunks.
    """
    begun = piece.start // PAGE_TOKENS
    assert piece.num_rows == 1 and len(is_far) == begun and not piece.num_dropped, "a slice that cannot be divided"
    chunks, own = piece.chunks[:begun], piece.chunks[begun : begun + 1]
    near_shared, far_shared, at = [], [], 0
    for name, count in piece.shared:
        num_far = int(is_far[at : at + count].sum())
        near_shared.append((name, count - num_far))
        far_shared.append((name, num_far))
        at += count
    near, far = np.concatenate((chunks[~is_far], own)), chunks[is_far]
    return (
        dataclasses.replace(piece, chunks=near, shared=tuple(near_shared), num_dropped=len(far)),
        RowSlice(piece.start, 1, far, tuple(far_shared), num_dropped=begun + 1 - len(far)),
    )


def host_attention(spec: AttentionSpec, pages: PageTable) -> CpuAttention:
    """The backend that attends to far chunks on the host. spec: that of the device's backend."""
    from quire.attention.cpu import CpuAttention

    found = CpuAttention(spec.on_host(pages))
    found.keeps_lse = True
    return found


class NearFarPlan:
    """See AttentionPlan. Some rows also attend to chunks on the host."""

    def __init__(self, near: CpuPlan | TritonPlan, far: CpuPlan, rows: Sequence[int], host: HostMemory) -> None:
        """near: the plan of all rows. far: the plan of `rows`. Both keep the lse."""
        self._near = near
        self._far = far
        self._host = host
        first, last = rows[0], rows[-1] + 1
        self._rows: slice | Tensor = slice(first, last)
        if last - first > len(rows):
            self._rows = torch.tensor(rows, device=host.device)

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """See StepPlan."""
        self._near.write(layer, k, v)

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """See StepPlan."""
        queries = q[self._rows]  # kept alive until the copy is done
        crossed = self._host.to_host(queries)
        out = self._near.attend(layer, q)
        self._host.arrived()
        far = self._host.to_device(self._far.attend(layer, crossed))
        assert self._far.lse is not None and self._near.lse is not None
        far_lse = self._host.to_device(self._far.lse)
        rows, heads = self._rows, far_lse.shape[1]
        weight = torch.sigmoid(far_lse - self._near.lse[rows]).unsqueeze(2)
        near = out[rows].float().view(len(far_lse), heads, -1)
        merged = torch.lerp(near, far.float().view_as(near), weight)
        out[rows] = merged.view(len(far_lse), -1).to(out.dtype)
        return out

    def recovered(self, slice_index: int, kept: NDArray[np.uint64], local: NDArray[np.int64]) -> NDArray[np.float64]:
        """See AttentionPlan."""
        return self._near.recovered(slice_index, kept, local)
