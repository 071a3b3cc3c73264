"""What a request may ask of the cache: the fields that several bodies have, their checks and their schemas."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, PlainValidator, WithJsonSchema

from quire.engine.params import MAX_PIN_SECONDS, MAX_SALT_CHARS, PIN_TIERS

_PIN_FORMS = (
    f"Must be true, false, a number of seconds from 0 to {MAX_PIN_SECONDS:.0f}, or an object with 'tier'"
    f" ({' or '.join(repr(tier) for tier in PIN_TIERS)}) and optionally 'seconds'"
)
_SECONDS = {"type": "number", "minimum": 0, "maximum": MAX_PIN_SECONDS}


def _is_seconds(value: Any) -> bool:
    # NaN and infinity are not JSON.
    return type(value) in (int, float) and 0 <= value <= MAX_PIN_SECONDS


def _pin(value: Any) -> bool | float | dict[str, Any] | None:
    if value is None or isinstance(value, bool) or _is_seconds(value):
        found: bool | float | None = value
        return found
    is_known = isinstance(value, dict) and value.keys() <= {"tier", "seconds"} and value.get("tier") in PIN_TIERS
    if is_known and _is_seconds(value.get("seconds", 0)):
        pin: dict[str, Any] = value
        return pin
    raise ValueError(_PIN_FORMS)


def _lifetime(value: Any) -> float | None:
    if value is None or _is_seconds(value):
        found: float | None = value
        return found
    raise ValueError(f"Must be a number of seconds from 0 to {MAX_PIN_SECONDS:.0f}")


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
