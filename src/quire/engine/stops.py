"""Decides when an output sequence ends, and how much of its text may be shown before.

Knows text and token ids of one sequence, not detokenization, lengths or the scheduler.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from quire.engine.params import SamplingParams


@dataclass(frozen=True, slots=True)
class SequenceEnd:
    """Why a sequence ended."""

    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None
    """The stop token id or stop string; None for the end of text and for the length."""


class StopStrings:
    """The stop strings of a request, prepared for search. Its sequences share them: 16 strings of 1,024 characters take
    2.4 ms and 33 kB, of which 128 sequences would take 0.3 s of the engine's thread.
    """

    def __init__(self, params: SamplingParams) -> None:
        self.all = [(string, _fallbacks(string)) for string in params.stop or ()]


class StopChecker:
    """The stop rules of one sequence, fed one token at a time. `keeps_stop` says whether the stop is part of the text.

    Text that may begin a stop string is held back until this is decided, so that emitted text is never withdrawn. The
    first stop string to be complete ends the text; if several are complete at the same character, the longest. So the
    result does not depend on how the text was split into tokens.

    Differs from vLLM: there the first entry of `stop` found in a token's text wins, which depends on token borders.
    """

    def __init__(
        self, params: SamplingParams, eos_token_ids: Collection[int] = (), strings: StopStrings | None = None
    ) -> None:
        """strings: those of `params`; None: they are prepared here."""
        self._stop_ids = frozenset(params.stop_token_ids or ())
        self._eos_ids = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self._matchers = [_Matcher(*each) for each in (strings or StopStrings(params)).all]
        self.keeps_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._held = ""
        self._stopped = False

    def ends_at(self, token_id: int) -> bool:
        """Whether `token_id`, if pushed next, ends the sequence as a stop token or end of text."""
        return self._num_tokens >= self._min_tokens and (token_id in self._eos_ids or token_id in self._stop_ids)

    def push(self, text_delta: str, token_id: int, finished_by_length: bool = False) -> tuple[str, SequenceEnd | None]:
        """The text that may be emitted after one more token, and the reason if the sequence ends with it.

        text_delta          the text that the token added; of a stop token only if `keeps_stop`
        finished_by_length  no further token follows; a stop in this token takes precedence

        Stops count only after `min_tokens` tokens: a later token must complete a stop string. After a Stop nothing may
        be pushed.
        """
        assert not self._stopped, "push after the sequence ended"
        ends_here = self.ends_at(token_id)
        self._num_tokens += 1
        if not (ends_here or finished_by_length or self._matchers):
            return text_delta, None
        emitted, stop = self._advance(text_delta)
        if stop is None and ends_here:
            stop = SequenceEnd("stop", None if token_id in self._eos_ids else token_id)
        if stop is None and finished_by_length:
            stop = SequenceEnd("length", None)
        if stop is not None:
            emitted += self._held
            self._held = ""
            self._stopped = True
        return emitted, stop

    def flush(self) -> str:
        """The held text, for a sequence that ends without a stop (aborted or failed)."""
        held, self._held = self._held, ""
        self._stopped = True
        return held

    def _advance(self, delta: str) -> tuple[str, SequenceEnd | None]:
        if not self._matchers:
            return delta, None
        text = self._held + delta
        first_new = len(self._held)
        for offset, char in enumerate(delta):
            completed = [matcher for matcher in self._matchers if matcher.push(char)]
            if completed and self._num_tokens > self._min_tokens:
                string = max((matcher.string for matcher in completed), key=len)
                end = first_new + offset + 1
                self._held = ""
                return text[: end if self.keeps_stop else end - len(string)], SequenceEnd("stop", string)
        num_held = max(matcher.num_matched for matcher in self._matchers)
        cut = len(text) - num_held
        self._held = text[cut:]
        return text[:cut], None


class _Matcher:
    """Knuth-Morris-Pratt over a stream. `num_matched` is the length of the text's longest suffix that begins `string`.

    Costs about one comparison per character. Testing every suffix would be quadratic: a long stop string of one
    repeated letter would slow the engine's thread.
    """

    __slots__ = ("_fallbacks", "num_matched", "string")

    def __init__(self, string: str, fallbacks: array[int]) -> None:
        self.string = string
        self.num_matched = 0
        self._fallbacks = fallbacks

    def push(self, char: str) -> bool:
        """Takes one character. Returns whether it completes the string."""
        while self.num_matched and char != self.string[self.num_matched]:
            self.num_matched = self._fallbacks[self.num_matched - 1]
        if char == self.string[self.num_matched]:
            self.num_matched += 1
        if self.num_matched < len(self.string):
            return False
        self.num_matched = self._fallbacks[-1]
        return True


def _fallbacks(string: str) -> array[int]:
    """For each i, the length of the longest proper prefix of string[: i + 1] that is also its suffix."""
    found = array("H", bytes(2 * len(string)))  # a list would take up to 36 bytes for each
    length = 0
    for i in range(1, len(string)):
        while length and string[i] != string[length]:
            length = found[length - 1]
        if string[i] == string[length]:
            length += 1
        found[i] = length
    return found
