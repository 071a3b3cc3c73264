"""Measure the engine on this machine.

throughput: random tokens through the library, greedy, new ids in every repeat. Prefill is the time of the prompts
alone. Decode is the time of all tokens after each request's first: total time minus prefill time of prompts of the same
length. The best repeat counts, because other work on the machine can only slow a run down. If an answer fails or is cut
short, the command ends with an error, because its time would mean nothing.

trace: replays the requests of a trace (JSON lines with timestamp, input_length, output_length and hash_ids of 512-token
blocks), scaled down, with prefix sharing. The number of cached prompt tokens of each request is compared with an
expected number, computed from the hash ids alone. If requests run one after the other and nothing is evicted, any
difference ends the command with exit code 1. By default the cache is large enough for the whole trace.

latency: makes the engine run steps of many kinds: prompts of many lengths, alone and together, in slices and behind
cached tokens; decoding batches with short, long and shared contexts; and prompts that join them. Prints their seconds,
and fits a latency model, which --output writes for the commands that predict. With --steps it measures nothing, and
fits the steps that a server has logged (runtime.step_log), with the time that answers take between them.

compose: runs one load with nothing on, with each of sharing, codec, retention, offload and instances, with each pair,
and with all five, in the same memory of all processes. Prints the sequences that the caches hold, the requests a second
that meet both latency targets, the perplexity, and the bytes. See docs/lab/composition.md.
"""

from __future__ import annotations

import argparse
import json

from quire.arguments import Arguments
from quire.cli import bench_compose, bench_latency, bench_throughput, bench_trace, shared

ACTIONS = {
    "throughput": bench_throughput,
    "trace": bench_trace,
    "latency": bench_latency,
    "compose": bench_compose,
}


def add_arguments(parser: Arguments) -> None:
    """The arguments of every benchmark."""
    shared.add_engine_arguments(parser)
    parser.add_file("--json", text="append the results as JSON lines")


def run(args: argparse.Namespace) -> int:
    """Prints the results. Returns 1 if a benchmark found a wrong result."""
    benchmark = ACTIONS[args.action]
    benchmark.check(args)
    if shared.printed_config(args):
        return 0
    if args.json is not None:
        shared.check_writable(args.json)
    from rich.console import Console

    rows, is_right = benchmark.run(args, Console(highlight=False, soft_wrap=True))
    if args.json is not None:
        with args.json.open("a", encoding="utf-8") as lines:
            lines.writelines(json.dumps(row) + "\n" for row in rows)
    return 0 if is_right else 1
