"""Attention over shared chunks on the CPU: for any tree and step, every shared page is read once; and partials are
merged.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.attention.cpu import CpuAttention
from quire.attention.plan import common_runs, lay_out
from quire.cache.ledger import PAGE_TOKENS
from tests.effort import combine, examples

from . import sharing
from .harness import Shape, make_spec
from .sharing import apart, counting, forest, merged, sharers, taking

DTYPES = [torch.float32, torch.bfloat16]


@examples(60)
@given(
    num_rows=st.integers(1, 20),
    group=st.sampled_from([1, 3, 4, 8]),
    dim=st.sampled_from([16, 64, 80, 128]),
    dtype=st.sampled_from(DTYPES),
    prefills=st.lists(st.tuples(st.integers(0, 200), st.integers(1, 140)), max_size=2),
    window=st.sampled_from([None, None, None, 70]),
    seed=st.integers(0, 9999),
)
def test_any_tree_attends_like_the_reference(num_rows, group, dim, dtype, prefills, window, seed) -> None:  # type: ignore[no-untyped-def]
    shape = Shape(heads=2, group=group, dim=dim, dtype=dtype, window=window)
    sharing.check_forest(CpuAttention, shape, seed, num_rows=num_rows, prefills=prefills)


@pytest.mark.parametrize("prefills", [[], [(0, 70), (65, 1)]], ids=["decode", "mixed"])
def test_more_sharers_than_a_piece_takes(prefills: list[tuple[int, int]]) -> None:
    sharing.check_forest(CpuAttention, Shape(group=1, dim=16), 3, num_rows=130, prefills=prefills)


@combine(strength=1, num_rows=[2, 16, 64, 65, 130], dtype=DTYPES)
def test_a_shared_page_is_read_once_for_64_rows(num_rows: int, dtype: torch.dtype) -> None:
    sharing.check_reads(CpuAttention, Shape(group=3, dtype=dtype), num_rows, tile=64)


def test_a_window_shares_nothing() -> None:
    spec = make_spec(Shape(heads=1, layers=1, window=1000), 24)
    slices = sharers(taking(spec), 4, 10, 150)
    assert sharing.read_counts(CpuAttention(spec), spec, slices).sum() == 4 * 13


def test_a_step_of_32_reads_the_slots_of_its_distinct_chunks() -> None:
    sharing.check_slots_of_a_step(CpuAttention, torch.bfloat16, group=4, dim=64)


def test_a_mixed_step_reads_what_decode_rows_share_once() -> None:
    spec = make_spec(Shape(heads=1, layers=1), 40)
    slices = sharers(taking(spec), 5, 10, 150)
    counts = sharing.read_counts(CpuAttention(spec), spec, [*slices, *sharing.slices_of(spec, [(64, 65)])])
    assert (counts[slices[0].chunks[:10]] == 1).all()


def test_the_worked_example() -> None:
    parts = [
        (torch.tensor(scores), torch.tensor(values))
        for scores, values in zip(sharing.WORKED_SCORES, sharing.WORKED_VALUES, strict=True)
    ]
    torch.testing.assert_close(merged(parts), torch.tensor(sharing.WORKED_ANSWER), atol=2e-6, rtol=0)
    sharing.check_worked_merge(CpuAttention)


@pytest.mark.parametrize("offset", [80.0, -80.0])
def test_scores_beyond_float32_s_exponentials_merge(offset: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed % 1000)
    scores, values = offset + 4 * torch.randn(230, generator=generator), torch.randn(230, 16, generator=generator)
    parts = list(zip(scores.split(64), values.split(64), strict=True))
    expected = torch.softmax(scores.double(), 0) @ values.double()
    torch.testing.assert_close(merged(parts), expected.float(), atol=1e-4, rtol=1e-3)
    sharing.check_offset_scores(CpuAttention, offset, seed % 1000)


@examples(150)
@given(
    num_rows=st.integers(0, 70),
    block_rows=st.sampled_from([1, 2, 5, 64]),
    max_runs=st.sampled_from([0, 1, 4, 1000]),
    max_rows=st.sampled_from([0, 7, 40, 100000]),
    seed=st.integers(0, 9999),
)
def test_runs_cover_the_beginning_of_every_path_within_the_limits(
    num_rows, block_rows, max_runs, max_rows, seed
) -> None:  # type: ignore[no-untyped-def]
    slices = forest(counting(), np.random.default_rng(seed), num_rows)
    found = common_runs(slices, block_rows, max_runs=max_runs, max_rows=max_rows)
    assert len(found) <= max_runs and sum(count for _, count, _, _ in found) <= max_rows
    covered = [0] * num_rows
    for first, count, low, high in found:
        assert 0 < count <= block_rows and low < high
        for row in range(first, first + count):
            assert covered[row] == low, "a row's runs follow each other without a gap, parents first"
            covered[row] = high
            assert (slices[row].chunks[low:high] == slices[first].chunks[low:high]).all(), (
                "a row reads another's chunks"
            )
    if num_rows > 1 and block_rows == 64 and max_runs == 1000 and max_rows == 100000:
        for left, right, ours, theirs in zip(slices, slices[1:], covered, covered[1:], strict=False):
            common = next((i for i, (a, b) in enumerate(zip(left.shared, right.shared, strict=False)) if a != b), None)
            common = min(len(left.shared), len(right.shared)) if common is None else common
            chunks = sum(count for _, count in left.shared[:common])
            # What is pruned is what two rows share of one chunk.
            assert min(ours, theirs) >= chunks - 1 or block_rows < num_rows


@examples(100)
@given(
    num_rows=st.integers(1, 30),
    prefills=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 200)), max_size=3),
    workers=st.sampled_from([1, 2, 16]),
    seed=st.integers(0, 9999),
)
def test_every_row_reads_each_chunk_once(num_rows, prefills, workers, seed) -> None:  # type: ignore[no-untyped-def]
    take = counting()
    slices = forest(take, np.random.default_rng(seed), num_rows)
    slices += [type(slices[0])(start, rows, take(-(-(start + rows) // PAGE_TOKENS) + 1)) for start, rows in prefills]
    layout = lay_out(slices, block_rows=8, num_heads=2, workers=workers, window=None)
    read: dict[int, list[int]] = {}
    partials: dict[int, list[int]] = {}
    for first_row, rows, index, chunks, start, partial in layout.pieces.tolist():
        for row in range(first_row, first_row + rows):
            for i in range(chunks):
                read.setdefault(row, []).append(start // PAGE_TOKENS + i)
                position = layout.positions[row]
                if start + i * PAGE_TOKENS <= position:
                    assert layout.indices[index + i] == chunks_of(slices, row)[start // PAGE_TOKENS + i]
            if partial >= 0:
                partials.setdefault(row, []).append(partial + row - first_row)
    for row, position in enumerate(layout.positions.tolist()):
        slots = sorted(read[row])
        assert slots[: position // PAGE_TOKENS + 1] == list(range(position // PAGE_TOKENS + 1))
        assert len(slots) == len(set(slots)), f"row {row} reads a chunk twice"
    merges = {row: sorted(layout.merge_parts[first : first + count].tolist()) for row, first, count in layout.merges}
    assert merges == {row: sorted(parts) for row, parts in partials.items()}
    used = [part for parts in partials.values() for part in parts]
    assert sorted(used) == list(range(layout.num_partials))


def chunks_of(slices: list, row: int) -> np.ndarray:
    """The path of the slice that a row of the step belongs to."""
    for piece in slices:
        if row < piece.num_rows:
            return piece.chunks
        row -= piece.num_rows
    raise AssertionError


def test_rows_apart_share_nothing() -> None:
    assert common_runs(apart(sharers(counting(), 8, 4, 10)), 64) == []
