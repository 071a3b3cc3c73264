"""Formats of calls: which one a template has, and calls that grammars make models write."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

from quire.models.resolve import resolve_model
from quire.models.tokenizer import load_tokenizer
from quire.structured.grammar_compiler import GrammarCompiler
from quire.structured.params import StructuredOutputsParams
from quire.tools.calls import AnswerDelta, ArgumentsDelta, Call, CallStart, TextDelta, Tool, ToolChoice
from quire.tools.format import ToolFormat
from quire.tools.formats import FORMATS, GENERIC, format_of
from quire.tools.parser import CallParser

from ..toy_guide import members

EVERY = {each.name: each for each in (*FORMATS, GENERIC)}
NAMES = ("weather", "add", "no_arguments")
ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"city": "Zürich", "days": [1, 2, {"a": None}]},
    {"text": 'a "quoted" } ] { [ \\ </tool_call> [TOOL_CALLS] text\n', "n": -1.5e3},
    {"nested": {"deep": {"deeper": []}}},
    {"text": 'one inch (") } and more', "end": "\\"},
]


def read(format_: ToolFormat, text: str, cuts: list[int], **how: int | bool) -> list[AnswerDelta]:
    parser, found = CallParser(format_, NAMES, **how), list[AnswerDelta]()  # type: ignore[arg-type]
    for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        found += parser.push(text[begin:end])
    return found + parser.flush()


def gathered(parts: list[AnswerDelta]) -> tuple[str, list[tuple[str, str]]]:
    """The joined text, and the calls' names and arguments."""
    text, calls = "", list[tuple[str, str]]()
    for part in parts:
        match part:
            case TextDelta(piece):
                text += piece
            case CallStart(index, id_, name):
                assert index == len(calls) and id_
                calls.append((name, ""))
            case ArgumentsDelta(index, piece):
                assert index == len(calls) - 1
                calls[-1] = (calls[-1][0], calls[-1][1] + piece)
    return text, calls


def cuts_of(draw: random.Random, text: str) -> list[int]:
    return sorted(draw.choices(range(len(text) + 1), k=draw.randrange(12)))


@pytest.mark.parametrize("name", EVERY)
def test_what_a_grammar_lets_pass_as_text_is_no_call(grammars: GrammarCompiler, name: str) -> None:
    """Where arguments must be valid, the parser takes for a call only what the grammar does."""
    format_ = EVERY[name]
    grammar = format_.grammar(TOOLS, ToolChoice(), lambda text: None)
    matcher = grammars.compile(StructuredOutputsParams(grammar=grammar)).begin()
    call = f'{{"name": "add", "{format_.key}": {{"a": "one", "b": true}}}}'
    for opener in (
        *format_.other_openers,
        format_.opener.strip(),
        " " + format_.opener,
        "\n" + format_.opener,
        format_.opener + " ",
    ):
        for text in (opener + call, opener + "[" + call + "]"):
            ids, copy = grammars._tokenizer.encode(text, add_special=False), matcher.deep_copy()
            if copy.try_consume_tokens(ids) < len(ids):
                continue
            parser = CallParser(format_, NAMES, is_exact=True)
            assert gathered(parser.push(text) + parser.flush())[1] == [], text


def test_a_format_is_known_by_the_template() -> None:
    assert format_of("<tool_call>{name}\n<arg_key>").name == "glm"
    assert format_of("[TOOL_CALLS]{{ name }}[ARGS]").name == "mistral-args"
    assert format_of("[TOOL_CALLS]{{ name }}[CALL_ID]{{ id }}[ARGS]").name == "mistral-ids"
    assert format_of("<tool_call>\n<function={{ name }}>").name == "generic"
    assert format_of("<|assistant|>{{ metadata }}<|observation|>").name == "glm4"
    assert format_of("<functions>{{ tools }}<function_calls>").name == "olmo"
    assert format_of("<start_of_turn>model").name == "gemma"
    assert format_of("<start_of_turn>model<start_function_call>").name == "functiongemma"
    assert format_of("'<|' + role + '|>' <|tool|>{{ tools }}<|/tool|>").name == "phi"
    assert format_of("write <|tool_call|> and a list").name == "granite"
    assert format_of("<|START_ACTION|>[").name == "cohere"
    assert format_of("{% if tools %}<tool_call>{% endif %}").name == "hermes"
    assert format_of("{{ '[TOOL_CALLS]' }}").name == "mistral"
    assert format_of("{{ '<|python_tag|>' }}").name == "llama"
    assert format_of("{{ messages }}").name == "generic"


SCHEMAS = {
    "weather": {
        "type": "object",
        "properties": {"city": {"enum": ["Bern", "Zürich"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
    "add": {
        "type": "object",
        "properties": {"a": {"type": "number"}, "b": {"type": "boolean"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
}
TOOLS = [Tool(name, parameters=schema, strict=True) for name, schema in SCHEMAS.items()]


@pytest.fixture(scope="module")
def grammars() -> GrammarCompiler:
    tokenizer = load_tokenizer(resolve_model("smollm2"))
    return GrammarCompiler(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize(
    "choice",
    [ToolChoice("required"), ToolChoice("required", "add"), ToolChoice("required", parallel=False)],
    ids=["required", "named", "one"],
)
def test_answers_that_must_call_do_with_valid_arguments(
    grammars: GrammarCompiler, name: str, choice: ToolChoice, seed: int
) -> None:
    draw, format_ = random.Random(seed), EVERY[name]
    for _ in range(4):
        text = drawn(grammars, format_, choice, draw)
        said, calls = gathered(read(format_, text, []))
        # Each call has its name and its arguments.
        most = len(text) // len('add{"a":0,"b":true}') if choice.parallel and format_.separator else 1
        assert not said and 1 <= len(calls) <= most
        for called, arguments in calls:
            jsonschema.validate(json.loads(arguments), SCHEMAS[called])
            assert choice.name in ("", called)


@pytest.mark.parametrize("name", EVERY)
def test_arguments_are_an_object_whatever_else_the_parameters_allow(grammars: GrammarCompiler, name: str) -> None:
    parameters = {"type": ["null", "object"], "properties": {"a": {"$ref": "#/$defs/word"}}, "required": ["a"],
                  "$defs": {"word": {"enum": ["x"]}}, "additionalProperties": False}  # fmt: skip
    grammar = EVERY[name].grammar([Tool("add", parameters=parameters)], ToolChoice("required"), lambda text: None)
    matcher = grammars.compile(StructuredOutputsParams(grammar=grammar)).begin()
    for arguments, is_right in (('{"a": "x"}', True), ("null", False), ('{"a": "y"}', False)):
        ids, copy = (
            grammars._tokenizer.encode(EVERY[name].write([Call("", "add", arguments)]), False),
            matcher.deep_copy(),
        )
        assert (copy.try_consume_tokens(ids) == len(ids)) == is_right, arguments


@pytest.mark.parametrize("name", EVERY)
def test_answers_that_may_call_say_anything_or_call_with_valid_arguments(
    grammars: GrammarCompiler, name: str, seed: int
) -> None:
    draw, format_ = random.Random(seed), EVERY[name]
    grammar = format_.grammar(TOOLS, ToolChoice(), lambda text: None)
    matcher = grammars.compile(StructuredOutputsParams(grammar=grammar)).begin()
    encode = grammars._tokenizer.encode
    valid = Call("", "add", '{"a": 1, "b": true}')
    invalid = Call("", "add", '{"a": "one", "b": true}')
    for text, is_allowed in (
        ("Just words, a < b, and [brackets].", True),
        (format_.write([valid]), True),
        (format_.write([invalid]), False),
        (("" if format_.at_start else "Let me see.\n") + format_.write([valid]), True),
        (("" if format_.at_start else "Let me see.\n") + format_.write([invalid]), False),
    ):
        copy, ids = matcher.deep_copy(), encode(text, add_special=False)
        taken = copy.try_consume_tokens(ids)
        assert (taken == len(ids) and copy.is_accepting()) == is_allowed, (text, taken, len(ids))
    del draw


def drawn(grammars: GrammarCompiler, format_: ToolFormat, choice: ToolChoice, draw: random.Random) -> str:
    """A text that the grammar allows, of random tokens."""
    grammar = format_.grammar(TOOLS, choice, lambda text: None)
    assert grammar is not None
    guide, tokens = grammars.guide(grammars.compile(StructuredOutputsParams(grammar=grammar)), 1), [0]
    while True:
        drafts, masks = guide.propose(list(tokens), 20)
        allowed = members(masks[-1])
        ends = [token for token in allowed if token in grammars._tokenizer.eos_ids]
        tokens += drafts
        token = ends[0] if ends and len(tokens) > 60 else draw.choice(allowed)
        if token in ends:
            return grammars._tokenizer.decode(tokens[1:])
        tokens.append(token)
        assert len(tokens) < 1000
