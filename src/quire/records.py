"""Dataclasses from JSON files and objects: every value is checked, and every error names the file and the field."""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from quire.errors import ConfigError
from quire.safe_io import parse_json, read_text

Made = TypeVar("Made")


def read_record(path: Path, what: str, of: Callable[[Any], Made]) -> Made:
    """The record of a JSON file. Raises ConfigError that names the file, and the field if one is invalid.

    what  the kind of the file, for the message
    of    the record of the value in the file. Raises ConfigError
    """
    try:
        fields = parse_json(read_text(path), parse_constant=_refuse)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{what} {path}: not a file that can be read ({error})") from None
    try:
        return of(fields)
    except ConfigError as error:
        raise ConfigError(f"{what} {path}: {error}") from None


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no number")


def formatted(kind: type[Made], fields: Any, wanted: int, what: str) -> Made:
    """A dataclass from a JSON object with its fields and a format number. Raises ConfigError.

    wanted  the format number
    what    the kind of the object and the command that makes one, for the message
    """
    if not isinstance(fields, dict) or fields.get("format") != wanted:
        raise ConfigError(f"not {what}")
    return made(kind, {name: value for name, value in fields.items() if name != "format"})


def made(kind: type[Made], fields: Any) -> Made:
    """A dataclass from a JSON object with exactly its fields; those with defaults may be missing.

    Raises ConfigError that names the field: for an unknown or a missing one, a wrong type, a number that is not finite,
    and what `__post_init__` refuses.
    """
    import msgspec

    try:
        found = msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        reason, _, place = str(error).partition(" - at `$")
        at = _with_key(kind, fields, place.strip(".`"))
        if missing := re.fullmatch(r"Object missing required field `(\w+)`", reason):
            raise ConfigError(f"{at}.{missing[1]}".strip(".") + " is missing") from None
        raise ConfigError(f"{at}: {reason}" if at else reason) from None
    _check(fields, msgspec.to_builtins(found), "")
    return found


def _with_key(kind: type[Any], fields: Any, at: str) -> str:
    """The place of an error, with the key of a mapping where the library writes [...]."""
    import msgspec

    head, dots, tail = at.partition("[...]")
    if not dots:
        return at
    *before, name = re.findall(r"\w+", head)
    holder = fields = copy.deepcopy(fields)
    for part in before:
        holder = holder[int(part) if isinstance(holder, list) else part]
    for key, value in holder[name].items():
        holder[name] = {key: value}
        try:
            msgspec.convert(fields, kind)
        except msgspec.ValidationError:
            return f"{head}.{key}{tail}"
    return at


def _check(given: Any, read: Any, at: str) -> None:
    """Raises ConfigError for a field that was not read, because no dataclass has it, and for infinity and NaN."""
    if isinstance(given, dict):
        for name, value in given.items():
            below = f"{at}.{name}" if at else name
            if name not in read:
                raise ConfigError(f"unknown field {below!r}")
            _check(value, read[name], below)
    elif isinstance(given, list):
        for index, value in enumerate(given):
            _check(value, read[index], f"{at}[{index}]")
    elif isinstance(given, float) and not math.isfinite(given):
        raise ConfigError(f"{at} is {given!r}; it must be a finite number")


def above(value: float, name: str) -> None:
    """Raises ConfigError unless a number is above 0 and finite."""
    if not 0 < value < math.inf:
        raise ConfigError(f"{name} is {value!r}; it must be a number above 0")


def increasing(counts: tuple[int, ...], name: str) -> None:
    """Raises ConfigError unless counts increase from 1 or more."""
    if not counts or counts[0] < 1 or any(after <= before for before, after in itertools.pairwise(counts)):
        raise ConfigError(f"{name} are {list(counts)}; they must be whole numbers from 1 that increase")
