"""Command lines that plan and simulate. All speeds are given and all random numbers come from seeds. No command
measures this machine, so two runs print the same bytes.

Knows the formats of latency models, profiles, logs of steps, traces and clusters, not quire.
"""

from __future__ import annotations

import json
import math
import platform
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from recorded.cases import Line, Places

COEFFICIENTS = {"base": 0.003, "rows_from_1": 8e-4, "prompt_pairs": 1e-7, "context": 2e-6, "unique": 1e-6}

LATENCY = {
    "format": 1, "about": {"threads": 1},
    "coefficients": COEFFICIENTS,
    "knots": [1], "residuals": {}, "ranges": {}, "counts": {}, "dropped": [], "paper": {},
    "links": {"shm": {"latency": 0.001, "bytes_per_second": 1e9}, "tcp": {"latency": 0.002, "bytes_per_second": 1e8},
              "disk": {"latency": 0.0005, "bytes_per_second": 5e7}},
}  # fmt: skip

OPT_30B = {
    "model_type": "opt", "vocab_size": 50272, "hidden_size": 7168, "ffn_dim": 28672, "num_hidden_layers": 48,
    "num_attention_heads": 56, "max_position_embeddings": 2048, "word_embed_proj_dim": 7168, "torch_dtype": "float16",
    "eos_token_id": 2, "bos_token_id": 2,
}  # fmt: skip

CPU = (
    "--model.dtype", "float32", "--runtime.device", "cpu", "--runtime.threads", "1", "--runtime.cpu_level", "v3",
)  # fmt: skip
SMALL = ("--scheduler.max_running", "16", "--scheduler.token_budget", "128", "--cache.memory", "4MiB")
TARGETS = ("--slo.ttft", "0.5", "--slo.tpot", "0.05")
APART = ("--cluster.prefill", "1", "--cluster.decode", "1")

FINGERPRINT = "0cacefc693e5a373dd6f6fd712d6daf3"
"""The fingerprint of the tiny model. A log of steps names the model of its engine."""


def plans_of(places: Places) -> list[Line]:
    """All command lines, in order: plans for this machine read the latency models that the first ones keep."""
    tiny = str(places.tiny)
    return [
        *_fitted(places, tiny),
        *_simulated(places, tiny),
        *_placed(places, tiny),
        *_offloaded(places, tiny),
        *_automatic(places, tiny),
    ]


def _fitted(places: Places, tiny: str) -> Iterator[Line]:
    """Latency models, fitted to logs of steps."""
    kinds: dict[str, dict[str, Any]] = {
        "dense": {},
        "g4": {"cache.codec": "g4"},
        "kept": {"retain.budget": 0.5},
        "disk": {"tiers.disk": "kv:64MiB"},
    }
    for name, options in kinds.items():
        log = places.file(f"steps-{name}.jsonl", steps_of(name, options))
        fit = ("bench", "latency", tiny, "--steps", log, "--output", f"fit-{name}.json", "--json", "rows.jsonl", *CPU)
        yield Line(f"bench/latency-{name}", fit, "plan", {f"fit-{name}.json": "plan", "rows.jsonl": "plan"})


def _simulated(places: Places, tiny: str) -> Iterator[Line]:
    """Simulations at given rates, and searches for the goodput."""
    latency = places.file("latency.json", json.dumps(LATENCY))
    slow = {name: 2 * each for name, each in COEFFICIENTS.items()}
    slower = places.file("slower.json", json.dumps({**LATENCY, "coefficients": slow}))
    trace = places.file("trace.jsonl", made_trace())
    azure, mooncake = places.file("azure.csv", _azure()), places.file("mooncake.jsonl", _mooncake())
    given = ("simulate", tiny, "--latency", latency, *CPU, *SMALL, *TARGETS, "--json")
    own = (*given, "--trace", trace, "--requests", "30")
    gpus = ("simulate", "opt-13b", "--hardware", "a100-80g", "--trace", trace, "--requests", "20", "--json", *TARGETS)
    kinds: dict[str, tuple[str, ...]] = {
        "rates": (*own, "--rates", "2,20,200"),
        "own-rate": own,
        "fitted": (*own, "--fit", "--rate", "5", "--seed", "3"),
        "goodput": (*own, "--goodput"),
        "goodput-apart": (*own, "--goodput", *APART),
        "apart": (*own, "--rates", "4,40", *APART),
        "several": (*own, "--rates", "20,80", *APART, "--cluster.mixed", "1"),
        "roles": (
            "simulate", tiny, "--latency", f"prefill={latency}", "--latency", f"decode={slower}", *CPU, *SMALL,
            "--json", "--trace", trace, "--rate", "9", *APART, *TARGETS,
        ),
        "codec": (*own, "--rate", "40", "--cache.codec", "g4"),
        "retained": (*own, "--rate", "40", "--retain.budget", "0.5", "--retain.profile_rows", "32"),
        "alone": (*own, "--rate", "40", "--cache.share", "false"),
        "disk-tier": (*own, "--rate", "40", "--tiers.disk", "kv:64MiB"),
        "azure": (*given, "--trace", azure, "--requests", "25", "--rate", "10"),
        "mooncake": (*given, "--trace", mooncake, "--requests", "20", "--rate", "10"),
        "gpus": gpus,
        "gpus-divided": (*gpus, "--parallel.tp", "2", "--parallel.pp", "2", *APART, "--network", "1GB"),
        "gpus-goodput": (*gpus, "--goodput"),
        "gpus-memory-tier": (*gpus, "--rate", "2", "--tiers.memory", "1GiB"),
    }  # fmt: skip
    for name, words in kinds.items():
        yield Line(f"simulate/{name}", words, "plan")
    yield Line("simulate/shown", tuple(word for word in (*own, "--rates", "4,40", *APART) if word != "--json"), "plan")


def _placed(places: Places, tiny: str) -> Iterator[Line]:
    """Placements, and a simulation of one."""
    trace, latency = str(places.folder / "trace.jsonl"), str(places.folder / "latency.json")
    gpus = places.file("gpus.toml", '[nodes]\ngpus = 2\ngpu_memory = "80GB"\ndevice = "a100-80g"\n')
    network = '[network]\ninside = "300GB"\nbetween = "3GB"\nfast = true\n'
    fast = places.file(
        "fast.toml", f'[nodes]\ncount = 2\ngpus = 2\ngpu_memory = "80GB"\ndevice = "a100-80g"\n{network}'
    )
    cores = places.file("cores.toml", f'[nodes]\ncount = 2\ncores = 2\nmemory = "1GiB"\n{network}')
    base = ("plan", "placement", "opt-13b", "--trace", trace, *TARGETS, "--requests", "16", "--json")
    here = (
        "plan", "placement", tiny, "--cluster.file", cores, "--trace", trace, *TARGETS, "--requests", "16",
        "--latency", latency, "--plan.seconds", "10000", *SMALL[:4],
    )  # fmt: skip
    kinds: dict[str, tuple[str, ...]] = {
        "mixed": (*base, "--cluster.file", gpus, "--algorithm", "mixed"),
        "apart": (*base, "--cluster.file", fast, "--algorithm", "apart"),
        "pairs": (*base, "--cluster.file", fast, "--algorithm", "pairs", "--rate", "1"),
        "ablation": (*base, "--cluster.file", gpus, "--ablation", "--seed", "2"),
        "cores": (*here, "--json"),
        "cores-rate": (*here, "--json", "--rate", "3"),
    }
    for name, words in kinds.items():
        file = f"placement-{name}.json"
        more = () if "--plan.seconds" in words else ("--plan.seconds", "10000")
        yield Line(f"placement/{name}", (*words, *more, "--output", file), "plan", {file: "plan"})
    yield Line("placement/shown", (*here, "--rate", "3"), "plan")
    again = ("--cluster.placement", "placement-apart.json", "--rate", "1", "--json")
    gpus_again = ("simulate", "opt-13b", "--hardware", "a100-80g", "--trace", trace, "--requests", "20", *TARGETS)
    yield Line("placement/simulated", (*gpus_again, *again), "plan")


def _offloaded(places: Places, tiny: str) -> Iterator[Line]:
    """Placements of weights, cache and activations."""
    config = places.file("opt/config.json", json.dumps(OPT_30B))
    machine = places.file("machine.json", json.dumps(_profile(tiny)))
    room = ("--hardware", "t4", "--plan.gpu", "16GiB", "--plan.cpu", "200GiB", "--plan.disk", "1500GiB")
    paper = ("plan", "offload", config, *room)
    here = ("plan", "offload", tiny, "--hardware", machine, *CPU, "--plan.disk", "1GiB")
    kinds: dict[str, tuple[str, ...]] = {
        "block": (*paper, "--micro-batch", "48", "--num-batches", "3"),
        "most": (*paper, "--micro-batch", "48", "--num-batches", "3", "--form", "max"),
        "slack": (*paper, "--micro-batch", "32", "--num-batches", "2", "--slack", "0.9"),
        "g4": (*paper, "--micro-batch", "48", "--num-batches", "3", "--cache.codec", "g4", "--model.weights", "g4"),
        "shared": (*here, "--plan.cpu", "64MiB", "--shared-tokens", "256", "--slack", "0.5"),
        "here": (*here, "--plan.cpu", "4MiB"),
        "here-weights": (*here, "--plan.cpu", "4MiB", "--only-weights", "--micro-batch", "4", "--num-batches", "1"),
    }
    for name, words in kinds.items():
        file = f"policy-{name}.json"
        yield Line(f"offload/{name}", (*words, "--json", "--output", file), "plan", {file: "plan"})
    yield Line("offload/shown", (*paper, "--micro-batch", "48", "--num-batches", "3"), "plan")


def _automatic(places: Places, tiny: str) -> Iterator[Line]:
    """Settings for a memory and a quality."""
    trace = str(places.folder / "trace.jsonl")
    plan = ("plan", "auto", tiny, "--trace", trace, *TARGETS, *CPU, "--plan.seconds", "0.001")
    gpu = ("plan", "auto", "opt-13b", "--hardware", "a100-80g", "--trace", trace, *TARGETS, "--plan.seconds", "10000")
    kinds: dict[str, tuple[str, ...]] = {
        "here": (*plan, "--plan.memory", "300MiB"),
        "lossless": (*plan, "--plan.memory", "300MiB", "--plan.quality", "0"),
        "seed": (*plan, "--plan.memory", "600MiB", "--plan.quality", "0.05", "--seed", "7"),
        "tiers": (*gpu, "--cache.codec", "dense", "--model.weights", "native", "--tiers.memory", "64GiB"),
        "gpus": (*gpu, "--cache.codec", "dense", "--model.weights", "native"),
        "gpus-seed": (
            *gpu,
            "--cache.codec",
            "dense",
            "--model.weights",
            "native",
            "--seed",
            "5",
            "--slo.attainment",
            "0.7",
        ),
    }
    for name, words in kinds.items():
        file = f"auto-{name}.toml"
        yield Line(f"auto/{name}", (*words, "--json", "--output", file), "plan", {file: "plan"})
    yield Line("auto/shown", (*plan, "--plan.memory", "300MiB"), "plan")


# ---- files -----------------------------------------------------------------------------------------------------------


def steps_of(name: str, options: dict[str, Any]) -> str:
    """A log of 900 steps of a tiny engine, with seconds by a formula and a little noise.

    name  of the kind; it determines how slow the engine is, and the noise
    """
    draw = random.Random(name)
    slower = draw.uniform(1.0, 1.5)
    settings = {**dict(zip(CPU[::2], CPU[1::2], strict=True)), "--attention.backend": "cpu"}  # as an engine resolves it
    lines: list[Any] = [
        {
            "model": FINGERPRINT,
            "options": {**{flag[2:]: value for flag, value in settings.items()}, **options},
            "transport": "",
            "processor": _processor(),
            "level": settings["--runtime.cpu_level"],
        }
    ]
    for place in range(900):
        kind = place % 3
        prompt = 0 if kind == 0 else draw.choice([16, 64, 256, 512])
        rows = 0 if kind == 1 else draw.choice([1, 2, 4, 8, 16])
        pairs, context = prompt * (prompt + 1) / 2, rows * draw.choice([32.0, 128.0, 512.0])
        seconds = 0.002 + 3e-4 * (prompt + rows) ** 0.9 + 2e-8 * pairs + 1e-6 * context
        work = [prompt, pairs, rows, context, context * 0.75, int(prompt > 0)]
        lines.append(
            [*work, slower * seconds * math.exp(draw.gauss(0, 0.03)), 2e7 if "tiers.disk" in options else None]
        )
    return "".join(json.dumps(line) + "\n" for line in lines)


def _processor() -> str:
    """The name of this machine's processor. Plans take models of the same processor only."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def made_trace() -> str:
    """A workload: prompts of some lengths, half of which begin alike."""
    lines: list[Any] = [{"workload": "made"}]
    for place in range(40):
        shared = [[1, 64]] if place % 2 else []
        own = [100 + place, 8 + place * 37 % 290]
        lines.append({"at": 0.2 * place, "prompt": [*shared, own], "num_out": 1 + place * 13 % 30})
    return "".join(json.dumps(line) + "\n" for line in lines)


def _azure() -> str:
    draw = random.Random(1)
    rows = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for place in range(40):
        rows.append(
            f"2023-11-16 18:15:{place:02d}.{draw.randrange(10**7):07d},{draw.randrange(5, 400)},{draw.randrange(1, 40)}"
        )
    return "\n".join(rows) + "\n"


def _mooncake() -> str:
    asked = [
        {"timestamp": 200 * place, "input_length": 512 * len(ids), "output_length": 5 + place, "hash_ids": ids}
        for place, ids in enumerate([[0, 1], [0, 1], [0, 2], [0, 3], [2, 1]] * 5)
    ]
    return "".join(json.dumps(each) + "\n" for each in asked)


def _profile(model: str) -> dict[str, Any]:
    """A made-up profile of this machine for the tiny model."""
    found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    rate = {"spread": 0.0}
    shape = {
        "architecture": "llama", "vocab_size": 265, "hidden_size": 64, "num_layers": 2, "num_q_heads": 4,
        "num_kv_heads": 2, "head_dim": 16, "ffn_size": 96,
    }  # fmt: skip
    conditions = {
        "model": model, "shape": shape, "dtype": "float32", "weights": "native", "layer_bytes": 123392.0,
        "codec": "dense", "processor": found[1] if found else "", "threads": 1, "kernels": "v3", "disk_bandwidth": None,
        "device": "",
    }  # fmt: skip
    disk = {
        "folder": "/tmp", "is_direct": True,
        "reads": [{"request_bytes": 1 << 20, "threads": 2, "rate": {"bandwidth": 9e7, **rate}}],
        "streamed": {"bandwidth": 1e8, **rate}, "writes": {"bandwidth": 5e7, **rate}, "request_seconds": 0.0,
    }  # fmt: skip
    attention = {"rows": [1, 8], "contexts": [32, 480], "seconds": [[1e-5, 1e-4], [8e-5, 8e-4]]}
    corrections = {
        "disk": 1.0, "prefill": 1.0, "decode": 1.0, "exposed": 0.0, "step_seconds": 0.0, "sequence_seconds": 0.0,
        "scratch": 1.0, "bus": 1.0,
    }  # fmt: skip
    run = {
        "disk_share": 0.5, "sequences": 4, "prompt_tokens": 64, "output_tokens": 8, "budget": 1024, "seconds": 1.0,
        "spread": 0.1, "predicted": 1.1, "memory": 0.0, "host_share": 0.0,
    }  # fmt: skip
    return {
        "format": 1, "made": "2026-11-25T00:00:00Z", "conditions": conditions, "disk": disk,
        "copy": {"bandwidth": 1e9, **rate}, "yardstick": 0.001,
        "products": {"counts": [1, 8, 64], "seconds": [0.002, 0.004, 0.02], **rate},
        "head": {"counts": [1, 64], "seconds": [0.001, 0.004], **rate}, "attention": attention,
        "prompt": {"counts": [32, 480], "seconds": [0.0001, 0.01], **rate}, "corrections": corrections, "runs": [run],
        "device": None,
    }  # fmt: skip
