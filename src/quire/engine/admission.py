"""The admission of requests: the one check that `LLM`, `AsyncLLM` and `Cluster` make, and its result.

    prompt, parameters --admit--> AdmittedRequest --Engine.queue--> Scheduler.waiting

`admit` needs no engine. A router has the limits of its instances, and admits in another process.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.cache.ledger import PAGE_TOKENS
from quire.cache.manager import PINNED_SHARE
from quire.engine.interned_ids import InternedTokenIds
from quire.engine.params import CacheHints, SamplingParams
from quire.engine.request import NO_HINTS
from quire.errors import QueueFullError, RequestError

if TYPE_CHECKING:
    from quire.structured.grammar_guide import CompiledGrammar

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, its token ids, or {"prompt": text} or {"prompt_token_ids": ids}. A dict may also have cache hints:
cache_salt, a text (only requests with an equal salt share), cache_pin (True, False or seconds: how long the prompt's
chunks stay cached), cache_priority and cache_lifetime; see `CacheHints`."""

_PROMPT_KEYS = {"prompt", "prompt_token_ids"}
_HINT_KEYS = {field.name for field in fields(CacheHints) if field.init}


class TokenizedPrompt(NamedTuple):
    """A prompt in the engine's form: its text, if it was given as text, its token ids, and its cache hints."""

    text: str | None
    ids: list[int]
    hints: CacheHints


@dataclass(frozen=True)
class PinLimits:
    """The limits of `cache_pin`.

    most_chunks  largest prompt that may be pinned in the arena, in chunks; None: the cache does not share
    has_disk     whether a disk outlives the engine
    """

    most_chunks: int | None
    has_disk: bool = False

    def check(self, num_tokens: int, tier: str) -> None:
        """Raises RequestError, naming the limit, if a prompt of `num_tokens` tokens cannot be pinned in a tier."""
        if self.most_chunks is None:
            raise RequestError("cache_pin needs cache.share, which is off", "cache_pin")
        if num_tokens < PAGE_TOKENS:
            raise RequestError(
                f"cache_pin: the prompt has {tokens_text(num_tokens)}; pins keep whole chunks of {PAGE_TOKENS}",
                "cache_pin",
            )
        if tier == "disk":
            if not self.has_disk:
                raise RequestError("cache_pin names the disk, but there is none (tiers.disk)", "cache_pin")
        elif num_tokens // PAGE_TOKENS > self.most_chunks:
            raise RequestError(
                f"cache_pin: the prompt has {num_tokens} tokens; at most {self.most_chunks * PAGE_TOKENS},"
                f" {PINNED_SHARE:.0%} of the cache (cache.memory), may be pinned",
                "cache_pin",
            )


@dataclass(frozen=True)
class RequestLimits:
    """The limits of the requests that an engine accepts.

    vocab_size     token ids are below it
    max_context    most tokens of prompt and answer
    context_limit  the origin of max_context, for messages
    max_queue      most sequences that may wait
    pins           what may be pinned
    """

    vocab_size: int
    max_context: int
    context_limit: str
    max_queue: int
    pins: PinLimits

    def check(self, prompt_ids: list[int], params: SamplingParams, hints: CacheHints = NO_HINTS) -> None:
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
                f"the prompt has {tokens_text(len(prompt_ids))} and the context holds {self.max_context}"
                f" ({self.context_limit}), one of which must be generated",
                "prompt",
            )
        params.check_vocabulary(self.vocab_size)
        if params.n > self.max_queue:
            raise RequestError(
                f"n is {params.n} and at most {self.max_queue} sequences may wait (scheduler.max_queue)", "n"
            )
        if hints.cache_pin:
            self.pins.check(len(prompt_ids), hints.pin_tier)

    def check_queue(self, num_waiting: int, num_new: int) -> None:
        """Raises QueueFullError if the queue has no room for `num_new` more sequences."""
        if num_waiting + num_new > self.max_queue:
            raise queue_full(num_waiting, self.max_queue)


def queue_full(num_waiting: int, max_queue: int) -> QueueFullError:
    """The error of a request for which the queue has no room."""
    return QueueFullError(
        f"{num_waiting} sequences wait and scheduler.max_queue is {max_queue}; try again later", retry_after=1.0
    )


def narrowest(limits: Sequence[RequestLimits], pinning: Sequence[RequestLimits]) -> RequestLimits:
    """The limits that hold for every one of several engines over one model.

    pinning  limits of the engines that compute prompts; these engines also keep the pins
    """
    shortest = min(limits, key=lambda each: each.max_context)
    pinned = [each.pins.most_chunks for each in pinning]
    most = None if None in pinned else min(count for count in pinned if count is not None)
    return replace(shortest, pins=PinLimits(most, has_disk=all(each.pins.has_disk for each in pinning)))


@dataclass(eq=False)
class AdmittedRequest:
    """A request that has passed the check.

    text     the prompt's text, if it was given as text
    grammar  the compiled grammar of its constraint; None without a constraint, and before compilation
    """

    text: str | None
    prompt_ids: list[int]
    params: SamplingParams
    hints: CacheHints = NO_HINTS
    grammar: CompiledGrammar | None = None


def admit(
    prompt: Prompt, params: SamplingParams, limits: RequestLimits, encode: Callable[[str], list[int]]
) -> AdmittedRequest:
    """Tokenizes a prompt and checks the request, except its constraint and the queue's room. Raises RequestError if it
    can never run.
    """
    text, ids, hints = tokenized(prompt, encode)
    limits.check(ids, params, hints)
    return AdmittedRequest(text, ids, params, hints)


def tokenized(prompt: Prompt, encode: Callable[[str], list[int]]) -> TokenizedPrompt:
    """Parses a prompt in any of its forms. Raises RequestError for anything else."""
    hints = NO_HINTS
    if isinstance(prompt, Mapping):
        unknown = set(prompt) - _PROMPT_KEYS - _HINT_KEYS
        if unknown or all(prompt.get(key) is None for key in _PROMPT_KEYS):
            found = f"unknown: {', '.join(sorted(map(str, unknown)))}" if unknown else "both are missing"
            raise RequestError(
                "a prompt dict has the key prompt or prompt_token_ids, and optionally"
                f" {', '.join(sorted(_HINT_KEYS))}; {found}",
                "prompt",
            )
        if all(prompt.get(key) is not None for key in _PROMPT_KEYS):
            raise RequestError("a prompt dict has either prompt or prompt_token_ids; both are given", "prompt")
        hints = CacheHints(**{key: prompt[key] for key in _HINT_KEYS if prompt.get(key) is not None})
        given = prompt.get("prompt_token_ids")
        prompt = prompt["prompt"] if given is None else given
    if isinstance(prompt, str):
        return TokenizedPrompt(prompt, encode(prompt), hints)
    if isinstance(prompt, InternedTokenIds):
        return TokenizedPrompt(None, prompt, hints)
    prompt = as_list(prompt)
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
        raise RequestError(f"a prompt is a text or a list of token ids, not {type(prompt).__name__}", "prompt")
    return TokenizedPrompt(None, [_token_id(each) for each in prompt], hints)


def as_list(value: Any) -> Any:
    """Converts an array or tensor to a list; returns anything else unchanged."""
    return value.tolist() if hasattr(value, "tolist") else value


def tokens_text(num_tokens: int) -> str:
    """A number of tokens in words."""
    return "1 token" if num_tokens == 1 else f"{num_tokens} tokens"


def _token_id(value: Any) -> int:
    if type(value) is int:
        return value
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        found = f"{value!r:.100} ({type(value).__name__})"
        raise RequestError(f"a prompt's token ids must be integers; it has {found}", "prompt") from None
