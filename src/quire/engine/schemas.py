"""JSON Schemas as llguidance takes them: how JSON is written, and which annotations mean nothing here."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

JSON_STYLE: Any = {
    "item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False, "coerce_one_of": False,
    "lenient": False,
}  # fmt: skip
"""How JSON is written, and that schemas are honoured whole or refused."""

KNOWN_FORMATS = frozenset(
    {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid"}
)
"""Formats that texts are held to. llguidance refuses any other."""

_LIMITS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")

_COUNTS = ("maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties")

_EXACT = 1 << 53
"""llguidance rounds larger integers of a schema."""

_SCHEMA = (
    "additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if", "items", "not",
    "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
_SCHEMAS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
_NAMED_SCHEMAS = ("$defs", "definitions", "dependentSchemas", "dependencies", "patternProperties", "properties")
"""Keywords with a schema, with a list of schemas, and with schemas by name."""


class Unhonoured(ValueError):
    """A schema asks for what llguidance does not hold texts to. The message begins with the keyword."""


def written(schema: Mapping[str, Any] | bool) -> Mapping[str, Any] | bool:
    """A schema whose JSON is written on one line, with a space after each comma and colon. Formats that are not known
    are left out: by JSON Schema 2020-12 (Validation, section 7.2.1) they are annotations. A `oneOf` whose alternatives
    a `discriminator` tells apart (OpenAPI 3.1; pydantic writes it) becomes an `anyOf`. Raises Unhonoured.
    """
    if schema is False:
        return False
    found = {} if schema is True else dict(schema)
    open_schemas, told_apart = [found], list[dict[str, Any]]()
    while open_schemas:
        own = open_schemas.pop()
        if isinstance(own.get("format"), str) and own["format"] not in KNOWN_FORMATS:
            del own["format"]
        if own is not found and "$id" in own and "$ref" in own:
            # In draft 7 the $id means nothing there. Later it changes what the $ref points to.
            raise Unhonoured("$id beside $ref: drafts disagree about what it means")
        _check_numbers(own)
        own.update(
            {word: int(own[word]) for word in _COUNTS if isinstance(own.get(word), float) and own[word] % 1 == 0}
        )
        _close_bounds(own)
        _check_names(own)
        if isinstance(own.get("pattern"), str):
            own["pattern"] = without_nul(own["pattern"])
        if isinstance(own.get("patternProperties"), Mapping):
            own["patternProperties"] = {without_nul(key): each for key, each in own["patternProperties"].items()}
        if isinstance(own.get("oneOf"), list) and isinstance(own.get("discriminator"), Mapping):
            told_apart.append(own)
        for holder, place in _places(own):
            holder[place] = dict(holder[place])
            open_schemas.append(holder[place])
    for own in told_apart:
        _tell_apart(own, found)
    return {**found, "x-guidance": JSON_STYLE}


def _tell_apart(schema: dict[str, Any], root: dict[str, Any]) -> None:
    """Makes `anyOf` of a `oneOf` of objects, each with values of its own for the property that the discriminator names.
    The property is required then, even if it has a default, so that no text has two of the forms.
    """
    name, alternatives = schema["discriminator"].get("propertyName"), schema["oneOf"]
    objects, values = [_definition(each, root) for each in alternatives], list[Any]()
    for each in objects:
        if not isinstance(each, dict) or each.get("type") != "object" or "anyOf" in schema:
            return
        properties, required = each.get("properties"), each.get("required", [])
        own = properties.get(name) if isinstance(name, str) and isinstance(properties, dict) else None
        if not isinstance(own, dict) or not isinstance(required, list):
            return
        values += own["enum"] if isinstance(own.get("enum"), list) else [own.get("const")]
    if not all(isinstance(value, str) for value in values) or len(set(values)) < len(values):
        return
    for each in objects:
        each["required"] = [*(word for word in each.get("required", []) if word != name), name]
    schema["anyOf"] = schema.pop("oneOf")
    del schema["discriminator"]  # which llguidance would not have beside references that go in circles


def _definition(schema: Any, root: dict[str, Any]) -> Any:
    """What a schema refers to, if it only refers to a definition; else the schema."""
    reference = schema.get("$ref") if isinstance(schema, dict) and len(schema) == 1 else None
    if not isinstance(reference, str) or len(path := reference.split("/")) != 3 or path[0] != "#":
        return schema
    named = root.get(path[1]) if path[1] in ("$defs", "definitions") else None
    return named.get(path[2].replace("~1", "/").replace("~0", "~")) if isinstance(named, dict) else None


def without_nul(pattern: str) -> str:
    """A regular expression whose classes of characters lack NUL. If a class has all characters below the blank,
    llguidance 1.9.1 takes a backslash for one of it, because JSON writes these with a backslash.
    """
    found, place = [], 0
    while place < len(pattern):
        end, is_class = place + 1, True
        if pattern[place] == "[":
            end = _class_end(pattern, place)
        elif (named := _NAMED_CLASS.match(pattern, place)) is not None:
            end = named.end()
        else:
            end, is_class = place + 1 + (pattern[place] == "\\"), False
        piece = pattern[place:end]
        found.append(rf"[{piece}&&[^\x00]]" if is_class else piece)
        place = end
    return "".join(found)


_NAMED_CLASS = re.compile(r"\\[pP](\{[^}]*\}|.)", re.DOTALL)


def _class_end(pattern: str, place: int) -> int:
    """The end of a class that begins with a bracket: classes nest, and a bracket that comes first is a character."""
    depth = 0
    while place < len(pattern):
        char = pattern[place]
        place += 2 if char == "\\" else 1
        if char == "[":
            depth += 1
            place += pattern.startswith("^", place)
            place += pattern.startswith("]", place)
        elif char == "]":
            depth -= 1
            if not depth:
                return place
    return len(pattern)


def _check_numbers(schema: Mapping[str, Any]) -> None:
    values = [(word, schema.get(word)) for word in (*_LIMITS, "const", "enum")]
    while values:
        word, value = values.pop()
        if isinstance(value, int) and abs(value) > _EXACT:
            raise Unhonoured(f"{word}: integers beyond 2^53 are rounded")
        if word in ("const", "enum") and isinstance(value, list | Mapping):
            values += ((word, each) for each in (value.values() if isinstance(value, Mapping) else value))


def _close_bounds(schema: dict[str, Any]) -> None:
    """Puts the next double in place of a bound that is not reached. A decimal between both is read as the bound."""
    for given, word, side, closer in (
        ("exclusiveMinimum", "minimum", math.inf, max),
        ("exclusiveMaximum", "maximum", -math.inf, min),
    ):
        bound, other = schema.get(given), schema.get(word, -side)
        if isinstance(bound, int | float) and not isinstance(bound, bool) and isinstance(other, int | float):
            schema[word] = closer(math.nextafter(bound, side), other)
            del schema[given]


def _check_names(schema: Mapping[str, Any]) -> None:
    """Names that are not listed may come twice."""
    least, required = schema.get("minProperties"), schema.get("required")
    num_required = len(set(map(str, required))) if isinstance(required, list) else 0
    is_open = schema.get("additionalProperties") is not False or schema.get("patternProperties")
    if isinstance(least, int | float) and least > max(1, num_required) and is_open:
        raise Unhonoured("minProperties: names that are not listed may come twice, so only required ones are counted")


def _places(schema: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Yields where the subschemas of a schema stand that are objects: (list or object, index or name). Puts a copy of
    each such list or object into the schema first, so that writing to it does not change the original.
    """
    for word in _SCHEMA:
        if isinstance(schema.get(word), Mapping):
            yield schema, word
    for word in _SCHEMAS:
        if isinstance(schema.get(word), list):
            schema[word] = several = list(schema[word])
            yield from ((several, place) for place, each in enumerate(several) if isinstance(each, Mapping))
    for word in _NAMED_SCHEMAS:
        if isinstance(schema.get(word), Mapping):
            schema[word] = named = dict(schema[word])
            yield from ((named, name) for name, each in named.items() if isinstance(each, Mapping))
