"""Placements of OPT-13B, 66B and 175B on 32 A100 with the targets of DistServe's evaluation, beside the paper's.

    python benchmarks/placement_paper.py [--models opt-13b,opt-66b,opt-175b] [--seconds 240] [--processes 2]

Four machines of eight A100 with 80 GB, 25 Gb/s between machines; for Algorithm 1 800 Gb/s, since it takes caches to
travel in negligible time. Requests: Poisson arrivals; lengths are log-normal with the mean input and output of each
dataset (ShareGPT 755 and 200, HumanEval 171 and 98, LongBench 1,738 and 91), because the datasets are not at hand:
their spread is an assumption (--spread is the standard deviation of the logarithm; it is made smaller where requests of
these means would not fit into 2,048 tokens). Latencies are modelled from the A100's data sheet, with shares of the peak
fitted to the paper's profile of OPT-13B.

`apart` is Algorithm 1, `pairs` Algorithm 2, `mixed` instances that do both. Paper: arXiv 2401.09670, Table 1 (targets)
and section 6.2; its goodputs are ratios to vLLM, so only divisions can be compared.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from common import ROOT, format_table
from queues import poisson_arrivals

from quire.workload.workload import Arrivals, Floats, Ints, Workload

CASES = {
    "opt-13b": ("ShareGPT", 755, 200, 0.25, 0.1, "2 x 1; 1 x 1"),
    "opt-66b": ("ShareGPT", 755, 200, 2.5, 0.15, "4 x 1; 2 x 2"),
    "opt-66b-code": ("HumanEval", 171, 98, 0.125, 0.2, ""),
    "opt-66b-long": ("LongBench", 1738, 91, 15.0, 0.15, ""),
    "opt-175b": ("ShareGPT", 755, 200, 4.0, 0.2, "3 x 3; 4 x 3"),
}
"""Model: dataset, mean input and output, TTFT, TPOT, and the paper's tp x pp of prompts and of decoding."""

NEAR = 0.01
"""Relative error of a mean length."""

MACHINES = """\
[nodes]
count = 4
gpus = 8
gpu_memory = "80GiB"
device = "a100-80g"

[network]
inside = "300GB"
between = "{between}"
fast = {fast}
"""


NETWORKS = {True: {"fast": "true", "between": "100GB"}, False: {"fast": "false", "between": "3.125GB"}}
"""Between machines: 800 Gb/s, over which caches travel in negligible time, or 25 Gb/s."""

LIMIT = 2048
"""Tokens of prompt and answer together: OPT's context."""


def workload(name: str, means: tuple[int, int], spread: float, count: int = 4000) -> Workload:
    """Log-normal lengths that fit into the context and have these means; the spread is smaller where none else fit."""
    rng = np.random.default_rng(0)
    units = rng.standard_normal((2, 8 * count))
    while (lengths := with_means(units, np.array(means), spread, count)) is None:
        spread *= 0.9
    num_in, num_out = lengths
    print(
        f"{name}: mean lengths {num_in.mean():.0f} and {num_out.mean():.0f}, spread {spread:.2f}", file=sys.stderr,
        flush=True,
    )  # fmt: skip
    at, zeros = poisson_arrivals(1.0, count, rng), np.zeros(count)
    columns = Arrivals(at, zeros, num_out, np.full(count, -1), np.arange(count + 1), np.arange(count), num_in)
    return Workload(name, columns)


def with_means(units: Floats, means: Floats, spread: float, count: int) -> Ints | None:
    """The first lengths that fit, i64 [2, count], from medians with which they have these means; None if none have.

    units  standard normal numbers, [2, n]
    """
    medians = means.astype(np.float64)
    for _ in range(200):
        lengths = np.ceil(medians[:, None] * np.exp(spread * units)).astype(np.int64)
        found = lengths[:, lengths.sum(axis=0) <= LIMIT][:, :count]
        if found.shape[1] < count:
            return None
        found_means = found.mean(axis=1)
        if (np.abs(found_means / means - 1) < NEAR).all():
            return found
        medians *= means / found_means
    return None


def main() -> None:
    """Searches and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(CASES))
    parser.add_argument("--algorithms", default="apart,pairs,mixed")
    parser.add_argument("--seconds", type=float, default=240.0, help="of each search (default: 240)")
    parser.add_argument("--requests", type=int, default=300, help="of each simulation (default: 300)")
    parser.add_argument("--spread", type=float, default=0.8)
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    rows = []
    for case in args.models.split(","):
        dataset, mean_in, mean_out, ttft, tpot, paper = CASES[case]
        model = "-".join(case.split("-")[:2])
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            load = workload(dataset, (mean_in, mean_out), args.spread)
            load.write(folder / "trace.jsonl")
            for algorithm in args.algorithms.split(","):
                machines, output = folder / f"{algorithm}.toml", folder / f"{algorithm}.json"
                machines.write_text(MACHINES.format(**NETWORKS[algorithm != "pairs"]))
                command = [
                    sys.executable, "-m", "quire", "plan", "placement", model, "--cluster.file", machines, "--trace",
                    folder / "trace.jsonl", "--slo.ttft", ttft, "--slo.tpot", tpot, "--algorithm", algorithm,
                    "--plan.seconds", args.seconds, "--requests", args.requests, "--processes", args.processes,
                    "--model.max_context", 2048, "--output", output,
                ]  # fmt: skip
                done = subprocess.run(
                    [*map(str, command)], capture_output=True, text=True, env={"PYTHONPATH": str(ROOT / "src")},
                    check=False,
                )  # fmt: skip
                if done.returncode:
                    rows.append(
                        [model, dataset, algorithm, (done.stderr.strip().splitlines() or ["?"])[-1], "", "", "", ""]
                    )
                else:
                    rows.append([model, dataset, algorithm, *described(json.loads(output.read_text())), paper])
                print(rows[-1], file=sys.stderr, flush=True)
    head = ["model", "lengths", "algorithm", "instances (tp x pp)", "requests/s a GPU", "met", "not tried", "paper"]
    print(format_table(head, rows))


def described(placement: dict[str, object]) -> list[object]:
    """The cells of a placement."""
    instances, predicted, made = (placement[key] for key in ("instances", "predicted", "made"))
    assert isinstance(instances, list) and isinstance(predicted, dict) and isinstance(made, dict)
    text = "; ".join(f"{each['count']} {each['role']} {each['tp']} x {each['pp']}" for each in instances)
    untried = sum(each["why"] == "untried" for each in made.get("rejected", []))
    return [text, f"{predicted['rate_per_unit']:.3f}", f"{predicted['attainment']:.3f}", untried]


if __name__ == "__main__":
    main()
