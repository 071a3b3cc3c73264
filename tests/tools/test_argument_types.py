"""The schema says whether a value without quotes is a string."""

from __future__ import annotations

from typing import Any

import pytest

from quire.tools.argument_types import EVERY_TYPE, json_of_bare, types_of

ROOT = {"$defs": {"word": {"enum": ["a", 1]}, "loop": {"$ref": "#/$defs/loop"}}}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}), ({"type": ["number", "null"]}, {"number", "integer", "null"}),
        ({"enum": ["a", None]}, {"string", "null"}), ({"const": True}, {"boolean"}),
        ({"$ref": "#/$defs/word"}, {"string", "integer", "number"}), ({"$ref": "#/$defs/loop"}, EVERY_TYPE),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, {"string", "null"}), ({}, EVERY_TYPE), (True, EVERY_TYPE),
        ({"type": "string", "allOf": [{"enum": ["a", 1]}]}, {"string"}),
    ],
)  # fmt: skip
def test_types_of_schemas(schema: Any, types: set[str]) -> None:
    assert types_of(schema, ROOT) == types


@pytest.mark.parametrize(
    ("text", "types", "written"),
    [
        ("1", {"string"}, '"1"'), ("1", {"integer"}, "1"), (" 1 ", {"number"}, "1"),
        ("null", {"string", "null"}, "null"),
        ("one", {"integer"}, '"one"'), ("NaN", EVERY_TYPE, '"NaN"'), ("[1", EVERY_TYPE, '"[1"'), ('"q"', {"string"},
        '"\\"q\\""'), ("[1]", EVERY_TYPE, "[1]"), ("[1]", {"string", "null"}, '"[1]"'), ("", EVERY_TYPE, '""'),
        ("[" * 100_000, EVERY_TYPE, '"' + "[" * 100_000 + '"'),
    ],
    ids=lambda each: str(sorted(each) if isinstance(each, set | frozenset) else each)[:20],
)  # fmt: skip
def test_values_without_quotes_are_json_of_a_type_that_is_allowed(text: str, types: set[str], written: str) -> None:
    assert json_of_bare(text, frozenset(types)) == written
