"""Rewrites keywords that llguidance does not support into keywords that it supports.

Each rule rewrites one schema in place, or leaves it unchanged. The same values fit before and after. A keyword that no
rule can rewrite stays, and llguidance refuses it by name. Subschemas are rewritten before the schemas that contain
them. A rule appends to the end of `allOf`. So a reference still points to the same schema, or to nothing: then it is
refused.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable
from typing import Any

from quire.structured.ecma_regex import to_rust
from quire.structured.negation import (
    ASSERTIONS,
    ENTRY_COST,
    MAX_DEPTH,
    TYPES,
    VISIT_COST,
    Negation,
    NotNegatable,
    RewriteBudget,
    any_of,
    canonical_json,
    measure_json,
)
from quire.structured.number_bounds import separate_bounds
from quire.structured.schema_references import SchemaRoot, groups_in_place

MAX_COPIED = 65_536
"""Characters of JSON that all rules together may copy within one schema."""

MAX_BUDGET = 200_000
"""Characters that rules may read and write in one schema; see RewriteBudget. They take about 0.1 s."""

MAX_GROWTH = 4
"""Maximum factor of a schema's growth, to which MAX_COPIED is added. Shared parts count each time."""

MAX_UNIQUE = 5
"""Maximum number of values of which `uniqueItems` lists all arrangements: 326."""

_IN_PLACE = frozenset(
    """$dynamicRef $recursiveRef $ref allOf anyOf contains dependencies dependentSchemas else if not oneOf
    then""".split()
)
"""Keywords whose subschemas apply to the same value, so that they count for `unevaluated...`."""

_REFERRED = re.compile(
    r'"\$(id|anchor|dynamicAnchor|recursiveRef)": |"\$(ref|dynamicRef)": "[^"]*/'
    r"(allOf|anyOf|oneOf|if|then|else|not|dependentSchemas|dependencies|x-|%)"
)
"""Matches the JSON of a schema in which a reference may point to a subschema that applies to the same value."""


class SchemaRewriter:
    """Applies the rules to one schema.

    root      the whole schema
    narrowed  ids of schemas without a complement; see Negation
    """

    def __init__(self, root: SchemaRoot, narrowed: set[int]) -> None:
        self._root = root
        self._targets: dict[str, Any] = {}
        self._left = MAX_COPIED
        self.narrowed = narrowed
        self.budget = RewriteBudget(MAX_BUDGET)
        self._negation = Negation(self.resolved, self.budget, narrowed)
        # The root's own $id is not a use of one of its parts.
        text = json.dumps({name: each for name, each in root.schema.items() if name != "$id"})
        self._most = MAX_GROWTH * len(text) + MAX_COPIED
        draft = str(root.schema.get("$schema"))
        self.is_old = re.match(r"https?://json-schema\.org/draft-0", draft) is not None
        self.is_newer = re.match(r"https?://json-schema\.org/draft/", draft) is not None
        self.is_one_resource = '"$id": ' not in text
        self.has_dynamic = '"$dynamicRef": ' in text or '"$recursiveRef": ' in text
        self._has_other_uses = _REFERRED.search(text) is not None
        self._around: dict[int, dict[str, Any]] = {}  # the enclosing schema for the same value
        self._known: dict[int, dict[str, Any]] = {}

    def apply(self, schemas: Iterable[dict[str, Any]]) -> None:
        """Applies all rules to the schemas, inner ones first. A rule without budget changes nothing. Raises
        SchemaTooLongError.
        """
        every = list(schemas)
        around = [] if self._has_other_uses else [own for own in every if not _IN_PLACE.isdisjoint(own)]
        for own in around:
            for each in itertools.chain.from_iterable(groups_in_place(own)):
                if isinstance(each, dict):
                    self._around.setdefault(id(each), own)  # copies share their parts, and come last
        given = [own for own in every if not _REWRITTEN.isdisjoint(own) and isinstance(own.get("allOf", []), list)]
        words = {word for own in given for word in own if word in _REWRITTEN}
        for rules in (FIRST_RULES, RULES):
            for own in given:
                for rule in rules:
                    with contextlib.suppress(NotNegatable):
                        rule(own, self)
        separate_bounds(every)
        if words and measure_json(self._root.schema, self._most).size > self._most:
            raise SchemaTooLongError(
                f"{', '.join(sorted(words))}: without them the schema has more than {self._most:,} characters"
            )

    def resolved(self, schema: Any) -> Any:
        """The target of a schema that is only a reference; any other schema unchanged."""
        for _ in range(8):
            if not (isinstance(schema, dict) and isinstance(schema.get("$ref"), str) and len(schema) == 1):
                return schema
            reference = schema["$ref"]
            if reference not in self._targets:
                self._targets[reference] = self._root.resolve(reference)
            schema = self._targets[reference]
        return None

    def known(self, own: dict[str, Any]) -> dict[str, Any]:
        """The constraints that values of a schema fit anyway: its own and those around it. Raises NotNegatable."""
        self.budget.spend(VISIT_COST)
        chain = [own]
        while id(chain[-1]) not in self._known and (outer := self._around.get(id(chain[-1]))) is not None:
            chain.append(outer)
        found = self._known.get(id(chain[-1]), {})
        for each in reversed(chain):
            if each.keys() & {"type", "const", "enum", "properties"}:
                inner, outer = each.get("properties"), found.get("properties", {})
                found = {**found, **{word: each[word] for word in ("type", "const", "enum") if word in each}}
                found["properties"] = outer
                if isinstance(inner, dict) and inner:
                    self.budget.spend(4 * (len(outer) + len(inner)))
                    found["properties"] = {**outer, **inner}
            self._known[id(each)] = found
        return found

    def negated(self, schema: Any, own: dict[str, Any] | None = None) -> list[Any]:
        """The complement of a schema, for values that fit `own` anyway. Raises NotNegatable."""
        return self._negation.of(schema, True if own is None else self.known(own))

    def may_copy(self, schema: Any, times: int = 1) -> bool:
        """Whether a schema may be copied `times` times. A schema with a name of its own may not."""
        if self._left <= 0:
            return False
        size, is_named = measure_json(schema, self._left)
        self._left -= size * times
        return self._left > 0 and not is_named


class SchemaTooLongError(ValueError):
    """A schema is too long after its keywords were rewritten. The message begins with these keywords."""


Rule = Callable[[dict[str, Any], SchemaRewriter], None]


def _also(own: dict[str, Any], *more: Any) -> None:
    """Adds requirements to a schema."""
    own["allOf"] = [*own.get("allOf", []), *more]


def _is_true(schema: Any) -> bool:
    return schema is True or (isinstance(schema, dict) and not ASSERTIONS & schema.keys())


def _is_false(schema: Any) -> bool:
    parts = schema.get("allOf") if isinstance(schema, dict) else None
    return schema is False or (isinstance(parts, list) and any(each is False for each in parts))


def _count(value: Any, default: int) -> int:
    is_count = isinstance(value, int | float) and not isinstance(value, bool) and value % 1 == 0
    return int(value) if is_count else default


def _others(kind: str) -> dict[str, Any]:
    return {"type": [each for each in TYPES if each != kind]}


def drop_no_op_keywords(own: dict[str, Any], _: SchemaRewriter) -> None:
    """Drops keywords whose values have no effect."""
    if own.get("uniqueItems") is False:
        del own["uniqueItems"]
    if "not" in own and _is_false(own["not"]):
        del own["not"]
    for word in ("unevaluatedItems", "unevaluatedProperties"):
        if word in own and _is_true(own[word]):
            del own[word]
    if "if" not in own:
        own.pop("then", None)
        own.pop("else", None)
    if "contains" not in own:
        own.pop("minContains", None)
        own.pop("maxContains", None)


def rewrite_dynamic_references(own: dict[str, Any], rewriter: SchemaRewriter) -> None:
    """Makes dynamic references static if the scope cannot matter: with one resource, or without dynamic references."""
    if rewriter.is_one_resource or not rewriter.has_dynamic:
        for word, plain in (("$dynamicRef", "$ref"), ("$recursiveRef", "$ref"), ("$dynamicAnchor", "$anchor")):
            if isinstance(own.get(word), str) and plain not in own:
                own[plain] = own.pop(word)
        if isinstance(own.get("$recursiveAnchor"), bool):
            del own["$recursiveAnchor"]
    # Up to draft 7 this is an anchor; later it has no meaning.
    anchor = own.get("$id")
    if not rewriter.is_old and isinstance(anchor, str) and anchor[:1] == "#" != anchor and "$anchor" not in own:
        own["$anchor"] = own.pop("$id")[1:]


def rewrite_unevaluated(own: dict[str, Any], rewriter: SchemaRewriter) -> None:
    """Rewrites `unevaluatedProperties` and `unevaluatedItems` if the evaluated part does not depend on the value."""
    if "unevaluatedProperties" in own and not (own.keys() & (_IN_PLACE - {"allOf", "$ref"})):
        names, patterns = dict[str, Any](), dict[str, Any]()
        is_known, is_all = _evaluated(own, rewriter, names, patterns, 0)
        if is_all:
            del own["unevaluatedProperties"]
        elif is_known:
            own["properties"] = {**own.get("properties", {}), **names, **own.get("properties", {})}
            if patterns:
                own["patternProperties"] = {**patterns, **own.get("patternProperties", {})}
            own["additionalProperties"] = own.pop("unevaluatedProperties")
    if "unevaluatedItems" in own and not own.keys() & _IN_PLACE:
        rest = "additionalItems" if isinstance(own.get("items"), list) else "items"
        own.setdefault(rest, own["unevaluatedItems"])
        del own["unevaluatedItems"]


def _evaluated(
    own: Any, rewriter: SchemaRewriter, names: dict[str, Any], patterns: dict[str, Any], depth: int
) -> tuple[bool, bool]:
    """Adds the names and the patterns of names that a schema evaluates. Returns whether these are known, and whether
    the schema evaluates all names.
    """
    rewriter.budget.spend(VISIT_COST)
    if isinstance(own, bool) or depth > 8:
        return isinstance(own, bool), False
    properties, own_patterns = own.get("properties", {}), own.get("patternProperties", {})
    parts = own.get("allOf", [])
    if not all(isinstance(each, dict) for each in (properties, own_patterns)) or not isinstance(parts, list):
        return False, False
    inner = {"unevaluatedProperties"} if depth else set()
    if own.keys() & ({"additionalProperties"} | inner):
        return True, True
    if own.keys() & (_IN_PLACE - {"allOf", "$ref", "not", "contains"}):
        return False, False
    rewriter.budget.spend_on([[*properties], [*own_patterns]])
    names.update(dict.fromkeys(properties, True))
    patterns.update(dict.fromkeys(own_patterns, True))
    found = [_evaluated(each, rewriter, names, patterns, depth + 1) for each in parts]
    if "$ref" in own:
        target = rewriter.resolved({"$ref": own["$ref"]})
        found.append((False, False) if target is None else _evaluated(target, rewriter, names, patterns, depth + 1))
    return all(known for known, _ in found), all(known for known, _ in found) and any(every for _, every in found)


def rewrite_contains(own: dict[str, Any], rewriter: SchemaRewriter) -> None:
    """Rewrites `contains`: with any schema it counts items; with an unsatisfiable schema it excludes arrays."""
    if "contains" not in own or (rewriter.is_old and {"minContains", "maxContains"} & own.keys()):
        return
    least, most = _count(own.get("minContains"), 1), _count(own.get("maxContains"), -1)
    if least == 0 and "maxContains" not in own:
        more: dict[str, Any] = {}
    elif _is_true(own["contains"]):
        more = {"minItems": least} if most < 0 else {"minItems": least, "maxItems": most}
    elif _is_false(own["contains"]):
        more = _others("array") if least > 0 else {}
    else:
        return
    for word in ("contains", "minContains", "maxContains"):
        own.pop(word, None)
    if more:
        _also(own, more)


def rewrite_property_names(own: dict[str, Any], rewriter: SchemaRewriter) -> None:
    """Rewrites `propertyNames`: listed names become properties, an expression `patternProperties`, others false."""
    if "propertyNames" not in own:
        return
    names, patterns = rewriter.resolved(own["propertyNames"]), own.get("patternProperties")
    if isinstance(names, dict) and "type" in names:
        rewriter.budget.spend_on([names["type"], [*names]])
        kinds = names["type"] if isinstance(names["type"], list) else [names["type"]]
        names = {word: each for word, each in names.items() if word != "type"} if "string" in kinds else False
    if _is_true(names):
        del own["propertyNames"]
        return
    properties, rest = own.get("properties", {}), own.get("additionalProperties", True)
    if patterns or not isinstance(properties, dict) or own.keys() & {"unevaluatedProperties"}:
        return
    listed = _listed(names, rewriter)
    if listed is not None and (isinstance(rest, bool) or rewriter.may_copy(rest, len(listed))):
        own["properties"] = {name: each for name, each in properties.items() if name in listed}
        own["properties"].update({name: rest for name in listed if name not in properties})
    elif listed is None and not properties and (expression := _expression_of(names)) is not None:
        own["patternProperties"] = {expression: rest}
    else:
        return
    own["additionalProperties"] = False
    del own["propertyNames"]


def _listed(names: Any, rewriter: SchemaRewriter, depth: int = 0) -> dict[str, None] | None:
    """The names that a schema lists; None if it lists none."""
    rewriter.budget.spend(VISIT_COST)
    names = rewriter.resolved(names)
    if depth > MAX_DEPTH:
        return None
    if _is_false(names):
        return {}
    words = ASSERTIONS & names.keys() - {"type"} if isinstance(names, dict) else set()
    match sorted(words):
        case ["const"]:
            values = [names["const"]]
        case ["enum"] if isinstance(names["enum"], list):
            values = names["enum"]
        case ["anyOf"] if isinstance(names["anyOf"], list):
            parts = [_listed(each, rewriter, depth + 1) for each in names["anyOf"]]
            return None if None in parts else {name: None for part in parts for name in part or ()}
        case _:
            return None
    rewriter.budget.spend_on(values)
    rewriter.budget.spend(ENTRY_COST * len(values))
    return {value: None for value in values if isinstance(value, str)}


def _expression_of(names: Any) -> str | None:
    """The expression, in Rust's syntax, for the names that a schema allows; None if unknown."""
    if not isinstance(names, dict):
        return None
    words = ASSERTIONS & names.keys()
    if words == {"pattern"} and isinstance(names["pattern"], str):
        return names["pattern"]
    counts = [names[word] for word in ("minLength", "maxLength") if word in names]
    if words <= {"minLength", "maxLength"} and all(_count(each, -1) >= 0 for each in counts):
        most = _count(names["maxLength"], 0) if "maxLength" in names else ""
        return to_rust(f"^[^]{{{_count(names.get('minLength'), 0)},{most}}}$").rust
    return None


def rewrite_dependencies(own: dict[str, Any], rewriter: SchemaRewriter) -> None:
    """Rewrites dependencies of a property: either it is missing, or its dependency holds."""
    found: list[Any] = []
    for word in ("dependentRequired", "dependentSchemas", "dependencies"):
        given = own.get(word)
        if not isinstance(given, dict) or not all(isinstance(each, bool | dict | list) for each in given.values()):
            continue
        if word == "dependencies" and rewriter.is_newer:
            rewriter.narrowed.add(id(own))  # from draft 2019-09 on, implementations may ignore it
        for name, each in own.pop(word).items():
            wanted = {"required": each} if isinstance(each, list) else each
            if wanted != {"required": []} and not _is_true(wanted):
                found.append(any_of([{"properties": {name: False}}, *([] if _is_false(wanted) else [wanted])]))
    if found:
        _also(own, *found)


def rewrite_if_then_else(own: dict[str, Any], rewriter: SchemaRewriter) -> None:
    """Rewrites `if`: `then` holds or the condition does not; `else` holds or the condition does."""
    if "if" not in own:
        return
    condition, then, other = own["if"], own.get("then", True), own.get("else", True)
    opposite = [] if _is_true(then) else rewriter.negated(condition, own)
    if not rewriter.may_copy(condition):
        return
    for word in ("if", "then", "else"):
        own.pop(word, None)
    if not _is_true(then):
        _also(own, any_of([*opposite, then]))
    if not _is_true(other):
        _also(own, any_of([condition, other]))


def rewrite_not(own: dict[str, Any], rewriter: SchemaRewriter) -> None:
    """Rewrites `not` with the complements of the keywords in it."""
    if "not" not in own:
        return
    opposite = rewriter.negated(own["not"], own)
    if rewriter.may_copy(own["not"]):
        del own["not"]
        _also(own, any_of(opposite))


def rewrite_one_of(own: dict[str, Any], rewriter: SchemaRewriter) -> None:
    """Rewrites `oneOf` of alternatives that may overlap: one of them, and the complements of all others."""
    given = own.get("oneOf")
    if not isinstance(given, list) or not 1 < len(given) <= 16 or isinstance(own.get("discriminator"), dict):
        return
    if _have_own_types(given) or not rewriter.may_copy(given, len(given)):
        return
    opposites = [rewriter.negated(each) for each in given]
    if not rewriter.may_copy(opposites, len(given)):
        return
    found = []
    for place, each in enumerate(given):
        others = [any_of(opposite) for number, opposite in enumerate(opposites) if number != place]
        if False not in (each, *others):
            found.append({"allOf": [each, *others]})
    del own["oneOf"]
    _also(own, any_of(found))


def _have_own_types(alternatives: list[Any]) -> bool:
    """Whether no two schemas have a type in common."""
    seen = set[str]()
    for each in alternatives:
        given = each.get("type") if isinstance(each, dict) else None
        kinds = {given} if isinstance(given, str) else set(given) if isinstance(given, list) else {*TYPES}
        kinds = {"number" if kind == "integer" else kind for kind in kinds if isinstance(kind, str)}
        if seen & kinds:
            return False
        seen |= kinds
    return True


def rewrite_unique_items(own: dict[str, Any], rewriter: SchemaRewriter) -> None:
    """Rewrites `uniqueItems` if there is at most one item, or if items have only a few possible values."""
    if own.get("uniqueItems") is not True:
        return
    if _count(own.get("maxItems"), 2) <= 1:
        del own["uniqueItems"]
        return
    values = _values(rewriter.resolved(own.get("items")))
    if values is None or len(values) > MAX_UNIQUE or own.get("prefixItems"):
        return
    rewriter.budget.spend_on(values)
    values = list({canonical_json(value): value for value in values}.values())
    counts = range(_count(own.get("minItems"), 0), min(_count(own.get("maxItems"), len(values)), len(values)) + 1)
    if rewriter.may_copy(values, sum(math.perm(len(values), count) for count in counts)):
        lists = [list(each) for count in counts for each in itertools.permutations(values, count)]
        del own["uniqueItems"]
        _also(own, any_of([_others("array"), *([{"enum": lists}] if lists else [])]))


def _values(schema: Any) -> list[Any] | None:
    """All values of a schema that only lists values; None if there are too many."""
    words = ASSERTIONS & schema.keys() if isinstance(schema, dict) else set()
    if words in ({"enum"}, {"enum", "type"}) and isinstance(schema["enum"], list):
        is_text = all(isinstance(each, str) for each in schema["enum"])
        return schema["enum"] if "type" not in words or (schema["type"] == "string" and is_text) else None
    return [False, True] if words == {"type"} and schema["type"] == "boolean" else None


FIRST_RULES: tuple[Rule, ...] = (rewrite_dynamic_references, rewrite_unevaluated)
"""Rules that run first: other rules change which members count as evaluated."""

RULES: tuple[Rule, ...] = (
    drop_no_op_keywords, rewrite_contains, rewrite_property_names, rewrite_dependencies, rewrite_if_then_else,
    rewrite_not, rewrite_one_of, rewrite_unique_items,
)  # fmt: skip

_REWRITTEN = frozenset(
    """$anchor $dynamicAnchor $dynamicRef $id $recursiveAnchor $recursiveRef contains dependencies dependentRequired
    dependentSchemas else if maxContains minContains not oneOf propertyNames then unevaluatedItems unevaluatedProperties
    uniqueItems""".split()
)
"""Keywords that rules rewrite."""
