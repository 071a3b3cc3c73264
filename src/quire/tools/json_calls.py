"""Parses complete JSON calls in all the variants that models write."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

KEYS = ("arguments", "parameters", "args", "input")
"""Keys under which models write arguments, whatever their format demands."""

STRING = r'"[^"\\]*(?:\\.[^"\\]*)*"'
"""A JSON string, as a regular expression. Needs re.DOTALL."""

NAME_KEYS = ("name", "function", "tool_name")
"""Keys under which models write a function's name."""

_REDUNDANT = frozenset({"type", "id", "call_id", "tool_call_id", "index"})
"""Members of a call that a caller does not need."""

_KEY = re.compile(rf"\s*({STRING})\s*:\s*(?=\S)", re.DOTALL)
_BEHIND = re.compile(r"\s*([,}])")
_EMPTY = re.compile(r"\{\s*\}")
_FILLED = re.compile(r'\{\s*"')
_SCALAR = re.compile(r"[-+.\w]*")


class JsonScanner:
    """Finds the end of one JSON string, object or list in text that arrives in pieces. It follows only brackets and
    strings, and checks nothing else.

    num_seen  characters of the value so far
    end       length of the value; -1: incomplete
    nested    position of the first inner bracket; -1: none so far
    """

    def __init__(self) -> None:
        self.num_seen, self.end, self.nested = 0, -1, -1
        self._depth, self._in_string, self._is_escaped = 0, False, False

    def find(self, text: str, begin: int, upto: int | None = None, *, to_nested: bool = False) -> int:
        """The length of the value that begins at `begin`; -1 if it is incomplete. Skips what earlier calls scanned.

        upto       position where the scan stops
        to_nested  whether the scan stops after the first inner bracket
        """
        if self.end >= 0 or (to_nested and self.nested >= 0):
            return self.end
        depth, in_string, is_escaped = self._depth, self._in_string, self._is_escaped
        last = len(text) if upto is None else min(upto, len(text))
        place = last
        for place in range(begin + self.num_seen, last):
            char = text[place]
            if in_string:
                if is_escaped:
                    is_escaped = False
                elif char == "\\":
                    is_escaped = True
                elif char == '"':
                    in_string = False
                    if not depth:
                        self.end = place + 1 - begin
                        break
            elif char == '"':
                in_string = True
            elif char in "{[":
                depth += 1
                if depth == 2 and self.nested < 0:
                    self.nested = place - begin
                    if to_nested:
                        last = place + 1
                        break
            elif char in "}]":
                depth -= 1
                if not depth:
                    self.end = place + 1 - begin
                    break
        self._depth, self._in_string, self._is_escaped = depth, in_string, is_escaped
        self.num_seen = max(self.num_seen, last - begin) if self.end < 0 else self.end
        return self.end


class ParsedCall(NamedTuple):
    """A parsed call: its name, its arguments as JSON text, and the text of each other member."""

    name: str
    arguments: str
    others: list[str]


def parse_call(text: str, keys: Sequence[str] = KEYS) -> ParsedCall | None:
    """Parses a call. None if the text is no call, or if its arguments cannot be identified.

    text  an object, from its opening to its closing brace
    keys  keys of the arguments

    The first name and the first non-empty arguments count. A call without arguments, or with null, has {}, unless
    another member might be its arguments.
    """
    try:
        members = list(_members(text))
        return _call(members, keys) or _inner_call(members, keys)
    except ValueError:
        return None


def _call(members: list[tuple[str, str, str]], keys: Sequence[str]) -> ParsedCall | None:
    names = [value for wanted in NAME_KEYS for key, value, _ in members if key == wanted]
    if not names or (name := decoded(names[0])) is None:
        return None
    arguments, others = "", list[str]()
    for key, value, written in members:
        if key in keys and not arguments and (found := arguments_of(value)):
            arguments = found
        elif not is_redundant(key, value, name, keys):
            others.append(written)
    return ParsedCall(name, arguments or "{}", others) if arguments or not others else None


def _inner_call(members: list[tuple[str, str, str]], keys: Sequence[str]) -> ParsedCall | None:
    """A call as APIs write it: {"type": "function", "function": {"name": ..., "arguments": ...}}."""
    inner = [value for key, value, _ in members if key == "function"]
    if len(inner) != 1 or not inner[0].startswith("{") or {key for key, _, _ in members} & {"name", "tool_name", *keys}:
        return None
    call = _call(list(_members(inner[0])), keys)
    if call is None:
        return None
    others = [
        written for key, value, written in members if key != "function" and not is_redundant(key, value, "", keys)
    ]
    if others and call.arguments == "{}":
        return None
    return call._replace(others=call.others + others)


def is_redundant(key: str, value: str, name: str, keys: Sequence[str]) -> bool:
    """Whether a member of a call with this name can be dropped, because it repeats the name or is empty or metadata."""
    if key in NAME_KEYS:
        return value == "null" or decoded(value) == name
    if key in keys:
        return arguments_of(value) == ""
    return key in _REDUNDANT and value[0] not in "{["


def may_be_redundant(begins: str, keys: Sequence[str]) -> bool:
    """Whether an incomplete member at the end of the answer might be redundant.

    begins  the beginning of its text, such as `"id": "x`
    """
    key = begins[1:].partition('"')
    dropped = {*NAME_KEYS, *keys, *_REDUNDANT}
    return key[0] in _REDUNDANT if key[1] else any(each.startswith(key[0]) for each in dropped)


def arguments_of(value: str) -> str | None:
    """Arguments as the text of an object, given as an object or as a string with one. "" for empty arguments, None if
    they are no object. Checks only the brackets; the caller gets everything inside as the model wrote it.
    """
    if value.startswith('"'):
        value = (decoded(value) or "").strip()
    if value in ("", "null") or _EMPTY.fullmatch(value) or (value.startswith("[") and not value[1:-1].strip()):
        return ""
    return value if _FILLED.match(value) and JsonScanner().find(value, 0) == len(value) else None


def decoded(text: str) -> str | None:
    """The text of a JSON string; None if the string is invalid."""
    try:
        found = json.loads(text, strict=False) if text.startswith('"') else None
    except ValueError:
        return None
    return found if isinstance(found, str) else None


def _value_end(text: str, begin: int) -> int:
    """The end of a value in a text. Raises ValueError if the value is incomplete."""
    is_nested = text[begin] in '"{['
    end = begin + JsonScanner().find(text, begin) if is_nested else scalar_end(text, begin)
    if end <= begin:
        raise ValueError("no JSON")
    return end


def scalar_end(text: str, begin: int, upto: int | None = None) -> int:
    """The end of a number or of a word such as null."""
    match = _SCALAR.match(text, begin, len(text) if upto is None else upto)
    assert match is not None
    return match.end()


def _members(text: str) -> Iterator[tuple[str, str, str]]:
    """Yields the members of an object: key, text of the value, text of the whole member. Raises ValueError."""
    place, mark = 1, "," if not _EMPTY.fullmatch(text) else "}"
    while mark == ",":
        match = _KEY.match(text, place)
        if match is None or (key := decoded(match[1])) is None:
            raise ValueError("no member")
        end = _value_end(text, match.end())
        behind = _BEHIND.match(text, end)
        if behind is None:
            raise ValueError("no member")
        yield key, text[match.end() : end], text[match.start(1) : end]
        place, mark = behind.end(), behind[1]
    if place != len(text) and not _EMPTY.fullmatch(text):
        raise ValueError("text behind an object")
