"""Decode steps of the embedded model on a CPU: all layers in one foreign call, or layer by layer from Python.

    python benchmarks/stack_cpu.py [--rounds 5] [--threads 2] [--json FILE]

Median milliseconds per step over 64 steps at a context of 128, bfloat16, interleaved, one round to warm up. Needs a CPU
with bf16 dot products; others do not have this call.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from common import append_record, arguments, format_table, median

from quire import LLM, SamplingParams

STEPS = 64


def main() -> None:
    """Measures and prints."""
    args = arguments(__doc__).parse_args()
    options = {"model.dtype": "bfloat16", "runtime.threads": args.threads, "cache.memory": "512MiB"}
    llm = LLM("smollm2", options=options)
    engine = llm.engine
    stack = engine.runner.model._stack
    if stack is None:
        sys.exit("stack_cpu.py: this CPU has no bf16 dot products, hence no call for all layers")
    draw = random.Random(0)
    params = SamplingParams(max_tokens=STEPS + 1, temperature=0.0, ignore_eos=True)
    table = []
    for batch in (1, 8, 32):
        times: dict[str, list[float]] = {"one call": [], "layer by layer": []}
        for number in range(args.rounds + 1):
            for name, values in times.items():
                engine.runner.model._stack = stack if name == "one call" else None
                for index in range(batch):
                    engine.add(str(index), [draw.randrange(1000, 40000) for _ in range(128)], params)
                while engine.scheduler.waiting or any(each.num_pending > 1 for each in engine.scheduler.running):
                    engine.step()
                steps, start = engine.stats()["steps"], time.perf_counter()
                while engine.has_work:
                    engine.step()
                if number:
                    values.append((time.perf_counter() - start) * 1e3 / (engine.stats()["steps"] - steps))
        found = {name: median(values) for name, values in times.items()}
        table.append([batch, *(f"{value:.2f}" for value in found.values())])
        if args.json:
            append_record(args.json, {"benchmark": "stack_cpu", "batch": batch, "milliseconds": found})
    print(format_table(["batch", "one call", "layer by layer"], table))


if __name__ == "__main__":
    main()
