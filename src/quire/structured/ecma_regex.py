"""Translates regular expressions of JSON Schema (ECMA-262 with the flag u) into the syntax of Rust's regex crate.

Some expressions that ECMA-262 does not allow have one meaning elsewhere (in its Annex B, in Python): `\\@` is `@`, and
an unmatched closing brace or bracket is a character. They have this meaning here, too. All else is refused by name.
Names of groups and lazy quantifiers do not change the language and are dropped. Look-around is refused, except in the
expressions of `WITHOUT_LOOK_AROUND`. Classes of characters lose NUL; see `_one_of`.

Source: ECMA-262, section 22.2.1 (patterns) and Annex B.1.2.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

MAX_DEPTH = 200
"""Maximum nesting of groups. Rust's parser takes a nesting of 250."""

_LAST = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)

Ranges = list[tuple[int, int]]
"""Ranges of code points, both ends included."""

_DIGIT: Ranges = [(0x30, 0x39)]
_WORD: Ranges = [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]
_BLANK: Ranges = [
    (0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029), (0x202F, 0x202F),
    (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF),
]  # fmt: skip
_LINE_ENDS: Ranges = [(0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)]

_CONTROLS = {"t": 0x09, "n": 0x0A, "v": 0x0B, "f": 0x0C, "r": 0x0D}

_QUANTIFIER = re.compile(r"[*+?]|\{(\d+)(?:(,)(\d*))?\}")
_FROM_NONE = re.compile(r"\{,\d+\}")
_GROUP_NAME = re.compile(r"\(\?<([^\W\d][\w$]*|\$[\w$]*)>")
_PROPERTY = re.compile(r"\{([A-Za-z_]+(?:=[A-Za-z0-9_]+)?)\}")
_HEX = {"x": re.compile(r"[0-9A-Fa-f]{2}"), "u": re.compile(r"[0-9A-Fa-f]{4}")}
_CODE_POINT = re.compile(r"\{0*([0-9A-Fa-f]{1,6})\}")
_LOW_SURROGATE = re.compile(r"\\u([Dd][C-Fc-f][0-9A-Fa-f]{2})")

_LOOK_AROUND = {"(?=": "look-ahead", "(?!": "look-ahead", "(?<=": "look-behind", "(?<!": "look-behind"}


class RustRegex(NamedTuple):
    """An expression in the syntax of Rust's regex crate.

    has_controls  whether it has a character that JSON can only write as `\\u00..`. Without that escape, llguidance
                  1.9.1 would ignore such a character.
    """

    rust: str
    has_controls: bool


class RegexTranslationError(ValueError):
    """The expression is not valid in ECMA-262, or is not supported."""


Meaning = int | Ranges | str
"""The meaning of a piece of an expression: a character, a class, or a class by a property in Rust's syntax."""


def to_rust(pattern: str) -> RustRegex:
    """Translates an expression. Takes linear time. Raises RegexTranslationError."""
    return _Translator(WITHOUT_LOOK_AROUND.get(pattern, pattern)).translated()


class _Translator:
    """Translates an expression in one pass from left to right."""

    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._place = 0
        self._found: list[str] = []
        self._depth = 0
        self._may_repeat = False  # whether a quantifier may come next
        self._has_any = False  # whether there was a [^], which other syntaxes do not close here
        self._has_controls = False

    def translated(self) -> RustRegex:
        """Translates the whole expression."""
        while self._place < len(self._text):
            self._step(self._text[self._place])
        if self._depth:
            raise RegexTranslationError("unclosed group")
        return RustRegex("".join(self._found), self._has_controls)

    def _step(self, char: str) -> None:
        match char:
            case "(":
                self._open()
            case ")":
                if not self._depth:
                    raise RegexTranslationError("a bracket closes no group")
                self._depth -= 1
                self._write(")", 1, may_repeat=True)
            case "|" | "^" | "$":
                self._write(char, 1, may_repeat=False)
            case ".":
                self._write(self._one_of(_complement(_LINE_ENDS)), 1, may_repeat=True)
            case "[":
                self._write(self._class(), 0, may_repeat=True)
            case "\\":
                self._write(self._escape(), 0, may_repeat=True)
            case "*" | "+" | "?" | "{":
                self._repeat(char)
            case "]" if self._has_any:
                raise RegexTranslationError("a ] behind [^] has two meanings; write \\]")
            case _:
                self._write(self._one(self._char(ord(char), 1)), 0, may_repeat=True)

    def _write(self, text: str, length: int, *, may_repeat: bool) -> None:
        """Writes the translation of the next `length` characters."""
        self._found.append(text)
        self._place += length
        self._may_repeat = may_repeat

    def _char(self, code_point: int, length: int) -> int:
        """The code point of a character in an escape. Raises RegexTranslationError for half a surrogate pair."""
        self._place += length
        if _SURROGATES[0] <= code_point <= _SURROGATES[1]:
            raise RegexTranslationError("half of a surrogate pair is in no text")
        return code_point

    def _one(self, code_point: int) -> str:
        """The translation of a character."""
        self._has_controls |= not _is_writable(code_point)
        return _literal(code_point)

    def _one_of(self, ranges: Ranges) -> str:
        """The translation of a class of characters, without NUL unless that is the only member: if a class has all
        characters below the blank, llguidance 1.9.1 also accepts a backslash, with which JSON writes them.
        """
        pieces = [(max(first, 1), last) for first, last in ranges if last] or [(0, 0) for _ in ranges[:1]]
        if not pieces:
            raise RegexTranslationError("a class of characters is empty")
        self._has_controls |= not any(
            last > 0x7F or any(map(_is_writable, range(first, last + 1))) for first, last in pieces
        )
        return f"[{''.join(map(_range_text, pieces))}]"

    def _ahead(self, length: int) -> str:
        return self._text[self._place : self._place + length]

    def _open(self) -> None:
        length = 1
        if self._ahead(2) == "(?":
            if (name := _GROUP_NAME.match(self._text, self._place)) is not None:
                length = len(name[0])
            elif self._ahead(3) == "(?:":
                length = 3
            else:
                kind = next((_LOOK_AROUND[mark] for mark in _LOOK_AROUND if self._ahead(len(mark)) == mark), None)
                raise RegexTranslationError(
                    f"{kind} is not supported" if kind else f"{self._ahead(4)!r} begins no group of ECMA-262"
                )
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise RegexTranslationError(f"more than {MAX_DEPTH} groups are in one another")
        self._write("(?:", length, may_repeat=False)

    def _repeat(self, char: str) -> None:
        found = _QUANTIFIER.match(self._text, self._place)
        if found is None:
            if _FROM_NONE.match(self._text, self._place):
                raise RegexTranslationError(f"{self._ahead(4)!r} is no quantifier of ECMA-262; write {{0,n}}")
            self._write(_literal(ord(char)), 1, may_repeat=True)
            return
        if not self._may_repeat:
            raise RegexTranslationError(f"there is nothing that {found[0]!r} repeats")
        if found[3] and int(found[1][:20]) > int(found[3][:20]):
            raise RegexTranslationError(f"the counts of {found[0]!r} are out of order")
        self._write(found[0], len(found[0]), may_repeat=False)
        self._place += self._text.startswith("?", self._place)

    # ---- escapes ----------------------------------------------------------------------------------------------------

    def _escape(self) -> str:
        """The translation of an escape outside classes."""
        match self._ahead(2)[1:]:
            case "b" | "B":
                raise RegexTranslationError(f"the word boundary {self._ahead(2)} is not supported")
            case "k":
                raise RegexTranslationError("back-references are not supported")
            case digit if digit in "123456789" and digit:
                raise RegexTranslationError(f"the back-reference {self._ahead(2)} is not supported")
        found = self._escaped()
        if isinstance(found, int):
            return self._one(found)
        return _named_class([found]) if isinstance(found, str) else self._one_of(found)

    def _escaped(self) -> Meaning:
        """The character or the class of an escape."""
        char = self._ahead(2)[1:]
        self._place += 2
        match char:
            case "":
                raise RegexTranslationError("it ends with a backslash")
            case "d" | "w" | "s" | "D" | "W" | "S":
                found = {"d": _DIGIT, "w": _WORD, "s": _BLANK}[char.lower()]
                return found if char.islower() else _complement(found)
            case "p" | "P":
                return self._property(char)
            case "0" if not self._ahead(1).isdecimal():
                return 0
            case "c" if re.match(r"[A-Za-z]", self._ahead(1)):
                return self._char(ord(self._ahead(1)) % 32, 1)
            case "x" | "u":
                return self._coded(char)
            case _ if char in _CONTROLS:
                return _CONTROLS[char]
            case _ if char.isascii() and char.isalnum():
                raise RegexTranslationError(f"\\{char} is no escape of ECMA-262")
        return self._char(ord(char), 0)

    def _property(self, char: str) -> str:
        found = _PROPERTY.match(self._text, self._place)
        if found is None:
            raise RegexTranslationError(f"\\{char} is not followed by a property in braces")
        self._place = found.end()
        return f"\\{char}{found[0]}"

    def _coded(self, char: str) -> int:
        if char == "u" and (braced := _CODE_POINT.match(self._text, self._place)) is not None:
            if int(braced[1], 16) > _LAST:
                raise RegexTranslationError(f"\\u{braced[0]} is no code point")
            return self._char(int(braced[1], 16), len(braced[0]))
        found = _HEX[char].match(self._text, self._place)
        if found is None:
            raise RegexTranslationError(f"\\{char} is not followed by hexadecimal digits")
        code_point, length = int(found[0], 16), len(found[0])
        low = _LOW_SURROGATE.match(self._text, self._place + length)
        if char == "u" and 0xD800 <= code_point <= 0xDBFF and low is not None:
            return self._char(0x10000 + ((code_point - 0xD800) << 10) + int(low[1], 16) - 0xDC00, length + len(low[0]))
        return self._char(code_point, length)

    # ---- classes ----------------------------------------------------------------------------------------------------

    def _class(self) -> str:
        """The translation of a class in brackets."""
        is_negated = self._ahead(2) == "[^"
        self._place += 1 + is_negated
        if self._ahead(1) == "]":
            if not is_negated:
                raise RegexTranslationError("[] matches nothing; write \\] for a bracket")
            self._has_any = True
        ranges, properties = Ranges(), list[str]()
        while (char := self._ahead(1)) != "]":
            if not char:
                raise RegexTranslationError("a class of characters is not closed")
            first = self._member()
            if self._ahead(1) == "-" and self._ahead(2)[1:] not in ("]", "") and isinstance(first, int):
                back = self._place
                self._place += 1
                last = self._member()
                if isinstance(last, int):
                    if first > last:
                        raise RegexTranslationError("invalid character class range, which is out of order")
                    ranges.append((first, last))
                    continue
                self._place = back  # the hyphen is a member: a class ends no range
            if isinstance(first, str):
                properties.append(first)
            else:
                ranges += [(first, first)] if isinstance(first, int) else first
        self._place += 1
        if properties:
            return _named_class([*properties, *map(_range_text, ranges)], "^" if is_negated else "")
        return self._one_of(_complement(ranges) if is_negated else ranges)

    def _member(self) -> Meaning:
        char = self._ahead(1)
        if char != "\\":
            return self._char(ord(char), 1)
        if self._ahead(2)[1:] == "b":
            self._place += 2
            return 0x08
        return self._escaped()


def _complement(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """All code points outside these ranges."""
    found, begin = Ranges(), 0
    for first, last in sorted(ranges):
        if begin < first:
            found.append((begin, first - 1))
        begin = max(begin, last + 1)
    return [*found, (begin, _LAST)] if begin <= _LAST else found


def _is_writable(code_point: int) -> bool:
    """Whether JSON can write a character as itself, or as a backslash and one character."""
    return 0x20 <= code_point != 0x7F or code_point in b"\b\t\n\f\r"


def _named_class(pieces: list[str], negation: str = "") -> str:
    """A class in Rust's syntax, without NUL. One of the pieces is a property."""
    return rf"[[{negation}{''.join(pieces)}]&&[^\x00]]"


def _range_text(each: tuple[int, int]) -> str:
    first, last = each
    # Rust has no surrogates as characters; its ranges may span them.
    return _literal(first) if first == last else f"{_literal(first)}-{_literal(last)}"


def _literal(code_point: int) -> str:
    """The translation of a character, inside and outside classes."""
    char = chr(code_point)
    return char if char.isascii() and char.isalnum() else f"\\x{{{code_point:x}}}"


_TIME = r"(?:\d+H(?:\d+M)?(?:\d+(?:[.,]\d+)?S)?|\d+M(?:\d+(?:[.,]\d+)?S)?|\d+(?:[.,]\d+)?S)"
_MAILBOX = r"@(?:[A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
_EMAIL = r"^(?:[A-Za-z0-9_'+\-]+\.)*[A-Za-z0-9_'+\-]*[A-Za-z0-9_+-]" + _MAILBOX

WITHOUT_LOOK_AROUND = {
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$": (
        rf"^P(?:\d+W|(?:\d+Y(?:\d+M)?(?:\d+D)?|\d+M(?:\d+D)?|\d+D)(?:T{_TIME})?|T{_TIME})$"
    ),
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$": _EMAIL,
    r"^(?!\.)(?!.*\.\.)([a-zA-Z0-9_'+\-\.]*)[a-zA-Z0-9_+-]@([a-zA-Z0-9][a-zA-Z0-9\-]*\.)+[a-zA-Z]{2,}$": _EMAIL,
    r"^(?=[\s\S]*[\p{Extended_Pictographic}\p{Regional_Indicator}\u20E3])"
    r"[\p{Extended_Pictographic}\p{Emoji_Component}]+$": (
        r"^[\p{Extended_Pictographic}\p{Emoji_Component}]*[\p{Extended_Pictographic}\p{Regional_Indicator}\u20E3]"
        r"[\p{Extended_Pictographic}\p{Emoji_Component}]*$"
    ),
    r"^[A-Z]{2}(?!00|01|99)\d{2}[A-Z0-9]{11,30}$": r"^[A-Z]{2}(?:0[2-9]|[1-8]\d|9[0-8])[A-Z0-9]{11,30}$",
}
"""Expressions with look-around that Zod writes (4.1 to 4.6, and 3 with zod-to-json-schema), and equivalent expressions
without it: for durations, e-mail addresses, emoji and account numbers."""

_LABELS = r"[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?(?:\.[a-zA-Z0-9](?:[-0-9a-zA-Z]{0,61}[0-9a-zA-Z])?)*\.?$"

HOSTNAME = (rf"^(?=.{{1,253}}\.?$){_LABELS}", f"^{_LABELS}", 253)
"""Host names: Zod's expression, an expression without look-around, and the maximum length. These are equivalent only
together with the format hostname, which allows no dot at the end.
"""
