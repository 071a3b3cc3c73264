"""Caches with encoded sealed chunks: sequences that fill them, and the comparison of a fast backend with the
reference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from quire.attention.plan import AttentionBackend
from quire.attention.reference import ReferenceAttention
from quire.attention.rows import RowSlice
from quire.attention.spec import AttentionSpec
from quire.cache.arena import Arena
from quire.cache.codecs import CODECS as REGISTRY
from quire.cache.codecs import Codec
from quire.cache.codecs.dense import DenseCodec
from quire.cache.codecs.nuq import SLOT_BYTES, NuqCodec
from quire.cache.codecs.sums import SumsCodec
from quire.cache.ledger import PAGE_TOKENS, UNIT, PageLedger
from quire.cache.sinks import Sinks
from quire.cache.table import ChunkTable

from ..codecs import build
from ..nuq_tables import random_tables, tables_of
from .harness import Shape, make_spec, relative_rms, run
from .sharing import MakeBackend, forest

CODECS: dict[str, Callable[[Shape], Codec]] = {
    # Every head and layer, and every four pairs of channels, as they happen to be.
    "mixed": lambda shape: NuqCodec("nuq3", random_tables(shape.layers, shape.heads, shape.dim, 0, reach=1.0)),
    **{
        name: lambda shape, name=name: build(
            name, (shape.layers, shape.heads, shape.dim), seed=REGISTRY[name].bits, key_bias=key_bias(shape)
        )
        for name, row in REGISTRY.items()
        if row.cases
    },
}


def key_bias(shape: Shape) -> torch.Tensor:
    """What keys are stored less, of every layer's and head's channels another number [L, H, D]."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(shape.layers, shape.heads, shape.dim, generator=generator)


# Keys are rounded to bfloat16 once more than dense ones, after their rotation on read.
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 8e-3, torch.float16: 1.5e-3}

Steps = Sequence[Sequence[tuple[int, int]]]
"""Of each step, the sequences that run and how many rows each has."""


def encoded_spec(
    shape: Shape,
    codec: Codec,
    *,
    tokens: int = 2048,
    sinks: int = 0,
    positions: int = 1024,
    device: str = "cpu",
    sums: bool = False,
) -> AttentionSpec:
    """A poisoned arena with room for so many tokens, most of them encoded, and with column sums beside them or none.
    Codecs without sinks have none.
    """
    open_codec = DenseCodec(shape.dim, shape.dtype)
    sinks = sinks if REGISTRY[codec.name].has_sinks else 0
    exact = Sinks(sinks, shape.layers, shape.heads, shape.dim, shape.dtype) if sinks else None
    largest = max(int(np.max(codec.page_bytes)), open_codec.page_bytes, exact.sidecar_bytes if exact else 0)
    sums_bytes = SumsCodec.page_bytes if sums else 0
    chunk_bytes = shape.layers * shape.heads * (int(np.max(codec.page_bytes)) + open_codec.page_bytes + sums_bytes)
    slab = -(-largest // UNIT) * UNIT
    ledger = PageLedger((tokens // PAGE_TOKENS + 8) * (chunk_bytes + 2 * slab) + 16 * slab, slab)
    arena = Arena(ledger.num_bytes, device)
    arena.data.fill_(0xFF)
    table = ChunkTable(
        ledger,
        shape.layers,
        shape.heads,
        open_codec,
        codec,
        sinks=exact,
        sums=SumsCodec() if sums else None,
        arena=arena,
    )
    return replace(make_spec(shape, 1, device, positions), table=table)


class Sequences:
    """Sequences that grow as the manager would let them: full chunks are sealed ones, the last is open; where sealed
    chunks stay dense, all are open.
    """

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        self.lengths: dict[int, int] = {}
        self.chunks: dict[int, NDArray[np.int32]] = {}
        self._filled: list[int] = []

    def step(self, rows: Sequence[tuple[int, int]]) -> list[RowSlice]:
        """The slices of a step. What it fills is free again in the next one."""
        table = self.spec.table
        table.free(np.array(self._filled, np.int32))
        self._filled = []
        slices = []
        for name, count in rows:
            start = self.lengths.get(name, 0)
            end = self.lengths[name] = start + count
            chunks, filled = self.chunks.get(name, np.empty(0, np.int32)), -1
            sealed = end // PAGE_TOKENS - start // PAGE_TOKENS if table.encodes else 0
            if sealed:
                if start % PAGE_TOKENS:
                    filled = int(chunks[-1])
                    self._filled.append(filled)
                new = table.take(sealed, table.sealed_codec, sidecar=start < PAGE_TOKENS)
                chunks = np.append(chunks[: start // PAGE_TOKENS], new)
            if end > len(chunks) * PAGE_TOKENS:
                chunks = np.append(chunks, table.take(-(-end // PAGE_TOKENS) - len(chunks), table.open_codec))
            self.chunks[name] = chunks
            # A view: while the array stays, a decode step may take its plan one further.
            slices.append(RowSlice(start, count, chunks[:], filled=filled))
        return slices


def bytes_of_pages(spec: AttentionSpec, chunk: int) -> list[NDArray[np.int64]]:
    """Where in the arena the pages of a chunk lie, and its sidecar: byte offsets, a page each."""
    table = spec.table
    codec = table.codecs[int(table.kinds[chunk])]
    found = [
        int(table.pages[chunk, layer, head]) * UNIT + np.arange(int(table.page_sizes(codec)[layer, head]))
        for layer in range(spec.num_layers)
        for head in range(spec.layers[0].num_kv_heads)
    ]
    if table.sidecars[chunk] >= 0:
        found.append(int(table.sidecars[chunk]) * UNIT + np.arange(table.sidecar_bytes))
    return found


def bytes_of_sealed(spec: AttentionSpec, chunks: NDArray[np.int32]) -> torch.Tensor:
    """Where in the arena the images of sealed chunks and their sidecars lie, one after the other, padding after a
    sidecar's rows left out.
    """
    sinks = spec.table.sinks
    unused = 0 if sinks is None else sinks.sidecar_bytes - spec.num_layers * sinks.layer_bytes
    places = [np.empty(0, np.int64)]
    for chunk in chunks.tolist():
        pages = bytes_of_pages(spec, chunk)
        if spec.table.sidecars[chunk] >= 0:
            pages[-1] = pages[-1][: len(pages[-1]) - unused]
        places += pages
    return torch.from_numpy(np.concatenate(places))


def sealed_bytes(spec: AttentionSpec, chunks: NDArray[np.int32]) -> torch.Tensor:
    """The images of sealed chunks and their sidecars."""
    arena = spec.table.arena.data
    return arena[bytes_of_sealed(spec, chunks).to(arena.device)].cpu()


def written(spec: AttentionSpec, slices: Sequence[RowSlice]) -> torch.Tensor:
    """Which bytes of the arena a step may write: slots of its rows in open chunks, all of the chunks it fills."""
    mask = torch.zeros(spec.table.ledger.num_bytes, dtype=torch.bool)
    for piece in slices:
        end = piece.start + piece.num_rows
        for index in range(piece.start // PAGE_TOKENS, -(-end // PAGE_TOKENS)):
            chunk = int(piece.chunks[index])
            if (index + 1) * PAGE_TOKENS <= end:
                for page in bytes_of_pages(spec, chunk):
                    mask[torch.from_numpy(page)] = True
                chunk = piece.filled if index == piece.start // PAGE_TOKENS else -1
            if chunk >= 0:
                low, high = max(0, piece.start - index * PAGE_TOKENS), min(PAGE_TOKENS, end - index * PAGE_TOKENS)
                row = spec.layers[0].head_dim * spec.dtype.itemsize
                for page in bytes_of_pages(spec, chunk):
                    for half in (0, PAGE_TOKENS):
                        mask[torch.from_numpy(page[(half + low) * row : (half + high) * row])] = True
    return mask


def check_steps(
    make: MakeBackend,
    shape: Shape,
    codec_of: Callable[[Shape], Codec],
    steps: Steps,
    *,
    sinks: int = 1,
    strict: bool = True,
    seed: int = 0,
    device: str = "cpu",
) -> None:
    """The backend attends like the reference in every step, writes the same pages, and nothing beside them."""
    specs = [replace(encoded_spec(shape, codec_of(shape), sinks=sinks, device=device), strict=strict) for _ in range(2)]
    plain, fast = ReferenceAttention(specs[0]), make(specs[1])
    sequences = [Sequences(spec) for spec in specs]
    for number, rows in enumerate(steps):
        slices = [each.step(rows) for each in sequences]
        (expected,) = run(plain, specs[0], [slices[0]], seed + number)
        before = specs[1].table.arena.data.clone()
        (actual,) = run(fast, specs[1], [slices[1]], seed + number)
        error = relative_rms(actual, expected)
        assert error < TOLERANCE[shape.dtype], f"relative RMS error {error:.2e} in step {number} {rows} for {shape}"
        beside = (before != specs[1].table.arena.data).cpu() & ~written(specs[1], slices[1])
        assert not beside.any(), f"bytes {beside.nonzero()[:4, 0].tolist()} were written in step {number} {rows}"
    for name, chunks in sequences[0].chunks.items():
        full = sequences[0].lengths[name] // PAGE_TOKENS
        images = [sealed_bytes(spec, each.chunks[name][:full]) for spec, each in zip(specs, sequences, strict=True)]
        assert torch.equal(*images), f"the sealed pages of sequence {name} differ"
        assert len(chunks) == full + (sequences[0].lengths[name] % PAGE_TOKENS > 0)


def check_forest(
    make: MakeBackend,
    shape: Shape,
    codec_of: Callable[[Shape], Codec],
    *,
    num_rows: int,
    prefills: Sequence[int] = (),
    sinks: int = 1,
    seed: int = 0,
    device: str = "cpu",
) -> AttentionBackend:
    """A decode step of random sharers, and prefill slices of new sequences after it, attends like the reference, which
    reads every row by itself; rows that fill their chunk have it encoded. Returns the backend.
    """
    outputs, images = [], []
    for make_one in (ReferenceAttention, make):
        tokens = 64 * 8 * (num_rows + len(prefills))
        spec = encoded_spec(shape, codec_of(shape), tokens=tokens, sinks=sinks, device=device)
        random = np.random.default_rng(seed)
        backend = make_one(spec)
        slices = plant(spec, random, num_rows)
        slices += [RowSlice(0, rows, Sequences(spec).step([(0, rows)])[0].chunks) for rows in prefills]
        outputs += run(backend, spec, [slices], seed)
        images.append(
            torch.cat([sealed_bytes(spec, piece.chunks[-1:]) for piece in slices if _fills(piece)] or [torch.empty(0)])
        )
    error = relative_rms(outputs[1], outputs[0])
    assert error < TOLERANCE[shape.dtype], f"relative RMS error {error:.2e} for {shape}, {num_rows} rows, seed {seed}"
    assert torch.equal(*images), "what the step filled was encoded otherwise"
    return backend


def check_ties(make: MakeBackend, count: int, seed: int, device: str = "cpu") -> None:
    """Of channels whose costs are equal the first ones get the slots, in order, wherever their pairs are stored.

    The 16 channels of each key and value are exact, or as far from their centroid or mean as some others of them.
    """
    generator = torch.Generator().manual_seed(seed)
    rank = torch.rand(2, PAGE_TOKENS, 16, generator=generator).argsort(-1)
    is_costly = rank < torch.randint(2, 9, (2, PAGE_TOKENS, 1), generator=generator) * 2
    sign = 1.0 - 2 * (rank % 2)  # of each half, so that values have a mean of zero
    tables = tables_of(torch.tensor([[-1.0, 1.0]]).expand(16, 2), key_slots=count, value_slots=count)
    order = torch.randperm(8, generator=generator).to(torch.uint8)[None, None]
    codec = NuqCodec("nuq2", replace(tables, key_order=order))
    spec = encoded_spec(Shape(heads=1, group=1, dim=16, layers=1), codec, device=device)
    (piece,) = Sequences(spec).step([(0, PAGE_TOKENS)])
    plan = make(spec).plan([piece])
    costly, other = torch.tensor([[1.5, 2.0], [1.0, 0.5]])[..., None, None]
    k, v = torch.where(is_costly, costly, other) * sign
    q = torch.randn(PAGE_TOKENS, 1, 16, generator=generator)
    k, v, q = (x.view(PAGE_TOKENS, 1, 16).to(device) for x in (k, v, q))
    plan.write(0, k, v)
    plan.attend(0, q)
    image, layout = sealed_bytes(spec, piece.chunks), codec.heads[0][0].layout
    for which, start in enumerate((layout.key_slots, layout.value_slots)):
        first = is_costly[which].nonzero()[:, 1].split(is_costly[which].sum(-1).tolist())
        expected = torch.stack([channels[:count] for channels in first], 1)
        actual = image[start:][: count * SLOT_BYTES].view(count, SLOT_BYTES)[:, :PAGE_TOKENS]
        assert torch.equal(actual.long(), expected), f"slots of {('keys', 'values')[which]}"
    expected_image = codec.encode(0, 0, *(x.view(1, PAGE_TOKENS, 16) for x in (k, v)))[0].cpu()
    assert torch.equal(image, expected_image)


def plant(spec: AttentionSpec, random: np.random.Generator, num_rows: int) -> list[RowSlice]:
    """Decode rows of a random forest with random keys and values in all that they have behind them."""
    table = spec.table
    numbers = iter(range(10**6))
    rows = forest(lambda count: np.array([next(numbers) for _ in range(count)], np.int32), random, num_rows)
    chunk_of: dict[int, int] = {}
    generator = torch.Generator().manual_seed(int(random.integers(1 << 31)))
    slices = []
    for row in rows:
        # The last chunk is the row's own, and open; if the row fills it, a sealed one takes its place.
        names, last = row.chunks.tolist(), row.start // PAGE_TOKENS
        for index, name in enumerate(names[:last]):
            if name not in chunk_of:
                chunk_of[name] = int(table.take(1, table.sealed_codec, sidecar=index == 0)[0])
                fill(spec, chunk_of[name], PAGE_TOKENS, generator)
        own, slots = int(table.take(1, table.open_codec)[0]), row.start % PAGE_TOKENS
        fill(spec, own, slots, generator)
        path, filled = [chunk_of[name] for name in names[:last]], -1
        if slots == PAGE_TOKENS - 1:
            own, filled = int(table.take(1, table.sealed_codec, sidecar=last == 0)[0]), own
        slices.append(RowSlice(row.start, 1, np.array([*path, own], np.int32), row.shared, filled))
    return slices


def fill(spec: AttentionSpec, chunk: int, slots: int, generator: torch.Generator) -> None:
    """Random keys and values in the first slots of a chunk of either codec."""
    table = spec.table
    codec = table.codecs[int(table.kinds[chunk])]
    for layer in range(spec.num_layers):
        k, v = torch.randn(
            2, spec.layers[0].num_kv_heads, PAGE_TOKENS, spec.layers[0].head_dim, generator=generator
        ).to(spec.dtype)
        if table.sinks is not None and table.sidecars[chunk] >= 0:
            rows = table.sinks.rows(table.arena, int(table.sidecars[chunk]), layer)
            for exact, part in zip(rows, (k, v), strict=True):
                exact.copy_(part[:, : table.sinks.num_tokens])
        k[:, slots:] = v[:, slots:] = torch.nan
        for head in range(spec.layers[0].num_kv_heads):
            image = codec.encode(layer, head, k[head : head + 1], v[head : head + 1])
            size = int(table.page_sizes(codec)[layer, head])
            table.arena.store(table.pages[chunk, layer, head : head + 1], size, image)


def _fills(piece: RowSlice) -> bool:
    return (piece.start + piece.num_rows) % PAGE_TOKENS == 0
