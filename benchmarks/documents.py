"""Questions about documents that do not fit the cache: requests per second with the disk tier, and without it.

    python benchmarks/documents.py                                  # every cell, three rounds: about an hour
    python benchmarks/documents.py --codecs dense --bandwidths dropping,200MB
    python benchmarks/documents.py --quick

64 prompts of 2,048 random tokens are each asked five times, in a random order that the seed decides, with 16 tokens
out. The arena has a quarter of what all prompts need in the codec at hand, by the engine's own page sizes, slabs and
open chunks included. A cell is a codec and a bandwidth of the disk; `dropping` is the same without the tier, where
evicted chunks are lost. Every run has a fresh engine and a fresh folder. Cells take turns, in an order that rotates.

--concurrency clients (default: 4) each send their next request when the last one is answered. The other choice,
everything at once (--concurrency 0), is less fair. As many requests run as the arena has room for, so nothing idle is
left in it, and dropping could not find what it computed a moment ago. And a queue of hundreds hides every transfer
behind other requests' work. Four clients leave dropping three quarters of the arena as a cache, and leave the tier
three requests to hide behind.

A run lasts from the first request to the last answer; starting, and a short request to warm up, do not count. Ratios
are medians of the ratios within a round. `same answers` counts those equal to the answers of the codec's first cell.
The exit status is 1 if a mark is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import append_record, format_table, median
from tiers import (
    DROPPING,
    Mark,
    Need,
    OtherLoad,
    arena_need,
    conditions,
    disk_change,
    disk_options,
    engine_options,
    exit_status,
    fresh_folder,
    marks_table,
    parse_tier,
    random_prompts,
    ratios,
    tier_arguments,
    token_ids,
)

from quire.async_llm import AsyncLLM
from quire.engine.params import SamplingParams

WARM_TOKENS = 32
"""Less than a chunk, so that nothing of the warm-up is stored."""


@dataclass(frozen=True)
class Cell:
    """A codec, and the bandwidth of the disk; `dropping` is without the tier, `none` not throttled."""

    codec: str
    bandwidth: str

    @property
    def name(self) -> str:
        """Its name in tables and records."""
        return f"{self.codec} {self.bandwidth}"


Figures = dict[str, float]
Results = dict[Cell, dict[str, list[float]]]


def order_of(given: argparse.Namespace, number: int) -> list[int]:
    """The document of each request of a round."""
    asked = [document for document in range(given.documents) for _ in range(given.asks)]
    random.Random(repr((given.seed, "order", number))).shuffle(asked)
    return asked


@dataclass(eq=False)
class Answer:
    """The tokens of an answer, and the cached tokens of its prompt by tier."""

    token_ids: list[int] = field(default_factory=list)
    cached_by_tier: dict[str, int] = field(default_factory=dict)


async def ask_all(
    llm: AsyncLLM, prompts: Sequence[list[int]], asked: Sequence[int], output: int, clients: int
) -> tuple[float, list[Answer]]:
    """Seconds until all requests are answered, and the answers. Each client sends one request at a time."""
    params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True, detokenize=False)
    answers = [Answer() for _ in asked]
    todo = iter(enumerate(asked))

    async def client() -> None:
        for index, document in todo:
            async for item in llm.generate({"prompt_token_ids": prompts[document]}, params):
                answers[index].token_ids += item.outputs[0].token_ids
                answers[index].cached_by_tier = item.cached_by_tier

    begun = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return time.perf_counter() - begun, answers


async def run(
    given: argparse.Namespace, cell: Cell, need: Need, prompts: Sequence[list[int]], asked: Sequence[int]
) -> tuple[Figures, list[Answer]]:
    """One run of a cell."""
    with fresh_folder(given.folder, need.num_bytes) as folder:
        options = engine_options(given, cache_codec=cell.codec, cache_memory=need.num_bytes // 4)
        if cell.bandwidth != DROPPING:
            options |= disk_options(folder, need.num_bytes, None if cell.bandwidth == "none" else cell.bandwidth)
        async with AsyncLLM(given.model, options) as llm:
            await ask_all(llm, [prompts[0][:WARM_TOKENS]], [0], 2, 1)
            before = llm.stats()
            seconds, answers = await ask_all(llm, prompts, asked, given.output_tokens, given.concurrency or len(asked))
            after = llm.stats()
    assert all(len(answer.token_ids) == given.output_tokens for answer in answers), "an answer is not complete"
    moved = functools.partial(disk_change, before, after)
    return {
        "rate": len(asked) / seconds,
        "computed": after["prefill_tokens_computed"] - before["prefill_tokens_computed"],
        "cached": after["prefill_tokens_cached"] - before["prefill_tokens_cached"],
        "fetched": sum(answer.cached_by_tier.get("disk", 0) for answer in answers),
        "bytes_read": moved("bytes_read"),
        "bytes_written": moved("bytes_written"),
        "store_seconds": moved("cpu_seconds"),
    }, answers


def marks_of(results: Results) -> list[Mark]:
    """The claims. NaN where a cell did not run."""

    def of(codec: str, bandwidth: str, figure: str = "rate") -> list[float]:
        return results.get(Cell(codec, bandwidth), {}).get(figure, [])

    codecs = list(dict.fromkeys(cell.codec for cell in results))
    marks = [Mark(f"{codec}: 200MB / dropping", ratios(of(codec, "200MB"), of(codec, DROPPING)), 2) for codec in codecs]
    for bandwidth, bound in (("400MB", 0.95), ("50MB", 1.15)):
        found = ratios(of("nuq3", bandwidth), of("dense", bandwidth))
        marks.append(Mark(f"nuq3 / dense at {bandwidth}", found, bound))
    read = ratios(of("nuq3", "200MB", "bytes_read"), of("dense", "200MB", "bytes_read"))
    return [*marks, Mark("bytes read, nuq3 / dense at 200MB", read, 0.26, at_most=True)]


def report(given: argparse.Namespace, results: Results, needs: dict[str, Need], load: OtherLoad) -> str:
    """All tables."""
    rows = []
    for cell, samples in results.items():
        middle = {name: median(values) for name, values in samples.items()}
        base = results.get(Cell(cell.codec, DROPPING), {}).get("rate", [])
        ratio = median(ratios(samples["rate"], base))
        rows.append(
            [
                cell.name,
                needs[cell.codec].num_bytes // 4 >> 20,
                f"{middle['rate']:.3f}",
                "-" if ratio != ratio else f"{ratio:.2f}",
                f"{middle['computed']:.0f}",
                f"{middle['cached']:.0f}",
                f"{middle['fetched']:.0f}",
                f"{middle['bytes_read'] / 2**20:.0f}",
                f"{middle['bytes_written'] / 2**20:.0f}",
                f"{middle['store_seconds']:.2f}",
                f"{middle['same']:.0%}",
            ]
        )
    head = ["codec, disk", "arena, MiB", "requests/s", "to dropping", "tokens computed", "cached", "from disk"]
    head += ["MiB read", "MiB written", "store's CPU s", "same answers"]
    clients = f"{given.concurrency} clients" if given.concurrency else "all at once"
    return (
        f"{format_table(head, rows, given.markdown)}\n\n{marks_table(marks_of(results), given.markdown)}\n\n"
        f"{given.documents} documents of {given.prompt_tokens} tokens, each asked {given.asks} times,"
        f" {given.output_tokens} tokens out; {clients}.\n{conditions(given, load)}"
    )


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = tier_arguments(__doc__, rounds=3)
    parser.add_argument("--codecs", default="dense,nuq3", help="of sealed chunks (default: dense,nuq3)")
    parser.add_argument(
        "--bandwidths",
        default=f"{DROPPING},50MB,200MB,400MB",
        help="of the disk, in bytes per second; none: not throttled (default: dropping,50MB,200MB,400MB)",
    )
    parser.add_argument("--documents", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--asks", type=int, default=5, help="how often each document is asked about")
    parser.add_argument("--output-tokens", type=int, default=16)
    parser.add_argument("--concurrency", type=int, default=4, help="clients; 0: everything at once")
    given = parse_tier(
        parser, words, documents=12, prompt_tokens=256, asks=3, codecs="dense", bandwidths=f"{DROPPING},200MB"
    )
    codecs, bandwidths = given.codecs.split(","), given.bandwidths.split(",")
    given.cells = [Cell(codec, bandwidth) for codec in codecs for bandwidth in bandwidths]
    return given


def measure(given: argparse.Namespace) -> tuple[Results, dict[str, Need]]:
    """All rounds."""
    prompts = random_prompts(token_ids(given.model), given.documents, given.prompt_tokens, given.seed)
    # The last token of an answer is never computed.
    chunks = given.documents * ((given.prompt_tokens + given.output_tokens - 1) // 64)
    needs = {
        codec: arena_need(
            given.model,
            engine_options(given, cache_codec=codec),
            chunks,
            given.concurrency or given.documents,
            given.documents,
        )
        for codec in dict.fromkeys(cell.codec for cell in given.cells)
    }
    results: Results = {cell: {} for cell in given.cells}
    for number in range(given.rounds):
        asked = order_of(given, number)
        first = number % len(given.cells)
        answers: dict[Cell, list[Answer]] = {}
        figures: dict[Cell, Figures] = {}
        for cell in given.cells[first:] + given.cells[:first]:
            figures[cell], answers[cell] = asyncio.run(run(given, cell, needs[cell.codec], prompts, asked))
            words = f"{figures[cell]['rate']:.3f} requests/s, {figures[cell]['computed']:.0f} tokens computed"
            print(f"round {number + 1}/{given.rounds}  {cell.name:15} {words}", file=sys.stderr, flush=True)
        for cell in given.cells:
            base = answers[next(other for other in given.cells if other.codec == cell.codec)]
            same = sum(mine.token_ids == other.token_ids for mine, other in zip(answers[cell], base, strict=True))
            for name, value in {**figures[cell], "same": same / len(base)}.items():
                results[cell].setdefault(name, []).append(value)
    return results, needs


def record_of(given: argparse.Namespace, cell: Cell, samples: dict[str, list[float]], need: Need) -> dict[str, Any]:
    """The JSON line of a cell."""
    shape = {name: getattr(given, name) for name in ("documents", "prompt_tokens", "asks", "output_tokens")}
    about = {"benchmark": "documents", "model": Path(given.model).name, **shape, "concurrency": given.concurrency}
    sizes = {"arena_bytes": need.num_bytes // 4, "chunk_bytes": need.chunk_bytes, "seed": given.seed}
    return {**about, **sizes, "codec": cell.codec, "bandwidth": cell.bandwidth, "rounds": samples}


def main() -> int:
    """Measures and prints."""
    given = arguments()
    load = OtherLoad()
    results, needs = measure(given)
    print(report(given, results, needs, load))
    if given.json:
        for cell, samples in results.items():
            append_record(given.json, record_of(given, cell, samples, needs[cell.codec]))
    return exit_status(given, marks_of(results))


if __name__ == "__main__":
    sys.exit(main())
