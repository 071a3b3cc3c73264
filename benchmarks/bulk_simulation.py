"""A million requests over hundreds of simulated instances: how long it takes, and how much memory.

    python benchmarks/bulk_simulation.py --data DIR [--requests 1000000] [--instances 256] [--processes 1]

DIR has traces/AzureLLMInferenceTrace_conv.csv, whose lengths and gaps are fitted and drawn again. Instances serve
SmolLM2's shape with --memory of cache each; their latencies are those of --latency, a file of `quire bench latency`, or
made up. The router chooses for every request, as for real instances (state-aware routing reads one index of chunks).
With --processes N the same load is simulated with N seeds at once; the digest of a seed is the same whatever N is.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import resource
import time
from pathlib import Path

import numpy as np
from common import arguments, format_table, hardware, hardware_line

from quire.config import EngineConfig
from quire.engine.build import resolve
from quire.models.resolve import resolve_model
from quire.models.weights import open_model
from quire.simulation.bulk import BulkSimulation
from quire.simulation.engine import Plan
from quire.timing.latency import LatencyModel
from quire.workload.fitted import fit
from quire.workload.slo import Slo
from quire.workload.traces import read_workload

MADE_UP = LatencyModel(
    {}, {"base": 0.008, "rows_from_1": 1e-4, "prompt_pairs": 2e-8, "context": 1e-7}, (1,), {}, {}
)  # fmt: skip
"""8 ms a step and 0.1 ms a row."""


def one(given: tuple[argparse.Namespace, int]) -> list[object]:
    """One simulation. Returns a row of the table."""
    args, seed = given
    fitted = fit(read_workload(args.data / "traces" / "AzureLLMInferenceTrace_conv.csv"))
    load = fitted.sample(args.requests, seed, args.rate * args.instances)
    config = EngineConfig.from_options({
        "cache.memory": args.memory, "scheduler.max_running": 64, "scheduler.max_queue": 1 << 30,
        "runtime.threads": 1,
    })  # fmt: skip
    with open_model(resolve_model("smollm2")) as checkpoint:
        shape = checkpoint.shape
        resolved, sizes = resolve(config, shape, checkpoint)
    latency = MADE_UP if args.latency is None else LatencyModel.read(args.latency)
    begun, cpu = time.perf_counter(), time.process_time()
    found = BulkSimulation(load, Plan(shape, resolved, sizes, latency), args.instances).run()
    seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
    digest = hashlib.blake2b(found.first.tobytes() + found.last.tobytes(), digest_size=6).hexdigest()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
    busy = sum(found.utilisation().values()) / args.instances
    return [
        seed, f"{seconds:.0f}", f"{cpu:.0f}", f"{args.requests / seconds:.0f}", f"{peak:.2f}", f"{busy:.2f}",
        f"{found.attainment(Slo(1.0, 0.05)):.4f}", f"{np.median(found.ttft):.4f}", digest,
    ]  # fmt: skip


def main() -> None:
    """Runs what the command line asks for."""
    parser = arguments(__doc__)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR")
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--instances", type=int, default=256)
    parser.add_argument("--rate", type=float, default=2.0, help="requests/s of an instance (default: 2)")
    parser.add_argument("--memory", default="1GiB", help="cache of an instance (default: 1GiB)")
    parser.add_argument("--latency", type=Path, metavar="FILE")
    parser.add_argument("--processes", type=int, default=1)
    args = parser.parse_args()
    work = [(args, seed) for seed in range(args.processes)]
    if args.processes == 1:
        rows = [one(work[0])]
    else:
        with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
            rows = pool.map(one, work, chunksize=1)
    print(hardware_line(hardware()))
    print(f"{args.requests:,} requests, {args.instances} instances, {args.processes} processes")
    head = ["seed", "seconds", "of processor", "requests/s", "GiB", "busy", "met", "median TTFT s", "digest"]
    print(format_table(head, rows))


if __name__ == "__main__":
    main()
