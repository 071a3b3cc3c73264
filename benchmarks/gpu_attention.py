"""Attention on pages in GPU memory, compared with torch on the same numbers in one run.

    python benchmarks/gpu_attention.py [--tables shared] [--sweep] [--json FILE]

Decode: GB/s of keys and values, and the share of the copy bandwidth of this device in the same run. Our time includes
rotating and storing the new key and value; `scaled_dot_product_attention` gets contiguous, rotated keys and values.
Prefill: TFLOP/s. Shared prefixes: gpu_shared.py. All sides run as CUDA graphs over enough layers to exceed the caches.
--sweep also tries other launches, for the tables decode and shared that are printed.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

sys.path.insert(0, str(Path(__file__).parent))
from common import append_record, format_table
from gpu import copy_bandwidth, graph_seconds, require_gpu
from gpu_shared import shared
from gpu_shared import sweep as sweep_shared

from quire.attention.rows import RowSlice
from quire.attention.spec import AttentionSpec, equal_layers
from quire.cache.arena import Arena
from quire.cache.codecs.dense import DenseCodec
from quire.cache.ledger import PAGE_TOKENS, PageLedger
from quire.cache.table import ChunkTable

HEADS, GROUP, DIM, DTYPE = 8, 4, 128, torch.bfloat16
DECODE = [(1, 1024), (1, 8192), (1, 131072), (8, 4096), (16, 32768), (64, 1024), (64, 4096), (256, 512)]
PREFILL = [(1, 0, 512), (1, 0, 2048), (4, 0, 2048), (1, 6144, 2048), (1, 30720, 2048)]
TORCH = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


def num_layers(batch: int, context: int) -> int:
    """Number of layers with at least a gigabyte of keys and values, which exceeds every cache."""
    layer_bytes = batch * context * HEADS * DIM * 2 * DTYPE.itemsize
    return min(32, max(2, -(-(1 << 30) // layer_bytes)))


def make_spec(batch: int, context: int) -> AttentionSpec:
    """A cache of random numbers."""
    layers = num_layers(batch, context)
    codec = DenseCodec(DIM, DTYPE)
    chunks = batch * -(-context // PAGE_TOKENS) + 1
    slab = codec.page_bytes * 128
    ledger = PageLedger(-(-chunks * layers * HEADS * codec.page_bytes // slab) * slab, slab)
    arena = Arena(ledger.num_bytes, "cuda")
    arena.data.view(DTYPE).normal_()
    angle = torch.outer(torch.arange(context, device="cuda"), 1e4 ** (-torch.arange(DIM // 2, device="cuda") / DIM * 2))
    table = ChunkTable(ledger, layers, HEADS, codec, arena=arena)
    return AttentionSpec(
        table, equal_layers(layers, HEADS, GROUP, DIM, rotation=0), DTYPE, ((angle.cos(), angle.sin()),)
    )


def quire_seconds(
    spec: AttentionSpec, batch: int, start: int, rows: int, launch: tuple[int, int] | None = None
) -> float:
    """Seconds of one layer. launch: warps and stages of the decode kernel instead of its own."""
    from quire.attention.kernels.launch import Launch
    from quire.attention.triton import TritonAttention

    backend = TritonAttention(spec)
    if launch is not None:
        kind = backend.kinds[0]
        launches = kind.launches._replace(short=Launch(kind.launches.short.rows, *launch))
        backend.kinds[0] = replace(kind, launches=launches)
    taken = [spec.table.take(-(-(start + rows) // PAGE_TOKENS), spec.table.open_codec) for _ in range(batch)]
    plan = backend.plan([RowSlice(start, rows, chunks) for chunks in taken])
    fused = torch.randn(batch * rows, (GROUP + 2) * HEADS, DIM, device="cuda", dtype=DTYPE)
    q, k, v = fused.split([GROUP * HEADS, HEADS, HEADS], 1)

    def run() -> None:
        for layer in range(spec.num_layers):
            plan.write(layer, k, v)
            plan.attend(layer, q)

    seconds = graph_seconds(run) / spec.num_layers
    for chunks in taken:
        spec.table.free(chunks)
    return seconds


def torch_seconds(layers: int, batch: int, context: int, rows: int, backend: SDPBackend) -> float:
    """Seconds of one layer; NaN if this backend does not support the shape."""
    k, v = (torch.randn(layers, batch, HEADS, context, DIM, device="cuda", dtype=DTYPE) for _ in range(2))
    q = torch.randn(batch, GROUP * HEADS, rows, DIM, device="cuda", dtype=DTYPE)

    def run() -> None:
        for layer in range(layers):
            scaled_dot_product_attention(q, k[layer], v[layer], is_causal=rows > 1, enable_gqa=True)

    try:
        with sdpa_kernel(backend):
            return graph_seconds(run) / layers
    except RuntimeError as error:
        print(f"{backend}: {str(error).splitlines()[0]}", file=sys.stderr)
        return float("nan")


def decode(copy: float, record: Path | None) -> None:
    """GB/s of every side."""
    rows = []
    for batch, context in DECODE:
        spec = make_spec(batch, context)
        data = batch * context * HEADS * DIM * 2 * DTYPE.itemsize
        found = {"quire": quire_seconds(spec, batch, context - 1, 1)}
        layers = spec.num_layers
        del spec
        found |= {name: torch_seconds(layers, batch, context, 1, backend) for name, backend in TORCH.items()}
        best = min((found[name] for name in TORCH if found[name] == found[name]), default=float("nan"))
        rows.append(
            [
                f"{batch} x {context}",
                f"{data / copy * 1e6:.1f}",
                f"{found['quire'] * 1e6:.1f}",
                *(f"{data / seconds / 1e9:.0f}" for seconds in found.values()),
                f"{data / found['quire'] / copy:.2f}",
                f"{best / found['quire']:.2f}x",
            ]
        )
        if record:
            case = {"benchmark": "gpu_attention", "batch": batch, "context": context, "copy_bytes_per_second": copy}
            append_record(record, case | {"seconds": found})
    head = ["decode, batch x context", "floor us", "quire us", *(f"{name} GB/s" for name in ("quire", *TORCH))]
    print(format_table([*head, "of copy", "over best"], rows), "\n")


def prefill() -> None:
    """TFLOP/s of every side."""
    rows = []
    for batch, start, count in PREFILL:
        seconds = quire_seconds(make_spec(batch, start + count), batch, start, count)
        # Two products of D multiply-adds for every visible pair.
        work = 4 * DIM * HEADS * GROUP * batch * (count * start + count * (count + 1) // 2)
        others = [
            torch_seconds(8, batch, count, count, backend) if not start else float("nan") for backend in TORCH.values()
        ]
        rates = [f"{work / other / 1e12:.0f}" if other == other else "-" for other in (seconds, *others)]
        rows.append([f"{batch} x {count} after {start}", f"{seconds * 1e6:.0f}", *rates])
    print(
        format_table(["prefill, batch x rows", "quire us", "quire TFLOP/s", *(f"{n} TFLOP/s" for n in TORCH)], rows),
        "\n",
    )


def sweep(copy: float) -> None:
    """The decode kernel under other numbers of warps and stages; share of copy bandwidth."""
    launches = list(itertools.product((2, 4, 8), (2, 3, 4)))
    rows = []
    for batch, context in DECODE:
        spec = make_spec(batch, context)
        data = batch * context * HEADS * DIM * 2 * DTYPE.itemsize
        times = [quire_seconds(spec, batch, context - 1, 1, launch) for launch in launches]
        rows.append([f"{batch} x {context}", *(f"{data / seconds / copy:.2f}" for seconds in times)])
    print(format_table(["of copy, warps/stages", *(f"{warps}/{stages}" for warps, stages in launches)], rows), "\n")


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = "decode,prefill,shared"
    parser.add_argument("--tables", default=names, help=f"which of {names} to print (default: all)")
    parser.add_argument("--sweep", action="store_true", help="try other launches, for the tables decode and shared")
    parser.add_argument("--json", type=Path, help="append the measurements as JSON lines")
    given = parser.parse_args()
    wanted = given.tables.split(",")
    if unknown := set(wanted) - set(names.split(",")):
        parser.error(f"no table is called {', '.join(sorted(unknown))}; there are {names}")
    require_gpu()
    copy = copy_bandwidth()
    print(f"copy: {copy / 1e9:.0f} GB/s; {HEADS} kv heads, {GROUP} query heads each, head size {DIM}, {DTYPE}\n")
    if "decode" in wanted:
        decode(copy, given.json)
    if "prefill" in wanted:
        prefill()
    if "shared" in wanted:
        shared(copy, given.json)
    if given.sweep and "decode" in wanted:
        sweep(copy)
    if given.sweep and "shared" in wanted:
        sweep_shared()


if __name__ == "__main__":
    main()
