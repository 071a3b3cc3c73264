"""Structured output: every answer that ends is what was asked for, in any batch, whatever becomes of its sequence, and
tokens that a grammar forces are not steps.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import pytest

from quire import LLM, SamplingParams
from quire.errors import QueueFullError, RequestError
from quire.llm import merge_delta
from quire.models import child
from quire.models.child import ChildProcess
from quire.models.resolve import resolve_model
from quire.models.tokenizer import load_tokenizer
from quire.structured import grammar_compiler as grammars_module
from quire.structured import grammar_trial
from quire.structured.grammar_compiler import GrammarCompiler
from quire.structured.params import StructuredOutputsParams
from tests.engine.test_engine_guides import CACHES, SHAPE

from ..effort import combine, tries
from ..engines import generate, make_engine
from ..store_helpers import put_store
from ..tiny_models import BYTE_VOCAB, save_tiny
from ..toy_guide import members
from ..toy_store import ToyStore

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["cat", "dog", "parrot"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "kind", "age"],
    "additionalProperties": False,
}
WAYS: dict[str, dict[str, Any]] = {
    "json": {"json": SCHEMA},
    "regex": {"regex": r"[a-f]{3,7}-[0-9]{4}"},
    "choice": {"choice": ["yes", "no", '"quoted"\n', "né"]},
    "lark": {"grammar": 'start: "<" WORD ("," WORD)~0..3 ">"\nWORD: /[a-z]{1,4}/'},
    "gbnf": {"grammar": 'root ::= "<" word ">"\nword ::= [a-z] [a-z]? [a-z]?'},
}
EXAMPLES = {
    "json": ['{"name": "Tom", "kind": "cat", "age": 7}'],
    "regex": ["abcd-2024"],
    "choice": ["yes"],
    "lark": ["<ab,cd>"],
    "gbnf": ["<ab>"],
}
OPTIONS: dict[str, Any] = {
    "model.dtype": "float32", "runtime.device": "cpu", "runtime.threads": 1, "cache.memory": "4MiB",
}  # fmt: skip


def fits(way: str, text: str) -> bool:
    if way == "json":
        found = json.loads(text)
        return (
            list(found) == ["name", "kind", "age"]
            and len(found["name"]) <= 12
            and found["kind"] in ("cat", "dog", "parrot")
            and 0 <= found["age"] <= 99
        )
    if way == "choice":
        return text in WAYS["choice"]["choice"]
    patterns = {"regex": WAYS["regex"]["regex"], "lark": r"<[a-z]{1,4}(,[a-z]{1,4}){0,3}>", "gbnf": "<[a-z]{1,3}>"}
    return re.fullmatch(patterns[way], text) is not None


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(model: Path) -> LLM:
    return LLM(str(model), OPTIONS)


@pytest.mark.parametrize("way", WAYS)
def test_every_answer_is_what_was_asked_for(llm: LLM, way: str, seed: int) -> None:
    wanted = StructuredOutputsParams(**WAYS[way])
    params = [
        SamplingParams(n=2, max_tokens=200, temperature=temperature, seed=seed, structured_outputs=wanted)
        for temperature in (0.0, 1.0, 2.0)
    ]
    answers = llm.generate(["a", "a longer prompt", "?"], params, use_tqdm=False)
    for output in (output for answer in answers for output in answer.outputs):
        assert output.finish_reason == "stop", output
        assert fits(way, output.text), output.text
    assert llm.engine.holds_nothing


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"not": {"type": "integer"}}, "not"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "object", "propertyNames": {"format": "date"}}, "propertyNames"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-ahead"),
        ({"type": "string", "format": 3}, "format"),
        ({"type": "strin"}, "strin"),
        ({"$ref": "http://example.org/schema"}, "http://example.org/schema"),
    ],
)
def test_a_schema_that_cannot_be_honoured_is_refused_by_its_keyword(llm: LLM, schema: Any, word: str) -> None:
    params = SamplingParams(structured_outputs={"json": schema})
    with pytest.raises(RequestError, match=re.escape(word)) as refusal:
        llm.generate(["x"], params, use_tqdm=False)
    assert refusal.value.param == "structured_outputs" and "\n" not in str(refusal.value)
    assert llm.engine.holds_nothing


def test_a_prompt_that_ends_inside_a_character_puts_nothing_before_a_form(llm: LLM) -> None:
    """By ids, a prompt may end anywhere. What it left open is not the answer's."""
    params = SamplingParams(max_tokens=20, temperature=0.0, structured_outputs={"choice": ["yes", "no"]})
    for cut in (1, 2, 3):
        prompt = {"prompt_token_ids": [*b"Say: ", *"😀".encode()[:cut]]}
        assert llm.generate([prompt], params)[0].outputs[0].text in ("yes", "no")


def test_an_id_beside_a_reference_is_refused_by_name_where_drafts_disagree_about_it(llm: LLM) -> None:
    both = {"$id": "http://localhost/sibling/", "$ref": "#/$defs/word"}
    schema = {"type": "object", "properties": {"a": both}, "$defs": {"word": {"type": "string"}}}
    with pytest.raises(RequestError, match=r"\$id beside \$ref"):
        llm.engine.grammars.compile(StructuredOutputsParams(json=schema))
    word = {"type": "string"}
    for other in ({**both, "$defs": schema["$defs"]}, {"type": "object", "properties": {"$id": word, "$ref": word}}):
        llm.engine.grammars.compile(StructuredOutputsParams(json=other))


@pytest.mark.parametrize(
    "kwargs",
    [
        {"choice": ["a<|im_end|>b"]},
        {"regex": r"a<\|im_end\|>b"},
        {"grammar": 'start: "a<|im_end|>b"'},
        {"json": {"const": "a<|im_start|>b"}},
        {"choice": ["<|endoftext|>"]},
    ],
    ids=str,
)
def test_text_with_the_name_of_a_special_token_is_written_as_text(llm: LLM, kwargs: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=40, temperature=0.0, structured_outputs=StructuredOutputsParams(**kwargs))
    (output,) = llm.generate(["x"], params)[0].outputs
    wanted = next(mark for mark in ("a<|im_end|>b", "a<|im_start|>b", "<|endoftext|>") if mark in output.text)
    assert output.text in (wanted, f'"{wanted}"') and output.finish_reason == "stop"


@pytest.mark.parametrize(
    ("pattern", "characters"),
    [
        (r"^[^/\\]{3}$", "/\\"),
        (r"^[\x00-\x1fb]$", "\\"),
        ("^[^!-~]$", "\\!"),
        (r"^[\x00-\x1f\x7fab]$", "\\"),
        (r"^(\p{Cc}|b)$", "\\"),
    ],
    ids=str,
)
def test_a_backslash_is_no_control_character(llm: LLM, pattern: str, characters: str) -> None:
    likely = {llm.tokenizer.encode(text)[0]: 50.0 for text in ("\\", "\\\\", "\\/")}
    wanted = StructuredOutputsParams(json={"type": "string", "pattern": pattern})
    params = SamplingParams(n=8, max_tokens=12, temperature=1.5, seed=1, logit_bias=likely, structured_outputs=wanted)
    found = [json.loads(each.text) for each in llm.generate(["x"], params)[0].outputs if each.finish_reason == "stop"]
    assert found and not any(char in text for text in found for char in characters), found


def test_classes_of_a_pattern_lose_one_character_and_the_rest_stays(llm: LLM) -> None:
    for pattern in ("^.$", "^[^a]$", r"^[\x00-\x1f]$", r"^\P{L}$", r"^[\0\t]$", r"^\W$"):
        schema = {"type": "string", "pattern": pattern}
        assert allows(llm, schema, '"\\t"') and not allows(llm, schema, '"\\u0000"')
    assert allows(llm, {"type": "string", "pattern": r"^[\0]$"}, '"\\u0000"')


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"const": 2**53 + 1}, "const"),
        ({"enum": ["a", {"b": [-(2**60)]}]}, "enum"),
        ({"type": "integer", "minimum": 2**60}, "minimum"),
        ({"type": "number", "maximum": 123.00999089094903}, "maximum"),
        ({"type": "number", "exclusiveMinimum": 1 / 3}, "exclusiveMinimum"),
        ({"type": "object", "minProperties": 2}, "minProperties"),
        ({"type": "object", "patternProperties": {"^(a|b)$": {}}, "additionalProperties": False, "minProperties": 2},
         "minProperties"),
    ],
    ids=str,
)  # fmt: skip
def test_what_the_library_would_not_hold_to_is_refused_by_name(llm: LLM, schema: dict[str, Any], word: str) -> None:
    inner = {"type": "array", "items": schema}
    for each in (schema, inner):
        with pytest.raises(RequestError, match=f"cannot be honoured: {word}: "):
            llm.engine.grammars.compile(StructuredOutputsParams(json=each))


def test_bounds_are_those_of_decimals(llm: LLM) -> None:
    """Also those that are not reached, of which the next double is no bound: 0.99999999999999999 is below 1."""
    for schema, good, bad in (
        ({"type": "number", "exclusiveMinimum": 0}, ["0.5", "5"], ["0", "-1", "0.0"]),
        ({"type": "number", "minimum": 0, "exclusiveMaximum": 1}, ["0", "0.0", "0.99999999999999999"], ["1", "1.0"]),
        ({"type": "number", "exclusiveMaximum": 0.1}, ["0.09", "-7"], ["0.1", "0.10", "1"]),
        ({"type": "integer", "minimum": 99, "exclusiveMaximum": 101}, ["99", "100"], ["98", "101"]),
        ({"type": "integer", "exclusiveMinimum": 3, "minimum": 5}, ["5"], ["3", "4"]),
        ({"type": "integer", "exclusiveMinimum": -1}, ["0", "7"], ["-1"]),
    ):
        assert all(allows(llm, schema, text) for text in good), schema
        assert not any(allows(llm, schema, text) for text in bad), schema
    with pytest.raises(RequestError, match="exclusiveMaximum"):
        llm.engine.grammars.compile(
            StructuredOutputsParams(json={"minimum": 7, "exclusiveMaximum": 7, "type": "integer"})
        )


def test_bounds_that_are_not_reached_hold_for_all_numbers(llm: LLM, seed: int) -> None:
    """A number inside can be written. With some bounds llguidance allows one of its forms alone: of -0.1 and -0.10 the
    first one below 0.15, of 1.5 and 1.50 the second one below 1.51.
    """
    draw = random.Random(seed)
    for _ in range(tries(60)):
        bound = draw.choice([draw.randrange(-200, 1001), draw.randrange(-300, 301) / 100])
        word, side = draw.choice([("exclusiveMinimum", 1), ("exclusiveMaximum", -1)])
        kind = draw.choice(["number", "integer"]) if isinstance(bound, int) else "number"
        schema = {"type": kind, word: bound}
        step = 1 if kind == "integer" else draw.choice([1, 0.25, 0.01])
        inside, outside = (
            Decimal(str(bound)) + side * Decimal(str(step)),
            Decimal(str(bound)) - side * Decimal(str(step)),
        )
        forms = {str(inside), f"{inside.normalize():f}"}
        assert any(allows(llm, schema, form) for form in forms), (schema, inside)
        assert not allows(llm, schema, str(bound)) and not allows(llm, schema, str(outside)), (schema, outside)


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"properties": {"a": {"items": {"uniqueItems": True}}}}, "uniqueItems: not supported (at properties.a.items)"),
        ({"items": {"oneOf": [{"type": "number"}, {"type": "integer"}]}}, "oneOf: a text could have two of its"),
        ({"items": {"oneOf": [{"type": "number"}, {"type": "integer"}]}}, "of its own (at items)"),
        ({"type": "string", "pattern": r"(?=\d)[a.]"}, r"not supported, in (?=\d)[a.]"),
        ({"items": {"type": "string", "pattern": "(a"}, "prefixItems": [{"type": "string", "pattern": "b"}]},
         "pattern: unclosed group, in (a (at items)"),
        ({"type": "object", "patternProperties": {"[b-a]": True}}, "patternProperties: invalid character class range"),
        ({"$ref": "#/$defs/a"}, "$ref: Pointer '/$defs/a' does not exist"),
        ({"$ref": "http://x/y"}, "$ref: http://x/y is not known, and nothing is fetched"),
        ({"$schema": "http://x/z", "type": "string"}, "$schema: http://x/z is not known, and nothing is fetched"),
        ({"items": {"const": 2**60}}, "const: integers beyond 2^53 are rounded (at items)"),
        ({"type": "integer", "minimum": 1e20, "maximum": 2e20}, "maximum: integers beyond 2^53 are rounded"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)  # fmt: skip
def test_a_refusal_says_what_is_wrong_and_where(llm: LLM, schema: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=re.escape(said)):
        llm.engine.grammars.compile(StructuredOutputsParams(json=schema))


def test_refusals_have_nothing_of_how_forms_are_written_for_the_library(llm: LLM) -> None:
    nested: dict[str, Any] = {}
    for _ in range(90):
        nested = {"type": "object", "properties": {"a": nested}}
    for wanted, reason in (
        ({"json": nested}, "it is nested too deep for llguidance, which takes some 60 objects in one another"),
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": "a\n(?=b)"}, "look-around, including look-ahead and look-behind, is not supported"),
        ({"grammar": "root ::= " + "(" * 500 + '"a"' + ")" * 500}, "it is nested too deep"),
        ({"grammar": "start: <|im_end|>"}, 'at 1(8): unknown special token: "<|im_end|>"'),
    ):
        with pytest.raises(RequestError, match=f"cannot be honoured: {re.escape(reason)}$"):
            llm.engine.grammars.compile(StructuredOutputsParams(**wanted))


def test_a_listed_name_cannot_come_as_another_one(llm: LLM) -> None:
    """By an escape: who reads the JSON has the name twice then."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string"}, "é\n": {"const": 1}},
        "patternProperties": {"^x": {}},
    }
    for text, is_right in (
        ('{"a": "x", "b": 3}', True), ('{"a": "x", "\\u0061": 3}', False), ('{"\\u00e9\\n": 2}', False),
        ('{"b\\n": 2}', True), ('{"\\u0078": 2}', False), ('{"é\\u000a": 2}', False), ('{"a\\/": 2}', False),
    ):  # fmt: skip
        assert allows(llm, schema, text) == is_right, text


@pytest.mark.parametrize("text", ["a\x01b", "\x7f", "\x1f\n"])
def test_control_characters_can_be_asked_for(llm: LLM, text: str) -> None:
    escaped = "".join(f"\\x{ord(each):02x}" for each in text)
    for schema in (
        {"const": text}, {"enum": [[text]]}, {"type": "string", "pattern": f"^{text}$"},
        {"type": "string", "pattern": f"^{escaped}$"},
    ):  # fmt: skip
        assert allows(llm, schema, json.dumps([text] if "enum" in schema else text)), schema
    named = {"properties": {text: {"const": 1}}, "type": "object", "additionalProperties": False}
    assert allows(llm, named, json.dumps({text: 1}, ensure_ascii=False))


def test_a_count_may_be_written_with_a_point(llm: LLM) -> None:
    """To JSON Schema 2.0 is an integer."""
    for word, good, bad in (("minItems", [1, 1], [1]), ("maxItems", [1, 1], [1, 1, 1]), ("minLength", "ab", "a"),
                            ("maxLength", "ab", "abc")):  # fmt: skip
        schema = {"type": "array" if "Items" in word else "string", word: 2.0}
        assert allows(llm, schema, json.dumps(good)) and not allows(llm, schema, json.dumps(bad))
    for word in ("minProperties", "maxProperties"):
        llm.engine.grammars.compile(StructuredOutputsParams(json={"type": "object", word: 1.0}))
    with pytest.raises(RequestError, match="maxItems"):
        llm.engine.grammars.compile(StructuredOutputsParams(json={"type": "array", "maxItems": 2.5}))


def allows(llm: LLM, schema: dict[str, Any], text: str) -> bool:
    matcher = llm.engine.grammars.compile(StructuredOutputsParams(json=schema)).begin()
    ids = llm.tokenizer.encode(text)
    return matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()


def test_a_process_does_not_end_while_a_vocabulary_is_loaded() -> None:
    """The interpreter would end the thread within llguidance's code, and the process would abort after its output."""
    code = """if True:
        import time
        from quire.structured.grammar_compiler import GrammarCompiler
        class Slow(GrammarCompiler):
            def __init__(self):
                pass
            def _load(self):
                time.sleep(0.5)
                print("loaded")
        Slow().warm()
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr, done.returncode) == ("loaded\n", "", 0)


def test_properties_that_cannot_repeat_are_counted(llm: LLM) -> None:
    word = {"type": "string"}
    for schema in (
        {"type": "object", "minProperties": 1},
        {"type": "object", "properties": {"a": word, "b": word}, "required": ["a", "b"], "minProperties": 2},
    ):
        llm.engine.grammars.compile(StructuredOutputsParams(json=schema))


class Cat(pydantic.BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int


class Dog(pydantic.BaseModel):
    kind: Literal["dog", "puppy"] = "dog"
    friend: Pet | None = None


Pet = Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]


class Home(pydantic.BaseModel):
    pets: list[Pet]


def test_the_property_that_tells_alternatives_apart_is_required(llm: LLM) -> None:
    """Though pydantic does not require it where it has a default."""
    schema = Home.model_json_schema()
    before = json.dumps(schema)
    assert '"oneOf"' in before and '["lives"]' in before
    for text, is_right in (
        ('{"pets": [{"kind": "cat", "lives": 9}, {"kind": "puppy", "friend": {"kind": "cat", "lives": 1}}]}', True),
        ('{"pets": [{"lives": 9}]}', False),
        ('{"pets": [{"kind": "dog", "friend": {"lives": 9}}]}', False),
    ):
        Home.model_validate_json(text) if is_right else None
        assert allows(llm, schema, text) == is_right
    assert json.dumps(schema) == before
    inline = {"oneOf": [{"properties": {"a/b": {"const": f"n{number}"}}, "type": "object"} for number in range(3)]}
    with pytest.raises(RequestError, match="oneOf"):
        llm.engine.grammars.compile(StructuredOutputsParams(json=inline))
    inline["discriminator"] = {"propertyName": "a/b"}  # type: ignore[assignment]
    assert allows(llm, inline, '{"a/b": "n2"}') and not allows(llm, inline, "{}")
    named = {
        "$defs": {f"a/{number}~": each for number, each in enumerate(inline["oneOf"])},
        "discriminator": {"propertyName": "a/b"},
        "oneOf": [{"$ref": f"#/$defs/a~1{number}~0"} for number in range(3)],
    }
    assert allows(llm, named, '{"a/b": "n2"}') and not allows(llm, named, "{}")


@pytest.mark.parametrize(
    "discriminator", [{}, {"propertyName": ["a"]}, {"propertyName": "b"}, {"propertyName": "a"}], ids=str
)
def test_a_discriminator_that_tells_nothing_apart_helps_nothing(llm: LLM, discriminator: Any) -> None:
    each = {"type": "object", "properties": {"a": {"const": "x"}}}
    for alternative in (
        each, {"$ref": "#/$defs/none"}, {"$ref": "#"}, {"$ref": 3}, True, {**each, "required": 3},
        {"properties": {"a": {"const": "y"}}}, {"type": "object", "properties": {"a": {"const": 1}}},
        {"type": "object", "properties": {"a": {"enum": ["y", "x"]}}}, {"type": "object", "properties": {"a": True}},
    ):  # fmt: skip
        schema = {"oneOf": [alternative, each], "discriminator": discriminator}
        with pytest.raises(RequestError, match="cannot be honoured"):
            llm.engine.grammars.compile(StructuredOutputsParams(json=schema))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "one of json, json_object, regex, choice, grammar must be given, not none"),
        ({"json": {}, "regex": "a"}, "not json and regex"),
        ({"json": "{"}, "the schema is not JSON"),
        ({"json": 3}, "json must be a schema"),
        ({"json_object": False}, "json_object must be true"),
        ({"regex": ""}, "regex must be a text that is not empty"),
        ({"regex": "a" * 300_000}, "300,000 characters"),
        ({"choice": []}, "choice has 0 texts"),
        ({"choice": "abc"}, "choice must be a list of texts"),
        ({"choice": ["a", ""]}, "not empty, and one is ''"),
        ({"json": {}, "yaml": 1}, "'yaml' is not known"),
    ],
)
def test_what_is_no_request_for_a_structure_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=re.escape(said)):
        StructuredOutputsParams.from_options(given)


def test_a_guide_follows_any_tokens_that_there_are(seed: int) -> None:
    """Also if a step that it proposed tokens for did not happen, and if it begins in the middle."""
    draw = random.Random(seed)
    tokenizer = load_tokenizer(resolve_model("smollm2"))
    grammars = GrammarCompiler(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)
    for way in WAYS:
        wanted = StructuredOutputsParams(**WAYS[way])
        prompt = tokenizer.encode("some words")
        tokens, guide = list(prompt), grammars.guide(grammars.compile(wanted), len(prompt))
        guide.propose(list(tokens), 9)  # of a step that was not taken, whatever is drawn below
        while tokens[-1] not in tokenizer.eos_ids:
            most = draw.choice([0, 0, 1, 3, 9])
            if not draw.randrange(3):
                guide.propose(list(tokens), draw.choice([0, 2, 9]))  # a step that was not taken
            if not draw.randrange(4):
                guide = grammars.guide(grammars.compile(wanted), len(prompt))  # another engine goes on
            drafts, masks = guide.propose(list(tokens), most)
            assert len(drafts) <= most and len(masks) == len(drafts) + 1
            for draft, mask in zip(drafts, masks, strict=False):
                assert members(mask) == [draft]
            taken = draw.randrange(len(drafts) + 1) if not draw.randrange(5) else len(drafts)
            tokens += drafts[:taken]
            tokens.append(drafts[taken] if taken < len(drafts) else draw.choice(members(masks[-1])))
            assert len(tokens) < 400
        assert fits(way, tokenizer.decode(tokens[len(prompt) :])), way


ASCII = dict.fromkeys((*range(10), *range(127, BYTE_VOCAB)), -100.0)
"""Biases that leave characters: bytes alone may be none."""


@combine(cache=list(CACHES), share=[True, False])
def test_a_grammar_that_allows_everything_changes_no_text(cache: str, share: bool, seed: int) -> None:
    draw = random.Random(seed)
    shared = draw.choices(range(BYTE_VOCAB), k=130)
    prompts = [shared + draw.choices(range(BYTE_VOCAB), k=length) for length in (3, 40, 90)]
    free = SamplingParams(max_tokens=80, temperature=0.0, logit_bias=ASCII)
    held = replace(free, structured_outputs={"regex": r"(.|\n)*"})
    options = {"cache.share": share} | CACHES[cache]
    expected = generate(make_engine(SHAPE, **options), prompts, free)
    engine = make_engine(SHAPE, **options)
    assert generate(engine, prompts, held) == expected and engine.holds_nothing


def test_answers_of_preempted_sequences_fit_and_are_the_same(seed: int) -> None:
    items = {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{8,12}$"}, "minItems": 12}
    params = SamplingParams(
        max_tokens=300, temperature=1.0, seed=seed, structured_outputs={"json": items | {"maxItems": 14}}
    )
    prompts = [[number] * (60 + number) for number in range(1, 5)]
    answers = generate(make_engine(), prompts, params)
    tight = make_engine(chunks=12)
    assert generate(tight, prompts, params) == answers
    assert tight.stats()["preemptions"] > 0
    for answer in answers:
        found = json.loads(bytes(token for token in answer if token < 256))
        assert 12 <= len(found) <= 14 and all(8 <= len(each) <= 12 for each in found)


def test_answers_of_swapped_sequences_fit_and_are_the_same(seed: int) -> None:
    """A swapped sequence comes back with its tokens, of which some were forced."""
    items = {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{8,12}$"}, "minItems": 9, "maxItems": 9}
    params = SamplingParams(max_tokens=300, temperature=1.0, seed=seed, structured_outputs={"json": items})
    prompt = [7] * 90
    (expected,) = generate(make_engine(), [prompt], params)
    engine = put_store(make_engine(), ToyStore(seed, delay=0.0))
    (sequence,) = engine.add("0", prompt, params).sequences
    collected: dict[str, Any] = {}
    num_swaps = 0
    while engine.has_work:
        for delta in engine.step():
            merge_delta(collected, delta)
        is_due = sequence.num_generated > 20 * (num_swaps + 1) and sequence.path.transfer is None
        if is_due and sequence in engine.scheduler.running:
            engine.scheduler.preempt(sequence)
            num_swaps += 1
            assert sequence.swapped is not None
    assert num_swaps >= 3
    counts = engine.scheduler.manager.fetching.counts
    assert counts.swapped_in == counts.swapped_out > 0
    found = collected["0"].outputs[0].token_ids
    assert found == expected and len(json.loads(bytes(token for token in found if token < 256))) == 9
    assert engine.holds_nothing


@pytest.mark.parametrize("way", WAYS)
def test_reasoning_may_stand_before_a_form(llm: LLM, way: str) -> None:
    tokenizer, grammars = llm.tokenizer, llm.engine.grammars
    (good,), bad = [text for text in EXAMPLES[way] if fits(way, text)], "nonsense"
    for marks, before, is_right in (
        (("", "</think>"), "Hm, 1 < 2.\n</think>\n\n", True),
        (("", "</think>"), "", False),
        (("<think>", "</think>"), "<think>Hm.</think>", True),
        (("<think>", "</think>"), "", True),
        (("<think>", "</think>"), "Hm.</think>", False),
    ):
        wanted = StructuredOutputsParams(**WAYS[way], reasoning=marks)
        for text, is_form in ((good, True), (bad, False)):
            matcher = grammars.compile(wanted).begin()
            ids = tokenizer.encode(before + text, add_special=False)
            taken = matcher.try_consume_tokens(ids)
            found = taken == len(ids) and matcher.is_accepting()
            assert found == (is_right and is_form), (marks, before, text)


@pytest.mark.parametrize("name", ["min_tokens", "ignore_eos"])
def test_what_moves_the_end_cannot_be_kept_with_a_form(name: str) -> None:
    with pytest.raises(RequestError, match=f"{name} cannot be kept"):
        replace(SamplingParams(structured_outputs={"regex": "a"}), **{name: 3 if name == "min_tokens" else True})


@pytest.mark.parametrize(
    "grammar",
    ["hello", "root ::= x", "root ::= " + "(" * 500, "start: (", "%llguidance {", "root ::= " + "a " * 5000,
     "\n" * 262144, "#\n" * 131072, "\n".join(f"r{n} ::= r{n + 1}" for n in range(30_000))],
    ids=lambda text: text[:12],
)  # fmt: skip
def test_any_text_is_a_grammar_or_refused_at_once(llm: LLM, grammar: str) -> None:
    begun = time.process_time()
    with pytest.raises(RequestError):
        llm.generate(["x"], SamplingParams(structured_outputs={"grammar": grammar}), use_tqdm=False)
    assert time.process_time() - begun < 2 and llm.engine.holds_nothing


def test_a_form_that_cannot_be_is_refused_before_anything_runs(llm: LLM) -> None:
    before = llm.stats()["steps"]
    bad = SamplingParams(structured_outputs={"json": {"uniqueItems": True}})
    with pytest.raises(RequestError, match="uniqueItems"):
        llm.generate(["a"] * 3, [SamplingParams(max_tokens=2), SamplingParams(max_tokens=2), bad], use_tqdm=False)
    assert llm.stats()["steps"] == before


def test_ends_outside_the_vocabulary_are_left_out() -> None:
    tokenizer = load_tokenizer(resolve_model("smollm2"))
    grammars = GrammarCompiler(tokenizer, tokenizer.vocab_size, (-1, tokenizer.vocab_size, tokenizer.eos_ids[0]))
    assert members(grammars.ends) == [tokenizer.eos_ids[0]]
    with pytest.raises(RequestError, match="no token ends an answer"):
        GrammarCompiler(tokenizer, tokenizer.vocab_size, ()).compile(StructuredOutputsParams(regex="a"))


def test_long_forced_texts_are_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer(resolve_model("smollm2"))
    grammars = GrammarCompiler(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)
    wanted = StructuredOutputsParams(choice=["word " * 400 + "end"])
    guide, tokens = grammars.guide(grammars.compile(wanted), 0), list[int]()
    for _ in range(200):
        drafts, masks = guide.propose(list(tokens), 8)
        tokens += [*drafts, members(masks[-1])[0]]
        if tokens[-1] in tokenizer.eos_ids:
            break
    assert tokenizer.decode(tokens) == "word " * 400 + "end"


ODD = [
    "a b", "a/b", "x\ny", "\t", "é", "\x7f", "\\", "a|b", "(c)", "#", "&~-", '"q"', "'", "\x01", "\r\n", "a", "ab",
    "^$", "{1}", "\u2028", "\U0001f600", "[a-z]", "a.b*?",
]  # fmt: skip


@pytest.mark.parametrize("choices", [ODD, [f"choice number {number}" for number in range(4096)]], ids=["odd", "many"])
def test_an_answer_is_one_of_the_choices(choices: list[str]) -> None:
    tokenizer = load_tokenizer(resolve_model("smollm2"))
    grammars = GrammarCompiler(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)
    compiled, draw = grammars.compile(StructuredOutputsParams(choice=choices)), random.Random(0)
    for choice in [*choices[:30], *choices[-3:]]:
        assert compiled.begin().validate_tokens(ids := tokenizer.encode(choice)) == len(ids), choice
    for _ in range(40):
        guide, tokens = grammars.guide(compiled, 0), list[int]()
        while not tokens or tokens[-1] not in tokenizer.eos_ids:
            _, masks = guide.propose(tokens, 0)
            tokens.append(draw.choice(members(masks[0])))
        assert tokenizer.decode(tokens[:-1]) in choices


def count_trials(grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The forms that are tried from now on."""
    tried: list[str] = []
    before = grammars._try

    def counted(wanted: StructuredOutputsParams, seconds: float) -> int | None:
        tried.append(wanted.text)
        return before(wanted, seconds)

    monkeypatch.setattr(grammars, "_try", counted)
    return tried


def make_grammars() -> GrammarCompiler:
    tokenizer = load_tokenizer(resolve_model("smollm2"))
    return GrammarCompiler(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)


def conjunction(count: int) -> dict[str, Any]:
    """A text with many letters in any order: the automaton has 2 ^ count states."""
    return {"allOf": [{"type": "string", "pattern": f".*{chr(97 + number)}.*"} for number in range(count)]}


def test_a_bomb_is_refused_within_a_second_and_remembered() -> None:
    """In time of a processor; other processes may have the rest of it."""
    tokenizer = load_tokenizer(resolve_model("smollm2"))
    grammars = GrammarCompiler(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)
    assert grammars.prepare(StructuredOutputsParams(**WAYS["json"])).result() is not None
    for count in (18, 26):
        wanted = StructuredOutputsParams(json=conjunction(count))
        before = children_seconds()
        with pytest.raises(RequestError, match=r"more than 0\.4 s of processor time") as refusal:
            grammars.prepare(wanted).result()
        assert refusal.value.param == "structured_outputs"
        assert children_seconds() - before < 1
        again = grammars.prepare(wanted)
        assert again.done() and again.exception() is not None, "it is tried again"
    # The process that tries has not ended, and what is not too large is compiled as before.
    pid = grammars_module._PROBE._process.pid
    assert grammars.prepare(StructuredOutputsParams(**WAYS["lark"])).result() is not None
    assert grammars_module._PROBE._process.pid == pid


def test_bombs_make_way_for_what_has_not_been_tried() -> None:
    tokenizer = load_tokenizer(resolve_model("smollm2"))
    grammars = GrammarCompiler(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)
    assert grammars.prepare(StructuredOutputsParams(**WAYS["json"])).result() is not None
    ended: list[str] = []

    def asked(name: str, wanted: StructuredOutputsParams) -> Future[Any]:
        found = grammars.prepare(wanted)
        found.add_done_callback(lambda _: ended.append(name))
        return found

    waiting = [asked(f"bomb {count}", StructuredOutputsParams(json=conjunction(count))) for count in (18, 19, 20, 21)]
    assert waiting[2].cancel(), "nobody waits for it any more"
    waiting.append(asked("usual", StructuredOutputsParams(**WAYS["regex"])))
    errors = [each.exception() for each in waiting if not each.cancelled()]
    assert [type(each) for each in errors] == [RequestError] * 3 + [type(None)]
    assert ended == ["bomb 20", "usual", "bomb 18", "bomb 19", "bomb 21"]
    assert not grammars._waiting and not any(grammars._todo.values())


def test_tenants_take_turns_however_many_grammars_one_has(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars, held = make_grammars(), threading.Event()
    monkeypatch.setattr(grammars, "_try", lambda wanted, seconds: held.wait(30) and 0)
    ended: list[str] = []

    def ask(tenant: str, number: int) -> Future[Any]:
        found = grammars.prepare(StructuredOutputsParams(json={"const": number}), f"{tenant}/")
        found.add_done_callback(lambda _: ended.append(f"{tenant}{number}"))
        return found

    waiting = [ask("a", number) for number in range(5)]
    while len(grammars._todo[grammars_module.FIRST_SECONDS].get("a", ())) != 4:  # the thread has taken the first one
        time.sleep(0.001)
    waiting += [ask(tenant, number) for tenant in "bc" for number in range(2)]
    held.set()
    assert all(each.result() is not None for each in waiting)
    assert ended == ["a0", "a1", "b0", "c0", "a2", "b1", "c1", "a3", "a4"]
    assert not any(grammars._todo.values()) and not grammars._waiting


def test_what_takes_long_of_others_holds_up_nothing_that_has_not_been_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars, held, tried = make_grammars(), threading.Event(), list[str]()

    def trial(wanted: StructuredOutputsParams, seconds: float) -> int | None:
        held.wait(30)
        tried.append(wanted.text)
        return None if wanted.kind == "regex" and seconds < grammars_module.MAX_SECONDS else 0

    monkeypatch.setattr(grammars, "_try", trial)
    waiting = [grammars.prepare(StructuredOutputsParams(regex=f"a{number}"), f"s{number}") for number in range(4)]
    waiting.append(grammars.prepare(StructuredOutputsParams(json={"const": 1}), "other"))
    held.set()
    assert all(each.result() is not None for each in waiting)
    assert [text[0] for text in tried[:5]] == ["a", "a", "a", "a", "{"] and len(tried) == 9


def test_a_hundred_new_grammars_at_once_are_compiled_and_equal_ones_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer(resolve_model("smollm2"))
    grammars = GrammarCompiler(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)
    tried = count_trials(grammars, monkeypatch)
    wanted = [StructuredOutputsParams(json={"const": f"number {number % 50}"}) for number in range(100)]
    wanted += [StructuredOutputsParams(json={"contains": {"const": 1}})] * 3
    found = [grammars.prepare(each) for each in wanted]
    assert all(each.result() is not None for each in found[:100])
    assert all("contains" in str(each.exception()) for each in found[100:])
    assert len(tried) == len({*tried}) == 51
    assert not grammars._waiting


def children_seconds() -> float:
    """Processor time of the process that tries, and of its trials that have ended."""
    process = grammars_module._PROBE._process
    assert process is not None
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def test_a_trial_that_takes_too_much_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars_module, "_PROBE", ChildProcess(grammar_trial.__name__, (8 << 20,)))
    tokenizer = load_tokenizer(resolve_model("smollm2"))
    grammars = GrammarCompiler(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)
    large = StructuredOutputsParams(json={"enum": [{"a": number, "b": "x" * 20} for number in range(2000)]})
    with pytest.raises(RequestError, match="MiB of memory"):
        grammars.prepare(large).result()
    assert grammars.prepare(StructuredOutputsParams(**WAYS["json"])).result() is not None


@pytest.mark.slow
def test_a_process_of_trials_that_was_killed_is_replaced() -> None:
    tokenizer = load_tokenizer(resolve_model("smollm2"))
    grammars = GrammarCompiler(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)
    for way in ("json", "regex"):
        assert grammars.prepare(StructuredOutputsParams(**WAYS[way])).result() is not None
        grammars_module._PROBE._process.kill()
        grammars_module._PROBE._process.wait()


def test_a_trial_without_an_answer_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer(resolve_model("smollm2"))
    grammars = GrammarCompiler(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)
    wanted = StructuredOutputsParams(**WAYS["json"])
    for kind in (child.TIMED_OUT, child.DIED):
        with monkeypatch.context() as patch:
            patch.setattr(grammars_module._PROBE, "ask", lambda request, whole, kind=kind: (kind, ""))
            with pytest.raises(QueueFullError, match="try again later"):
                grammars.prepare(wanted).result()
    assert grammars.prepare(wanted).result() is not None


def test_a_grammar_is_kept_while_it_is_held_and_then_freed() -> None:
    grammars = make_grammars()
    wanted = StructuredOutputsParams(regex="abc")
    held = grammars.prepare(wanted).result()
    assert grammars.compile(wanted) is held and grammars.prepare(wanted).result() is held
    del held
    assert not grammars._live and len(grammars._tried) == 1
    assert grammars.prepare(wanted).result() is not None, "and compiled again, without a trial"


def test_grammars_that_are_held_leave_no_memory_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars_module, "MAX_SECONDS", 10.0)  # a slow machine is not what it asks for
    grammars = make_grammars()
    held = grammars.prepare(
        StructuredOutputsParams(json={"enum": [{"a": n, "b": "x" * 20} for n in range(2000)]})
    ).result()
    assert held.num_bytes > 1 << 20
    monkeypatch.setattr(grammars_module, "MAX_BYTES", 2 * held.num_bytes + (64 << 10))
    other = StructuredOutputsParams(json={"enum": [{"a": n, "b": "y" * 20} for n in range(400)]})
    with pytest.raises(QueueFullError, match="leave no memory"):
        grammars.prepare(other).result()
    del held
    assert grammars.prepare(other).result() is not None


def test_what_one_scope_has_used_another_tries_and_compiles_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what was refused: a time tells nobody what others have asked for."""
    grammars = make_grammars()
    tried = count_trials(grammars, monkeypatch)
    good, bad = StructuredOutputsParams(**WAYS["json"]), StructuredOutputsParams(json={"contains": {"const": 1}})
    held = [grammars.prepare(good, scope).result() for scope in ("one/", "one/", "two/")]
    assert held[0] is held[1] and held[1] is not held[2] and len(tried) == 2
    for scope in ("one/", "one/", "two/"):
        assert isinstance(grammars.prepare(bad, scope).exception(), RequestError)
    assert len(tried) == 4
