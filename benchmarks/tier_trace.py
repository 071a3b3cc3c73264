"""The Mooncake conversation trace with the disk tier: prompt tokens computed, and time.

    python benchmarks/tier_trace.py --data DIR                      # 1,000 requests, three rounds: about 35 minutes
    python benchmarks/tier_trace.py --data DIR --requests 200       # about 7 minutes
    python benchmarks/tier_trace.py --data DIR --quick              # 300 requests of 4 tokens a block: a minute

DIR has mooncake_conversation.jsonl. Prompts are those of trace_replay.py: 32 tokens for each block of 512, the same
tokens for the same hash. The requests are replayed one after another, with one token out. The arena has a quarter of
the distinct chunks of the trace; the disk has room for all, and is not throttled.

    infinite    simulated: a cache that never drops a chunk. A prompt of s tokens finds the longest beginning that it
                has in common with an earlier one, in whole chunks. At most s - 1 tokens in a dense cache,
                floor((s - 1) / 64) chunks in another one
    dropping    the engine without the tier: evicted chunks are lost
    disk        the engine with the tier, in a fresh folder

Sides take turns, in an order that rotates. Seconds are of the whole replay. Ratios are medians of the ratios within a
round. The exit status is 1 if a mark is missed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common import append_record, format_table, median
from tiers import (
    DROPPING,
    Mark,
    Need,
    OtherLoad,
    arena_need,
    conditions,
    disk_counters,
    disk_options,
    engine_options,
    exit_status,
    fresh_folder,
    marks_table,
    parse_tier,
    ratios,
    read_sides,
    tier_arguments,
    token_ids,
)
from trace_replay import TraceReplay, add_trace, count_chunks, count_matches, find_trace, make_prompts, scaled

from quire.cache.ledger import PAGE_TOKENS
from quire.llm import LLM
from quire.workload.traces import read_trace
from quire.workload.workload import Arrival

DISK = "disk"
SIDES = (DROPPING, DISK)

Figures = dict[str, float]


@dataclass(frozen=True)
class Infinite:
    """The simulated cache.

    prompt_tokens    of all requests
    computed_tokens  that it does not find
    num_chunks       distinct chunks
    """

    prompt_tokens: int
    computed_tokens: int
    num_chunks: int

    @classmethod
    def of(cls, requests: Sequence[Arrival], block_tokens: int, *, is_dense: bool) -> Infinite:
        """Counts what requests with whole blocks of this length match."""
        # Also where a chunk must be computed again, because it has a prompt's last token, it is held once.
        held, found = (count_matches(requests, block_tokens, is_dense=each) for each in (True, is_dense))
        prompt_tokens = sum(each.num_in for each in requests)
        return cls(prompt_tokens, prompt_tokens - sum(found), count_chunks(requests, held))


def replay(given: argparse.Namespace, side: str, need: Need) -> Figures:
    """One replay."""
    settings = engine_options(given, cache_codec=given.codec, cache_memory=need.num_bytes // 4)
    trace = TraceReplay(
        given.trace,
        given.model,
        settings,
        num_requests=given.requests,
        block_tokens=given.block_tokens,
        output_tokens=1,
    )
    options = trace.options
    with fresh_folder(given.folder, need.num_bytes) as folder:
        if side == DISK:
            options |= disk_options(folder, need.num_bytes)
        with LLM(given.model, options) as llm:
            row, _ = trace.measure(llm)
            disk = disk_counters(llm.stats())
    names = ("seconds", "computed_tokens", "matched_tokens", "evicted_bytes", "ttft_p50", "ttft_p99")
    counters = ("fetched_tokens", "bytes_read", "bytes_written", "cpu_seconds", "num_refused", "wasted_chunks")
    return {name: row[name] for name in names} | {name: disk.get(name, 0) for name in counters}


def marks_of(samples: dict[str, dict[str, list[float]]], infinite: Infinite) -> list[Mark]:
    """The claims. NaN where a side did not run."""
    disk, dropping = samples.get(DISK, {}), samples.get(DROPPING, {})
    computed = [tokens / infinite.computed_tokens for tokens in disk.get("computed_tokens", [])]
    seconds = ratios(disk.get("seconds", []), dropping.get("seconds", []))
    return [
        Mark("tokens computed, disk / infinite", computed, 1.02, at_most=True),
        Mark("seconds, disk / dropping", seconds, 1.02, at_most=True),
    ]


def report(
    given: argparse.Namespace,
    samples: dict[str, dict[str, list[float]]],
    infinite: Infinite,
    need: Need,
    load: OtherLoad,
) -> str:
    """All tables."""
    found = infinite.prompt_tokens - infinite.computed_tokens
    rows: list[list[object]] = [
        ["infinite", infinite.computed_tokens, f"{found / infinite.prompt_tokens:.1%}", *"-------"]
    ]
    for side, figures in samples.items():
        middle = {name: median(values) for name, values in figures.items()}
        rows.append(
            [
                side,
                f"{middle['computed_tokens']:.0f}",
                f"{middle['matched_tokens'] / infinite.prompt_tokens:.1%}",
                f"{middle['seconds']:.1f}",
                f"{middle['ttft_p50'] * 1e3:.0f}",
                f"{middle['ttft_p99'] * 1e3:.0f}",
                f"{middle['fetched_tokens']:.0f}",
                f"{middle['bytes_read'] / 2**20:.0f}",
                f"{middle['bytes_written'] / 2**20:.0f}",
                f"{middle['cpu_seconds']:.1f}",
            ]
        )
    head = ["cache", "tokens computed", "hit rate", "seconds", "first token p50, ms", "p99, ms", "from disk"]
    head += ["MiB read", "MiB written", "store's CPU s"]
    return (
        f"{format_table(head, rows, given.markdown)}\n\n"
        f"{marks_table(marks_of(samples, infinite), given.markdown)}\n\n"
        f"{given.requests} requests, {infinite.prompt_tokens} prompt tokens, {infinite.num_chunks} distinct chunks of"
        f" {need.chunk_bytes} bytes ({given.codec}); {given.block_tokens} tokens a block; the arena has"
        f" {need.num_bytes // 4 >> 20} MiB.\n"
        f"{conditions(given, load)}"
    )


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = tier_arguments(__doc__, rounds=3)
    add_trace(parser, requests=1000)
    parser.add_argument("--codec", default="dense", help="of sealed chunks (default: dense)")
    parser.add_argument("--sides", default=",".join(SIDES), help="which to run (default: both)")
    given = parse_tier(parser, words, requests=300, block_tokens=4)
    given.sides = read_sides(parser, given, SIDES)
    find_trace(parser, given)
    return given


def main() -> int:
    """Measures and prints."""
    given = arguments()
    requests = scaled(read_trace(given.trace, given.requests), given.block_tokens, 1)
    infinite = Infinite.of(requests, given.block_tokens, is_dense=given.codec == "dense")
    # A sequence's first chunk has a sidecar.
    prompts = make_prompts(requests, given.block_tokens, token_ids(given.model))
    num_firsts = len({tuple(prompt[:PAGE_TOKENS]) for prompt in prompts})
    options = engine_options(given, cache_codec=given.codec)
    need = arena_need(given.model, options, infinite.num_chunks, 1, num_firsts)
    samples: dict[str, dict[str, list[float]]] = {side: {} for side in given.sides}
    load = OtherLoad()
    for number in range(given.rounds):
        first = number % len(given.sides)
        for side in given.sides[first:] + given.sides[:first]:
            begun = time.monotonic()
            for name, value in replay(given, side, need).items():
                samples[side].setdefault(name, []).append(value)
            shown = f"{samples[side]['computed_tokens'][-1]:.0f} tokens computed, {samples[side]['seconds'][-1]:.1f} s"
            whole = f"{time.monotonic() - begun:.0f} s with start"
            print(f"round {number + 1}/{given.rounds}  {side:8}  {shown}, {whole}", file=sys.stderr, flush=True)
    print(report(given, samples, infinite, need, load))
    if given.json:
        about = {"benchmark": "tier_trace", "model": Path(given.model).name, "codec": given.codec}
        sizes = {"requests": given.requests, "block_tokens": given.block_tokens, "arena_bytes": need.num_bytes // 4}
        simulated = {"infinite_computed_tokens": infinite.computed_tokens, "num_chunks": infinite.num_chunks}
        for side, figures in samples.items():
            append_record(given.json, {**about, **sizes, **simulated, "side": side, "rounds": figures})
    return exit_status(given, marks_of(samples, infinite))


if __name__ == "__main__":
    sys.exit(main())
