"""Turns sampled tokens into the caller's deltas: text, stops, log-probabilities. Knows sequences and text, not logits
or pages.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from quire.engine.outputs import CompletionOutput, FinishReason, Logprob
from quire.engine.request import Sequence
from quire.engine.stops import StopChecker, StopStrings

if TYPE_CHECKING:
    from quire.models.tokenizer import Detokenizer


class TokenDecoder(Protocol):
    """The methods of a tokenizer that the engine calls."""

    def decode(self, token_ids: list[int], skip_special: bool = True) -> str:
        """The text of some tokens."""

    def stream(self, prompt_ids: list[int], skip_special: bool = True) -> Detokenizer:
        """A detokenizer of text that continues the prompt."""


class OutputProcessor:
    """The visible side of one sequence: turns each sampled token into a delta."""

    def __init__(
        self,
        sequence: Sequence,
        tokenizer: TokenDecoder,
        names: TokenTexts,
        eos_token_ids: tuple[int, ...],
        strings: StopStrings | None = None,
    ) -> None:
        """strings: the stop strings of the request; see StopChecker."""
        params = sequence.request.params
        self._names = names
        self._index = sequence.index
        self._stops = StopChecker(params, eos_token_ids, strings)
        self._detokenizer = (
            tokenizer.stream(sequence.request.prompt_ids, params.skip_special_tokens) if params.detokenize else None
        )
        self._cumulative: float | None = 0.0 if params.logprobs is not None else None

    def resume(self, token_ids: Iterable[int], cumulative: float) -> None:
        """Takes tokens that the caller already has. cumulative: the sum of their log-probabilities."""
        for token_id in token_ids:
            self.push(token_id, None, at_length=False)
        if self._cumulative is not None:
            self._cumulative = cumulative

    def push(self, token_id: int, logprobs: dict[int, Logprob] | None, at_length: bool) -> CompletionOutput:
        """The delta of one more token. Its finish_reason is set if the sequence ends with this token."""
        text = ""
        if self._detokenizer is not None:
            ends = self._stops.ends_at(token_id)
            if not ends or self._stops.keeps_stop:
                text = self._detokenizer.push(token_id)
            if ends or at_length:
                text += self._detokenizer.flush()
        emitted, stop = self._stops.push(text, token_id, at_length)
        if logprobs is not None:
            self._names.fill(logprobs)
            assert self._cumulative is not None
            self._cumulative += logprobs[token_id].logprob
        return CompletionOutput(
            self._index,
            emitted,
            [token_id],
            [logprobs] if logprobs is not None else None,
            stop.finish_reason if stop else None,
            stop.stop_reason if stop else None,
            self._cumulative,
        )

    def end(self, reason: FinishReason, explanation: str | None = None) -> CompletionOutput:
        """The last delta of a sequence that ends without a token of its own: aborted or failed."""
        text = self._stops.flush() + (self._detokenizer.flush() if self._detokenizer is not None else "")
        return CompletionOutput(self._index, text, [], None, reason, explanation, self._cumulative)


class TokenTexts:
    """The text of single tokens, special tokens included. Each is decoded once."""

    def __init__(self, tokenizer: TokenDecoder) -> None:
        self._tokenizer = tokenizer
        self._names: dict[int, str] = {}

    def fill(self, logprobs: dict[int, Logprob]) -> None:
        """Writes each token's text beside its log-probability."""
        for token_id, entry in logprobs.items():
            name = self._names.get(token_id)
            if name is None:
                name = self._names[token_id] = self._tokenizer.decode([token_id], skip_special=False)
            entry.decoded_token = name
