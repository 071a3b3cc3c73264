"""The layout of a step for a GPU and the buffers of decode plans: host code, run as it is on any machine."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.attention.kernels.layout import PIECE_INTS, TileLayout, Tiles, lay_out
from quire.attention.plan import RowSlice
from quire.cache.page import PAGE_TOKENS

from .harness import Shape, make_spec

pytest.importorskip("triton", reason="the triton backend needs triton, which is not installed")

from quire.attention.triton import BATCH_SIZES, TritonAttention


def slices_at(lengths: list[tuple[int, int]]) -> list[RowSlice]:
    """Paths of distinct chunk ids, with a chunk more than needed, as a path that was extended ahead has."""
    first = 0
    out = []
    for start, rows in lengths:
        count = -(-(start + rows) // PAGE_TOKENS) + 1
        out.append(RowSlice(start, rows, np.arange(first, first + count, dtype=np.int32)))
        first += count
    return out


def read_by(layout: TileLayout, row: int) -> list[int]:
    """The chunk ids that the pieces of a row read, in order of position."""
    found: dict[int, int] = {}
    for piece in np.concatenate((layout.short, layout.tall)).tolist():
        first_row, rows, first_index, chunks, start = piece[:5]
        if first_row <= row < first_row + rows:
            for i in range(chunks):
                slot = start // PAGE_TOKENS + i
                assert slot not in found, f"row {row} reads its chunk {slot} twice"
                found[slot] = int(layout.indices[first_index + i])
    return [found[slot] for slot in sorted(found)]


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(
        st.tuples(st.integers(0, 3000), st.one_of(st.just(1), st.integers(0, 300))), min_size=1, max_size=8
    ),
    group=st.sampled_from([1, 3, 4, 8, 32]),
    heads=st.sampled_from([1, 2, 8]),
    workers=st.sampled_from([1, 16, 264]),
    window=st.sampled_from([None, 1, 70, 500]),
    tall=st.sampled_from([32, 64, 128]),
)
def test_every_row_reads_each_visible_chunk_once(lengths, group, heads, workers, window, tall) -> None:  # type: ignore[no-untyped-def]
    slices = slices_at(lengths)
    tiles = Tiles(group, heads, max(16, group), max(tall, group), workers)
    layout = lay_out(slices, tiles, window)
    row = 0
    for piece in slices:
        for position in range(piece.start, piece.start + piece.num_rows):
            assert layout.positions[row] == position
            assert layout.write_chunk[row] == piece.chunks[position // PAGE_TOKENS]
            low = 0 if window is None else max(0, position + 1 - window) // PAGE_TOKENS
            needed = piece.chunks[low : position // PAGE_TOKENS + 1].tolist()
            read = read_by(layout, row)
            assert set(needed) <= set(read) <= set(piece.chunks.tolist())
            row += 1
    for pieces, rows_of_tile in ((layout.short, tiles.short), (layout.tall, tiles.tall)):
        assert (pieces[:, 1] * group <= rows_of_tile).all() and (pieces[:, 3] > 0).all()
        num_blocks = len({tuple(block) for block in pieces[:, :2].tolist()})
        assert len(pieces) <= tiles.max_pieces(num_blocks)
        split = pieces[pieces[:, 7] > 1]
        assert sorted(split[:, 5].tolist()) == list(range(len(split))), "partial tiles are distinct and dense"
        assert len(split) <= tiles.max_partial_tiles
        for first in np.unique(split[:, 6]):
            block = split[split[:, 6] == first]
            assert (block[:, 7] == len(block)).all() and block[:, 5].min() == first == block[:, 5].max() - len(
                block
            ) + 1
            assert len(np.unique(block[:, :2], axis=0)) == 1


def test_one_long_sequence_fills_the_machine_and_many_equal_ones_are_not_split() -> None:
    tiles = Tiles(group_size=4, num_heads=8, short=16, tall=128, workers=264)
    alone = lay_out(slices_at([(8191, 1)]), tiles, None).short
    assert len(alone) * 8 >= 0.9 * 264 and alone[:, 3].max() <= 1.5 * alone[:, 3].mean()
    equal = lay_out(slices_at([(1023, 1)] * 64), tiles, None).short
    assert (equal[:, 7] == 1).all()
    ragged = lay_out(slices_at([(32767, 1)] + [(1023, 1)] * 7), tiles, None).short
    assert ragged[:, 3].max() <= 1.5 * ragged[:, 3].sum() / 33


def test_a_decode_plan_keeps_its_addresses_and_shapes_over_a_thousand_steps() -> None:
    spec = make_spec(Shape(layers=2, heads=2, dim=16), 800, positions=8192)
    backend = TritonAttention(spec)
    random = np.random.default_rng(0)
    fixed: dict[int, list[tuple[int, torch.Size, tuple[int, ...]]]] = {}
    mirror = backend.mirror.pages.data_ptr()
    running: list[list] = []  # [position, chunks]
    uploaded = 0
    for step in range(1000):
        if len(running) < 40 and random.random() < 0.15:
            start = int(random.integers(0, 300))
            running.append([start, spec.table.take(start // PAGE_TOKENS + 1, spec.table.open_codec)])
        if running and random.random() < 0.05:
            spec.table.give(running.pop(int(random.integers(len(running))))[1])
        for sequence in running:
            if sequence[0] // PAGE_TOKENS == len(sequence[1]):
                sequence[1] = np.concatenate((sequence[1], spec.table.take(1, spec.table.open_codec)))
        if not running:
            continue
        plan = backend.plan([RowSlice(position, 1, chunks) for position, chunks in running])
        size = plan.batch_size
        assert size == next(size for size in BATCH_SIZES if size >= len(running))
        partials = backend.partials[0]
        arrays = [plan.positions, plan.write_chunk, *plan.pieces, partials.o, partials.lse, partials.arrivals]
        seen = [(array.data_ptr(), array.shape, array.stride()) for array in arrays] + [
            (plan.indices.data_ptr(), None, None)
        ]
        assert fixed.setdefault(size, seen) == seen, f"step {step}: a buffer of batch size {size} moved"
        assert backend.mirror.pages.data_ptr() == mirror
        # What the buffers say is this step's plan.
        assert plan.positions[: len(running)].tolist() == [position for position, _ in running]
        pieces = plan.pieces[0].numpy()
        assert pieces.shape[1] == PIECE_INTS and sorted(set(pieces[pieces[:, 1] > 0, 0].tolist())) == list(range(size))
        for first_row, _, first_index, chunks, start, *_ in pieces[pieces[:, 3] > 0].tolist():
            named = plan.indices[first_index : first_index + chunks].numpy()
            slot = start // PAGE_TOKENS
            assert (named == running[first_row][1][slot : slot + chunks]).all()
            assert (backend.mirror.pages[named].numpy() == spec.table.pages[named]).all(), (
                "a page id on the device is out of date"
            )
        uploaded += backend.mirror.refresh(np.concatenate([chunks for _, chunks in running]))
        for sequence in running:
            sequence[0] += 1
    assert uploaded == 0, "rows were uploaded twice"
    assert len(fixed) >= 4 and max(position for position, _ in running) > 5 * PAGE_TOKENS


def test_a_retaken_chunk_is_uploaded_again() -> None:
    spec = make_spec(Shape(dim=16), 6)
    backend = TritonAttention(spec)
    first = spec.table.take(2, spec.table.open_codec)
    assert backend.mirror.refresh(first) == 2 and backend.mirror.refresh(first) == 0
    spec.table.give(first[:1])
    other = spec.table.pool.take(1, spec.table.open_codec)  # so that the pages change with the taker
    again = spec.table.take(1, spec.table.open_codec)
    assert again[0] == first[0]
    assert backend.mirror.refresh(first) == 1
    spec.table.pool.give(other, spec.table.open_codec)
    assert (backend.mirror.pages[first].numpy() == spec.table.pages[first]).all()


def test_steps_that_no_graph_can_hold_have_no_batch_size() -> None:
    spec = make_spec(Shape(dim=16), 300)
    backend = TritonAttention(spec)
    chunk = spec.table.take(1, spec.table.open_codec)
    assert backend.plan([RowSlice(0, 2, chunk)]).batch_size is None
    assert backend.plan([RowSlice(0, 1, chunk), RowSlice(0, 2, chunk)]).batch_size is None
    assert backend.plan([RowSlice(5, 1, chunk)] * 256).batch_size == 256
    assert backend.plan([RowSlice(5, 1, chunk)] * 257).batch_size is None
