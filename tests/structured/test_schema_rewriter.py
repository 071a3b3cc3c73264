"""Rewritten schemas: the same values fit before and after, and answers fit the schema that was given."""

from __future__ import annotations

import contextlib
import json
import random
import time
import tracemalloc
from decimal import Decimal
from typing import Any

import jsonschema
import pytest

from quire.structured import schemas
from quire.structured.schema_rewriter import MAX_COPIED

from ..effort import whole
from ..schema_texts import allows, refusal, walked

VALUES: list[Any] = [
    None, True, False, 0, 1, 2, 1.5, -1, "", "a", "b", "abc", [], [1], [1, 1], ["a"], ["a", "b"], [True, False], [None],
    {}, {"a": 1}, {"a": "x"}, {"b": 1}, {"a": 1, "b": 2}, {"a": "x", "b": None}, {"c": True}, {"a": "a", "c": 1},
    {"abcd": 1}, {"a": {"a": 1}}, [[1], [2]],
]  # fmt: skip


REFUSED = (
    "if", "not", "contains", "propertyNames", "uniqueItems", "dependentRequired", "dependentSchemas",
    "unevaluatedProperties", "unevaluatedItems",
)  # fmt: skip
"""Keywords that llguidance refuses by name."""


def fits(schema: Any, value: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


def rewritten(schema: Any) -> Any:
    found = dict(schemas.prepare_schema(schema))  # type: ignore[arg-type]
    del found["x-guidance"]
    # The only expressions here are those of lengths, in Rust's syntax.
    return json.loads(json.dumps(found).replace(r"\\x{1}-\\x{10ffff}", r"\\s\\S"))


def some_schema(draw: random.Random, depth: int = 0) -> Any:
    """A schema of the keywords that are rewritten, and of those that they are rewritten to."""
    if depth > 2 or draw.random() < 0.1:
        return draw.choice(
            [True, False, {}, {"type": "string"}, {"type": "object"}, {"const": None}, {"required": ["a"]}]
        )

    def inner() -> Any:
        return some_schema(draw, depth + 1)

    def several() -> list[Any]:
        return [inner() for _ in range(draw.randrange(1, 4))]

    makers = {
        "type": lambda: draw.choice([*TYPES, ["string", "null"], ["object", "array"], ["number", "boolean"]]),
        "const": lambda: draw.choice(["a", None, True, 1]),
        "enum": lambda: draw.choice([["a", "b"], [None, False], [1, "a", True]]),
        "properties": lambda: {name: inner() for name in draw.sample(["a", "b", "c"], draw.randrange(3))},
        "required": lambda: draw.sample(["a", "b", "c"], draw.randrange(3)),
        "additionalProperties": inner,
        "propertyNames": lambda: draw.choice(
            [True, {}, {"type": "string"}, {"enum": ["a", "b", 3]}, {"const": "a"}, {"maxLength": 1}, False, inner(),
             {"anyOf": [{"const": "b"}, {"enum": ["c"]}]}, {"type": ["null", "string"], "minLength": 2}]),
        "minimum": lambda: draw.choice([0, 1]), "exclusiveMaximum": lambda: draw.choice([0, 2]),
        "maxLength": lambda: draw.randrange(3), "minLength": lambda: draw.randrange(3),
        "minItems": lambda: draw.randrange(3), "maxItems": lambda: draw.randrange(3),
        "uniqueItems": lambda: draw.random() < 0.7, "items": lambda: draw.choice([inner(), {"enum": ["a", "b"]}]),
        "prefixItems": several, "contains": lambda: draw.choice([True, False, {}, inner()]),
        "minContains": lambda: draw.randrange(3), "maxContains": lambda: draw.randrange(3),
        "allOf": several, "anyOf": several, "oneOf": several, "not": inner, "if": inner, "then": inner, "else": inner,
        "dependentRequired": lambda: {"a": draw.choice([[], ["b"], ["b", "c"]])},
        "dependentSchemas": lambda: {draw.choice("ab"): inner()},
        "unevaluatedProperties": inner, "unevaluatedItems": inner,
    }  # fmt: skip
    return {word: makers[word]() for word in draw.sample(list(makers), draw.randrange(1, 4))}


TYPES = ["null", "boolean", "string", "number", "array", "object"]


def test_the_same_values_fit_a_rewritten_schema(seed: int) -> None:
    """By an implementation that takes both."""
    draw = random.Random(seed)
    changed = 0
    for _ in range(300):
        schema = some_schema(draw)
        if isinstance(schema, bool):
            continue
        try:
            found = rewritten(schema)
        except schemas.UnsupportedSchemaError:
            continue
        if any(f'"{word}": ' in json.dumps(found) for word in REFUSED):
            continue
        changed += found != schema
        for value in draw.sample(VALUES, 12):
            assert fits(schema, value) == fits(found, value), (schema, found, value)
    assert changed > 40


RECORD = {"kind": {"enum": ["cat", "dog", "fish"]}, "lives": {"type": "integer"}, "legs": {"const": 4}}
ACCEPTED: dict[str, Any] = {
    "maps of Zod": {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "number"}},
    "listed names": {"type": "object", "propertyNames": {"type": "string", "enum": ["a", "b"]}, "required": ["a", "b"],
                     "additionalProperties": {"type": "number"}},
    "listed names and properties": {"propertyNames": {"anyOf": [{"const": "a"}, {"const": "b"}]},
                                    "properties": {"a": {"type": "null"}, "c": {}}, "type": "object"},
    "described names": {"type": "object", "propertyNames": {"type": "string", "pattern": "^[a-c]{2}$"},
                        "additionalProperties": {"type": "boolean"}},
    "short names": {"type": "object", "propertyNames": {"maxLength": 2, "minLength": 1}},
    "no names": {"type": "object", "propertyNames": False},
    "names by reference": {"type": "object", "propertyNames": {"$ref": "#/$defs/n"}, "$defs": {"n": {"enum": ["x"]}}},
    "nothing unevaluated": {"type": "object", "$ref": "#/$defs/base", "properties": {"b": {"type": "null"}},
                            "unevaluatedProperties": False, "$defs": {"base": {"properties": {"a": {"const": 1}}}}},
    "unevaluated items": {"type": "array", "prefixItems": [{"const": 1}], "unevaluatedItems": {"const": 2},
                          "maxItems": 4},
    "something in a list": {"type": "array", "contains": {}, "maxItems": 3, "items": {"type": "null"}},
    "two things in a list": {"type": "array", "contains": True, "minContains": 2, "maxContains": 3,
                             "items": {"type": "null"}},
    "any list but one with a thing in it": {"contains": False},
    "a dependent name": {"type": "object", "properties": {"b": {"const": 1}, "a": {"const": 2}, "c": {"const": 3}},
                         "dependentRequired": {"a": ["b"], "c": []}, "additionalProperties": False},
    "a dependent schema": {"type": "object", "properties": RECORD, "required": ["kind"], "additionalProperties": False,
                           "dependentSchemas": {"legs": {"properties": {"kind": {"enum": ["cat", "dog"]}}}}},
    "dependencies of draft 7": {"type": "object", "properties": RECORD, "additionalProperties": False,
                                "dependencies": {"legs": ["kind"], "lives": {"required": ["kind"]}, "kind": True}},
    "a condition": {"type": "object", "properties": RECORD, "required": ["kind"], "additionalProperties": False,
                    "if": {"properties": {"kind": {"const": "cat"}}, "required": ["kind"]},
                    "then": {"properties": {"lives": {"minimum": 1, "maximum": 9}}, "required": ["lives"]},
                    "else": {"properties": {"lives": {"const": 1}}}},
    "conditions in one another": {
        "type": "object", "properties": RECORD, "required": ["kind"], "additionalProperties": False,
        "if": {"properties": {"kind": {"const": "cat"}}}, "then": {"required": ["lives"]},
        "else": {"if": {"properties": {"kind": {"const": "fish"}}}, "then": {"properties": {"legs": False}},
                 "else": {"required": ["legs"]}}},
    "conditions side by side": {
        "type": "object", "properties": RECORD, "required": ["kind"], "additionalProperties": False,
        "allOf": [{"if": {"properties": {"kind": {"const": "cat"}}}, "then": {"required": ["lives"]}},
                  {"if": {"properties": {"kind": {"const": "dog"}}}, "then": {"required": ["legs"]}}]},
    "a condition on a number": {"type": "integer", "minimum": 0, "maximum": 40, "if": {"maximum": 9},
                                "then": {"multipleOf": 2}, "else": {"multipleOf": 5}},
    "another type": {"not": {"type": ["object", "array", "string", "number"]}},
    "another object": {"type": "object", "properties": {"a": {"type": ["string", "null"]}}, "required": ["a"],
                       "not": {"properties": {"a": {"type": "string"}}}, "additionalProperties": False},
    "a name that is not there": {"type": "object", "properties": {"b": {"const": 1}}, "not": {"required": ["a"]}},
    "one of two lengths": {"type": "string", "oneOf": [{"minLength": 2}, {"maxLength": 4}], "maxLength": 9},
    "one of two names": {"type": "object", "properties": {"a": {"const": 1}, "b": {"const": 2}},
                         "oneOf": [{"required": ["a"]}, {"required": ["b"]}], "additionalProperties": False},
    "different things": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True, "minItems": 1},
    "one thing": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "maxItems": 1},
    "a static reference": {"type": "object", "$dynamicAnchor": "node", "additionalProperties": False,
                           "properties": {"a": {"$dynamicRef": "#node"}}},
    "a number below and above": {"type": "number", "exclusiveMinimum": 1, "maximum": 1.5},
    "a number between, of two schemas": {"type": "number", "exclusiveMaximum": 0, "allOf": [{"minimum": -0.5}]},
    "a number of draft 4": {"type": ["integer", "number"], "minimum": 3, "exclusiveMinimum": True, "maximum": 3.25},
    "an integer": {"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 3.5},
}  # fmt: skip
DRAFT_4 = {"a number of draft 4"}


@pytest.mark.parametrize("name", ACCEPTED)
def test_answers_fit_the_schema_that_was_rewritten(name: str, seed: int) -> None:
    draw, schema = random.Random(seed), ACCEPTED[name]
    kind = jsonschema.Draft4Validator if name in DRAFT_4 else jsonschema.Draft202012Validator
    kind = jsonschema.Draft7Validator if "dependencies" in schema else kind
    validator = kind(json.loads(json.dumps(schema), parse_float=Decimal))
    texts = {walked(schema, draw) for _ in range(20)} - {None}
    assert texts
    for text in texts:
        validator.validate(json.loads(text, parse_float=Decimal))


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "number", "exclusiveMinimum": 1, "maximum": 1.5}, "1.00000001", "1"),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, "0.000000000000000000000000001", "0"),
        ({"type": "number", "exclusiveMaximum": 0, "minimum": -0.5}, "-0.001", "-0"),
        ({"type": "number", "exclusiveMaximum": -2, "exclusiveMinimum": -2.25}, "-2.1", "-2"),
        ({"exclusiveMinimum": 3.0, "anyOf": [{"maximum": 3.5}, {"type": "string"}]}, "3.25", "3"),
        (ACCEPTED["a number of draft 4"], "3.1", "3"),
        (ACCEPTED["a condition"], '{"kind": "dog", "lives": 1}', '{"kind": "dog", "lives": 2}'),
        (ACCEPTED["listed names"], '{"a": 1, "b": 2}', '{"a": 1, "b": 2, "c": 3}'),
        (ACCEPTED["different things"], '["c", "a"]', '["c", "c"]'),
        ({"properties": {"a": {"$ref": "#b"}}, "definitions": {"b": {"$id": "#b", "type": "null"}}}, '{"a": null}',
         '{"a": 1}'),
        ({"not": {"type": "object", "properties": {"a": {"type": "string"}}}}, '{"a": 1}', '{"a": "x"}'),
        ({"allOf": [{"unevaluatedProperties": True}], "properties": {"a": {}}, "unevaluatedProperties": False},
         '{"b": 1}', "x"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_asked_for_is_allowed_and_nothing_else(schema: Any, good: str, bad: str) -> None:
    assert allows(schema, good) and not allows(schema, bad)


NEUTRAL: dict[str, list[Any]] = {
    "propertyNames": [{"type": "string"}, {}, True, {"title": "a key"}, {"type": ["string", "null"]}],
    "uniqueItems": [False], "dependentRequired": [{}, {"a": []}], "dependentSchemas": [{}, {"a": True}, {"a": {}}],
    "dependencies": [{}, {"a": []}, {"a": {}}], "unevaluatedProperties": [True, {}],
    "unevaluatedItems": [True, {"description": "anything"}], "if": [{"const": 1}, True, {"pattern": "(?:a)"}],
    "then": [{"const": 1}, False], "else": [{"const": 1}], "not": [False, {"not": {}}, {"enum": [], "not": True}],
    "minContains": [0, 3], "maxContains": [2], "$dynamicAnchor": ["node"], "$recursiveAnchor": [True],
}  # fmt: skip


@pytest.mark.parametrize("word", NEUTRAL)
def test_a_keyword_that_asks_for_nothing_is_accepted_wherever_it_stands(word: str) -> None:
    for value in NEUTRAL[word]:
        schema = {word: value}
        for around in (
            schema, {"items": schema}, {"properties": {"a": schema}}, {"anyOf": [schema, {"type": "null"}]},
            {"allOf": [schema]}, {"additionalProperties": schema}, {"$ref": "#/$defs/a", "$defs": {"a": schema}},
            {"patternProperties": {"^a$": schema}}, {"prefixItems": [schema]}, {"not": {"not": schema}},
            {"if": {"required": ["a"]}, "then": schema}, {"x": schema, "items": {"$ref": "#/x"}},
        ):  # fmt: skip
            if word == "$dynamicAnchor" and "not" in around:
                continue  # what has a name is not moved
            assert refusal(around) is None, around
            for text in ('{"a": 3}', '["a", "a"]', "null", '"b"'):
                assert allows(around, text), (around, text)
    contains = {"contains": {"const": 1}, "minContains": 0}
    assert allows(contains, "[2]") and allows({"contains": True, "minContains": 0}, "[]")


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"not": {"type": "integer"}}, "not"), ({"not": {"pattern": "a"}}, "not"), ({"not": {"const": "a"}}, "not"),
        ({"contains": {"minimum": 5}}, "contains"), ({"uniqueItems": True}, "uniqueItems"),
        ({"if": {"pattern": "a"}, "then": {"maxLength": 3}}, "if, then"),
        ({"propertyNames": {"format": "date"}}, "propertyNames"),
        ({"propertyNames": {"pattern": "^a"}, "properties": {"b": {}}}, "propertyNames"),
        ({"oneOf": [{"pattern": "a"}, {"minLength": 3}]}, "oneOf"),
        ({"anyOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False}, "unevaluatedProperties"),
        ({"if": {"$id": "http://x/a", "type": "null"}, "then": {"$ref": "http://x/a"}}, "if, then"),
        ({"not": {"required": ["a"]}, "x": {"$ref": "#/not"}, "items": {"$ref": "#/not"}}, "$ref"),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "contains": {"const": 1}, "minContains": 0},
         "contains"),
        ({"type": "number", "exclusiveMinimum": 1, "maximum": 1}, "exclusiveMinimum"),
    ],
    ids=str,
)  # fmt: skip
def test_a_keyword_that_no_rule_can_rewrite_is_refused_by_name(schema: Any, word: str) -> None:
    assert word in (refusal(schema) or "")


def test_rewriting_takes_linear_time_and_writes_little_twice() -> None:
    def nested(word: str, depth: int) -> Any:
        found: Any = {"required": ["a"]}
        for _ in range(depth):
            found = {"oneOf": [found, {"maxLength": 3}]} if word == "oneOf" else {word: found}
        return found

    chain: Any = {}
    for number in range(60):
        chain = {"if": {"properties": {"a": {"const": number % 2 == 0}}}, "then": {"minItems": number}, "else": chain}
    values = [f"value {number}" for number in range(20_000)]
    begun = time.process_time()
    for schema in (
        nested("not", 80), nested("oneOf", 60), chain, {"uniqueItems": True, "items": {"enum": values}},
        {"propertyNames": {"enum": values}, "additionalProperties": {"properties": dict.fromkeys(values[:300], True)}},
        {"items": [{"oneOf": [{"required": [f"{number}"]}, {"minLength": 3}]} for number in range(3000)]},
        {"$defs": {"a": {"oneOf": [{"required": values[:2000]}, {}]}},
         "items": [{"not": {"$ref": "#/$defs/a"}}] * 2000},
    ):  # fmt: skip
        before = len(json.dumps(schema))
        assert len(json.dumps(schemas.prepare_schema(schema))) < 12 * before + 8 * MAX_COPIED
    assert time.process_time() - begun < 6


def test_bounds_hold_for_all_numbers_wherever_they_meet(seed: int) -> None:
    """Also where they stand in different schemas, and close to each other."""
    draw = random.Random(seed)
    points = [Decimal(number) / 4 for number in range(-10, 11)] + [Decimal(each) for each in ("0.01", "-1.001", "9.99")]
    num_accepted = 0
    for _ in range(60):
        schema: dict[str, Any] = {
            "type": draw.choice(["number", "integer", ["integer", "number"], ["number", "string"]])
        }
        if draw.random() < 0.2:
            schema["multipleOf"] = draw.choice([1, 2, 0.5])
        for word in draw.sample(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"], draw.randrange(1, 4)):
            bound = draw.choice(points)
            plain = int(bound) if bound % 1 == 0 else float(bound)
            own = schema if draw.random() < 0.7 else schema.setdefault("allOf", [{}])[0]
            own[word] = plain
        if refusal(schema) is not None:
            continue
        num_accepted += 1
        validator = jsonschema.Draft202012Validator(json.loads(json.dumps(schema), parse_float=Decimal))
        for point in draw.sample(points, 8):
            for step in ("0", "0.25", "-0.25", "0.00001", "-0.00001", "0.0"):
                text = str(point + Decimal(step)).replace("E", "e")
                for written in (text, f"-{text}" if not text.startswith("-") and not float(text) else text):
                    if allows(schema, written):
                        assert validator.is_valid(json.loads(written, parse_float=Decimal)), (schema, written)
    assert num_accepted > 20


def refers(name: str) -> Any:
    return {"$ref": f"#/$defs/{name}"}


def chained(word: str, width: int, end: Any) -> Any:
    """Ten definitions, each of which refers to the next several times."""
    found = {f"d{number}": {word: [refers(f"d{number + 1}")] * width} for number in range(10)}
    return {**found, "d10": end}


def expensive() -> dict[str, Any]:
    """Schemas of at most 262,144 characters that are small, or that refer to something long many times."""
    names = {f"p{number}": {"type": "string"} for number in range(2000)}
    alternatives = {"anyOf": [{"required": [f"k{number}"]} for number in range(3000)]}
    shared = {f"d{number}": {"not": {"allOf": [{"not": refers(f"d{number + 1}")}] * 8}} for number in range(10)}
    inner = {"properties": {"a": True}, "not": {"type": "null"}}
    text = {"pattern": "^" + "a" * 100_000}
    found: dict[str, Any] = {
        "chained not": {"$defs": chained("allOf", 6, {"type": "null"}), "not": refers("d0")},
        "chained if": {"$defs": chained("anyOf", 6, {"type": "null"}), "if": refers("d0"), "then": False},
        "chained one": {"$defs": chained("allOf", 6, {"type": "null"}), "oneOf": [refers("d0"), refers("d1")]},
        "chained oneOf": {"$defs": chained("oneOf", 6, {"type": "null"})},
        "chained names": {"$defs": chained("anyOf", 9, {"enum": ["a"]}), "propertyNames": refers("d0")},
        "circular names": {"$defs": {"a": {"anyOf": [refers("a")]}}, "propertyNames": refers("a")},
        "chained unevaluated": {"$defs": chained("allOf", 12, inner), "$ref": "#/$defs/d0",
                                "unevaluatedProperties": False},
        "shared": {"$defs": {**shared, "d10": {"type": "null"}}, "not": refers("d0")},
        "alternatives": {"$defs": {"a": alternatives}, "anyOf": [{"not": refers("a")}] * 1500},
        "one of sixteen": {"$defs": {"a": {"enum": [None, True] * 1500}},
                           "allOf": [{"oneOf": [refers("a")] * 16} for _ in range(600)]},
        "properties": {"$defs": {"a": {"properties": names}}, "allOf": [{"not": refers("a")}] * 2000},
        "known properties": {"properties": dict.fromkeys(names, 1), "allOf": [inner] * 3000},
        "known values": {"enum": [*range(9000)], "allOf": [{"not": {"const": 1}}] * 4000},
        "types": {"$defs": {"a": {"type": ["null"] * 9000}}, "allOf": [{"not": refers("a")}] * 3000},
        "names": {"$defs": {"a": {"enum": [*names]}}, "allOf": [{"propertyNames": refers("a")}] * 3000},
        "types of names": {"$defs": {"a": {"type": ["x"] * 9000}}, "allOf": [{"propertyNames": refers("a")}] * 3000},
        "expression": {"$defs": {"a": text}, "allOf": [{"propertyNames": refers("a")}] * 3000},
        "unique": {"$defs": {"a": {"enum": ["a" * 90_000, "b"]}},
                   "allOf": [{"uniqueItems": True, "items": refers("a")}] * 2000},
        "dependencies": {"dependentRequired": {f"k{number}": ["b"] for number in range(13_000)}},
        "references": {"$defs": {"a": {"$ref": "#/" + "a/" * 50_000}}, "allOf": [{"not": refers("a")}] * 3000},
    }  # fmt: skip
    return {name: json.loads(json.dumps(each)) for name, each in found.items()}


EXPENSIVE = expensive()


@pytest.mark.parametrize("name", whole([*EXPENSIVE], len(EXPENSIVE)))
def test_no_schema_takes_much_time_or_memory(name: str) -> None:
    """However often its parts refer to one another."""
    schema = EXPENSIVE[name]
    source = len(json.dumps(schema))
    assert source < 262_144
    begun = time.process_time()
    with contextlib.suppress(schemas.UnsupportedSchemaError):
        assert len(json.dumps(schemas.prepare_schema(schema))) < 5 * source + 2 * MAX_COPIED
    assert time.process_time() - begun < 0.8  # 0.25 s on a machine that is not busy
    tracemalloc.start()
    with contextlib.suppress(schemas.UnsupportedSchemaError):
        schemas.prepare_schema(schema)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 50 << 20


def test_random_definitions_that_refer_to_one_another_take_little_time(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(20):
        count = draw.choice([6, 20, 60])
        definitions: dict[str, Any] = {}
        for number in range(count):
            later = [refers(f"d{draw.randrange(number, count)}") for _ in range(draw.randrange(1, 12))]
            definitions[f"d{number}"] = draw.choice([
                {draw.choice(["allOf", "anyOf", "oneOf"]): later}, {"not": later[0]}, {"type": "null"},
                {"if": later[0], "then": later[-1], "else": later[0]}, {"propertyNames": later[0]},
                {"properties": {f"p{place}": each for place, each in enumerate(later)}, "not": later[0]},
                {"enum": ["a", "b"]}, {"uniqueItems": True, "items": later[0]},
            ])  # fmt: skip
        schema = {"$defs": definitions, "allOf": [{draw.choice(["not", "if"]): refers("d0"), "then": False}] * 20}
        begun = time.process_time()
        with contextlib.suppress(schemas.UnsupportedSchemaError):
            assert len(json.dumps(schemas.prepare_schema(schema))) < 5 * len(json.dumps(schema)) + 2 * MAX_COPIED
        assert time.process_time() - begun < 0.8, schema


CAT: Any = {"type": "object", "properties": {"k": {"const": "a"}}}
DOG: Any = {"type": "object", "properties": {"k": {"const": "b"}}}
DISCRIMINATED: Any = {"oneOf": [refers("A"), refers("B")], "discriminator": {"propertyName": "k"}}


@pytest.mark.parametrize(
    "other",
    [{"not": refers("A")}, {"if": refers("A"), "then": {"required": ["z"]}}, {"allOf": [{"not": refers("A")}]}],
    ids=str,
)  # fmt: skip
def test_a_discriminator_changes_no_definition_that_has_other_uses(other: Any) -> None:
    schema = {
        "$defs": {"A": CAT, "B": DOG}, "type": "object", "required": ["q"], "additionalProperties": False,
        "properties": {"p": DISCRIMINATED, "q": {"type": "object", "properties": {"k": {"enum": ["a", "b"]}}, **other}},
    }  # fmt: skip
    for value in ({}, {"k": "a"}, {"k": "b"}):
        assert allows(schema, json.dumps({"q": value})) == fits(schema, {"q": value}), value
    assert allows(schema, '{"p": {"k": "a"}, "q": {"k": "b"}}') and not allows(schema, '{"p": {}, "q": {"k": "b"}}')


def test_a_schema_that_a_discriminator_narrows_has_no_opposite() -> None:
    """`{}` fits one of the two here. It would fit none of the narrowed ones."""
    known = {"type": "object", "properties": {"k": {"enum": ["a", "b"]}}}
    schema = {"$defs": {"A": CAT, "B": {**DOG, "required": ["z"]}}, **known}
    for other in ({"not": DISCRIMINATED}, {"if": DISCRIMINATED, "then": False}, {"not": {"anyOf": [DISCRIMINATED]}}):
        assert (refusal({**schema, **other}) or "").startswith(("not", "if")), other


@pytest.mark.parametrize(
    "own",
    [
        {"$defs": {"a": {"enum": ["y"]}}, "propertyNames": refers("a")},
        {"$defs": {"a": {"required": ["x"]}}, "not": refers("a")},
        {"$defs": {"A": {**CAT, "title": "x"}, "B": CAT}, **DISCRIMINATED},
    ],
    ids=str,
)  # fmt: skip
def test_a_pointer_inside_a_schema_with_an_id_is_not_taken_for_one_of_the_root(own: Any) -> None:
    for value in ("http://n/", "n.json"):
        inner = {"type": "object", "$id": value, **own}
        schema = {"$defs": {"a": {"enum": ["x"]}, "A": CAT, "B": DOG}, "type": "object", "properties": {"p": inner}}
        assert refusal(schema) is not None


def test_a_pointer_inside_a_schema_with_an_id_leads_to_a_checked_schema() -> None:
    inner = {"$id": "http://n/", "x": {"const": 2**60}, "items": {"$ref": "#/x"}}
    assert (refusal({"properties": {"p": inner}, "x": {"const": 1}}) or "").startswith("const: integers beyond")
    other = {"properties": {"p": {"$id": "http://n/", "x": {"pattern": "a"}}, "q": {"$ref": "http://n/#/x"}}}
    assert (refusal(other) or "").startswith("$ref")


DRAFTS = {
    "http://json-schema.org/draft-04/schema#": jsonschema.Draft4Validator,
    "http://json-schema.org/draft-06/schema#": jsonschema.Draft6Validator,
    "http://json-schema.org/draft-07/schema#": jsonschema.Draft7Validator,
    "https://json-schema.org/draft/2019-09/schema": jsonschema.Draft201909Validator,
    "https://json-schema.org/draft/2020-12/schema": jsonschema.Draft202012Validator,
}
LATER: list[Any] = [
    {"dependentRequired": {"b": ["a"]}}, {"dependentSchemas": {"b": {"required": ["a"]}}}, {"const": None},
    {"unevaluatedProperties": False}, {"unevaluatedItems": False}, {"propertyNames": {"enum": ["a"]}},
    {"contains": True, "minContains": 2}, {"contains": True, "maxContains": 0}, {"if": {"type": "null"}, "then": False},
    {"$dynamicRef": "#/x"}, {"$recursiveRef": "#"}, {"dependencies": {"b": ["a"]}}, {"contains": {}},
]  # fmt: skip


@pytest.mark.parametrize("draft", DRAFTS)
def test_keywords_that_the_declared_draft_lacks_ask_for_nothing(draft: str) -> None:
    num_allowed = 0
    for own in LATER:
        for around in (own, {"not": own}, {"if": own, "then": {"type": "null"}}, {"oneOf": [own, {"type": "null"}]}):
            schema = {
                "$schema": draft,
                "x": {"type": "null"},
                "enum": [None, {}, {"b": 1}, {"a": 1}, [], [1]],
                **around,
            }
            for value in schema["enum"] if refusal(schema) is None else ():
                if allows(schema, json.dumps(value)):
                    assert DRAFTS[draft](schema).is_valid(value), (schema, value)
                    num_allowed += 1
    assert num_allowed > 20


@pytest.mark.parametrize("word", ["minLength", "maxLength"])
def test_a_count_that_is_no_number_is_refused(word: str) -> None:
    for value, is_count in ((True, False), (2.0, True), (2.5, False), ("2", False)):
        assert (refusal({"type": "object", "propertyNames": {word: value}}) is None) == is_count, value
