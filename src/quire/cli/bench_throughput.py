"""`quire bench throughput`: tokens per second of prefill and decode, with random tokens, through the library."""

from __future__ import annotations

import argparse
import random
import time
from typing import TYPE_CHECKING, Any, ClassVar

from quire.arguments import Arguments
from quire.cli import shared
from quire.config import options_from
from quire.errors import ConfigError, ModelError, QuireError

if TYPE_CHECKING:
    from rich.console import Console

    from quire.llm import LLM


class ThroughputBenchmark:
    """The benchmark; see the module's docstring."""

    DEFAULTS: ClassVar[dict[str, Any]] = {
        "batch": [1, 8, 32],
        "prefill": [512, 1536],
        "input_tokens": 128,
        "output_tokens": 128,
        "repeats": 3,
    }

    @staticmethod
    def add_arguments(group: Arguments) -> None:
        """The flags that only this benchmark has."""
        counts = [
            ("--batch", "*", "batch sizes of the decode rows (default: 1 8 32)"),
            ("--prefill", "*", "prompt lengths of the prefill rows (default: 512 1536)"),
            ("--input-tokens", None, "prompt length of the decode rows (default: 128)"),
            ("--repeats", None, "runs per row; the best counts (default: 3)"),
        ]
        for flag, nargs, text in counts:
            group.add_argument(flag, type=int, nargs=nargs, default=argparse.SUPPRESS, metavar="N", help=text)

    def __init__(self, args: argparse.Namespace) -> None:
        """Raises ConfigError for invalid arguments."""
        if min(*args.batch, *args.prefill, args.input_tokens, args.output_tokens - 1, args.repeats) < 1:
            raise ConfigError("the counts of quire bench must be at least 1, --output-tokens at least 2")
        self._args = args

    def options(self) -> dict[str, Any]:
        """Settings of the engine to measure."""
        return options_from(self._args, shared.ENGINE_SECTIONS)

    def measure(self, llm: LLM, console: Console) -> tuple[list[dict[str, Any]], bool]:
        """Prints a line per row. Returns the rows and True: this benchmark checks no result."""
        args = self._args
        draw = random.Random(0)
        _seconds(llm, draw, 1, 64, 4)  # the first steps warm caches and compile late kernels
        rows: list[dict[str, Any]] = []

        def add(phase: str, batch: int, length: int, tokens: int, seconds: float) -> None:
            row = {"phase": phase, "batch": batch, "input_tokens": length, "tokens": tokens, "seconds": seconds}
            rows.append(row | {"tokens_per_second": tokens / seconds})
            console.print(f"{phase:<8} batch {batch:>4}  prompt {length:>6}   {tokens / seconds:>10,.1f} tokens/s")

        for length in args.prefill:
            best = min(_seconds(llm, draw, 1, length, 1) for _ in range(args.repeats))
            add("prefill", 1, length, length, best)
        for batch in args.batch:
            first = min(_seconds(llm, draw, batch, args.input_tokens, 1) for _ in range(args.repeats))
            whole = min(_seconds(llm, draw, batch, args.input_tokens, args.output_tokens) for _ in range(args.repeats))
            if whole <= first:
                raise QuireError(
                    f"decoding {args.output_tokens} tokens took no longer than the prefill alone, too short to measure;"
                    " raise --output-tokens"
                )
            add("decode", batch, args.input_tokens, batch * (args.output_tokens - 1), whole - first)
        return rows, True


def _seconds(llm: LLM, draw: random.Random, batch: int, length: int, max_tokens: int) -> float:
    """Time of `batch` requests of `length` random tokens that generate `max_tokens` each.

    Raises ModelError if the model's logits are not finite, QuireError if an answer has fewer than `max_tokens` tokens.
    """
    from quire.engine.params import SamplingParams

    # Ids from the middle of the vocabulary are not special tokens.
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
