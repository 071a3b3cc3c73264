"""What an engine accepts, for whoever must know it without the engine."""

from __future__ import annotations

from dataclasses import dataclass

from quire.engine.params import SamplingParams
from quire.errors import RequestError


@dataclass(frozen=True)
class Limits:
    """The limits of requests.

    vocab_size     token ids are below it
    max_context    most tokens of prompt and answer
    context_limit  the origin of max_context, for messages
    max_queue      most sequences that may wait
    """

    vocab_size: int
    max_context: int
    context_limit: str
    max_queue: int

    def check(self, prompt_ids: list[int], params: SamplingParams) -> None:
        """Raises RequestError, naming the value and the limit, if a request can never run."""
        if not prompt_ids:
            raise RequestError("the prompt is empty; it needs at least one token", "prompt")
        low, high = min(prompt_ids), max(prompt_ids)
        if low < 0 or high >= self.vocab_size:
            raise RequestError(
                f"token id {low if low < 0 else high} is outside the vocabulary of {self.vocab_size}", "prompt"
            )
        if len(prompt_ids) >= self.max_context:
            raise RequestError(
                f"the prompt has {counted(len(prompt_ids))} and the context holds {self.max_context}"
                f" ({self.context_limit}), one of which must be generated",
                "prompt",
            )
        params.check_vocabulary(self.vocab_size)
        if params.n > self.max_queue:
            raise RequestError(
                f"n is {params.n} and at most {self.max_queue} sequences may wait (scheduler.max_queue)", "n"
            )


def counted(num_tokens: int) -> str:
    """A number of tokens in words."""
    return "1 token" if num_tokens == 1 else f"{num_tokens} tokens"
