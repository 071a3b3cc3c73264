"""Cost and savings of encoded pages on a CPU, compared with dense pages: decoding, prefill, encoding and capacity.

    python benchmarks/codecs_cpu.py [--codecs dense,nuq4,nuq3,nuq2,g4] [--batches 8,16] [--context 2048] [--rounds 5]
                                    [--memory 1GiB] [--threads 2] [--json FILE] [--markdown]

SmolLM2 in bfloat16, with one copy of its weights and an arena for each codec. If a codec needs a calibration and there
is none, it is made first.

decode    Each codec computes a batch of prompts that end 48 tokens before the context. Then all batches stay in memory
          and decode in turns, 16 steps at a time, after one turn each to warm up. A sequence fills a chunk every 64
          steps, so the time includes encoding
prefill   one prompt as long as the context, and one token, in turns
encoding  the prompt's pages encoded again, on all threads: the share of the dense prefill
capacity  More requests than fit into --memory are queued. The result is the number of sequences that run at once beyond
          the whole context, without preemption, and the peak size of the process beyond weights and arena. Each codec
          runs in its own process

Ratios are medians over the rounds, each within one round.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from common import append_record, arguments, commit, format_table, hardware, hardware_line, median

from quire import SamplingParams
from quire.attention.nuq import NuqHeads
from quire.cache.codecs import CODECS
from quire.cache.codecs.nuq import NuqCodec
from quire.cache.ledger import PAGE_TOKENS
from quire.config import EngineConfig, format_bytes, parse_bytes
from quire.engine.engine import Engine
from quire.kernels import runtime
from quire.measure.engines import load_engines

MODEL = "smollm2"
STEPS = 16
VOCABULARY = 49_000
PROMPT_STEPS = 3
"""Steps for a prompt besides those that decode."""

SPARE = 4
"""Tokens, per request of a batch, that the first may generate while the last prompt is computed."""

GREEDY = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}


def main() -> None:
    """Measures and prints."""
    parser = arguments(__doc__)
    parser.add_argument("--codecs", default=",".join(CODECS), help="the first is the baseline")
    parser.add_argument("--batches", default="8,16", help="sequences that decode together")
    parser.add_argument("--context", type=int, default=2048, help="tokens of each sequence")
    parser.add_argument("--memory", default="1GiB", help="arena of the capacity runs")
    parser.add_argument("--markdown", action="store_true", help="print tables as Markdown")
    parser.add_argument("--capacity-of", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.capacity_of:
        print(json.dumps(measure_capacity(given.capacity_of, given.context, given.memory, given.threads)))
        return
    codecs, batches = given.codecs.split(","), [int(count) for count in given.batches.split(",")]
    config = EngineConfig.from_options({"runtime.threads": given.threads, "cache.share": False})
    engines, _ = load_engines(MODEL, config, 2 * given.context, codecs, sequences=max(batches))
    chance = random.Random(0)
    found: dict[str, dict[str, list[float]]] = {}
    seconds = prefill(engines, given.context, given.rounds, chance)
    found["prefill, s"] = seconds
    encoded = {codec: encoding(engine, given.context, given.rounds) for codec, engine in engines.items()}
    for batch in batches:
        found[f"decode {batch}, tok/s"] = decode(engines, batch, given.context, given.rounds, chance)
    base = codecs[0]
    head = ["", *(word for codec in codecs for word in ((codec,) if codec == base else (codec, f"to {base}")))]
    rows = [[name, *cells(values, codecs, base)] for name, values in found.items()]
    row = ["encoding, ms (of the prefill)"]
    for codec in codecs:
        took = median(encoded[codec])
        row += ["-"] if codec == base else [f"{took * 1e3:.0f}", f"{took / median(seconds[base]):.1%}"]
    rows.append(row)
    print(format_table(head, rows, given.markdown))
    capacity = {codec: run_capacity(codec, given) for codec in codecs}
    print()
    columns = ["sequences at once", "bytes of one", "peak beyond weights and arena", f"times {base}"]
    print(
        format_table(
            [f"{given.context} tokens in {given.memory}", *columns],
            [
                [
                    codec,
                    capacity[codec]["sequences"],
                    format_bytes(int(capacity[codec]["bytes_of_one"])),
                    format_bytes(int(capacity[codec]["beyond"])),
                    f"{capacity[codec]['sequences'] / capacity[base]['sequences']:.2f}",
                ]
                for codec in codecs
            ],
            given.markdown,
        )
    )
    print(f"\n{hardware_line(hardware())}; {given.threads} threads; commit {commit()}; {time.strftime('%Y-%m-%d')}")
    if given.json:
        append_record(
            given.json,
            {
                "benchmark": "codecs_cpu",
                "context": given.context,
                "found": found,
                "encoding": encoded,
                "capacity": capacity,
            },
        )


def cells(values: dict[str, list[float]], codecs: Sequence[str], base: str) -> list[str]:
    """Medians; for all codecs but the baseline also the improvement over it, as a factor."""
    row = []
    for codec in codecs:
        row.append(f"{median(values[codec]):.3g}")
        if codec != base:
            row.append(f"{median(a / b for a, b in zip(values[codec], values[base], strict=True)):.2f}")
    return row


def prompt_of(length: int, chance: random.Random) -> list[int]:
    """A new random prompt."""
    return [chance.randrange(VOCABULARY) for _ in range(length)]


def prefill(engines: dict[str, Engine], context: int, rounds: int, chance: random.Random) -> dict[str, list[float]]:
    """Seconds of one prompt and one token, in turns."""
    times: dict[str, list[float]] = {codec: [] for codec in engines}
    for number in range(rounds + 1):
        prompt = prompt_of(context, chance)
        for codec, engine in engines.items():
            engine.add("it", prompt, SamplingParams(max_tokens=1, **GREEDY))
            began = time.perf_counter()
            while engine.has_work:
                engine.step()
            if number:
                times[codec].append(time.perf_counter() - began)
    return times


def encoding(engine: Engine, context: int, rounds: int) -> list[float]:
    """Seconds to encode the pages of a prompt, all layers and heads, on all threads."""
    codec = engine.scheduler.manager.table.sealed_codec
    if not isinstance(codec, NuqCodec):
        return [0.0] * rounds
    layers, heads = codec.page_bytes.shape
    count = context // PAGE_TOKENS
    k, v = torch.randn(2, count, PAGE_TOKENS, codec.head_dim).to(torch.bfloat16)
    tables = NuqHeads(codec)
    pages = torch.empty(count, int(codec.page_bytes.max()), dtype=torch.uint8)
    times = []
    for number in range(rounds + 1):
        began = time.perf_counter()
        for layer in range(layers):
            for head in range(heads):
                runtime.kernels().quire_nuq_encode(
                    tables.at(layer, head),
                    codec.head_dim,
                    runtime.DTYPE_IDS[torch.bfloat16],
                    k.data_ptr(),
                    v.data_ptr(),
                    count,
                    pages.data_ptr(),
                )
        if number:
            times.append(time.perf_counter() - began)
    return times


def decode(
    engines: dict[str, Engine], batch: int, context: int, rounds: int, chance: random.Random
) -> dict[str, list[float]]:
    """Tokens per second of whole batches, in turns."""
    steps = STEPS * (rounds + 1)
    prompts = [prompt_of(context - 48, chance) for _ in range(batch)]
    for engine in engines.values():
        start_batch(engine, prompts, steps + SPARE * batch)
    rates: dict[str, list[float]] = {codec: [] for codec in engines}
    for number in range(rounds + 1):
        for codec, engine in engines.items():
            began = time.perf_counter()
            for _ in range(STEPS):
                engine.step()
            if number:
                rates[codec].append(batch * STEPS / (time.perf_counter() - began))
    for engine in engines.values():
        assert len(engine.scheduler.running) == batch, "a request ended while it was measured"
        assert engine.stats()["preemptions"] == 0, "requests were preempted: the cache is too small"
        for sequence in list(engine.scheduler.running):
            engine.abort(sequence.request.request_id)
    return rates


def start_batch(engine: Engine, prompts: Sequence[list[int]], max_tokens: int) -> None:
    """Computes all prompts. All later steps decode the whole batch."""
    for index, prompt in enumerate(prompts):
        engine.add(str(index), prompt, SamplingParams(max_tokens=max_tokens, **GREEDY))
    scheduler = engine.scheduler
    while scheduler.waiting or any(sequence.num_pending > 1 for sequence in scheduler.running):
        engine.step()


def run_capacity(codec: str, given: argparse.Namespace) -> dict[str, float]:
    """`measure_capacity` in a process of its own."""
    command = [sys.executable, __file__, "--capacity-of", codec, "--context", str(given.context)]
    command += ["--memory", given.memory, "--threads", str(given.threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure_capacity(codec: str, context: int, memory: str, threads: int) -> dict[str, float]:
    """Queues more requests than fit. Counts those that decode at once beyond their whole context when no more is
    admitted.
    """
    options = {"runtime.threads": threads, "cache.share": False, "cache.memory": memory, "scheduler.max_running": 512}
    engines, _ = load_engines(MODEL, EngineConfig.from_options(options), 2 * context, [codec])
    engine = engines[codec]
    chance = random.Random(0)
    arena = parse_bytes(memory)
    table = engine.scheduler.manager.table
    one = context // PAGE_TOKENS * table.chunk_bytes(table.sealed_codec) + table.sidecar_bytes
    fixed = engine.runner.model.shape.weight_bytes("bfloat16") + arena
    count = arena // one + 1
    # Sequences computed first decode until the last prompt is computed.
    params = SamplingParams(max_tokens=PROMPT_STEPS * count + PAGE_TOKENS, **GREEDY)
    for index in range(count):
        engine.add(str(index), prompt_of(context - 1, chance), params)
    scheduler, peak = engine.scheduler, 0
    while True:
        engine.step()
        peak = max(peak, resident())
        if all(sequence.num_computed >= context for sequence in scheduler.running):
            break
    assert scheduler.waiting, "all requests ran at once: there were too few"
    assert engine.stats()["preemptions"] == 0, "a request was preempted"
    found = {"sequences": len(scheduler.running), "bytes_of_one": one, "beyond": max(0, peak - fixed)}
    return {**found, "arena": arena}


def resident() -> int:
    """Resident bytes of this process."""
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * 4096


if __name__ == "__main__":
    main()
