"""Measure the engine on this machine.

throughput: random tokens through the library, greedy, new ids in every repeat. Prefill is the time of prompts alone;
decode is the time of all tokens after each request's first, the same prompts' prefill taken off. The best of the
repeats counts: other work on the machine only ever slows a run down. An answer that fails or is cut short ends the
command with an error: its time would say nothing.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cli import shared
from quire.config import options_from
from quire.errors import ConfigError, ModelError, QuireError

if TYPE_CHECKING:
    from quire.llm import LLM

HELP = "measure the engine on this machine"
BENCHMARKS = ("throughput",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument("name", choices=BENCHMARKS, metavar="NAME", help=f"one of: {', '.join(BENCHMARKS)}")
    shared.add_engine_arguments(parser)
    group = parser.add_argument_group("throughput")
    counts: list[tuple[str, list[int], str]] = [
        ("--batch", [1, 8, 32], "sequences decoded at once"),
        ("--prefill", [512, 1536], "prompt lengths of the prefill rows"),
    ]
    for flag, default, text in counts:
        shown = " ".join(map(str, default))
        group.add_argument(flag, type=int, nargs="*", default=default, metavar="N", help=f"{text} (default: {shown})")
    group.add_argument(
        "--input-tokens", type=int, default=128, metavar="N", help="prompt length when decoding (default: 128)"
    )
    group.add_argument("--output-tokens", type=int, default=128, metavar="N", help="tokens decoded (default: 128)")
    group.add_argument(
        "--repeats", type=int, default=3, metavar="N", help="runs of each row, the best counts (default: 3)"
    )
    group.add_argument("--json", type=Path, metavar="FILE", help="append the results as JSON lines")


def run(args: argparse.Namespace) -> int:
    """Print a table of tokens per second."""
    if shared.printed_config(args):
        return 0
    counts = [*args.batch, *args.prefill, args.input_tokens, args.output_tokens - 1, args.repeats]
    if min(counts) < 1:
        raise ConfigError("the counts of quire bench must be at least 1, --output-tokens at least 2")
    if args.json is not None:
        shared.check_writable(args.json)
    from quire.llm import LLM

    with LLM(args.model, options_from(args, shared.ENGINE_SECTIONS), args.config) as llm:
        rows = _throughput(llm, args)
    if args.json is not None:
        with args.json.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    return 0


def _throughput(llm: LLM, args: argparse.Namespace) -> list[dict[str, Any]]:
    from rich.console import Console

    draw = random.Random(0)
    console = Console(highlight=False)
    config = llm.config
    threads = f", {config.runtime.threads} threads" if config.runtime.device == "cpu" else ""
    where = f"{config.runtime.device}, {config.attention.backend} attention{threads}"
    console.print(f"{llm.model_name}: {config.model.dtype} on {where}")
    _seconds(llm, draw, 1, 64, 4)  # the first steps warm caches and compile what is compiled late
    rows: list[dict[str, Any]] = []

    def add(phase: str, batch: int, length: int, tokens: int, seconds: float) -> None:
        row = {"phase": phase, "batch": batch, "input_tokens": length, "tokens": tokens, "seconds": seconds}
        rows.append(row | {"tokens_per_second": tokens / seconds, "model": llm.model_name, "dtype": config.model.dtype})
        console.print(f"{phase:<8} batch {batch:>4}  prompt {length:>6}   {tokens / seconds:>10,.1f} tokens/s")

    for length in args.prefill:
        best = min(_seconds(llm, draw, 1, length, 1) for _ in range(args.repeats))
        add("prefill", 1, length, length, best)
    for batch in args.batch:
        first = min(_seconds(llm, draw, batch, args.input_tokens, 1) for _ in range(args.repeats))
        whole = min(_seconds(llm, draw, batch, args.input_tokens, args.output_tokens) for _ in range(args.repeats))
        if whole <= first:
            raise QuireError(
                f"decoding {args.output_tokens} tokens took no longer than the prompts alone: too short to measure;"
                " raise --output-tokens"
            )
        add("decode", batch, args.input_tokens, batch * (args.output_tokens - 1), whole - first)
    return rows


def _seconds(llm: LLM, draw: random.Random, batch: int, length: int, max_tokens: int) -> float:
    """Time of `batch` requests of `length` random tokens that generate `max_tokens` each.

    Raises ModelError if the model's numbers are not finite, QuireError if an answer has not `max_tokens` tokens.
    """
    from quire.engine.params import SamplingParams

    # Ids from the middle of the vocabulary: none of them is special.
    low, high = llm.shape.vocab_size // 4, llm.shape.vocab_size // 2
    prompts = [{"prompt_token_ids": [draw.randrange(low, high) for _ in range(length)]} for _ in range(batch)]
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    begun = time.perf_counter()
    answers = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - begun
    for output in (answer.outputs[0] for answer in answers):
        if output.finish_reason == "error":
            raise ModelError(f"{llm.model_name} cannot be measured: {output.stop_reason}")
        if len(output.token_ids) != max_tokens:
            raise QuireError(
                f"an answer to {length} tokens has {len(output.token_ids)} instead of {max_tokens}; the context holds"
                f" {llm.max_context} tokens: lower --input-tokens or --output-tokens"
            )
    return seconds
