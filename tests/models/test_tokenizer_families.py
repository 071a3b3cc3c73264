"""Forms, calls and reasoning on tokenizers that are built like those of model families."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from typing import Any

import jsonschema
import pytest

from quire.models.tokenizer import Tokenizer
from quire.structured.grammar_compiler import GrammarCompiler
from quire.structured.grammar_tokens import _TextCutter, token_table
from quire.structured.params import StructuredOutputsParams
from quire.tools.answer_parser import AnswerParser
from quire.tools.calls import ArgumentsDelta, CallStart, ReasoningDelta, TextDelta, Tool, ToolChoice
from quire.tools.format import ToolFormat
from quire.tools.formats import FORMATS, GENERIC, format_of
from quire.tools.parser import CallParser
from quire.tools.reasoning import FORMATS as REASONING
from quire.tools.reasoning import ReasoningParser
from tests.effort import tries
from tests.tokenizer_families import FAMILIES, family_tokenizer
from tests.toy_guide import members

TOOLS = [
    Tool("add", parameters={"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
                            "required": ["a"], "additionalProperties": False}, strict=True),
    Tool("say", parameters={"type": "object", "properties": {"word": {"enum": ["yes", "no"]}},
                            "required": ["word"], "additionalProperties": False}, strict=True),
]  # fmt: skip
SCHEMAS = {tool.name: tool.parameters for tool in TOOLS}
MODES = {"required": ToolChoice("required"), "named": ToolChoice("required", "say"), "auto": ToolChoice()}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def tokenizer(family: str, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return family_tokenizer(tmp_path_factory.mktemp("family"), family)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, tokenizer.vocab_size + 3, tokenizer.eos_ids)


def drawn(grammars: GrammarCompiler, wanted: StructuredOutputsParams, draw: random.Random, begins: str = "") -> str:
    """An answer of random tokens that ends soon. begins: what it begins with, which must be allowed."""
    tokenizer = grammars._tokenizer
    script = continued(tokenizer, begins)
    guide, tokens = grammars.guide(grammars.compile(wanted), 1), [0]
    while True:
        drafts, masks = guide.propose(list(tokens), 0 if len(tokens) <= len(script) else 20)
        allowed = members(masks[-1])
        if len(tokens) <= len(script):
            assert script[len(tokens) - 1] in allowed, (begins, len(tokens))
            tokens.append(script[len(tokens) - 1])
            continue
        tokens += drafts
        if len(tokens) > 300:  # lists of calls end
            allowed = [each for each in allowed if not tokenizer.decode([each]).startswith(",")] or allowed
        ends = [each for each in allowed if each in tokenizer.eos_ids]
        token = draw.choice(ends if ends and len(tokens) > 30 else allowed)
        if token in ends:
            return tokenizer.decode(tokens[1:], skip_special=False)
        tokens.append(token)
        assert len(tokens) < 1500, tokenizer.decode(tokens)


def continued(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a text that continues another one, special ones included."""
    cutter = _TextCutter(token_table(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids))
    special = {tokenizer.decode([token_id], skip_special=False): token_id for token_id in tokenizer.special_ids}
    pieces = re.split("(" + "|".join(map(re.escape, special)) + ")", text)
    return [each for piece in pieces for each in ([special[piece]] if piece in special else cutter(piece))]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("format_", [*FORMATS, GENERIC], ids=lambda each: each.name)
def test_calls_are_valid_in_every_format(
    tokenizer: Tokenizer, grammars: GrammarCompiler, format_: ToolFormat, mode: str, seed: int
) -> None:
    """Also in formats that are not the family's: its marks are then plain text."""
    draw, choice = random.Random(seed), MODES[mode]
    grammar = format_.grammar(TOOLS, choice, tokenizer.added_id)
    assert grammar is not None
    before = "" if format_.at_start else draw.choice(["", "Let me see: 1 < 2. "])
    begins = before + (format_.opener or "{") if mode == "auto" else ""
    for _ in range(tries(3)):
        text = drawn(grammars, StructuredOutputsParams(grammar=grammar), draw, begins)
        parser = CallParser(format_, SCHEMAS, is_exact=True)
        said, calls = gathered(parser.push(text) + parser.flush())
        assert calls and (mode == "auto" or not said), text
        for name, arguments in calls:
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])
            assert choice.name in ("", name)


def test_a_strict_tool_may_be_called_wherever_the_model_likes(tokenizer: Tokenizer, grammars: GrammarCompiler) -> None:
    """The token that begins a call can be chosen, at the start and behind text, and what follows is held."""
    format_ = format_of(tokenizer.tool_template)
    opener = continued(tokenizer, format_.opener or "{")[:1]
    grammar = format_.grammar(TOOLS, ToolChoice(), tokenizer.added_id)
    matcher = grammars.compile(StructuredOutputsParams(grammar=grammar)).begin()
    for before in ("", "" if format_.at_start else "Let me see. "):
        ids = continued(tokenizer, before) + opener
        assert matcher.deep_copy().try_consume_tokens(ids) == len(ids), before


def test_text_that_spells_the_opener_of_calls_is_held_like_it(tokenizer: Tokenizer, grammars: GrammarCompiler) -> None:
    format_ = format_of(tokenizer.tool_template)
    if format_.at_start or not format_.marks:
        pytest.skip("nothing opens a call")
    grammar = format_.grammar(TOOLS, ToolChoice(), tokenizer.added_id)
    matcher = grammars.compile(StructuredOutputsParams(grammar=grammar)).begin()
    # A template of Gemma has marks of turns alone.
    opener = format_.opener if format_.name == "gemma" else format_.marks[0]
    spelled = [each for char in opener for each in continued(tokenizer, char)]
    call = continued(tokenizer, '\n{"name": "nobody", "arguments": {"a": "wrong"}}')
    taken = matcher.try_consume_tokens([*spelled, *call])
    assert taken < len(spelled) + len(call)


@pytest.mark.parametrize("reasoning", REASONING, ids=lambda each: each.name)
@pytest.mark.parametrize("is_begun", [True, False])
def test_reasoning_stands_before_a_form_in_every_format(
    tokenizer: Tokenizer, grammars: GrammarCompiler, reasoning: Any, is_begun: bool, seed: int
) -> None:
    draw = random.Random(seed)
    marks = ("" if is_begun else reasoning.begins, reasoning.ends)
    wanted = StructuredOutputsParams(json=SCHEMAS["say"], reasoning=marks)
    for before in ("Hm, 1 < 2.", "\n", "a <b> [c]\n"):
        text = drawn(grammars, wanted, draw, f"{marks[0]}{before}{reasoning.ends}")
        reader = AnswerParser(ReasoningParser(reasoning, is_inside=is_begun))
        parts = reader.read(text, is_last=True)
        said = "".join(part.text for part in parts if isinstance(part, TextDelta))
        jsonschema.validate(json.loads(said), SCHEMAS["say"])
        reasoned = "".join(part.text for part in parts if isinstance(part, ReasoningDelta))
        assert reasoned == before.strip()


def gathered(parts: Sequence[Any]) -> tuple[str, list[tuple[str, str]]]:
    said, calls = "", list[list[str]]()
    for part in parts:
        match part:
            case TextDelta(text):
                said += text
            case CallStart(_, _, name):
                calls.append([name, ""])
            case ArgumentsDelta(index, text):
                calls[index][1] += text
    return said, [(name, arguments) for name, arguments in calls]
