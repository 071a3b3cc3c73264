"""Encoded pages whose slots have positions of their own: what is left of pages after tokens were dropped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from quire.attention.cpu import CpuAttention
from quire.attention.plan import AttentionSpec, Profiled, RowSlice
from quire.attention.reference import ReferenceAttention
from quire.cache.codecs.slots import Moves
from quire.cache.page import PAGE_TOKENS
from quire.kernels.levels import supported_levels

from . import encoded
from .encoded import CODECS, TOLERANCE, encoded_spec
from .harness import Shape, relative_rms, run
from .pages import use_level

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
POSITION_BYTES = 4 * PAGE_TOKENS

# One row of one head may look at two tokens alone, and rounding of their keys is not averaged: of 1,500 such rows the
# worst was off by twice what batches are held to, and by a tenth of what a wrong position makes.
ROW_TOLERANCE = {**TOLERANCE, torch.bfloat16: 3 * TOLERANCE[torch.bfloat16]}

# Values of twelve thousand tokens nearly cancel: ordinary pages are off by as much.
FAR_TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: TOLERANCE[torch.bfloat16]}


class Rows:
    """Decode rows whose earlier chunks are rows of a view: some heads have pages with positions of their own there."""

    def __init__(self, spec: AttentionSpec, seed: int) -> None:
        self.spec = spec
        self.random = np.random.default_rng(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.taken: list[tuple[int, int, int]] = []

    def chunks(self, count: int, end: int, *, begins: bool = False) -> NDArray[np.int32]:
        """Sealed chunks of random tokens at positions below `end`. One that begins a sequence has a sidecar."""
        table = self.spec.table
        found = table.take(count, table.sealed_codec, sidecar=begins)
        for chunk in found.tolist():
            encoded.fill(self.spec, chunk, PAGE_TOKENS, self.generator)
            has_sinks = table.sidecars[chunk] >= 0
            if self.random.random() < 0.7 and not has_sinks:
                table.bases[chunk] = self.random.integers(0, end - PAGE_TOKENS + 1)
            for layer, head in np.ndindex(self.spec.num_layers, self.spec.num_kv_heads):
                if self.random.random() < 0.7:
                    positions = self.random.choice(end, PAGE_TOKENS, replace=False)
                    if has_sinks and table.sinks is not None:
                        positions[: table.sinks.num_tokens] = np.arange(table.sinks.num_tokens)
                    self.place(chunk, layer, head, positions)
        return found

    def place(self, chunk: int, layer: int, head: int, positions: NDArray[np.int64]) -> None:
        """Gives the slots of a page positions of their own."""
        table = self.spec.table
        if table.positions[chunk, layer, head] < 0:
            table.positions[chunk, layer, head] = table.pool.take(1, POSITION_BYTES)[0]
            self.taken.append((chunk, layer, head))
        image = torch.from_numpy(positions.astype(np.int32)).view(torch.uint8)[None]
        table.pool.store(table.positions[chunk, layer, head : head + 1], POSITION_BYTES, image)

    def row(self, chunks: NDArray[np.int32], start: int, shared: int = 0) -> RowSlice:
        """A row at a position, with an open chunk of its own after the chunks, of which it shares so many. If the row
        fills it, it is encoded.
        """
        table, slots = self.spec.table, start % PAGE_TOKENS
        assert table.sums is not None
        sums = table.take(len(chunks) + 1, table.sums)
        shape = (*table.pages.shape[1:], len(sums) * PAGE_TOKENS)
        table.sums.store(table, sums, np.zeros(shape, np.float32))
        own, filled = table.take(1, table.open_codec), -1
        encoded.fill(self.spec, int(own[0]), slots, self.generator)
        if slots == PAGE_TOKENS - 1:
            own, filled = table.take(1, table.sealed_codec), int(own[0])
        assert len(chunks) == start // PAGE_TOKENS
        profiled = Profiled(sums, peaks=int(self.random.integers(2)), near=2)
        return RowSlice(start, 1, np.append(chunks, own), ((1, shared),) if shared else (), filled, profiled)

    def give(self) -> None:
        """Gives back what the table knows nothing of."""
        table = self.spec.table
        table.pool.give(np.array([table.positions[place] for place in self.taken], np.int32), POSITION_BYTES)
        table.positions[:], table.bases[:] = -1, -1
        table.check()


def take_sums(spec: AttentionSpec, piece: RowSlice) -> torch.Tensor:
    """The sums, or peaks, that a row has left, [L, H, T]; then they are zero again."""
    table = spec.table
    assert table.sums is not None and piece.profiled is not None
    found = table.sums.load(table, piece.profiled.sums)
    table.sums.store(table, piece.profiled.sums, np.zeros_like(found))
    return torch.from_numpy(found)


def check(
    spec: AttentionSpec, rows: Rows, slices: Sequence[RowSlice], seed: int, tolerance: dict[torch.dtype, float]
) -> CpuAttention:
    """The kernels attend like the reference on the same pages."""
    (expected,) = run(ReferenceAttention(spec), spec, [list(slices)], seed)
    looks = [take_sums(spec, piece) for piece in slices]
    backend = CpuAttention(spec)
    (actual,) = run(backend, spec, [list(slices)], seed)
    error = relative_rms(actual, expected)
    assert error < tolerance[spec.dtype], f"relative RMS error {error:.2e}"
    for piece, sums in zip(slices, looks, strict=True):
        error = (take_sums(spec, piece) - sums).abs().max().item()
        assert error < 4 * tolerance[spec.dtype], f"sums are off by {error:.2e}"
    rows.give()
    (ordinary,) = run(ReferenceAttention(spec), spec, [list(slices)], seed)
    assert not rows.taken or spec.cos is None or relative_rms(ordinary, expected) > 0.1, "positions made no difference"
    return backend


def check_batch(
    shape: Shape,
    codec: str,
    starts: Sequence[int],
    *,
    sinks: int = 0,
    seed: int = 0,
    tolerance: dict[torch.dtype, float] = TOLERANCE,
) -> None:
    """Rows with chunks of their own."""
    spec = encoded_spec(shape, CODECS[codec](shape), tokens=sum(starts) + 128 * len(starts), sinks=sinks, sums=True)
    rows = Rows(spec, seed)
    chunks = [rows.chunks(start // PAGE_TOKENS, start, begins=True) for start in starts]
    check(spec, rows, [rows.row(found, start) for found, start in zip(chunks, starts, strict=True)], seed, tolerance)


def check_sharers(shape: Shape, codec: str, num_rows: int, *, sinks: int = 0, seed: int = 0) -> None:
    """Rows that share their first three chunks and have two of their own, besides the open ones."""
    spec = encoded_spec(shape, CODECS[codec](shape), tokens=64 * (4 + 4 * num_rows), sinks=sinks, sums=True)
    rows = Rows(spec, seed)
    common, starts = rows.chunks(3, 300, begins=True), rows.random.integers(320, 384, num_rows).tolist()
    slices = [rows.row(np.append(common, rows.chunks(2, 320)), start, shared=3) for start in starts]
    backend = check(spec, rows, slices, seed, TOLERANCE)
    pieces = backend._last._layout.pieces  # type: ignore[union-attr]
    assert (pieces[:, 1] > 1).any(), "nothing was read together"


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("group", [1, 3, 8])
def test_pages_with_positions_of_their_own_attend_like_the_reference(
    dtype: torch.dtype, codec: str, group: int
) -> None:
    check_batch(Shape(group=group, dtype=dtype), codec, [200, 64, 255], seed=group)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 9])
def test_every_group_attends_like_the_reference(dtype: torch.dtype, group: int) -> None:
    check_batch(Shape(group=group, dtype=dtype, layers=1), "mixed", [200, 447], sinks=1, seed=group)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(("num_rows", "group"), [(2, 1), (3, 3), (20, 3)])
def test_shared_runs_attend_like_the_reference(dtype: torch.dtype, codec: str, num_rows: int, group: int) -> None:
    check_sharers(Shape(heads=1, group=group, dtype=dtype, layers=1), codec, num_rows)


@pytest.mark.parametrize("dim", [16, 32, 48, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_every_head_size_attends_like_the_reference(dim: int, dtype: torch.dtype) -> None:
    check_batch(Shape(dim=dim, dtype=dtype, layers=1), "mixed", [330, 70], sinks=1)
    check_sharers(Shape(dim=dim, dtype=dtype, layers=1), "mixed", 6)


@pytest.mark.parametrize("dim", [12, 66, 130])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_group_codes_of_odd_head_sizes_attend_like_the_reference(dim: int, dtype: torch.dtype) -> None:
    check_batch(Shape(dim=dim, dtype=dtype, layers=1), "g4", [330, 70])


@pytest.mark.parametrize("sinks", [1, 5, 64])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_sinks_keep_their_slots(sinks: int, dtype: torch.dtype) -> None:
    check_batch(Shape(dtype=dtype, layers=1), "mixed", [200, 300], sinks=sinks)
    check_sharers(Shape(dtype=dtype, layers=1), "mixed", 6, sinks=sinks)


@pytest.mark.parametrize("level", supported_levels())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_cpu_level_attends_like_the_reference(
    level: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_level(level, monkeypatch)
    for codec in ("mixed", "g4"):
        check_batch(Shape(dim=80, group=3, dtype=dtype, layers=1), codec, [200, 447], sinks=1)
        check_sharers(Shape(dim=80, group=3, dtype=dtype, layers=1), codec, 7)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_models_without_rotation_do_not_care(dtype: torch.dtype) -> None:
    for codec in ("mixed", "g4"):
        check_batch(Shape(rotate=False, dtype=dtype, layers=1), codec, [200, 447], sinks=1)


@settings(max_examples=20)
@given(
    starts=st.lists(st.integers(64, 500), min_size=1, max_size=4),
    codec=st.sampled_from(sorted(CODECS)),
    group=st.sampled_from([1, 2, 3, 4, 8]),
    dim=st.sampled_from([16, 64, 80]),
    dtype=st.sampled_from(DTYPES),
    sinks=st.sampled_from([0, 1, 5]),
    seed=st.integers(0, 99),
)
def test_any_rows_attend_like_the_reference(starts, codec, group, dim, dtype, sinks, seed) -> None:  # type: ignore[no-untyped-def]
    shape = Shape(group=group, dim=dim, dtype=dtype, layers=1)
    check_batch(shape, codec, starts, sinks=sinks, seed=seed, tolerance=ROW_TOLERANCE)


@pytest.mark.parametrize("codec", ["nuq3", "g4"])
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_far_positions_are_as_exact_as_near_ones(codec: str, group: int, dtype: torch.dtype) -> None:
    """12,000 tokens: angles are exact wherever a token stands. Few chunks stand again and again in the path."""
    shape = Shape(heads=1, group=group, dtype=dtype, layers=1)
    spec = encoded_spec(shape, CODECS[codec](shape), tokens=640, positions=12_064, sums=True)
    rows, start = Rows(spec, group), 12_000
    few = spec.table.take(6, spec.table.sealed_codec)
    for chunk in few.tolist():
        encoded.fill(spec, chunk, PAGE_TOKENS, rows.generator)
        rows.place(chunk, 0, 0, rows.random.choice(start, PAGE_TOKENS, replace=False))
    path = np.resize(few, start // PAGE_TOKENS).astype(np.int32)
    check(spec, rows, [rows.row(path, start)], 0, FAR_TOLERANCE)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("group", [3, 8])
def test_tokens_that_change_places_are_attended_to_as_before(dtype: torch.dtype, codec: str, group: int) -> None:
    """Codes moved to other slots and pages, and their positions with them, for every head in another way."""
    shape = Shape(group=group, dtype=dtype)
    spec = encoded_spec(shape, CODECS[codec](shape), sums=True)
    rows, count = Rows(spec, group), 4
    old, new = (spec.table.take(count, spec.table.sealed_codec) for _ in range(2))
    for chunk in old.tolist():
        encoded.fill(spec, chunk, PAGE_TOKENS, rows.generator)
    before = rows.row(old, count * PAGE_TOKENS + 20)
    moves = []
    for layer, head in np.ndindex(spec.num_layers, spec.num_kv_heads):
        order = rows.random.permutation(count * PAGE_TOKENS)  # of slots of the new pages: which old one
        at = np.arange(len(order))
        (fro, slots), (to, new_slots) = np.divmod(order, PAGE_TOKENS), np.divmod(at, PAGE_TOKENS)
        pages = (spec.table.pages[chunks[index], layer, head] for chunks, index in ((old, fro), (new, to)))
        moves.append([np.full_like(at, layer), np.full_like(at, head), next(pages), slots, next(pages), new_slots])
        for index, chunk in enumerate(new.tolist()):
            rows.place(chunk, layer, head, order[index * PAGE_TOKENS : (index + 1) * PAGE_TOKENS])
    columns = (np.concatenate(column).astype(np.int32) for column in zip(*moves, strict=True))
    spec.table.sealed_codec.move(spec.table.pool.arena, Moves(*columns))
    after = replace(before, chunks=np.append(new, before.chunks[-1:]))
    for backend in (ReferenceAttention(spec), CpuAttention(spec)):
        same, moved = (run(backend, spec, [[piece]], 0)[0] for piece in (before, after))
        assert relative_rms(moved, same) < TOLERANCE[dtype]
        if isinstance(backend, ReferenceAttention):
            assert not torch.equal(moved, same) or dtype == torch.bfloat16
    rows.give()
