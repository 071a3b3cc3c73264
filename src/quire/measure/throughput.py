"""Tokens per second of prefill and decode, with random tokens, through the library."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from quire.engine.params import SamplingParams
from quire.errors import ModelError, QuireError

if TYPE_CHECKING:
    from quire.llm import LLM


def measure(
    llm: LLM, prefill: Sequence[int], batch: Sequence[int], input_tokens: int, output_tokens: int, repeats: int
) -> Iterator[dict[str, Any]]:
    """Yields a row for each prompt length of `prefill` and each batch size that decodes. The best repeat counts."""
    draw = random.Random(0)
    _seconds(llm, draw, 1, 64, 4)  # the first steps warm caches and compile late kernels
    for length in prefill:
        best = min(_seconds(llm, draw, 1, length, 1) for _ in range(repeats))
        yield _row("prefill", 1, length, length, best)
    for size in batch:
        first = min(_seconds(llm, draw, size, input_tokens, 1) for _ in range(repeats))
        whole = min(_seconds(llm, draw, size, input_tokens, output_tokens) for _ in range(repeats))
        if whole <= first:
            raise QuireError(
                f"decoding {output_tokens} tokens took no longer than the prefill alone, too short to measure;"
                " raise --output-tokens"
            )
        yield _row("decode", size, input_tokens, size * (output_tokens - 1), whole - first)


def _row(phase: str, batch: int, length: int, tokens: int, seconds: float) -> dict[str, Any]:
    return {
        "phase": phase,
        "batch": batch,
        "input_tokens": length,
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
    }


def _seconds(llm: LLM, draw: random.Random, batch: int, length: int, max_tokens: int) -> float:
    """Time of `batch` requests of `length` random tokens that generate `max_tokens` each.

    Raises ModelError if the model's logits are not finite, QuireError if an answer has fewer than `max_tokens` tokens.
    """
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
