"""The file of cache.pin: prefixes that are computed at start and pinned. Each line is a JSON object:

{"prompt": "You are a helpful ..."} or {"messages": [{"role": "system", "content": "..."}]}

A conversation is rendered as the beginning of a longer one, without the marker of the next answer. Empty lines and
lines that begin with # are ignored.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cache.keys import ChunkKeys
from quire.cache.ledger import PAGE_TOKENS
from quire.cache.manager import PINNED_SHARE
from quire.engine.params import CacheHints, SamplingParams
from quire.errors import ConfigError, QuireError, RequestError
from quire.models.chat import check_messages
from quire.options import format_bytes
from quire.safe_io import parse_json, read_text

if TYPE_CHECKING:
    from quire.engine.engine import Engine

log = logging.getLogger("quire")

ROLES = ("system", "developer", "user", "assistant")
"""The roles of a pinned conversation. The server renders calls of tools and their answers with the request's tools,
which a pin does not have.
"""

PIN_PARAMS = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
"""Parameters of the request that computes a prefix."""


@dataclass(frozen=True, slots=True)
class Pin:
    """A prefix of the file, and its line."""

    line: int
    ids: list[int]

    def prompt(self, salt: str = "") -> dict[str, Any]:
        """The request that computes and pins it."""
        return {"prompt_token_ids": self.ids, "cache_pin": True, "cache_salt": salt}


def read_pin_lines(file: Path, what: str = "cache.pin") -> list[tuple[int, dict[str, Any]]]:
    """(line, content) of every prefix, not tokenized, so that a bad file is refused before a model is loaded. Raises
    ConfigError, naming the line.

    what  the setting or flag that names the file
    """
    try:
        lines = read_text(file, "utf-8-sig").splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read {what}: {error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read {what} {file}: it is not UTF-8 ({error})") from error
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            found.append((number, _checked(parse_json(line))))
        except json.JSONDecodeError as error:
            raise ConfigError(f"{what} {file}, line {number}: not JSON: {error}") from error
        except ValueError as error:
            raise ConfigError(f"{what} {file}, line {number}: {error}") from error
    if not found:
        raise ConfigError(f"{what} {file} holds no prefix")
    return found


def read_pins(file: Path, tokenizer: Any, what: str = "cache.pin") -> list[Pin]:
    """The prefixes of the file, cut to whole chunks. Raises ConfigError, naming the line, for a malformed line, a
    conversation that the chat template refuses, and a prefix shorter than a chunk.
    """
    pins = []
    for number, given in read_pin_lines(file, what):
        try:
            if "prompt" in given:
                ids = tokenizer.encode(given["prompt"])
            else:
                ids = tokenizer.chat_ids(given["messages"], add_generation_prompt=False)
        except RequestError as error:
            raise ConfigError(f"{what} {file}, line {number}: {error}") from error
        if len(ids) < PAGE_TOKENS:
            raise ConfigError(
                f"{what} {file}, line {number}: {len(ids)} tokens; the cache keeps whole chunks of {PAGE_TOKENS}"
            )
        pins.append(Pin(number, ids[: len(ids) // PAGE_TOKENS * PAGE_TOKENS]))
    return pins


def _checked(given: Any) -> dict[str, Any]:
    """The content of a line. Raises ValueError if it is malformed."""
    match given:
        case {"prompt": str(), **rest} if not rest:
            return {"prompt": given["prompt"]}
        case {"messages": [_, *_] as messages, **rest} if not rest:
            check_messages(messages)
            for message in messages:
                if message["role"] not in ROLES:
                    raise ValueError(f"a message has a role, one of {', '.join(ROLES)}")
                if "tool_calls" in message:
                    raise ValueError("a pinned conversation has no calls of tools; pin the messages before them")
                if not isinstance(message.get("content"), str):
                    raise ValueError("the content of a message must be a string")
            renamed = [{**each, "role": "system"} if each["role"] == "developer" else each for each in messages]
            return {"messages": renamed}
    raise ValueError('it must be {"prompt": "..."} or {"messages": [{"role": ..., "content": ...}, ...]}')


@contextmanager
def pin_errors(file: Path, line: int, copies: int = 1) -> Iterator[None]:
    """Adds the line of a refused prefix, and the number of its copies, to the error."""
    try:
        yield
    except RequestError as error:
        each = f" (one copy for each of {copies} API keys)" if copies > 1 else ""
        raise ConfigError(f"cache.pin {file}, line {line}: {error}{each}") from error


def pin_prefixes(engine: Engine, file: Path, pins: Sequence[Pin], salts: Sequence[str] = ("",)) -> None:
    """Computes and pins prefixes of a file for each salt. The engine must have no other requests. Raises ConfigError if
    they do not fit.
    """
    each = list(itertools.product(pins, salts))
    for number, (pin, salt) in enumerate(each):
        with pin_errors(file, pin.line, len(salts)):
            check_pin_room(engine, pin.ids, salt)
            hints = CacheHints(cache_pin=True, cache_salt=salt)
            name = f"pin-{number}"
            engine.add(name, pin.ids, PIN_PARAMS, hints)
            try:
                while engine.has_work:
                    engine.step()
            except BaseException:
                engine.abort(name)
                raise
            while engine.idle() == 0.0:
                pass
    for pin, salt in each:
        protect(engine, pin.ids, salt)
    log_pins(engine, file, len(salts))


def check_pin_room(engine: Engine, prompt_ids: list[int], salt: str = "") -> None:
    """Raises RequestError if pins have no room for a prompt."""
    keys = ChunkKeys(replace(engine.namespace, salt=salt), prompt_ids)
    if not engine.scheduler.manager.pins.has_room(keys, len(prompt_ids) // PAGE_TOKENS):
        raise RequestError(f"it would pin over {PINNED_SHARE:.0%} of the cache; raise cache.memory", "cache_pin")


def protect(engine: Engine, prompt_ids: list[int], salt: str = "") -> None:
    """Makes the existing pin of a prompt permanent. From then on, the rest of the cache limits requests.

    Raises QuireError while there are requests, because they were admitted under a larger limit.
    """
    manager = engine.scheduler.manager
    if engine.has_work:
        raise QuireError("prefixes are protected before there are requests")
    manager.pins.protect(ChunkKeys(replace(engine.namespace, salt=salt), prompt_ids))
    num_chunks, num_firsts = manager.pins.num_protected
    # Without requests, all chunks are in the tree, and the unprotected ones can be evicted.
    num_more, num_more_firsts = num_chunks - manager.tree.num_chunks, num_firsts - manager.tree.num_unread_firsts
    left = manager.reservations.capacity(num_more, num_more_firsts) * PAGE_TOKENS
    if left < engine.max_context:
        engine.max_context, engine.context_limit = left, "what cache.pin leaves of cache.memory"


def log_pins(engine: Engine, file: Path, copies: int = 1) -> None:
    """Logs the pinned prefixes and their size."""
    each = f", one copy for each of {copies} API keys" if copies > 1 else ""
    num_bytes = engine.stats()["cache"]["bytes_pinned"]
    log.info("pinned the prefixes of %s%s: %s; requests of %d tokens fit beside them", file, each,
             format_bytes(num_bytes), engine.max_context)  # fmt: skip
