"""`quire bench trace`: replays a trace with shared prefixes and checks the number of cached tokens of each request."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING, Any

from quire.arguments import Arguments
from quire.cli import shared
from quire.config import format_bytes, options_from
from quire.errors import ConfigError
from quire.planning.traces import TELLING_TOKENS

if TYPE_CHECKING:
    from rich.console import Console

SHOWN_DIFFERENCES = 5


def add_arguments(parser: Arguments) -> None:
    """Adds the flags of this benchmark."""
    group = parser.add_argument_group("benchmark")
    group.add_file("--trace", text="the trace; required")
    group.add_count("--requests", text="requests replayed, from the first", default=500)
    group.add_count("--block-tokens", text="tokens per 512 of the trace, a multiple of 4", default=32)
    text = "tokens per answer (default: the trace's, scaled)"
    group.add_argument("--output-tokens", type=int, metavar="N", help=text)
    pace = group.add_mutually_exclusive_group()
    pace.add_count("--concurrency", text="number of requests in flight (default: 1)")
    text = "follow the trace's timestamps, X times as fast"
    pace.add_argument("--speed", type=float, metavar="X", help=text)


def check(args: argparse.Namespace) -> None:
    """Raises ConfigError for invalid arguments."""
    if args.trace is None:
        raise ConfigError("quire bench trace needs --trace FILE")
    if args.block_tokens % TELLING_TOKENS:
        raise ConfigError(f"--block-tokens is {args.block_tokens}; it must be a multiple of {TELLING_TOKENS}")
    if args.speed is not None and not 0 < args.speed < math.inf:
        raise ConfigError(f"--speed is {args.speed}; it must be above 0")
    if args.output_tokens is not None and args.output_tokens < 1:
        raise ConfigError(f"--output-tokens is {args.output_tokens}; it must be at least 1")


def run(args: argparse.Namespace, console: Console) -> tuple[list[dict[str, Any]], bool]:
    """Prints a table. Returns it as one row, and whether the numbers agree where they must."""
    from quire.evaluation.trace_replay import TraceReplay

    replay = TraceReplay(
        args.trace,
        args.model,
        options_from(args),
        args.config,
        num_requests=args.requests,
        block_tokens=args.block_tokens,
        output_tokens=args.output_tokens,
        concurrency=args.concurrency or 1,
        speed=args.speed,
    )
    with shared.measured_model(args, console, replay.options) as llm, shared.progress("requests") as progress:
        row, wrong = replay.measure(llm, progress)
        row |= shared.model_facts(llm)
    shared.print_facts(_table(row, holds_all=replay.holds_all))
    for sent in wrong[:SHOWN_DIFFERENCES]:
        console.print(f"line {sent.request.line}: {sent.matched} tokens matched, {sent.expected} expected")
    return [row], not wrong


def _table(row: dict[str, Any], *, holds_all: bool) -> list[tuple[str, str, str]]:
    if row["is_exact"]:
        note = "must equal the matched tokens, in every request"
    elif row["evicted_bytes"] or row["lifetime"] is not None:
        note = "may differ from the matched tokens: prefixes were dropped"
    else:
        note = "may exceed the matched tokens: prefixes were still being computed"
    room = "holds the whole trace" if holds_all else f"{row['needed_bytes'] >> 20}MiB would hold it all"
    return [
        ("requests", f"{row['requests']:,}", f"blocks of {row['block_tokens']} tokens"),
        ("prompt tokens", f"{row['prompt_tokens']:,}", f"{row['prompt_tokens_per_second']:,.0f} a second"),
        ("output tokens", f"{row['output_tokens']:,}", f"{row['output_tokens_per_second']:,.0f} a second"),
        ("matched tokens", f"{row['matched_tokens']:,}", f"hit rate {row['hit_rate']:.1%}"),
        ("expected tokens", f"{row['expected_tokens']:,}", note),
        ("requests that differ", f"{row['differing_requests']:,}", ""),
        ("computed tokens", f"{row['computed_tokens']:,}", "of prompts"),
        ("seconds", f"{row['seconds']:,.1f}", ""),
        ("first token, p50", f"{row['ttft_p50'] * 1000:,.1f} ms", f"p99 {row['ttft_p99'] * 1000:,.1f} ms"),
        ("cache", format_bytes(row["cache_bytes"]), room),
        ("cached at the end", format_bytes(row["cached_bytes"]), ""),
        ("peak use", format_bytes(row["peak_bytes"]), "by running requests"),
        ("evicted", format_bytes(row["evicted_bytes"]), ""),
        ("saved", format_bytes(row["saved_bytes"]), "of keys and values"),
    ]
