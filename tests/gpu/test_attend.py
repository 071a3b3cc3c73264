"""The attention kernels on a GPU, compared with the reference over ragged batches, with the CPU kernels' matrix."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="the triton backend needs triton, which is not installed")

from quire.attention.reference import ReferenceAttention
from quire.attention.spec import AttentionSpec
from quire.attention.triton import TritonAttention

from ..kernels import sharing
from ..kernels.harness import TOLERANCE, Shape, assert_equals_reference, make_spec, relative_rms, run, slices_of

pytestmark = pytest.mark.gpu

check = functools.partial(assert_equals_reference, TritonAttention, device="cuda")

EDGES = [(0, 1), (62, 1), (63, 1), (64, 1), (65, 3), (0, 63), (0, 64), (0, 65), (64, 64), (128, 17)]
DECODE = [(start, 1) for start in (0, 62, 63, 64, 65, 127, 200, 511)]


@pytest.mark.parametrize("dim", [16, 64, 80, 96, 128])
@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("lengths", [EDGES, DECODE], ids=["mixed", "decode"])
def test_bfloat16_attends_like_the_reference(dim: int, group: int, lengths: list[tuple[int, int]]) -> None:
    check(Shape(dim=dim, group=group, dtype=torch.bfloat16), lengths)


@pytest.mark.parametrize("dtype, dim, group", [(torch.float32, 64, 3), (torch.float32, 128, 4), (torch.float16, 80, 8)])
@pytest.mark.parametrize("lengths", [EDGES, DECODE], ids=["mixed", "decode"])
def test_other_dtypes_attend_like_the_reference(
    dtype: torch.dtype, dim: int, group: int, lengths: list[tuple[int, int]]
) -> None:
    check(Shape(dim=dim, group=group, dtype=dtype), lengths)


@pytest.mark.parametrize("lengths", [[(15000, 1)], [(15000, 1), (3, 1)], [(9000, 5), (0, 9)], [(4000, 100)]], ids=str)
@pytest.mark.parametrize("heads", [1, 8])
def test_a_long_sequence_is_split_and_merged(lengths: list[tuple[int, int]], heads: int) -> None:
    shape = Shape(dim=128, heads=heads, group=4, layers=1, dtype=torch.bfloat16)
    outputs = []
    for make in (ReferenceAttention, TritonAttention):
        spec = make_spec(shape, 500, "cuda", positions=16384)
        # A random past in every page: the reference would take minutes to write it.
        torch.cuda.manual_seed(0)
        spec.table.arena.data.view(torch.bfloat16).normal_()
        slices = slices_of(spec, lengths)
        backend = make(spec)
        outputs.append(run(backend, spec, [slices], seed=0)[0])
        if make is TritonAttention:
            plan = backend.plan(slices)
            assert any((pieces[:, 9] > 1).any() for pieces in (plan.kinds[0].short, plan.kinds[0].tall))
    assert relative_rms(outputs[1], outputs[0]) < TOLERANCE[torch.bfloat16]


def test_a_merge_gives_the_same_bits_every_time() -> None:
    """Parts arrive in any order and are merged in one; a race would show as other bits, or as a counter left over."""
    shape = Shape(dim=128, heads=8, group=4, layers=1, dtype=torch.bfloat16)
    spec = make_spec(shape, 300, "cuda", positions=16384)
    spec.table.arena.data.view(torch.bfloat16).normal_()
    backend = TritonAttention(spec)
    plan = backend.plan(slices_of(spec, [(12000, 1), (900, 1), (20, 1)]))
    q, k, v = (torch.randn(3, heads, 128, device="cuda").bfloat16() for heads in (32, 8, 8))
    outputs = []
    for _ in range(500):
        plan.write(0, k, v)
        outputs.append(plan.attend(0, q))
    assert all(torch.equal(out, outputs[0]) for out in outputs)
    assert not backend.partials.arrivals.any()


@pytest.mark.parametrize("window", [1, 5, 64, 100])
@pytest.mark.parametrize("lengths", [[(0, 150)], [(200, 1), (63, 1)], [(130, 70), (200, 2)]], ids=str)
def test_a_sliding_window_hides_older_tokens(window: int, lengths: list[tuple[int, int]]) -> None:
    check(Shape(dim=16, window=window, dtype=torch.float16), lengths)


def test_models_without_rotation_attend_like_the_reference() -> None:
    check(Shape(dim=16, rotate=False, dtype=torch.float16), EDGES)
    check(Shape(dim=16, rotate=False, dtype=torch.float16), DECODE)


def test_any_ragged_step_attends_like_the_reference(seed: int) -> None:
    random = np.random.default_rng(seed)
    for _ in range(25):
        count = int(random.integers(1, 7))
        lengths = [(int(random.integers(0, 300)), int(random.choice([1, 1, 2, 5, 20, 140]))) for _ in range(count)]
        check(Shape(heads=2, group=int(random.choice([1, 4])), dim=64, dtype=torch.bfloat16), lengths, seed=seed % 1000)


def test_decode_steps_store_what_later_steps_read() -> None:
    shape = Shape(dim=128, group=4, layers=2, dtype=torch.bfloat16)
    outputs = []
    for make in (ReferenceAttention, TritonAttention):
        spec = make_spec(shape, 8, "cuda")
        first, second = slices_of(spec, [(58, 70), (0, 70)])
        prefill = [replace(first, start=0, num_rows=58)]
        steps = [[replace(first, start=58 + i, num_rows=1), replace(second, start=i, num_rows=1)] for i in range(70)]
        outputs.append(run(make(spec), spec, [prefill, *steps], seed=1))
    for step, (actual, expected) in enumerate(zip(outputs[1], outputs[0], strict=True)):
        assert relative_rms(actual, expected) < TOLERANCE[shape.dtype], f"step {step}"


def sharing_backend(spec: AttentionSpec) -> TritonAttention:
    """One that shares however little it saves."""
    backend = TritonAttention(spec)
    backend.kinds[0] = replace(backend.kinds[0], tiles=replace(backend.kinds[0].tiles, min_saved=0))
    return backend


@pytest.mark.parametrize("dim", [16, 64, 80, 128])
@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("prefills", [[], [(0, 30), (65, 100)]], ids=["decode", "mixed"])
def test_any_tree_attends_like_the_reference(
    dim: int, group: int, dtype: torch.dtype, prefills: list[tuple[int, int]], seed: int
) -> None:
    shape = Shape(dim=dim, group=group, dtype=dtype, layers=1)
    for num_rows in (2, 20, 70):
        backend = sharing.check_forest(
            sharing_backend, shape, (seed + num_rows) % 10000, num_rows=num_rows, prefills=prefills, device="cuda"
        )
        assert not backend.partials.arrivals.any()


@pytest.mark.parametrize("num_rows", [2, 16, 32, 64])
def test_a_shared_page_is_read_once_for_a_tile_of_rows(num_rows: int) -> None:
    shape = Shape(dim=64, group=4, dtype=torch.bfloat16)
    sharing.check_reads(sharing_backend, shape, num_rows, tile=16, device="cuda")


def test_a_step_of_32_reads_the_slots_of_its_distinct_chunks() -> None:
    sharing.check_slots_of_a_step(sharing_backend, torch.bfloat16, group=4, dim=64, device="cuda")


def test_two_phases_give_the_same_bits_every_time() -> None:
    """Both launches write and read the same partials; a race would show as other bits."""
    spec = make_spec(Shape(dim=128, heads=8, group=4, layers=1, dtype=torch.bfloat16), 400, "cuda", positions=8192)
    slices = sharing.sharers(sharing.taking(spec), 24, 64, 700)
    spec.table.arena.data.view(torch.bfloat16).normal_()
    backend = sharing_backend(spec)
    plan = backend.plan(slices)
    assert plan.shares
    assert backend.overlaps == (torch.cuda.get_device_capability() >= (9, 0))
    q, k, v = (torch.randn(24, heads, 128, device="cuda").bfloat16() for heads in (32, 8, 8))
    plan.write(0, k, v)
    expected, outputs = plan.attend(0, q), []
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # its launches follow each other at once, so that a missing wait shows
        for _ in range(100):
            for partials in (backend.partials.o, backend.partials.lse):
                partials.fill_(torch.nan)
            plan.write(0, k, v)
            outputs.append(plan.attend(0, q))
    for _ in range(10):
        graph.replay()
        assert all(torch.equal(out, expected) for out in outputs)
