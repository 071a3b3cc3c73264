"""Complements of JSON Schemas: a value fits the complement of a schema if and only if it does not fit the schema."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

TYPES = ("null", "boolean", "string", "number", "array", "object")
"""All types of values. Integers count as numbers."""

MAX_DEPTH = 12
"""Maximum nesting of a negated schema."""

VISIT_COST = 24
"""Cost of a visited schema in characters: some 5 us, the time to write and to reread them."""

ENTRY_COST = 48
"""Characters in the complement of one property or of one required name."""

_NAMES = frozenset({"$id", "$anchor", "$dynamicAnchor"})

ASSERTIONS = frozenset(
    """$dynamicRef $recursiveRef $ref additionalItems additionalProperties allOf anyOf const contains dependencies
    dependentRequired dependentSchemas else enum exclusiveMaximum exclusiveMinimum format if items maxContains maxItems
    maxLength maxProperties maximum minContains minItems minLength minProperties minimum multipleOf not oneOf pattern
    patternProperties prefixItems properties propertyNames required then type unevaluatedItems unevaluatedProperties
    uniqueItems""".split()
)
"""Keywords that influence which values fit. All others are annotations."""

_OPPOSITES = {
    "minimum": ("number", "exclusiveMaximum", 0), "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0), "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1), "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1), "maxItems": ("array", "minItems", 1),
}  # fmt: skip
"""For each bound: the type that it constrains, the keyword of the opposite bound, and the distance of the numbers."""


class NotNegatable(Exception):
    """llguidance has no keywords for the complement, or the budget is spent."""


class RewriteBudget:
    """Bounds the time and the memory of rewriting one schema.

    left  characters of JSON that may still be read or written; each visited schema also counts VISIT_COST
    """

    def __init__(self, left: int) -> None:
        self.left = left

    def spend(self, amount: int) -> None:
        """Counts work before it is done. Raises NotNegatable when the budget is spent."""
        self.left -= amount
        if self.left < 0:
            raise NotNegatable

    def spend_on(self, value: Any) -> None:
        """Counts the characters of a value's JSON. Raises NotNegatable when the budget is spent."""
        self.spend(measure_json(value, max(self.left, 0)).size)


class JsonSize(NamedTuple):
    """The approximate length of a value's JSON. is_named: whether a name in it makes it a target of references."""

    size: int
    is_named: bool


def measure_json(value: Any, most: int) -> JsonSize:
    """Measures a value. Stops at `most` characters: with shared parts, a small value can have a JSON of any length."""
    size, is_named, todo = 0, False, [value]
    while todo and size <= most:
        each = todo.pop()
        if isinstance(each, Mapping):
            size += 2 + 6 * len(each) + sum(map(len, each))
            is_named = is_named or not _NAMES.isdisjoint(each)
            todo += each.values()
        elif isinstance(each, list):
            size += 2 + 2 * len(each)
            todo += each
        else:
            size += len(each) + 2 if isinstance(each, str) else 5
    return JsonSize(size, is_named)


class Negation:
    """Computes complements of schemas.

    resolve   returns the target of a schema that is only a reference; other schemas unchanged
    budget    spent on each visited schema and on all written ones
    narrowed  ids of schemas that no longer match exactly the values their author asked for, so that their complement
              would be wrong
    """

    def __init__(self, resolve: Callable[[Any], Any], budget: RewriteBudget, narrowed: set[int]) -> None:
        self._resolve = resolve
        self._budget = budget
        self._narrowed = narrowed

    def of(self, schema: Any, known: Any = True, depth: int = 0) -> list[Any]:
        """The complement as a list of alternatives: a value fits at least one of them if and only if it does not fit
        the schema. An empty list: all values fit the schema. known: a schema that all values fit anyway; its `enum`
        allows the complement of a `const` to list the remaining values. Raises NotNegatable.
        """
        self._budget.spend(VISIT_COST)
        schema, known = self._resolve(schema), self._resolve(known)
        if isinstance(schema, bool):
            return [] if schema else [True]
        if not isinstance(schema, Mapping) or depth > MAX_DEPTH or id(schema) in self._narrowed:
            raise NotNegatable
        around = known if isinstance(known, Mapping) else {}
        found: list[Any] = []
        for word in sorted(ASSERTIONS & schema.keys()):
            found += self._of_keyword(word, schema[word], around, depth)
        return found

    def _of_keyword(self, word: str, value: Any, around: Mapping[str, Any], depth: int) -> list[Any]:
        match word:
            case "type":
                self._budget.spend_on([value, around.get("type")])
                return _other_types(value, around.get("type"))
            case "const" | "enum":
                return self._other_values([value] if word == "const" else value, around)
            case "required" if isinstance(value, list) and all(isinstance(each, str) for each in value):
                self._budget.spend_on(value)
                self._budget.spend(ENTRY_COST * len(value))
                return [{"type": "object", "properties": {name: False}} for name in value]
            case "properties" if isinstance(value, Mapping):
                return self._other_properties(value, around, depth)
            case "allOf" if isinstance(value, list):
                return [other for each in value for other in self.of(each, around, depth + 1)]
            case "anyOf" if isinstance(value, list):
                parts = [self.of(each, around, depth + 1) for each in value]
                return [{"allOf": [any_of(part) for part in parts]}] if all(parts) else []
            case "not":
                self._budget.spend_on(value)
                return [value]
            case _ if word in _OPPOSITES:
                return _beyond(word, value)
        raise NotNegatable

    def _other_values(self, values: Any, known: Mapping[str, Any]) -> list[Any]:
        if not isinstance(values, list):
            raise NotNegatable
        every = [known["const"]] if "const" in known else known.get("enum")
        self._budget.spend_on([values, every])
        self._budget.spend(VISIT_COST * (len(values) + (len(every) if isinstance(every, list) else 0)))
        listed = set(map(canonical_json, values))
        if isinstance(every, list):
            left = [each for each in every if canonical_json(each) not in listed]
            return [{"enum": left}] if left else []
        if not all(each is None or isinstance(each, bool) for each in values):
            raise NotNegatable
        left = [each for each in (None, False, True) if canonical_json(each) not in listed]
        others = [each for each in TYPES if each not in ("null", "boolean")]
        return [{"type": others}, *([{"enum": left}] if left else [])]

    def _other_properties(self, given: Mapping[str, Any], known: Mapping[str, Any], depth: int) -> list[Any]:
        around = known.get("properties")
        found = list[Any]()
        for name, each in given.items():
            own = around.get(name, True) if isinstance(around, Mapping) else True
            self._budget.spend(2 * len(name) + ENTRY_COST)
            others = self.of(each, own, depth + 1)
            if others:
                found.append({"type": "object", "required": [name], "properties": {name: any_of(others)}})
        return found


def any_of(alternatives: list[Any]) -> Any:
    """A schema for values that fit at least one alternative."""
    if not alternatives or True in alternatives:
        return bool(alternatives)
    return alternatives[0] if len(alternatives) == 1 else {"anyOf": alternatives}


def _other_types(value: Any, known: Any) -> list[Any]:
    given, every = _kinds(value), _kinds(known)
    if every and every <= given:
        return []
    # No keyword describes numbers that are not integers.
    if not given or not given <= {*TYPES, "integer"} or ("integer" in given and "number" not in given):
        raise NotNegatable
    others = [each for each in TYPES if each not in given]
    return [{"type": others}] if others else []


def _kinds(value: Any) -> set[str]:
    kinds = {value} if isinstance(value, str) else set(map(str, value)) if isinstance(value, list) else set()
    return kinds | {"integer"} if "number" in kinds else kinds


def _beyond(word: str, value: Any) -> list[Any]:
    kind, opposite, distance = _OPPOSITES[word]
    if isinstance(value, bool) or not isinstance(value, int | float) or (kind != "number" and value % 1):
        raise NotNegatable
    if opposite.startswith("max") and kind != "number" and value + distance < 0:
        return []
    return [{"type": kind, opposite: value + distance if kind != "number" else value}]


def canonical_json(value: Any) -> str:
    """The same text for equal JSON values: 1.0 equals 1, and true does not. Raises NotNegatable for deeply nested
    values.
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
