"""What fits exactly where a JSON Schema does not, as far as llguidance can be asked for it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

TYPES = ("null", "boolean", "string", "number", "array", "object")
"""All types of values. Integers are numbers."""

MAX_DEPTH = 12
"""Schemas in one another that are negated."""

ASSERTIONS = frozenset(
    """$dynamicRef $recursiveRef $ref additionalItems additionalProperties allOf anyOf const contains dependencies
    dependentRequired dependentSchemas else enum exclusiveMaximum exclusiveMinimum format if items maxContains maxItems
    maxLength maxProperties maximum minContains minItems minLength minProperties minimum multipleOf not oneOf pattern
    patternProperties prefixItems properties propertyNames required then type unevaluatedItems unevaluatedProperties
    uniqueItems""".split()
)
"""Keywords that can make a difference to what fits. All others are annotations."""

_OPPOSITES = {
    "minimum": ("number", "exclusiveMaximum", 0), "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0), "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1), "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1), "maxItems": ("array", "minItems", 1),
}  # fmt: skip
"""The type that a limit is about, and the limit that a value keeps which breaks it: another keyword, and the distance
of its number."""


class NotNegatable(Exception):
    """Nothing that llguidance takes is the opposite."""


Resolve = Callable[[Any], Any]
"""Gives what a schema refers to, if it only refers to something; else the schema."""


def negated(schema: Any, known: Any = True, *, resolve: Resolve, depth: int = 0) -> list[Any]:
    """Schemas of which a value fits at least one if and only if it does not fit the given one; none: all values fit.

    known    what all values fit anyway: with its `enum` the values are known that a `const` leaves
    resolve  see Resolve
    Raises NotNegatable.
    """
    schema, known = resolve(schema), resolve(known)
    if isinstance(schema, bool):
        return [] if schema else [True]
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        raise NotNegatable
    around = known if isinstance(known, Mapping) else {}
    found: list[Any] = []
    for word in sorted(ASSERTIONS & schema.keys()):
        value = schema[word]
        match word:
            case "type":
                found += _other_types(value, around.get("type"))
            case "const" | "enum":
                found += _other_values([value] if word == "const" else value, around)
            case "required" if isinstance(value, list):
                found += [{"type": "object", "properties": {name: False}} for name in value]
            case "properties" if isinstance(value, Mapping):
                found += _other_properties(value, around, resolve, depth)
            case "allOf" if isinstance(value, list):
                for each in value:
                    found += negated(each, known, resolve=resolve, depth=depth + 1)
            case "anyOf" if isinstance(value, list):
                parts = [negated(each, known, resolve=resolve, depth=depth + 1) for each in value]
                found += [{"allOf": [any_of(part) for part in parts]}] if all(parts) else []
            case "not":
                found.append(value)
            case _ if word in _OPPOSITES:
                found += _beyond(word, value)
            case _:
                raise NotNegatable
    return found


def any_of(alternatives: list[Any]) -> Any:
    """A schema of values that fit at least one."""
    if not alternatives or True in alternatives:
        return bool(alternatives)
    return alternatives[0] if len(alternatives) == 1 else {"anyOf": alternatives}


def _other_types(value: Any, known: Any) -> list[Any]:
    given, every = _kinds(value), _kinds(known)
    if every and every <= given:
        return []
    # Numbers that are no integers cannot be asked for.
    if not given or not given <= {*TYPES, "integer"} or ("integer" in given and "number" not in given):
        raise NotNegatable
    others = [each for each in TYPES if each not in given]
    return [{"type": others}] if others else []


def _kinds(value: Any) -> set[str]:
    kinds = {value} if isinstance(value, str) else set(map(str, value)) if isinstance(value, list) else set()
    return kinds | {"integer"} if "number" in kinds else kinds


def _other_values(values: Any, known: Mapping[str, Any]) -> list[Any]:
    if not isinstance(values, list):
        raise NotNegatable
    listed = set(map(key_of, values))
    every = [known["const"]] if "const" in known else known.get("enum")
    if isinstance(every, list):
        left = [each for each in every if key_of(each) not in listed]
        return [{"enum": left}] if left else []
    if not all(each is None or isinstance(each, bool) for each in values):
        raise NotNegatable
    left = [each for each in (None, False, True) if key_of(each) not in listed]
    return [{"type": [each for each in TYPES if each not in ("null", "boolean")]}, *([{"enum": left}] if left else [])]


def _other_properties(given: Mapping[str, Any], known: Mapping[str, Any], resolve: Resolve, depth: int) -> list[Any]:
    around = known.get("properties")
    found = list[Any]()
    for name, each in given.items():
        own = around.get(name, True) if isinstance(around, Mapping) else True
        others = negated(each, own, resolve=resolve, depth=depth + 1)
        if others:
            found.append({"type": "object", "required": [name], "properties": {name: any_of(others)}})
    return found


def _beyond(word: str, value: Any) -> list[Any]:
    kind, opposite, distance = _OPPOSITES[word]
    if isinstance(value, bool) or not isinstance(value, int | float) or (kind != "number" and value % 1):
        raise NotNegatable
    if opposite.startswith("max") and kind != "number" and value + distance < 0:
        return []
    return [{"type": kind, opposite: value + distance if kind != "number" else value}]


def key_of(value: Any) -> str:
    """The same text for equal JSON values: 1.0 is 1, and true is not. Raises NotNegatable for values that are nested
    deeply.
    """
    try:
        return json.dumps(_plain(value), sort_keys=True)
    except RecursionError:
        raise NotNegatable from None


def _plain(value: Any) -> Any:
    match value:
        case bool() | str() | None:
            return value
        case float() if value % 1 == 0:
            return int(value)
        case list():
            return [_plain(each) for each in value]
        case Mapping():
            return {name: _plain(each) for name, each in value.items()}
    return value
