"""What a request gives back, under the names vLLM's users know; plain data, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]
"""error: no token could be chosen, because the model's numbers are not finite; `stop_reason` says so."""


@dataclass(slots=True)
class Logprob:
    """One token's log-probability (natural log, of the model's own logits before any processing)."""

    logprob: float
    rank: int | None = None
    """1 for the most probable token; equal logits rank in id order."""
    decoded_token: str | None = None
    """The token's text, where the engine has filled it in."""


@dataclass(slots=True)
class CompletionOutput:
    """One of the n sequences of a request: complete from `LLM`, the news since the last item from `AsyncLLM`."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    """One dict per token of `token_ids`, the chosen token first, then the best ones in order."""
    finish_reason: FinishReason | None = None
    """None while the sequence runs."""
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended it; None for the end of text and for every other reason."""
    cumulative_logprob: float | None = None
    """Sum over all tokens generated so far; None unless logprobs were asked for."""

    @property
    def finished(self) -> bool:
        """Whether this sequence is complete."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """A request and what it has generated."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    """One entry per prompt token, always holding that token itself; None at position 0, which nothing predicts. Of the
    items of one request the first has it."""
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    """Prompt tokens whose keys and values were already in the cache."""
    num_pinned_tokens: int | None = None
    """Prompt tokens that its own pin keeps, 0 where there was no room or it ended pins; None without cache_pin."""
    kept_fraction: float | None = None
    """Of the prompt's tokens in all heads, what retention kept; None before it has decided, and without retention."""
