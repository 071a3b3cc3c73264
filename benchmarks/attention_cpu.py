"""Decode and prefill attention on CPU pages, compared with torch on the same numbers in one run.

    python benchmarks/attention_cpu.py [--rounds 5] [--tables layers,shared,encoded,own] [--threads 2] [--json FILE]

All times are medians per layer; the sides are interleaved.

layers   our kernel on pages, including the write of the step's own keys and values; `scaled_dot_product_attention` in
         bfloat16 and float32 on contiguous keys and values, without the cost of gathering pages; and one read of the
         same bytes (a sum), the floor of decode attention
shared   decode rows with a common segment of 1,024 tokens and 32 own tokens: the time over the segment (the time minus
         that of the same rows without the segment), read together and separately. Bound for 16 rows: 4 times one row
encoded  the cost of a page for decode rows of SmolLM2, dense and encoded. The calibration is made first if there is
         none; the bytes of pages are arbitrary
own      the same for pages whose slots have their own positions, in ascending order, beside ordinary pages
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

sys.path.insert(0, str(Path(__file__).parent))
from common import append_record, arguments, format_table, median

from quire.attention.cpu import CpuAttention
from quire.attention.rows import RowSlice
from quire.attention.spec import AttentionSpec, equal_layers
from quire.cache.arena import Arena
from quire.cache.codecs import CODECS, Codec, CodecInputs, load
from quire.cache.codecs.dense import DenseCodec
from quire.cache.ledger import PAGE_TOKENS, PageLedger
from quire.cache.table import ChunkTable
from quire.config import EngineConfig
from quire.kernels import runtime
from quire.load import calibration_for
from quire.models.resolve import resolve_model

# (batch, kv heads, group, head dim, context, query rows of each sequence); the first three are SmolLM2's heads.
CASES = [(1, 3, 3, 64, 192, 1), (8, 3, 3, 64, 192, 1), (32, 3, 3, 64, 192, 1), (8, 3, 3, 64, 2048, 1),
         (1, 3, 3, 64, 8192, 1), (8, 8, 4, 128, 2048, 1), (1, 3, 3, 64, 512, 512),
         (1, 3, 3, 64, 1536, 1536)]  # fmt: skip
LAYERS = 30


SHARERS = [1, 2, 4, 8, 16, 32, 64]
SHARED_TOKENS, OWN_TOKENS = 1024, 32
SMOLLM2_HEADS = (3, 3, 64)  # kv heads, group, head dim
POSITION_BYTES = 4 * PAGE_TOKENS
ENCODED = [(8, 2048), (16, 2048), (8, 512)]
"""Sequences and tokens of each."""


def make_spec(
    chunks: int, heads: int, group: int, dim: int, context: int, dtype: torch.dtype, *sealed: Codec
) -> AttentionSpec:
    """A cache of bytes from 48 to 63. In every format these are ordinary numbers, and channels that every head has."""
    codec = DenseCodec(dim, dtype)
    ledger = PageLedger((chunks * LAYERS * heads + 64) * codec.page_bytes, codec.page_bytes * 64)
    arena = Arena(ledger.num_bytes)
    pattern = torch.randint(48, 64, (1 << 20,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for start in range(0, len(arena.data), len(pattern)):
        part = arena.data[start : start + len(pattern)]
        part.copy_(pattern[: len(part)])
    table = ChunkTable(ledger, LAYERS, heads, codec, *sealed, arena=arena)
    angle = torch.outer(torch.arange(context), 1e4 ** (-torch.arange(dim // 2) / (dim // 2)))
    return AttentionSpec(
        table, equal_layers(LAYERS, heads, group, dim, rotation=0), dtype, ((angle.cos(), angle.sin()),)
    )


def attending(spec: AttentionSpec, slices: list[RowSlice]) -> Callable[[int], object]:
    """Attention of one layer by our kernel, on pages."""
    plan = CpuAttention(spec).plan(slices)
    rows = sum(piece.num_rows for piece in slices)
    q = torch.randn(rows, spec.layers[0].num_kv_heads * spec.layers[0].group_size, spec.layers[0].head_dim).to(
        spec.dtype
    )
    k, v = (torch.randn(rows, spec.layers[0].num_kv_heads, spec.layers[0].head_dim).to(spec.dtype) for _ in range(2))

    def run(layer: int) -> object:
        plan.write(layer, k, v)
        return plan.attend(layer, q)

    return run


def ours(case: tuple[int, ...], dtype: torch.dtype) -> Callable[[int], object]:
    """A case, computed by our kernel."""
    batch, heads, group, dim, context, rows = case
    chunks = -(-context // 64)
    spec = make_spec(batch * chunks, heads, group, dim, context, dtype)
    paths = [spec.table.take(chunks, spec.table.open_codec) for _ in range(batch)]
    return attending(spec, [RowSlice(context - rows, rows, path) for path in paths])


def sharing(num_rows: int, shared_tokens: int, together: bool, dtype: torch.dtype) -> Callable[[int], object]:
    """Decode rows that share all tokens before their own, by our kernel. If `together`, these are read once for all."""
    shared = shared_tokens // 64
    spec = make_spec(shared + num_rows, *SMOLLM2_HEADS, shared_tokens + OWN_TOKENS, dtype)
    common, own = (spec.table.take(count, spec.table.open_codec) for count in (shared, num_rows))
    names = ((1, shared),) if together and shared else ()
    start = shared_tokens + OWN_TOKENS - 1
    return attending(spec, [RowSlice(start, 1, np.append(common, chunk), names) for chunk in own])


def torch_attention(case: tuple[int, ...], dtype: torch.dtype) -> Callable[[int], object]:
    """The same case by torch, contiguous."""
    batch, heads, group, dim, context, rows = case
    k, v = (torch.randn(LAYERS, batch, heads, context, dim).to(dtype) for _ in range(2))
    q = torch.randn(batch, heads * group, rows, dim).to(dtype)
    return lambda layer: scaled_dot_product_attention(q, k[layer], v[layer], is_causal=rows > 1, enable_gqa=True)


def read(case: tuple[int, ...], dtype: torch.dtype) -> Callable[[int], object]:
    """One read of the same number of bytes."""
    batch, heads, _, dim, context, _ = case
    data = torch.zeros(LAYERS, batch * heads * context * dim * 2 * dtype.itemsize // 4)
    return lambda layer: data[layer].sum()


def main() -> None:
    """Measures and prints."""
    parser = arguments(__doc__)
    parser.add_argument("--tables", default=",".join(TABLES), help="which to print")
    args = parser.parse_args()
    runtime.set_num_threads(args.threads)
    for name in args.tables.split(","):
        TABLES[name](args.rounds, args.json)


def layers(rounds: int, record: Path | None) -> None:
    """A layer's attention, ours and torch's."""
    rows = []
    for case in CASES:
        sides = {
            "quire bf16": ours(case, torch.bfloat16),
            "quire f32": ours(case, torch.float32),
            "torch bf16": torch_attention(case, torch.bfloat16),
            "torch f32": torch_attention(case, torch.float32),
            "read bf16": read(case, torch.bfloat16),
        }
        found = measure(sides, rounds)
        rows.append(
            [
                "x".join(map(str, case)),
                *(f"{value:.0f}" for value in found.values()),
                f"{found['torch bf16'] / found['quire bf16']:.1f}x",
            ]
        )
        if record:
            append_record(record, {"benchmark": "attention_cpu", "case": case, "microseconds": found})
    print(format_table(["batch x heads x group x dim x context x rows", *found, "bf16 gain"], rows), "\n")


def shared_segment(rounds: int, record: Path | None) -> None:
    """The cost of a shared segment for 1 to 64 rows."""
    rows, one = [], 0.0
    for count in SHARERS:
        sides = {
            "own only": sharing(count, 0, True, torch.bfloat16),
            "together": sharing(count, SHARED_TOKENS, True, torch.bfloat16),
            "apart": sharing(count, SHARED_TOKENS, False, torch.bfloat16),
        }
        found = measure(sides, 4 * rounds)
        together, apart = (found[name] - found["own only"] for name in ("together", "apart"))
        one = one or together
        rows.append(
            [
                count,
                *(f"{value:.0f}" for value in found.values()),
                f"{together:.0f}",
                f"{together / one:.2f}",
                f"{apart / together:.1f}x",
            ]
        )
        if record:
            case = {"benchmark": "attention_cpu_shared", "sharers": count, "shared_tokens": SHARED_TOKENS}
            append_record(record, {**case, "microseconds": found})
    print(format_table(["sharers", "own only", "together", "apart", "segment", "of one", "gain over it"], rows))
    print("must: at most 4 times one reader's for 16 sharers\n")


def encoded_pages(rounds: int, record: Path | None) -> None:
    """The cost of a page, by codec."""
    codecs = sealed_codecs()
    rows = []
    for batch, context in ENCODED:
        sides = {"dense": decoding(batch, context)}
        sides |= {name: decoding(batch, context, codec) for name, codec in codecs.items()}
        found = measure(sides, 4 * rounds)
        cells = [f"{ns:.0f} ({value / found['dense']:.2f})" for ns, value in per_page(batch, context, found)]
        rows.append([f"{batch} x {context}", *cells])
        if record:
            case = {"benchmark": "attention_cpu_encoded", "batch": batch, "context": context}
            append_record(record, {**case, "microseconds": found})
    print(format_table([f"ns a page, {runtime.num_threads()} threads (of dense)", *found], rows), "\n")


def own_positions(rounds: int, record: Path | None) -> None:
    """The cost of a page whose slots have their own positions."""
    codecs = sealed_codecs()
    rows = []
    for batch, context in ENCODED:
        cells, microseconds = [], {}
        for name, codec in codecs.items():
            sides = {own: decoding(batch, context, codec, own=own == "own") for own in ("ordinary", "own")}
            found = microseconds[name] = measure(sides, 4 * rounds)
            (plain, one), (kept, other) = per_page(batch, context, found)
            cells.append(f"{plain:.0f}, {kept:.0f} ({other / one:.2f})")
        rows.append([f"{batch} x {context}", *cells])
        if record:
            case = {"benchmark": "attention_cpu_own", "batch": batch, "context": context}
            append_record(record, {**case, "microseconds": microseconds})
    print(format_table([f"ns a page, {runtime.num_threads()} threads: ordinary, own positions", *codecs], rows))


def sealed_codecs() -> dict[str, Codec]:
    """The codecs that encode SmolLM2's pages."""
    config = EngineConfig.from_options({"cache.codec": "nuq4", "runtime.threads": runtime.num_threads()})
    calibration = calibration_for(resolve_model("smollm2"), config)
    assert calibration is not None
    return {
        name: load(row.place).of(CodecInputs(name, SMOLLM2_HEADS[2], calibration.tables.get(name)))
        for name, row in CODECS.items()
        if "cpu" in row.cases
    }


def decoding(batch: int, context: int, *sealed: Codec, own: bool = False) -> Callable[[int], object]:
    """Decode rows of SmolLM2's heads with `context` tokens each. If `own`, all pages but the open ones hold tokens from
    random positions of the context, different ones in each head.
    """
    chunks = context // PAGE_TOKENS
    spec = make_spec(batch * chunks, *SMOLLM2_HEADS, context, torch.bfloat16, *sealed)
    table, random = spec.table, np.random.default_rng(0)
    paths = [
        np.append(table.take(chunks - 1, table.sealed_codec), table.take(1, table.open_codec)) for _ in range(batch)
    ]
    for path in paths if own else []:
        of_head = (chunks - 1, *table.pages.shape[1:])
        ids = table.ledger.take(np.full(math.prod(of_head), POSITION_BYTES))
        slots = random.integers(context, size=(*of_head, PAGE_TOKENS), dtype=np.int32)
        slots = np.sort(slots.transpose(1, 2, 0, 3).reshape(*of_head[1:], -1), -1)
        images = torch.from_numpy(slots.reshape(*of_head[1:], -1, PAGE_TOKENS).transpose(2, 0, 1, 3).copy())
        table.arena.store(ids, POSITION_BYTES, images.view(-1, PAGE_TOKENS).view(torch.uint8))
        table.positions[path[:-1]] = ids.reshape(of_head)
    return attending(spec, [RowSlice(context - 2, 1, path) for path in paths])


def per_page(batch: int, context: int, microseconds: dict[str, float]) -> list[tuple[float, float]]:
    """For each side nanoseconds per page, and microseconds."""
    pages = batch * (context // PAGE_TOKENS) * SMOLLM2_HEADS[0]
    return [(value / pages * 1e3, value) for value in microseconds.values()]


def measure(sides: dict[str, Callable[[int], object]], rounds: int) -> dict[str, float]:
    """Median microseconds per layer of each side, interleaved, after a round to warm up."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, attend in sides.items():
            start = time.perf_counter()
            for layer in range(LAYERS):
                attend(layer)
            if number:
                times[name].append((time.perf_counter() - start) / LAYERS * 1e6)
    return {name: median(values) for name, values in times.items()}


TABLES = {"layers": layers, "shared": shared_segment, "encoded": encoded_pages, "own": own_positions}

if __name__ == "__main__":
    main()
