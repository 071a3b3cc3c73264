"""Reads calls out of an answer's text while it arrives."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection

from quire.tools.calls import CallArguments, CallBegins, Part, Text
from quire.tools.format import ToolFormat
from quire.tools.written import KEYS, call_of

HEAD_CHARS = 4096
"""Characters of a call in which its name and the beginning of its arguments are looked for."""


class _Depth:
    """Follows JSON text character by character to the end of its first value, an object or a list."""

    def __init__(self, depth: int = 0) -> None:
        self._depth, self._in_string, self._is_escaped = depth, False, False
        self._seen = 0

    def end(self, text: str) -> int:
        """Where the value ends in a text that begins with the one of the call before; -1 if it goes on."""
        for place in range(self._seen, len(text)):
            char = text[place]
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
                    return place + 1
        self._seen = len(text)
        return -1

    def forget(self) -> None:
        """What it has seen is not given again."""
        self._seen = 0


class CallParser:
    """Turns the pieces of one answer into text and parts of calls. However the answer is cut into pieces, the texts
    joined are the same, and so are the arguments.

    What begins like a call and is none, or is of no known tool, is text. Blanks beside calls are dropped, but for those
    between two texts.
    """

    def __init__(
        self,
        format_: ToolFormat,
        names: Collection[str],
        *,
        most: int | None = None,
        is_exact: bool = False,
        is_either: bool = False,
    ) -> None:
        """most: calls that an answer may have; further ones are dropped. is_exact: whether only what is written as a
        grammar writes it is a call. is_either: whether an answer that does not begin with a call has none.
        """
        self._format = format_
        self._names = names
        self._most = most
        self._is_exact = is_exact
        self._is_either = is_either
        openers = {format_.opens, *(() if is_exact else format_.also)} - {""}
        self._openers = sorted(openers, key=len, reverse=True)
        between, closes = (format_.between or "").strip(), format_.closes.strip()
        # Where what stands between two calls begins like what stands behind the last one, the next opener decides.
        self._seps = [(closes, "text")] if closes else []
        if between and not between.startswith(closes or between + " "):
            self._seps.append((between, "head"))
        # Llama's models join calls with semicolons, or write a line for each.
        self._is_bare_opener = format_.at_start and not is_exact
        if self._is_bare_opener:
            self._seps.append((";", "tail"))
        self._keys = (format_.key,) if is_exact else (format_.key, *KEYS)
        name = r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")'
        key = rf'"(?:{"|".join(self._keys)})"'
        # Empty arguments are read with the whole call, if it goes on: others may stand under another key.
        begins = r"\{" if is_exact else r'\{\s*(?:"|\}\s*[^\s,}])'
        self._head = re.compile(rf"{name}\s*,\s*{key}\s*:\s*(?={begins})", re.DOTALL)
        self._empty = re.compile(rf"{name}\s*,\s*{key}\s*:\s*\{{\s*\}}\s*", re.DOTALL)
        self._held = ""  # not yet decided on
        self._raw = ""  # of a call that has just begun, from its opener on
        self._blank = ""  # at the end of the text so far
        self._before = ""  # blanks between the last text and a call behind it
        self._behind = ""  # blanks behind the last call
        self._is_behind = False  # whether a call was last
        self._has_called = False  # whether there was a call
        self._is_dropped = False  # whether the call is one too many
        self._is_bare = False  # whether nothing but its brace opens what may be a call
        self._has_text = False  # whether there was text
        self._is_start = format_.at_start
        self._has_members = False  # whether a call's object goes on behind its arguments
        self._depth = _Depth()
        self._state = "head" if format_.at_start else "text"
        self._steps: dict[str, Callable[[list[Part]], bool]] = {
            "text": self._text_step,
            "head": self._head_step,
            "arguments": self._arguments_step,
            "rest": self._rest_step,
            "tail": self._tail_step,
        }
        self.num_calls = 0

    def push(self, text: str) -> list[Part]:
        """What a piece of the answer adds."""
        self._held += text
        found: list[Part] = []
        while self._steps[self._state](found):
            pass
        return _joined(found)

    @property
    def is_cut(self) -> bool:
        """Whether a call's arguments have begun and not ended."""
        return self._state == "arguments" and not self._is_dropped

    @property
    def is_within(self) -> bool:
        """Whether what comes next belongs to a call that has begun."""
        return self._state in ("arguments", "rest", "tail")

    def flush(self) -> list[Part]:
        """What is left when the answer has ended."""
        found: list[Part] = []
        if self._state == "head" and self._empty.fullmatch(self._held):
            self._held += "}"  # which small models forget
            self._head_step(found)
        left = self._raw + self._held
        is_syntax = self._is_exact and not self._is_either and self._is_syntax(left.strip())
        if self._state in ("head", "text") and not is_syntax:
            self._say(left, found)
            if self._blank:
                found.append(Text(self._blank))
        self._held = self._raw = self._blank = ""
        return _joined(found)

    def _is_syntax(self, left: str) -> bool:
        """Whether what is left belongs to a call that was cut off: a grammar writes nothing else there."""
        begins = not self._has_text and any(opener.startswith(left) for opener in self._openers)
        return bool(left) and (self._state == "head" or begins or any(mark in left for mark in self._format.marks))

    # ---- states: each takes what it can of the held text, and says whether there may be more to take ----------------

    def _text_step(self, found: list[Part]) -> bool:
        if self._is_either and not self._may_begin():
            self._say(self._held, found)
            self._held = ""
            return False
        openers = [*self._openers, *(["{"] if self._is_bare_opener and self._has_called else [])]
        places = [(self._held.find(opener), opener) for opener in openers]
        if there := [each for each in places if each[0] >= 0]:
            place, opener = min(there, key=lambda each: (each[0], -len(each[1])))
            self._say(self._held[:place], found)
            self._held = self._held[place:]
            if any(each.startswith(self._held) and each != opener for each in openers):
                return False  # it may become a longer opener, which this one begins
            self._is_bare = opener == "{"
            self._begin_head("" if self._is_bare else opener, self._held[0 if self._is_bare else len(opener) :])
            return True
        keep = max((_overlap(self._held, opener) for opener in self._openers), default=0)
        cut = len(self._held) - keep
        self._say(self._held[:cut], found)
        self._held = self._held[cut:]
        return False

    def _may_begin(self) -> bool:
        """Whether a call may begin here, as far as the text goes."""
        if self._has_text or self._blank:
            return False
        held = self._held.lstrip() if self._is_behind else self._held
        return any(opener.startswith(held) or held.startswith(opener) for opener in self._openers)

    def _head_step(self, found: list[Part]) -> bool:
        """Reads a call up to its arguments, or whole if they are not last."""
        blank = len(self._held) - len(self._held.lstrip())
        if blank:
            self._raw, self._held = self._raw + self._held[:blank], self._held[blank:]
        if not self._held:
            return False
        if self._is_start and self._is_exact and self._raw:
            return self._is_none(found)
        if self._is_start:
            opener = next((each for each in self._openers if self._held.startswith(each)), "")
            if not opener and any(each.startswith(self._held) for each in self._openers):
                return False
            self._is_start = False
            self._begin_head(self._raw + opener, self._held[len(opener) :])
            return True
        if self._held[0] == "[" and self._format.opens.endswith("[") and not self._is_exact:
            self._begin_head(self._raw + "[", self._held[1:])
            return True
        if self._held[0] != "{":
            return self._is_none(found)
        head = self._head.match(self._held, 0, HEAD_CHARS)
        name = _decoded(head[1]) if head is not None else None
        if head is not None and name is not None and name in self._names:
            self._begin(name, found)
            self._held, self._state, self._depth = self._held[head.end() :], "arguments", _Depth()
            return True
        if head is not None and not self._is_bare:
            return self._is_none(found)
        end = self._depth.end(self._held)
        if end < 0:
            return False
        call = call_of(self._held[:end], self._keys)
        if call is None or call[0] not in self._names:
            return self._is_none(found, end if self._is_bare else 1)
        self._begin(call[0], found)
        self._add(call[1], found)
        self._held, self._state = self._held[end:], "tail"
        return True

    def _arguments_step(self, found: list[Part]) -> bool:
        end = self._depth.end(self._held)
        piece, self._held = (self._held, "") if end < 0 else (self._held[:end], self._held[end:])
        if piece:
            self._add(piece, found)
        self._depth.forget()
        if end < 0:
            return False
        self._state, self._depth, self._has_members = "rest", _Depth(1), False
        return True

    def _rest_step(self, found: list[Part]) -> bool:
        """What stands in a call's object behind its arguments: usually its brace alone. Small models forget it."""
        if not self._has_members:
            self._held = self._held.lstrip()
            if not self._held:
                return False
            behind = self._held[1:].lstrip() if self._held[0] == "," else "-"
            if not behind:
                return False
            self._has_members = behind[0] == '"'
            if not self._has_members:
                self._held, self._state = self._held.removeprefix("}"), "tail"
                return True
        end = self._depth.end(self._held)
        self._depth.forget()
        if end < 0:
            self._held = ""
            return False
        self._held, self._state = self._held[end:], "tail"
        return True

    def _tail_step(self, found: list[Part]) -> bool:
        """What stands behind a call: another one, or the end of the calls."""
        held = self._held.lstrip()
        for text, state in self._seps:
            if held.startswith(text):
                self._begin_head(text if state == "head" else "", held[len(text) :])
                self._state, self._is_bare = state, False
                return True
        if not held or any(text.startswith(held) for text, _ in self._seps):
            return False
        self._state = "text"
        return True

    # ---- parts ------------------------------------------------------------------------------------------------------

    def _begin_head(self, raw: str, held: str) -> None:
        self._raw, self._held, self._state, self._depth = raw, held, "head", _Depth()

    def _begin(self, name: str, found: list[Part]) -> None:
        if self._has_text:
            self._before = self._before or self._blank
        self._raw, self._blank, self._behind, self._is_behind, self._has_called = "", "", "", True, True
        self._is_dropped = self.num_calls == self._most
        if not self._is_dropped:
            found.append(CallBegins(self.num_calls, self._format.new_id(), name))
            self.num_calls += 1

    def _add(self, arguments: str, found: list[Part]) -> None:
        """Adds a piece of the arguments of the last call."""
        if not self._is_dropped:
            found.append(CallArguments(self.num_calls - 1, arguments))

    def _is_none(self, found: list[Part], length: int = 1) -> bool:
        """What looked like a call is text, up to where another one may begin."""
        self._say(self._raw + self._held[:length], found)
        self._raw, self._held, self._state = "", self._held[length:], "text"
        return bool(self._held)

    def _say(self, text: str, found: list[Part]) -> None:
        """Adds text, but for blanks at its end, which may stand before a call, and for those behind one. Between two
        texts, those before the first call are kept or those behind the last one: what has more lines, or is longer.
        """
        text = self._blank + text
        if self._is_behind:
            begun = text.lstrip()
            self._behind += text[: len(text) - len(begun)]
            text = begun
        kept = text.rstrip()
        self._blank = text[len(kept) :]
        if kept:
            if self._is_behind and self._has_text:
                kept = max(self._before, self._behind, key=lambda blanks: (blanks.count("\n"), len(blanks))) + kept
            self._before, self._is_behind, self._has_text = "", False, True
            found.append(Text(kept))


def _decoded(text: str) -> str | None:
    """The text of a JSON string; None if it is none."""
    try:
        return str(json.loads(text, strict=False))
    except ValueError:
        return None


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
