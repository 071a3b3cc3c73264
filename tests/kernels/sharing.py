"""Random trees of chunks, the decode rows that read them, and the requirements on every fast backend."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quire.attention.partial import Partial, merge
from quire.attention.plan import AttentionBackend
from quire.attention.reference import ReferenceAttention
from quire.attention.rows import RowSlice
from quire.attention.spec import AttentionSpec
from quire.cache.ledger import PAGE_TOKENS

from .harness import TOLERANCE, Shape, make_spec, relative_rms, run, slices_of, total_chunks

Take = Callable[[int], NDArray[np.int32]]
"""So many new chunk ids."""

MakeBackend = Callable[[AttentionSpec], AttentionBackend]


def counting() -> Take:
    """Ids one after the other, of no table."""
    ids = itertools.count()
    return lambda count: np.array(list(itertools.islice(ids, count)), np.int32)


def taking(spec: AttentionSpec) -> Take:
    return lambda count: spec.table.take(count, spec.table.open_codec)


def forest(take: Take, random: np.random.Generator, num_rows: int, max_chunks: int = 3) -> list[RowSlice]:
    """Decode rows in depth-first order: several prefixes of up to three levels, rows that end at any level, rows that
    share nothing, segments with one reader; each with a tail of its own."""
    names = itertools.count(1)
    rows: list[RowSlice] = []

    def grow(count: int, path: NDArray[np.int32], shared: tuple[tuple[int, int], ...]) -> None:
        while count:
            group = int(random.integers(1, count + 1))
            count -= group
            if len(shared) < 3 and random.random() < 0.8:
                chunks = take(int(random.integers(1, max_chunks + 1)))
                grow(group, np.append(path, chunks), (*shared, (next(names), len(chunks))))
                continue
            for _ in range(group):
                tail = int(random.choice([0, 1, 63, 64, random.integers(0, 64 * max_chunks)]))
                own = take(tail // PAGE_TOKENS + 1)
                rows.append(RowSlice(len(path) * PAGE_TOKENS + tail, 1, np.append(path, own), shared))

    grow(num_rows, np.empty(0, np.int32), ())
    return rows


def sharers(take: Take, num_rows: int, shared_chunks: int, private_tokens: int) -> list[RowSlice]:
    """Rows that share one segment and have so many tokens of their own, the new one among them."""
    common = take(shared_chunks)
    start = shared_chunks * PAGE_TOKENS + private_tokens - 1
    return [
        RowSlice(start, 1, np.append(common, take(-(-private_tokens // PAGE_TOKENS))), ((1, shared_chunks),))
        for _ in range(num_rows)
    ]


def apart(slices: list[RowSlice]) -> list[RowSlice]:
    """The same rows, each by itself."""
    return [replace(piece, shared=()) for piece in slices]


def fill(spec: AttentionSpec, slices: list[RowSlice], seed: int) -> None:
    """Random keys and values wherever the slices have a past, NaN in every other slot."""
    arena = spec.table.arena.data.view(spec.dtype)
    arena.fill_(torch.nan)
    generator = torch.Generator().manual_seed(seed)
    page_elements = 2 * PAGE_TOKENS * spec.layers[0].head_dim
    stored: dict[int, int] = {}  # of each chunk, how many slots
    for piece in slices:
        for index, chunk in enumerate(piece.chunks[: -(-piece.start // PAGE_TOKENS)].tolist()):
            stored[chunk] = min(PAGE_TOKENS, piece.start - index * PAGE_TOKENS)
    for chunk, slots in stored.items():
        for page in spec.table.pages[chunk].reshape(-1).tolist():
            at = page * 128 // spec.dtype.itemsize
            body = arena[at : at + page_elements].view(2, PAGE_TOKENS, spec.layers[0].head_dim)
            body[:, :slots] = (
                torch.randn(2, slots, spec.layers[0].head_dim, generator=generator).to(spec.dtype).to(arena.device)
            )


def check_forest(
    make: MakeBackend,
    shape: Shape,
    seed: int,
    *,
    num_rows: int,
    prefills: list[tuple[int, int]] | None = None,
    device: str = "cpu",
) -> AttentionBackend:
    """A step of random sharers, and of prefill slices (start, rows) after them, attends like the reference, which
    reads every row by itself. Returns the backend."""
    random = np.random.default_rng(seed)
    rows = forest(counting(), random, num_rows)
    count = 1 + max(int(row.chunks.max()) for row in rows)
    spec = make_spec(shape, count + total_chunks(prefills or []), device)
    ids = random.permutation(taking(spec)(count))
    slices = [replace(row, chunks=ids[row.chunks]) for row in rows] + slices_of(spec, prefills or [])
    fill(spec, slices, seed)
    (expected,) = run(ReferenceAttention(spec), spec, [slices], seed)
    backend = make(spec)
    (actual,) = run(backend, spec, [slices], seed)
    error = relative_rms(actual, expected)
    assert error < TOLERANCE[shape.dtype], f"relative RMS error {error:.2e} for {shape}, {num_rows} rows, seed {seed}"
    return backend


WORKED_SCORES = ((1.0, 3.0), (2.0, 5.0))
WORKED_VALUES = (((1.0, 0.0), (0.0, 1.0)), ((2.0, 2.0), (4.0, 0.0)))
WORKED_ANSWER = (3.421771, 0.195199)
"""Two tokens of a shared chunk and two of a row's own, and the attention over all four by hand. The mean of the two
normalised partials would be (2.012176, 0.487824)."""


def check_worked_merge(make: MakeBackend) -> None:
    """The worked example through a backend: the first chunk is shared by three rows, the second is each row's own."""
    spec = make_spec(Shape(heads=1, group=1, dim=16, layers=1, rotate=False), 6)
    scores = torch.full((66,), -100.0)
    values = torch.zeros(66, 16)
    for first, chunk_scores, chunk_values in zip((0, 64), WORKED_SCORES, WORKED_VALUES, strict=True):
        scores[first : first + 2] = torch.tensor(chunk_scores)
        values[first : first + 2, :2] = torch.tensor(chunk_values)
    out = attend_scores(make(spec), spec, scores, values, num_rows=3)
    torch.testing.assert_close(out[:, :2], torch.tensor([WORKED_ANSWER] * 3), atol=2e-6, rtol=0)


def check_offset_scores(make: MakeBackend, offset: float, seed: int) -> None:
    """Scores around +-80, whose exponentials are beyond float32, over a shared run of three chunks and an own one."""
    spec = make_spec(Shape(heads=1, group=1, dim=16, layers=1, rotate=False), 8)
    generator = torch.Generator().manual_seed(seed)
    scores = offset + 4 * torch.randn(230, generator=generator)
    values = torch.randn(230, 16, generator=generator)
    out = attend_scores(make(spec), spec, scores, values, num_rows=3)
    expected = torch.softmax(scores.double(), 0) @ values.double()
    # A score near 80 in base 2 carries 7e-6 of rounding, whoever computes it.
    torch.testing.assert_close(out, expected.float().expand(3, -1), atol=2e-4, rtol=1e-3)


def attend_scores(
    backend: AttentionBackend, spec: AttentionSpec, scores: torch.Tensor, values: torch.Tensor, num_rows: int
) -> torch.Tensor:
    """Attention [rows, D] of equal rows to tokens with such scores [T] and values [T, D], through pages: all whole
    chunks but the last token's are shared, the last token is the step's own."""
    count, dim = values.shape
    keys = torch.zeros(count, 1, dim)
    keys[:, 0, 0] = scores
    queries = torch.zeros(count, 1, dim)
    queries[:, 0, 0] = dim**0.5
    rows = sharers(taking(spec), num_rows, (count - 1) // PAGE_TOKENS, (count - 1) % PAGE_TOKENS + 1)
    for row in rows:  # what is shared is written again with the same bytes
        plan = backend.plan([RowSlice(0, count - 1, row.chunks)])
        plan.write(0, keys[:-1], values[:-1, None])
        plan.attend(0, queries[:-1])
    plan = backend.plan(rows)
    newest = [part.expand(num_rows, -1, -1).contiguous() for part in (keys[-1:], values[-1:, None])]
    plan.write(0, *newest)
    return plan.attend(0, queries[:num_rows]).clone()


def partial_of(scores: torch.Tensor, values: torch.Tensor) -> Partial:
    """The Partial of one row over tokens with such scores [T] and values [T, D]."""
    return Partial((torch.softmax(scores, 0) @ values)[None, None, None], torch.logsumexp(scores, 0)[None, None, None])


def merged(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """The merge of such partials, [D]."""
    return merge([partial_of(scores, values) for scores, values in parts]).o[0, 0, 0]


def read_counts(backend: Any, spec: AttentionSpec, slices: list[RowSlice]) -> NDArray[np.int32]:
    """How often the kernels read each chunk in one step, int32 [C, H], all layers together."""
    fill(spec, slices, 0)
    shape = spec.table.capacity, spec.layers[0].num_kv_heads
    backend.reads = torch.zeros(shape, dtype=torch.int32, device=spec.table.arena.device)
    run(backend, spec, [slices], 0)
    return backend.reads.cpu().numpy()


def check_reads(make: MakeBackend, shape: Shape, num_rows: int, tile: int, device: str = "cpu") -> None:
    """A shared page is read once per head and layer for every `tile` sharers; apart, once for each of them. A row's own
    pages are read once."""
    times = -(-num_rows // tile)
    spec = make_spec(shape, 12 + 3 * num_rows, device)
    slices = sharers(taking(spec), num_rows, 10, 150)
    together = read_counts(make(spec), spec, slices)
    alone = read_counts(make(spec), spec, apart(slices))
    common, own = slices[0].chunks[:10], np.concatenate([piece.chunks[10:] for piece in slices])
    assert (together[common] == spec.num_layers * times).all() and (alone[common] == spec.num_layers * num_rows).all()
    assert (together[own] == spec.num_layers).all() and (alone[own] == spec.num_layers).all()
    assert together.sum() == spec.num_layers * spec.layers[0].num_kv_heads * (10 * times + 3 * num_rows), (
        "no page besides"
    )


def check_slots_of_a_step(make: MakeBackend, dtype: torch.dtype, *, group: int, dim: int, device: str = "cpu") -> None:
    """32 sequences with 1,024 tokens in common and 1,024 of their own: 33,792 slots a head against 65,536."""
    shape = Shape(heads=1, group=group, dim=dim, layers=1, dtype=dtype)
    spec = make_spec(shape, 32 * 16 + 16, device, positions=2048)
    slices = sharers(taking(spec), 32, 16, 1024)
    assert read_counts(make(spec), spec, slices).sum() * PAGE_TOKENS == 33_792
    assert read_counts(make(spec), spec, apart(slices)).sum() * PAGE_TOKENS == 65_536
