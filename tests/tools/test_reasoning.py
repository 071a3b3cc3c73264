"""Reasoning of model families, and marks around the text behind it."""

from __future__ import annotations

import random

import pytest

from quire.tools.answer_parser import AnswerParser, call_parser
from quire.tools.calls import ArgumentsDelta, ReasoningDelta, TextDelta, Tool
from quire.tools.formats import format_of
from quire.tools.reasoning import MarkDropper, ReasoningParser, reasoning_of
from tests.tools.test_formats import cuts_of


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("<think> and </think>", "think"), ("[THINK] [/THINK]", "mistral"), ("{{ messages }}", None),
        ("Write <think></think> and <response></response>", "granite"),
        ("<|START_THINKING|><|END_THINKING|>", "cohere"),
        ('write after "Here is my thought process:" and "Here is my response:"', "granite-3.2"),
    ],
)  # fmt: skip
def test_the_reasoning_of_a_family_is_known_by_the_template(template: str, name: str | None) -> None:
    found = reasoning_of(template)
    assert (None if found is None else found.name) == name


COHERE = "<|START_THINKING|><|END_THINKING|><|START_ACTION|>"
ACTION = '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "add", "parameters": {"a": 1}}\n]<|END_ACTION|>'


@pytest.mark.parametrize(
    ("template", "answer", "thought", "said", "called"),
    [
        (COHERE, "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>", "Hm.", "Yes.", ""),
        (COHERE, f"<|START_THINKING|>Hm.<|END_THINKING|>{ACTION}", "Hm.", "", '{"a": 1}'),
        (COHERE, "<|START_RESPONSE|>a <|START b<|END_RESPONSE|>", "", "a <|START b", ""),
        ("</think><response>", "<think>Hm.</think><response>Yes <b>.</response>", "Hm.", "Yes <b>.", ""),
        ("</think><response>", "Yes </resp", "", "Yes </resp", ""),
        ("Here is my response:", "Here is my thought process: Hm.\nHere is my response: Yes.", "Hm.", "Yes.", ""),
        ("Here is my response:", "Here is nothing.", "", "Here is nothing.", ""),
    ],
)
def test_marks_around_reasoning_and_text_are_in_neither(
    template: str, answer: str, thought: str, said: str, called: str, seed: int
) -> None:
    draw, tools = random.Random(seed), [Tool("add")]
    found = reasoning_of(template)
    assert found is not None
    for cuts in ([], list(range(1, len(answer))), *(cuts_of(draw, answer) for _ in range(30))):
        parser = AnswerParser(
            ReasoningParser(found, is_inside=False), call_parser(format_of(template), tools), found.around
        )
        ends = [*cuts, len(answer)]
        parts = [
            part
            for begin, end in zip([0, *cuts], ends, strict=True)
            for part in parser.read(answer[begin:end], is_last=False)
        ]
        parts += parser.read("", is_last=True)
        texts = [
            "".join(part.text for part in parts if isinstance(part, kind))
            for kind in (ReasoningDelta, TextDelta, ArgumentsDelta)
        ]
        assert texts == [thought, said, called]


def test_marks_are_dropped_wherever_the_text_is_cut(seed: int) -> None:
    draw, marks = random.Random(seed), ("<a>", "<ab>", "</a>")
    for _ in range(300):
        text = "".join(draw.choices(["<", "a", "b", ">", "/", "<a>", "<ab>", "x"], k=draw.randrange(12)))
        whole = MarkDropper(marks)
        expected = whole.push(text) + whole.flush()
        cut = MarkDropper(marks)
        assert "".join(cut.push(char) for char in text) + cut.flush() == expected, text
