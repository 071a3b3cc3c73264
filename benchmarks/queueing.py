"""The worked numbers of DistServe's analysis: parallelism and queues in closed form, and a simulated queue beside them.

    python benchmarks/queueing.py [--arrivals 400000] [--seeds 20]

Prompts of 0.1 s arrive at Poisson rates. `one` computes them on one device, `stages` on a pipeline of two (inter-op),
`faster` on two devices that are 1.6 times as fast together (intra-op), `copies` on two devices that get half of them
each. Then the same queue is simulated, and each line has the mean time to first token of all seeds beside the closed
form. The last table has DistServe's fitted seconds of OPT-13B, from its public code.
"""

from __future__ import annotations

import argparse
import sys

import numpy as np
from common import ROOT, format_table
from queues import (
    crossover,
    inter_op_ttft,
    intra_op_ttft,
    mean_ttft,
    mixed_ttft,
    rate_for,
    replicated_ttft,
    simulate_md1,
)

SERVICE, SPEEDUP, RATES = 0.1, 1.6, (2.0, 5.0, 8.0)
"""Seconds of a prompt, how much faster two devices are, and requests/s."""


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arrivals", type=int, default=400_000, help="of a simulated queue (default: 400000)")
    parser.add_argument("--seeds", type=int, default=20, help="simulated queues of each rate (default: 20)")
    args = parser.parse_args()

    def milliseconds(seconds: float) -> str:
        return f"{1e3 * seconds:.1f}"

    print(f"mean time to first token of prompts of {SERVICE} s, in ms")
    rows = [
        [f"{rate:g}", *map(milliseconds, (
            mean_ttft(rate, SERVICE), inter_op_ttft(rate, SERVICE), intra_op_ttft(rate, SERVICE, SPEEDUP),
            replicated_ttft(rate, SERVICE, 2),
        ))]
        for rate in RATES
    ]  # fmt: skip
    print(format_table(["requests/s", "one", "stages", "faster", "copies"], rows))
    print(f"5 requests/s of which half take 0.1 s and half 0.025 s: {milliseconds(mixed_ttft(5, [0.1, 0.025]))} ms")
    print("\nrate above which stages are better than devices that are faster together")
    speedups = (1.3, 1.5, 1.6, 1.8)
    print(format_table(["speed-up", "requests/s"], [[each, f"{crossover(SERVICE, each):.2f}"] for each in speedups]))

    print(f"\nsimulated, {args.seeds} x {args.arrivals:,} arrivals")
    rows = []
    for rate in RATES:
        exact = mean_ttft(rate, SERVICE)
        means = [float(simulate_md1(rate, SERVICE, args.arrivals, seed).mean()) for seed in range(args.seeds)]
        errors = [100 * (mean / exact - 1) for mean in means]
        rows.append([
            f"{rate:g}", milliseconds(exact), milliseconds(np.mean(means)), f"{np.mean(errors):+.3f}",
            f"{min(errors):+.3f} to {max(errors):+.3f}",
        ])  # fmt: skip
    print(format_table(["requests/s", "closed form", "simulated", "error %", "of single seeds %"], rows))

    sys.path.insert(0, str(ROOT))
    from tests.distserve_latencies import coefficients_of

    print("\nDistServe's fitted seconds of OPT-13B on one A100")
    opt = coefficients_of("opt-13b", 1)
    print(format_table(["step", "ms"], [
        ["a prompt of 512", f"{opt.prefill_ms(512, 512**2):.1f}"],
        ["two of 256 in one step", f"{opt.prefill_ms(512, 2 * 256**2):.1f}"],
        ["two of 256 one after the other", f"{2 * opt.prefill_ms(256, 256**2):.1f}"],
        ["32 decoding, context of 19,200", f"{opt.decode_ms(32, 19_200):.1f}"],
    ]))  # fmt: skip
    print(f"rate at which prompts of 73.1 ms have a mean time of 0.2 s: {rate_for(0.2, 0.0731):.2f} requests/s")


if __name__ == "__main__":
    main()
