"""The CPU kernels on encoded pages, compared with the reference on the same pages."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.attention.cpu import CpuAttention
from quire.attention.reference import ReferenceAttention, rotate
from quire.attention.rows import RowSlice
from quire.cache.codecs.group import GroupCodec
from quire.cache.codecs.nuq import NuqCodec
from quire.cache.ledger import PAGE_TOKENS
from tests.effort import combine, examples

from ..codecs import documented_bits
from ..nuq_tables import tables_of
from . import encoded
from .encoded import CODECS, Sequences, encoded_spec
from .harness import Shape, run
from .pages import LEVELS, use_level
from .sharing import sharers, taking

DTYPES = [torch.float32, torch.bfloat16, torch.float16]

GROWTH = [
    [(0, 64), (1, 3), (2, 130)],  # a whole chunk, a prompt shorter than the sink, two chunks and a rest
    [(0, 1), (1, 60), (2, 1)],  # decoding beside a slice that ends a token before its chunk does
    [(1, 1), (2, 61), (0, 200)],  # a decode step that fills a chunk; slices that begin in the middle of one
    [(0, 1), (1, 1), (2, 1)],
    [(1, 190), (2, 200)],  # several chunks filled, from the middle of one and from a beginning
    [(2, 1), (1, 1), (0, 1), (3, 1)],
]


@combine(strength=1, dtype=DTYPES, group=[1, 3, 4, 8])
def test_sequences_that_grow_attend_like_the_reference(dtype: torch.dtype, group: int) -> None:
    encoded.check_steps(CpuAttention, Shape(group=group, dtype=dtype, layers=1), CODECS["mixed"], GROWTH)


@combine(strength=1, dtype=DTYPES, codec=CODECS)
def test_every_codec_attends_like_the_reference(dtype: torch.dtype, codec: str) -> None:
    encoded.check_steps(CpuAttention, Shape(group=3, dtype=dtype, layers=1), CODECS[codec], GROWTH)


@combine(strength=1, dim=[16, 128, 48, 80, 32, 96, 256], dtype=DTYPES)
def test_every_head_size_attends_like_the_reference(dim: int, dtype: torch.dtype) -> None:
    encoded.check_steps(CpuAttention, Shape(dim=dim, dtype=dtype, layers=1), CODECS["mixed"], GROWTH[:4])


@combine(strength=1, dim=[2, 8, 12, 24, 66, 72, 112, 130], dtype=DTYPES)
def test_group_codes_of_odd_head_sizes_attend_like_the_reference(dim: int, dtype: torch.dtype) -> None:
    encoded.check_steps(CpuAttention, Shape(dim=dim, dtype=dtype, layers=1), CODECS["g4"], GROWTH[:4])


@combine(dtype=DTYPES)
def test_group_codes_of_keys_without_a_bias_attend_like_the_reference(dtype: torch.dtype) -> None:
    encoded.check_steps(CpuAttention, Shape(dtype=dtype, layers=1), lambda shape: GroupCodec(shape.dim), GROWTH[:4])


@combine(strength=1, sinks=[0, 1, 5, 64], dtype=DTYPES[:2])
def test_sinks_attend_like_the_reference(sinks: int, dtype: torch.dtype) -> None:
    """Among the steps a prompt shorter than the sink, which then grows past its chunk."""
    encoded.check_steps(CpuAttention, Shape(dtype=dtype), CODECS["mixed"], GROWTH, sinks=sinks)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_slices_that_see_themselves_as_computed_attend_like_the_reference(dtype: torch.dtype) -> None:
    for codec in ("mixed", "g4"):
        encoded.check_steps(CpuAttention, Shape(dtype=dtype, layers=1), CODECS[codec], GROWTH, sinks=5, strict=False)


@combine(strength=1, window=[1, 5, 64, 100], dtype=DTYPES[:2])
def test_a_sliding_window_hides_older_tokens(window: int, dtype: torch.dtype) -> None:
    encoded.check_steps(CpuAttention, Shape(window=window, dtype=dtype, layers=1), CODECS["mixed"], GROWTH)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_models_without_rotation_attend_like_the_reference(dtype: torch.dtype) -> None:
    encoded.check_steps(CpuAttention, Shape(rotate=False, dtype=dtype, layers=1), CODECS["mixed"], GROWTH)


@pytest.mark.parametrize("make", [ReferenceAttention, CpuAttention])
@pytest.mark.parametrize("count", [1, 2])
def test_of_channels_with_equal_costs_the_first_get_the_slots(make, count: int, seed: int) -> None:  # type: ignore[no-untyped-def]
    encoded.check_ties(make, count, seed)


@combine(level=LEVELS, dtype=DTYPES)
def test_every_cpu_level_attends_like_the_reference(
    level: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_level(level, monkeypatch)
    encoded.check_steps(CpuAttention, Shape(dim=80, group=3, dtype=dtype, layers=1), CODECS["mixed"], GROWTH)


@examples(30)
@given(
    steps=st.lists(
        st.lists(
            st.tuples(st.integers(0, 3), st.sampled_from([1, 1, 1, 2, 63, 64, 65, 140])),
            min_size=1,
            max_size=4,
            unique_by=lambda row: row[0],
        ),
        min_size=1,
        max_size=5,
    ),
    codec=st.sampled_from(sorted(CODECS)),
    group=st.sampled_from([1, 2, 3, 4, 8]),
    dim=st.sampled_from([16, 64, 80]),
    dtype=st.sampled_from(DTYPES),
    window=st.sampled_from([None, None, 70]),
    sinks=st.sampled_from([0, 1, 5]),
    seed=st.integers(0, 99),
)
def test_any_steps_attend_like_the_reference(steps, codec, group, dim, dtype, window, sinks, seed) -> None:  # type: ignore[no-untyped-def]
    shape = Shape(group=group, dim=dim, dtype=dtype, window=window, layers=1)
    encoded.check_steps(CpuAttention, shape, CODECS[codec], steps, sinks=sinks, seed=seed)


@pytest.mark.parametrize("group", [1, 2, 3, 4])
def test_what_value_slots_add_is_scaled_with_each_row_s_own_maximum(group: int) -> None:
    """Of up to four rows over many pages some have a new maximum where others have none."""
    shape = Shape(heads=1, group=group, dtype=torch.bfloat16, layers=1)
    encoded.check_steps(CpuAttention, shape, CODECS["nuq2"], [[(0, 640)], *[[(0, 1)]] * 4])


@combine(strength=1, codec=CODECS, dtype=DTYPES[:2])
def test_any_tree_attends_like_the_reference(codec: str, dtype: torch.dtype) -> None:
    for seed, (group, num_rows, prefills, sinks) in enumerate([(1, 2, [], 0), (3, 12, [70, 128], 5), (8, 5, [], 1)]):
        shape = Shape(group=group, dtype=dtype, layers=1)
        encoded.check_forest(
            CpuAttention, shape, CODECS[codec], num_rows=num_rows, prefills=prefills, sinks=sinks, seed=seed
        )


def sealed_path(spec, tokens: int, backend=None, seed: int = 0) -> np.ndarray:  # type: ignore[no-untyped-def]
    """A sequence of whole chunks of random tokens; its chunk ids."""
    sequences = Sequences(spec)
    run(backend or CpuAttention(spec), spec, [sequences.step([(0, tokens)])], seed)
    return sequences.chunks[0]


@combine(strength=1, codec=CODECS, dtype=DTYPES)
def test_overwriting_a_sealed_page_changes_what_is_attended(codec: str, dtype: torch.dtype) -> None:
    """There is no other copy: every page of a chunk is read where it lies, its sidecar too."""
    shape = Shape(dtype=dtype, layers=2)
    spec = encoded_spec(shape, CODECS[codec](shape), sinks=1)
    backend, path = CpuAttention(spec), sealed_path(spec, 128)
    path = np.append(path, spec.table.take(1, spec.table.open_codec))
    step = [RowSlice(128, 1, path)]
    (plain,) = run(backend, spec, [step], 1)
    for chunk in path[:2].tolist():
        for page in encoded.bytes_of_pages(spec, chunk):
            at = torch.from_numpy(page)
            kept = spec.table.arena.data[at].clone()
            # Other codes, and numbers that are still finite.
            spec.table.arena.data[at] = kept ^ 0x11
            (other,) = run(backend, spec, [step], 1)
            assert other.isfinite().all() and not torch.equal(other, plain)
            spec.table.arena.data[at] = kept
    (again,) = run(backend, spec, [step], 1)
    assert torch.equal(again, plain)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_page_that_held_another_chunk_gives_the_same_bytes(dtype: torch.dtype) -> None:
    shape = Shape(dtype=dtype)
    images = []
    for poison in (0xFF, 0x00, 0xA5):
        spec = encoded_spec(shape, CODECS["mixed"](shape), sinks=5)
        spec.table.arena.data.fill_(poison)
        images.append(encoded.sealed_bytes(spec, sealed_path(spec, 192)))
    assert torch.equal(images[0], images[1]) and torch.equal(images[0], images[2])


@combine(strength=1, make=[ReferenceAttention, CpuAttention], codec=CODECS)
def test_keys_are_stored_before_rotation(make, codec: str) -> None:  # type: ignore[no-untyped-def]
    """The same keys and values at two positions give the same pages."""
    shape = Shape(dtype=torch.bfloat16)
    spec = encoded_spec(shape, CODECS[codec](shape), sinks=0)
    chunks = spec.table.take(3, spec.table.sealed_codec)
    plan = make(spec).plan([RowSlice(0, 192, chunks)])
    k, v = (
        torch.randn(2, 64, shape.heads, shape.dim, generator=torch.Generator().manual_seed(0))
        .bfloat16()
        .repeat(1, 3, 1, 1)
    )
    for layer in range(shape.layers):
        plan.write(layer, k, v)
        plan.attend(layer, torch.zeros(192, shape.heads * shape.group, shape.dim, dtype=torch.bfloat16))
    images = [encoded.sealed_bytes(spec, chunks[index : index + 1]) for index in range(3)]
    assert torch.equal(images[0], images[1]) and torch.equal(images[0], images[2])


@pytest.mark.parametrize("make", [ReferenceAttention, CpuAttention])
@pytest.mark.parametrize(("query_at", "key_at", "dot"), [
    (3, 1, -1.909738), (12, 10, -1.909738),  # in the open chunk
    (65, 63, -1.909738), (129, 127, -1.909738), (66, 64, -1.909738),  # from the last slot of an encoded one
    (63, 63, 3.0), (64, 64, 3.0),
])  # fmt: skip
def test_keys_are_rotated_on_read_to_their_own_positions(make, query_at: int, key_at: int, dot: float) -> None:  # type: ignore[no-untyped-def]
    """q = (1, 2, 3, 4) and k = (2, 0, -1, 1) with angles 1 and 0.01 a position, in the first two pairs of sixteen
    channels: 3 at equal positions, -1.909738 two apart, wherever they are."""
    q, k = torch.zeros(2, 16)
    q[[0, 1, 8, 9]], k[[0, 1, 8, 9]] = torch.tensor([1.0, 2, 3, 4]), torch.tensor([2.0, 0, -1, 1])
    angle = torch.outer(torch.arange(256), torch.tensor([1.0, 0.01, *[0.5] * 6]))
    shape = Shape(heads=1, group=1, dim=16, layers=1)
    codec = NuqCodec("nuq2", tables_of(torch.tensor([-1.0, 0.0, 1.0, 2.0]).expand(16, -1), (0.0, 0.5, 0.75, 1.0)))
    spec = dataclasses.replace(encoded_spec(shape, codec), rotations=((angle.cos(), angle.sin()),))
    rows = query_at + 1
    keys, values = torch.zeros(2, rows, 1, 16)
    keys[key_at, 0], values[key_at] = k, 1.0
    (piece,) = Sequences(spec).step([(0, rows)])
    plan = make(spec).plan([piece])
    plan.write(0, keys, values)
    weight = plan.attend(0, (q * 4).expand(rows, 1, 16).contiguous())[query_at].mean().double()  # 4: sqrt(D)
    # One key has a score, `query_at` others have zero.
    assert (query_at * weight / (1 - weight)).log().item() == pytest.approx(dot, abs=2e-4)
    both = torch.stack((q, k))[:, None]
    a, b = rotate(both, spec.angles(0), torch.tensor([query_at, key_at]))[:, 0]
    assert (a @ b).item() == pytest.approx(dot, abs=1e-5)


def test_the_worked_rotation() -> None:
    angle = torch.outer(torch.arange(16), torch.tensor([1.0, 0.01]))
    q, k = torch.tensor([1.0, 2, 3, 4]), torch.tensor([2.0, 0, -1, 1])
    for query_at, key_at, dot in ((0, 0, 3.0), (5, 5, 3.0), (3, 1, -1.909738), (12, 10, -1.909738)):
        a, b = rotate(torch.stack((q, k))[:, None], (angle.cos(), angle.sin()), torch.tensor([query_at, key_at]))[:, 0]
        assert (a @ b).item() == pytest.approx(dot, abs=1e-5)


@pytest.mark.parametrize(("codec", "num_rows"), [*((codec, 5) for codec in CODECS), ("nuq3", 1), ("g4", 65)])
def test_a_step_reads_each_packed_page_once(codec: str, num_rows: int) -> None:
    """Counted by the kernels: a page of a shared chunk once for 64 rows, an own one once; and what that is in bytes."""
    shape = Shape(heads=2, group=3, dtype=torch.bfloat16)
    spec = encoded_spec(shape, CODECS[codec](shape), tokens=64 * (12 + 4 * num_rows), sinks=0)
    generator = torch.Generator().manual_seed(0)
    common = spec.table.take(10, spec.table.sealed_codec)
    slices = []
    for row in range(num_rows):
        own = np.append(spec.table.take(2, spec.table.sealed_codec), spec.table.take(1, spec.table.open_codec))
        slices.append(RowSlice(12 * 64 + row % 60, 1, np.append(common, own), ((1, 10),)))
    for chunk in {int(chunk) for piece in slices for chunk in piece.chunks}:
        fill = PAGE_TOKENS if spec.table.kinds[chunk] == spec.table.sealed_codec.kernel_id else 60
        encoded.fill(spec, chunk, fill, generator)
    backend = CpuAttention(spec)
    backend.reads = torch.zeros(spec.table.capacity, shape.heads, dtype=torch.int32)
    run(backend, spec, [slices], 0)
    times = -(-num_rows // 64)
    own = np.concatenate([piece.chunks[10:] for piece in slices])
    reads = backend.reads.numpy()
    assert (reads[common] == shape.layers * times).all() and (reads[own] == shape.layers).all()
    assert reads.sum() == shape.layers * shape.heads * (10 * times + 3 * num_rows), "no page besides"
    sealed = np.isin(np.arange(len(reads)), np.concatenate([common, *(piece.chunks[10:12] for piece in slices)]))
    sizes = np.broadcast_to(spec.table.sealed_codec.page_bytes, (shape.layers, shape.heads))
    read = (reads[sealed].sum(0) / shape.layers * sizes.sum(0)).sum()
    dense = reads[sealed].sum() * spec.table.open_codec.page_bytes
    if codec != "mixed":  # its widths are made up
        assert read / dense == pytest.approx(documented_bits(codec) / 16)


def high_water_kib() -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1])


@pytest.mark.alone
@combine(strength=1, codec=CODECS, dtype=DTYPES[:2])
def test_the_cache_is_never_decoded_as_a_whole(codec: str, dtype: torch.dtype) -> None:
    """Peak memory of a decode step and of a prefill slice over 131,072 tokens: decoded they would be 64 MiB or more a
    layer; the kernels take a page at a time."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("this system does not reset a process's peak of memory")
    shape = Shape(heads=2, dtype=dtype, layers=1)
    spec = encoded_spec(shape, CODECS[codec](shape), sinks=1, positions=2048 * 64 + 128)
    few = sealed_path(spec, 256)
    path = np.append(np.tile(few, 512), spec.table.take(1, spec.table.open_codec))
    backend = CpuAttention(spec)
    (short,) = Sequences(spec).step([(0, 65)])
    run(backend, spec, [[dataclasses.replace(short, start=0, num_rows=65)]], 0)
    for rows in (1, 60):
        run(backend, spec, [[RowSlice(256, rows, np.append(few, path[-1:]))]], 0)
        Path("/proc/self/clear_refs").write_text("5")
        before = high_water_kib()
        run(backend, spec, [[RowSlice(2048 * 64, rows, path)]], 0)
        assert high_water_kib() - before < 8 << 10


def test_sharers_of_packed_chunks_read_like_every_row_alone() -> None:
    """64 rows over one shared run, against the same rows apart: the same numbers to a rounding."""
    shape = Shape(heads=1, group=1, dtype=torch.float32, layers=1)
    spec = encoded_spec(shape, CODECS["nuq3"](shape), tokens=64 * 200, sinks=1)
    rows = sharers(taking(spec), 64, 0, 30)
    common = sealed_path(spec, 640)
    rows = [RowSlice(640 + 29, 1, np.append(common, row.chunks), ((1, 10),)) for row in rows]
    for row in rows:
        encoded.fill(spec, int(row.chunks[-1]), 29, torch.Generator().manual_seed(1))
    backend = CpuAttention(spec)
    (together,) = run(backend, spec, [rows], 0)
    (apart,) = run(backend, spec, [[dataclasses.replace(row, shared=()) for row in rows]], 0)
    assert len(backend._last.layouts[0].merges) == 0 and not torch.equal(together, apart)  # type: ignore[union-attr]
    torch.testing.assert_close(together, apart, atol=2e-6, rtol=1e-4)
