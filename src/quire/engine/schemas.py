"""JSON Schemas as llguidance takes them: how JSON is written, and which annotations mean nothing here."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
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
    open_schemas, told_apart = [("", found)], list[dict[str, Any]]()
    while open_schemas:
        path, own = open_schemas.pop()
        if isinstance(own.get("format"), str) and own["format"] not in KNOWN_FORMATS:
            del own["format"]
        if own is not found and "$id" in own and "$ref" in own:
            # In draft 7 the $id means nothing there. Later it changes what the $ref points to.
            raise Unhonoured("$id beside $ref: drafts disagree about what it means" + _at(path))
        if (reason := _rounded(own) or _repeated(own)) is not None:
            raise Unhonoured(reason + _at(path))
        own.update(
            {word: int(own[word]) for word in _COUNTS if isinstance(own.get(word), float) and own[word] % 1 == 0}
        )
        if isinstance(own.get("pattern"), str):
            own["pattern"] = without_nul(own["pattern"])
        if isinstance(own.get("patternProperties"), Mapping):
            own["patternProperties"] = {without_nul(key): each for key, each in own["patternProperties"].items()}
        if isinstance(own.get("oneOf"), list) and isinstance(own.get("discriminator"), Mapping):
            told_apart.append(own)
        for name, holder, place in _places(own):
            holder[place] = dict(holder[place])
            open_schemas.append((f"{path}.{name}" if path else name, holder[place]))
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


def _rounded(schema: Mapping[str, Any]) -> str | None:
    """Why the numbers of a schema cannot be honoured, if so."""
    values = [(word, schema.get(word)) for word in (*_LIMITS, "const", "enum")]
    while values:
        word, value = values.pop()
        if isinstance(value, int) and abs(value) > _EXACT:
            return f"{word}: integers beyond 2^53 are rounded"
        if word in ("const", "enum") and isinstance(value, list | Mapping):
            values += ((word, each) for each in (value.values() if isinstance(value, Mapping) else value))
    return None


def _repeated(schema: Mapping[str, Any]) -> str | None:
    """Why the number of properties cannot be honoured, if so. Names that are not listed may come twice."""
    least, required = schema.get("minProperties"), schema.get("required")
    num_required = len(set(map(str, required))) if isinstance(required, list) else 0
    is_open = schema.get("additionalProperties") is not False or schema.get("patternProperties")
    if isinstance(least, int | float) and least > max(1, num_required) and is_open:
        return "minProperties: names that are not listed may come twice, so only required ones are counted"
    return None


def explained(schema: Any, error: str) -> str:
    """What llguidance says against a schema, by the name of the keyword and with its place, where that can be found."""
    error = error.strip()
    if (found := _UNKNOWN_KEYS.match(error)) is not None:
        words = json.loads(found[1])
        return f"{', '.join(words)}: not supported{_at(_place(schema, lambda own: words[0] in own))}"
    if error.startswith("oneOf constraints"):
        reason = (
            "a text could have two of its forms; use anyOf, or give each a required property with a const of its own"
        )
        return f"oneOf: {reason}{_at(_place(schema, lambda own: 'oneOf' in own))}"
    if error.startswith("recursion limit exceeded"):
        return "it is nested too deep for llguidance, which takes some 60 objects in one another"
    if (found := _ELSEWHERE.match(error)) is not None:
        is_draft = str(schema.get("$schema", "")).startswith(found[1])
        return f"{'$schema' if is_draft else '$ref'}: {found[1]} is not known, and nothing is fetched"
    if error.startswith(("Pointer ", "Anchor ")):
        return f"$ref: {error}"
    if (wrong := _EXPRESSION.search(error)) is not None:
        given = list(_expressions(schema))
        exact = [each for each in given if wrong[1] in (each[1], without_nul(each[1]))]
        for word, expression, path in exact or given[: len(given) == 1]:
            return f"{word}: {wrong[2]}, in {expression}{_at(path)}"
        return f"pattern: {wrong[2]}"
    return error


def _expressions(schema: Any) -> Iterator[tuple[str, str, str]]:
    """The regular expressions of a schema: keyword, expression and place."""
    for path, own in _subschemas(schema):
        if isinstance(own.get("pattern"), str):
            yield "pattern", own["pattern"], path
        if isinstance(own.get("patternProperties"), Mapping):
            yield from (("patternProperties", each, path) for each in own["patternProperties"])


_UNKNOWN_KEYS = re.compile(r"Unimplemented keys: (\[.*?\])")
_ELSEWHERE = re.compile(r"Resource '(.*?)' is not present in a registry")
_EXPRESSION = re.compile(r"regex parse error:\n +(.*)\n[ ^]+\nerror: (.*)")


def _at(path: str | None) -> str:
    return f" (at {path})" if path else ""


def _place(schema: Any, is_meant: Callable[[Mapping[str, Any]], bool]) -> str | None:
    """Where the first subschema stands that is meant."""
    return next((path for path, own in _subschemas(schema) if is_meant(own)), None)


def _subschemas(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """All schemas in a schema that are objects, with their places."""
    todo = [("", dict(schema))] if isinstance(schema, Mapping) else []
    while todo:
        path, own = todo.pop(0)
        yield path, own
        todo += [(f"{path}.{name}" if path else name, dict(holder[at])) for name, holder, at in _places(own)]


def _places(schema: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yields where the subschemas of a schema stand that are objects: a name, the list or object, and the index or key.
    Puts a copy of each such list or object into the schema first, so that writing to it does not change the original.
    """
    for word in _SCHEMA:
        if isinstance(schema.get(word), Mapping):
            yield word, schema, word
    for word in _SCHEMAS:
        if isinstance(schema.get(word), list):
            schema[word] = several = list(schema[word])
            for place, each in enumerate(several):
                if isinstance(each, Mapping):
                    yield f"{word}[{place}]", several, place
    for word in _NAMED_SCHEMAS:
        if isinstance(schema.get(word), Mapping):
            schema[word] = named = dict(schema[word])
            yield from ((f"{word}.{name}", named, name) for name, each in named.items() if isinstance(each, Mapping))
