"""What a whole call says, however a model has written it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

KEYS = ("arguments", "parameters", "args", "input")
"""Keys that models write arguments under, whatever their format says."""

_BESIDE = frozenset({"name", "type", "id", "call_id", "index", "function"})
"""Members of a call that are no arguments."""

_COMMA = re.compile(r"[ \t\n\r]*[,:{}]?[ \t\n\r]*")


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


# Numbers stay as they are written: long ones take time, and nobody looks at them.
_DECODER = json.JSONDecoder(parse_constant=_no_constant, parse_int=str, parse_float=str)


def call_of(text: str, keys: Sequence[str] = KEYS) -> tuple[str, str] | None:
    """The name and the arguments, as JSON text, of a call; None if it is none, or if its arguments cannot be told.

    text  a JSON object, or what looks like one
    keys  that arguments may stand under

    A call without arguments, or with null, has {}, unless it has other members that could be meant as arguments.
    """
    try:
        members = _members(text)
        inner = members.get("function", "")
        if inner.startswith("{"):
            # As APIs write it: {"type": "function", "function": {"name": ..., "arguments": ...}}.
            return call_of(inner, keys) if not members.keys() & {"name", *keys} else None
        written = members.get("name") or inner
        if not written.startswith('"'):
            return None
        name = str(_DECODER.decode(written))
        given = [_object(members[key]) for key in dict.fromkeys(keys) if key in members]
    except (ValueError, RecursionError):
        return None
    full = {each for each in given if each}
    if len(full) > 1 or (not full and members.keys() - _BESIDE - set(keys)):
        return None
    return name, full.pop() if full else "{}"


def _members(text: str) -> dict[str, str]:
    """The members of a JSON object, with the text of each value. Raises ValueError for what is no object."""
    if not isinstance(_DECODER.decode(text), dict):
        raise ValueError("no object")
    found: dict[str, str] = {}
    place = text.index("{")
    while True:
        place = _behind(text, place)
        if place >= len(text):
            return found
        name, place = _DECODER.raw_decode(text, place)
        place = _behind(text, place)
        begin = place
        _, place = _DECODER.raw_decode(text, begin)
        if name in found and found[name] != text[begin:place]:
            raise ValueError(f"{name} is there twice")
        found[name] = text[begin:place]


def _behind(text: str, place: int) -> int:
    found = _COMMA.match(text, place)
    assert found is not None
    return found.end()


def _object(text: str) -> str:
    """Arguments as the text of an object: they are one, or a text that is one. Empty if there are none. Raises
    ValueError.
    """
    value = _DECODER.decode(text)
    if isinstance(value, str):
        text = value.strip() or "null"
        value = _DECODER.decode(text)
    if value is None or value in ([], {}):
        return ""
    if not isinstance(value, dict):
        raise ValueError("no object")
    return text
