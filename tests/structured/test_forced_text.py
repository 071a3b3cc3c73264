"""What a grammar may force in one piece is bounded, and what may be too long is written token by token."""

from __future__ import annotations

import json
import random
import time
from math import inf
from typing import Any

import pytest

from quire.errors import RequestError
from quire.models.resolve import resolve_model
from quire.models.tokenizer import load_tokenizer
from quire.structured import schemas
from quire.structured.forced_text import MAX_FORCED_BYTES, regex_bytes, schema_bytes
from quire.structured.grammar_compiler import GrammarCompiler
from quire.structured.grammar_source import constraint_grammar
from quire.structured.params import StructuredOutputsParams

from ..effort import tries
from ..toy_guide import members

LONG = "a" * 20_000


@pytest.fixture(scope="module")
def grammars() -> GrammarCompiler:
    tokenizer = load_tokenizer(resolve_model("smollm2"))
    return GrammarCompiler(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)


@pytest.mark.parametrize(
    ("pattern", "least", "most"),
    [
        ("abc", 3, 100),
        ("[a-z]{3,7}-[0-9]{4}", 8, 500),
        (r"\{\}\[\]\(", 5, 200),
        ("(a|b)*", 1, 200),
        ("(a{1000}){1000}", 1_000_000, inf),
        ("((a{30}){30}){30}", 27_000, inf),
        ("a{20000,}", 20_000, inf),
        ("a{,20000}", 1, 100),
        ("(ab{2}){ 3 }", 9, 500),
        ("[]a{9}]", 1, 100),
        ("a)", inf, inf),
        ("(a", inf, inf),
        ("a{99999999999999999999}", 10**11, inf),
    ],
)
def test_an_expression_counts_what_it_repeats(pattern: str, least: float, most: float) -> None:
    assert least <= regex_bytes(pattern) <= most


def refs(count: int) -> dict[str, Any]:
    """2 ^ count strings, all required."""
    each = {f"a{n}": {"prefixItems": [{"$ref": f"#/$defs/a{n + 1}"}] * 2, "minItems": 2, "items": False,
                      "type": "array"} for n in range(count)}  # fmt: skip
    return {"$ref": "#/$defs/a0", "$defs": {**each, f"a{count}": {"const": "x"}}}


FORCING: dict[str, Any] = {
    "nested counts": {"regex": "((a{1000}){1000}){1000}"},
    "one behind a choice": {"regex": "x((a{1000}){1000}){1000}|y"},
    "a long choice": {"choice": ["a" * 250_000]},
    "a long constant": {"json": {"const": LONG}},
    "many items": {"json": {"type": "array", "items": {"const": "word"}, "minItems": 10**6}},
    "tuples of tuples": {"json": refs(40)},
    "a pattern": {"json": {"type": "string", "pattern": "^(ab){100000}$"}},
    "a count beside a pattern": {"json": {"type": "string", "pattern": "^a*$", "minLength": 10**6}},
    "a property of many items": {"json": {"type": "object", "properties": {
        "a": {"type": "array", "items": {"const": LONG[:5000]}, "minItems": 9}}}},
    "rules of rules": {
        "grammar": "\n".join([*(f"a{n}: a{n + 1} a{n + 1}" for n in range(40)), 'a40: "x"', "start: a0"])
    },
    "a counted rule": {"grammar": 'start: word{100000}\nword: "abc"'},
    "counts in GBNF": {"grammar": 'root ::= "abc"{100000}'},
    "a schema in a grammar": {"grammar": f'start: %json {json.dumps({"const": LONG})}'},
    "a suffix": {"grammar": 'start: b\nb[suffix=/((a{1000}){1000}){10}/]: /z/'},
    "a complement": {"grammar": "start: A\nA: /a*/ & ~/a{0,20000}/"},
    "a count in another schema": {
        "json": {"allOf": [{"type": "array", "items": {"const": "x" * 99}}, {"type": "array", "minItems": 1000}]}
    },
    "names in another schema": {"json": {"type": "object", "allOf": [
        {"additionalProperties": {"const": "x" * 999}}, {"required": [f"n{n}" for n in range(900)]}]}},
    "a count beside a reference": {"json": {"$ref": "#/$defs/a", "minItems": 50_000,
                                   "$defs": {"a": {"type": "array", "items": {"const": "x" * 99}}}}},
    "a count beside alternatives": {"json": {"type": "array", "items": {"const": "x" * 999},
                                    "anyOf": [{"minItems": 300}, {"minItems": 301}]}},
    "a tuple of anything": {"json": {"allOf": [
        {"items": {"const": "x" * 999}, "type": "array"}, {"prefixItems": [{}] * 400, "minItems": 400}]}},
    "properties of another schema": {"json": {"type": "object", "allOf": [
        {"additionalProperties": {"const": "x" * 99}},
        {"properties": {f"n{n}": {} for n in range(300)}, "required": [f"n{n}" for n in range(300)]}]}},
    "long numbers": {"json": {"type": "array", "items": {"type": "number", "minimum": 1e-300, "maximum": 1e-300},
                     "minItems": 500, "maxItems": 500}},
    "constants that are long numbers": {"json": {"const": [1e300] * 500}},
    "another resource": {"json": {"type": "object", "$defs": {"h": {"const": 1}}, "properties": {
        "p": {"$id": "http://x.y/z", "properties": {"q": {"$ref": "#/$defs/h"}}, "$defs": {"h": {"const": LONG}}}}}},
    "a count behind a question mark": {"regex": "a{400}?{400}"},
    "blanks that mean nothing": {"regex": "(?x)x(a{400}) {400}"},
}  # fmt: skip


def bound(given: dict[str, Any]) -> float:
    """Of the grammar that is made of it."""
    return constraint_grammar(StructuredOutputsParams(**given))[1]


@pytest.mark.parametrize("name", FORCING)
def test_what_may_force_much_forces_nothing(grammars: GrammarCompiler, name: str) -> None:
    assert bound(FORCING[name]) > MAX_FORCED_BYTES
    try:
        grammar = grammars.prepare(StructuredOutputsParams(**FORCING[name])).result()
    except Exception as refusal:
        assert "cannot be honoured" in str(refusal), refusal
        return
    guide, tokens, longest, draw = grammars.guide(grammar, 0), list[int](), 0.0, random.Random(0)
    for _ in range(12):
        begun = time.thread_time()
        proposal = guide.propose(tokens, 8)
        longest = max(longest, time.thread_time() - begun)
        assert not proposal.drafts
        tokens.append(draw.choice(members(proposal.allowed[-1])))
        if tokens[-1] in grammars._eos_token_ids:
            break
    assert longest < 0.1, "seconds that hold Python's lock"


USUAL: dict[str, Any] = {
    "a pet": {"json": {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12},
                       "kind": {"enum": ["cat", "dog"]}, "age": {"type": "integer"}}, "required": ["name", "kind"]}},
    "a hundred properties": {"json": {"type": "object", "required": [f"field_number_{n}" for n in range(100)],
                             "properties": {f"field_number_{n}": {"type": "string"} for n in range(100)}}},
    "a date": {"regex": r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}"},
    "a pattern": {"json": {"type": "string", "pattern": "^[a-z]{3}-\\d+.{2}$"}},
    "a described reference": {"json": {"properties": {"a": {"$ref": "#/$defs/a", "description": "one"}},
                              "$defs": {"a": {"type": "object", "properties": {"b": {"type": "string"}}}}}},
}  # fmt: skip


@pytest.mark.parametrize("name", USUAL)
def test_usual_forms_force_what_they_can(name: str) -> None:
    assert bound(USUAL[name]) <= MAX_FORCED_BYTES


def some_schema(draw: random.Random, depth: int) -> dict[str, Any]:
    """A schema of at most `depth` nested ones."""
    kinds = ["const", "enum", "string", "pattern", "integer", "boolean"]
    match draw.choice([*kinds, *(["object", "array", "tuple", "anyOf", "allOf", "beside"] if depth else [])]):
        case "const":
            return {"const": draw.choice(["x" * draw.randrange(30), draw.randrange(1000), None, {"a": [1, "é"]}])}
        case "enum":
            return {"enum": [draw.choice("abc") * draw.randrange(9) for _ in range(draw.randrange(1, 4))]}
        case "string":
            return {"type": "string", "maxLength": 4}
        case "pattern":
            return {
                "type": "string",
                "pattern": draw.choice(["^(ab){5}$", "^[xy]{3}z{8}$", "^a(bc){2,3}$", "^(p|pq)r{4}$"]),
            }
        case "boolean":
            return {"type": "boolean"}
        case "integer":
            low = draw.randrange(99)
            return {"type": "integer", "minimum": low, "maximum": low + draw.choice([0, 0, 9])}
        case "object":
            names = [f"p{n}" * draw.randrange(1, 4) for n in range(draw.randrange(4))]
            properties = {name: some_schema(draw, depth - 1) for name in names}
            required = [name for name in names if draw.randrange(3)]
            return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        case "array":
            least = draw.randrange(4)
            return {"type": "array", "items": some_schema(draw, depth - 1), "minItems": least, "maxItems": least + 1}
        case "tuple":
            items = [some_schema(draw, depth - 1) for _ in range(draw.randrange(1, 3))]
            return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
        case "allOf":
            return {"allOf": [some_schema(draw, depth - 1) for _ in range(2)]}
        case "beside":
            word, count = draw.choice(["minItems", "minProperties", "minLength"]), draw.randrange(3)
            return {**some_schema(draw, depth - 1), "anyOf": [some_schema(draw, depth - 1), {word: count}]}
        case "anyOf":
            return {"anyOf": [some_schema(draw, depth - 1) for _ in range(draw.randrange(1, 4))]}
        case kind:
            raise AssertionError(kind)


def test_nothing_forces_more_than_its_bound(grammars: GrammarCompiler, seed: int) -> None:
    draw, num_forced = random.Random(seed), 0
    for number in range(5 * tries(60)):
        if number >= tries(60) and num_forced > 10:
            break  # few schemas may force little
        schema = some_schema(draw, 3)
        try:
            most = schema_bytes(schemas.prepare_schema(schema))
            matcher = grammars.compile(StructuredOutputsParams(json=schema)).begin()
        except (RequestError, schemas.UnsupportedSchemaError):
            continue
        for _ in range(60):
            forced = len(matcher.compute_ff_bytes())
            num_forced = max(num_forced, forced)
            assert forced <= most, (schema, forced, most)
            if matcher.is_stopped():
                break
            words = matcher.compute_bitmask()
            allowed = [8 * at + bit for at, byte in enumerate(words) if byte for bit in range(8) if byte >> bit & 1]
            matcher.consume_token(draw.choice(allowed))
    assert num_forced > 10
