"""The layout of a step for a GPU: host code, run on any machine."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.attention.kernels.layout import MAX_PARTIALS, TileLayout, Tiles, lay_out
from quire.attention.rows import RowSlice
from quire.cache.ledger import PAGE_TOKENS
from tests.attention.test_triton_plan import LLAMA, slices_at
from tests.effort import examples
from tests.kernels.sharing import counting, forest, sharers


def read_by(layout: TileLayout, row: int) -> list[int]:
    """The chunk ids that the pieces of a row read, in order of position."""
    found: dict[int, int] = {}
    for piece in np.concatenate((layout.short, layout.tall)).tolist():
        first_row, rows, first_index, chunks, start = piece[:5]
        first_own, num_own = piece[10:]
        if first_row <= row < first_row + rows:
            named = [*range(first_index, first_index + chunks), *range(first_own, first_own + num_own)]
            for slot, index in enumerate(named, start // PAGE_TOKENS):
                assert slot not in found, f"row {row} reads its chunk {slot} twice"
                found[slot] = int(layout.indices[index])
    return [found[slot] for slot in sorted(found)]


def check_partials(layout: TileLayout) -> None:
    """Every partial row is left once and merged once, by the row it belongs to."""
    pieces = np.concatenate((layout.short, layout.tall)).tolist()
    left: dict[int, int] = {}  # slot -> query row
    for first_row, rows, _, _, _, slot, *_ in pieces:
        for i in range(rows if slot >= 0 else 0):
            assert left.setdefault(slot + i, first_row + i) == first_row + i, f"slot {slot + i} has two owners"
    assert sorted(left) == list(range(layout.num_partials)) and layout.num_partials <= MAX_PARTIALS
    assert len(layout.entries) <= MAX_PARTIALS
    merged: set[int] = set()

    def merge(first_row: int, rows: int, slots: list[int]) -> None:
        for slot in slots:
            for i in range(rows):
                assert left[slot + i] == first_row + i and slot + i not in merged
                merged.add(slot + i)

    finished = [0] * len(layout.positions)
    blocks: dict[int, tuple] = {}
    for first_row, rows, _, _, _, slot, first_seed, seeds, first_part, parts, *_ in pieces:
        merge(first_row, rows, layout.entries[first_seed : first_seed + seeds].tolist())
        assert not seeds or rows == 1, "blocks of one row begin with what others left"
        own = layout.entries[first_part : first_part + parts].tolist()
        if slot < 0:
            assert parts == 0
        elif parts:
            # Each piece names the same parts, and the first of them counts the arrivals of no other block.
            assert slot in own and blocks.setdefault(own[0], (first_row, rows, own)) == (first_row, rows, own)
        for row in range(first_row, first_row + rows):
            finished[row] += 1 if slot < 0 else 0
    for first_row, rows, own in blocks.values():
        merge(first_row, rows, own)
        for row in range(first_row, first_row + rows):
            finished[row] += 1
    assert merged == set(left), "a partial is left and never merged"
    assert set(finished) == {1}, "each row is written once"


@examples(120)
@given(
    num_sharers=st.integers(0, 40),
    lengths=st.lists(st.tuples(st.integers(0, 3000), st.one_of(st.just(1), st.integers(0, 300))), max_size=6),
    group=st.sampled_from([1, 3, 4, 8, 32]),
    heads=st.sampled_from([1, 2, 8]),
    processors=st.sampled_from([1, 8, 132]),
    window=st.sampled_from([None, None, 1, 70, 500]),
    tall=st.sampled_from([32, 64, 128]),
    common_rows=st.sampled_from([None, 1, 4, 16]),
    seed=st.integers(0, 9999),
)
def test_every_row_reads_each_visible_chunk_once(
    num_sharers, lengths, group, heads, processors, window, tall, common_rows, seed
) -> None:  # type: ignore[no-untyped-def]
    slices = slices_at(lengths)
    if num_sharers:
        used = sum(len(piece.chunks) for piece in slices)
        rows = forest(counting(), np.random.default_rng(seed), num_sharers, max_chunks=12)
        slices = [replace(row, chunks=row.chunks + used) for row in rows] + slices
    if not sum(piece.num_rows for piece in slices):
        return
    tiles = Tiles(group, heads, max(16, group), max(tall, group), 2 * processors, processors)
    layout = lay_out(slices, tiles, window, common_rows)
    assert layout.num_staged == len(layout.seals) == 0
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
    check_partials(layout)
    common = layout.tall[(layout.tall[:, 5] >= 0) & (layout.tall[:, 9] == 0)]
    assert len(common) == layout.num_common and (window is None or not len(common))
    assert (common[:, 1] <= (common_rows or tiles.tall_rows)).all()
    assert (layout.short[:, 1] <= tiles.short_rows).all() and (layout.short[:, 3] > 0).all()
    assert (layout.tall[:, 1] <= max(tiles.tall_rows, common_rows or 0)).all() and (layout.tall[:, 3] > 0).all()
    singles = next((i for i, piece in enumerate(slices) if piece.num_rows != 1), len(slices))
    assert len(common) <= tiles.max_common(singles)
    num_blocks = len({tuple(block) for block in layout.short[:, :2].tolist()})
    assert len(layout.short) <= tiles.max_short(num_blocks)


@examples(150)
@given(
    num_sharers=st.integers(0, 20),
    lengths=st.lists(st.tuples(st.integers(0, 1000), st.one_of(st.just(1), st.integers(1, 300))), max_size=5),
    group=st.sampled_from([1, 4, 32]),
    processors=st.sampled_from([1, 132]),
    window=st.sampled_from([None, 1, 70, 500]),
    strict=st.booleans(),
    seed=st.integers(0, 9999),
)
def test_rows_see_their_own_chunk_as_written_and_others_as_stored(
    num_sharers, lengths, group, processors, window, strict, seed
) -> None:  # type: ignore[no-untyped-def]
    """Where sealed chunks are encoded; if slices need not be strict, all chunks of a row's own slice as written."""
    slices = slices_at(lengths)
    if num_sharers:
        rows = forest(counting(), np.random.default_rng(seed), num_sharers, max_chunks=8)
        slices = [replace(row, chunks=row.chunks + 10_000) for row in rows] + slices
    slices = [replace(piece, filled=20_000 + i) for i, piece in enumerate(slices)]
    if not slices:
        return
    tiles = Tiles(group, 2, max(16, group), max(64, group), 2 * processors, processors)
    layout = lay_out(slices, tiles, window, encodes=True, strict=strict)
    row = num_staged = 0
    seals = []
    for piece in slices:
        end, first = piece.start + piece.num_rows, piece.start // PAGE_TOKENS
        written = piece.chunks[: -(-end // PAGE_TOKENS)].copy()
        for index in range(first, end // PAGE_TOKENS):
            if index == first and piece.start % PAGE_TOKENS:
                written[index] = piece.filled
            else:
                written[index] = ~num_staged
                num_staged += 1
            seals.append([written[index], piece.chunks[index]])
        for position in range(piece.start, end):
            own = position // PAGE_TOKENS
            seen = piece.chunks[: own + 1].copy()
            since = own if strict else first
            seen[since:] = written[since : own + 1]
            assert layout.write_chunk[row] == written[own]
            low = 0 if window is None else max(0, position + 1 - window) // PAGE_TOKENS
            read = read_by(layout, row)
            assert read == seen[len(seen) - len(read) :].tolist() and len(read) >= len(seen) - low
            row += 1
    assert layout.num_staged == num_staged and layout.seals.tolist() == seals
    check_partials(layout)


def test_one_long_sequence_fills_the_machine_and_many_equal_ones_are_not_split() -> None:
    alone = lay_out(slices_at([(8191, 1)]), LLAMA, None).short
    assert len(alone) * 8 >= 0.9 * 264 and alone[:, 3].max() <= 1.5 * alone[:, 3].mean()
    equal = lay_out(slices_at([(1023, 1)] * 64), LLAMA, None).short
    assert (equal[:, 9] == 0).all()
    ragged = lay_out(slices_at([(32767, 1)] + [(1023, 1)] * 7), LLAMA, None).short
    assert ragged[:, 3].max() <= 1.5 * ragged[:, 3].sum() / 33


@pytest.mark.parametrize("heads, group, num_rows, chunks", [(8, 4, 64, 64), (32, 1, 32, 64), (8, 4, 128, 32)])
def test_a_shared_run_fills_the_machine(heads: int, group: int, num_rows: int, chunks: int) -> None:
    tiles = replace(LLAMA, num_heads=heads, group_size=group)
    layout = lay_out(sharers(counting(), num_rows, chunks, 130), tiles, None)
    assert 0.8 * 132 <= len(layout.tall) * heads <= 1.5 * 132
    assert layout.tall[:, 3].max() <= 1.5 * layout.tall[:, 3].mean()
    assert len(layout.short) == num_rows and (layout.short[:, 3] == 3).all()


def test_what_saves_too_little_is_read_apart() -> None:
    slices = sharers(counting(), 4, 10, 10)
    assert lay_out(slices, replace(LLAMA, min_saved=30), None).num_common > 0
    assert lay_out(slices, replace(LLAMA, min_saved=31), None).num_common == 0


def test_a_deep_tree_of_many_rows_stays_inside_the_partials() -> None:
    """256 rows that share ten levels would leave 2,560 partials, before any split."""
    take = counting()
    path, shared = np.empty(0, np.int32), ()
    rows: list[RowSlice] = []
    for level in range(10):
        chunks = take(40)
        path, shared = np.append(path, chunks), (*shared, (level + 1, 40))
        # Rows that end at each level keep it a segment of its own.
        ends = 2 if level < 9 else 238
        rows += [RowSlice(len(path) * PAGE_TOKENS, 1, np.append(path, take(1)), shared) for _ in range(ends)]
    layout = lay_out(sorted(rows, key=lambda row: row.shared), LLAMA, None)
    assert 0 < layout.num_partials <= MAX_PARTIALS
    check_partials(layout)


@pytest.mark.parametrize(
    "slices", [sharers(counting(), 200, 400, 10), slices_at([(50_000, 128)])], ids=["shared", "prefill"]
)
def test_few_heads_are_split_no_further_than_the_partials_reach(slices: list[RowSlice]) -> None:
    """One kv head would take hundreds of parts of hundreds of rows to fill the machine."""
    layout = lay_out(slices, replace(LLAMA, num_heads=1, group_size=1), None)
    assert MAX_PARTIALS // 4 < layout.num_partials <= MAX_PARTIALS
    check_partials(layout)


@examples(100)
@given(
    pieces=st.lists(st.tuples(st.integers(0, 700), st.booleans(), st.integers(0, 9)), min_size=1, max_size=8),
    prefill=st.sampled_from([None, (0, 100), (130, 3)]),
    heads=st.sampled_from([1, 8]),
    processors=st.sampled_from([1, 8, 132]),
)
def test_a_smaller_path_is_read_before_its_row(pieces, prefill, heads, processors) -> None:  # type: ignore[no-untyped-def]
    """Whatever retention took out of it: its last chunk stands where the row does, the others somewhere before."""
    slices = slices_at([(start, 1) for start, _, _ in pieces] + ([prefill] if prefill else []))
    for index, (_, _, gone) in enumerate(pieces):
        slices[index] = replace(slices[index], start=slices[index].start + gone * PAGE_TOKENS, num_dropped=gone)
    layout = lay_out(slices, Tiles(4, heads, 16, 128, 2 * processors, processors), None)
    check_partials(layout)
    for row, piece in enumerate(slices[: len(pieces)]):
        chunks = piece.chunks[: piece.start // PAGE_TOKENS + 1 - piece.num_dropped].tolist()
        assert read_by(layout, row) == chunks and layout.write_chunk[row] == chunks[-1]
        own = [each for each in (*layout.short.tolist(), *layout.tall.tolist()) if each[0] <= row < each[0] + each[1]]
        ends = [start + chunks * PAGE_TOKENS for _, _, _, chunks, start, *_ in own]
        assert max(ends) == (piece.start // PAGE_TOKENS + 1) * PAGE_TOKENS
