"""Calls of a name and arguments in a notation of their own are read however they are cut."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import pytest

from quire.tools.calls import AnswerDelta, Call, Tool
from quire.tools.formats import NAMED_FORMATS
from quire.tools.named_format import NamedFormat
from quire.tools.named_parser import NamedCallParser
from tests.effort import tries
from tests.tools.test_formats import cuts_of, gathered

EVERY = {each.name: each for each in NAMED_FORMATS}
STRING, NUMBER, FLAG, MAYBE = ({"type": name} for name in ("string", "number", "boolean", ["string", "null"]))
TOOLS = [
    Tool("weather", parameters={"type": "object", "properties": {"city": STRING, "days": {"type": "array"},
                                                                 "note": STRING, "place": {"type": "object"}}}),
    Tool("add", parameters={"type": "object", "properties": {"a": NUMBER, "b": FLAG, "c": MAYBE}}),
    Tool("no_arguments"),
]  # fmt: skip
ARGUMENTS: dict[str, list[dict[str, Any]]] = {
    "weather": [
        {"city": "Zürich"},
        {
            "city": 'a "quoted" \\ }] ) \' , = : { [',
            "days": [1, 2.5, [], {"x": None}],
            "note": "line\nbreak\ttab 日本 😀",
        },
        {"note": "", "place": {"deep": {"deeper": ["a, b", True, {}]}, "name": "(x)"}},
        {"city": "12", "note": "null", "days": []},
        {"city": " <tool> [TOOL_CALL </arg <esc ```` <|ass <end_function \\n \\u00e9 {{}} "},
    ],
    "add": [{}, {"a": 1, "b": True}, {"a": -1.5e3, "b": False, "c": "x"}, {"c": None}],
    "no_arguments": [{}],
}
MARKS = ("[TOOL_CALLS]", "[ARGS]", "<tool_call>", "<|assistant|>", "<function_calls>", "<start_function_call>",
         "</function_calls>", "<end_function_call>", "</tool_call>", "```tool_code\n", "\n```")  # fmt: skip


def read(format_: NamedFormat, text: str, cuts: list[int], **how: Any) -> list[AnswerDelta]:
    parser, found = NamedCallParser(format_, TOOLS, **how), list[AnswerDelta]()
    for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        found += parser.push(text[begin:end])
    return found + parser.flush()


def some_calls(draw: random.Random, most: int = 3) -> list[Call]:
    names = draw.choices(list(ARGUMENTS), k=draw.randrange(1, most + 1))
    return [Call("abcdefgh1", name, json.dumps(draw.choice(ARGUMENTS[name]))) for name in names]


def as_values(calls: list[tuple[str, str]]) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("name", EVERY)
def test_calls_that_are_written_are_read_however_they_are_cut(name: str, seed: int) -> None:
    draw, format_ = random.Random(seed), EVERY[name]
    for _ in range(300):
        calls = some_calls(draw)
        before = "" if format_.at_start else draw.choice(["", "Let me look.", "a < b, [T {"])
        text = before + ("\n" if before else "") + format_.write(calls)
        for cuts in ([], list(range(1, len(text))), cuts_of(draw, text)):
            said, found = gathered(read(format_, text, cuts))
            assert said == before
            assert as_values(found) == [(call.name, json.loads(call.arguments)) for call in calls], text


@pytest.mark.parametrize("name", EVERY)
def test_marks_in_strings_are_part_of_them(name: str, seed: int) -> None:
    """A string ends only at its own mark: no other one ends the call or begins another."""
    draw, format_ = random.Random(seed), EVERY[name]
    for mark in MARKS:
        calls = [Call("abcdefgh1", "weather", json.dumps({"city": f"a{mark}b", "note": f"{mark}add"}))]
        text = format_.write(calls)
        for cuts in ([], cuts_of(draw, text)):
            said, found = gathered(read(format_, text, cuts))
            assert (said, as_values(found)) == ("", [("weather", json.loads(calls[0].arguments))]), text


@pytest.mark.parametrize("name", EVERY)
def test_text_before_and_behind_calls_is_text_without_their_syntax(name: str, seed: int) -> None:
    draw, format_ = random.Random(seed), EVERY[name]
    for _ in range(60):
        calls = some_calls(draw)
        before = "" if format_.at_start else "First."
        text = f"{before}\n{format_.write(calls)}\nThen.".lstrip()
        for cuts in (list(range(1, len(text))), cuts_of(draw, text)):
            said, found = gathered(read(format_, text, cuts))
            assert said == (f"{before}\nThen." if before else "Then.") and len(found) == len(calls), text


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize(
    "text",
    ["", "Hello.", "  leading and trailing \n", "{", "add", "add(", "<tool_call>", "<tool_call>unknown\n</tool_call>",
     "<tool_call>no call", "[TOOL_CALLS]", "[TOOL_CALLS]nothing", "[TOOL_CALLS]unknown[ARGS]{}", "<function_calls>",
     "<function_calls>unknown(a=1)</function_calls>", "<function_calls>add", "```tool_code\nprint(1)\n```",
     "```python\nadd(a=1)\n```", "<start_function_call>call:unknown{}<end_function_call>", "<start_function_call>call:",
     "unknown\n{}", "\nadd is a word", "<tool", "``", "<|assistant|>unknown\n{}"],
)  # fmt: skip
def test_what_is_no_call_stays_text(name: str, text: str, seed: int) -> None:
    draw = random.Random(seed)
    for cuts in ([], list(range(1, len(text))), *(cuts_of(draw, text) for _ in range(8))):
        assert gathered(read(EVERY[name], text, cuts)) == (text, [])


BERN = '{"city": "Bern"}'


@pytest.mark.parametrize(
    ("name", "text", "said", "calls"),
    [
        ("mistral-args", '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]weather[ARGS] {"city": "Bern"}', "",
         [("add", '{"a": 1}'), ("weather", BERN)]),
        ("mistral-args", 'So: [TOOL_CALLS] add [ARGS]{}', "So:", [("add", "{}")]),
        ("mistral-ids", '[TOOL_CALLS]add[CALL_ID]a1B2c3D4e[ARGS]{"a": 1}', "", [("add", '{"a": 1}')]),
        ("mistral-ids", '[TOOL_CALLS]add[ARGS]{"a": 1}', "", [("add", '{"a": 1}')]),
        ("glm", "<tool_call>weather<arg_key>city</arg_key><arg_value>Bern</arg_value></tool_call>", "",
         [("weather", BERN)]),
        ("glm", "\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Bern</arg_value>\n</tool_call>\n"
         "<tool_call>add\n</tool_call>", "", [("weather", BERN), ("add", "{}")]),
        ("glm", "<tool_call>add<arg_key>a</arg_key><arg_value> 2 </arg_value><arg_key>c</arg_key>"
         "<arg_value>null</arg_value></tool_call>", "", [("add", '{"a": 2, "c": null}')]),
        ("glm", "<tool_call>add<arg_key>a</arg_key><arg_value>two</arg_value></tool_call>", "",
         [("add", '{"a": "two"}')]),
        ("glm", "<tool_call>add<arg_key>new</arg_key><arg_value>[1]</arg_value></tool_call>", "",
         [("add", '{"new": [1]}')]),
        ("olmo", "<function_calls>weather(city='Bern')\nadd(a=1, b=True, c=None)</function_calls>", "",
         [("weather", BERN), ("add", '{"a": 1, "b": true, "c": null}')]),
        ("olmo", "<function_calls>\nadd( a = 1 , b = true, )\n</function_calls> Done.", "Done.",
         [("add", '{"a": 1, "b": true}')]),
        ("olmo", "<function_calls>add(1, False)</function_calls>", "", [("add", '{"a": 1, "b": false}')]),
        ("olmo", '<function_calls>weather("Bern", [1, (2, 3), {\'x\': None}])</function_calls>', "",
         [("weather", '{"city": "Bern", "days": [1, [2, 3], {"x": null}]}')]),
        ("olmo", '<function_calls>add(a=1), add(a=1_000); add(a=+0x10)</function_calls>', "",
         [("add", '{"a": 1}'), ("add", '{"a": 1000}'), ("add", '{"a": 16}')]),
        ("olmo", "<function_calls>weather(note='''a'b\n\"\"c''', city=\"\")</function_calls>", "",
         [("weather", '{"note": "a\'b\\n\\"\\"c", "city": ""}')]),
        ("olmo", r'<function_calls>weather(city="B\x65\u0072\156\
", note="\ud83d\ude00\/\q")</function_calls>', "", [("weather", r'{"city": "Bern", "note": "\ud83d\ude00/\\q"}')]),
        ("gemma", "I call.\n```tool_code\nweather(city=\"Bern\")\n```", "I call.", [("weather", BERN)]),
        ("gemma", "```tool_call\nweather(city=\"Bern\")\nadd()\n```\nDone.", "Done.",
         [("weather", BERN), ("add", "{}")]),
        ("functiongemma", "<start_function_call>call:weather{city:<escape>Bern<escape>}<end_function_call>", "",
         [("weather", BERN)]),
        ("functiongemma", "<start_function_call>call:weather{city:Bern , place:{x:1,y:<escape>,}<escape>},days:[a,2]}"
         "<end_function_call>", "", [("weather", '{"city": "Bern", "place": {"x": 1, "y": ",}"}, "days": ["a", 2]}')]),
        ("functiongemma", "<start_function_call>call:weather{<escape>city<escape>:12}", "",
         [("weather", '{"city": "12"}')]),
        ("glm4", 'add\n{"a": 1}', "", [("add", '{"a": 1}')]),
        ("glm4", '\nadd\n{"a": 1}\n', "", [("add", '{"a": 1}')]),
        ("glm4", 'add\n{"a": 1}<|assistant|>weather\n{"city": "Bern"}', "", [("add", '{"a": 1}'), ("weather", BERN)]),
        ("glm4", '\nI call.<|assistant|>add\n{}', "\nI call.", [("add", "{}")]),
    ],
)  # fmt: skip
def test_what_models_write_is_read(name: str, text: str, said: str, calls: list[Any], seed: int) -> None:
    draw = random.Random(seed)
    for cuts in ([], list(range(1, len(text))), *(cuts_of(draw, text) for _ in range(40))):
        found = gathered(read(EVERY[name], text, cuts))
        assert found == (said, calls)


@pytest.mark.parametrize(
    ("name", "text", "arguments", "said"),
    [
        ("olmo", "<function_calls>add(a=1, b=x+y)</function_calls>", '{"a": 1, "b": ', "x+y)</function_calls>"),
        ("olmo", "<function_calls>add(a=1 2)", '{"a": 1', "2)"),
        ("olmo", "<function_calls>add(1, 2, 3, 4)", '{"a": 1, "b": 2, "c": 3, ', None),
        ("glm", "<tool_call>add<arg_key>a</arg_key>1</tool_call>", '{"a": ', "1</tool_call>"),
        ("functiongemma", "<start_function_call>call:add{a:1]}", '{"a": 1', "]}"),
    ],
)  # fmt: skip
def test_arguments_that_leave_the_notation_end_there(
    name: str, text: str, arguments: str, said: str | None, seed: int
) -> None:
    """Incomplete, so that nobody runs a call with fewer arguments than the model wrote."""
    draw = random.Random(seed)
    for cuts in ([], list(range(1, len(text))), *(cuts_of(draw, text) for _ in range(40))):
        parser = NamedCallParser(EVERY[name], TOOLS)
        found = list[AnswerDelta]()
        for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
            found += parser.push(text[begin:end])
        spoken, calls = gathered(found + parser.flush())
        assert parser.is_cut and calls == [("add", arguments.removesuffix(", ") if said is None else arguments)]
        assert said is None or spoken == said


@pytest.mark.parametrize("name", EVERY)
def test_calls_that_are_cut_off_have_arguments_that_end_early(name: str, seed: int) -> None:
    draw, format_ = random.Random(seed), EVERY[name]
    for _ in range(6):
        calls = some_calls(draw, 2)
        whole, values = format_.write(calls), [json.loads(call.arguments) for call in calls]
        full = gathered(read(format_, whole, []))[1]
        for end in range(len(whole)):
            parser = NamedCallParser(format_, TOOLS, is_exact=True)
            said, found = gathered(parser.push(whole[:end]) + parser.flush())
            # No syntax is text, except of a name that may be a word.
            assert said == "" or (format_.at_start and not found and "\n{" not in said), (whole[:end], said)
            for (name_, arguments), (full_name, full_arguments) in zip(found, full, strict=False):
                assert name_ == full_name and full_arguments.startswith(arguments), whole[:end]
            is_whole = [arguments == full[place][1] for place, (_, arguments) in enumerate(found)]
            assert all(is_whole[:-1]) and parser.is_cut == (not all(is_whole)), whole[:end]
        assert [json.loads(arguments) for _, arguments in full] == values


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("is_exact", [False, True])
def test_further_calls_are_dropped_where_one_may_be(name: str, is_exact: bool, seed: int) -> None:
    draw, format_ = random.Random(seed), EVERY[name]
    text = format_.write([Call("a" * 9, "add", '{"a": 1}'), Call("b" * 9, "weather", BERN)])
    for _ in range(30):
        found = gathered(read(format_, text, cuts_of(draw, text), most=1, is_exact=is_exact))
        assert found == ("", [("add", '{"a": 1}')])


@pytest.mark.parametrize("name", EVERY)
def test_beside_a_form_an_answer_is_either_calls_or_text(name: str, seed: int) -> None:
    draw, format_ = random.Random(seed), EVERY[name]
    calls = format_.write([Call("a" * 9, "add", '{"a": 1}')])
    texts = [f"word {calls}", f" {calls}" if not format_.at_start else "x", '{"na', "x", "", " ", "a \n"]
    for text in texts:
        for _ in range(10):
            found = gathered(read(format_, text, cuts_of(draw, text), is_exact=True, is_either=True))
            assert found == (text, []), text
    for _ in range(10):
        found = gathered(read(format_, calls, cuts_of(draw, calls), is_exact=True, is_either=True))
        assert found == ("", [("add", '{"a": 1}')])


@pytest.mark.parametrize("name", EVERY)
def test_whole_and_streamed_agree_on_anything_that_looks_like_calls(name: str, seed: int) -> None:
    draw, format_ = random.Random(seed), EVERY[name]
    call = format_.write([Call("a" * 9, "add", '{"a": 1, "b": true}')])
    pieces = [call, call[: len(call) // 2], format_.opener, format_.separator or ";", format_.closer, *format_.tokens,
              *format_.marks, *format_.other_openers, "add", "weather", "call:", "(", ")", "{", "}", "[", "]", "a", "=",
              ":", ",", "1", "True", "'", '"', '"""', "\\", "\\x4", "<", " ", "\n", "city", "<escape>", "-", "x" * 600,
              " " * 600]  # fmt: skip
    for _ in range(tries(200)):
        text = "".join(draw.choices(pieces, k=draw.randrange(1, 14)))
        how = {"most": 1} if draw.random() < 0.3 else {}
        whole = gathered(read(format_, text, [], **how))
        for cuts in (list(range(1, len(text))), cuts_of(draw, text)):
            assert gathered(read(format_, text, cuts, **how)) == whole, text


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("piece", ["{", "[", "a", " ", '"', "\\", "<escape>", "a(", "<arg_key>", "add\n{", ")"])
def test_any_long_text_is_read_in_linear_time(name: str, piece: str) -> None:
    format_ = EVERY[name]
    head = format_.write([Call("a" * 9, "weather", '{"city": "x"}')]).partition("x")[0]
    for begins in (head, format_.opener, format_.write([Call("a" * 9, "weather", BERN)])):
        for size in (1, 4_000):
            parser = NamedCallParser(format_, TOOLS)
            parser.push(begins)
            begun = time.process_time()
            for _ in range(4_000 // size):
                parser.push((begins + piece if size > 1 else piece) * size)
            parser.flush()
            assert time.process_time() - begun < 2
