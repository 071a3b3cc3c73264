"""`quire bench throughput`: tokens per second of prefill and decode, with random tokens, through the library."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from quire.arguments import Arguments
from quire.cli import shared
from quire.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console


def add_arguments(parser: Arguments) -> None:
    """Adds the flags of this benchmark."""
    group = parser.add_argument_group("benchmark")
    for flag, nargs, default, text in (
        ("--batch", "*", [1, 8, 32], "batch sizes of the decode rows (default: 1 8 32)"),
        ("--prefill", "*", [512, 1536], "prompt lengths of the prefill rows (default: 512 1536)"),
        ("--input-tokens", None, 128, "prompt length of the decode rows (default: 128)"),
        ("--output-tokens", None, 128, "tokens per answer (default: 128)"),
        ("--repeats", None, 3, "runs per row; the best counts (default: 3)"),
    ):
        group.add_argument(flag, type=int, nargs=nargs, default=default, metavar="N", help=text)


def check(args: argparse.Namespace) -> dict[str, str]:
    """Raises ConfigError for invalid arguments. Returns the origins of the settings that it sets: none."""
    if min(*args.batch, *args.prefill, args.input_tokens, args.output_tokens - 1, args.repeats) < 1:
        raise ConfigError("the counts of quire bench must be at least 1, --output-tokens at least 2")
    return {}


def run(args: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    """Prints a line per row, and returns the rows."""
    from quire.measure.throughput import measure

    rows = []
    with shared.measured_model(args, console) as llm:
        for row in measure(llm, args.prefill, args.batch, args.input_tokens, args.output_tokens, args.repeats):
            phase, batch, length, speed = (
                row[name] for name in ("phase", "batch", "input_tokens", "tokens_per_second")
            )
            console.print(f"{phase:<8} batch {batch:>4}  prompt {length:>6}   {speed:>10,.1f} tokens/s")
            rows.append(row | shared.model_facts(llm))
    return rows
