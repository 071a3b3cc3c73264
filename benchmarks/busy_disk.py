"""Decoding while the disk is busy: time per output token beside requests that are fetched and demoted.

    python benchmarks/busy_disk.py                          # five rounds: about 4 minutes
    python benchmarks/busy_disk.py --codec nuq3
    python benchmarks/busy_disk.py --quick

Four requests decode 1,500 tokens each. Beside them a visitor arrives with every 25th token. It asks for one token after
one of 24 prompts of 1,025 tokens, in turn; one visitor in eight asks after a new prompt of 257 tokens instead. Visitors
are tied to tokens, not to time, so that every side has the same ones at the same steps. Steps that compute a new prompt
are one in 200: too few to decide p99.

    moving   the tier is on, and all prompts are on disk. The arena has room for what decodes and for four prompts, so
             every visitor's chunks are fetched, and evict another's; new prompts are written
    near     the same requests with the tier off and an arena that holds everything: nothing moves
    alone    the four requests without visitors

The marks compare `moving` with `near`. Against `alone` they would measure what a visitor's own tokens cost in a step:
each computes the last token of a known prompt, or all of a new one. `alone` is shown for those who want that number.

Time per output token is the time between two tokens of one decoding request. p50 and p99 are of all four requests
together, while all of them decode. Cached tokens are the visitors'. `store's share` is the CPU time of the store's
threads as a share of the process's, in the same time. Sides take turns, in an order that rotates; each has a fresh
engine and folder. Ratios are medians of the ratios within a round. The exit status is 1 if a mark is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import append_record, format_table, median
from tiers import (
    Mark,
    OtherLoad,
    arena_need,
    conditions,
    disk_change,
    disk_counters,
    disk_options,
    engine_options,
    exit_status,
    fresh_folder,
    marks_table,
    parse_tier,
    random_prompts,
    ratios,
    read_sides,
    tier_arguments,
    token_ids,
)

from quire.async_llm import AsyncLLM
from quire.engine.params import SamplingParams

MOVING, NEAR, ALONE = "moving", "near", "alone"
SIDES = (MOVING, NEAR, ALONE)

DECODING = 4
DECODING_PROMPT = 64
NEAR_PROMPTS = 4
"""Prompts of visitors that the small arena has room for."""

WRITTEN_SECONDS = 120.0

Figures = dict[str, float]


class Clock:
    """The times of a request's tokens, and its cached tokens by tier. `on_token` gets the number of tokens so far."""

    def __init__(self, on_token: Callable[[int], None] = lambda count: None) -> None:
        self.times: list[float] = []
        self.cached: dict[str, int] = {}
        self._on_token = on_token

    async def follow(self, llm: AsyncLLM, prompt: list[int], output: int) -> None:
        """Runs a request to its end."""
        params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True, detokenize=False)
        async for item in llm.generate({"prompt_token_ids": prompt}, params):
            now = time.perf_counter()
            for _ in item.outputs[0].token_ids:
                self.times.append(now)
                self._on_token(len(self.times))
            self.cached = item.cached_by_tier


class Visitors:
    """Requests that come beside those that decode."""

    def __init__(self, llm: AsyncLLM, given: argparse.Namespace, known: list[list[int]], new: list[list[int]]) -> None:
        self._llm, self._given, self._known, self._new = llm, given, known, new
        self._clocks: list[Clock] = []
        self._tasks: list[asyncio.Task[None]] = []
        self.is_open = False

    def come(self, num_tokens: int) -> None:
        """Sends the next visitor, if it is its turn after so many tokens of a decoding request."""
        if not self.is_open or num_tokens % self._given.every:
            return
        number, every = len(self._clocks), self._given.new_every
        is_new = number % every == every - 1
        prompt = self._new[number // every % len(self._new)] if is_new else self._known[number % len(self._known)]
        self._clocks.append(Clock())
        self._tasks.append(asyncio.create_task(self._clocks[-1].follow(self._llm, prompt, 1)))

    async def leave(self) -> list[Clock]:
        """Sends no more, and cancels those without an answer. Returns the others."""
        self.is_open = False
        answered = [clock for clock in self._clocks if clock.times]
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        return answered


async def fill(llm: AsyncLLM, known: list[list[int]], num_chunks: int | None) -> None:
    """Computes all known prompts. Waits until the disk has their chunks, if a number is given."""
    for prompt in known:
        await Clock().follow(llm, prompt, 1)
    begun = time.monotonic()
    while num_chunks is not None and disk_counters(llm.stats())["chunks"] < num_chunks:
        if time.monotonic() - begun > WRITTEN_SECONDS:
            sys.exit(f"after {WRITTEN_SECONDS:.0f} s the disk has not all chunks: {disk_counters(llm.stats())}")
        await asyncio.sleep(0.1)


async def run(given: argparse.Namespace, side: str, seed: object) -> Figures:
    """One round of a side."""
    ids = token_ids(given.model)
    known = random_prompts(ids, given.prompts, given.prompt_tokens, (seed, "known"))
    new = random_prompts(ids, given.num_new, given.new_tokens, (seed, "new"))
    decoding = random_prompts(ids, DECODING, DECODING_PROMPT, (seed, "decoding"))
    small, large = given.needs
    options = engine_options(given, cache_codec=given.codec, cache_memory=small if side == MOVING else large)
    with fresh_folder(given.folder, 2 * large) as folder:
        if side == MOVING:
            options |= disk_options(folder, 2 * large, given.bandwidth)
        async with AsyncLLM(given.model, options) as llm:
            chunks = sum((len(prompt) - 1) // 64 for prompt in known)
            await fill(llm, known if side != ALONE else known[:1], chunks if side == MOVING else None)
            visitors = Visitors(llm, given, known, new)
            clocks = [Clock(visitors.come), *(Clock() for _ in decoding[1:])]
            requests = [
                asyncio.create_task(clock.follow(llm, prompt, given.output_tokens))
                for clock, prompt in zip(clocks, decoding, strict=True)
            ]
            while not all(clock.times for clock in clocks):
                await asyncio.sleep(0.001)
            begun, before, cpu = time.perf_counter(), llm.stats(), time.process_time()
            visitors.is_open = side != ALONE
            await asyncio.wait(requests, return_when=asyncio.FIRST_COMPLETED)
            ended, after, cpu = time.perf_counter(), llm.stats(), time.process_time() - cpu
            answered = await visitors.leave()
            await asyncio.gather(*requests)
    gaps = np.concatenate([np.diff([at for at in clock.times if begun <= at <= ended]) for clock in clocks])
    p50, p99 = np.percentile(gaps, [50, 99])
    moved = functools.partial(disk_change, before, after)
    return {
        "p50": float(p50),
        "p99": float(p99),
        "seconds": ended - begun,
        "visitors": len(answered),
        "cached": sum(sum(visitor.cached.values()) for visitor in answered),
        "fetched": sum(visitor.cached.get("disk", 0) for visitor in answered),
        "bytes_read": moved("bytes_read"),
        "bytes_written": moved("bytes_written"),
        "cpu_share": moved("cpu_seconds") / cpu,
    }


def needs_of(given: argparse.Namespace) -> tuple[int, int]:
    """Bytes of the small arena and of the large one."""
    options = engine_options(given, cache_codec=given.codec)
    decoding = DECODING * ((DECODING_PROMPT + given.output_tokens) // 64 + 1)
    per_prompt, per_new = given.prompt_tokens // 64, given.new_tokens // 64
    small, large = (
        arena_need(
            given.model,
            options,
            decoding + prompts * per_prompt + new * per_new,
            DECODING + prompts,
            DECODING + prompts + new,
        ).num_bytes
        for prompts, new in ((NEAR_PROMPTS, 1), (given.prompts, given.num_new))
    )
    return small, large


def marks_of(samples: dict[str, dict[str, list[float]]]) -> list[Mark]:
    """The claims. NaN where a side did not run."""
    moving, near = samples.get(MOVING, {}), samples.get(NEAR, {})

    def busy(name: str) -> list[float]:
        """Of the rounds in which the disk was read."""
        read = moving.get("bytes_read", [])
        return [value if each else math.nan for value, each in zip(moving.get(name, []), read, strict=True)]

    marks = [
        Mark(f"{name} of time per output token, moving / near", ratios(busy(name), near.get(name, [])), bound, True)
        for name, bound in (("p50", 1.05), ("p99", 1.3))
    ]
    return [*marks, Mark("store's share of CPU time", busy("cpu_share"), 0.05, True)]


def report(given: argparse.Namespace, samples: dict[str, dict[str, list[float]]], load: OtherLoad) -> str:
    """All tables."""
    rows = []
    for side, figures in samples.items():
        middle = {name: median(values) for name, values in figures.items()}
        rows.append(
            [
                side,
                f"{middle['p50'] * 1e3:.2f}",
                f"{middle['p99'] * 1e3:.2f}",
                f"{middle['seconds']:.1f}",
                f"{middle['visitors']:.0f}",
                f"{middle['cached']:.0f}",
                f"{middle['fetched']:.0f}",
                f"{middle['bytes_read'] / 2**20 / middle['seconds']:.0f}",
                f"{middle['bytes_written'] / 2**20 / middle['seconds']:.1f}",
                f"{middle['cpu_share']:.1%}",
            ]
        )
    head = ["side", "p50, ms", "p99, ms", "seconds", "visitors", "cached tokens", "from disk", "MiB/s read"]
    head += ["MiB/s written", "store's share"]
    small, large = given.needs
    text = format_table(head, rows, given.markdown)
    if MOVING in samples and not all(samples[MOVING]["bytes_read"]):
        text += "\n\nNOTHING WAS READ in a round: the disk was not busy."
    return (
        f"{text}\n\n{marks_table(marks_of(samples), given.markdown)}\n\n"
        f"{DECODING} requests decode {given.output_tokens} tokens each; {given.codec};"
        f" the arenas have {small >> 20} and {large >> 20} MiB.\n{conditions(given, load)}"
    )


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = tier_arguments(__doc__, rounds=5)
    parser.add_argument("--codec", default="dense", help="of sealed chunks (default: dense)")
    parser.add_argument("--output-tokens", type=int, default=1500, help="of each request that decodes")
    parser.add_argument("--prompts", type=int, default=24, help="known prompts of visitors")
    parser.add_argument("--prompt-tokens", type=int, default=1025, help="of a known prompt")
    parser.add_argument("--new-tokens", type=int, default=257, help="of a new prompt")
    parser.add_argument("--new-every", type=int, default=8, help="one visitor of so many has a new prompt")
    parser.add_argument("--every", type=int, default=25, help="tokens from one visitor to the next (default: 25)")
    parser.add_argument("--bandwidth", help="tiers.disk_bandwidth (default: not throttled)")
    parser.add_argument("--sides", default=",".join(SIDES), help="which to run (default: all)")
    given = parse_tier(parser, words, output_tokens=120, prompts=8, prompt_tokens=193, new_tokens=65, every=8)
    given.sides = read_sides(parser, given, SIDES)
    given.num_new = max(1, given.output_tokens // (given.every * given.new_every))
    given.needs = needs_of(given)
    return given


def main() -> int:
    """Measures and prints."""
    given = arguments()
    samples: dict[str, dict[str, list[float]]] = {side: {} for side in given.sides}
    load = OtherLoad()
    for number in range(given.rounds):
        first = number % len(given.sides)
        for side in given.sides[first:] + given.sides[:first]:
            figures: dict[str, Any] = asyncio.run(run(given, side, (given.seed, number)))
            for name, value in figures.items():
                samples[side].setdefault(name, []).append(value)
            shown = f"p50 {figures['p50'] * 1e3:.2f} ms, p99 {figures['p99'] * 1e3:.2f} ms"
            print(f"round {number + 1}/{given.rounds}  {side:7} {shown}", file=sys.stderr, flush=True)
    print(report(given, samples, load))
    if given.json:
        shape = {
            name: getattr(given, name) for name in ("output_tokens", "prompts", "prompt_tokens", "new_tokens", "every")
        }
        about = {"benchmark": "busy_disk", "model": Path(given.model).name, "codec": given.codec, **shape}
        for side, figures in samples.items():
            append_record(given.json, {**about, "side": side, "rounds": figures})
    return exit_status(given, marks_of(samples))


if __name__ == "__main__":
    sys.exit(main())
