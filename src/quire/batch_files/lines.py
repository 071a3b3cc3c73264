"""The input of `quire generate` and `quire profile`: one prompt per line, as JSON, with optional parameters."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from quire.engine.params import CacheHints, SamplingParams
from quire.errors import ConfigError
from quire.models.chat import check_messages
from quire.safe_io import parse_json, read_source

if TYPE_CHECKING:
    from quire.models.tokenizer import Tokenizer

PROMPT_KEYS = ("prompt", "messages", "prompt_token_ids")
_HINTS = frozenset(field.name for field in fields(CacheHints) if field.init)
_PARAMETERS = frozenset(field.name for field in fields(SamplingParams)) - {"detokenize"}
_SHOWN_PROBLEMS = 10
_SHOWN_CHARS = 300


@dataclass(frozen=True)
class BatchLine:
    """One line of the input. `prompt` has one of `PROMPT_KEYS`, and the line's cache hints."""

    line_id: str | int
    prompt: dict[str, Any]
    params: SamplingParams


def read_input(name: str, sampling: dict[str, Any]) -> list[BatchLine]:
    """Reads the input. Raises ConfigError that describes the first ten invalid lines."""
    label = "stdin" if name == "-" else name
    try:
        content = read_source(name)
    except OSError as error:
        raise ConfigError(f"cannot read {label}: {error.strerror or error}") from error
    lines: list[BatchLine] = []
    known: dict[str | int, int] = {}
    problems: list[str] = []
    for number, raw in enumerate(content.split(b"\n"), 1):
        if not raw.strip():
            continue
        try:
            line = _read_line(raw, number, sampling)
            if line.line_id in known:
                raise ValueError(f"line {known[line.line_id]} has the same id {line.line_id!r}")
            known[line.line_id] = number
            lines.append(line)
        except ValueError as error:
            what = str(error)
            what = what if len(what) <= _SHOWN_CHARS else what[: _SHOWN_CHARS - 1] + "…"
            problems.append(f"{label}:{number}: {what}")
    if len(problems) == 1:
        raise ConfigError(problems[0])
    if problems:
        shown = problems[:_SHOWN_PROBLEMS]
        if len(problems) > len(shown):
            shown.append(f"and {len(problems) - len(shown)} more")
        message = f"{label} has {len(problems)} invalid lines; nothing was run"
        raise ConfigError("\n".join([message, *shown]))
    return lines


def in_tokens(tokenizer: Tokenizer, prompt: dict[str, Any]) -> dict[str, Any]:
    """Converts a prompt of any kind, with its hints, to one of token ids. Raises RequestError."""
    hints = {key: value for key, value in prompt.items() if key not in PROMPT_KEYS}
    if "messages" in prompt:
        return hints | {"prompt_token_ids": tokenizer.chat_ids(prompt["messages"])}
    if "prompt" in prompt:
        return hints | {"prompt_token_ids": tokenizer.encode(prompt["prompt"])}
    return dict(prompt)


def _read_line(raw: bytes, number: int, sampling: dict[str, Any]) -> BatchLine:
    """Parses a line. Raises ValueError (RequestError is one) if it is invalid."""
    try:
        values = parse_json(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"invalid UTF-8: byte {error.start + 1} is {raw[error.start]:#04x}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"invalid JSON: {error.msg}, at character {error.colno}") from error
    if not isinstance(values, dict):
        raise ValueError("a line must be a JSON object")
    line_id = values.pop("id", number)
    if isinstance(line_id, bool) or not isinstance(line_id, str | int):
        raise ValueError("'id' must be a string or an integer")
    kinds = [key for key in PROMPT_KEYS if key in values]
    if len(kinds) != 1:
        raise ValueError(f"a line must have exactly one of {', '.join(PROMPT_KEYS)}")
    kind = kinds[0]
    prompt = values.pop(kind)
    hints = {key: hint for key in _HINTS & values.keys() if (hint := values.pop(key)) is not None}
    unknown = sorted(values.keys() - _PARAMETERS)
    if unknown:
        raise ValueError(f"unknown key {unknown[0]!r}")
    if isinstance(values.get("logit_bias"), dict):
        try:
            values["logit_bias"] = {int(token): bias for token, bias in values["logit_bias"].items()}
        except ValueError:
            raise ValueError("the keys of 'logit_bias' must be token ids") from None
    if not isinstance(prompt, str if kind == "prompt" else list):
        raise ValueError(f"'{kind}' must be a {'string' if kind == 'prompt' else 'list'}")
    if kind == "messages":
        check_messages(prompt)
    if kind == "prompt_token_ids" and not all(type(each) is int for each in prompt):
        raise ValueError("'prompt_token_ids' must be a list of integers")
    CacheHints(**hints)  # raises RequestError for invalid hints
    return BatchLine(line_id, {kind: prompt, **hints}, SamplingParams(**(sampling | values)))
