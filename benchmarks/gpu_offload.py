"""A model that is larger than a GPU's memory: the OPT-30B shape with random weights in 16 GiB.

    python benchmarks/gpu_offload.py [--near 0.05] [--batch 64] [--micro-batch 16] [--sides quire,accelerate,planned]

quire       weights on the GPU and in the host's memory; the cache in the host's memory, where decoded tokens attend to
            it. 512 tokens in, 32 out, two blocks, of which the second counts
accelerate  `cpu_offload` of the same shape in transformers, batch 16: the prompts, then two tokens; 32 are extrapolated
planned     a Llama shape of 2.8 GB in 1.5 GiB: profiles the machine, plans, generates a block by the plan, and compares
            its throughput with the prediction

The floor of a pass is the larger one of two times: to copy its weights at the speed of a pinned copy, and to compute
its products at the speed of one large product. Both are measured before. Needs 110 GiB of memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from common import append_record, format_table
from gpu import event_seconds, require_gpu
from gpu_decode import NoText, RandomWeights
from offload import SHAPE, make_model

from quire.config import EngineConfig
from quire.engine.build import assemble, load_model, resolve
from quire.engine.params import SamplingParams
from quire.models.families import shape_from_config
from quire.models.shape import ModelShape

OPT_30B = shape_from_config(
    {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "hidden_size": 7168,
        "num_hidden_layers": 48,
        "num_attention_heads": 56,
        "ffn_dim": 28672,
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
        "word_embed_proj_dim": 7168,
        "do_layer_norm_before": True,
        "torch_dtype": "bfloat16",
    },
    {},
)
MEMORY = 16 << 30
PROMPT, OUTPUT = 512, 32
PEER_BATCH = 16
PLANNED_MEMORY = 1536 << 20
TELL_SECONDS = 15
"""Interval between lines about a block that goes on: the time on a GPU may be over before it ends."""


def floors(shape: ModelShape) -> tuple[float, float]:
    """Bytes per second of a pinned copy to the GPU, and operations per second of a product."""
    host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    bus = len(host) / event_seconds(lambda: there.copy_(host, non_blocking=True), 5)
    n, k, rows = shape.ffn_size, shape.hidden_size, 1024
    x, weight = (torch.randn(size, k, device="cuda", dtype=torch.bfloat16) for size in (rows, n))
    return bus, 2 * rows * n * k / event_seconds(lambda: x @ weight.T, 10)


def quire(shape: ModelShape, given: argparse.Namespace, device: str) -> dict[str, float]:
    """Generates two blocks; numbers of the second one."""
    policy = {
        "format": 1,
        "tiers": ["gpu", "cpu", "disk"],
        "micro_batch": given.micro_batch,
        "num_batches": -(-given.batch // given.micro_batch),
        "weights": {"gpu": given.near, "cpu": 1 - given.near},
        "cache": {"cpu": 1},
        "hidden": {"gpu": 1},
        "attended": 1,
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "policy.json"
        file.write_text(json.dumps(policy))
        options: dict[str, Any] = {
            "model.dtype": "bfloat16",
            "model.max_context": PROMPT + OUTPUT + 64,
            "runtime.device": device,
            "offload.mode": str(file),
            "scheduler.token_budget": max(1024, given.batch + 64),
            "cache.share": False,
        }
        config, fits = resolve(EngineConfig.from_options(options), shape)
        model = load_model(RandomWeights(shape, device), config)
        engine = assemble(model, NoText(), config, fits)  # type: ignore[arg-type]
    assert engine.offloaded is not None
    found: dict[str, float] = {}
    for number in range(2):
        generator = torch.Generator().manual_seed(number)
        before = dict(engine.offloaded())
        for index in range(given.batch):
            ids = torch.randint(0, shape.vocab_size, (PROMPT,), generator=generator).tolist()
            params = SamplingParams(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True)
            engine.add(f"{number}-{index}", ids, params)
        begun, tokens, steps = time.perf_counter(), 0, 0
        told = begun
        while engine.has_work:
            tokens += sum(len(output.token_ids) for delta in engine.step() for output in delta.outputs)
            steps += 1
            if time.perf_counter() - told >= TELL_SECONDS:
                told = time.perf_counter()
                print(f"block {number}: {steps} steps, {tokens} tokens in {told - begun:.0f} s: {engine.offloaded()}")
        seconds = time.perf_counter() - begun
        after = engine.offloaded()
        found = {"seconds": seconds, "tokens": tokens, "steps": steps}
        found |= {name: after[name] - before[name] for name in ("weights_bytes_read", "cache_bytes_written")}
        print(f"block {number}: {tokens / seconds:.2f} tokens/s in {steps} steps, {seconds:.1f} s")
    return found


def planned(folder: Path, shape: Mapping[str, Any], memory: float, prompt: int, output: int) -> tuple[float, float]:
    """Tokens per second as predicted and as measured. memory: bytes of the first tier."""
    from quire.config import EngineConfig
    from quire.engine.machine import available_memory
    from quire.measure.offload_profile import generator, measure_machine
    from quire.offload.planning.costs import BlockWorkload
    from quire.offload.planning.planner import MICRO_BATCHES, plan_all
    from quire.offload.planning.program import best
    from quire.offload.planning.subject import Subject

    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    options = {"model.max_context": -(-(prompt + output) // 64) * 64, "scheduler.max_running": 64}
    config = EngineConfig.from_options({"offload.mode": "auto", **options})
    subject = Subject.of(str(make_model(folder / "model", shape)), config)
    profile = measure_machine(subject, tell=lambda what: print(f"measuring {what}", flush=True))
    capacities = memory, available_memory(torch.device("cpu")) * 0.5, shutil.disk_usage(folder).free * 0.5
    found = best(
        plan_all(
            profile, subject.sizes, BlockWorkload(prompt, output),
            capacities[: len(profile.tiers) - 1] + capacities[2:],
            budget=subject.token_budget, slack=0.9, micro_batches=MICRO_BATCHES[:12], most=64,
        )
    )  # fmt: skip
    assert found is not None
    print(f"plan: {found.policy}; limited by {', '.join(found.prediction.binding)}")
    with generator(subject.name, config.with_options({"cache.memory": "auto"}), found.policy) as made:
        made.run(found.policy.block, prompt, 2)
        seconds = statistics.median(made.run(found.policy.block, prompt, output).seconds for _ in range(3))
    return found.prediction.throughput, found.policy.block * output / seconds


def accelerate(shape: ModelShape) -> float:
    """Tokens per second of a batch, extrapolated."""
    from accelerate import cpu_offload
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        ffn_dim=shape.ffn_size,
        num_attention_heads=shape.num_q_heads,
        max_position_embeddings=shape.max_context,
        word_embed_proj_dim=shape.hidden_size,
    )
    with torch.device("meta"):
        model = OPTForCausalLM(config).to(torch.bfloat16)
    model = model.to_empty(device="cpu")
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(0.001)
    model = cpu_offload(model.eval(), execution_device=torch.device("cuda"))
    ids = torch.randint(0, shape.vocab_size, (PEER_BATCH, PROMPT), device="cuda")
    seconds = []
    for new in (1, 3):
        begun = time.perf_counter()
        model.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=False)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    step = (seconds[1] - seconds[0]) / 2
    return PEER_BATCH * OUTPUT / (seconds[0] + (OUTPUT - 1) * step)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", default="quire,accelerate")
    parser.add_argument("--near", type=float, default=0.05, help="share of the weights on the GPU (default: 0.05)")
    parser.add_argument("--batch", type=int, default=64, help="sequences of a block (default: 64)")
    parser.add_argument("--micro-batch", type=int, default=16)
    parser.add_argument("--layers", type=int, default=OPT_30B.num_layers, help="fewer for a trial")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    require_gpu()
    torch.cuda.set_per_process_memory_fraction(MEMORY / torch.cuda.get_device_properties(0).total_memory)
    shape = dataclasses.replace(OPT_30B, layers=OPT_30B.layers[: given.layers])
    bus, speed = floors(shape)
    print(f"pinned copies {bus / 1e9:.1f} GB/s, products {speed / 1e12:.0f} TFLOPS\n")
    rows, record, ours = [], {"benchmark": "gpu_offload", "bus": bus, "speed": speed}, 0.0
    for side in given.sides.split(","):
        if side == "quire":
            found = quire(shape, given, "cuda")
            ours = found["tokens"] / found["seconds"]
            flops = 2 * shape.num_parameters * given.batch * (PROMPT + OUTPUT - 1)
            floor = max(found["weights_bytes_read"] / bus, flops / speed)
            rows.append([side, f"{ours:.2f}", f"{floor / found['seconds']:.2f}", ""])
            record |= found | {"floor_seconds": floor}
            gc.collect()
            torch.cuda.empty_cache()
            continue
        if side == "planned":
            with tempfile.TemporaryDirectory() as folder:
                said, measured = planned(Path(folder), SHAPE, PLANNED_MEMORY, PROMPT, OUTPUT)
            rows.append([f"planned, {said:.2f} predicted", f"{measured:.2f}", "", ""])
            print(f"predicted {said:.2f} tokens/s, measured {measured:.2f} ({said / measured - 1:+.1%})")
            record |= {"predicted": said, "planned": measured}
            continue
        try:
            peer = accelerate(shape)
        except ImportError as error:
            rows.append([side, str(error), "", ""])
            continue
        rows.append([side, f"{peer:.2f}", "", f"{ours / peer:.1f}"])
        record["accelerate"] = peer
    print(format_table(["side", "tokens/s", "of floor", "quire / side"], rows))
    print("must: at least 30 times accelerate, at least 0.75 of the floor, predicted within 15 %")
    if given.json:
        append_record(given.json, record)


if __name__ == "__main__":
    main()
