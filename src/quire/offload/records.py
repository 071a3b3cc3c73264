"""Dataclasses from JSON objects: every value is checked, and every error names the field."""

from __future__ import annotations

import dataclasses
import itertools
import math
import types
import typing
from typing import Any, TypeVar

from quire.errors import ConfigError

Made = TypeVar("Made")


def made(kind: type[Made], fields: Any, at: str) -> Made:
    """A dataclass from a JSON object with exactly its fields; those with defaults may be missing.

    at  name of the object, for errors; empty for a whole file
    Raises ConfigError that names the field.
    """
    if not isinstance(fields, dict):
        raise ConfigError(f"{at or 'profile'} is {fields!r:.60}; it must be an object")
    assert dataclasses.is_dataclass(kind)
    hints, known = typing.get_type_hints(kind), {field.name: field for field in dataclasses.fields(kind)}
    unknown = [name for name in fields if name not in known]
    if unknown:
        raise ConfigError(f"unknown field {_below(at, unknown[0])!r}")
    for name, field in known.items():
        if name not in fields and field.default is dataclasses.MISSING:
            raise ConfigError(f"{_below(at, name)} is missing")
    values = {name: _value(hints[name], value, _below(at, name)) for name, value in fields.items()}
    try:
        found: Made = kind(**values)
    except ConfigError as error:
        raise ConfigError(f"{at}: {error}" if at else str(error)) from None
    return found


def _value(hint: Any, value: Any, at: str) -> Any:
    """A JSON value as a field of the type. Raises ConfigError that names the field."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return made(typing.cast("type[Any]", hint), value, at)
    if origin is tuple:
        if not isinstance(value, list):
            raise ConfigError(f"{at} is {value!r:.60}; it must be a list")
        return tuple(_value(arguments[0], each, f"{at}[{index}]") for index, each in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            raise ConfigError(f"{at} is {value!r:.60}; it must be an object")
        return {name: _value(arguments[1], each, _below(at, name)) for name, each in value.items()}
    if origin is types.UnionType:
        if value is None and types.NoneType in arguments:
            return None
        for kind in arguments:
            if dataclasses.is_dataclass(kind):
                return made(typing.cast("type[Any]", kind), value, at)
            if kind is not types.NoneType and _is_a(value, kind):
                return value
    elif _is_a(value, getattr(hint, "__supertype__", hint)):
        return value
    raise ConfigError(f"{at} is {value!r:.60}; it must be {_word(hint)}")


def _is_a(value: Any, kind: Any) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _word(hint: Any) -> str:
    words = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", types.NoneType: "null"}
    kinds = typing.get_args(hint) or (getattr(hint, "__supertype__", hint),)
    return " or ".join(words[kind] for kind in kinds)


def _below(at: str, name: str) -> str:
    return f"{at}.{name}" if at else name


def above(value: float, name: str) -> None:
    """Raises ConfigError unless a number is above 0 and finite."""
    if not 0 < value < math.inf:
        raise ConfigError(f"{name} is {value!r}; it must be a number above 0")


def increasing(counts: tuple[int, ...], name: str) -> None:
    """Raises ConfigError unless counts increase from 1 or more."""
    if not counts or counts[0] < 1 or any(after <= before for before, after in itertools.pairwise(counts)):
        raise ConfigError(f"{name} are {list(counts)}; they must be whole numbers from 1 that increase")
