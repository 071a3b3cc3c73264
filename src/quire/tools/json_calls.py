"""What a whole call says, however a model has written it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

KEYS = ("arguments", "parameters", "args", "input")
"""Keys that models write arguments under, whatever their format says."""

STRING = r'"[^"\\]*(?:\\.[^"\\]*)*"'
"""A JSON string, as a regular expression. Needs re.DOTALL."""

_REDUNDANT = frozenset({"type", "id", "call_id", "index"})
"""Members of a call that say nothing a caller needs."""

_KEY = re.compile(rf"\s*({STRING})\s*:\s*(?=\S)", re.DOTALL)
_BEHIND = re.compile(r"\s*([,}])")
_EMPTY = re.compile(r"\{\s*\}")
_FILLED = re.compile(r'\{\s*"')
_SCALAR = re.compile(r"[-+.\w]*")


class JsonScanner:
    """Follows the text of one JSON string, object or list to its end, however the text is cut. Brackets and strings
    count; it does not look at anything else.

    num_seen  characters of the value so far
    end       its length; -1: it goes on
    nested    where its first inner bracket is; -1: none so far
    """

    def __init__(self) -> None:
        self.num_seen, self.end, self.nested = 0, -1, -1
        self._depth, self._in_string, self._is_escaped = 0, False, False

    def find(self, text: str, begin: int, upto: int | None = None, *, to_nested: bool = False) -> int:
        """The length of the value that begins at `begin`; -1 if it goes on. What earlier calls saw is skipped.

        upto       where it stops looking
        to_nested  whether it stops behind the first inner bracket
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
    """The name and the arguments, as JSON text, of a call, and the other members that it has, as they are written."""

    name: str
    arguments: str
    others: list[str]


def parse_call(text: str, keys: Sequence[str] = KEYS) -> ParsedCall | None:
    """What a call says; None if it is none, or if its arguments cannot be told.

    text  an object from its brace to the brace that closes it
    keys  that arguments may stand under

    The first name and the first arguments that are not empty count. A call without arguments, or with null, has {},
    unless it has other members that could be meant as arguments.
    """
    try:
        members = list(_members(text))
        return _call(members, keys) or _inner_call(members, keys)
    except ValueError:
        return None


def _call(members: list[tuple[str, str, str]], keys: Sequence[str]) -> ParsedCall | None:
    names = [value for wanted in ("name", "function") for key, value, _ in members if key == wanted]
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
    if len(inner) != 1 or not inner[0].startswith("{") or {key for key, _, _ in members} & {"name", *keys}:
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
    """Whether a member of a call of this name may be dropped: it says nothing that its name and arguments do not."""
    if key in ("name", "function"):
        return value == "null" or decoded(value) == name
    if key in keys:
        return arguments_of(value) == ""
    return key in _REDUNDANT and value[0] not in "{["


def may_be_redundant(begins: str, keys: Sequence[str]) -> bool:
    """Whether a member that the answer's end cut off may be one to drop.

    begins  its text: `"id": "x` or less
    """
    key = begins[1:].partition('"')
    dropped = {"name", "function", *keys, *_REDUNDANT}
    return key[0] in _REDUNDANT if key[1] else any(each.startswith(key[0]) for each in dropped)


def arguments_of(value: str) -> str | None:
    """Arguments as the text of an object: they are one, or a text that is one. "" if there are none, None for what
    is no object. Only the brackets are checked: what a model writes within is passed on.
    """
    if value.startswith('"'):
        value = (decoded(value) or "").strip()
    if value in ("", "null") or _EMPTY.fullmatch(value) or (value.startswith("[") and not value[1:-1].strip()):
        return ""
    return value if _FILLED.match(value) and JsonScanner().find(value, 0) == len(value) else None


def decoded(text: str) -> str | None:
    """The text of a JSON string; None if it is none."""
    try:
        found = json.loads(text, strict=False) if text.startswith('"') else None
    except ValueError:
        return None
    return found if isinstance(found, str) else None


def _value_end(text: str, begin: int) -> int:
    """Where a value ends in a text. Raises ValueError if it does not."""
    is_nested = text[begin] in '"{['
    end = begin + JsonScanner().find(text, begin) if is_nested else scalar_end(text, begin)
    if end <= begin:
        raise ValueError("no JSON")
    return end


def scalar_end(text: str, begin: int, upto: int | None = None) -> int:
    """Where a number or a word like null ends."""
    match = _SCALAR.match(text, begin, len(text) if upto is None else upto)
    assert match is not None
    return match.end()


def _members(text: str) -> Iterator[tuple[str, str, str]]:
    """The members of an object: each one's key, the text of its value, and all of its text. Raises ValueError."""
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
