"""Schemas as grammars: what they accept, and what is refused by name."""

from __future__ import annotations

import json
import time
import tracemalloc
from typing import Any

import pytest

from quire import LLM
from quire.errors import RequestError
from quire.structured import schemas
from quire.structured.params import StructuredOutputsParams
from tests.structured.test_grammar_compiler import allows
from tests.structured.test_grammar_compiler import llm as llm
from tests.structured.test_grammar_compiler import model as model


def test_formats_that_are_not_known_mean_nothing(llm: LLM) -> None:
    """And no other value that happens to have that name is taken for one."""
    telegram: dict[str, Any] = {"type": "string", "format": "telegram"}
    schema = {
        "type": "object",
        "properties": {
            "format": telegram,
            "all": {"type": "array", "items": {"anyOf": [telegram, {"$ref": "#/$defs/word"}]}},
            "const": {"const": {"format": "telegram"}},
        },
        "additionalProperties": telegram,
        "$defs": {"word": telegram, "date": {"type": "string", "format": "date"}},
    }
    before = json.dumps(schema)
    found: Any = schemas.prepare_schema(schema)
    assert json.dumps(schema) == before, "the caller's schema has changed"
    assert json.dumps(found).count("telegram") == 1 and found["properties"]["const"] == schema["properties"]["const"]
    assert found["$defs"]["date"] == schema["$defs"]["date"] and "format" in found["properties"]
    llm.engine.grammars.compile(StructuredOutputsParams(json=schema))
    assert schemas.prepare_schema(False) is False and schemas.prepare_schema(True) == {"x-guidance": schemas.JSON_STYLE}


@pytest.mark.parametrize(
    "control", [{"pattern": r"^\x01$"}, {"const": "\x01"}, {"enum": ["a", ["\x7f"]]}, {"const": {"\x1f": 1}}], ids=str
)
def test_a_control_character_is_refused_where_a_listed_name_could_then_come_twice(llm: LLM, control: Any) -> None:
    """The escape that it needs writes any letter, wherever names are not closed."""
    open_ones: list[Any] = [
        {"properties": {"a": {"const": 1}}}, {"patternProperties": {"^a": {"const": 1}}}, {"required": ["a"]},
        {"properties": {"a": {}}, "patternProperties": {"^b": {}}, "additionalProperties": False},
        {"dependentRequired": {"a": ["b"]}}, {"not": {"required": ["a"]}},
    ]  # fmt: skip
    for each in open_ones:
        for schema in ({"anyOf": [each, {"items": control}]}, {**each, "allOf": [{"items": control}]}):
            with pytest.raises(schemas.UnsupportedSchemaError, match="properties: a control character"):
                schemas.prepare_schema(schema)
    closed = {"properties": {"a": {"const": 1}}, "additionalProperties": False, "type": "object"}
    for each in (closed, {"type": "object", "additionalProperties": {"type": "null"}}):
        schema = {"anyOf": [each, {"type": "array", "items": control}]}
        llm.engine.grammars.compile(StructuredOutputsParams(json=schema))


def test_control_characters_that_are_not_asked_for_refuse_nothing() -> None:
    for own in (
        {"description": "\x01"},
        {"pattern": r"^[^\u0000-\u001f]*$"},
        {"const": r"\u0001"},
        {"default": "\x01"},
    ):
        found: Any = schemas.prepare_schema({"properties": {"a": {"const": 1}, "b": own}, "type": "object"})
        assert found["x-guidance"] == schemas.JSON_STYLE


def test_what_a_reference_points_to_is_a_schema_wherever_it_stands(llm: LLM) -> None:
    for schema, word in (({"const": 2**53 + 1}, "const"), ({"type": "object", "minProperties": 2}, "minProperties")):
        for reference, places in (("#/x", {"x": schema}), ("#/a~1b/0/c%20d", {"a/b": [{"c d": schema}]})):
            with pytest.raises(RequestError, match=f"{word}: "):
                llm.engine.grammars.compile(StructuredOutputsParams(json={"$ref": reference, **places}))
    nowhere = (f"#/x/{'9' * 5000}", "#/x/\u0665", "#/x/7", "#/", "#//", "#/x/0/0", "#/~", "#/%ff", "#/x/-1")
    for reference in nowhere:
        with pytest.raises(RequestError, match="cannot be honoured"):
            llm.engine.grammars.compile(StructuredOutputsParams(json={"$ref": reference, "x": [1]}))
        schemas.prepare_schema({"$ref": reference, "x": [1]})
    unknown = {"$ref": "#/components/x", "components": {"x": {"type": "string", "format": "color"}}}
    assert allows(llm, unknown, '"red"')


def test_alternatives_that_are_used_many_times_are_told_apart_in_linear_time() -> None:
    small, large = (prepare_alternatives(11_000 * part, 2500 * part, 8000 * part) for part in (0.25, 1))
    assert large < 8 * small, "four times as much takes about four times as long; each with each would take sixteen"


def prepare_alternatives(num_members: float, num_discriminators: float, num_references: float) -> float:
    """Processor seconds, the least of five runs."""
    big = {"type": "object", "properties": {"k": {"enum": [f"v{number}" for number in range(int(num_members))]}}}
    tag, each = {"propertyName": "k"}, {"$ref": "#/a"}
    many = {
        "a": big,
        "allOf": [{"oneOf": [each], "discriminator": tag} for _ in range(int(num_discriminators))],
    }
    same = {"a": big, "oneOf": [each] * int(num_references), "discriminator": tag}
    seconds = []
    for _ in range(5):
        begun = time.process_time()
        for schema in (many, same):
            schemas.prepare_schema(schema)
        seconds.append(time.process_time() - begun)
    return min(seconds)


def test_long_names_are_not_kept_for_each_schema() -> None:
    long = {"properties": {"k" * 100_000: {"properties": {f"a{number}": {} for number in range(9000)}}}}
    tracemalloc.start()
    schemas.prepare_schema(long)
    assert tracemalloc.get_traced_memory()[1] < 50 << 20
    tracemalloc.stop()
    long["properties"]["k" * 100_000]["properties"]["z"] = {"$id": "a", "$ref": "#"}
    with pytest.raises(schemas.UnsupportedSchemaError) as refusal:
        schemas.prepare_schema(long)
    assert str(refusal.value).endswith("k....properties.z)") and len(str(refusal.value)) < 400


def test_known_formats_are_kept_and_the_library_knows_no_others(llm: LLM) -> None:
    tokenizer = llm.tokenizer
    for name, good in FORMATS.items():
        matcher = llm.engine.grammars.compile(StructuredOutputsParams(json={"type": "string", "format": name}))
        for text, is_right in ((good, True), ("?", name == "unknown")):
            copy, ids = matcher.begin(), tokenizer.encode(json.dumps(text), add_special=False)
            assert (copy.try_consume_tokens(ids) == len(ids) and copy.is_accepting()) == is_right, (name, text)
    assert FORMATS.keys() == schemas.KNOWN_FORMATS


FORMATS = {
    "date": "2024-02-29", "date-time": "2024-02-29T12:00:00Z", "duration": "P1D", "email": "a@example.org",
    "hostname": "example.org", "ipv4": "127.0.0.1", "ipv6": "::1", "time": "12:00:00Z", "unknown": "any",
    "uri": "https://example.org/a", "uuid": "123e4567-e89b-12d3-a456-426614174000",
}  # fmt: skip
