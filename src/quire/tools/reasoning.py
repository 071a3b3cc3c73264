"""Reasoning before an answer: its formats, and a parser that separates the two."""

from __future__ import annotations

import re
from dataclasses import dataclass

from quire.tools.calls import AnswerDelta, ReasoningDelta, TextDelta


@dataclass(frozen=True)
class ReasoningFormat:
    """Two marks around reasoning at the beginning of an answer. A chat template of this format contains the second
    mark, and may write the first one into the prompt.

    around  marks around the text of the answer; they are no part of it
    known   text in a chat template that identifies the format; "": the second mark
    """

    name: str
    begins: str
    ends: str
    around: tuple[str, ...] = ()
    known: str = ""


FORMATS = (
    # Granite 3.3. Its template explains all four marks.
    ReasoningFormat("granite", "<think>", "</think>", around=("<response>", "</response>"), known="<response>"),
    ReasoningFormat("granite-3.2", "Here is my thought process:", "Here is my response:"),
    # Command R7B and Command A Reasoning.
    ReasoningFormat(
        "cohere", "<|START_THINKING|>", "<|END_THINKING|>", around=("<|START_RESPONSE|>", "<|END_RESPONSE|>")
    ),
    # DeepSeek R1 and what was distilled from it, Qwen 3, QwQ, SmolLM3, OLMo 3 Think, GLM 4.5, Phi-4 reasoning.
    ReasoningFormat("think", "<think>", "</think>"),
    ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
    ReasoningFormat("seed", "<seed:think>", "</seed:think>"),
)


def reasoning_of(template: str) -> ReasoningFormat | None:
    """The reasoning format for a chat template; None if the model does not reason."""
    return next((each for each in FORMATS if (each.known or each.ends) in template), None)


class MarkDropper:
    """Drops marks from a text that arrives in pieces. The joined result does not depend on where the text was cut."""

    def __init__(self, marks: tuple[str, ...]) -> None:
        self._marks = re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))))
        self._begins = frozenset(mark[:end] for mark in marks for end in range(1, len(mark)))
        self._longest = max(map(len, marks))
        self._held = ""

    def push(self, text: str) -> str:
        """The text so far without marks. Holds back what may be the beginning of a mark."""
        pieces = self._marks.split(self._held + text)
        last = pieces[-1]
        keep = next((n for n in range(min(len(last), self._longest - 1), 0, -1) if last[-n:] in self._begins), 0)
        self._held = last[len(last) - keep :]
        return "".join([*pieces[:-1], last[: len(last) - keep]])

    def flush(self) -> str:
        """Ends the text. Returns what was held back."""
        text, self._held = self._held, ""
        return text


class ReasoningParser:
    """Splits the pieces of one answer into reasoning and the rest. The result does not depend on where the answer was
    cut. Blanks at both ends of the reasoning and after it are dropped.

    is_inside  whether the prompt ends inside the reasoning
    """

    def __init__(self, format_: ReasoningFormat, *, is_inside: bool) -> None:
        self._format = format_
        self._state = "inside" if is_inside else "start"
        self._held = ""
        self._is_first = True

    @property
    def is_inside(self) -> bool:
        """Whether the next text belongs to the reasoning."""
        return self._state == "inside"

    @property
    def is_behind(self) -> bool:
        """Whether the next text stands between the reasoning and the text."""
        return self._state == "behind"

    def push(self, text: str) -> list[AnswerDelta]:
        """Parses a piece of the answer. Returns the new parts."""
        if self._state == "text":
            return [TextDelta(text)] if text else []
        self._held += text
        found: list[AnswerDelta] = []
        if self._state == "start":
            begun, mark = self._held.lstrip(), self._format.begins
            if begun.startswith(mark):
                self._held, self._state = begun[len(mark) :], "inside"
            elif not mark.startswith(begun):
                self._state = "text"
                return self._rest()
        if self._state == "inside":
            self._inside(found)
        if self._state == "behind":
            self._held = self._held.lstrip()
            if self._held:
                self._state = "text"
                found += self._rest()
        return found

    def flush(self) -> list[AnswerDelta]:
        """Ends the answer. Returns the remaining parts."""
        if self._state == "inside":
            return self._say(self._held.rstrip())
        return self._rest() if self._state == "start" else []

    def _inside(self, found: list[AnswerDelta]) -> None:
        place, mark = self._held.find(self._format.ends), self._format.ends
        if place >= 0:
            found += self._say(self._held[:place].rstrip())
            self._held, self._state = self._held[place + len(mark) :], "behind"
            return
        keep = next((count for count in range(len(mark) - 1, 0, -1) if self._held.endswith(mark[:count])), 0)
        text = self._held[: len(self._held) - keep].rstrip()
        self._held = self._held[len(text) :]
        found += self._say(text)

    def _say(self, text: str) -> list[AnswerDelta]:
        if self._is_first:
            text = text.lstrip()
        if not text:
            return []
        self._is_first = False
        return [ReasoningDelta(text)]

    def _rest(self) -> list[AnswerDelta]:
        text, self._held = self._held, ""
        return [TextDelta(text)] if text else []
