"""Profiles of the CPU kernels compared with the reference's, and the reference's with the whole matrix."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.attention.cpu import CpuAttention
from quire.attention.reference import ReferenceAttention, rotate
from quire.attention.rows import Profiled, RowSlice
from quire.kernels import runtime
from tests.effort import combine, examples, whole

from .encoded import CODECS
from .harness import Shape, make_spec
from .pages import LEVELS, use_level
from .profiling import Prompts, check_history, profiled_spec, run_history

check = functools.partial(check_history, CpuAttention)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@combine(strength=1, dtype=DTYPES, codec=[None, *CODECS])
def test_every_codec_is_profiled_like_the_reference(codec: str | None, dtype: torch.dtype) -> None:
    check(Shape(group=3, dtype=dtype), codec)


@combine(strength=1, dtype=DTYPES, group=[1, 2, 4, 5])
def test_every_group_is_profiled_like_the_reference(group: int, dtype: torch.dtype) -> None:
    check(Shape(group=group, dtype=dtype, layers=1), None)
    check(Shape(group=group, dtype=dtype, layers=1), "mixed")


@combine(strength=1, dtype=DTYPES, dim=[12, 128, 80, 64])
def test_every_head_size_is_profiled_like_the_reference(dim: int, dtype: torch.dtype) -> None:
    check(Shape(dim=dim, dtype=dtype, layers=1), None)
    check(Shape(dim=dim, dtype=dtype, layers=1), "g4")
    if dim % 16 == 0:
        check(Shape(dim=dim, dtype=dtype, layers=1), "mixed")


@combine(window=[1, 5, 64, 100], dtype=DTYPES[:2], codec=[None, "mixed"])
def test_columns_outside_a_window_get_nothing(window: int, dtype: torch.dtype, codec: str | None) -> None:
    check(Shape(window=window, dtype=dtype, layers=1), codec)


@combine(dtype=DTYPES[:2], codec=["mixed", "g4"], sinks=[0, 5])
def test_slices_that_see_themselves_as_computed_are_profiled_so(codec: str, dtype: torch.dtype, sinks: int) -> None:
    check(Shape(dtype=dtype), codec, strict=False, sinks=sinks)


def test_models_without_rotation_are_profiled_like_the_reference() -> None:
    for dtype in DTYPES[:2]:
        check(Shape(rotate=False, dtype=dtype, layers=1), None)
        check(Shape(rotate=False, dtype=dtype, layers=1), "mixed")


@combine(strength=1, level=LEVELS, dtype=DTYPES)
def test_every_cpu_level_profiles_like_the_reference(
    level: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_level(level, monkeypatch)
    check(Shape(dim=80, group=3, dtype=dtype, layers=1), None)
    check(Shape(dim=80, group=3, dtype=dtype, layers=1), "mixed")
    check(Shape(dim=80, group=3, dtype=dtype, layers=1, window=90), "g4")


SLICE = st.tuples(
    st.integers(0, 3), st.sampled_from([1, 1, 2, 63, 64, 65, 140]), st.sampled_from([None, 0.0, 0.5, 1.0])
)


@examples(25)
@given(
    steps=st.lists(st.lists(SLICE, min_size=1, max_size=4, unique_by=lambda row: row[0]), min_size=1, max_size=4),
    codec=st.sampled_from([None, None, *sorted(CODECS)]),
    group=st.integers(1, 5),
    dim=st.sampled_from([16, 64, 80]),
    dtype=st.sampled_from(DTYPES),
    window=st.sampled_from([None, None, 70]),
    sinks=st.sampled_from([0, 1, 5]),
    strict=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_steps_are_profiled_like_the_reference(
    steps, codec, group, dim, dtype, window, sinks, strict, seed
) -> None:  # type: ignore[no-untyped-def]
    """Shares of a slice's rows are kept."""
    shape = Shape(group=group, dim=dim, dtype=dtype, window=window, layers=1)
    steps = [
        [(name, rows, None if share is None else int(rows * share)) for name, rows, share in step] for step in steps
    ]
    check(shape, codec, steps, sinks=sinks, strict=strict, seed=seed)


@combine(make=[ReferenceAttention, CpuAttention], window=[None, 30, 100], rotates=[False, True])
def test_a_prompt_in_slices_has_the_profile_of_the_whole_matrix(make, window: int | None, rotates: bool) -> None:  # type: ignore[no-untyped-def]
    """In float64, with nothing of the reference but its rotation."""
    shape, length, last_rows = Shape(group=2, layers=1, window=window, rotate=rotates, dim=16), 150, 50
    spec = make_spec(shape, 4, sums=True)
    generator = torch.Generator().manual_seed(3)
    q = 3 * torch.randn(length, 4, 16, generator=generator)
    k, v = torch.randn(2, length, 2, 16, generator=generator)
    at = torch.arange(length)
    turned = [rotate(x, spec.angles(0), at).double() for x in (q, k)]
    scores = torch.einsum("rhgd,thd->hgrt", turned[0].unflatten(1, (2, 2)), turned[1]) / 4
    seen = (at[:, None] >= at) & (at[:, None] - at < (window or length))
    matrix = torch.softmax(scores.masked_fill(~seen, -torch.inf), -1).mean(1).numpy()
    backend, prompts = make(spec), Prompts(spec)
    first = 0
    for rows in (70, 80):
        (piece,) = prompts.step([(0, rows, min(rows, last_rows))])
        plan = backend.plan([piece])
        plan.write(0, k[first : first + rows], v[first : first + rows])
        plan.attend(0, q[first : first + rows])
        first += rows
    assert prompts.of(0)[0, :, :length] == pytest.approx(matrix.sum(1), rel=2e-5, abs=2e-6)
    assert not prompts.of(0)[0, :, length:].round(30).any(), "columns that nobody has computed"
    kept = np.random.default_rng(0).random((2, 192)) < 0.3
    words = np.packbits(kept, axis=1, bitorder="little").view(np.uint64)[None]
    local = np.array([[20, 0]])
    near = (at[:, None] - at).numpy()[None] < local[0][:, None, None]
    expected = (matrix * (near | kept[:, None, :length]))[:, -last_rows:].sum(2).mean(1)
    assert plan.recovered(0, words, local)[0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.alone
@combine(strength=1, codec=[None, "mixed"], dtype=DTYPES[:2])
def test_any_number_of_threads_finds_the_same_bits(codec: str | None, dtype: torch.dtype) -> None:
    """Of one plan: how attention is split follows the threads there are when it is laid out."""
    shape = Shape(heads=3, group=3, dtype=dtype)
    threads = runtime.num_threads()
    try:
        found = []
        for count in (1, 2, 3):
            runtime.set_num_threads(2)
            spec = profiled_spec(shape, codec, sinks=1)

            def make(spec, count=count):  # type: ignore[no-untyped-def]
                runtime.set_num_threads(2)
                return CpuAttention(spec)

            found.append(
                run_history(
                    make,
                    spec,
                    [[(0, 300, 100), (1, 1, None), (2, 130, 130)]],
                    before_run=lambda count=count: runtime.set_num_threads(count),
                )
            )
    finally:
        runtime.set_num_threads(threads)
    for other in found[1:]:
        assert all(torch.equal(*each) for each in zip(found[0].outputs, other.outputs, strict=True))
        assert all(np.array_equal(found[0].sums[0][name], other.sums[0][name]) for name in other.sums[0])
        assert all(np.array_equal(*each) for each in zip(found[0].recovered, other.recovered, strict=True))


@pytest.mark.alone
def test_rows_that_are_split_and_merged_are_profiled_like_the_reference() -> None:
    threads = runtime.num_threads()
    runtime.set_num_threads(2)
    try:
        steps = [[(0, 900, None)], [(0, 40, 30)], [(0, 1, 1)]]
        pairs = [(torch.float32, None), (torch.bfloat16, "mixed"), (torch.float32, "mixed"), (torch.bfloat16, None)]
        for dtype, codec in whole(pairs, 2):
            check(Shape(heads=1, dtype=dtype, layers=1), codec, steps)
        backend = CpuAttention(profiled_spec(Shape(heads=1), None))
        plan = backend.plan([RowSlice(900, 40, np.arange(15, dtype=np.int32))])
        assert plan.layouts[0].num_partials > 0
    finally:
        runtime.set_num_threads(threads)


def test_padding_rows_leave_nothing() -> None:
    """A step goes through the model with more rows than it has: those past its own are NaN here."""
    sums = []
    for padding in (0, 5):
        spec = make_spec(Shape(layers=1, rotate=False), 4, sums=True)
        prompts = Prompts(spec)
        (piece,) = prompts.step([(0, 70, 10)])
        q, k, v = (torch.randn(70, n, 64, generator=torch.Generator().manual_seed(n)) for n in (4, 2, 2))
        plan = CpuAttention(spec).plan([piece])
        plan.write(0, k, v)
        plan.attend(0, torch.cat((q, torch.full((padding, 4, 64), torch.nan))))
        sums.append((prompts.of(0), plan.recovered(0, np.zeros((1, 2, 2), np.uint64), np.array([[7, 9]]))))
    assert np.array_equal(sums[0][0], sums[1][0]) and np.array_equal(sums[0][1], sums[1][1])


def test_sums_are_added_to_what_is_there() -> None:
    spec = make_spec(Shape(layers=1), 4, sums=True)
    table = spec.table
    assert table.sums is not None
    prompts = Prompts(spec)
    (piece,) = prompts.step([(0, 70, None)])
    sums = prompts.sums[0]
    table.store_sums(sums, np.full((1, 2, 128), 5.0, np.float32))
    q, k, v = (torch.randn(70, n, 64, generator=torch.Generator().manual_seed(n)) for n in (4, 2, 2))
    plan = CpuAttention(spec).plan([RowSlice(0, 70, piece.chunks, profiled=Profiled(sums))])
    plan.write(0, k, v)
    plan.attend(0, q)
    found = table.load_sums(sums)
    assert found.sum(-1) == pytest.approx(np.full((1, 2), 5 * 128 + 70), rel=1e-6)
    assert (found[..., 70:] == 5).all() and (found[..., :70] > 5).all()


def test_what_cannot_be_profiled_is_said() -> None:
    spec = make_spec(Shape(layers=1), 4)
    chunks, sums = spec.table.take(2, spec.table.open_codec), np.zeros(2, np.int32)
    piece = RowSlice(0, 70, chunks, profiled=Profiled(sums))
    with pytest.raises(AssertionError, match="the chunk table has no column sums"):
        CpuAttention(spec).plan([piece])
    with pytest.raises(AssertionError, match="1 rows of sums, 2 chunks"):
        RowSlice(0, 70, chunks, profiled=Profiled(sums[:1]))
    with pytest.raises(AssertionError, match="71 or 0 last rows of 70"):
        RowSlice(0, 70, chunks, profiled=Profiled(sums, 71))
    (kept,) = Prompts(make_spec(Shape(layers=1), 4, sums=True)).step([(0, 70, 0)])
    for make in (CpuAttention, ReferenceAttention):
        plan = make(make_spec(Shape(layers=1), 4, sums=True)).plan([kept])
        with pytest.raises(AssertionError, match="no rows of slice 0 are kept"):
            plan.recovered(0, np.zeros((1, 2, 2), np.uint64), np.zeros((1, 2), np.int64))
