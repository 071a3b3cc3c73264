"""Requests that begin with the same tokens, with `cache.share` and without it, and requests that share nothing.

    python benchmarks/shared_prefix.py [--rounds 5] [--threads 2] [--json FILE]

SmolLM2 in bfloat16; median seconds for all requests of a batch, new random tokens in every round, interleaved, one
round to warm up. Shared: 1,024 common tokens, 64 own, 64 out. Apart: 128 own, 128 out.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from common import append_record, format_table, median

from quire import LLM, SamplingParams

CASES = [("shared", 1024, 64, 64, batch) for batch in (1, 4, 16, 32)] + [
    ("apart", 0, 128, 128, 1),
    ("apart", 0, 128, 128, 32),
]


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    draw = random.Random(0)
    options = {"model.dtype": "bfloat16", "runtime.threads": args.threads, "cache.memory": "1600MiB"}
    engines = {share: LLM("smollm2", options={**options, "cache.share": share}) for share in (True, False)}
    table = []
    for name, common, own, out, batch in CASES:
        params = SamplingParams(max_tokens=out, temperature=0.0, ignore_eos=True)
        times: dict[bool, list[float]] = {share: [] for share in engines}
        for number in range(args.rounds + 1):
            prefix = [draw.randrange(1000, 40000) for _ in range(common)]
            prompts = [prefix + [draw.randrange(1000, 40000) for _ in range(own)] for _ in range(batch)]
            for share, llm in engines.items():
                start = time.perf_counter()
                llm.generate(prompts, params, use_tqdm=False)
                if number:
                    times[share].append(time.perf_counter() - start)
        found = {share: median(values) for share, values in times.items()}
        table.append([name, batch, f"{found[True]:.3f}", f"{found[False]:.3f}", f"{found[False] / found[True]:.2f}x"])
        if args.json:
            record = {"benchmark": "shared_prefix", "case": name, "batch": batch}
            append_record(args.json, {**record, "shared": found[True], "unshared": found[False]})
    print(format_table(["requests", "batch", "cache.share, s", "without, s", "gain"], table))


if __name__ == "__main__":
    main()
