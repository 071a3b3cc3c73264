"""Measure the engine on this machine.

throughput: random tokens through the library, greedy, new ids in every repeat. Prefill is the time of the prompts
alone. Decode is the time of all tokens after each request's first: total time minus prefill time of prompts of the same
length. The best repeat counts, because other work on the machine can only slow a run down. If an answer fails or is cut
short, the command ends with an error, because its time would mean nothing.

latency: makes the engine run steps of many kinds: prompts of many lengths, alone and together, in slices and behind
cached tokens; decoding batches with short, long and shared contexts; and prompts that join them. Prints their seconds,
and fits a latency model, which --output writes for the commands that predict. With --steps it measures nothing, and
fits the steps that a server has logged (runtime.step_log), with the time that answers take between them. With --tiers
it is quire plan hardware: it measures what offloading needs, and --output writes a profile.
"""

from __future__ import annotations

import argparse
import json

from quire.arguments import Arguments
from quire.cli import bench_latency, bench_throughput, shared

ACTIONS = {"throughput": bench_throughput, "latency": bench_latency}


def add_arguments(parser: Arguments) -> None:
    """The arguments of every benchmark."""
    shared.add_engine_arguments(parser)
    parser.add_file("--json", text="append the results as JSON lines")


def run(args: argparse.Namespace) -> int:
    """Prints the results."""
    benchmark = ACTIONS[args.action]
    if shared.printed_config(args, origins=benchmark.check(args)):
        return 0
    if args.json is not None:
        shared.check_writable(args.json)
    from rich.console import Console

    rows = benchmark.run(args, Console(highlight=False, soft_wrap=True))
    if args.json is not None:
        with args.json.open("a", encoding="utf-8") as lines:
            lines.writelines(json.dumps(row) + "\n" for row in rows)
    return 0
