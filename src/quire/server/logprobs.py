"""Converts log-probabilities from the engine's form, a dict {token id: Logprob} per position, to both forms of OpenAI's
API.

The dict of a position has the requested number of best tokens, and always the token at that position.
"""

from __future__ import annotations

import codecs
import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from quire.server.errors import bad_request
from quire.server.shapes import PromptLogprob, TextLogprobs, TokenLogprob, TopLogprob

if TYPE_CHECKING:
    from quire.engine.outputs import Logprob
    from quire.models.tokenizer import Tokenizer

MAX_PROMPT_LOGPROBS = 500_000
"""Maximum number of prompt log-probabilities in one answer, over all choices. Each takes about 70 bytes of JSON (35 MB
in total) and 200 bytes in the engine (100 MB). A prompt of 23,000 tokens may have 20 alternatives per token."""

PROMPT_LOGPROBS_AT_ONCE = 250_000
"""Maximum number of prompt log-probabilities of all requests that are not encoded yet: 50 MB. Other prompts wait. A
single prompt may have more."""

LOWEST = -9999.0
"""OpenAI's value for minus infinity, which JSON cannot represent."""


def check_prompt_logprobs(requested: Mapping[str, int | None], num_choices: int, num_tokens: int) -> None:
    """Raises ApiError 400 if an answer would have too many log-probabilities of prompts.

    requested   alternatives per token, by parameter; None: not given
    num_tokens  tokens of all prompts
    """
    found = {name: each for name, each in requested.items() if each is not None}
    num_scores = num_choices * num_tokens * sum(each + 1 for each in found.values())
    if num_scores > MAX_PROMPT_LOGPROBS:
        raise bad_request(
            f"'n' is {num_choices}, the prompts have {num_tokens} tokens and"
            f" {' and '.join(f'{name!r} is {each}' for name, each in found.items())}: these are {num_scores}"
            f" prompt log-probabilities, and an answer may have at most {MAX_PROMPT_LOGPROBS}",
            next(iter(found)),
        )


class TokenTextCache:
    """The text of single tokens, cached per request, because the same few ids recur at many positions."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def of(self, token_id: int) -> str:
        """The text of `token_id`. Bytes that are not a whole character become U+FFFD."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self.tokenizer.token_bytes(token_id).decode(errors="replace")
        return text


def finite(logprob: float) -> float:
    """`logprob`, but at least LOWEST."""
    return logprob if logprob > LOWEST else LOWEST


def best(position: Mapping[int, Logprob], count: int) -> list[tuple[int, Logprob]]:
    """The `count` most probable entries of a position, best first."""
    return sorted(position.items(), key=lambda entry: -entry[1].logprob)[:count]


def chat_logprobs(
    token_ids: Sequence[int], positions: Sequence[Mapping[int, Logprob]], num_top: int, token_texts: TokenTextCache
) -> list[TokenLogprob]:
    """`logprobs.content` of a chat choice: one entry per token with its `num_top` best alternatives."""

    def entry(token_id: int, logprob: Logprob) -> TopLogprob:
        own = list(token_texts.tokenizer.token_bytes(token_id))
        return {"token": token_texts.of(token_id), "logprob": finite(logprob.logprob), "bytes": own}

    return [
        {**entry(token_id, position[token_id]), "top_logprobs": [entry(*each) for each in best(position, num_top)]}
        for token_id, position in zip(token_ids, positions, strict=True)
    ]


class LegacyLogprobs:
    """`logprobs` of one completion choice: four parallel lists, made delta by delta.

    `text_offset` counts the complete characters of the choice's text before the token.
    """

    def __init__(self, num_top: int, token_texts: TokenTextCache, skip_special: bool) -> None:
        self.num_top = num_top
        self.token_texts = token_texts
        self._skipped = token_texts.tokenizer.special_ids if skip_special else frozenset()
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def copy(self) -> LegacyLogprobs:
        """A copy with the same state. The choices of a prompt continue from copies of it."""
        other = copy.copy(self)
        other._characters = codecs.getincrementaldecoder("utf-8")("replace")
        other._characters.setstate(self._characters.getstate())
        return other

    def __call__(
        self, token_ids: Sequence[int], positions: Sequence[Mapping[int, Logprob] | None], text: str | None = None
    ) -> TextLogprobs:
        """The lists of the next tokens; a position without probabilities (a prompt's first token) gives nulls.

        text  the shown text of these tokens, with which the choice's text begins; None: the text of the tokens, without
              special ones, as in every answer
        """
        token_logprobs: list[float | None] = []
        top_logprobs: list[dict[str, float] | None] = []
        text_offset: list[int] = []
        for token_id, position in zip(token_ids, positions, strict=True):
            text_offset.append(self._offset)
            if self._is_shown(token_id, text):
                self._offset += len(self._characters.decode(self.token_texts.tokenizer.token_bytes(token_id)))
            token_logprobs.append(None if position is None else finite(position[token_id].logprob))
            top_logprobs.append(None if position is None else self._top(token_id, position))
        return {
            "tokens": [self.token_texts.of(token_id) for token_id in token_ids],
            "token_logprobs": token_logprobs,
            "top_logprobs": top_logprobs if self.num_top else None,
            "text_offset": text_offset,
        }

    def _is_shown(self, token_id: int, text: str | None) -> bool:
        if text is None or token_id not in self.token_texts.tokenizer.special_ids:
            return token_id not in self._skipped
        # A given text holds the special tokens that were written in it, but not those that encoding has added.
        return text.startswith(self.token_texts.of(token_id), self._offset)

    def _top(self, token_id: int, position: Mapping[int, Logprob]) -> dict[str, float]:
        """Text to log-probability, for the best tokens and the token at this position.

        Different ids may have the same text (bytes that are not a whole character). The most probable id then counts,
        so that the largest value of the dict belongs to the best token.
        """
        top: dict[str, float] = {}
        for each, logprob in [*best(position, self.num_top), (token_id, position[token_id])]:
            top.setdefault(self.token_texts.of(each), finite(logprob.logprob))
        return top


def prompt_logprobs(
    positions: Sequence[Mapping[int, Logprob] | None], token_texts: TokenTextCache
) -> Iterator[dict[str, PromptLogprob] | None]:
    """The extension `prompt_logprobs`: for each position the log-probabilities by token id; null at the first."""
    for position in positions:
        yield (
            None
            if position is None
            else {
                str(token_id): {
                    "logprob": finite(each.logprob),
                    "rank": each.rank,
                    "decoded_token": token_texts.of(token_id),
                }
                for token_id, each in position.items()
            }
        )
