"""Measure the engine on this machine.

throughput: random tokens through the library, greedy, new ids in every repeat. Prefill is the time of prompts alone;
decode is the time of all tokens after each request's first, the same prompts' prefill taken off. The best of the
repeats counts: other work on the machine only ever slows a run down. An answer that fails or is cut short ends the
command with an error: its time would say nothing.

trace: the requests of a trace (JSON lines of timestamp, input_length, output_length and hash_ids of 512-token blocks),
scaled down, with prefixes shared. Prompt tokens found in the cache are held to a count made from the hash ids alone:
where requests run one after the other and nothing is evicted, a difference in any of them ends the command with status
1. Unless it is set, the cache is as large as all of it needs.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from quire.arguments import Arguments
from quire.cli import shared
from quire.cli.bench_throughput import Throughput
from quire.cli.bench_trace import Trace
from quire.errors import ConfigError

HELP = "measure the engine on this machine"
BENCHMARKS: dict[str, type[Throughput] | type[Trace]] = {"throughput": Throughput, "trace": Trace}


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
        help="tokens of each answer (default: 128; trace: the trace's, scaled)",
    )
    group.add_argument("--json", type=Path, metavar="FILE", help="append the results as JSON lines")
    for name, benchmark in BENCHMARKS.items():
        benchmark.add_arguments(parser.add_argument_group(name))


def run(args: argparse.Namespace) -> int:
    """Print what was measured; 1 if a benchmark found the engine wrong."""
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
    options = benchmark.options()
    from rich.console import Console

    from quire.llm import LLM

    console = Console(highlight=False, soft_wrap=True)
    with LLM(args.model, options, args.config) as llm:
        config = llm.config
        count = config.runtime.threads
        threads = f", {count} thread{'' if count == 1 else 's'}" if config.runtime.device == "cpu" else ""
        where = f"{config.runtime.device}, {config.attention.backend} attention{threads}"
        console.print(f"{llm.model_name}: {config.model.dtype} on {where}")
        rows, is_right = benchmark.measure(llm, console)
        rows = [row | {"model": llm.model_name, "dtype": config.model.dtype} for row in rows]
    if args.json is not None:
        with args.json.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    return 0 if is_right else 1
