"""Bounds the text that a grammar can force in one piece.

llguidance computes forced text in one call that holds Python's lock, and nothing limits it: `((a{1000}){1000}){1000}`
forces 62,004 tokens in 4 s. Bounds here are upper ones, linear in the size of the source. Where one exceeds
MAX_FORCED_BYTES, or is not known, the grammar forces nothing: it allows the same texts, token by token. No bound is
known of schemas that refer to themselves, and of those in which several schemas are about the members of one value: a
count in one of them multiplies what another one says of the items.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from decimal import Decimal
from math import inf
from typing import Any

from quire.structured.schema_references import SchemaRoot, groups_in_place

MAX_FORCED_BYTES = 16 << 10
"""Literal text takes 5 us a byte, an expression up to 66: at most 0.1 s."""

EXPRESSION_COST = 8
"""How much longer a byte of an expression counts."""

SCALAR_BYTES = 24
"""Bytes of a number, or of what stands around a value."""


def regex_bytes(pattern: str) -> float:
    """Bytes that an expression can force: its length, with what is repeated counted as often as it must be. Infinite
    for flags, which are not read here.
    """
    if _FLAGS.search(pattern):
        return inf
    sizes, last = [0.0], 0.0  # of the groups around, and of the last item
    place = 0
    while place < len(pattern):
        char = pattern[place]
        place += 1
        if char == "(":
            sizes.append(0.0)
        elif char == ")":
            if len(sizes) == 1:
                return inf
            last = sizes.pop()
            sizes[-1] += last
        elif char in "*+?":
            pass  # `last` stays: a count may follow
        elif (count := _COUNT.match(pattern, place - 1)) is not None:
            least = int(count[1][:12] or 0)
            sizes[-1] += last * max(0, least - 1)
            last *= max(1, least)
            place = count.end()
        else:
            if char == "[":
                place = _class_end(pattern, place - 1)
            elif char == "\\":
                braced = _BRACED.match(pattern, place - 1)
                place = braced.end() if braced is not None else place + 1
            last = 4.0
            sizes[-1] += last
    return sizes[0] * EXPRESSION_COST if len(sizes) == 1 else inf


_FLAGS = re.compile(r"\(\?(?![:P<])")

_BRACED = re.compile(r"\\[pPxuU]\{[^{}]*\}")
"""A character by its property or number."""

_COUNT = re.compile(r"\{\s*(\d*)\s*(?:,\s*\d*\s*)?\}")


def _class_end(pattern: str, place: int) -> int:
    """Past the bracket that ends a class: classes nest, and a bracket that comes first is a character."""
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
                break
    return place


def schema_bytes(schema: Any) -> float:
    """Bytes that a JSON Schema can force; see the module."""
    try:
        text = json.dumps(schema)
        has_other_roots = text.count('"$id": ') > (isinstance(schema, Mapping) and "$id" in schema)
        return inf if has_other_roots else _Schema(schema).size(schema)
    except RecursionError:
        return inf


_MEMBERS = frozenset(
    """items prefixItems additionalItems unevaluatedItems contains minItems minContains properties
    additionalProperties patternProperties unevaluatedProperties propertyNames required minProperties
    dependentRequired dependencies""".split()
)
"""Keywords about the members of a value."""

_UNKNOWN = object()
"""What a reference points to that is not found."""


class _Schema:
    """The sizes of a schema's subschemas, each computed once."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._references = SchemaRoot(root)
        self._known: dict[int, float] = {}
        self._about_members: dict[int, bool] = {}

    def size(self, own: Any) -> float:
        """Bytes that a subschema can force."""
        if own is _UNKNOWN:
            return inf
        if not isinstance(own, Mapping):
            return SCALAR_BYTES
        known = self._known.get(id(own))
        if known is None:
            self._known[id(own)] = inf  # what refers to itself finds this
            known = self._known[id(own)] = self._computed(own)
        return known

    def _computed(self, own: Mapping[str, Any]) -> float:
        groups = self._groups(own)
        if (not _MEMBERS.isdisjoint(own)) + sum(any(map(self._is_about_members, each)) for each in groups) > 1:
            return inf
        found = sum(max(map(self.size, each)) for each in groups) + _scalar(own)
        for word in ("prefixItems", "items", "contains", "propertyNames"):
            several = own.get(word, [])
            found += sum(map(self.size, several if isinstance(several, list) else [several]))
        others = [own[word] for word in ("items", "additionalItems", "unevaluatedItems") if word in own]
        least = max(1, _count(own, "minItems"), _count(own, "minContains"))
        return found + least * sum(self.size(each) for each in others) + self._object(own)

    def _object(self, own: Mapping[str, Any]) -> float:
        properties, patterns = own.get("properties"), own.get("patternProperties")
        listed = properties if isinstance(properties, Mapping) else {}
        if listed and isinstance(patterns, Mapping) and patterns:
            return inf  # a property may have both
        found = sum(_json_bytes(name) + self.size(each) for name, each in listed.items())
        if own.get("dependencies") or own.get("dependentRequired"):
            return inf
        required = own.get("required")
        further = [name for name in required if name not in listed] if isinstance(required, list) else []
        found += sum(map(_json_bytes, further))
        more = [own[word] for word in ("additionalProperties", "unevaluatedProperties") if word in own]
        others = sum(self.size(each) for each in more)
        if isinstance(patterns, Mapping):
            others += sum(regex_bytes(name) + self.size(each) for name, each in patterns.items())
        return found + max(1, len(further), _count(own, "minProperties")) * others

    def _groups(self, own: Mapping[str, Any]) -> list[list[Any]]:
        """As `groups_in_place`, with what a schema refers to."""
        found = groups_in_place(own)
        for word in ("$ref", "$dynamicRef"):
            if isinstance(reference := own.get(word), str):
                target = self._root if reference == "#" else self._references.resolve(reference)
                found.append([target if isinstance(target, Mapping | bool) else _UNKNOWN])
        return found

    def _is_about_members(self, own: Any) -> bool:
        """Whether a schema, or one about the same value in it, has keywords about members."""
        if not isinstance(own, Mapping):
            return own is _UNKNOWN
        if id(own) not in self._about_members:
            self._about_members[id(own)] = True  # for what refers to itself
            within = any(self._is_about_members(each) for group in self._groups(own) for each in group)
            self._about_members[id(own)] = within or not _MEMBERS.isdisjoint(own)
        return self._about_members[id(own)]


def _scalar(own: Mapping[str, Any]) -> float:
    """Bytes that a schema forces of a value without members, and of constants."""
    found = SCALAR_BYTES + _count(own, "minLength")
    limits = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
    found += max((_json_bytes(own[word]) for word in limits if word in own), default=0.0)
    if "const" in own:
        found += _json_bytes(own["const"])
    if isinstance(own.get("enum"), list):
        found += max(map(_json_bytes, own["enum"]), default=0.0)
    if isinstance(own.get("pattern"), str):
        found += regex_bytes(own["pattern"])
    return found


def _count(own: Mapping[str, Any], word: str) -> float:
    value = own.get(word, 0)
    return float(value) if isinstance(value, int | float) else 0.0


def _json_bytes(value: Any) -> float:
    """Not less than those of a value in UTF-8, with its numbers written in full."""
    match value:
        case float():
            return float(len(format(Decimal(repr(value)), "f")))
        case Mapping():
            return sum(_json_bytes(name) + _json_bytes(each) + 4 for name, each in value.items()) + 2
        case list():
            return sum(_json_bytes(each) + 2 for each in value) + 2
    return float(len(json.dumps(value)))
