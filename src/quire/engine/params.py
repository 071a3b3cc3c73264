"""The parameters of one request, with vLLM's names.

Knows values and their limits, not the model: only `check_vocabulary` checks ids against a vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from numbers import Integral, Real
from typing import Any, Literal

from quire.errors import RequestError
from quire.structured.params import StructuredOutputsParams

# Each of these bounds the cost of one request per step. The server's limits are tighter where OpenAI's are.
MAX_SEQUENCES = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS_IDS = 1024
MAX_SEED = 2**63 - 1
MAX_TEMPERATURE = 100.0
MAX_REPETITION_PENALTY = 100.0

# vLLM's bound. Below it, the distribution is a point mass in float32 anyway.
GREEDY_BELOW = 1e-5


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends. Checked on construction; immutable.

    The names, defaults and order of effects are vLLM's. `stop` and `stop_token_ids` are always tuples after
    construction. Use `dataclasses.replace` for a variant. Raises RequestError, with `param` set to the field's name,
    for a value of a wrong type or outside its range.
    """

    n: int = 1
    """Sequences generated for the prompt, 1 to 128."""
    temperature: float = 1.0
    """Divides the logits; 0 takes the best token."""
    top_k: int = -1
    """Only the k best tokens may be drawn; -1 or 0: all. Among equal logits lower ids come first, so 1 is greedy."""
    top_p: float = 1.0
    """Only the smallest set of best tokens with at least this total probability may be drawn, in (0, 1]."""
    min_p: float = 0.0
    """Only tokens at least this fraction as probable as the best one may be drawn, in [0, 1]."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in the prompt or output; 1: off."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token already generated, -2 to 2."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once per generated occurrence, -2 to 2."""
    logit_bias: Mapping[int, float] | None = None
    """Token id to a value, -100 to 100, added to its logit."""
    seed: int | None = None
    """Starts the random numbers; -2^63 to 2^63 - 1. None: the engine picks a seed."""
    stop: tuple[str, ...] | list[str] | str | None = None
    """Strings that end the answer; up to 16."""
    stop_token_ids: tuple[int, ...] | list[int] | None = None
    """Tokens that end the answer, in addition to the model's end of text."""
    include_stop_str_in_output: bool = False
    """Whether the stop string, or the stop token's text, stays in the answer."""
    ignore_eos: bool = False
    """Whether to continue past the model's end of text."""
    max_tokens: int | None = 16
    """Maximum number of generated tokens. None, or more than fits: the rest of the context. A server refuses more than
    fits."""
    min_tokens: int = 0
    """Tokens generated before anything may end the answer."""
    logprobs: int | None = None
    """Number of best tokens to return log-probabilities for, besides the chosen token; 0: only the chosen token."""
    prompt_logprobs: int | None = None
    """The same for every prompt token."""
    skip_special_tokens: bool = True
    """Whether special tokens are left out of the text."""
    detokenize: bool = True
    """Whether to produce text. Stop strings need it."""
    structured_outputs: StructuredOutputsParams | None = None
    """What the text must be; None: anything."""
    pooling: Literal["mean", "last"] | None = None
    """An embedding of the prompt: the mean of its tokens' last hidden states, or that of its last token. It comes with
    the first token. None: no embedding."""

    def __post_init__(self) -> None:
        self._set_checked("n", _integer, 1, MAX_SEQUENCES)
        self._set_checked("temperature", _number, 0.0, MAX_TEMPERATURE)
        self._set_checked("top_k", _integer, -1)
        self._set_checked("top_p", _positive, 1.0)
        self._set_checked("min_p", _number, 0.0, 1.0)
        self._set_checked("repetition_penalty", _positive, MAX_REPETITION_PENALTY)
        self._set_checked("presence_penalty", _number, -2.0, 2.0)
        self._set_checked("frequency_penalty", _number, -2.0, 2.0)
        self._set_checked("logit_bias", _logit_bias)
        self._set_checked("seed", _optional_integer, -MAX_SEED - 1, MAX_SEED)
        self._set_checked("stop", _stop_strings)
        self._set_checked("stop_token_ids", _stop_token_ids)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize"):
            self._set_checked(name, _boolean)
        self._set_checked("max_tokens", _optional_integer, 1)
        self._set_checked("min_tokens", _integer, 0)
        self._set_checked("logprobs", _optional_integer, 0, MAX_LOGPROBS)
        self._set_checked("prompt_logprobs", _optional_integer, 0, MAX_LOGPROBS)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}; it must not exceed max_tokens, {self.max_tokens}", param="min_tokens"
            )
        if self.stop and not self.detokenize:
            raise RequestError("stop strings need text; set detokenize=True or use stop_token_ids", param="stop")
        if self.pooling not in (None, "mean", "last"):
            raise _wrong("pooling", self.pooling, "mean or last")
        if self.pooling is not None and self.n > 1:
            raise RequestError("a prompt has one embedding; with pooling, n must be 1", "n")
        if isinstance(self.structured_outputs, Mapping):
            self._set_checked("structured_outputs", lambda _, options: StructuredOutputsParams.from_options(options))
        if self.structured_outputs is not None:
            if not isinstance(self.structured_outputs, StructuredOutputsParams):
                raise _wrong("structured_outputs", self.structured_outputs, "StructuredOutputsParams or a mapping")
            for name in ("min_tokens", "ignore_eos"):
                if getattr(self, name):
                    reason = "cannot be kept under a constraint, which says where the text ends"
                    raise RequestError(f"{name} {reason}", name)

    def _set_checked(self, name: str, check: Callable[..., object], *limits: float) -> None:
        given = getattr(self, name)
        if (value := check(name, given, *limits)) is not given:
            object.__setattr__(self, name, value)

    @cached_property
    def greedy(self) -> bool:
        """Whether the best token is always taken. Then no random number is needed. `top_k` 1 says so because no filter
        drops the best token.
        """
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    @cached_property
    def needs_penalties(self) -> bool:
        """Whether the logits depend on earlier tokens."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @cached_property
    def needs_logits_processing(self) -> bool:
        """Whether the logits change before a token is chosen: bias, penalties or a minimum length. Temperature and
        filters do not count: they matter only to drawn tokens.

        Where it is false and `greedy` is true, the token is the argmax of the model's own logits.
        """
        return bool(self.logit_bias) or self.needs_penalties or self.min_tokens > 0

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises RequestError if a token id is outside the model's vocabulary."""
        for name, ids in (("logit_bias", self.logit_bias or ()), ("stop_token_ids", self.stop_token_ids or ())):
            for token_id in ids:
                if token_id >= vocab_size:
                    raise RequestError(
                        f"{name} names token {token_id}; the vocabulary has {vocab_size} tokens", param=name
                    )


MAX_SALT_CHARS = 256


@dataclass(frozen=True)
class CacheHints:
    """A request's wishes for the prefix cache. Raises RequestError like `SamplingParams`."""

    cache_salt: str = ""
    """Only requests with an equal salt share a prefix; up to 256 characters."""
    cache_pin: float | None = None
    """Seconds for which the prompt's whole chunks are protected from eviction. True: until the pin is ended; 0 or
    False: ends the pin; None: changes nothing. A pin gives way to a request that would otherwise wait for ever.
    {"tier": "disk", "seconds": 3600} keeps the chunks on the disk of tiers.disk instead; without seconds, until the pin
    is ended."""

    pin_tier: str = field(default="arena", init=False)
    """Where `cache_pin` keeps the chunks: in the arena, or on the disk."""
    cache_priority: int = 0
    """Cached chunks of a lower priority are evicted first, -100 to 100. A chunk has the highest one of its requests."""
    cache_lifetime: float | None = None
    """Seconds without use after which the request's cached chunks are dropped; 0: when it ends. They are not copied to
    a disk. A chunk has the longest lifetime of its requests. None: as cache.lifetime says."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "cache_priority", _integer("cache_priority", self.cache_priority, -100, 100))
        if self.cache_lifetime is not None:
            if not _is_seconds(self.cache_lifetime):
                raise _wrong("cache_lifetime", self.cache_lifetime, SECONDS)
            object.__setattr__(self, "cache_lifetime", float(self.cache_lifetime))
        if not isinstance(self.cache_salt, str) or len(self.cache_salt) > MAX_SALT_CHARS:
            raise _wrong("cache_salt", self.cache_salt, f"a string of at most {MAX_SALT_CHARS} characters")
        if self.cache_pin is None:
            return
        tier, seconds = _pin(self.cache_pin)
        object.__setattr__(self, "pin_tier", tier)
        object.__setattr__(self, "cache_pin", seconds)
        if seconds and self.pin_tier == "disk" and self.cache_lifetime is not None:
            raise RequestError("cache_pin names the disk, which chunks with a cache_lifetime never reach", "cache_pin")


MAX_PIN_SECONDS = 366 * 86400.0
PIN_TIERS = ("arena", "disk")
SECONDS = f"a number of seconds from 0 to {MAX_PIN_SECONDS:.0f}"
PIN_FORMS = (
    f"true, false, {SECONDS}, or an object with 'tier' ({' or '.join(map(repr, PIN_TIERS))}) and optionally 'seconds'"
)


def _pin(given: Any) -> tuple[str, float]:
    """The tier and the seconds of a pin in any of its forms; infinity: until it is ended."""
    tier: Any = "arena"
    seconds, is_known = given, True
    if isinstance(given, Mapping):
        tier, seconds = given.get("tier"), given.get("seconds", True)
        has_flag = isinstance(given.get("seconds"), bool)
        is_known = given.keys() <= {"tier", "seconds"} and tier in PIN_TIERS and not has_flag
    if is_known and isinstance(seconds, bool):
        return tier, math.inf if seconds else 0.0
    if not is_known or not _is_seconds(seconds):
        raise _wrong("cache_pin", dict(given) if isinstance(given, Mapping) else given, PIN_FORMS)
    return tier, float(seconds)


def _is_seconds(value: Any) -> bool:
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    return is_number and bool(0 <= value <= MAX_PIN_SECONDS)


def _wrong(name: str, value: object, wanted: str) -> RequestError:
    shown = _beginning(value)
    return RequestError(
        f"{name} is {shown if len(shown) <= 80 else shown[:77] + '...'}; it must be {wanted}", param=name
    )


def _beginning(value: object) -> str:
    """The repr of a value, as far as messages show it: not all of a list with a million numbers."""
    match value:
        case str():
            return repr(value[:80])
        case dict():
            return f"{{{', '.join(f'{key!r:.40}: {_beginning(each)}' for key, each in islice(value.items(), 4))}}}"
        case list():
            return f"[{', '.join(map(_beginning, value[:8]))}{', ...' if len(value) > 8 else ''}]"
    return repr(value)


def _integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    wanted = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"
    # In Python bool is an int, but `n=True` is a mistake.
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise _wrong(name, value, wanted)
    number = int(value)
    if number < low or (high is not None and number > high):
        raise _wrong(name, value, wanted)
    return number


def _optional_integer(name: str, value: Any, low: int, high: int | None = None) -> int | None:
    return None if value is None else _integer(name, value, low, high)


def _number(name: str, value: Any, low: float, high: float, *, open_below: bool = False) -> float:
    wanted = f"a number above {low:g} and at most {high:g}" if open_below else f"a number from {low:g} to {high:g}"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise _wrong(name, value, wanted)
    try:
        number = float(value)
    except OverflowError:  # an integer of 400 digits
        number = math.inf
    # NaN fails every comparison.
    if not low <= number <= high or (open_below and number == low):
        raise _wrong(name, value, wanted)
    return number


def _positive(name: str, value: Any, high: float) -> float:
    return _number(name, value, 0.0, high, open_below=True)


def _boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _wrong(name, value, "true or false")
    return value


def _items(name: str, value: Any, wanted: str, limit: int) -> list[Any]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise _wrong(name, value, wanted)
    items = list(value)
    if len(items) > limit:
        raise RequestError(f"{name} has {len(items)} entries; at most {limit} are allowed", param=name)
    return items


def _stop_strings(name: str, value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    wanted = "a string or a list of strings"
    strings = [value] if isinstance(value, str) else _items(name, value, wanted, MAX_STOP_STRINGS)
    for string in strings:
        if not isinstance(string, str):
            raise _wrong(name, string, wanted)
        if not string:
            raise RequestError("stop holds an empty string; it would end every answer at once", name)
        if len(string) > MAX_STOP_STRING_CHARS:
            found = f"stop holds a string of {len(string)} characters"
            raise RequestError(f"{found}; at most {MAX_STOP_STRING_CHARS} are allowed", name)
    return tuple(dict.fromkeys(strings))


def _stop_token_ids(name: str, value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    ids = _items(name, value, "a list of token ids", MAX_STOP_TOKEN_IDS)
    return tuple(dict.fromkeys(_integer(name, token_id, 0) for token_id in ids))


def _logit_bias(name: str, value: Any) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise _wrong(name, value, "a mapping from token ids to numbers")
    if len(value) > MAX_LOGIT_BIAS_IDS:
        raise RequestError(f"{name} has {len(value)} entries; at most {MAX_LOGIT_BIAS_IDS} are allowed", name)
    return {_integer(name, key, 0): _number(name, bias, -100.0, 100.0) for key, bias in value.items()}
