"""Parses calls that are a name and arguments in a notation of their own, while the answer arrives."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from quire.tools.argument_readers import ArgumentsReader
from quire.tools.calls import AnswerDelta, ArgumentsDelta, CallStart, Tool
from quire.tools.named_format import NamedFormat
from quire.tools.parser import joined, overlap
from quire.tools.spacing import TextSpacing

HEAD_CHARS = 512
"""Maximum number of characters between a call's opener and its arguments, and of blanks after a call."""

_BLANKS = re.compile(r"[ \t\r\n]*")


class NamedCallParser:
    """Splits the pieces of one answer into text and parts of calls. The joined texts and arguments do not depend on
    where the answer was cut into pieces.

    Text that begins like a call but is none, or calls an unknown tool, stays text. Blanks beside calls are dropped;
    blanks between two texts are kept. Arguments are converted to JSON as they arrive. Where they leave the notation,
    they end there, incomplete, because the parts that were sent cannot be taken back; what follows is text.
    """

    def __init__(
        self,
        format_: NamedFormat,
        tools: Sequence[Tool],
        *,
        most: int | None = None,
        is_exact: bool = False,
        is_either: bool = False,
    ) -> None:
        """most, is_exact, is_either: see CallParser."""
        self._format = format_
        self._notation = format_.notation
        self._tools = {tool.name: tool for tool in tools}
        self._most = most
        self._is_exact, self._is_either = is_exact, is_either
        openers = {format_.opener, *(() if is_exact else format_.other_openers)} - {""}
        self._openers = sorted(openers, key=len, reverse=True)
        self._opener = re.compile("|".join(map(re.escape, self._openers)) or r"(?!)")
        self._closer, self._separator = format_.closer.strip(), (format_.separator or "").strip()
        self._held, self._at = "", 0  # undecided text, from `at` on
        self._raw = ""  # text of a call that has just begun, opener included
        self._spacing = TextSpacing()
        self._reader: ArgumentsReader | None = None
        self._is_dropped = False  # whether the call exceeds the maximum
        self._is_broken = False  # whether the last call left the notation
        self._state = "head" if format_.at_start else "text"
        self._steps: dict[str, Callable[[list[AnswerDelta]], bool]] = {
            "text": self._text_step,
            "head": self._head_step,
            "arguments": self._arguments_step,
            "tail": self._tail_step,
        }
        self.num_calls = 0

    @property
    def is_cut(self) -> bool:
        """Whether the last call's arguments are incomplete."""
        return (self._state == "arguments" or self._is_broken) and not self._is_dropped

    @property
    def is_within(self) -> bool:
        """Whether the next text belongs to a call that has begun."""
        return self._state in ("arguments", "tail")

    def push(self, text: str) -> list[AnswerDelta]:
        """Parses a piece of the answer. Returns the new parts."""
        self._held, self._at = self._held[self._at :] + text, 0
        found: list[AnswerDelta] = []
        while self._steps[self._state](found):
            pass
        return joined(found)

    def flush(self) -> list[AnswerDelta]:
        """Ends the answer. Returns the remaining parts."""
        found: list[AnswerDelta] = []
        left = self._raw + self._held[self._at :]
        is_syntax = self._is_exact and not self._is_either and self._is_syntax(left.strip())
        if self._state in ("head", "text") and not is_syntax:
            self._spacing.add(left, found)
            self._spacing.end(found)
        self._held, self._raw, self._at = "", "", 0
        return joined(found)

    def _is_syntax(self, left: str) -> bool:
        """Whether the remaining text belongs to a call that was cut off: a grammar allows nothing else there."""
        begins = not self._spacing.has_text and any(opener.startswith(left) for opener in self._openers)
        is_head = self._state == "head" and (bool(self._raw) or self.num_calls > 0)
        return bool(left) and (is_head or begins)

    # ---- states: each takes what it can of the held text, and says whether there may be more to take ----------------

    def _text_step(self, found: list[AnswerDelta]) -> bool:
        if self._is_either and not self._may_begin():
            self._take_text(len(self._held), found)
            return False
        match = self._opener.search(self._held, self._at)
        if match is not None:
            self._take_text(match.start(), found)
            begins = self._held[self._at : self._at + len(self._openers[0]) + 1]
            if any(each.startswith(begins) and each != match[0] for each in self._openers):
                return False  # a longer opener begins with this one
            self._begin_head(match[0], self._at + len(match[0]))
            return True
        keep = max((overlap(self._held[self._at :], opener) for opener in self._openers), default=0)
        self._take_text(len(self._held) - keep, found)
        return False

    def _may_begin(self) -> bool:
        """Whether the text so far allows a call to begin here."""
        if not self._spacing.is_empty:
            return False
        held = self._held[self._at :]
        held = held.lstrip() if self._spacing.is_behind else held
        return any(opener.startswith(held) or held.startswith(opener) for opener in self._openers)

    def _head_step(self, found: list[AnswerDelta]) -> bool:
        """Reads a call up to its arguments."""
        held = self._held
        begin, last = _end(held, self._at), self._at + HEAD_CHARS
        head = self._notation.head.match(held, begin, last)
        if head is None:
            is_begun = self._notation.head_begins.fullmatch(held, begin, last) is not None
            if is_begun and len(held) < last:
                return False
            return self._reject(found)
        tool = self._tools.get(head[1])
        if tool is None:
            return self._reject(found)
        self._spacing.begin_call()
        self._raw, self._is_broken = "", False
        self._is_dropped = self.num_calls == self._most
        if not self._is_dropped:
            found.append(CallStart(self.num_calls, self._format.new_id(), tool.name))
            self.num_calls += 1
        self._reader = self._notation.reader(tool.arguments)
        self._at, self._state = head.end(), "arguments"
        return True

    def _arguments_step(self, found: list[AnswerDelta]) -> bool:
        assert self._reader is not None
        pieces: list[str] = []
        self._at = self._reader.read(self._held, self._at, pieces)
        if pieces and not self._is_dropped:
            found.append(ArgumentsDelta(self.num_calls - 1, "".join(pieces)))
        if self._reader.state == "open":
            return False
        self._is_broken = self._reader.state == "broken"
        self._state = "text" if self._is_broken else "tail"
        return True

    def _tail_step(self, found: list[AnswerDelta]) -> bool:
        """Reads the text after a call: another call, or the end of the calls."""
        begin = _end(self._held, self._at)
        if begin - self._at > HEAD_CHARS:
            self._state = "text"
            return True
        left = self._held[begin : begin + HEAD_CHARS]
        for text, state in ((self._closer, "text"), (self._separator, "head"), (",", "next"), (";", "next")):
            if not text or (state == "next" and (self._is_exact or not self._is_listed)):
                continue
            if left.startswith(text):
                raw, self._at = self._held[self._at : begin] + text, begin + len(text)
                if state == "text":
                    self._state = "text"
                else:
                    self._begin_head(raw, self._at)
                return True
            if text.startswith(left):
                return False
        if self._is_listed and self._notation.head_begins.match(left) is not None:
            self._begin_head("", self._at)
            return True
        self._state = "text"
        return True

    @property
    def _is_listed(self) -> bool:
        """Whether blanks alone separate calls between one opener and one closer."""
        return self._format.separator is not None and not self._separator

    # ---- parts ------------------------------------------------------------------------------------------------------

    def _begin_head(self, raw: str, at: int) -> None:
        self._raw, self._at, self._state = raw, at, "head"

    def _reject(self, found: list[AnswerDelta]) -> bool:
        """Turns what looked like a call into text, up to the next possible call."""
        self._spacing.add(self._raw, found)
        self._raw, self._state = "", "text"
        return True

    def _take_text(self, end: int, found: list[AnswerDelta]) -> None:
        """Adds the held text up to `end`."""
        self._spacing.add(self._held[self._at : end], found)
        self._at = end


def _end(text: str, begin: int) -> int:
    """The end of the blanks at `begin`."""
    match = _BLANKS.match(text, begin)
    assert match is not None
    return match.end()
