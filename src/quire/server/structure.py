"""Counts the structure of a JSON text on its bytes, which bounds the cost of parsing before it is parsed.

Knows only the strings and brackets of JSON's grammar. Counts an invalid text as if it were valid.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from quire.server.errors import ApiError, bad_request

MAX_VALUES = 2**20
"""Values, counted by commas. The largest honest request, a prompt of a million token ids, takes 40 MB once parsed."""

MAX_STRINGS = 2**17
"""Strings, names included; each takes 70 bytes once parsed. Twice MAX_NAMES, so that every name may have a text."""

MAX_NAMES = 2**16
"""Names in objects: enough for 20,000 messages with three names each. A parsed name with its object takes 200 bytes."""

MAX_CONTAINERS = 2**16
"""Arrays and objects. 65,536 of them take 15 ms to parse; 2,700,000, which fit into 8 MiB, take 800 ms."""

MAX_DEPTH = 200
"""Nesting of arrays and objects. The parser stops at the same depth; templates may descend by recursion."""

SLICE = 64 * 1024
"""Bytes per slice. Other threads may run between slices, and the pieces of a slice take at most a few MB."""


def check_structure(text: bytes | bytearray) -> None:
    """Raises ApiError 400 as soon as a JSON text exceeds one of the limits.

    8 MiB take 3 ms if they are one string, and 75 ms at worst.
    """
    values = strings = names = containers = depth = 0
    for outside, num_quotes in _outside_strings(text):
        values += outside.count(b",")
        names += outside.count(b":")
        # An odd quote ends a string that was counted in the slice where it began.
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
        raise too_complex(what, most)


def too_complex(what: str, most: int) -> ApiError:
    """The error of a body with too many of something."""
    return bad_request(f"the body has more than {most} {what}; send less in one request", code="body_too_complex")


def _outside_strings(text: bytes | bytearray) -> Iterator[tuple[bytes, int]]:
    """For each slice of `text`: the bytes outside strings, and the number of quotes that begin or end a string."""
    view = memoryview(text)
    at, inside = 0, 0
    while at < len(view):
        part = bytes(view[at : at + SLICE])
        if part.endswith(b"\\") and len(part) == SLICE and (len(part) - len(part.rstrip(b"\\"))) % 2:
            part = part[:-1]  # it escapes the first byte of the next slice
        at += len(part)
        if b"\\" in part:
            # From the left: removes each pair of backslashes, then an odd backslash together with its quote.
            part = part.replace(b"\\\\", b"").replace(b'\\"', b"")
        pieces = part.split(b'"')
        yield b"".join(pieces[inside::2]), len(pieces) - 1
        inside = (inside + len(pieces) - 1) % 2
