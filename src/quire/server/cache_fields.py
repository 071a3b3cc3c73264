"""The cache hints of a request: the fields that several bodies have, their checks and their schemas."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, PlainValidator, WithJsonSchema

from quire.engine.params import MAX_PIN_SECONDS, MAX_SALT_CHARS, PIN_FORMS, PIN_TIERS, SECONDS, CacheHints
from quire.errors import RequestError

_SECONDS = {"type": "number", "minimum": 0, "maximum": MAX_PIN_SECONDS}


def _pin(value: Any) -> bool | float | dict[str, Any] | None:
    try:
        CacheHints(cache_pin=value)
    except RequestError:
        raise ValueError(f"Must be {PIN_FORMS}") from None
    found: bool | float | dict[str, Any] | None = value
    return found


def _lifetime(value: Any) -> float | None:
    try:
        return CacheHints(cache_lifetime=value).cache_lifetime
    except RequestError:
        raise ValueError(f"Must be {SECONDS}") from None


Salt = Annotated[
    Annotated[str, Field(max_length=MAX_SALT_CHARS)] | None,
    Field(description="Extension: only requests with an equal salt share cached prefixes; empty by default."),
]
Pin = Annotated[
    bool | float | dict[str, Any] | None,
    PlainValidator(_pin),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "boolean"},
                _SECONDS,
                {
                    "type": "object",
                    "properties": {"tier": {"enum": list(PIN_TIERS)}, "seconds": _SECONDS},
                    "required": ["tier"],
                    "additionalProperties": False,
                },
                {"type": "null"},
            ],
            "description": "Extension: pin the prompt's whole chunks of 64 tokens in the cache for this many seconds or"
            " without a time limit (true). A pin protects them from eviction; 0 or false ends it. With `tier` `disk`"
            " they are pinned on the disk of tiers.disk.",
        }
    ),
]
Priority = Annotated[
    Annotated[int, Field(ge=-100, le=100)] | None,
    Field(
        description="Extension: cached chunks of a lower priority are evicted first; 0 by default. A chunk has the"
        " highest priority of its requests."
    ),
]
Lifetime = Annotated[
    float | None,
    PlainValidator(_lifetime),
    WithJsonSchema(
        {
            "anyOf": [_SECONDS, {"type": "null"}],
            "description": "Extension: seconds without use after which the prompt's cached chunks are dropped; 0: with"
            " the request. Such chunks are not copied to a disk.",
        }
    ),
]
