"""Parses the calls in an answer's text while it arrives."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from itertools import groupby

from quire.tools.calls import AnswerDelta, ArgumentsDelta, CallStart, TextDelta
from quire.tools.format import ToolFormat
from quire.tools.json_calls import (
    KEYS,
    STRING,
    JsonScanner,
    decoded,
    is_redundant,
    may_be_redundant,
    parse_call,
    scalar_end,
)
from quire.tools.spacing import TextSpacing

HEAD_CHARS = 4096
"""Maximum number of characters up to the beginning of a call's arguments."""

MEMBER_CHARS = 256
"""Maximum number of characters of the key, or of a number, in a member after a call's arguments."""

AGAIN_CHARS = 1 << 16
"""Maximum number of characters, per answer, of openers without a call and of text read again after them: 10 ms."""

BARE_CHARS = 4
"""Minimum number of characters counted for a brace without a call. Llama's calls have no other opener."""

_BLANKS = re.compile(r"\s*")
_OPENING = re.compile(r"[\s\[]*")
_INNER = re.compile(r"\{\s*(\S)")
_UNSURE = re.compile(r"\{\s*(?:\}\s*)?")
_CLOSING = re.compile(r"\s*\}")
_MEMBER = re.compile(rf"\s*,\s*({STRING})\s*:\s*(?=\S)", re.DOTALL)
_MEMBER_BEGINS = re.compile(r'\s*(?:,\s*(?:"[^"\\]*(?:\\.[^"\\]*)*(?:\\?|"\s*(?::\s*)?))?)?', re.DOTALL)


class CallParser:
    """Splits the pieces of one answer into text and parts of calls. The joined texts and arguments do not depend on
    where the answer was cut into pieces.

    Text that begins like a call but is none, or calls an unknown tool, stays text. Blanks beside calls are dropped;
    blanks between two texts are kept.

    The first name and the first non-empty arguments of a call count. Arguments are passed on as the model wrote them:
    in an object, only brackets and quotes are checked. Ids, types, indices, a repeated name and further empty arguments
    are dropped. Any other member becomes text after the call, because the parts that were sent cannot be taken back.
    Both ways of sending arguments obey these rules: arguments right after the name are streamed, others are sent with
    the whole call.

    The time is linear in the answer's length. After AGAIN_CHARS characters of openers without a call, and of text that
    was read again because of them, the rest of the answer is text.
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
        """most: maximum number of calls; further ones are dropped. is_exact: whether only a call in the exact syntax of
        the grammar counts. is_either: whether an answer that does not begin with a call has no calls.
        """
        self._format = format_
        self._names = names
        self._most = most
        self._is_exact = is_exact
        self._is_either = is_either
        openers = {format_.opener, *(() if is_exact else format_.other_openers)} - {""}
        self._openers = sorted(openers, key=len, reverse=True)
        self._is_bare_opener = format_.at_start and not is_exact
        self._opener = re.compile("|".join(map(re.escape, self._openers)) or r"(?!)")
        self._opener_or_brace = re.compile("|".join([*map(re.escape, self._openers), r"\{"]))
        self._opener_begins = re.compile("|".join(re.escape(each[0]) for each in self._openers) or r"(?!)")
        self._most_opener = max(map(len, self._openers), default=0)
        self._seps = self._separators()
        self._keys = (format_.key,) if is_exact else (format_.key, *KEYS)
        id_ = rf'(?:"{format_.id_key}"\s*:\s*(?:{STRING}|\d+)\s*,\s*)?' if format_.id_key else ""
        name, keys = "|".join({format_.name_key: None, "name": None}), "|".join(self._keys)
        head = rf'\{{\s*{id_}"(?:{name})"\s*:\s*({STRING})\s*,\s*"(?:{keys})"\s*:\s*'
        self._head = re.compile(head, re.DOTALL)
        # Empty arguments are not streamed if the call continues: another key may have the real arguments.
        self._filled = re.compile(r"\{" if is_exact else r'\{\s*(?:"|\}\s*[^\s,}])')
        self._empty = re.compile(head + r"\{\s*\}\s*", re.DOTALL)
        self._held, self._at = "", 0  # undecided text, from `at` on
        self._later: list[str] = []  # pieces after `held`, while a value is incomplete
        self._is_waiting = False  # whether the value in `scan` is incomplete
        self._num_chars = 0  # of the answer
        self._num_again, self._seen_to = 0, 0  # characters read again, and the farthest position read in the answer
        self._raw = ""  # text of a call that has just begun, opener included
        self._spacing = TextSpacing()
        self._has_called = False  # whether there was a call
        self._name = ""  # of the last call
        self._is_dropped = False  # whether the call exceeds the maximum
        self._is_bare = False  # whether a possible call has no opener but its brace
        self._num_lists = 0  # open lists around calls, in a format without lists
        self._has_others = False  # whether members of the last call were text
        self._is_start = format_.at_start
        self._is_unsure = True  # whether a call's arguments may follow its name directly
        self._member: tuple[str, int, int] | None = None  # a member after the arguments: key, start, value's start
        self._scan = JsonScanner()
        self._state = "head" if format_.at_start else "text"
        self._steps: dict[str, Callable[[list[AnswerDelta]], bool]] = {
            "text": self._text_step,
            "head": self._head_step,
            "arguments": self._arguments_step,
            "rest": self._rest_step,
            "tail": self._tail_step,
            "plain": self._plain_step,
        }
        self.num_calls = 0

    def _separators(self) -> list[tuple[str, str]]:
        """The texts that may follow a call, each with the parser's next state."""
        separator, closer = (self._format.separator or "").strip(), self._format.closer.strip()
        # If separator and closer begin alike, the next opener decides.
        found = [(closer, "text")] if closer else []
        if separator and not separator.startswith(closer or separator + " "):
            found.append((separator, "head"))
        if self._is_bare_opener:
            found.append((";", "tail"))
        if not self._is_exact:
            # Models join calls with commas or semicolons, or write a line for each.
            found += [(text, "head") for text in (",", "{") if (text, "head") not in found]
        return found

    def push(self, text: str) -> list[AnswerDelta]:
        """Parses a piece of the answer. Returns the new parts."""
        if self._state == "plain":
            return [TextDelta(text)] if text else []
        self._num_chars += len(text)
        if self._is_waiting:
            self._later.append(text)
            if self._scan.find(text, -self._scan.num_seen) < 0:
                return []
            text, self._is_waiting = self._taken_later(), False
        self._held, self._at = self._held[self._at :] + text, 0
        found: list[AnswerDelta] = []
        while self._steps[self._state](found):
            pass
        return joined(found)

    @property
    def is_cut(self) -> bool:
        """Whether a call's arguments are incomplete."""
        return self._state == "arguments" and not self._is_dropped

    @property
    def is_within(self) -> bool:
        """Whether the next text belongs to a call that has begun."""
        return self._state in ("arguments", "rest", "tail")

    def flush(self) -> list[AnswerDelta]:
        """Ends the answer. Returns the remaining parts."""
        found: list[AnswerDelta] = []
        self._held, self._at = self._held[self._at :] + self._taken_later(), 0
        if self._state == "head" and self._empty.fullmatch(self._held):
            self._begin_head(self._raw, 0)
            self._held += "}"  # small models forget this brace
            while self._state == "head" and self._head_step(found):
                pass
        if self._state == "rest":
            left = self._held.lstrip(" \t\r\n,")
            if left.startswith('"') and not may_be_redundant(left, self._keys):
                self._say_member(left, found)
        left = self._raw + self._held[self._at :]
        is_syntax = self._is_exact and not self._is_either and self._is_syntax(left.strip())
        if self._state in ("head", "text") and not is_syntax:
            self._say(left, found)
            self._spacing.end(found)
        self._held, self._raw, self._at = "", "", 0
        return joined(found)

    def _taken_later(self) -> str:
        text = "".join(self._later)
        self._later.clear()
        return text

    def _is_syntax(self, left: str) -> bool:
        """Whether the remaining text belongs to a call that was cut off: a grammar allows nothing else there."""
        begins = not self._spacing.has_text and any(opener.startswith(left) for opener in self._openers)
        return bool(left) and (self._state == "head" or begins or any(mark in left for mark in self._format.marks))

    # ---- states: each takes what it can of the held text, and says whether there may be more to take ----------------

    def _text_step(self, found: list[AnswerDelta]) -> bool:
        if self._is_either and not self._may_begin():
            self._take_text(len(self._held), found)
            return False
        is_brace = self._is_bare_opener and self._has_called
        match = (self._opener_or_brace if is_brace else self._opener).search(self._held, self._at)
        if match is not None:
            opener = match[0]
            self._take_text(match.start(), found)
            begins = self._held[self._at : self._at + self._most_opener + 1]
            if any(each.startswith(begins) and each != opener for each in self._openers):
                return False  # a longer opener begins with this one
            self._is_bare = opener == "{"
            self._begin_head("" if self._is_bare else opener, self._at + (0 if self._is_bare else len(opener)))
            return True
        begin, keep = max(self._at, len(self._held) - self._most_opener), 0
        if self._opener_begins.search(self._held, begin) is not None:
            keep = max(overlap(self._held[begin:], opener) for opener in self._openers)
        self._take_text(len(self._held) - keep, found)
        return False

    def _plain_step(self, found: list[AnswerDelta]) -> bool:
        self._say(self._raw + self._held[self._at :], found)
        self._spacing.end(found)
        self._held, self._raw, self._at = "", "", 0
        return False

    def _may_begin(self) -> bool:
        """Whether the text so far allows a call to begin here."""
        if not self._spacing.is_empty:
            return False
        held = self._held[self._at :]
        held = held.lstrip() if self._spacing.is_behind else held
        return any(opener.startswith(held) or held.startswith(opener) for opener in self._openers)

    def _head_step(self, found: list[AnswerDelta]) -> bool:
        """Reads a call up to its arguments. Reads it to its end if other members may follow the arguments."""
        # Some models write a list of calls where their format has one call.
        opening = _BLANKS if self._is_start or self._is_exact else _OPENING
        end, most = _end(opening, self._held, self._at), self._at + HEAD_CHARS - len(self._raw)
        part = self._held[self._at : min(end, most)]
        if not self._format.opener.rstrip().endswith("["):
            self._num_lists += part.count("[")
        self._raw, self._at = self._raw + part, self._at + len(part)
        if end > most:
            return self._reject(found, 0)
        if self._at == len(self._held):
            return False
        if self._is_start and self._is_exact and self._raw:
            return self._reject(found)
        if self._is_start:
            opener = next((each for each in self._openers if self._held.startswith(each, self._at)), "")
            begins = self._held[self._at : self._at + self._most_opener + 1]
            if not opener and any(each.startswith(begins) for each in self._openers):
                return False
            self._is_start = False
            self._begin_head(self._raw + opener, self._at + len(opener))
            return True
        if self._held[self._at] != "{":
            return self._reject(found)
        return self._streamed_step(found) if self._is_unsure else self._whole_step(found)

    def _streamed_step(self, found: list[AnswerDelta]) -> bool:
        """Starts a call whose arguments follow its name directly."""
        held, at, scan = self._held, self._at, self._scan
        last, is_all = at + HEAD_CHARS, len(held) - at >= HEAD_CHARS
        inner = _INNER.match(held, at, last)
        if inner is None and not is_all:
            return False
        if inner is None or inner[1] != '"':
            return self._reject(found)
        scan.find(held, at, last, to_nested=True)
        if scan.nested < 0 and scan.end < 0 and not is_all:
            return False
        head = self._head.fullmatch(held, at, at + scan.nested) if scan.nested >= 0 else None
        name = decoded(head[1]) if head is not None else None
        if head is not None and name not in self._names and not self._is_bare:
            return self._reject_and_count(found, scan.nested)
        self._is_unsure = False
        if head is not None and name is not None and name in self._names:
            if self._filled.match(held, head.end(), last) is not None:
                self._begin(name, found)
                self._at, self._state, self._scan = head.end(), "arguments", JsonScanner()
                return True
            self._is_unsure = not is_all and _UNSURE.fullmatch(held, head.end()) is not None
        return not self._is_unsure

    def _whole_step(self, found: list[AnswerDelta]) -> bool:
        end = self._scan.find(self._held, self._at)
        if end < 0:
            self._is_waiting = True
            return False
        call = parse_call(self._held[self._at : self._at + end], self._keys)
        if call is None or call.name not in self._names:
            return self._reject_and_count(found, end)
        self._begin(call.name, found)
        self._add(call.arguments, found)
        for member in call.others:
            self._say_member(member, found)
        self._at, self._state = self._at + end, "tail"
        return True

    def _arguments_step(self, found: list[AnswerDelta]) -> bool:
        begin = self._at - self._scan.num_seen
        end = self._scan.find(self._held, begin)
        last = len(self._held) if end < 0 else begin + end
        if last > self._at:
            self._add(self._held[self._at : last], found)
        self._at = last
        if end < 0:
            return False
        self._state, self._member = "rest", None
        return True

    def _rest_step(self, found: list[AnswerDelta]) -> bool:
        """Reads a member after a call's arguments, or the brace that ends the call. Small models forget that brace."""
        held, at = self._held, self._at
        if self._member is None:
            match = _MEMBER.match(held, at, at + MEMBER_CHARS)
            key = decoded(match[1]) if match is not None else None
            if match is None or key is None:
                if len(held) - at < MEMBER_CHARS and _MEMBER_BEGINS.fullmatch(held, at):
                    return False
                self._at, self._state = max(at, _end(_CLOSING, held, at)), "tail"
                return True
            self._member, self._scan = (key, match.start(1) - at, match.end() - at), JsonScanner()
        key, begin, value = self._member[0], at + self._member[1], at + self._member[2]
        if held[value] in '"{[':
            length = self._scan.find(held, value)
            self._is_waiting = length < 0
        else:
            length = scalar_end(held, value, value + MEMBER_CHARS) - value
            if length == 0 or length == MEMBER_CHARS:
                self._state = "tail"
                return True
            length = length if value + length < len(held) else -1
        if length < 0:
            return False
        if not is_redundant(key, held[value : value + length], self._name, self._keys):
            self._say_member(held[begin : value + length], found)
        self._at, self._member = value + length, None
        return True

    def _tail_step(self, found: list[AnswerDelta]) -> bool:
        """Reads the text after a call: another call, or the end of the calls."""
        begin = _end(_BLANKS, self._held, self._at)
        if begin - self._at > HEAD_CHARS:
            self._state = "text"
            return True
        if self._num_lists and self._held.startswith("]", begin):
            self._num_lists, self._at = self._num_lists - 1, begin + 1
            return True
        for text, state in self._seps:
            if self._held.startswith(text, begin):
                end = begin + len(text)
                self._is_bare = text == "{" or (text == "," and self._is_bare_opener)
                raw = self._held[self._at : begin] + text
                if text == "{":
                    end, raw = begin, self._held[self._at : begin]
                self._begin_head(raw if state == "head" else "", end)
                self._state = state
                return True
        left = self._held[begin : begin + max((len(text) for text, _ in self._seps), default=0)]
        if not left or any(text.startswith(left) for text, _ in self._seps):
            return False
        self._state = "text"
        return True

    # ---- parts ------------------------------------------------------------------------------------------------------

    def _begin_head(self, raw: str, at: int) -> None:
        self._raw, self._at, self._state = raw, at, "head"
        self._scan, self._is_unsure, self._is_waiting = JsonScanner(), True, False

    def _begin(self, name: str, found: list[AnswerDelta]) -> None:
        self._spacing.begin_call()
        self._raw, self._has_called = "", True
        self._name, self._has_others = name, False
        self._is_dropped = self.num_calls == self._most
        if not self._is_dropped:
            found.append(CallStart(self.num_calls, self._format.new_id(), name))
            self.num_calls += 1

    def _add(self, arguments: str, found: list[AnswerDelta]) -> None:
        """Adds a piece of the arguments of the last call."""
        if not self._is_dropped:
            found.append(ArgumentsDelta(self.num_calls - 1, arguments))

    def _say_member(self, member: str, found: list[AnswerDelta]) -> None:
        """Adds a member of the last call as text."""
        if not self._is_dropped:
            self._say(", " + member if self._has_others else member, found)
            self._has_others = True

    def _reject_and_count(self, found: list[AnswerDelta], length: int) -> bool:
        """Treats the text as no call. Counts the characters that are read again."""
        begin = self._num_chars - (len(self._held) - self._at)
        self._num_again += max(0, min(self._seen_to, begin + length) - begin)
        self._seen_to = max(self._seen_to, begin + length)
        return self._reject(found, length if self._is_bare else 1)

    def _reject(self, found: list[AnswerDelta], length: int = 1) -> bool:
        """Turns the text that looked like a call into text, up to the next possible call."""
        self._num_again += len(self._raw) + BARE_CHARS
        if self._num_again > AGAIN_CHARS:
            self._state = "plain"
            return True
        self._say(self._raw + self._held[self._at : self._at + length], found)
        self._raw, self._at, self._state, self._num_lists = "", self._at + length, "text", 0
        return self._at < len(self._held)

    def _take_text(self, end: int, found: list[AnswerDelta]) -> None:
        """Adds the held text up to `end`."""
        self._say(self._held[self._at : end], found)
        self._at = end

    def _say(self, text: str, found: list[AnswerDelta]) -> None:
        """Adds text."""
        self._spacing.add(text, found)


def _end(pattern: re.Pattern[str], text: str, begin: int) -> int:
    """The end of a pattern's match at `begin`; -1 without a match."""
    match = pattern.match(text, begin)
    return -1 if match is None else match.end()


def overlap(text: str, opener: str) -> int:
    """Length of the longest suffix of `text` that is a prefix of `opener`."""
    most = min(len(text), len(opener) - 1)
    return next((count for count in range(most, 0, -1) if text.endswith(opener[:count])), 0)


def joined(parts: list[AnswerDelta]) -> list[AnswerDelta]:
    """Merges neighbouring pieces of the same text."""
    if len(parts) < 2:
        return parts
    found: list[AnswerDelta] = []
    for (kind, index), group in groupby(parts, key=lambda part: (type(part), getattr(part, "index", -1))):
        run = list(group)
        text = "".join(part.text for part in run if isinstance(part, TextDelta | ArgumentsDelta))
        found += (
            [TextDelta(text)] if kind is TextDelta else [ArgumentsDelta(index, text)] if kind is ArgumentsDelta else run
        )
    return found
