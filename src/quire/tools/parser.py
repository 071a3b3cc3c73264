"""Reads calls out of an answer's text while it arrives."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

from quire.tools.calls import CallArguments, CallBegins, Part, Text
from quire.tools.format import ToolFormat

_DECODER = json.JSONDecoder()


class CallParser:
    """Turns the pieces of one answer into text and parts of calls. However the answer is cut into pieces, the texts
    joined are the same, and so are the arguments.

    What begins like a call and is none, or is of no known tool, is text. Blanks beside calls are dropped.
    """

    def __init__(
        self, format_: ToolFormat, names: Collection[str], *, most: int | None = None, is_exact: bool = False
    ) -> None:
        """most: calls that an answer may have; what else looks like one is text. is_exact: whether only what is written
        as a grammar writes it is a call.
        """
        self._format = format_
        self._names = names
        self._most = most
        self._is_exact = is_exact
        openers = {format_.opens, *(() if is_exact else format_.also)} - {""}
        self._openers = sorted(openers, key=len, reverse=True)
        self._head = re.compile(
            rf'\{{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"{format_.key}"\s*:\s*(?=\{{)', re.DOTALL
        )
        self._held = ""  # not yet decided on
        self._raw = ""  # of a call that has just begun, from its opener on
        self._num_tried = 0  # characters of the held text that are no whole object
        self._blank = ""  # at the end of the text so far
        self._is_behind = False  # whether a call was last
        self._state = "head" if format_.at_start else "text"
        self._is_start = format_.at_start
        self._steps = {
            "text": self._text_step,
            "head": self._head_step,
            "arguments": self._arguments_step,
            "brace": self._brace_step,
            "tail": self._tail_step,
        }
        self._depth, self._in_string, self._is_escaped = 0, False, False
        self.num_calls = 0

    def push(self, text: str) -> list[Part]:
        """What a piece of the answer adds."""
        self._held += text
        found: list[Part] = []
        while self._steps[self._state](found):
            pass
        return _joined(found)

    def flush(self) -> list[Part]:
        """What is left when the answer has ended."""
        found: list[Part] = []
        if self._state in ("head", "text"):
            self._say(self._raw + self._held, found)
            if self._blank:
                found.append(Text(self._blank))
        self._held = self._raw = self._blank = ""
        return _joined(found)

    # ---- states: each takes what it can of the held text, and says whether there may be more to take ----------------

    def _text_step(self, found: list[Part]) -> bool:
        if self.num_calls == self._most:
            self._say(self._held, found)
            self._held = ""
            return False
        places = [(self._held.find(opener), opener) for opener in self._openers]
        if there := [each for each in places if each[0] >= 0]:
            place, opener = min(there, key=lambda each: (each[0], -len(each[1])))
            self._say(self._held[:place], found)
            self._held = self._held[place:]
            if any(each.startswith(self._held) and each != opener for each in self._openers):
                return False  # it may become a longer opener, which this one begins
            self._raw, self._held, self._state = opener, self._held[len(opener) :], "head"
            return True
        keep = max((_overlap(self._held, opener) for opener in self._openers), default=0)
        cut = len(self._held) - keep
        self._say(self._held[:cut], found)
        self._held = self._held[cut:]
        return False

    def _head_step(self, found: list[Part]) -> bool:
        """Reads a call up to its arguments, or whole if they are not last."""
        blank = len(self._held) - len(self._held.lstrip())
        self._raw, self._held = self._raw + self._held[:blank], self._held[blank:]
        if not self._held:
            return False
        if self.num_calls == self._most or (self._is_start and self._is_exact and self._raw):
            return self._is_none(found)
        if self._is_start:
            opener = next((each for each in self._openers if self._held.startswith(each)), "")
            if not opener and any(each.startswith(self._held) for each in self._openers):
                return False
            self._raw, self._held = self._raw + opener, self._held[len(opener) :]
            self._is_start = False
            return True
        if self._held[0] == "[" and self._format.opens.endswith("["):
            self._raw, self._held = self._raw + "[", self._held[1:]
            return True
        if self._held[0] != "{":
            return self._is_none(found)
        if (head := self._head.match(self._held)) is not None:
            name = _decoded(head[1])
            if name not in self._names:
                return self._is_none(found)
            self._begin(name, found)
            self._held, self._state = self._held[head.end() :], "arguments"
            return True
        if "}" not in self._held[self._num_tried :]:
            return False
        self._num_tried = len(self._held)
        try:
            call, end = _DECODER.raw_decode(self._held)
        except ValueError:
            return False
        except RecursionError:
            return self._is_none(found)
        name = call.get("name")
        arguments = _arguments(call, self._format.key)
        if name not in self._names or arguments is None:
            return self._is_none(found)
        self._begin(name, found)
        found.append(CallArguments(self.num_calls - 1, arguments))
        self._held, self._state = self._held[end:], "tail"
        return True

    def _arguments_step(self, found: list[Part]) -> bool:
        for place, char in enumerate(self._held):
            if self._in_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif char == "\\":
                    self._is_escaped = True
                elif char == '"':
                    self._in_string = False
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if not self._depth:
                    found.append(CallArguments(self.num_calls - 1, self._held[: place + 1]))
                    self._held, self._state = self._held[place + 1 :], "brace"
                    return True
        if self._held:
            found.append(CallArguments(self.num_calls - 1, self._held))
            self._held = ""
        return False

    def _brace_step(self, found: list[Part]) -> bool:
        """The end of a call's object."""
        self._held = self._held.lstrip()
        if not self._held:
            return False
        self._held = self._held.removeprefix("}")
        self._state = "tail"
        return True

    def _tail_step(self, found: list[Part]) -> bool:
        """What stands behind a call: another one, or the end of the calls."""
        between, closes = (self._format.between or "").strip(), self._format.closes.strip()
        held = self._held.lstrip()
        for text, state in sorted(((between, "head"), (closes, "text")), key=lambda each: -len(each[0])):
            if text and held.startswith(text):
                self._raw, self._held, self._state = "", held[len(text) :], state
                return True
        if not held or any(text.startswith(held) for text in (between, closes) if text):
            return False
        self._state = "text"
        return True

    # ---- parts ------------------------------------------------------------------------------------------------------

    def _begin(self, name: str, found: list[Part]) -> None:
        self._raw, self._blank, self._is_behind, self._num_tried = "", "", True, 0
        self._depth, self._in_string, self._is_escaped = 0, False, False
        found.append(CallBegins(self.num_calls, self._format.new_id(), name))
        self.num_calls += 1

    def _is_none(self, found: list[Part]) -> bool:
        """What looked like a call is text, up to where another one may begin."""
        self._say(self._raw + self._held[:1], found)
        self._raw, self._held, self._state, self._num_tried = "", self._held[1:], "text", 0
        return bool(self._held)

    def _say(self, text: str, found: list[Part]) -> None:
        """Adds text, but for blanks at its end, which may stand before a call, and for those behind one."""
        text = self._blank + text
        if self._is_behind:
            text = text.lstrip()
        kept = text.rstrip()
        self._blank = text[len(kept) :]
        if kept:
            self._is_behind = False
            found.append(Text(kept))


def _decoded(text: str) -> str | None:
    """The text of a JSON string; None if it is none."""
    try:
        return str(json.loads(text, strict=False))
    except ValueError:
        return None


def _arguments(call: dict[str, Any], key: str) -> str | None:
    """The arguments of a whole call as JSON text; None if they are none."""
    given = call.get(key, {})
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            return None
    return json.dumps(given, ensure_ascii=False) if isinstance(given, dict) else None


def _overlap(text: str, opener: str) -> int:
    """Length of the longest end of a text that an opener begins with."""
    most = min(len(text), len(opener) - 1)
    return next((count for count in range(most, 0, -1) if text.endswith(opener[:count])), 0)


def _joined(parts: list[Part]) -> list[Part]:
    """Neighbouring pieces of the same text as one."""
    found: list[Part] = []
    for part in parts:
        match found[-1] if found else None, part:
            case Text(before), Text(text):
                found[-1] = Text(before + text)
            case CallArguments(index, before), CallArguments(_, text):
                found[-1] = CallArguments(index, before + text)
            case _:
                found.append(part)
    return found
