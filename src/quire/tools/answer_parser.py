"""Parses an answer while it arrives: reasoning first, then text and calls."""

from __future__ import annotations

from collections.abc import Sequence

from quire.tools.calls import AnswerDelta, TextDelta, Tool
from quire.tools.format import ToolFormat
from quire.tools.named_format import NamedFormat
from quire.tools.named_parser import NamedCallParser
from quire.tools.parser import CallParser
from quire.tools.reasoning import MarkDropper, ReasoningParser


def call_parser(
    format_: ToolFormat,
    tools: Sequence[Tool],
    *,
    most: int | None = None,
    is_exact: bool = False,
    is_either: bool = False,
) -> CallParser | NamedCallParser:
    """A parser for the calls of one answer. See CallParser."""
    if isinstance(format_, NamedFormat):
        return NamedCallParser(format_, tools, most=most, is_exact=is_exact, is_either=is_either)
    names = {tool.name for tool in tools}
    return CallParser(format_, names, most=most, is_exact=is_exact, is_either=is_either)


class AnswerParser:
    """Splits the pieces of one answer into reasoning, text and calls.

    reasoning  None: the model does not reason, or its reasoning is part of the text
    calls      None: the request has no tools
    around     marks around the text that are no part of it
    """

    def __init__(
        self,
        reasoning: ReasoningParser | None = None,
        calls: CallParser | NamedCallParser | None = None,
        around: tuple[str, ...] = (),
    ) -> None:
        self._reasoning = reasoning
        self._calls = calls
        self._around = MarkDropper(around) if around else None

    @property
    def is_plain(self) -> bool:
        """Whether every answer is text alone."""
        return self._reasoning is None and self._calls is None and self._around is None

    @property
    def num_calls(self) -> int:
        """Number of calls so far."""
        return 0 if self._calls is None else self._calls.num_calls

    @property
    def is_cut(self) -> bool:
        """Whether the last call is incomplete."""
        return self._calls is not None and self._calls.is_cut

    @property
    def is_reasoning(self) -> bool:
        """Whether the next text belongs to the reasoning."""
        return self._reasoning is not None and self._reasoning.is_inside

    @property
    def is_outside_text(self) -> bool:
        """Whether the next text belongs to reasoning or a call, or to the marks around them."""
        is_behind = self._reasoning is not None and self._reasoning.is_behind
        return self.is_reasoning or is_behind or (self._calls is not None and self._calls.is_within)

    def read(self, text: str, *, is_last: bool) -> list[AnswerDelta]:
        """Parses a piece of the answer. Returns the new parts."""
        parts: list[AnswerDelta] = [TextDelta(text)] if text else []
        if self._reasoning is not None:
            parts = self._reasoning.push(text)
            if is_last:
                parts += self._reasoning.flush()
        if self._calls is not None:
            found: list[AnswerDelta] = []
            for part in parts:
                found += self._calls.push(part.text) if isinstance(part, TextDelta) else [part]
            parts = found + self._calls.flush() if is_last else found
        return parts if self._around is None else self._without_marks(self._around, parts, is_last)

    def _without_marks(self, around: MarkDropper, parts: list[AnswerDelta], is_last: bool) -> list[AnswerDelta]:
        found: list[AnswerDelta] = []
        for part in parts:
            text = around.push(part.text) if isinstance(part, TextDelta) else around.flush()
            found += [TextDelta(text)] if text else []
            found += [] if isinstance(part, TextDelta) else [part]
        left = around.flush() if is_last else ""
        return [*found, TextDelta(left)] if left else found
