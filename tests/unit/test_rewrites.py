"""Schemas that are said otherwise for llguidance: the same values fit, and answers fit what was asked for."""

from __future__ import annotations

import json
import random
import time
from decimal import Decimal
from typing import Any

import jsonschema
import pytest

from quire.engine import schemas
from quire.engine.rewrites import MAX_COPIED

from ..walks import allows, refusal, walked

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
    found = dict(schemas.written(schema))  # type: ignore[arg-type]
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


def test_the_same_values_fit_a_schema_that_is_said_otherwise(seed: int) -> None:
    """By an implementation that takes both."""
    draw = random.Random(seed)
    changed = 0
    for _ in range(300):
        schema = some_schema(draw)
        if isinstance(schema, bool):
            continue
        try:
            found = rewritten(schema)
        except schemas.Unhonoured:
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
def test_answers_fit_a_schema_that_is_said_otherwise(name: str, seed: int) -> None:
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
def test_what_no_rule_can_say_is_refused_by_name(schema: Any, word: str) -> None:
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
        assert len(json.dumps(schemas.written(schema))) < 12 * before + 8 * MAX_COPIED
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
