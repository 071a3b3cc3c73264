"""Bounds the text that a grammar can force in one piece.

llguidance computes forced text in one call that holds Python's lock, and nothing limits it: `((a{1000}){1000}){1000}`
forces 62,004 tokens in 4 s. Bounds here are upper ones, linear in the size of the source. Where one exceeds
MAX_FORCED_BYTES, or is not known, the grammar forces nothing: it allows the same texts, token by token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from math import inf
from typing import Any

from quire.engine.schemas import pointed

MAX_FORCED_BYTES = 16 << 10
"""Literal text takes 5 us a byte, an expression up to 66: at most 0.1 s."""

EXPRESSION_COST = 8
"""How much longer a byte of an expression counts."""

SCALAR_BYTES = 24
"""Bytes of a number, or of what stands around a value."""


def regex_bytes(pattern: str) -> float:
    """Bytes that an expression can force: its length, with what is repeated counted as often as it must be."""
    sizes, last = [0.0], 0.0  # of the groups around, and of the last item
    place = 0
    while place < len(pattern):
        char = pattern[place]
        if char == "(":
            sizes.append(0.0)
            place, last = place + 1, 0.0
        elif char == ")":
            if len(sizes) == 1:
                return inf
            last = sizes.pop()
            sizes[-1] += last
            place += 1
        elif (count := _COUNT.match(pattern, place)) is not None:
            least = int(count[1][:12] or 0)
            sizes[-1] += last * max(0, least - 1)
            last *= max(1, least)
            place = count.end()
        else:
            end = place + 1
            if char == "[":
                end = _class_end(pattern, place)
            elif char == "\\":
                end = place + 2
            last = 4.0
            sizes[-1] += last
            place = end
    return sizes[0] * EXPRESSION_COST if len(sizes) == 1 else inf


_COUNT = re.compile(r"\{\s*(\d*)\s*(?:,\s*\d*\s*)?\}")


def _class_end(pattern: str, place: int) -> int:
    """Past the bracket that ends a class; classes nest in some syntaxes, and ending early only counts more."""
    place += 1 + pattern.startswith("^", place + 1)
    place += pattern.startswith("]", place)
    while place < len(pattern) and pattern[place] != "]":
        place += 2 if pattern[place] == "\\" else 1
    return place + 1


def schema_bytes(schema: Any) -> float:
    """Bytes that a JSON Schema can force. Infinite where it refers to itself."""
    try:
        return _Schema(schema).size(schema)
    except RecursionError:
        return inf


class _Schema:
    """The sizes of a schema's subschemas, each computed once."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._known: dict[int, float] = {}

    def size(self, own: Any) -> float:
        """Bytes that a subschema can force."""
        if not isinstance(own, Mapping):
            return SCALAR_BYTES
        known = self._known.get(id(own))
        if known is None:
            self._known[id(own)] = inf  # what refers to itself finds this
            known = self._known[id(own)] = self._computed(own)
        return known

    def _computed(self, own: Mapping[str, Any]) -> float:
        found = SCALAR_BYTES + _count(own, "minLength")
        if "const" in own:
            found += _json_bytes(own["const"])
        if isinstance(own.get("enum"), list):
            found += max(map(_json_bytes, own["enum"]), default=0.0)
        if isinstance(own.get("pattern"), str):
            found += regex_bytes(own["pattern"])
        if isinstance(reference := own.get("$ref", own.get("$dynamicRef")), str):
            target = self._root if reference == "#" else pointed(reference, self._root)
            found += self.size(target) if isinstance(target, Mapping | bool) else inf
        for word in ("allOf", "prefixItems", "items"):
            if isinstance(several := own.get(word), list):
                found += sum(map(self.size, several))
        for word in ("anyOf", "oneOf"):
            if isinstance(several := own.get(word), list):
                found += max(map(self.size, several), default=0.0)
        for word in ("if", "then", "else", "not", "contains", "propertyNames"):
            if word in own:
                found += self.size(own[word])
        items = [own[word] for word in ("items", "additionalItems", "unevaluatedItems") if word in own]
        found += max(1, _count(own, "minItems")) * sum(self.size(each) for each in items if not isinstance(each, list))
        return found + self._object(own)

    def _object(self, own: Mapping[str, Any]) -> float:
        found, properties = 0.0, own.get("properties")
        for word in ("properties", "dependentSchemas", "dependencies"):
            if isinstance(named := own.get(word), Mapping):
                found += sum(_json_bytes(name) + self.size(each) for name, each in named.items())
        listed = properties if isinstance(properties, Mapping) else {}
        required = own.get("required")
        further = [name for name in required if name not in listed] if isinstance(required, list) else []
        found += sum(map(_json_bytes, further))
        more = [own[word] for word in ("additionalProperties", "unevaluatedProperties") if word in own]
        others = sum(self.size(each) for each in more)
        if isinstance(patterns := own.get("patternProperties"), Mapping):
            others += sum(regex_bytes(name) + self.size(each) for name, each in patterns.items())
        return found + max(1, len(further), _count(own, "minProperties")) * others


def _count(own: Mapping[str, Any], word: str) -> float:
    value = own.get(word, 0)
    return float(value) if isinstance(value, int | float) else 0.0


def _json_bytes(value: Any) -> float:
    return float(len(json.dumps(value)))  # not less than in UTF-8


def lark_bytes(text: str) -> float:
    """Bytes that a grammar in Lark's syntax can force. Infinite for counted repetitions, rules that refer to themselves
    and whatever is not plain: rules of strings, expressions, JSON Schemas, tokens and other rules.
    """
    rules = _rules(text)
    try:
        return _Lark(rules).size("start") if rules is not None else inf
    except RecursionError:
        return inf


_Rule = list[list[float | str]]
"""Alternatives, each a list of sizes and of names of rules."""

_LARK_TOKEN = re.compile(
    r"""(?P<space>\s+|//[^\n]*)
    |(?P<string>"(?:[^"\\\n]|\\.)*"i?)
    |(?P<regex>/(?:[^/\\\n]|\\.)+/[a-z]*)
    |(?P<json>%json\b)|(?P<options>%llguidance\b)
    |(?P<mark><[^>\n]*>)
    |(?P<rule>(?<![^\n])[!?]?(?P<head>[A-Za-z_]\w*)[ \t]*(?:\[[^\]\n]*\][ \t]*)?:)
    |(?P<name>@?[A-Za-z_]\w*)
    |(?P<minus>~(?=[ \t]*[/(A-Za-z_"]))
    |(?P<sign>[|()*+?&\[\]])""",
    re.VERBOSE,
)
_DECODER = json.JSONDecoder()


def _rules(text: str) -> dict[str, _Rule] | None:
    """The rules of a grammar; None if there is something else."""
    rules: dict[str, _Rule] = {}
    own: _Rule = [[]]
    place = depth = 0
    while place < len(text):
        token = _LARK_TOKEN.match(text, place)
        if token is None:
            return None
        place, kind, word = token.end(), token.lastgroup, token[0]
        if token["rule"] is not None:
            own = rules[token["head"]] = [[]]
        elif kind in ("json", "options"):
            try:
                value, place = _DECODER.raw_decode(text, _blank_end(text, place))
            except ValueError:
                return None
            own[-1].append(schema_bytes(value) if kind == "json" else 0.0)
        elif kind == "string":
            own[-1].append(1.0 * len(word.encode(errors="replace")))
        elif kind == "regex":
            own[-1].append(regex_bytes(word[1 : word.rindex("/")]))
        elif kind == "mark":
            own[-1].append(float(SCALAR_BYTES))
        elif kind == "name":
            own[-1].append(word)
        elif kind == "sign":
            depth += (word in "([") - (word in ")]")
            if word == "|" and not depth:
                own.append([])
    return rules


def _blank_end(text: str, place: int) -> int:
    while place < len(text) and text[place].isspace():
        place += 1
    return place


class _Lark:
    """The sizes of a grammar's rules, each computed once."""

    def __init__(self, rules: Mapping[str, _Rule]) -> None:
        self._rules = rules
        self._known: dict[str, float] = {}

    def size(self, name: str) -> float:
        """Bytes that a rule can force."""
        if name not in self._known:
            self._known[name] = inf
            alternatives = self._rules.get(name)
            if alternatives is not None:
                self._known[name] = max(
                    sum(each if isinstance(each, float) else self.size(each) for each in items)
                    for items in alternatives
                )
        return self._known[name]
