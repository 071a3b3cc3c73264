"""Counts the structure of JSON texts on their bytes, which bounds the cost of parsing before they are parsed.

A request has one budget, for its body and for the JSON in its strings. Knows only the strings and brackets of JSON's
grammar. Counts an invalid text as if it were valid.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Annotated

from pydantic import AfterValidator, ValidationInfo
from pydantic_core import PydanticCustomError

from quire.server.errors import ApiError, bad_request

MAX_VALUES = 2**20
"""Values, counted by commas. The largest honest request, a prompt of a million token ids, takes 40 MB once parsed."""

MAX_STRING_VALUES = 2**18
"""Values in strings that are parsed as JSON: as many as a conversation may have. A million numbers in one string would
stop all other threads for 0.15 s while they are parsed."""

MAX_STRINGS = 2**17
"""Strings, names included; each takes 70 bytes once parsed. Twice MAX_NAMES, so that every name may have a text."""

MAX_NAMES = 2**16
"""Names in objects: enough for 20,000 messages with three names each. A parsed name with its object takes 200 bytes."""

MAX_CONTAINERS = 2**16
"""Arrays and objects. 65,536 of them take 15 ms to parse; 2,700,000, which fit into 8 MiB, take 800 ms."""

MAX_DEPTH = 200
"""Nesting of arrays and objects. The parser stops at the same depth; templates may descend by recursion."""

MAX_DIGITS = 1000
"""Digits of a number: 3,300 bits. The time to parse them grows with their square: 8 MiB of numbers take 60 ms with
1,000 digits each, and 330 ms with 4,300."""

SLICE = 64 * 1024
"""Bytes per slice. Other threads may run between slices, and the pieces of a slice take at most a few MB."""


class JsonComplexity:
    """The structure of one request: of its body, and of those of its strings that are parsed as JSON themselves, such
    as the arguments of replayed calls. All texts together stay within the limits above; MAX_DEPTH applies to each text.
    """

    __slots__ = ("chars", "containers", "names", "quotes", "string_values", "values")

    def __init__(self) -> None:
        self.string_values = 0
        self.values = self.quotes = self.names = self.containers = self.chars = 0

    def add(self, text: bytes | bytearray) -> None:
        """Counts a text. Raises TooComplexError as soon as the request exceeds one of the limits.

        8 MiB take 3 ms if they are one string, and 75 ms at worst.
        """
        depth, digits = 0, b""
        self.values += 1
        self.chars += len(text) * _width(text)
        for outside, num_quotes in _outside_strings(text):
            self.values += outside.count(b",")
            self.names += outside.count(b":")
            # An odd quote ends a string that was counted in the slice where it began.
            self.quotes += num_quotes
            brackets = outside.translate(_BRACKETS, _NO_BRACKETS)
            self.containers += brackets.count(_OPEN)
            _check("values", self.values, MAX_VALUES)
            _check("strings", self.quotes // 2, MAX_STRINGS)
            _check("names", self.names, MAX_NAMES)
            _check("arrays and objects", self.containers, MAX_CONTAINERS)
            digits = digits[-MAX_DIGITS:] + outside.translate(_DIGITS)
            if _MANY_DIGITS in digits:
                raise TooComplexError("digits in a number", MAX_DIGITS)
            if brackets:
                depths = list(accumulate((1 if each == _OPEN else -1 for each in brackets), initial=depth))
                depth = depths[-1]
                _check("levels", max(depths), MAX_DEPTH)
        self.quotes += self.quotes % 2  # an unfinished string does not reach into the next text

    @property
    def num_bytes(self) -> int:
        """Upper bound of the memory of the parsed body and its checked copy: 40 bytes a value, 70 a string besides its
        characters, 130 a name, 100 an array or object. 12,000 calls take 13 MB (17 by this bound), a million token ids
        40 (48), 8 MiB of text with one emoji 33 (33).
        """
        return 40 * self.values + 35 * self.quotes + 130 * self.names + 100 * self.containers + self.chars


class TooComplexError(Exception):
    """The structure of a request exceeds `most`."""

    def __init__(self, what: str, most: int) -> None:
        super().__init__(f"more than {most:,} {what}; send less in one request")


def check_complexity(text: bytes | bytearray) -> JsonComplexity:
    """The structure of a body. Raises ApiError 400 as soon as it exceeds one of the limits."""
    found = JsonComplexity()
    try:
        found.add(text)
    except TooComplexError as error:
        raise too_complex(error) from None
    return found


def check_string(text: str, info: ValidationInfo) -> str:
    """Counts and returns a string of the request that is parsed as JSON. Its structure adds to that of the body and
    of earlier strings. Raises pydantic's error for the field of the string.
    """
    budget = info.context if isinstance(info.context, JsonComplexity) else JsonComplexity()
    before = budget.values
    try:
        budget.add(text.encode(errors="surrogatepass"))
        budget.string_values += budget.values - before
        _check("values in such strings", budget.string_values, MAX_STRING_VALUES)
    except TooComplexError as error:
        reason = f"as JSON within the body, it makes the request have {error}"
        raise PydanticCustomError("body_too_complex", "{reason}", {"reason": reason}) from None
    return text


JsonText = Annotated[str, AfterValidator(check_string)]
"""A string that is parsed as JSON if it is JSON. Its structure counts as the body's."""


_OPEN, _CLOSE = ord("["), ord("]")
_BRACKETS = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_DIGITS = bytes(ord("0") if chr(each).isdecimal() else ord(" ") for each in range(256))
_MANY_DIGITS = b"0" * (MAX_DIGITS + 1)


def _width(text: bytes | bytearray) -> int:
    """Maximum bytes per character of the parsed strings: Python stores a string as wide as its widest character."""
    if any(lead in text for lead in _FOUR_BYTES) or b"\\ud" in text or b"\\uD" in text:
        return 4
    return 1 if text.isascii() and b"\\u" not in text else 2


_FOUR_BYTES = [bytes([lead]) for lead in range(0xF0, 0xF5)]


def _check(what: str, count: int, most: int) -> None:
    if count > most:
        raise TooComplexError(what, most)


def too_complex(error: TooComplexError) -> ApiError:
    """The answer to a body that exceeds a limit of structure."""
    return bad_request(f"the body has {error}", code="body_too_complex")


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
