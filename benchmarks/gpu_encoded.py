"""Encoded pages in GPU memory: decode attention compared with torch and dense pages in bfloat16, encoding compared with
the products of a layer, and exactness. One run, all sides as CUDA graphs.

    python benchmarks/gpu_encoded.py [--codecs nuq4,nuq3,nuq2,g4] [--shapes 32x32768,1x131072] [--json FILE]

The shape is Llama-3-8B's: 8 kv heads of 4 query heads, head size 128. Keys and values are normally distributed, and
codebooks are made for that. `mixed` has widths like those that calibration chooses, from one bit less to one bit more;
the others have one width everywhere. The layers together have at least a gigabyte, which exceeds every cache.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import linear

sys.path.insert(0, str(Path(__file__).parent))
from common import append_record, format_table
from gpu import copy_bandwidth, graph_seconds, require_gpu
from gpu_attention import DIM, DTYPE, GROUP, HEADS, TORCH, make_spec, quire_seconds, torch_seconds

from quire.attention.reference import ReferenceAttention
from quire.attention.rows import RowSlice
from quire.attention.spec import AttentionSpec, equal_layers
from quire.cache.arena import Arena
from quire.cache.codecs import CODECS, Codec, CodecInputs, load
from quire.cache.codecs.dense import DenseCodec
from quire.cache.codecs.nuq import BLOCK_PAIRS, CODEBOOK_SIZE, NuqTables
from quire.cache.ledger import PAGE_TOKENS, PageLedger
from quire.cache.table import ChunkTable

LARGEST_ERROR = 1e-2
"""Largest relative error that the kernels may have."""

PROMPT = 2048
"""Tokens of the timed encoding, and of one write."""

# Llama-3-8B: inputs and outputs of a layer's products.
PRODUCTS = [(4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096)]


def normal_codebook(bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Centroids [32] and edges [31] of `bits` bits for normal numbers, by Lloyd's iteration on a sample."""
    sample = torch.erfinv(torch.linspace(-0.9999, 0.9999, 20_001)) * math.sqrt(2)
    count = 1 << bits
    codebook = torch.quantile(sample, (torch.arange(count) + 0.5) / count)
    for _ in range(100):
        edges = (codebook[1:] + codebook[:-1]) / 2
        codes = torch.bucketize(sample, edges)
        codebook = torch.zeros(count).index_add_(0, codes, sample) / torch.bincount(codes, minlength=count)
    padding = torch.full((CODEBOOK_SIZE - 1,), torch.inf)
    padding[: count - 1] = (codebook[1:] + codebook[:-1]) / 2
    return torch.cat((codebook, torch.zeros(CODEBOOK_SIZE - count))), padding


def make_tables(layers: int, bits: int, mixed: bool) -> NuqTables:
    """Tables for normal numbers, with one slot per vector."""
    lead, generator = (layers, HEADS), torch.Generator().manual_seed(0)
    widths = torch.full((*lead, DIM // (2 * BLOCK_PAIRS)), bits)
    if mixed:
        widths += torch.randint(-1, 2, widths.shape, generator=generator)
    codebooks, edges = map(
        torch.stack, zip(*(normal_codebook(b) if b else normal_codebook(1) for b in range(6)), strict=True)
    )
    order = torch.rand(*lead, DIM // 2, generator=generator).argsort(-1)
    of_pair = torch.zeros(*lead, DIM // 2, dtype=torch.int64)
    of_pair.scatter_(-1, order, widths.repeat_interleave(BLOCK_PAIRS, -1))
    channel = torch.cat((of_pair, of_pair), -1)
    scale = 1 / codebooks[bits].abs().max()  # values are read in units of their own half range
    return NuqTables(
        key_order=order.to(torch.uint8),
        key_bits=widths.to(torch.uint8),
        key_edges=edges[channel],
        key_books=codebooks[channel],
        key_weight=torch.ones(*lead, DIM),
        key_slots=torch.ones(lead, dtype=torch.uint8),
        value_bits=torch.full(lead, bits, dtype=torch.uint8),
        value_edges=(edges[bits] * scale).expand(*lead, -1).clone(),
        value_books=(codebooks[bits] * scale).expand(*lead, -1).clone(),
        value_slots=torch.ones(lead, dtype=torch.uint8),
    )


def codec_of(name: str, layers: int) -> Codec:
    """A codec of the registry; with " mixed" behind its name, of several widths."""
    plain, _, mixed = name.partition(" ")
    row = CODECS[plain]
    tables = make_tables(layers, row.bits, bool(mixed)) if row.is_calibrated else None
    codec: Codec = load(row.place).of(CodecInputs(plain, DIM, tables))
    return codec


def encoded_spec(codec: Codec, batch: int, context: int, layers: int) -> AttentionSpec:
    """An empty cache with room for the sequences, and for the chunks needed to fill them."""
    dense = DenseCodec(DIM, DTYPE)
    sealed = context // PAGE_TOKENS
    page = int(np.max(codec.page_bytes))
    slab = 4 << 20
    slabs = -(-batch * sealed * layers * HEADS * page // slab) + -(
        -2 * batch * layers * HEADS * dense.page_bytes // slab
    )
    ledger = PageLedger((slabs + 64) * slab, slab)
    arena = Arena(ledger.num_bytes, "cuda")
    table = ChunkTable(ledger, layers, HEADS, dense, codec, arena=arena)
    turn = torch.outer(torch.arange(context, device="cuda"), 1e4 ** (-torch.arange(DIM // 2, device="cuda") / DIM * 2))
    return AttentionSpec(table, equal_layers(layers, HEADS, GROUP, DIM, rotation=0), DTYPE, ((turn.cos(), turn.sin()),))


def filled(spec: AttentionSpec, batch: int, context: int) -> list[RowSlice]:
    """Decode rows of sequences one token shorter than the context, so that none fills its chunk. The backend has
    encoded all whole chunks.
    """
    from quire.attention.triton import TritonAttention

    backend, table = TritonAttention(spec), spec.table
    length = context - 2
    sealed = length // PAGE_TOKENS
    slices = []
    for _ in range(batch):
        chunks = np.concatenate((table.take(sealed, table.sealed_codec), table.take(1, table.open_codec)))
        for start in range(0, length, PROMPT):
            stop = min(length, start + PROMPT)
            plan = backend.plan([RowSlice(start, stop - start, chunks)])
            for layer in range(spec.num_layers):
                k, v = torch.randn(2, stop - start, HEADS, DIM, device="cuda", dtype=DTYPE)
                plan.write(layer, k, v)
        slices.append(RowSlice(length, 1, chunks))
    return slices


def decode_seconds(spec: AttentionSpec, slices: list[RowSlice]) -> float:
    """Seconds of one layer."""
    from quire.attention.triton import TritonAttention

    plan = TritonAttention(spec).plan(slices)
    fused = torch.randn(len(slices), (GROUP + 2) * HEADS, DIM, device="cuda", dtype=DTYPE)
    q, k, v = fused.split([GROUP * HEADS, HEADS, HEADS], 1)

    def run() -> None:
        for layer in range(spec.num_layers):
            plan.write(layer, k, v)
            plan.attend(layer, q)

    return graph_seconds(run) / spec.num_layers


def decode(shapes: list[tuple[int, int]], codecs: list[str], copy: float, record: Path | None) -> None:
    """Decode attention of every codec, torch and dense pages."""
    for batch, context in shapes:
        numbers = batch * context * HEADS * DIM * 2
        dense = make_spec(batch, context)
        layers = dense.num_layers
        found = {"dense pages": (quire_seconds(dense, batch, context - 1, 1), 2.0)}
        del dense
        found |= {name: (torch_seconds(layers, batch, context, 1, kind), 2.0) for name, kind in TORCH.items()}
        best = min(seconds for name, (seconds, _) in found.items() if name in TORCH and seconds == seconds)
        for name in codecs:
            codec = codec_of(name, layers)
            spec = encoded_spec(codec, batch, context, layers)
            num_bytes = spec.table.chunk_bytes(codec) / (layers * HEADS * PAGE_TOKENS * DIM * 2)
            found[name] = decode_seconds(spec, filled(spec, batch, context)), num_bytes
            del spec
            torch.cuda.empty_cache()
        rows = [
            [name, f"{8 * size:.2f}", f"{seconds * 1e6:.1f}", f"{numbers / seconds / 1e9:.0f}",
             f"{numbers * size / seconds / copy:.2f}", f"{best / seconds:.2f}x"]
            for name, (seconds, size) in found.items()
        ]  # fmt: skip
        head = [f"decode {batch} x {context}", "bits", "us", "Gnumbers/s", "of copy", "over torch's best"]
        print(format_table(head, rows), "\n")
        if record:
            case = {"benchmark": "gpu_encoded", "batch": batch, "context": context, "copy_bytes_per_second": copy}
            append_record(record, case | {"seconds": {name: seconds for name, (seconds, _) in found.items()}})


def encode(codecs: list[str]) -> None:
    """Writing and encoding a prompt's keys and values, compared with the products of the layer."""
    from quire.attention.triton import TritonAttention

    x = {width: torch.randn(PROMPT, width, device="cuda", dtype=DTYPE) for width, _ in PRODUCTS}
    weights = [torch.randn(outputs, inputs, device="cuda", dtype=DTYPE) for inputs, outputs in PRODUCTS]
    products = graph_seconds(lambda: [linear(x[weight.shape[1]], weight) for weight in weights])
    rows = []
    for name in codecs:
        spec = encoded_spec(codec_of(name, 1), 1, 2 * PROMPT, 1)
        chunks = spec.table.take(PROMPT // PAGE_TOKENS, spec.table.sealed_codec)
        plan = TritonAttention(spec).plan([RowSlice(0, PROMPT, chunks)])
        k, v = torch.randn(2, PROMPT, HEADS, DIM, device="cuda", dtype=DTYPE)
        both = graph_seconds(lambda plan=plan, k=k, v=v: plan.write(0, k, v))
        rows.append([name, f"{both * 1e6:.0f}", f"{products * 1e6:.0f}", f"{both / products:.3f}"])
    print(format_table([f"{PROMPT} tokens, a layer", "write and encode us", "its products us", "share"], rows), "\n")


def exactness(codecs: list[str]) -> None:
    """The error against float32 attention over the decoded pages. Ends the run if it exceeds LARGEST_ERROR."""
    rows, errors = [], []
    for name in codecs:
        spec = encoded_spec(codec_of(name, 1), 2, 4096, 1)
        slices = filled(spec, 2, 4096)
        from quire.attention.triton import TritonAttention

        fused = torch.randn(len(slices), (GROUP + 2) * HEADS, DIM, device="cuda", dtype=DTYPE)
        q, k, v = fused.split([GROUP * HEADS, HEADS, HEADS], 1)
        outputs = []
        for backend in (ReferenceAttention(spec), TritonAttention(spec)):
            plan = backend.plan(slices)
            plan.write(0, k, v)
            outputs.append(plan.attend(0, q).float())
        error = (outputs[1] - outputs[0]).square().mean().sqrt() / outputs[0].square().mean().sqrt()
        rows.append([name, f"{error.item():.1e}"])
        errors.append(error.item())
    print(format_table(["2 x 4,096", "relative error"], rows), "\n")
    # NaN also fails this.
    if not all(error <= LARGEST_ERROR for error in errors):
        sys.exit(f"the kernels are wrong: an error is past {LARGEST_ERROR}")


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codecs", default="nuq4,nuq4 mixed,nuq3,nuq3 mixed,nuq2,g4")
    parser.add_argument("--shapes", default="32x32768,1x131072", help="sequences x tokens")
    parser.add_argument("--json", type=Path, help="append the measurements as JSON lines")
    given = parser.parse_args()
    require_gpu()
    codecs = given.codecs.split(",")
    shapes = [tuple(map(int, shape.split("x"))) for shape in given.shapes.split(",")]
    copy = copy_bandwidth()
    print(f"copy: {copy / 1e9:.0f} GB/s; {HEADS} kv heads, {GROUP} query heads each, head size {DIM}, {DTYPE}\n")
    exactness(codecs)
    encode(codecs)
    decode(shapes, codecs, copy, given.json)


if __name__ == "__main__":
    main()
