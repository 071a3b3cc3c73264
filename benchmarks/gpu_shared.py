"""Decode attention over shared prefixes on a GPU. Run by gpu_attention.py.

The sides are our attention in two phases, our attention with separate rows, and, if it can be imported, FlashInfer's
cascade and paged decode on pages of 64 tokens. All are in bfloat16, as CUDA graphs over enough layers to exceed the
caches. Our time includes rotating and storing the new key and value. The floor is the time to read the distinct tokens
at copy bandwidth.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from common import append_record, format_table, median
from gpu import graph_seconds

from quire.attention.rows import RowSlice
from quire.attention.spec import AttentionSpec, equal_layers
from quire.cache.arena import Arena
from quire.cache.codecs.dense import DenseCodec
from quire.cache.ledger import PAGE_TOKENS, PageLedger
from quire.cache.table import ChunkTable

DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Case:
    """levels: (segments, tokens of each) from the root. Rows are divided evenly among the segments of a level."""

    batch: int
    q_heads: int
    kv_heads: int
    dim: int
    levels: tuple[tuple[int, int], ...]
    own: int
    goal: float | None
    """Goal, as a multiple of the floor."""

    @property
    def tokens(self) -> int:
        """Distinct tokens."""
        return sum(count * tokens for count, tokens in self.levels) + self.batch * self.own

    @property
    def layer_bytes(self) -> int:
        """Bytes of their keys and values in one layer."""
        return self.tokens * self.kv_heads * self.dim * 2 * DTYPE.itemsize

    @property
    def name(self) -> str:
        """Its name in the tables."""
        levels = " + ".join(f"{count} x {tokens}" for count, tokens in self.levels)
        return f"{self.batch} rows, {self.q_heads}/{self.kv_heads} heads, {levels} + {self.own}"


CASES = [
    Case(64, 32, 8, 128, ((1, 4096),), 128, 2.5),
    Case(32, 32, 32, 128, ((1, 4096),), 128, 2.0),
    Case(64, 32, 8, 128, ((1, 8192),), 512, 2.0),
    Case(128, 32, 8, 128, ((1, 2048),), 256, 2.0),
    Case(32, 32, 8, 128, ((1, 4096), (4, 1024)), 128, None),
]
# Launches of shared runs for --sweep: (rows of a tile, warps, stages, tiles per multiprocessor).
LAUNCHES = [(128, 8, 3, 1), (128, 8, 2, 1), (64, 4, 3, 1), (64, 4, 3, 2), (64, 4, 2, 2), (32, 4, 3, 2)]


def make_case(case: Case) -> tuple[AttentionSpec, list[RowSlice]]:
    """A cache of random numbers, and the rows of a decode step."""
    layers = min(32, max(2, -(-(1 << 30) // case.layer_bytes)))
    codec = DenseCodec(case.dim, DTYPE)
    chunks = case.tokens // PAGE_TOKENS
    slab = codec.page_bytes * 128
    ledger = PageLedger(-(-(chunks + 1) * layers * case.kv_heads * codec.page_bytes // slab) * slab, slab)
    arena = Arena(ledger.num_bytes, "cuda")
    arena.data.view(DTYPE).normal_()
    context = sum(tokens for _, tokens in case.levels) + case.own
    half = case.dim // 2
    angle = torch.outer(torch.arange(context, device="cuda"), 1e4 ** (-torch.arange(half, device="cuda") / half))
    table = ChunkTable(ledger, layers, case.kv_heads, codec, arena=arena)
    group = case.q_heads // case.kv_heads
    spec = AttentionSpec(
        table, equal_layers(layers, case.kv_heads, group, case.dim, rotation=0), DTYPE, ((angle.cos(), angle.sin()),)
    )
    names = itertools.count(1)
    segments = [
        [(next(names), table.take(tokens // PAGE_TOKENS, codec)) for _ in range(count)] for count, tokens in case.levels
    ]
    rows = []
    for row in range(case.batch):
        path = [level[row * len(level) // case.batch] for level in segments]
        own = table.take(case.own // PAGE_TOKENS, codec)
        shared = tuple((name, len(ids)) for name, ids in path)
        rows.append(RowSlice(context - 1, 1, np.concatenate([*(ids for _, ids in path), own]), shared))
    return spec, rows


def quire_seconds(
    spec: AttentionSpec,
    rows: list[RowSlice],
    launch: tuple[int, int, int, int] | None = None,
    own: tuple[int, bool] | None = None,
) -> tuple[float, torch.Tensor]:
    """Seconds of one layer, and the output of the first layer. launch: one of LAUNCHES instead of its own. own: stages
    of the launch for rows by themselves, and whether it overlaps the one for shared runs.
    """
    from quire.attention.kernels.launch import Launch
    from quire.attention.triton import TritonAttention

    backend = TritonAttention(spec)
    if launch is not None:
        height, warps, stages, resident = launch
        kind = backend.kinds[0]
        tiles = replace(kind.tiles, tall_workers=kind.tiles.tall_workers * resident)
        launches = kind.launches._replace(tallest=Launch(height, warps, stages))
        backend.kinds[0] = replace(kind, launches=launches, tiles=tiles)
    if own is not None:
        stages, backend.overlaps = own
        launches = backend.kinds[0].launches
        launches = launches._replace(seeded=replace(launches.short, stages=stages))
        backend.kinds[0] = replace(backend.kinds[0], launches=launches)
    plan = backend.plan(rows)
    queries = spec.layers[0].num_kv_heads * spec.layers[0].group_size
    generator = torch.Generator("cuda").manual_seed(0)
    size = len(rows), queries + 2 * spec.layers[0].num_kv_heads, spec.layers[0].head_dim
    fused = torch.randn(size, generator=generator, device="cuda", dtype=DTYPE)
    q, k, v = fused.split([queries, spec.layers[0].num_kv_heads, spec.layers[0].num_kv_heads], 1)
    assert plan.batch_size == len(rows), "rows are padded"

    def run() -> None:
        for layer in range(spec.num_layers):
            plan.write(layer, k, v)
            plan.attend(layer, q)

    plan.write(0, k, v)
    first = plan.attend(0, q).clone()
    return graph_seconds(run) / spec.num_layers, first


def flashinfer_seconds(case: Case, layers: int) -> dict[str, float]:
    """Seconds of one layer: cascade, and paged decode on physically shared pages; empty if it is not installed."""
    try:
        import flashinfer
    except ImportError:
        return {}
    page = PAGE_TOKENS
    pages = case.tokens // page
    caches = torch.randn(layers, pages, 2, page, case.kv_heads, case.dim, device="cuda", dtype=DTYPE)
    q = torch.randn(case.batch, case.q_heads, case.dim, device="cuda", dtype=DTYPE)
    sizes = [[tokens // page] * count for count, tokens in (*case.levels, (case.batch, case.own))]
    ids = iter(torch.arange(pages, dtype=torch.int32, device="cuda").split(list(itertools.chain(*sizes))))
    levels = [[next(ids) for _ in level] for level in sizes]

    def ends(counts: list[int]) -> torch.Tensor:
        return torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device="cuda")

    def full(count: int) -> torch.Tensor:
        return torch.full((count,), page, dtype=torch.int32, device="cuda")

    def timed(run: Callable[[torch.Tensor], object]) -> float:
        return graph_seconds(lambda: [run(cache) for cache in caches]) / layers

    shape = case.q_heads, case.kv_heads, case.dim, page
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    cascade = flashinfer.MultiLevelCascadeAttentionWrapper(len(levels), workspace, "NHD")
    cascade.plan(
        [ends([case.batch // len(level)] * len(level)) for level in levels],
        [ends([len(part) for part in level]) for level in levels],
        [torch.cat(level) for level in levels],
        [full(len(level)) for level in levels],
        *shape,
        q_data_type=DTYPE,
    )
    found = {"cascade": timed(lambda cache: cascade.run(q, cache))}
    paths = [torch.cat([level[row * len(level) // case.batch] for level in levels]) for row in range(case.batch)]
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    paged = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace, "NHD", use_tensor_cores=case.q_heads >= 4 * case.kv_heads
    )
    paged.plan(ends([len(path) for path in paths]), torch.cat(paths), full(case.batch), *shape, q_data_type=DTYPE)
    found["paged"] = timed(lambda cache: paged.run(q, cache))
    return found


def shared(copy: float, record: Path | None) -> None:
    """Microseconds of every side, and ours as a multiple of the floor."""
    table = []
    for case in CASES:
        spec, rows = make_case(case)
        together, ours = quire_seconds(spec, rows)
        apart, theirs = quire_seconds(spec, [replace(row, shared=()) for row in rows])
        difference = (ours.float() - theirs.float()).norm() / theirs.float().norm()
        assert difference < 1e-2, f"{case.name}: the phases differ from rows by themselves by {difference:.1e}"
        layers = spec.num_layers
        del spec
        torch.cuda.empty_cache()
        found = {"together": together, "apart": apart, **flashinfer_seconds(case, layers)}
        floor = case.layer_bytes / copy
        table.append(
            [
                case.name,
                f"{floor * 1e6:.1f}",
                *(f"{found[side] * 1e6:.1f}" if side in found else "-" for side in SIDES),
                f"{together / floor:.2f}",
                "-" if case.goal is None else f"{case.goal:.1f}",
            ]
        )
        if record:
            about = {"benchmark": "gpu_shared", "case": case.name, "floor_seconds": floor}
            append_record(record, about | {"seconds": found})
    print(format_table(["shared prefixes, us", "floor", *SIDES, "together / floor", "goal"], table), "\n")


SIDES = ("together", "apart", "cascade", "paged")


def phase_seconds(spec: AttentionSpec, rows: list[RowSlice]) -> list[float]:
    """Median device seconds of the launches for shared runs and for rows by themselves, one after the other."""
    from torch.profiler import ProfilerActivity, profile

    from quire.attention.triton import TritonAttention

    backend = TritonAttention(spec)
    backend.overlaps = False
    plan = backend.plan(rows)
    heads = spec.layers[0].num_kv_heads
    q = torch.randn(len(rows), heads * spec.layers[0].group_size, spec.layers[0].head_dim, device="cuda", dtype=DTYPE)
    k, v = (torch.randn(len(rows), heads, spec.layers[0].head_dim, device="cuda", dtype=DTYPE) for _ in range(2))

    def run() -> None:
        for layer in range(spec.num_layers):
            plan.write(layer, k, v)
            plan.attend(layer, q)
        torch.cuda.synchronize()

    run()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        run()
    launches = sorted((e for e in found.events() if e.name.startswith("attend")), key=lambda e: e.time_range.start)
    return [median([e.time_range.elapsed_us() for e in launches[phase::2]]) / 1e6 for phase in (0, 1)]


def sweep() -> None:
    """Each phase, rows by themselves with other stages and overlapping or not, and shared runs under other launches;
    microseconds.
    """
    tables: list[list[list[object]]] = [[], []]
    variants = list(itertools.product((1, 2, 3, 4), (False, True)))
    for case in CASES:
        spec, rows = make_case(case)
        phases = phase_seconds(spec, rows)
        found = [quire_seconds(spec, rows, own=variant)[0] for variant in variants]
        tables[0].append([case.name, *(f"{seconds * 1e6:.1f}" for seconds in (*phases, *found))])
        print(tables[0][-1], flush=True)
        times = [quire_seconds(spec, rows, launch)[0] for launch in LAUNCHES]
        tables[1].append([case.name, *(f"{seconds * 1e6:.1f}" for seconds in times)])
        del spec
        torch.cuda.empty_cache()
    names = [f"{stages} stages{', overlaps' * overlaps}" for stages, overlaps in variants]
    print(format_table(["shared prefixes, us", "shared runs", "own chunks", *names], tables[0]), "\n")
    head = ["shared prefixes, us by rows/warps/stages/resident", *("/".join(map(str, launch)) for launch in LAUNCHES)]
    print(format_table(head, tables[1]), "\n")
