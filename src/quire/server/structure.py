"""How much a JSON text holds, counted on its bytes: what parsing it would cost, known before it is parsed.

Knows JSON's grammar only as far as strings and brackets go. A text that is not JSON is counted as if it were.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from quire.server.errors import bad_request

MAX_VALUES = 2**20
"""Values between commas. The largest honest request, a prompt of a million token ids, takes 40 MB once parsed."""

MAX_STRINGS = 2**17
"""Strings, names included: 70 bytes each once parsed. Twice the names, so that each may have a text as its value."""

MAX_NAMES = 2**16
"""Names of objects: 20,000 messages with three names each. A parsed one takes 200 bytes with its object."""

MAX_CONTAINERS = 2**16
"""Arrays and objects. 65,536 of them take 15 ms to parse and 2,700,000, which 8 MiB can hold, 800 ms."""

MAX_DEPTH = 200
"""Arrays and objects around a value. The parser stops at the same depth; templates may descend by recursion."""

SLICE = 64 * 1024
"""Bytes looked at in one go. Each slice lets other threads run, and its pieces take at most a few MB."""


def check_structure(text: bytes | bytearray) -> None:
    """Raises ApiError 400 for a JSON text that holds more than one request may, as soon as that is seen.

    8 MiB take 3 ms if they are one string and 75 ms at worst.
    """
    values = strings = names = containers = depth = 0
    for outside, num_quotes in _outside_strings(text):
        values += outside.count(b",")
        names += outside.count(b":")
        # The odd quote ends a string that is counted in the slice where it begins.
        strings += num_quotes
        brackets = outside.translate(_BRACKETS, _NO_BRACKETS)
        containers += brackets.count(_OPEN)
        _check("values", values + 1, MAX_VALUES)
        _check("strings", strings // 2, MAX_STRINGS)
        _check("names", names, MAX_NAMES)
        _check("arrays and objects", containers, MAX_CONTAINERS)
        if brackets:
            depths = list(accumulate((1 if each == _OPEN else -1 for each in brackets), initial=depth))
            depth = depths[-1]
            _check("levels", max(depths), MAX_DEPTH)


_OPEN, _CLOSE = ord("["), ord("]")
_BRACKETS = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def _check(what: str, count: int, most: int) -> None:
    if count > most:
        raise bad_request(f"the body holds more than {most} {what}; send less in one request", code="body_too_complex")


def _outside_strings(text: bytes | bytearray) -> Iterator[tuple[bytes, int]]:
    """For each slice of `text` its bytes that stand in no string, and how many quotes begin or end one."""
    view = memoryview(text)
    at, inside = 0, 0
    while at < len(view):
        part = bytes(view[at : at + SLICE])
        if part.endswith(b"\\") and len(part) == SLICE and (len(part) - len(part.rstrip(b"\\"))) % 2:
            part = part[:-1]  # it escapes the first byte of the next slice
        at += len(part)
        if b"\\" in part:
            # From the left, so that of a run of backslashes each pair goes and an odd one takes its quote along.
            part = part.replace(b"\\\\", b"").replace(b'\\"', b"")
        pieces = part.split(b'"')
        yield b"".join(pieces[inside::2]), len(pieces) - 1
        inside = (inside + len(pieces) - 1) % 2
