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
from quire.attention.plan import AttentionSpec, RowSlice, Sources
from quire.cache.codecs import Codec
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
    scores, visible = visible_scores(q, k, query_positions, key_positions, window)
    lse = torch.logsumexp(scores, -1)
    weight = torch.exp(scores - torch.where(lse == -torch.inf, 0.0, lse)[..., None])
    # An invisible token may sit in an unwritten slot, where anything can stand, and 0 * NaN is NaN.
    v = torch.where(visible.any(0)[..., None], v.float(), 0.0)
    return Partial(torch.einsum("rhgt,htd->rhgd", weight, v), lse)


def visible_scores(
    q: torch.Tensor,
    k: torch.Tensor,
    query_positions: torch.Tensor,
    key_positions: torch.Tensor,
    window: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scores of some rows for some tokens, float32 [R, H, G, T], -inf where a row does not see the token; and where
    it does, bool [R, H, T]. Arguments as of `attend_dense`.
    """
    scores = torch.einsum("rhgd,htd->rhgt", q.float(), k.float()) / math.sqrt(q.shape[-1])
    distance = query_positions[:, None, None] - key_positions.expand(k.shape[0], k.shape[1])[None]
    visible = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
    return scores.masked_fill(~visible[:, :, None, :], -torch.inf), visible


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
        sources = Sources(spec.table.encodes)
        self._own = [sources.of(piece) for piece in slices]
        self._seals = sources.seals.tolist()
        self._staged: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        positions = np.concatenate([np.arange(piece.start, piece.start + piece.num_rows) for piece in slices])
        self.positions = torch.from_numpy(positions).to(spec.table.pool.device)

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Stores keys and values [R, H, D], un-rotated, into the slots of their positions, and encodes what is full."""
        spec = self.spec
        k = k.to(spec.dtype) if spec.table.encodes else rotate(k, spec.cos, spec.sin, self.positions).to(spec.dtype)
        row = 0
        for piece, own in zip(self.slices, self._own, strict=True):
            end = piece.start + piece.num_rows
            for index, chunk in enumerate(own.tolist(), piece.start // PAGE_TOKENS):
                low, high = max(piece.start, index * PAGE_TOKENS), min(end, (index + 1) * PAGE_TOKENS)
                keys, values = self._keys_values(chunk, layer)
                slots = slice(low - index * PAGE_TOKENS, high - index * PAGE_TOKENS)
                keys[:, slots] = k[row : row + high - low].transpose(0, 1)
                values[:, slots] = v[row : row + high - low].transpose(0, 1)
                if chunk < 0:
                    self._staged[chunk] = keys, values
                else:
                    self._store(spec.table.open_codec, chunk, layer, keys, values)
                row += high - low
        for source, chunk in self._seals:
            keys, values = (part.clone() for part in self._keys_values(source, layer))
            sinks = spec.table.sinks
            if sinks is not None and spec.table.sidecars[chunk] >= 0:
                sinks.store(spec.table, chunk, layer, keys, values)
                keys[:, : sinks.num_tokens] = 0
                values[:, : sinks.num_tokens] = 0
            self._store(spec.table.sealed_codec, chunk, layer, keys, values)

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Attention of un-rotated queries [R, H * G, D] -> [R, H * G * D]."""
        spec = self.spec
        q = rotate(q, spec.cos, spec.sin, self.positions)
        q = q.view(len(q), spec.num_kv_heads, spec.group_size, spec.head_dim)
        out = []
        row = 0
        for piece, own in zip(self.slices, self._own, strict=True):
            end = piece.start + piece.num_rows
            for index, chunk in enumerate(own.tolist(), piece.start // PAGE_TOKENS):
                count = min(end, (index + 1) * PAGE_TOKENS) - max(piece.start, index * PAGE_TOKENS)
                # Its own chunk as it was computed, those before it as they are stored.
                first = piece.start // PAGE_TOKENS
                computed = [chunk] if spec.strict else own[: index - first + 1].tolist()
                k, v = self._path([*piece.chunks[: index + 1 - len(computed)].tolist(), *computed], layer)
                rows = slice(row, row + count)
                at = torch.arange(k.shape[1], device=k.device)
                out.append(attend_dense(q[rows], k, v, self.positions[rows], at, spec.window).o)
                row += count
        return torch.cat(out).reshape(row, -1).to(spec.dtype)

    def _path(self, chunks: list[int], layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Everything the chunks hold in one layer, rotated, float32 [H, T, D] each."""
        spec = self.spec
        found = [self._keys_values(chunk, layer) for chunk in chunks]
        k = torch.cat([keys for keys, _ in found], 1).float()
        v = torch.cat([values for _, values in found], 1).float()
        if spec.table.encodes:
            at = torch.arange(k.shape[1], device=k.device)
            k = rotate(k.transpose(0, 1), spec.cos, spec.sin, at).transpose(0, 1)
        return k, v

    def _keys_values(self, chunk: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What one chunk holds in one layer, [H, P, D] each; of a staged chunk that nobody wrote, zeros."""
        spec, table = self.spec, self.spec.table
        if chunk < 0:
            empty = torch.zeros(
                spec.num_kv_heads, PAGE_TOKENS, spec.head_dim, dtype=spec.dtype, device=table.pool.device
            )
            return self._staged.get(chunk) or (empty, empty.clone())
        codec = table.codecs[int(table.kinds[chunk])]
        keys, values = [], []
        for head in range(spec.num_kv_heads):
            ids = table.pages[chunk, layer, head : head + 1]
            k, v = codec.decode(layer, head, table.pool.load(ids, table.page_bytes(codec, layer, head)))
            keys.append(k)
            values.append(v)
        k, v = torch.cat(keys), torch.cat(values)
        if table.sinks is not None and table.sidecars[chunk] >= 0 and codec is table.sealed_codec:
            table.sinks.load(table, chunk, layer, k, v)
        return k, v

    def _store(self, codec: Codec, chunk: int, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        table = self.spec.table
        for head in range(self.spec.num_kv_heads):
            image = codec.encode(layer, head, keys[head : head + 1], values[head : head + 1])
            table.pool.store(table.pages[chunk, layer, head : head + 1], table.page_bytes(codec, layer, head), image)
