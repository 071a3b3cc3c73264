"""Attention by its definition: dense, float32, explicit positions, no code shared with the fast backends. The oracle of
their tests.

o_i = sum_j softmax_j(score(q_i, k_j)) v_j        over the stored positions j with i - window < j <= i

With sparse values the sum of a decode row runs over fewer j, with the same weights: see `chosen`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from quire.attention.partial import Partial
from quire.attention.plan import StagedWrites
from quire.attention.profile import column_peaks, column_sums, recovered
from quire.attention.rows import RowSlice, wait_for
from quire.attention.scores import visible_scores
from quire.attention.spec import PLAIN, Angles, AttentionSpec, Scoring
from quire.cache.codecs import Codec
from quire.cache.ledger import PAGE_TOKENS
from quire.cache.table import ALL_SLOTS, ChunkTable

NEVER_SEEN = 1 << 40
"""A position after every row's."""


def attend_dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_positions: torch.Tensor,
    key_positions: torch.Tensor,
    scoring: Scoring = PLAIN,
    sparse_values: float = 1.0,
) -> Partial:
    """Partial attention of some rows over some tokens, already rotated.

    q                [R, H, G, D]
    k, v             [H, T, D]
    query_positions  [R];  key_positions [T] or [H, T], any order, any subset
    sparse_values    below 1: the tokens are all that the rows see, and the values of the `chosen` ones are added up
    returns          the Partial over the visible tokens
    """
    scores, visible = visible_scores(q, k, query_positions, key_positions, scoring)
    lse = torch.logsumexp(scores, -1)
    weight = torch.exp(scores - torch.where(lse == -torch.inf, 0.0, lse)[..., None])
    if sparse_values < 1:
        own = key_positions.expand(k.shape[0], k.shape[1])[None] == query_positions[:, None, None]
        weight = weight.where(chosen(scores, visible, own, sparse_values), 0.0)
    # An invisible token may be in an unwritten slot, which can hold NaN, and 0 * NaN is NaN.
    v = torch.where(visible.any(0)[..., None], v.float(), 0.0)
    return Partial(torch.einsum("rhgt,htd->rhgd", weight, v), lse)


def chosen(scores: torch.Tensor, visible: torch.Tensor, own: torch.Tensor, share: float) -> torch.Tensor:
    """The tokens whose values a decode row adds up in each query head, bool [R, H, G, T].

    Of n visible tokens these are the row's own one and the int(share * (n - 1)) others with the largest scores. Among
    equal scores the first token on the path wins: without retention the one with the lowest position. The weights stay
    those of the softmax over all n tokens, so their sum is below 1.

    scores   float32 [R, H, G, T]
    visible  bool [R, H, T]
    own      bool [R, H, T], a row's own token

    Source: FlexGen, arXiv 2303.06865, section 5.3, and its public code (`_sparse_attention_value`). Ours differs: n
    counts the tokens that a head shows to the row, not those of a padded batch; a tie has a rule; pages may be
    encoded, or packed by retention.
    """
    others = visible & ~own
    num_wanted = (share * (visible.sum(-1) - 1).double()).long()[..., None, None]
    others = others[:, :, None].expand_as(scores)
    order = scores.masked_fill(~others, -torch.inf).sort(dim=-1, descending=True, stable=True).indices
    # A visible score may be -inf too.
    order = order.gather(-1, others.gather(-1, order).byte().sort(dim=-1, descending=True, stable=True).indices)
    rank = torch.empty_like(order).scatter_(
        -1, order, torch.arange(order.shape[-1], device=order.device).expand_as(order)
    )
    return (rank < num_wanted) & others | own[:, :, None]


def rotate(x: torch.Tensor, angles: Angles | None, positions: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of x [R, heads, D] at positions [R], halves paired; float32. Source: RoFormer, arXiv 2104.09864,
    in the half-split form.
    """
    x = x.float()
    if angles is None:
        return x
    cos, sin = angles
    c, s = cos[positions][:, None, :], sin[positions][:, None, :]
    a, b = x.chunk(2, -1)
    return torch.cat((a * c - b * s, b * c + a * s), -1)


class ReferenceAttention:
    """The plainest backend: it decodes whole pages and attends densely, one sequence at a time."""

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec

    def plan(
        self, slices: Sequence[RowSlice], moved: Sequence[int] | None = None, ready: NDArray[np.int32] | None = None
    ) -> ReferencePlan:
        """See AttentionBackend. Every plan is a new one."""
        return ReferencePlan(self.spec, slices, ready)


@dataclass(frozen=True)
class _Seen:
    """The queries of one chunk's rows in a layer, and the keys they saw; for `recovered`."""

    q: torch.Tensor  # [R, H, G, D], rotated
    k: torch.Tensor  # [H, T, D], rotated
    lse: torch.Tensor  # [R, H, G]
    positions: torch.Tensor  # [R]
    key_positions: torch.Tensor  # [T], or [H, T]

    def since(self, position: int) -> _Seen:
        """The rows from a position on."""
        rows = self.positions >= position
        return _Seen(self.q[rows], self.k, self.lse[rows], self.positions[rows], self.key_positions)


class ReferencePlan:
    """One step of the reference backend."""

    def __init__(self, spec: AttentionSpec, slices: Sequence[RowSlice], ready: NDArray[np.int32] | None = None) -> None:
        self.spec = spec
        self.slices = slices
        self._ready = ready
        sources = StagedWrites(spec.table.encodes)
        self._own = [sources.of(piece) for piece in slices]
        self._seals = sources.seals.tolist()
        self._staged: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._seen: dict[tuple[int, int], list[_Seen]] = {}  # by slice and layer, of the last rows of profiled slices
        positions = np.concatenate([np.arange(piece.start, piece.start + piece.num_rows) for piece in slices])
        self.positions = torch.from_numpy(positions).to(spec.table.arena.device)

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Stores un-rotated keys and values [R, H, D] in the slots of their positions, and encodes full chunks."""
        spec = self.spec
        k = k.to(spec.dtype) if spec.table.encodes else rotate(k, spec.angles(layer), self.positions).to(spec.dtype)
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
            for exact, first in self._sinks(chunk, layer, keys, values):
                exact.copy_(first)
                first.zero_()
            self._store(spec.table.sealed_codec, chunk, layer, keys, values)

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Attention of un-rotated queries [R, H * G, D] -> [R, H * G * D]."""
        spec = self.spec
        wait_for(self._ready, layer)
        of = spec.layers[layer]
        q = rotate(q, spec.angles(layer), self.positions)
        q = q.view(len(q), of.num_kv_heads, of.group_size, of.head_dim)
        out = []
        row = 0
        for number, (piece, own) in enumerate(zip(self.slices, self._own, strict=True)):
            end = piece.start + piece.num_rows
            self._seen[number, layer] = []
            for index, chunk in enumerate(own.tolist(), piece.start // PAGE_TOKENS):
                count = min(end, (index + 1) * PAGE_TOKENS) - max(piece.start, index * PAGE_TOKENS)
                # If strict, a row sees its own chunk as computed and earlier ones as stored.
                first = piece.start // PAGE_TOKENS
                computed = [chunk] if spec.strict else own[: index - first + 1].tolist()
                stored = piece.chunks[: index + 1 - piece.num_dropped - len(computed)].tolist()
                k, v, at = self._path([*stored, *computed], layer, piece.num_dropped)
                rows = slice(row, row + count)
                share = spec.sparse_values if piece.num_rows == 1 and not piece.reads_all else 1.0
                found = attend_dense(q[rows], k, v, self.positions[rows], at, of.scoring, share)
                out.append(found.o)
                if piece.profiled is not None:
                    seen = _Seen(q[rows], k, found.lse, self.positions[rows], at)
                    sums = piece.profiled.sums[: index + 1 - piece.num_dropped]
                    if not piece.profiled.peaks:
                        self._add_sums(sums, layer, seen)
                    else:
                        near = torch.arange(piece.num_dropped * PAGE_TOKENS, (index + 1) * PAGE_TOKENS)
                        last = max(0, -(-end // PAGE_TOKENS) - piece.profiled.near) * PAGE_TOKENS
                        near[near < last] = -NEVER_SEEN
                        self._note_peaks(sums, layer, seen.since(end - piece.profiled.peaks), near)
                    self._seen[number, layer].append(seen.since(end - piece.profiled.last_rows))
                row += count
        return torch.cat(out).reshape(row, -1).to(spec.dtype)

    def recovered(self, slice_index: int, kept: NDArray[np.uint64], local: NDArray[np.int64]) -> NDArray[np.float64]:
        """See AttentionPlan."""
        profiled = self.slices[slice_index].profiled
        assert profiled is not None and profiled.last_rows, f"no rows of slice {slice_index} are kept"
        columns = (kept[..., None] >> np.arange(PAGE_TOKENS, dtype=np.uint64) & np.uint64(1)).astype(bool)
        columns = columns.reshape(*kept.shape[:2], -1)
        found = np.zeros(kept.shape[:2])
        for layer, head in np.ndindex(found.shape):
            here = slice(head, head + 1)
            for seen in self._seen[slice_index, layer]:
                num_tokens = seen.k.shape[1]
                found[layer, head] += recovered(
                    seen.q[:, here],
                    seen.k[here],
                    seen.lse[:, here],
                    seen.positions,
                    seen.key_positions[here],
                    torch.from_numpy(columns[layer, here, :num_tokens]).to(seen.k.device),
                    int(local[layer, head]),
                    self._scoring(layer),
                ).item()
        return found / profiled.last_rows

    def _add_sums(self, rows: NDArray[np.int32], layer: int, seen: _Seen) -> None:
        """Adds the attention to the columns that `seen` holds to the sums in `rows` of the chunk table."""
        table = self._table_of_sums()
        sums = table.load_sums(rows)
        added = column_sums(seen.q, seen.k, seen.lse, seen.positions, seen.key_positions, self._scoring(layer))
        sums[layer] += added.cpu().numpy()
        table.store_sums(rows, sums)

    def _note_peaks(self, rows: NDArray[np.int32], layer: int, seen: _Seen, near: torch.Tensor) -> None:
        """Raises the peaks in `rows` of the chunk table to those of the columns that `seen` holds."""
        table = self._table_of_sums()
        if len(seen.q):
            peaks = table.load_sums(rows)
            found = column_peaks(
                seen.q,
                seen.k,
                seen.lse,
                seen.positions,
                seen.key_positions,
                near.to(seen.k.device),
                self._scoring(layer),
            )
            peaks[layer] = np.maximum(peaks[layer], found.cpu().numpy())
            table.store_sums(rows, peaks)

    def _scoring(self, layer: int) -> Scoring:
        return self.spec.layers[layer].scoring

    def _table_of_sums(self) -> ChunkTable:
        table = self.spec.table
        assert isinstance(table, ChunkTable) and table.sums is not None, (
            "a slice is profiled, and the chunk table has no column sums"
        )
        return table

    def _path(self, chunks: list[int], layer: int, num_dropped: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The keys, rotated, and values of chunks in one layer, float32 [H, T, D] each; and positions, int64 [H, T].

        A slot that a mask hides has position NEVER_SEEN. Slots that retention has packed have any position before the
        row.
        """
        spec = self.spec
        found = [self._keys_values(chunk, layer) for chunk in chunks]
        k = torch.cat([keys for keys, _ in found], 1).float()
        v = torch.cat([values for _, values in found], 1).float()
        positions = [self._positions(chunk, index, layer) for index, chunk in enumerate(chunks, num_dropped)]
        at = torch.cat(positions, 1).to(k.device)
        if spec.table.encodes:
            k = rotate(k.reshape(-1, 1, k.shape[-1]), spec.angles(layer), at.flatten()).view(k.shape)
        return k, v, at.masked_fill(~self._seen_slots(chunks, layer).to(k.device), NEVER_SEEN)

    def _positions(self, chunk: int, index: int, layer: int) -> torch.Tensor:
        """Positions of a chunk's slots, int64 [H, P]. `index` is the chunk's index in its path."""
        table, slots = self.spec.table, torch.arange(PAGE_TOKENS)
        num_heads = self.spec.layers[layer].num_kv_heads
        if chunk < 0:
            return (index * PAGE_TOKENS + slots).expand(num_heads, -1)
        base = index * PAGE_TOKENS if table.bases[chunk] < 0 else int(table.bases[chunk])
        found = (base + slots).repeat(num_heads, 1)
        for head in np.flatnonzero(table.positions[chunk, layer] >= 0).tolist():
            ids = table.positions[chunk, layer, head : head + 1]
            found[head] = table.arena.load(ids, 4 * PAGE_TOKENS).view(torch.int32)[0]
        return found

    def _seen_slots(self, chunks: list[int], layer: int) -> torch.Tensor:
        """The slots that the masks of chunks show, bool [H, T]."""
        table = self.spec.table
        masks = np.full((self.spec.layers[layer].num_kv_heads, len(chunks)), ALL_SLOTS, "<u8")
        for index, chunk in enumerate(chunks):
            if chunk >= 0:
                masks[:, index] = table.masks[chunk, layer]
        return torch.from_numpy(np.unpackbits(masks.view(np.uint8), axis=-1, bitorder="little")).bool()

    def _keys_values(self, chunk: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values of a chunk in one layer, [H, P, D] each; zeros for a staged chunk that is not written,
        and for heads that keep nothing of the chunk, because other chunks may now have their pages.
        """
        spec, table, of = self.spec, self.spec.table, self.spec.layers[layer]
        shape, device = (of.num_kv_heads, PAGE_TOKENS, of.head_dim), table.arena.device
        if chunk < 0:
            empty = torch.zeros(shape, dtype=spec.dtype, device=device)
            return self._staged.get(chunk) or (empty, empty.clone())
        codec = table.codecs[int(table.kinds[chunk])]
        assert isinstance(codec, Codec), f"chunk {chunk} has pages of {codec.name}, with no keys and values"
        keys, values = [], []
        for head in range(of.num_kv_heads):
            if not table.masks[chunk, layer, head]:
                keys.append(torch.zeros((1, *shape[1:]), device=device))
                values.append(keys[-1].clone())
                continue
            ids = table.pages[chunk, layer, head : head + 1]
            k, v = codec.decode(layer, head, table.arena.load(ids, int(table.page_sizes(codec)[layer, head])))
            keys.append(k)
            values.append(v)
        k, v = torch.cat(keys), torch.cat(values)
        if codec is table.sealed_codec:
            for exact, first in self._sinks(chunk, layer, k, v):
                first.copy_(exact)
        return k, v

    def _sinks(self, chunk: int, layer: int, *numbers: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The rows of a chunk's sidecar, if it has one, each with the same tokens of keys and values [H, P, D]."""
        table = self.spec.table
        if table.sinks is not None and (sidecar := int(table.sidecars[chunk])) >= 0:
            for exact, part in zip(table.sinks.rows(table.arena, sidecar, layer), numbers, strict=True):
                yield exact, part[:, : table.sinks.num_tokens]

    def _store(self, codec: Codec, chunk: int, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        table = self.spec.table
        for head in range(self.spec.layers[layer].num_kv_heads):
            image = codec.encode(layer, head, keys[head : head + 1], values[head : head + 1])
            size = int(table.page_sizes(codec)[layer, head])
            table.arena.store(table.pages[chunk, layer, head : head + 1], size, image)
