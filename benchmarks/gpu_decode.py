"""Decoding with the Llama-3-8B shape and random bfloat16 weights on one GPU, compared with a copy of the weights.

    python benchmarks/gpu_decode.py [--parts products,decode,engine,transformers] [--profile] [--json FILE]

products      the matrix products of one row: torch and our kernel, GB/s of weights
decode        a decode step as a CUDA graph at batch 1 and 64, context 1,024: on the device alone, and as the engine
              sees it (plan, copies, replay, the best token back on the host); the floor is weights / copy bandwidth
engine        64 requests of 1,024 tokens through the engine, 64 tokens each
transformers  the same batch through `generate`
--profile adds the time of every kernel of one step. Needs about 60 GiB of GPU memory.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from common import append_record, format_table, median
from gpu import copy_bandwidth, event_seconds, graph_seconds, require_gpu

from quire.attention.rows import RowSlice
from quire.attention.spec import AttentionSpec, equal_layers
from quire.cache.arena import Arena
from quire.cache.codecs.dense import DenseCodec
from quire.cache.ledger import PAGE_TOKENS, PageLedger
from quire.cache.table import ChunkTable
from quire.models.decoder import build_model
from quire.models.families import shape_from_config
from quire.models.layers import Ops, torch_dtype
from quire.models.plan import Model
from quire.models.shape import ModelShape
from quire.models.weights import Checkpoint

LLAMA_3_8B = shape_from_config(
    {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
    },
    {},
)
CONTEXT = 1024
BATCHES = (1, 64)
NEW_TOKENS = 64
WARM_STEPS, TIMED_STEPS = 5, 50


class RandomWeights(Checkpoint):
    """Draws each tensor when it is requested, on its device."""

    def __init__(self, shape: ModelShape, device: str) -> None:
        self.shape = shape
        self._device = device

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Random numbers, small enough for finite activations."""
        return torch.empty(self.shape.tensor_shapes[name], dtype=dtype, device=self._device).normal_(std=0.02)

    def close(self) -> None:
        """Nothing is open."""


class NoText:
    """A tokenizer for requests without text."""

    eos_ids: tuple[int, ...] = ()

    def decode(self, token_ids: list[int], skip_special: bool = True) -> str:
        """Empty."""
        return ""

    def stream(self, prompt_ids: list[int], skip_special: bool = True) -> NoText:
        """Itself."""
        return self

    def push(self, token_id: int) -> str:
        """Empty."""
        return ""

    def flush(self) -> str:
        """Empty."""
        return ""


def products(shape: ModelShape, copy: float) -> None:
    """GB/s of one-row products. At least a gigabyte of weights exceeds every cache."""
    from quire.models.triton_ops import TritonOps

    sizes = {
        "qkv": ((shape.num_q_heads + 2 * shape.num_kv_heads) * shape.head_dim, shape.hidden_size),
        "o": (shape.hidden_size, shape.q_size),
        "gate, up": (2 * shape.ffn_size, shape.hidden_size),
        "down": (shape.hidden_size, shape.ffn_size),
        "head": (shape.vocab_size, shape.hidden_size),
    }
    rows = []
    for name, (n, k) in sizes.items():
        count = -(-(1 << 30) // (2 * n * k))
        weights = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
        x = torch.randn(1, k, device="cuda", dtype=torch.bfloat16)
        cells = []
        for vector in (False, True):
            linears = [TritonOps(vector).linear([weight], None, weight.dtype) for weight in weights]
            seconds = graph_seconds(lambda linears=linears, x=x: [linear(x) for linear in linears]) / count
            cells += [f"{seconds * 1e6:.1f}", f"{2 * n * k / seconds / copy:.2f}"]
        rows.append([f"{name} [{n}, {k}]", *cells])
    print(format_table(["product of one row", "torch us", "of copy", "quire us", "of copy"], rows), "\n")


def make_cache(shape: ModelShape, batch: int, tokens: int) -> AttentionSpec:
    """A cache of random numbers for `batch` sequences."""
    codec = DenseCodec(shape.head_dim, torch.bfloat16)
    per_chunk = shape.num_layers * shape.num_kv_heads * codec.page_bytes
    ledger = PageLedger((batch * -(-tokens // PAGE_TOKENS) + 1) * per_chunk, per_chunk)
    arena = Arena(ledger.num_bytes, "cuda")
    arena.data.view(torch.bfloat16).normal_()
    (rope,) = shape.ropes
    cos, sin = (torch.from_numpy(part).cuda() for part in rope.tables(tokens))
    table = ChunkTable(ledger, shape.num_layers, shape.num_kv_heads, codec, arena=arena)
    group = shape.num_q_heads // shape.num_kv_heads
    return AttentionSpec(
        table,
        equal_layers(shape.num_layers, shape.num_kv_heads, group, shape.head_dim, rotation=0),
        torch.bfloat16,
        ((cos, sin),),
    )


def decode(shape: ModelShape, model: Model, copy: float, profile: bool, record: Path | None) -> None:
    """Time of a decode step, on the device and for the engine."""
    from quire.attention.triton import TritonAttention
    from quire.engine.graphs import DecodeGraphs

    floor = shape.weight_bytes("bfloat16") / copy
    rows = []
    for batch in BATCHES:
        steps = WARM_STEPS + TIMED_STEPS
        spec = make_cache(shape, batch, CONTEXT + steps + 1)
        backend = TritonAttention(spec)
        graphs = DecodeGraphs(model, backend, (batch,))
        paths = [spec.table.take(-(-(CONTEXT + steps) // PAGE_TOKENS), spec.table.open_codec) for _ in range(batch)]
        tokens = torch.zeros(batch, dtype=torch.int64)
        walls, launched = [], []
        for step in range(steps):
            started = time.perf_counter()
            # As the scheduler says it: until a row needs another chunk, no row has moved.
            moved = [] if step and (CONTEXT + step) % PAGE_TOKENS else None
            plan = backend.plan([RowSlice(CONTEXT + step, 1, chunks) for chunks in paths], moved)
            both = torch.empty(2, batch, dtype=torch.int64, pin_memory=True)
            both[0], both[1] = tokens, CONTEXT + step
            logits = graphs.replay(both[0], both[1], plan)
            launched.append(time.perf_counter() - started)
            tokens = logits.argmax(-1).cpu()
            walls.append(time.perf_counter() - started)
        wall, launch = median(walls[WARM_STEPS:]), median(launched[WARM_STEPS:])
        ((graph, _),) = graphs._graphs.values()
        device = event_seconds(graph.replay, 20)
        # The floor leaves out the time for the step's keys and values, which is small: 1 % at batch 1.
        cells = [device * 1e3, launch * 1e3, wall * 1e3, floor * 1e3]
        rows.append([batch, *(f"{cell:.2f}" for cell in cells), f"{wall / floor:.2f}", f"{batch / wall:.0f}"])
        if record:
            found = {"device_seconds": device, "launch_seconds": launch, "step_seconds": wall, "floor_seconds": floor}
            append_record(record, {"benchmark": "gpu_decode", "batch": batch, "context": CONTEXT} | found)
        if profile:
            print_profile(graph, batch)
    head = ["batch", "graph ms", "launched after ms", "step ms", "weights at copy ms", "step / weights", "tok/s"]
    print(format_table(head, rows))
    print("must: step / weights at most 1.25 at batch 1\n")


def print_profile(graph: torch.cuda.CUDAGraph, batch: int) -> None:
    """Device time of every kernel of a replayed step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        graph.replay()
        torch.cuda.synchronize()
    events = sorted(profiler.key_averages(), key=lambda event: -event.device_time_total)
    rows = [
        [e.key[:70], e.count, f"{e.device_time_total / e.count:.1f}", f"{e.device_time_total / 1e3:.2f}"]
        for e in events[:14]
    ]
    print(format_table([f"kernels of a step, batch {batch}", "launches", "us each", "ms"], rows), "\n")


def engine(shape: ModelShape, model: Model, device: str, batch: int, prompt: int, new: int) -> None:
    """Prompts in, tokens out, through the scheduler and the sampler."""
    from quire.config import EngineConfig
    from quire.engine.build import assemble, resolve
    from quire.engine.params import SamplingParams

    memory = batch * -(-(prompt + new + PAGE_TOKENS) // PAGE_TOKENS) * PAGE_TOKENS * shape.kv_bytes_per_token(2)
    options: dict[str, Any] = {"model.dtype": "bfloat16", "runtime.device": device, "cache.memory": memory}
    config, fits = resolve(EngineConfig.from_options(options), shape)
    running = assemble(model, NoText(), config, fits)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    rows = []
    for number in range(2):
        for index in range(batch):
            ids = torch.randint(0, shape.vocab_size, (prompt,), generator=generator).tolist()
            params = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
            running.add(f"{number}-{index}", ids, params)
        started = time.perf_counter()
        first, at_first, tokens = 0.0, 0, 0
        while running.has_work:
            outputs = running.step()
            tokens += sum(len(output.token_ids) for delta in outputs for output in delta.outputs)
            # Prefill ends with the step in which the last request has its first token.
            if not first and not running.scheduler.waiting and tokens >= batch:
                first, at_first = time.perf_counter() - started, tokens
        total = time.perf_counter() - started
        rows = [[batch, f"{first:.2f}", f"{(tokens - at_first) / (total - first):.0f}", f"{tokens / total:.0f}"]]
    print(format_table([f"engine, {prompt} in / {new} out, batch", "prefill s", "decode tok/s", "tok/s"], rows), "\n")


def transformers_generate(shape: ModelShape) -> None:
    """`generate` with its default cache; also its decode rate without the prefill."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers import __version__ as version

    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.ffn_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_q_heads,
        num_key_value_heads=shape.num_kv_heads,
        max_position_embeddings=shape.max_context,
        tie_word_embeddings=False,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).eval()
    torch.set_default_dtype(before)
    model.generation_config.eos_token_id = None
    rows = []
    for batch in BATCHES:
        ids = torch.randint(0, shape.vocab_size, (batch, CONTEXT), device="cuda")
        seconds = {}
        for new in (1, 1, NEW_TOKENS):
            torch.cuda.synchronize()
            started = time.perf_counter()
            with torch.inference_mode():
                mask = torch.ones_like(ids)
                model.generate(
                    ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0
                )
            torch.cuda.synchronize()
            seconds[new] = time.perf_counter() - started
        step = (seconds[NEW_TOKENS] - seconds[1]) / (NEW_TOKENS - 1)
        total = batch * NEW_TOKENS / seconds[NEW_TOKENS]
        rows.append([batch, f"{seconds[1]:.2f}", f"{step * 1e3:.1f}", f"{batch / step:.0f}", f"{total:.0f}"])
    head = [f"transformers {version}, {CONTEXT} in / {NEW_TOKENS} out, batch", "prefill s", "step ms", "decode tok/s"]
    print(format_table([*head, "tok/s"], rows), "\n")


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="products,decode,engine,transformers", help="which parts, by comma")
    parser.add_argument("--profile", action="store_true", help="print the kernels of a step")
    parser.add_argument("--json", type=Path, help="append the measurements as JSON lines")
    given = parser.parse_args()
    parts = given.parts.split(",")
    require_gpu()
    shape = LLAMA_3_8B
    copy = copy_bandwidth()
    weights = shape.weight_bytes("bfloat16")
    print(f"copy: {copy / 1e9:.0f} GB/s; {weights / 1e9:.2f} GB of weights take {weights / copy * 1e3:.2f} ms\n")
    if "products" in parts:
        products(shape, copy)
    if "decode" in parts or "engine" in parts:
        from quire.models.triton_ops import TritonOps

        ops: Ops = TritonOps()
        with torch.inference_mode():
            model = build_model(shape, RandomWeights(shape, "cuda"), ops, torch_dtype("bfloat16"), "cuda")
            if "decode" in parts:
                decode(shape, model, copy, given.profile, given.json)
            if "engine" in parts:
                engine(shape, model, "cuda", max(BATCHES), CONTEXT, NEW_TOKENS)
        del model
        torch.cuda.empty_cache()
    if "transformers" in parts:
        transformers_generate(shape)


if __name__ == "__main__":
    main()
