"""Milliseconds of a decode step outside the model: scheduler, cache, attention's plan and answers.

    python benchmarks/step_cpu.py [--batch 128] [--steps 100] [--rounds 5] [--source DIR] [--json FILE]

The embedded model decodes greedily, without text, in one thread. Prompts differ in length, so that chunks end in
different steps. The result is each step's processor time minus that of the model's layers, output head and sampling.
--source is the `src` of another commit, which is timed in turns with this one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from common import ROOT, append_record, arguments, format_table, median

LENGTHS = 64


def measure(batch: int, steps: int) -> float:
    """The median over `steps` steps, in milliseconds."""
    from quire import LLM, SamplingParams

    options = {
        "runtime.threads": 1,
        "cache.memory": "2GiB",
        "scheduler.max_running": batch,
        "scheduler.token_budget": 4096,
    }
    with LLM("smollm2", options) as llm:
        engine: Any = llm.engine
        spent = [0.0]

        def timed(function: Any) -> Any:
            def call(*args: Any) -> Any:
                begun = time.process_time()
                found = function(*args)
                spent[0] += time.process_time() - begun
                return found

            return call

        runner = getattr(engine, "runner", engine)  # an earlier commit's engine may have no runner
        for name in ("hidden", "head"):
            object.__setattr__(runner.model, name, timed(getattr(runner.model, name)))
        runner.sampler.sample = timed(runner.sampler.sample)
        params = SamplingParams(max_tokens=steps + LENGTHS, temperature=0.0, ignore_eos=True, detokenize=False)
        for number in range(batch):
            prompt = [(7 * number + 3 * place) % 200 + 3 for place in range(100 + number % LENGTHS)]
            engine.add(str(number), prompt, params)
        while len(engine.scheduler.running) < batch or any(not each.num_generated for each in engine.scheduler.running):
            engine.step()
        found = []
        for _ in range(steps):
            spent[0], begun = 0.0, time.process_time()
            engine.step()
            found.append(1e3 * (time.process_time() - begun - spent[0]))
    return median(found)


def main() -> None:
    """Measures and prints."""
    parser = arguments(__doc__)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--steps", type=int, default=100, help="steps of a round")
    parser.add_argument("--source", type=Path, metavar="DIR", help="another commit's src, measured too")
    parser.add_argument("--measure", action="store_true", help="print one round's number")
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.batch, args.steps)))
        return
    sources = {"this": ROOT / "src"} | ({"other": args.source.resolve()} if args.source else {})
    found: dict[str, list[float]] = {name: [] for name in sources}
    command = [sys.executable, __file__, "--measure", "--batch", str(args.batch), "--steps", str(args.steps)]
    for _ in range(args.rounds):
        for name, source in sources.items():
            done = subprocess.run(
                command, env={**os.environ, "PYTHONPATH": str(source)}, capture_output=True, text=True, check=True
            )
            found[name].append(json.loads(done.stdout.splitlines()[-1]))
    print(
        format_table(
            ["source", "ms outside the model"], [[name, f"{median(each):.2f}"] for name, each in found.items()]
        )
    )
    if args.source:
        ratios = [this / other for this, other in zip(found["this"], found["other"], strict=True)]
        print(f"this / other, median of the rounds: {median(ratios):.2f}")
    if args.json:
        append_record(args.json, {"benchmark": "step_cpu", "batch": args.batch, "milliseconds": found})


if __name__ == "__main__":
    main()
