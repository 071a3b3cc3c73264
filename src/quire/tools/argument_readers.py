"""Converts the arguments of a call to JSON while they arrive, for each way in which models write arguments.

A reader begins behind the name and whatever opens the arguments, after the caller has sent the name. It reads what it
can and keeps nothing of a text that it has not read, except where a value is converted as a whole.
"""

from __future__ import annotations

import ast
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal

from quire.tools.argument_types import EVERY_TYPE, json_of_bare, property_types
from quire.tools.json_calls import JsonScanner

KEY_CHARS = 512
"""Maximum number of characters of a key, or of a number without quotes."""

_BLANKS = re.compile(r"\s*")


class ArgumentsReader(ABC):
    """Reads the arguments of one call.

    state  broken: the text is not in the format; what was read so far cannot be taken back
    """

    def __init__(self) -> None:
        self.state: Literal["open", "done", "broken"] = "open"

    @abstractmethod
    def read(self, text: str, begin: int, found: list[str]) -> int:
        """Reads a text from `begin`. Appends pieces of JSON to `found`. Returns the position up to which it has read;
        the next text begins there.
        """


class JsonReader(ArgumentsReader):
    """Arguments that are a JSON object. Only brackets and quotes are checked."""

    def __init__(self) -> None:
        super().__init__()
        self._scan = JsonScanner()

    def read(self, text: str, begin: int, found: list[str]) -> int:
        """See ArgumentsReader."""
        first = begin - self._scan.num_seen
        end = self._scan.find(text, first)
        last = len(text) if end < 0 else first + end
        if last > begin:
            found.append(text[begin:last])
        if end >= 0:
            self.state = "done"
        return last


class StepReader(ArgumentsReader):
    """A reader in steps. A step takes one item of the text, or returns None if the item is incomplete."""

    def __init__(self) -> None:
        super().__init__()
        self._step = "item"

    def read(self, text: str, begin: int, found: list[str]) -> int:
        """See ArgumentsReader."""
        at = begin
        while self.state == "open":
            if self._step != "string":
                at = _skip(text, at)
            if at == len(text):
                break
            end = self._take(text, at, found)
            if end is None:
                break
            at = end
        return at

    @abstractmethod
    def _take(self, text: str, at: int, found: list[str]) -> int | None:
        """Takes the item at `at`, where a text is. Returns its end."""

    def _break(self, at: int) -> int:
        self.state = "broken"
        return at


class TagReader(StepReader):
    """Arguments between tags, as GLM writes them: `<arg_key>city</arg_key><arg_value>Bern</arg_value>`. Strings have no
    quotes: the tool's schema says what is a string. The call's closing tag ends the arguments and is not read.
    """

    def __init__(self, schema: Mapping[str, Any], closer: str) -> None:
        super().__init__()
        self._schema = schema
        self._closer = closer
        self._num_keys = 0
        self._types = EVERY_TYPE
        self._pieces: list[str] = []

    def _take(self, text: str, at: int, found: list[str]) -> int | None:
        match self._step:
            case "item":
                return self._take_key(text, at, found)
            case "value":
                if not text.startswith("<arg_value>", at):
                    return None if _may_be(text, at, "<arg_value>") else self._break(at)
                self._step = "string"
                if self._is_text:
                    found.append('"')
                return at + len("<arg_value>")
        return self._take_value(text, at, found)

    @property
    def _is_text(self) -> bool:
        return self._types == {"string"}

    def _take_key(self, text: str, at: int, found: list[str]) -> int | None:
        if text.startswith(self._closer, at):
            found.append("}" if self._num_keys else "{}")
            self.state = "done"
            return at
        if not text.startswith("<arg_key>", at):
            is_begun = any(_may_be(text, at, mark) for mark in ("<arg_key>", self._closer))
            return None if is_begun else self._break(at)
        end = text.find("</arg_key>", at, at + KEY_CHARS)
        if end < 0:
            return None if len(text) - at < KEY_CHARS else self._break(at)
        key = text[at + len("<arg_key>") : end].strip()
        found.append(("{" if not self._num_keys else ", ") + _json(key) + ": ")
        self._num_keys += 1
        self._types, self._step = property_types(self._schema, key), "value"
        return end + len("</arg_key>")

    def _take_value(self, text: str, at: int, found: list[str]) -> int | None:
        mark = "</arg_value>"
        end = text.find(mark, at)
        last = len(text) - _overlap(text, at, mark) if end < 0 else end
        if last > at:
            if self._is_text:
                found.append(_json(text[at:last])[1:-1])
            else:
                self._pieces.append(text[at:last])
        if end < 0:
            return last if last > at else None
        found.append('"' if self._is_text else json_of_bare("".join(self._pieces), self._types))
        self._pieces.clear()
        self._step = "item"
        return end + len(mark)


@dataclass
class _Frame:
    """An open bracket. kind: of the arguments, an object or a list; num_items: so far."""

    kind: Literal["arguments", "object", "list"]
    closes: str
    num_items: int = 0


class LiteralReader(StepReader):
    """Arguments as names and literal values, with brackets around them. Subclasses know how keys and values look."""

    assigns = ":"
    brackets: Mapping[str, tuple[Literal["object", "list"], str]] = {"{": ("object", "}"), "[": ("list", "]")}

    def __init__(self, schema: Mapping[str, Any], closes: str) -> None:
        super().__init__()
        self._schema = schema
        self._frames = [_Frame("arguments", closes)]
        self._types = EVERY_TYPE
        self._is_key = False  # whether the string is a key

    def _take(self, text: str, at: int, found: list[str]) -> int | None:
        frame = self._frames[-1]
        match self._step:
            case "item" if text[at] == frame.closes:
                return self._close(at, found)
            case "item" if frame.kind != "list":
                return self._take_key(text, at, found)
            case "assign":
                assigns = self.assigns if frame.kind == "arguments" else ":"
                if text[at] != assigns:
                    return self._break(at)
                found.append(": ")
                self._step = "value"
                return at + 1
            case "item" | "value":
                return self._take_value(text, at, found)
            case "after" if text[at] == frame.closes:
                return self._close(at, found)
            case "after":
                self._step = "item"
                return at + 1 if text[at] == "," else self._break(at)
        return self._take_string(text, at, found)

    @abstractmethod
    def _take_key(self, text: str, at: int, found: list[str]) -> int | None:
        """Takes a key, or begins the string of a key."""

    @abstractmethod
    def _take_string(self, text: str, at: int, found: list[str]) -> int | None:
        """Takes a piece of a string, or its end."""

    @abstractmethod
    def _begin_string(self, text: str, at: int) -> int | None:
        """Takes what opens a string. Returns `at` if no string begins there."""

    @abstractmethod
    def _take_scalar(self, text: str, at: int, found: list[str]) -> int | None:
        """Takes a value without quotes and brackets."""

    def _separate(self, found: list[str]) -> None:
        """Writes what stands before the next item."""
        frame = self._frames[-1]
        opens = "{" if frame.kind == "arguments" else ""
        found.append(", " if frame.num_items else opens)
        frame.num_items += 1

    def _add_key(self, key: str, found: list[str]) -> None:
        self._separate(found)
        found.append(_json(key))
        is_argument = self._frames[-1].kind == "arguments"
        self._types = property_types(self._schema, key) if is_argument else EVERY_TYPE
        self._step = "assign"

    def _take_value(self, text: str, at: int, found: list[str]) -> int | None:
        end = self._begin_string(text, at)
        if end is None:
            return None
        is_item = self._step == "item"
        if end > at or text[at] in self.brackets:
            if is_item:
                self._separate(found)
                self._types = EVERY_TYPE
            if end > at:
                found.append('"')
                self._step, self._is_key = "string", False
                return end
            kind, closes = self.brackets[text[at]]
            found.append("{" if kind == "object" else "[")
            self._frames.append(_Frame(kind, closes))
            self._step = "item"
            return at + 1
        pieces: list[str] = []
        if is_item:
            self._types = EVERY_TYPE
        end = self._take_scalar(text, at, pieces)
        if end is not None and self.state == "open":
            if is_item:
                self._separate(found)
            found += pieces
            self._step = "after"
        return end

    def _end_string(self, found: list[str]) -> None:
        found.append('"')
        self._step = "assign" if self._is_key else "after"

    def _close(self, at: int, found: list[str]) -> int:
        frame = self._frames.pop()
        if frame.kind == "arguments":
            found.append("}" if frame.num_items else "{}")
            self.state = "done"
        else:
            found.append("}" if frame.kind == "object" else "]")
        self._step = "after"
        return at + 1


_NAME = re.compile(r"""([^\s=:,(){}\[\]"'<]+)\s*([=:,(){}\[\]"'<])""")
_NAME_BEGINS = re.compile(r"""[^\s=:,(){}\[\]"'<]*\s*""")
_WORD = re.compile(r"""[^\s=:,(){}\[\]"']+(?=[\s=:,(){}\[\]"'])""")
_WORD_BEGINS = re.compile(r"""[^\s=:,(){}\[\]"']+""")
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_PYTHON_NUMBER = re.compile(r"[+-]?[0-9a-fA-FxXoO_.+-]+")
_PLAIN = {"'": re.compile(r"[^'\\]+"), '"': re.compile(r'[^"\\]+')}
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-7]{1,3})|([^xuU0-7]))", re.DOTALL)
_ESCAPE_CHARS = 10
_NAMED_ESCAPES = {
    "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\n": "", "\\": "\\", "'": "'",
    '"': '"', "/": "/",
}  # fmt: skip
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}


class PythonReader(LiteralReader):
    """Keyword arguments of Python with literal values: `city="Bern", days=[1, 2], fast=True)`. JSON's true, false and
    null are read, too. A value without a keyword is the argument at its place in the schema.
    """

    assigns = "="
    brackets: Mapping[str, tuple[Literal["object", "list"], str]] = {**LiteralReader.brackets, "(": ("list", ")")}

    def __init__(self, schema: Mapping[str, Any], closes: str = ")") -> None:
        super().__init__(schema, closes)
        self._quote = ""

    def _take_key(self, text: str, at: int, found: list[str]) -> int | None:
        if self._frames[-1].kind == "object":
            end = self._begin_string(text, at)
            if end is None or end == at:
                return None if end is None else self._break(at)
            self._separate(found)
            found.append('"')
            self._step, self._is_key = "string", True
            return end
        name = _NAME.match(text, at, at + KEY_CHARS)
        if name is not None and name[2] == "=":
            self._add_key(name[1], found)
            return name.end(1)
        is_begun = _NAME_BEGINS.fullmatch(text, at, at + KEY_CHARS) is not None
        if name is None and is_begun:
            return None if len(text) - at < KEY_CHARS else self._break(at)
        properties = self._schema.get("properties")
        names, place = list(properties) if isinstance(properties, Mapping) else [], self._frames[-1].num_items
        if place >= len(names) or (name is not None and name[2] not in ",)"):
            return self._break(at)
        self._add_key(names[place], found)
        found.append(": ")
        self._step = "value"
        return at

    def _begin_string(self, text: str, at: int) -> int | None:
        char = text[at]
        if char not in "\"'":
            return at
        if text.startswith(char * 3, at):
            self._quote = char * 3
        elif _may_be(text, at, char * 3):
            return None
        else:
            self._quote = char
        return at + len(self._quote)

    def _take_string(self, text: str, at: int, found: list[str]) -> int | None:
        quote = self._quote
        plain = _PLAIN[quote[0]].match(text, at)
        if plain is not None:
            found.append(_json(plain[0])[1:-1])
            return plain.end()
        if text[at] == "\\":
            return self._take_escape(text, at, found)
        if text.startswith(quote, at):
            self._end_string(found)
            return at + len(quote)
        if _may_be(text, at, quote):
            return None
        found.append(_json(text[at])[1:-1])
        return at + 1

    def _take_escape(self, text: str, at: int, found: list[str]) -> int | None:
        escape = _ESCAPE.match(text, at)
        is_whole = len(text) - at >= _ESCAPE_CHARS
        if escape is None or (escape[4] is not None and escape.end() == len(text) and not is_whole):
            return None if not is_whole else self._break(at)
        code = next((int(digits, 16) for digits in escape.group(1, 2, 3) if digits), None)
        code = int(escape[4], 8) if escape[4] else code
        if code is None:
            found.append(_json(_NAMED_ESCAPES.get(escape[5], escape[0]))[1:-1])
        elif code > 0x10FFFF:
            return self._break(at)
        else:
            # Half of a pair: the other half follows, and JSON has the same escape.
            found.append(escape[0] if 0xD800 <= code < 0xE000 and escape[2] else _json(chr(code))[1:-1])
        return escape.end()

    def _take_scalar(self, text: str, at: int, found: list[str]) -> int | None:
        word = _WORD.match(text, at, at + KEY_CHARS)
        if word is None:
            is_begun = _WORD_BEGINS.fullmatch(text, at, at + KEY_CHARS) is not None
            return None if is_begun and len(text) - at < KEY_CHARS else self._break(at)
        written = _python_scalar(word[0])
        if written is None:
            return self._break(at)
        found.append(written)
        return word.end()


def _python_scalar(text: str) -> str | None:
    """The JSON of a number or of a word such as True; None for anything else."""
    if text in _WORDS or _JSON_NUMBER.fullmatch(text):
        return _WORDS.get(text, text)
    if not _PYTHON_NUMBER.fullmatch(text):
        return None
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return None
    return json.dumps(value) if isinstance(value, int) or (isinstance(value, float) and isfinite(value)) else None


ESCAPE = "<escape>"
"""FunctionGemma's token around strings."""

_BARE = re.compile(r"[^,{}\[\]<]+(?=[,{}\[\]<])")
_BARE_BEGINS = re.compile(r"[^,{}\[\]<]+")


class EscapeReader(LiteralReader):
    """FunctionGemma's arguments: `city:<escape>Bern<escape>,days:[1,2],place:{x:1}}`. Keys have no quotes."""

    def __init__(self, schema: Mapping[str, Any], closes: str = "}") -> None:
        super().__init__(schema, closes)

    def _take_key(self, text: str, at: int, found: list[str]) -> int | None:
        if text[at] == "<":
            end = text.find(ESCAPE, at + 1, at + KEY_CHARS)
            is_begun = _may_be(text, at, ESCAPE)
            if not is_begun or end < 0:
                return None if is_begun and len(text) - at < KEY_CHARS else self._break(at)
            self._add_key(text[at + len(ESCAPE) : end], found)
            return end + len(ESCAPE)
        name = _NAME.match(text, at, at + KEY_CHARS)
        if name is not None and name[2] == ":":
            self._add_key(name[1], found)
            return name.end(1)
        is_begun = name is None and _NAME_BEGINS.fullmatch(text, at, at + KEY_CHARS) is not None
        return None if is_begun and len(text) - at < KEY_CHARS else self._break(at)

    def _begin_string(self, text: str, at: int) -> int | None:
        if text.startswith(ESCAPE, at):
            return at + len(ESCAPE)
        return None if _may_be(text, at, ESCAPE) else at

    def _take_string(self, text: str, at: int, found: list[str]) -> int | None:
        end = text.find(ESCAPE, at)
        last = len(text) - _overlap(text, at, ESCAPE) if end < 0 else end
        if last > at:
            found.append(_json(text[at:last])[1:-1])
        if end < 0:
            return last if last > at else None
        self._end_string(found)
        return end + len(ESCAPE)

    def _take_scalar(self, text: str, at: int, found: list[str]) -> int | None:
        bare = _BARE.match(text, at, at + KEY_CHARS)
        if bare is None:
            is_begun = _BARE_BEGINS.fullmatch(text, at, at + KEY_CHARS) is not None
            return None if is_begun and len(text) - at < KEY_CHARS else self._break(at)
        found.append(json_of_bare(bare[0].strip(), self._types))
        return bare.end()


def _skip(text: str, at: int) -> int:
    """The position after blanks."""
    match = _BLANKS.match(text, at)
    assert match is not None
    return match.end()


def _may_be(text: str, at: int, mark: str) -> bool:
    """Whether the text from `at` on is the mark or, as far as it goes, its beginning."""
    return mark.startswith(text[at : at + len(mark)])


def _overlap(text: str, begin: int, mark: str) -> int:
    """Length of the longest end of a text, from `begin`, that begins a mark."""
    most = min(len(text) - begin, len(mark) - 1)
    return next((count for count in range(most, 0, -1) if text.endswith(mark[:count])), 0)


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
