"""Encoded pages whose slots have their own positions: the rest of pages after tokens were dropped."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.attention.cpu import CpuAttention
from quire.attention.reference import ReferenceAttention
from quire.cache.codecs.slots import SlotMoves
from quire.cache.ledger import PAGE_TOKENS
from tests.effort import combine, examples, tries

from . import encoded
from .encoded import CODECS, TOLERANCE, encoded_spec
from .harness import Shape, relative_rms, run
from .pages import LEVELS, use_level
from .placing import ROW_TOLERANCE, Rows, check_batch, check_rows, check_sharers

DTYPES = [torch.float32, torch.bfloat16, torch.float16]

# Values of twelve thousand tokens nearly cancel: ordinary pages are off by as much.
FAR_TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: TOLERANCE[torch.bfloat16]}


def check_together(shape: Shape, codec: str, num_rows: int, *, sinks: int = 0) -> None:
    """Sharers, of whom some are read for together."""
    backend = check_sharers(CpuAttention, shape, codec, num_rows, sinks=sinks)
    pieces = backend._last.layouts[0].pieces  # type: ignore[attr-defined]
    assert (pieces[:, 1] > 1).any(), "nothing was read together"


@combine(dtype=DTYPES[:2], codec=CODECS, group=[1, 3, 8])
def test_pages_with_positions_of_their_own_attend_like_the_reference(
    dtype: torch.dtype, codec: str, group: int
) -> None:
    check_batch(CpuAttention, Shape(group=group, dtype=dtype), codec, [200, 64, 255], seed=group)


@combine(strength=1, dtype=DTYPES, codec=["mixed", "g4"])
def test_pages_seen_in_part_attend_like_the_reference(dtype: torch.dtype, codec: str) -> None:
    for seed in range(tries(4)):
        check_batch(
            CpuAttention, Shape(group=3, dtype=dtype), codec, [200, 64, 330], sinks=seed % 2, seed=seed, hides=True,
            tolerance=ROW_TOLERANCE,
        )  # fmt: skip


@combine(strength=1, dtype=DTYPES, group=[1, 2, 3, 4, 5, 9])
def test_every_group_attends_like_the_reference(dtype: torch.dtype, group: int) -> None:
    check_batch(CpuAttention, Shape(group=group, dtype=dtype, layers=1), "mixed", [200, 447], sinks=1, seed=group)


@combine(rows=[(2, 1), (3, 3), (20, 3)], codec=CODECS, dtype=DTYPES[:2])
def test_shared_runs_attend_like_the_reference(rows: tuple[int, int], codec: str, dtype: torch.dtype) -> None:
    num_rows, group = rows
    check_together(Shape(heads=1, group=group, dtype=dtype, layers=1), codec, num_rows)


@combine(strength=1, dim=[16, 128, 48, 80, 32, 96, 256], dtype=DTYPES[:2])
def test_every_head_size_attends_like_the_reference(dim: int, dtype: torch.dtype) -> None:
    check_batch(CpuAttention, Shape(dim=dim, dtype=dtype, layers=1), "mixed", [330, 70], sinks=1)
    check_together(Shape(dim=dim, dtype=dtype, layers=1), "mixed", 6)


@combine(strength=1, dim=[12, 66, 130], dtype=DTYPES[:2])
def test_group_codes_of_odd_head_sizes_attend_like_the_reference(dim: int, dtype: torch.dtype) -> None:
    check_batch(CpuAttention, Shape(dim=dim, dtype=dtype, layers=1), "g4", [330, 70])


@combine(strength=1, sinks=[1, 5, 64], dtype=DTYPES[:2])
def test_sinks_keep_their_slots(sinks: int, dtype: torch.dtype) -> None:
    check_batch(CpuAttention, Shape(dtype=dtype, layers=1), "mixed", [200, 300], sinks=sinks)
    check_together(Shape(dtype=dtype, layers=1), "mixed", 6, sinks=sinks)


@combine(level=LEVELS, dtype=DTYPES)
def test_every_cpu_level_attends_like_the_reference(
    level: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_level(level, monkeypatch)
    for codec in ("mixed", "g4"):
        check_batch(CpuAttention, Shape(dim=80, group=3, dtype=dtype, layers=1), codec, [200, 447], sinks=1)
        check_together(Shape(dim=80, group=3, dtype=dtype, layers=1), codec, 7)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_models_without_rotation_do_not_care(dtype: torch.dtype) -> None:
    for codec in ("mixed", "g4"):
        check_batch(CpuAttention, Shape(rotate=False, dtype=dtype, layers=1), codec, [200, 447], sinks=1)


@examples(12)
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
    # Positions may change a lone row of 64 tokens by less than a tenth: longer rows stand beside it.
    starts = [*starts, 300, 350, 400, 450, 500]
    check_batch(CpuAttention, shape, codec, starts, sinks=sinks, seed=seed, tolerance=ROW_TOLERANCE)


@combine(codec=["nuq3", "g4"], group=[1, 3, 8], dtype=DTYPES[:2])
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
    check_rows(CpuAttention, spec, rows, [rows.row(path, start)], 0, FAR_TOLERANCE)


@combine(dtype=DTYPES[:2], codec=CODECS, group=[3, 8])
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
    for layer, head in np.ndindex(spec.num_layers, spec.layers[0].num_kv_heads):
        order = rows.random.permutation(count * PAGE_TOKENS)  # of slots of the new pages: which old one
        at, slots = np.divmod((order, np.arange(len(order))), PAGE_TOKENS)
        pages = spec.table.pages[np.stack((old[at[0]], new[at[1]])), layer, head]
        moves.append([np.full_like(order, layer), np.full_like(order, head), pages, slots])
        for index, chunk in enumerate(new.tolist()):
            rows.place(chunk, layer, head, order[index * PAGE_TOKENS : (index + 1) * PAGE_TOKENS])
    columns = (np.concatenate(column, -1) for column in zip(*moves, strict=True))
    spec.table.sealed_codec.move(spec.table.arena.data, SlotMoves(*columns))
    after = replace(before, chunks=np.append(new, before.chunks[-1:]))
    for backend in (ReferenceAttention(spec), CpuAttention(spec)):
        same, moved = (run(backend, spec, [[piece]], 0)[0] for piece in (before, after))
        assert relative_rms(moved, same) < TOLERANCE[dtype]
        if isinstance(backend, ReferenceAttention):
            assert not torch.equal(moved, same) or dtype == torch.bfloat16
    rows.free()
