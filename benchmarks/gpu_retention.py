"""Cost and savings of retention on pages in GPU memory, in one run.

    python benchmarks/gpu_retention.py [--json FILE]

Prefill: a layer's attention of a prompt without and with column sums; and one `recovered` over the prompt's last 256
rows in all layers, until the host has the result. Decode: a layer's attention to all tokens; the same through masks
that hide nothing; to half of the tokens, packed into half of the pages, or in place with masks that hide half of each
page; and packed with column sums. Dense bfloat16 pages of Llama-3-8B's shape, over enough layers to exceed the caches.
All sides but `recovered` run as CUDA graphs.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
from common import append_record, format_table, median
from gpu import copy_bandwidth, graph_seconds, require_gpu
from gpu_attention import DIM, DTYPE, GROUP, HEADS, num_layers

from quire.attention.rows import Profiled, RowSlice
from quire.attention.spec import AttentionSpec, equal_layers
from quire.cache.arena import Arena
from quire.cache.codecs.dense import DenseCodec
from quire.cache.codecs.sums import SumsCodec
from quire.cache.ledger import PAGE_TOKENS, PageLedger
from quire.cache.table import ChunkTable

DEVICE = "cuda"
PREFILL = (2048, 8192)
DECODE = ((1, 8192), (1, 131072), (16, 32768), (64, 4096))
LAST_ROWS = 256
"""`retain.profile_rows`."""

SLAB_BYTES = 4 << 20


def make_spec(batch: int, context: int, retains: bool) -> AttentionSpec:
    """A cache of random numbers for `batch` sequences; with column sums and masks if it retains."""
    layers = num_layers(batch, context)
    codec = DenseCodec(DIM, DTYPE)
    pages = layers * HEADS * (batch * -(-context // PAGE_TOKENS) + 1)
    slabs = -(-pages * codec.page_bytes // SLAB_BYTES) + retains * -(-pages * SumsCodec.page_bytes // SLAB_BYTES)
    ledger = PageLedger((slabs + 2) * SLAB_BYTES, SLAB_BYTES)
    arena = Arena(ledger.num_bytes, DEVICE)
    arena.data.view(DTYPE).normal_()
    angle = torch.outer(torch.arange(context, device=DEVICE), 1e4 ** (-torch.arange(DIM // 2, device=DEVICE) / DIM * 2))
    table = ChunkTable(ledger, layers, HEADS, codec, sums=SumsCodec() if retains else None, arena=arena)
    return AttentionSpec(
        table, equal_layers(layers, HEADS, GROUP, DIM, rotation=0), DTYPE, ((angle.cos(), angle.sin()),)
    )


def make_rows(spec: AttentionSpec, batch: int, start: int, rows: int, kept: float = 1.0) -> list[RowSlice]:
    """Slices of sequences that have only a share of their chunks left."""
    num_chunks = -(-(start + rows) // PAGE_TOKENS)
    left = max(1, round(kept * num_chunks))
    table = spec.table
    return [
        RowSlice(start, rows, table.take(left, table.open_codec), num_dropped=num_chunks - left) for _ in range(batch)
    ]


def profiled(spec: AttentionSpec, slices: list[RowSlice], last_rows: int = 0) -> list[RowSlice]:
    """The slices with their own column sums, which are zero."""
    table, found = spec.table, []
    assert table.sums is not None
    for piece in slices:
        sums = table.take(len(piece.chunks), table.sums)
        table.store_sums(sums, np.zeros((spec.num_layers, HEADS, len(sums) * PAGE_TOKENS), np.float32))
        found.append(replace(piece, profiled=Profiled(sums, last_rows)))
    return found


def hide_half(spec: AttentionSpec, slices: list[RowSlice]) -> None:
    """Hides a random half of the slots of every page but the last one of each sequence."""
    table, random = spec.table, np.random.default_rng(0)
    assert table.masks is not None
    for piece in slices:
        chunks = piece.chunks[:-1]
        table.masks[chunks] = random.integers(1, 2**64, (len(chunks), spec.num_layers, HEADS), np.uint64)
        table.takes[chunks] += 1


def seconds_of(spec: AttentionSpec, slices: list[RowSlice]) -> float:
    """Seconds of one layer."""
    from quire.attention.triton import TritonAttention

    plan = TritonAttention(spec).plan(slices)
    rows = sum(piece.num_rows for piece in slices)
    fused = torch.randn(rows, (GROUP + 2) * HEADS, DIM, device=DEVICE, dtype=DTYPE)
    q, k, v = fused.split([GROUP * HEADS, HEADS, HEADS], 1)

    def run() -> None:
        for layer in range(spec.num_layers):
            plan.write(layer, k, v)
            plan.attend(layer, q)

    return graph_seconds(run) / spec.num_layers


def recovered_seconds(spec: AttentionSpec, piece: RowSlice) -> float:
    """Seconds for all layers, from the call until the host has the numbers."""
    from quire.attention.triton import TritonAttention

    plan = TritonAttention(spec).plan([piece])
    fused = torch.randn(piece.num_rows, (GROUP + 2) * HEADS, DIM, device=DEVICE, dtype=DTYPE)
    q, k, v = fused.split([GROUP * HEADS, HEADS, HEADS], 1)
    for layer in range(spec.num_layers):
        plan.write(layer, k, v)
        plan.attend(layer, q)
    shape = spec.num_layers, HEADS
    kept = np.random.default_rng(0).integers(0, 2**64, (*shape, len(piece.chunks)), np.uint64)
    local = np.full(shape, piece.num_rows // 3)
    everything = plan.recovered(0, np.full_like(kept, 2**64 - 1), local)
    assert np.abs(everything - 1).max() < 2e-2, f"all columns hold {everything.min()} to {everything.max()} of a row"
    times = []
    for _ in range(11):
        before = time.perf_counter()
        plan.recovered(0, kept, local)
        times.append(time.perf_counter() - before)
    return median(times[1:])


def prefill(record: Path | None) -> None:
    """Microseconds of a layer, and milliseconds of a recovery."""
    rows = []
    for tokens in PREFILL:
        spec = make_spec(1, tokens, False)
        found = {"plain": seconds_of(spec, make_rows(spec, 1, 0, tokens))}
        del spec
        spec = make_spec(1, tokens, True)
        slices = profiled(spec, make_rows(spec, 1, 0, tokens), LAST_ROWS)
        found["sums"] = seconds_of(spec, slices)
        found["recovered"] = recovered_seconds(spec, slices[0])
        layers = spec.num_layers
        del spec
        rows.append(
            [
                f"{tokens}",
                f"{found['plain'] * 1e6:.0f}",
                f"{found['sums'] * 1e6:.0f}",
                f"{found['sums'] / found['plain']:.2f}",
                f"{found['recovered'] * 1e3:.2f} ({layers})",
            ]
        )
        if record:
            case = {"benchmark": "gpu_retention", "prefill": tokens, "layers": layers}
            append_record(record, case | {"seconds": found})
    head = ["prefill, tokens", "attention us", "with sums us", "times", "recovered ms (layers)"]
    print(format_table(head, rows), "\n")


def decode(copy: float, record: Path | None) -> None:
    """Microseconds of a layer."""
    rows = []
    for batch, context in DECODE:
        start = context - 1
        spec = make_spec(batch, context, False)
        found = {"all": seconds_of(spec, make_rows(spec, batch, start, 1))}
        del spec
        spec = make_spec(batch, context, True)
        slices = make_rows(spec, batch, start, 1)
        found["masked"] = seconds_of(spec, slices)
        hide_half(spec, slices)
        found["half in place"] = seconds_of(spec, slices)
        for piece in slices:
            spec.table.free(piece.chunks)
        slices = make_rows(spec, batch, start, 1, 0.5)
        found["half packed"] = seconds_of(spec, slices)
        found["packed, sums"] = seconds_of(spec, profiled(spec, slices))
        layers = spec.num_layers
        del spec
        floor = batch * context * HEADS * DIM * 2 * DTYPE.itemsize / copy
        rows.append(
            [
                f"{batch} x {context}",
                f"{floor * 1e6:.1f}",
                *(f"{found[side] * 1e6:.1f}" for side in SIDES),
                f"{found['all'] / found['half packed']:.2f}x",
            ]
        )
        if record:
            case = {"benchmark": "gpu_retention", "batch": batch, "context": context, "layers": layers}
            append_record(record, case | {"copy_bytes_per_second": copy, "seconds": found})
    head = ["decode, batch x context", "floor us", *(f"{side} us" for side in SIDES), "all over half packed"]
    print(format_table(head, rows), "\n")


SIDES = ("all", "masked", "half in place", "half packed", "packed, sums")


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="append the measurements as JSON lines")
    given = parser.parse_args()
    require_gpu()
    copy = copy_bandwidth()
    print(f"copy: {copy / 1e9:.0f} GB/s; {HEADS} kv heads, {GROUP} query heads each, head size {DIM}, {DTYPE}\n")
    prefill(given.json)
    decode(copy, given.json)


if __name__ == "__main__":
    main()
