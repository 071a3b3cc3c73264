"""Encoded pages whose slots have their own positions, and the comparison of a fast backend with the reference."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from quire.attention.plan import AttentionBackend
from quire.attention.reference import ReferenceAttention
from quire.attention.rows import Profiled, RowSlice
from quire.attention.spec import AttentionSpec
from quire.cache.ledger import PAGE_TOKENS
from quire.cache.table import ALL_SLOTS

from . import encoded
from .encoded import CODECS, TOLERANCE, encoded_spec
from .harness import Shape, relative_rms, run
from .sharing import MakeBackend

POSITION_BYTES = 4 * PAGE_TOKENS

# One row of one head may look at two tokens alone, and rounding of their keys is not averaged: of 1,500 such rows the
# worst was off by twice what batches are held to, and by a tenth of what a wrong position makes.
ROW_TOLERANCE = {**TOLERANCE, torch.bfloat16: 3 * TOLERANCE[torch.bfloat16]}


class Rows:
    """Decode rows whose earlier chunks are rows of a view: some heads have pages with positions of their own there.

    hides  whether heads see a part of some pages, and none of others, whose ids then say nothing
    """

    def __init__(self, spec: AttentionSpec, seed: int, *, hides: bool = False) -> None:
        self.spec = spec
        self.hides = hides
        self.random = np.random.default_rng(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.taken: list[tuple[int, int, int]] = []
        self.hidden: list[tuple[int, ...]] = []

    def chunks(self, count: int, end: int, *, begins: bool = False) -> NDArray[np.int32]:
        """Sealed chunks of random tokens at positions below `end`. One that begins a sequence has a sidecar."""
        table = self.spec.table
        found = table.take(count, table.sealed_codec, sidecar=begins)
        for chunk in found.tolist():
            encoded.fill(self.spec, chunk, PAGE_TOKENS, self.generator)
            has_sinks = table.sidecars[chunk] >= 0
            if has_sinks:
                table.bases[chunk] = 0
            elif self.random.random() < 0.7:
                table.bases[chunk] = self.random.integers(0, end - PAGE_TOKENS + 1)
            for layer, head in np.ndindex(self.spec.num_layers, self.spec.layers[0].num_kv_heads):
                if self.random.random() < 0.7:
                    positions = self.random.choice(end, PAGE_TOKENS, replace=False)
                    if has_sinks and table.sinks is not None:
                        positions[: table.sinks.num_tokens] = np.arange(table.sinks.num_tokens)
                    self.place(chunk, layer, head, positions)
        if self.hides:
            self.hide(found)
        return found

    def hide(self, chunks: NDArray[np.int32]) -> None:
        """Of each page hides nothing, some slots, all but one, or all."""
        table = self.spec.table
        assert table.masks is not None
        for place in np.ndindex(len(chunks), *table.pages.shape[1:]):
            at = (chunks[place[0]], *place[1:])
            mask = self.random.integers(0, 2**64, dtype=np.uint64)
            one = np.uint64(1) << np.uint64(self.random.integers(PAGE_TOKENS))
            table.masks[at] = (ALL_SLOTS, mask | one, one, np.uint64(0))[self.random.integers(4)]
            if not table.masks[at]:
                self.hidden.append(at)

    def place(self, chunk: int, layer: int, head: int, positions: NDArray[np.int64]) -> None:
        """Gives the slots of a page positions of their own."""
        table = self.spec.table
        if table.positions[chunk, layer, head] < 0:
            table.positions[chunk, layer, head] = table.ledger.take(np.array(POSITION_BYTES))
            self.taken.append((chunk, layer, head))
        image = torch.from_numpy(positions.astype(np.int32)).view(torch.uint8)[None]
        table.arena.store(table.positions[chunk, layer, head : head + 1], POSITION_BYTES, image)

    def row(self, chunks: NDArray[np.int32], start: int, shared: int = 0) -> RowSlice:
        """A row at a position, with an open chunk of its own after the chunks, of which it shares so many. If the row
        fills it, it is encoded. Where these are fewer than stand before the row, some are gone.
        """
        table, slots = self.spec.table, start % PAGE_TOKENS
        assert table.sums is not None
        sums = table.take(len(chunks) + 1, table.sums)
        shape = (*table.pages.shape[1:], len(sums) * PAGE_TOKENS)
        table.store_sums(sums, np.zeros(shape, np.float32))
        own, filled = table.take(1, table.open_codec), -1
        encoded.fill(self.spec, int(own[0]), slots, self.generator)
        if slots == PAGE_TOKENS - 1:
            own, filled = table.take(1, table.sealed_codec), int(own[0])
        gone = start // PAGE_TOKENS - len(chunks)
        profiled = Profiled(sums, peaks=int(self.random.integers(2)), near=2)
        return RowSlice(start, 1, np.append(chunks, own), ((1, shared),) if shared else (), filled, profiled, gone)

    def displace(self) -> None:
        """All slots stand one after the other again."""
        table = self.spec.table
        table.ledger.free(np.array([table.positions[place] for place in self.taken], np.int32))
        table.positions[:], table.bases[:] = -1, -1
        table.takes += 1
        self.taken.clear()

    def free(self) -> None:
        """Gives back what the table knows nothing of."""
        self.displace()
        table = self.spec.table
        assert table.masks is not None
        table.masks[table.masks != ALL_SLOTS] = ALL_SLOTS
        table.takes += 1
        table.check()


def take_sums(spec: AttentionSpec, piece: RowSlice) -> torch.Tensor:
    """The sums, or peaks, that a row has left, [L, H, T]; then they are zero again."""
    table = spec.table
    assert table.sums is not None and piece.profiled is not None
    found = table.load_sums(piece.profiled.sums)
    table.store_sums(piece.profiled.sums, np.zeros_like(found))
    return torch.from_numpy(found)


def check_rows(
    make: MakeBackend,
    spec: AttentionSpec,
    rows: Rows,
    slices: Sequence[RowSlice],
    seed: int,
    tolerance: dict[torch.dtype, float],
) -> AttentionBackend:
    """The backend attends like the reference on the same pages, and sums and notes peaks like it."""
    (expected,) = run(ReferenceAttention(spec), spec, [list(slices)], seed)
    looks = [take_sums(spec, piece) for piece in slices]
    backend, pages = make(spec), spec.table.pages.copy()
    for at in rows.hidden:
        spec.table.pages[at] = -(10**6)
    (actual,) = run(backend, spec, [list(slices)], seed)
    spec.table.pages[:] = pages
    error = relative_rms(actual, expected)
    assert error < tolerance[spec.dtype], f"relative RMS error {error:.2e}"
    for piece, sums in zip(slices, looks, strict=True):
        error = (take_sums(spec, piece) - sums).abs().max().item()
        assert error < 4 * tolerance[spec.dtype], f"sums are off by {error:.2e}"
    is_placed = bool(rows.taken)
    rows.displace()
    (ordinary,) = run(ReferenceAttention(spec), spec, [list(slices)], seed)
    rows.free()
    assert not is_placed or not spec.rotations or relative_rms(ordinary, expected) > 0.1, "positions made no difference"
    return backend


def check_batch(
    make: MakeBackend,
    shape: Shape,
    codec: str,
    starts: Sequence[int],
    *,
    sinks: int = 0,
    seed: int = 0,
    tolerance: dict[torch.dtype, float] = TOLERANCE,
    hides: bool = False,
    device: str = "cpu",
) -> None:
    """Rows with chunks of their own."""
    tokens = sum(starts) + 128 * len(starts)
    spec = encoded_spec(shape, CODECS[codec](shape), tokens=tokens, sinks=sinks, sums=True, device=device)
    rows = Rows(spec, seed, hides=hides)
    # Of all but the first something is gone, if heads see a part of what is left.
    gone = [int(hides) * min(number, start // PAGE_TOKENS - 1) for number, start in enumerate(starts)]
    chunks = [
        rows.chunks(start // PAGE_TOKENS - missing, start, begins=True)
        for start, missing in zip(starts, gone, strict=True)
    ]
    slices = [rows.row(found, start) for found, start in zip(chunks, starts, strict=True)]
    check_rows(make, spec, rows, slices, seed, tolerance)


def check_sharers(
    make: MakeBackend,
    shape: Shape,
    codec: str,
    num_rows: int,
    *,
    sinks: int = 0,
    seed: int = 0,
    device: str = "cpu",
) -> AttentionBackend:
    """Rows that share their first three chunks and have two of their own, besides the open ones."""
    tokens = 64 * (4 + 4 * num_rows)
    spec = encoded_spec(shape, CODECS[codec](shape), tokens=tokens, sinks=sinks, sums=True, device=device)
    rows = Rows(spec, seed)
    common, starts = rows.chunks(3, 300, begins=True), rows.random.integers(320, 384, num_rows).tolist()
    slices = [rows.row(np.append(common, rows.chunks(2, 320)), start, shared=3) for start in starts]
    return check_rows(make, spec, rows, slices, seed, TOLERANCE)
