"""The blanks beside calls: they are dropped, and those between two texts are kept once."""

from __future__ import annotations

from quire.tools.calls import AnswerDelta, TextDelta


class TextSpacing:
    """Collects the text of an answer around its calls.

    has_text   whether there was text
    is_behind  whether the last part was a call
    """

    def __init__(self) -> None:
        self.has_text = self.is_behind = False
        self._blank: list[str] = []  # blanks at the end of the text so far
        self._before = ""  # blanks between the last text and the call after it
        self._behind: list[str] = []  # blanks after the last call

    @property
    def is_empty(self) -> bool:
        """Whether there was neither text nor a blank."""
        return not self.has_text and not self._blank

    def begin_call(self) -> None:
        """A call begins here."""
        if self.has_text:
            self._before = self._before or "".join(self._blank)
        self._blank, self._behind, self.is_behind = [], [], True

    def add(self, text: str, found: list[AnswerDelta]) -> None:
        """Adds text. Holds back blanks at its end, because a call may follow. Between two texts it keeps the blanks
        before the first call or those after the last call: those with more lines, else the longer ones.
        """
        if self.is_behind:
            begun = text.lstrip()
            self._behind.append(text[: len(text) - len(begun)])
            text = begun
        kept = text.rstrip()
        blank = [text[len(kept) :]] if len(text) > len(kept) else []
        if not kept:
            self._blank += blank
            return
        kept = "".join(self._blank) + kept
        self._blank = blank
        if self.is_behind and self.has_text:
            behind = "".join(self._behind)
            kept = max(self._before, behind, key=lambda blanks: (blanks.count("\n"), len(blanks))) + kept
        self._before, self.is_behind, self.has_text = "", False, True
        found.append(TextDelta(kept))

    def end(self, found: list[AnswerDelta]) -> None:
        """Adds the blanks that were held back."""
        if self._blank:
            found.append(TextDelta("".join(self._blank)))
        self._blank = []
