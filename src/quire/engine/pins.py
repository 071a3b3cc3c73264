"""Prefixes that are computed at start and kept: the file of cache.pin, a JSON object a line.

{"prompt": "You are a helpful ..."} or {"messages": [{"role": "system", "content": "..."}]}; a conversation is rendered
without the marker of the next answer, as the beginning of a longer one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quire.cache.page import PAGE_TOKENS
from quire.engine.params import SamplingParams
from quire.errors import ConfigError, RequestError

PIN_PARAMS = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
"""What is generated after a prefix that is only to be computed."""


def pinned(ids: list[int], salt: str = "") -> dict[str, Any]:
    """A prompt that is kept for good."""
    return {"prompt_token_ids": ids, "cache_pin": True, "cache_salt": salt}


def read_pins(file: Path, tokenizer: Any) -> list[list[int]]:
    """The token ids of every prefix. Raises ConfigError, naming the line, for one that is no
    prefix or shorter than a chunk.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the prefixes of cache.pin: {error}") from error
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"line {number} of {file} (cache.pin)"
        try:
            ids = _token_ids(json.loads(line), tokenizer)
        except ValueError as error:  # the tokenizer's own refusals are ValueErrors too
            raise ConfigError(f"{where}: {error}") from error
        if len(ids) < PAGE_TOKENS:
            raise ConfigError(f"{where}: {len(ids)} tokens; what is kept are whole chunks of {PAGE_TOKENS}")
        found.append(ids)
    if not found:
        raise ConfigError(f"{file} (cache.pin) holds no prefix")
    return found


def _token_ids(given: Any, tokenizer: Any) -> list[int]:
    match given:
        case {"prompt": str(text), **rest} if not rest:
            ids: list[int] = tokenizer.encode(text)
        case {"messages": [*messages], **rest} if not rest and all(_is_message(each) for each in messages):
            ids = tokenizer.encode(tokenizer.chat(messages, False), add_special=False)
        case _:
            raise ValueError('it must be {"prompt": "..."} or {"messages": [{"role": ..., "content": ...}, ...]}')
    return ids


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))


@contextmanager
def pin_errors(file: str) -> Iterator[None]:
    """Turns the refusal of a prefix into one that names the file."""
    try:
        yield
    except RequestError as error:
        raise ConfigError(f"cache.pin {file}: {error}") from error
