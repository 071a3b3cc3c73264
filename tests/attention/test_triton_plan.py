"""Plans for a GPU and the buffers of decode plans: host code, run on any machine."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from quire.attention.kernels.layout import PIECE_INTS, Tiles, lay_out
from quire.attention.rows import Profiled, RowSlice
from quire.cache.ledger import PAGE_TOKENS
from quire.cache.path import Path, PathRetention
from quire.cache.retention.packing import pack
from quire.cache.retention.policies import PolicyChain
from quire.cache.retention.retained import RetainedTokens
from tests.kernels.harness import Shape, make_spec
from tests.kernels.profiling import profiled_spec
from tests.kernels.sharing import sharers, taking

pytest.importorskip("triton", reason="the triton backend needs triton, which is not installed")

from quire.attention.kernels.launch import common_launch, launches
from quire.attention.triton import BATCH_SIZES, TritonAttention
from quire.attention.triton_plan import GraphKey
from quire.attention.triton_profile import COLUMN_INTS


def slices_at(lengths: list[tuple[int, int]]) -> list[RowSlice]:
    """Paths of distinct chunk ids, with a chunk more than needed, as a path that was extended ahead has."""
    first = 0
    out = []
    for start, rows in lengths:
        count = -(-(start + rows) // PAGE_TOKENS) + 1
        out.append(RowSlice(start, rows, np.arange(first, first + count, dtype=np.int32)))
        first += count
    return out


LLAMA = Tiles(group_size=4, num_heads=8, short=16, tall=64, workers=264, tall_workers=132)
"""Of a Llama-3-8B on an H200."""


@pytest.mark.parametrize("group", [4, 8, 16, 32])
@pytest.mark.parametrize("num_rows", [16, 83, 255])
def test_groups_of_every_size_share(group: int, num_rows: int) -> None:
    short, _, tall, tallest = launches(torch.bfloat16, group, 128)
    tiles = replace(LLAMA, group_size=group, short=short.rows, tall=tall.rows)
    padded = next(size for size in BATCH_SIZES if size >= num_rows)
    rows = common_launch(tallest, group, padded).rows // group
    common, ids = np.arange(50, dtype=np.int32), itertools.count(50)
    slices = [RowSlice(3300, 1, np.append(common, [next(ids), next(ids)]), ((1, 50),)) for _ in range(num_rows)]
    layout = lay_out(slices, tiles, None, rows)
    assert layout.num_common > 0 and len(layout.tall) >= -(-num_rows // rows)
    assert rows >= (8 if group <= 16 else 4)


def test_rows_that_share_have_few_stages_unless_their_own_contexts_are_long() -> None:
    spec = make_spec(Shape(layers=1, heads=1, dim=16, dtype=torch.bfloat16), 200, positions=8192)
    take = taking(spec)
    stages = [
        TritonAttention(spec).plan(slices).graph_key.stages  # type: ignore[union-attr]
        for slices in (sharers(take, 4, 10, 8 * 64), sharers(take, 4, 10, 9 * 64), slices_at([(600, 1)]))
    ]
    assert stages == [2, 4, 4]


def test_a_decode_plan_keeps_its_addresses_and_shapes_over_a_thousand_steps() -> None:
    """Sequences of four prefixes, of no prefix and of two levels join, grow over boundaries and leave."""
    spec = make_spec(Shape(layers=2, heads=2, dim=16), 900, positions=8192)
    backend = TritonAttention(spec)
    random = np.random.default_rng(0)
    fixed: dict[GraphKey, list] = {}
    mirror = backend.mirror.pages.data_ptr()
    take = taking(spec)
    prefixes = [(np.empty(0, np.int32), ())]
    for name in range(1, 5):
        chunks = take(name + 1)
        prefixes.append((chunks, ((name, len(chunks)),)))
    deeper = take(3)
    prefixes.append((np.append(prefixes[4][0], deeper), (*prefixes[4][1], (5, 3))))
    running: list[list] = []  # [position, own chunks, prefix]
    uploaded = shared_steps = 0
    for step in range(1000):
        if len(running) < 40 and random.random() < 0.15:
            prefix = int(random.integers(len(prefixes)))
            tail = int(random.integers(0, 300))
            running.append([len(prefixes[prefix][0]) * PAGE_TOKENS + tail, take(tail // PAGE_TOKENS + 1), prefix])
        if running and random.random() < 0.05 + (0.5 if step % 250 > 220 else 0):
            spec.table.free(running.pop(int(random.integers(len(running))))[1])
        running.sort(key=lambda sequence: prefixes[sequence[2]][1])
        slices = []
        for sequence in running:
            position, own, prefix = sequence
            path, shared = prefixes[prefix]
            if position // PAGE_TOKENS == len(path) + len(own):
                sequence[1] = own = np.concatenate((own, take(1)))
            slices.append(RowSlice(position, 1, np.append(path, own), shared))
        if not running:
            continue
        plan = backend.plan(slices)
        size = plan.batch_size
        assert size == next(size for size in BATCH_SIZES if size >= len(running))
        assert plan.graph_key[:3] == (size, plan.shares, False) and (not plan.shares or size > 1)
        shared_steps += plan.shares
        partials = backend.partials
        (pieces,) = plan.kinds
        arrays = [plan.positions, plan.write_chunk, pieces.short, pieces.tall, pieces.entries]
        arrays += [partials.o, partials.lse, partials.arrivals]
        seen = [(array.data_ptr(), array.shape, array.stride()) for array in arrays] + [
            (plan.indices.data_ptr(), None, None),
            (pieces.launches, None, None),
        ]
        assert fixed.setdefault(plan.graph_key, seen) == seen, f"step {step}: a buffer of {plan.graph_key} moved"
        assert backend.mirror.pages.data_ptr() == mirror
        # What the buffers say is this step's plan.
        assert plan.positions[: len(running)].tolist() == [position for position, *_ in running]
        short, tall = pieces.short.numpy(), pieces.tall.numpy()
        assert short.shape[1] == tall.shape[1] == PIECE_INTS
        assert sorted(set(short[short[:, 1] > 0, 0].tolist())) == list(range(size))
        assert bool(len(tall)) is plan.shares and (tall[:, 1] > 0).any() == plan.shares
        for first_row, rows, first_index, chunks, start, *_ in [*short.tolist(), *tall.tolist()]:
            named = plan.indices[first_index : first_index + chunks].numpy()
            slot = start // PAGE_TOKENS
            for row in range(first_row, first_row + rows) if chunks else ():
                assert (named == slices[row].chunks[slot : slot + chunks]).all()
            assert (backend.mirror.pages[named].numpy() == spec.table.pages[named]).all(), (
                "a page id on the device is out of date"
            )
        uploaded += backend.mirror.refresh(np.concatenate([piece.chunks for piece in slices]))
        for sequence in running:
            sequence[0] += 1
    assert uploaded == 0, "rows were uploaded twice"
    assert len({key.batch_size for key in fixed}) >= 4 and 300 < shared_steps < 1000
    assert any(key.batch_size > 1 and not key.shares for key in fixed), "some steps share nothing"
    assert max(position for position, *_ in running) > 5 * PAGE_TOKENS


def test_a_retaken_chunk_is_uploaded_again() -> None:
    spec = make_spec(Shape(dim=16), 6)
    backend = TritonAttention(spec)
    first = spec.table.take(2, spec.table.open_codec)
    assert backend.mirror.refresh(first) == 2 and backend.mirror.refresh(first) == 0
    spec.table.free(first[:1])
    page_bytes = spec.table.open_codec.page_bytes
    other = spec.table.ledger.take(np.array([page_bytes]))  # so that the pages change with the taker
    again = spec.table.take(1, spec.table.open_codec)
    assert again[0] == first[0]
    assert backend.mirror.refresh(first) == 1
    spec.table.ledger.free(other)
    assert (backend.mirror.pages[first].numpy() == spec.table.pages[first]).all()


def test_moved_pages_are_uploaded_though_the_step_only_moves_on() -> None:
    spec = make_spec(Shape(dim=16), 6)
    backend, table = TritonAttention(spec), spec.table
    path = Path()
    path.append(table.take(2, table.open_codec))
    for start in (70, 71):
        plan = backend.plan([RowSlice(start, 1, path.chunks)], [] if start > 70 else None)
    assert backend.plans_built == 1
    page_bytes = table.open_codec.page_bytes
    moved = int(path.chunks[0])
    table.ledger.free(table.pages[moved].reshape(-1))
    first = table.ledger.take(np.array([page_bytes]))  # so that the pages are others
    table.pages[moved] = table.ledger.take(np.full(table.pages[moved].shape, page_bytes))
    table.ledger.free(first)
    table.takes[moved] += 1
    table.num_moved_pages += 1
    plan = backend.plan([RowSlice(72, 1, path.chunks)], [])
    assert plan.positions[0] == 72 and backend.plans_built == 2
    assert (backend.mirror.pages[path.chunks].numpy() == table.pages[path.chunks]).all()
    backend.plan([RowSlice(73, 1, path.chunks)], [])
    assert backend.plans_built == 2


def test_steps_that_no_graph_can_hold_have_no_batch_size() -> None:
    spec = make_spec(Shape(dim=16), 300)
    backend = TritonAttention(spec)
    chunk = spec.table.take(1, spec.table.open_codec)
    assert backend.plan([RowSlice(0, 2, chunk)]).batch_size is None
    assert backend.plan([RowSlice(0, 1, chunk), RowSlice(0, 2, chunk)]).batch_size is None
    assert backend.plan([RowSlice(5, 1, chunk)] * 256).batch_size == 256
    assert backend.plan([RowSlice(5, 1, chunk)] * 257).batch_size is None


def test_what_cannot_be_profiled_is_said() -> None:
    nothing = np.zeros((1, 2, 1), np.uint64), np.zeros((1, 2), np.int64)
    spec = make_spec(Shape(layers=1), 4, sums=True)
    sums = spec.table.take(1, spec.table.sums)
    piece = RowSlice(0, 9, spec.table.take(1, spec.table.open_codec), profiled=Profiled(sums))
    backend = TritonAttention(spec)
    for kept in (piece, replace(piece, profiled=None)):
        with pytest.raises(AssertionError, match="no rows of slice 0 are kept"):
            backend.plan([kept]).recovered(0, *nothing)
    with pytest.raises(AssertionError, match="the chunk table has no column sums"):
        TritonAttention(make_spec(Shape(layers=1), 4)).plan([piece])


def test_masks_are_mirrored_where_they_change() -> None:
    spec = make_spec(Shape(dim=16), 6, sums=True)
    backend, table = TritonAttention(spec), spec.table
    assert table.masks is not None and table.sums is not None and backend.mirror.masks is not None
    chunks = table.take(3, table.open_codec)

    def mirrored() -> None:
        backend.mirror.refresh(chunks)
        assert (backend.mirror.masks[chunks].numpy().view(np.uint64) == table.masks[chunks]).all()

    mirrored()
    assert backend.mirror.is_whole[chunks].all()
    table.drop((chunks[:1], np.array([1]), np.array([0])))
    mirrored()
    assert backend.mirror.is_whole[chunks].tolist() == [False, True, True]
    # What a path keeps is packed.
    path = Path(num_sealed=3, retention=PathRetention(sums=table.take(3, table.sums)))
    path.append(chunks)
    everything = np.zeros((spec.num_layers, spec.layers[0].num_kv_heads), np.uint8)
    path.retention.retained = RetainedTokens(PolicyChain(1.0, 0.5, 0.5), everything, 192)
    path.retention.retained.seal(0, 3)
    kept = np.random.default_rng(0).random(path.retention.retained.positions.shape) < 0.4
    kept[1, 0, 0] = False
    path.retention.retained.drop(kept)
    pack(table, path, path.retention.retained)
    chunks = path.chunks
    mirrored()
    assert not backend.mirror.is_whole[chunks].all()


def test_positions_of_packed_slots_are_mirrored_too() -> None:
    spec = profiled_spec(Shape(dim=16), "g4")
    backend, table = TritonAttention(spec), spec.table
    chunks, mirror = table.take(3, table.sealed_codec), backend.mirror
    assert mirror.positions is not None and mirror.bases is not None
    mirror.refresh(chunks)
    assert mirror.is_whole[chunks].all() and (mirror.bases[chunks] == -1).all()
    row = RowSlice(192, 1, np.append(chunks, table.take(1, table.open_codec)))
    # A path whose second chunk is gone has its third in another's row, and all of its tokens.
    table.bases[chunks[1]] = 128
    table.store_positions((chunks[:1], np.array([1]), np.array([0])), np.arange(64, dtype=np.int32)[None])
    table.takes[chunks] += 1
    prompt = RowSlice(256, 70, table.take(6, table.sealed_codec))
    assert backend.plan([row, replace(prompt, chunks=np.append(chunks[2:], prompt.chunks))])._masks is not None
    for there, here in ((mirror.positions, table.positions), (mirror.bases, table.bases)):
        assert (there[chunks].numpy() == here[chunks]).all()
    assert mirror.is_whole[chunks].tolist() == [False, False, True]


def test_steps_are_masked_only_where_they_may_have_to_be() -> None:
    spec = make_spec(Shape(dim=16), 8, sums=True)
    backend, table = TritonAttention(spec), spec.table
    prompt, decoding = RowSlice(0, 70, table.take(2, table.open_codec)), table.take(2, table.open_codec)
    assert backend.plan([prompt])._masks is None
    row = RowSlice(80, 1, decoding)
    assert backend.plan([row])._masks is backend.mirror.masks, "one graph for all steps"
    assert backend.plan([row, prompt])._masks is None
    table.drop((decoding[:1], np.array([0]), np.array([1])))
    assert backend.plan([row, prompt])._masks is backend.mirror.masks
    assert TritonAttention(make_spec(Shape(dim=16), 8)).plan([RowSlice(0, 1, decoding)])._masks is None


def test_a_graph_of_a_profiled_step_holds_any_columns() -> None:
    spec = make_spec(Shape(dim=16), 20, sums=True)
    backend, table = TritonAttention(spec), spec.table
    assert table.sums is not None
    keys, places = set(), set()
    for start in (5, 200):
        for count in (3, 4):
            num_chunks = start // PAGE_TOKENS + 1
            chunks, sums = table.take(num_chunks, table.open_codec), table.take(num_chunks, table.sums)
            plan = backend.plan([RowSlice(start, 1, chunks, profiled=Profiled(sums))] * count)
            assert plan.profile is not None
            keys.add(plan.graph_key)
            addresses = plan.profile.lse, plan.profile._singles, plan.profile._num_columns
            places.add(tuple(each.data_ptr() for each in addresses))
            columns = plan.profile._singles[: COLUMN_INTS * num_chunks * count].view(-1, COLUMN_INTS)
            assert columns[:, 2].tolist() == chunks.tolist() * count and columns[:, 4].tolist() == sums.tolist() * count
            assert columns[:, 5].tolist() == list(range(0, num_chunks * PAGE_TOKENS, PAGE_TOKENS)) * count
            with plan.profiling_suspended():
                assert plan.profile._num_columns.item() == 0
            assert plan.profile._num_columns.item() == num_chunks * count
            table.free(np.concatenate((chunks, sums)))
    assert {key[:3] for key in keys} == {(4, False, True)} and len(keys) == 1 and len(places) == 1
    kept = RowSlice(5, 1, chunks, profiled=Profiled(sums, 1))
    assert backend.plan([kept]).graph_key is None and backend.plan([replace(kept, profiled=None)]).graph_key[2] is False
