"""The keywords that a draft of JSON Schema lacks. Under that draft they are annotations without effect."""

from __future__ import annotations

import re
from typing import Any

_DRAFT = re.compile(r"https?://json-schema\.org/(?:draft-0([3467])|draft/(2019-09|2020-12))/schema#?$")

_SINCE_2020 = frozenset({"prefixItems", "$dynamicRef", "$dynamicAnchor"})
_ONLY_2019 = frozenset({"$recursiveRef", "$recursiveAnchor"})
_SINCE_2019 = _ONLY_2019 | {
    "$anchor", "dependentRequired", "dependentSchemas", "maxContains", "minContains", "unevaluatedItems",
    "unevaluatedProperties",
}  # fmt: skip
_SINCE_7 = frozenset({"if", "then", "else"})
_SINCE_6 = frozenset({"const", "contains", "propertyNames"})

_UNKNOWN = {
    "3": _SINCE_2020 | _SINCE_2019 | _SINCE_7 | _SINCE_6, "4": _SINCE_2020 | _SINCE_2019 | _SINCE_7 | _SINCE_6,
    "6": _SINCE_2020 | _SINCE_2019 | _SINCE_7, "7": _SINCE_2020 | _SINCE_2019, "2019-09": _SINCE_2020,
    "2020-12": _ONLY_2019 | {"additionalItems"},
}  # fmt: skip


def drop_unknown_keywords(schema: dict[str, Any], declared: Any) -> None:
    """Drops the keywords that the draft in `$schema` lacks from one schema. Without `$schema`, all are kept."""
    draft = _DRAFT.match(declared) if isinstance(declared, str) else None
    for word in _UNKNOWN[draft[1] or draft[2]] & schema.keys() if draft else ():
        del schema[word]
