"""Decode and prefill attention on CPU pages, against what torch offers for the same numbers, in one run.

    python benchmarks/attention_cpu.py [--rounds 5] [--json FILE]

Columns: our kernel on pages, the write of the step's own keys and values included; `scaled_dot_product_attention` in
bfloat16 and float32 on contiguous keys and values it is given for free (no gathering of pages is charged to it);
reading the same bytes once (a sum over them), which is the floor of decode attention. Median microseconds per layer,
interleaved.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention

sys.path.insert(0, str(Path(__file__).parent))
from common import append_record, format_table, median

from quire.attention.cpu import CpuAttention
from quire.attention.plan import AttentionSpec, RowSlice
from quire.cache.codecs.dense import DenseCodec
from quire.cache.page import PagePool
from quire.cache.segment import ChunkTable
from quire.kernels import runtime

# (batch, kv heads, group, head dim, context, query rows of each sequence); the first three are SmolLM2's heads.
CASES = [(1, 3, 3, 64, 192, 1), (8, 3, 3, 64, 192, 1), (32, 3, 3, 64, 192, 1), (8, 3, 3, 64, 2048, 1),
         (1, 3, 3, 64, 8192, 1), (8, 8, 4, 128, 2048, 1), (1, 3, 3, 64, 512, 512),
         (1, 3, 3, 64, 1536, 1536)]  # fmt: skip
LAYERS = 30


def ours(case: tuple[int, ...], dtype: torch.dtype) -> Callable[[int], object]:
    """Attention of one layer by our kernel, on pages."""
    batch, heads, group, dim, context, rows = case
    codec = DenseCodec(dim, dtype)
    chunks = -(-context // 64)
    pool = PagePool((batch * chunks * LAYERS * heads + 64) * codec.page_bytes, slab_bytes=codec.page_bytes * 64)
    pool.arena.zero_()
    table = ChunkTable(pool, LAYERS, heads, codec)
    angle = torch.outer(torch.arange(context), 1e4 ** (-torch.arange(dim // 2) / (dim // 2)))
    spec = AttentionSpec(table, LAYERS, heads, group, dim, dtype, angle.cos(), angle.sin())
    backend = CpuAttention(spec)
    plan = backend.plan([RowSlice(context - rows, rows, table.take(chunks, codec)) for _ in range(batch)])
    q = torch.randn(batch * rows, heads * group, dim).to(dtype)
    k, v = (torch.randn(batch * rows, heads, dim).to(dtype) for _ in range(2))

    def run(layer: int) -> object:
        plan.write(layer, k, v)
        return plan.attend(layer, q)

    return run


def torch_attention(case: tuple[int, ...], dtype: torch.dtype) -> Callable[[int], object]:
    """The same numbers through torch, contiguous."""
    batch, heads, group, dim, context, rows = case
    k, v = (torch.randn(LAYERS, batch, heads, context, dim).to(dtype) for _ in range(2))
    q = torch.randn(batch, heads * group, rows, dim).to(dtype)
    return lambda layer: scaled_dot_product_attention(q, k[layer], v[layer], is_causal=rows > 1, enable_gqa=True)


def read(case: tuple[int, ...], dtype: torch.dtype) -> Callable[[int], object]:
    """A pass over as many bytes."""
    batch, heads, _, dim, context, _ = case
    data = torch.zeros(LAYERS, batch * heads * context * dim * 2 * dtype.itemsize // 4)
    return lambda layer: data[layer].sum()


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    runtime.set_num_threads(args.threads)
    rows = []
    for case in CASES:
        sides = {
            "quire bf16": ours(case, torch.bfloat16),
            "quire f32": ours(case, torch.float32),
            "torch bf16": torch_attention(case, torch.bfloat16),
            "torch f32": torch_attention(case, torch.float32),
            "read bf16": read(case, torch.bfloat16),
        }
        times: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(args.rounds + 1):
            for name, attend in sides.items():
                start = time.perf_counter()
                for layer in range(LAYERS):
                    attend(layer)
                if number:
                    times[name].append((time.perf_counter() - start) / LAYERS * 1e6)
        found = {name: median(values) for name, values in times.items()}
        rows.append(
            [
                "x".join(map(str, case)),
                *(f"{value:.0f}" for value in found.values()),
                f"{found['torch bf16'] / found['quire bf16']:.1f}x",
            ]
        )
        if args.json:
            append_record(args.json, {"benchmark": "attention_cpu", "case": case, "microseconds": found})
    print(format_table(["batch x heads x group x dim x context x rows", *found, "bf16 gain"], rows))


if __name__ == "__main__":
    main()
