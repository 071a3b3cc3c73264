"""Grammars for calls in the formats of model families, on tokenizers that have the marks as added tokens."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import jsonschema
import pytest

from quire.models.tokenizer import Tokenizer
from quire.structured.grammar_compiler import GrammarCompiler
from quire.structured.params import StructuredOutputsParams
from quire.structured.schemas import UnsupportedSchemaError
from quire.tools.answer_parser import call_parser
from quire.tools.calls import Call, Tool, ToolChoice
from quire.tools.format import ToolFormat
from quire.tools.formats import format_of
from tests.effort import tries
from tests.models.test_tokenizer_families import continued, drawn
from tests.tokenizer_families import CALLING, family_tokenizer
from tests.tools.test_formats import gathered

Schema = dict[str, Any]


def tool(name: str, properties: Mapping[str, Any], required: list[str], **more: Any) -> Tool:
    schema = {"type": "object", "properties": dict(properties), "required": required, "additionalProperties": False}
    return Tool(name, parameters={**schema, **more}, strict=True)


TOOLS = [
    tool("add", {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"type": "boolean"}}, ["a"]),
    tool("say", {"word": {"enum": ["yes", "no\n(2)", 7]}, "who": {"type": "string", "minLength": 2, "maxLength": 5}},
         ["word", "who"]),
    tool("find", {"code": {"type": "string", "pattern": "^[a-c]{2}x?$"}, "at": {"$ref": "#/$defs/place"},
                  "tags": {"type": "array", "items": {"enum": ["u", "v"]}, "minItems": 1, "maxItems": 2},
                  "or": {"type": ["string", "null"], "maxLength": 3}}, ["code", "at", "tags"],
         **{"$defs": {"place": {"type": "object", "properties": {"x": {"type": "integer", "minimum": 1, "maximum": 3},
                                                                 "of": {"const": "q"}},
                                "required": ["x"], "additionalProperties": False}}}),
    Tool("stop", strict=True),
]  # fmt: skip
SCHEMAS = {each.name: each.parameters for each in TOOLS}
VALID: list[tuple[str, Schema]] = [
    ("add", {"a": 4, "b": True}), ("add", {"a": 4}), ("say", {"word": "no\n(2)", "who": "me 2"}),
    ("say", {"word": 7, "who": "日本"}),
    ("find", {"code": "abx", "at": {"x": 2, "of": "q"}, "tags": ["u", "v"], "or": "ab"}),
    ("find", {"code": "ab", "at": {"x": 2}, "tags": ["v"], "or": None}),
    ("find", {"code": "cc", "at": {"x": 1}, "tags": ["v"]}),
    ("stop", {}),
]  # fmt: skip
INVALID: list[tuple[str, Schema]] = [
    ("add", {"a": 100}), ("add", {"b": True}), ("add", {"a": 4, "c": 1}), ("say", {"word": "maybe", "who": "me"}),
    ("say", {"word": "yes", "who": "m"}), ("say", {"word": "yes", "who": "me and you"}), ("stop", {"a": 1}),
    ("find", {"code": "abd", "at": {"x": 2}, "tags": ["u"]}), ("find", {"code": "ab", "at": {"x": 9}, "tags": ["u"]}),
    ("find", {"code": "ab", "at": {"x": 2}, "tags": []}), ("nobody", {}),
]  # fmt: skip


@pytest.fixture(scope="module", params=CALLING)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    found = family_tokenizer(tmp_path_factory.mktemp("family"), CALLING[request.param])
    assert format_of(found.tool_template).name == request.param
    return found


@pytest.fixture(scope="module")
def format_(tokenizer: Tokenizer) -> ToolFormat:
    return format_of(tokenizer.tool_template)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, tokenizer.vocab_size + 3, tokenizer.eos_ids)


def constraint(format_: ToolFormat, choice: ToolChoice, tokenizer: Tokenizer) -> StructuredOutputsParams:
    found = format_.structure(TOOLS, choice, tokenizer.added_id)
    assert found is not None
    return found


def accepts(grammars: GrammarCompiler, wanted: StructuredOutputsParams, text: str) -> bool:
    matcher, ids = grammars.compile(wanted).begin(), continued(grammars._tokenizer, text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize("choice", [ToolChoice("required"), ToolChoice()], ids=["required", "auto"])
def test_valid_calls_are_allowed_and_invalid_ones_are_not(
    tokenizer: Tokenizer, grammars: GrammarCompiler, format_: ToolFormat, choice: ToolChoice
) -> None:
    wanted = constraint(format_, choice, tokenizer)
    for calls, is_allowed in ((VALID, True), (INVALID, False)):
        for name, arguments in calls:
            text = format_.write([Call("abcdefgh1", name, json.dumps(arguments, ensure_ascii=False))])
            if name == "nobody" and format_.at_start and choice.mode == "auto":
                continue  # without an opener it is text
            assert accepts(grammars, wanted, text) == is_allowed, text
    two = format_.write([Call("abcdefgh1", name, json.dumps(arguments)) for name, arguments in VALID[:2]])
    assert accepts(grammars, wanted, two)
    assert accepts(grammars, wanted, "Just words, a < b, [c].") == (choice.mode == "auto")
    if choice.mode == "auto" and not format_.at_start:
        for name, arguments in (VALID[0], INVALID[0]):
            text = "Let me see.\n" + format_.write([Call("abcdefgh1", name, json.dumps(arguments))])
            assert accepts(grammars, wanted, text) == (name == VALID[0][0] and arguments == VALID[0][1]), text


@pytest.mark.parametrize(
    "choice", [ToolChoice("required"), ToolChoice("required", "find"), ToolChoice("required", parallel=False)]
)
def test_drawn_answers_are_calls_with_valid_arguments(
    tokenizer: Tokenizer, grammars: GrammarCompiler, format_: ToolFormat, choice: ToolChoice, seed: int
) -> None:
    draw, wanted = random.Random(seed), constraint(format_, choice, tokenizer)
    for _ in range(tries(4)):
        text = drawn(grammars, wanted, draw)
        parser = call_parser(format_, TOOLS, is_exact=True)
        said, calls = gathered([each for char in text for each in parser.push(char)] + parser.flush())
        assert not said and calls and not parser.is_cut and (choice.parallel or len(calls) == 1), text
        for name, arguments in calls:
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])
            assert choice.name in ("", name)


def test_forced_marks_are_the_tokens_of_the_vocabulary(
    tokenizer: Tokenizer, grammars: GrammarCompiler, format_: ToolFormat
) -> None:
    """Not their names in pieces, with which the model was not trained."""
    wanted = constraint(format_, ToolChoice("required"), tokenizer)
    text = format_.write([Call("abcdefgh1", "say", '{"word": "yes", "who": "me"}')])
    marks = [mark for mark in format_.shown_marks if mark in text]
    special = [mark for mark in marks if tokenizer.added_id(mark) in tokenizer.special_ids]
    for mark in special:
        before = text[: text.index(mark)]
        matcher, ids = grammars.compile(wanted).begin(), continued(tokenizer, before)
        assert matcher.try_consume_tokens(ids) == len(ids)
        spelled = continued(tokenizer, mark[0])
        assert matcher.deep_copy().try_consume_tokens(spelled) == 0, (before, mark)
        assert matcher.try_consume_tokens([tokenizer.added_id(mark)]) == 1, mark  # type: ignore[list-item]
    assert marks or format_.name in ("gemma", "glm4")


def test_a_tool_that_is_not_strict_may_have_any_arguments_beside_a_strict_one(
    tokenizer: Tokenizer, grammars: GrammarCompiler, format_: ToolFormat
) -> None:
    tools = [TOOLS[0], Tool("free", parameters=SCHEMAS["say"])]
    wanted = format_.structure(tools, ToolChoice(), tokenizer.added_id)
    assert wanted is not None
    for arguments in ({}, {"word": 9, "new": "x", "deep": {"a": [1, "b"]}}):
        text = format_.write([Call("abcdefgh1", "free", json.dumps(arguments))])
        assert accepts(grammars, wanted, text), text
    assert not accepts(grammars, wanted, format_.write([Call("abcdefgh1", "add", '{"a": "x"}')]))


@pytest.mark.parametrize(
    ("word", "schema"),
    [
        ("minProperties", {"type": "object", "properties": {"a": {"type": "string"}}, "minProperties": 1}),
        ("format", {"type": "object", "properties": {"a": {"type": "string", "format": "date"}}}),
        ("pattern", {"type": "object", "properties": {"a": {"type": "string", "pattern": "^a|b$"}}}),
    ],
)
@pytest.mark.parametrize("name", ["glm", "functiongemma"])
def test_a_schema_that_cannot_be_honoured_is_refused_by_the_keyword(name: str, word: str, schema: Schema) -> None:
    format_ = {"glm": format_of("<arg_key>"), "functiongemma": format_of("<start_function_call>")}[name]
    with pytest.raises(UnsupportedSchemaError, match=word):
        format_.grammar([Tool("add", parameters=schema)], ToolChoice("required"), lambda text: None)
