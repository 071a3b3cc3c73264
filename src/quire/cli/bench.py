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
from pathlib import Path
from typing import Any

from quire.arguments import Arguments
from quire.cli import shared
from quire.cli.bench_compose import CompositionBenchmark
from quire.cli.bench_latency import LatencyBenchmark
from quire.cli.bench_throughput import ThroughputBenchmark
from quire.cli.bench_trace import TraceBenchmark
from quire.errors import ConfigError

BENCHMARKS: dict[
    str, type[ThroughputBenchmark] | type[TraceBenchmark] | type[LatencyBenchmark] | type[CompositionBenchmark]
] = {
    "throughput": ThroughputBenchmark,
    "trace": TraceBenchmark,
    "latency": LatencyBenchmark,
    "compose": CompositionBenchmark,
}

ACTION_FLAGS = {name: tuple(benchmark.DEFAULTS) for name, benchmark in BENCHMARKS.items()}
"""Names in the namespace of the flags that each benchmark takes."""


def add_arguments(parser: Arguments) -> None:
    """The arguments of the command. Flags of one benchmark that are not given leave no trace in the namespace."""
    parser.add_argument("name", choices=BENCHMARKS, metavar="NAME", help=f"one of: {', '.join(BENCHMARKS)}")
    shared.add_engine_arguments(parser)
    group = parser.add_argument_group("every benchmark")
    group.add_argument(
        "--output-tokens",
        type=int,
        default=argparse.SUPPRESS,
        metavar="N",
        help="tokens per answer (default: 128; trace: the trace's, scaled)",
    )
    group.add_argument("--json", type=Path, metavar="FILE", help="append the results as JSON lines")
    of_benchmarks = parser.add_argument_group("flags of the benchmark")
    for benchmark in BENCHMARKS.values():
        benchmark.add_arguments(of_benchmarks)


def run(args: argparse.Namespace) -> int:
    """Prints the results. Returns 1 if a benchmark found a wrong result."""
    chosen = BENCHMARKS[args.name]
    for name, other in BENCHMARKS.items():
        for flag in other.DEFAULTS:
            if flag not in chosen.DEFAULTS and flag in args:
                raise ConfigError(f"--{flag.replace('_', '-')} is for quire bench {name}, not for {args.name}")
    args = argparse.Namespace(**{**chosen.DEFAULTS, **vars(args)})
    benchmark = chosen(args)
    if shared.printed_config(args):
        return 0
    if args.json is not None:
        shared.check_writable(args.json)
    from rich.console import Console

    from quire.llm import LLM

    console = Console(highlight=False, soft_wrap=True)
    if isinstance(benchmark, CompositionBenchmark):
        rows, is_right = benchmark.run(console)
        _append(args.json, rows)
        return 0 if is_right else 1
    if isinstance(benchmark, LatencyBenchmark) and args.steps:
        _append(args.json, benchmark.fit_log(console))
        return 0
    with LLM(args.model, benchmark.options(), args.config) as llm:
        config = llm.config
        count = config.runtime.threads
        threads = f", {count} thread{'' if count == 1 else 's'}" if config.runtime.device == "cpu" else ""
        where = f"{config.runtime.device}, {config.attention.backend} attention{threads}"
        console.print(f"{llm.model_name}: {config.model.dtype} on {where}")
        rows, is_right = benchmark.measure(llm, console)
        rows = [row | {"model": llm.model_name, "dtype": config.model.dtype} for row in rows]
    _append(args.json, rows)
    return 0 if is_right else 1


def _append(file: Path | None, rows: list[dict[str, Any]]) -> None:
    if file is not None:
        with file.open("a", encoding="utf-8") as lines:
            lines.writelines(json.dumps(row) + "\n" for row in rows)
