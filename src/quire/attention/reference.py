"""Attention by its definition: dense, float32, explicit positions, no code shared with the fast backends. The oracle of
their tests.

o_i = sum_j softmax_j(q_i . k_j / sqrt(D)) v_j        over the stored positions j with i - window < j <= i
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from quire.attention.partial import Partial
from quire.attention.plan import AttentionSpec, RowSlice
from quire.cache.page import PAGE_TOKENS


def attend_dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_positions: torch.Tensor,
    key_positions: torch.Tensor,
    window: int | None = None,
) -> Partial:
    """Partial attention of some rows over some tokens, already rotated.

    q                [R, H, G, D]
    k, v             [H, T, D]
    query_positions  [R];  key_positions [T] or [H, T], any order, any subset
    returns          the Partial over the visible tokens
    """
    scores = torch.einsum("rhgd,htd->rhgt", q.float(), k.float()) / math.sqrt(q.shape[-1])
    distance = query_positions[:, None, None] - key_positions.expand(k.shape[0], k.shape[1])[None]  # [R, H, T]
    visible = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
    scores = scores.masked_fill(~visible[:, :, None, :], -torch.inf)
    lse = torch.logsumexp(scores, -1)
    weight = torch.exp(scores - torch.where(lse == -torch.inf, 0.0, lse)[..., None])
    # An invisible token may sit in an unwritten slot, where anything can stand, and 0 * NaN is NaN.
    v = torch.where(visible.any(0)[..., None], v.float(), 0.0)
    return Partial(torch.einsum("rhgt,htd->rhgd", weight, v), lse)


def rotate(
    x: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None, positions: torch.Tensor
) -> torch.Tensor:
    """Rotary embedding of x [R, heads, D] at positions [R], halves paired; float32. Source: RoFormer, arXiv 2104.09864,
    in the half-split form.
    """
    x = x.float()
    if cos is None or sin is None:
        return x
    c, s = cos[positions][:, None, :], sin[positions][:, None, :]
    a, b = x.chunk(2, -1)
    return torch.cat((a * c - b * s, b * c + a * s), -1)


class ReferenceAttention:
    """The plainest backend: pages are decoded as a whole and attended densely, sequence by sequence."""

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec

    def plan(self, slices: Sequence[RowSlice]) -> ReferencePlan:
        """See AttentionBackend."""
        return ReferencePlan(self.spec, slices)


class ReferencePlan:
    """One step of the reference backend."""

    def __init__(self, spec: AttentionSpec, slices: Sequence[RowSlice]) -> None:
        self.spec = spec
        self.slices = slices
        positions = np.concatenate([np.arange(piece.start, piece.start + piece.num_rows) for piece in slices])
        self.positions = torch.from_numpy(positions).to(spec.table.pool.device)

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Stores keys and values [R, H, D], un-rotated, into the slots of their positions."""
        spec = self.spec
        k = rotate(k, spec.cos, spec.sin, self.positions).to(spec.dtype)
        codec = spec.table.open_codec
        row = 0
        for piece in self.slices:
            end = piece.start + piece.num_rows
            for index in range(piece.start // PAGE_TOKENS, -(-end // PAGE_TOKENS)):
                low, high = max(piece.start, index * PAGE_TOKENS), min(end, (index + 1) * PAGE_TOKENS)
                ids = spec.table.pages[piece.chunks[index], layer]
                pages = spec.table.pool.load(ids, codec)
                body = (
                    pages[:, : codec.data_bytes].contiguous().view(spec.dtype).view(-1, 2, PAGE_TOKENS, spec.head_dim)
                )
                slots = slice(low - index * PAGE_TOKENS, high - index * PAGE_TOKENS)
                body[:, 0, slots] = k[row : row + high - low].transpose(0, 1)
                body[:, 1, slots] = v[row : row + high - low].transpose(0, 1)
                pages[:, : codec.data_bytes] = body.view(len(ids), -1).view(torch.uint8)
                spec.table.pool.store(ids, codec, pages)
                row += high - low

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Attention of un-rotated queries [R, H * G, D] -> [R, H * G * D]."""
        spec = self.spec
        q = rotate(q, spec.cos, spec.sin, self.positions)
        q = q.view(len(q), spec.num_kv_heads, spec.group_size, spec.head_dim)
        out = []
        row = 0
        for piece in self.slices:
            chunks = piece.chunks[: -(-(piece.start + piece.num_rows) // PAGE_TOKENS)]
            k, v = self._keys_values(chunks, layer)
            rows = slice(row, row + piece.num_rows)
            out.append(
                attend_dense(
                    q[rows], k, v, self.positions[rows], torch.arange(k.shape[1], device=k.device), spec.window
                ).o
            )
            row += piece.num_rows
        return torch.cat(out).reshape(row, -1).to(spec.dtype)

    def _keys_values(self, chunks: np.ndarray, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Everything the chunks hold in one layer, [H, T, D] each."""
        spec = self.spec
        keys, values = [], []
        for index, chunk in enumerate(chunks):
            codec = spec.table.codecs[int(spec.table.kinds[chunk])]
            positions = torch.arange(index * PAGE_TOKENS, (index + 1) * PAGE_TOKENS).expand(spec.num_kv_heads, -1)
            k, v = codec.decode(spec.table.pool.load(spec.table.pages[chunk, layer], codec), positions)
            keys.append(k)
            values.append(v)
        return torch.cat(keys, 1), torch.cat(values, 1)
