"""Time from a cold process to the first token, and peak memory, with the embedded model.

    python benchmarks/startup.py [--rounds 5] [--json FILE]

First token: wall seconds of `quire generate smollm2 PROMPT --max-tokens 1`, each time in a new process, with compiled
kernels. Memory: the peak resident size of a process that runs 64 requests of 256 tokens in and 64 out with batches of
every size; the bound is weights + arena + 600 MB. The exit status is 1 if a bound does not hold.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from common import append_record, format_table, median

MAX_SECONDS = 6.0
MAX_EXTRA_MB = 600
ARENA = "256MiB"

_LOAD = """
import json, random, resource, sys
from quire import LLM, SamplingParams
llm = LLM("smollm2", options={"cache.memory": sys.argv[1]})
rng = random.Random(0)
prompts = [[rng.randrange(1000, 40000) for _ in range(rng.randrange(1, 512))] for _ in range(64)]
params = [SamplingParams(max_tokens=rng.randrange(1, 128), ignore_eos=True) for _ in prompts]
llm.generate(prompts, params, use_tqdm=False)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
weights = llm.shape.weight_bytes(llm.config.model.dtype)
print(json.dumps({"peak": peak, "weights": weights, "arena": llm.stats()["cache"]["bytes_total"]}))
"""


def first_token_seconds() -> float:
    """One cold start."""
    command = [sys.executable, "-m", "quire", "generate", "smollm2", "The capital of France is", "--max-tokens", "1"]
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    first_token_seconds()
    seconds = median(first_token_seconds() for _ in range(args.rounds))
    cold_mb = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    done = subprocess.run([sys.executable, "-c", _LOAD, ARENA], check=True, stdout=subprocess.PIPE, text=True)
    load = json.loads(done.stdout)
    extra = (load["peak"] - load["weights"] - load["arena"]) / 1e6
    rows = [
        ["cold process to first token, s", f"{seconds:.2f}", f"{MAX_SECONDS}"],
        ["peak memory of that, MB", f"{cold_mb * 1.048576:.0f}", "-"],
        ["peak under load beyond weights + arena, MB", f"{extra:.0f}", f"{MAX_EXTRA_MB}"],
    ]
    print(format_table(["", "measured", "bound"], rows))
    if args.json:
        append_record(args.json, {"benchmark": "startup", "seconds": seconds, **load})
    return 0 if seconds < MAX_SECONDS and extra < MAX_EXTRA_MB else 1


if __name__ == "__main__":
    raise SystemExit(main())
