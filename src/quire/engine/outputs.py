"""The outputs of a request, with vLLM's names. Plain data, no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]
"""error: no token could be chosen, because the logits are not finite, the grammar became too complex or nothing fulfils
the constraint; `stop_reason` has the explanation."""


@dataclass(slots=True)
class Logprob:
    """One token's log-probability (natural log, of the model's own logits before any processing)."""

    logprob: float
    rank: int | None = None
    """1 for the most probable token; equal logits rank in id order."""
    decoded_token: str | None = None
    """The token's text, if the engine has filled it in."""


@dataclass(slots=True)
class CompletionOutput:
    """One of the n sequences of a request: complete from `LLM`; from `AsyncLLM` only the part since the last item."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    """One dict per token of `token_ids`, the chosen token first, then the best ones in order."""
    finish_reason: FinishReason | None = None
    """None while the sequence runs."""
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended the sequence; the explanation of an error; None otherwise."""
    cumulative_logprob: float | None = None
    """Sum over all tokens generated so far; None unless the request has logprobs."""

    @property
    def finished(self) -> bool:
        """Whether this sequence is complete."""
        return self.finish_reason is not None

    def add(self, news: CompletionOutput) -> None:
        """Appends a later delta of the same sequence."""
        self.text += news.text
        self.token_ids.extend(news.token_ids)
        if news.logprobs is not None:
            self.logprobs = (self.logprobs or []) + news.logprobs
        self.finish_reason, self.stop_reason = news.finish_reason, news.stop_reason
        self.cumulative_logprob = news.cumulative_logprob


@dataclass(slots=True)
class RequestOutput:
    """A request and its generated sequences."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    """One entry per prompt token, which always includes the token itself; None at position 0, which nothing predicts.
    Only the first item of a request has this list."""
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    """Prompt tokens whose keys and values were already in the cache."""
    cached_by_tier: dict[str, int] = field(default_factory=dict)
    """The same tokens by their origin: arena, memory, disk."""
    num_pinned_tokens: int | None = None
    """Prompt tokens that the request's own pin keeps; 0 if there was no room or the request ended pins; None without
    cache_pin."""
    kept_fraction: float | None = None
    """Share of the prompt's tokens that retention keeps, over all heads; None before it decides, or without it."""
    embedding: list[float] | None = None
    """The prompt's embedding, not normalized; only with `pooling`, and in the first item."""
