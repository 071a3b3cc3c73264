"""Settings as frozen dataclasses: keys, conversion and checks, flags, TOML files, origins and reference text.

This module knows types, docstrings and origins of values. It knows no particular setting; `quire.config` declares them.
A group is one dataclass. A setting is one of its fields, with the key `group.field`. The module imports only light
parts of the standard library, because `quire --help` loads it.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import inspect
import json
import math
import re
import textwrap
import tomllib
import types
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Protocol, Self, TypeVar

from quire.arguments import Arguments
from quire.errors import ConfigError, shown
from quire.foreign_flags import setting_hint
from quire.safe_io import read_text


@dataclass(frozen=True)
class AtLeast:
    """Annotation of a number: the smallest valid value."""

    least: float


class Explained(Protocol):
    """The meaning of a word of `OneOf`.

    about  one sentence
    """

    @property
    def about(self) -> str: ...  # noqa: D102


@dataclass(frozen=True, eq=False)
class OneOf:
    """Annotation of a text: the valid words. They are read at each use, so words added later are valid too."""

    words: Mapping[str, Explained]


Bytes = Annotated[int, "bytes"]
"""A number of bytes: an int, or text such as `512MiB`, `1.5GiB`, `20GB`."""
Count = Annotated[int, AtLeast(1)]
"""A whole number of at least 1."""

MOST_WHOLE = 2**63 - 1
"""The largest whole number of a setting, as in TOML."""

MOST_NESTED = 16
"""Most tables and lists in each other in a configuration file. Settings need one."""

COMPARED_CHARS = 100
"""Characters of an unknown key that are compared to find the nearest one. The time grows with them: 12 s for 100,000.
"""

_BINARY = {f"{prefix}{suffix}": 1024**power for power, prefix in enumerate("kmgt", 1) for suffix in ("", "ib")}
_DECIMAL = {f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", 1)}
_BYTE_UNITS = {"": 1, "b": 1, **_BINARY, **_DECIMAL}
_BOOLS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


@dataclass(frozen=True)
class Setting:
    """One setting: its key, type, default and docstring."""

    key: str
    hint: Any
    default: Any
    text: str

    @property
    def name(self) -> str:
        """The field's name: the key without its group."""
        return self.key.partition(".")[2]

    @property
    def doc(self) -> str:
        """The documentation: the docstring, and for a setting with `OneOf` the meaning of each word."""
        marks = getattr(self.hint, "__metadata__", ())
        words = marks[0].words if marks and isinstance(marks[0], OneOf) else {}
        return " ".join([self.text, *(f"{word}: {each.about}." for word, each in words.items())])

    @property
    def word_for_none(self) -> str:
        """The word for no value: `none` for a text or if the documentation says so, else `auto`."""
        return "none" if str in _alternatives(self.hint) or re.search(r"\bnone:", self.text) else "auto"

    def terms(self, *, in_words: bool) -> list[str]:
        """The valid values; see `_terms`."""
        return _terms(self.hint, in_words, self.word_for_none)

    def convert(self, value: Any) -> Any:
        """Converts a value from text, Python or TOML to the setting's type. Raises ConfigError."""
        try:
            return _convert(self.hint, value)
        except ValueError:
            *terms, last = self.terms(in_words=True)
            raise ConfigError(
                f"{self.key} is {shown(value)}; it must be {', '.join(terms)}{' or ' * bool(terms)}{last}"
            ) from None

    def show(self, value: Any) -> str:
        """The value as text for the command line or a file."""
        if value is None:
            return self.word_for_none
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, int) and Bytes in _alternatives(self.hint):
            short = format_bytes(value)
            return short if parse_bytes(short) == value else str(value)
        return str(value)


@dataclass(frozen=True)
class SettingsGroup:
    """A group of settings. The constructor converts and checks every value, so every instance is valid.

    key         first half of the key of each setting
    bare_flags  whether each setting also has a flag without the group: `--port` and `--serve.port`
    """

    key: ClassVar[str]
    bare_flags: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for setting in settings_of(type(self)):
            object.__setattr__(self, setting.name, setting.convert(getattr(self, setting.name)))

    def to_options(self) -> dict[str, Any]:
        """Every setting by its key. A group made from these equals this one."""
        return {setting.key: getattr(self, setting.name) for setting in settings_of(type(self))}

    def with_options(self, options: Mapping[str, Any]) -> Self:
        """The group with some settings changed, by key. Settings of other groups are ignored. Raises ConfigError for an
        invalid value.
        """
        own = {setting.name: options[setting.key] for setting in settings_of(type(self)) if setting.key in options}
        return replace(self, **own) if own else self


AnyGroup = TypeVar("AnyGroup", bound=SettingsGroup)


# Reading docstrings parses the source, which takes about a millisecond per group.
_settings: dict[type[SettingsGroup], tuple[Setting, ...]] = {}


def settings_of(group: type[SettingsGroup]) -> tuple[Setting, ...]:
    """The settings of a group, in the order of their declaration."""
    if group not in _settings:
        hints, docs = typing.get_type_hints(group, include_extras=True), _field_docs(group)
        _settings[group] = tuple(
            Setting(f"{group.key}.{each.name}", hints[each.name], each.default, docs[each.name])
            for each in fields(group)
        )
    return _settings[group]


def parse_bytes(value: str | int) -> int:
    """A number of bytes from an int or from text: `512MiB`, `1.5 GiB`, `2G` (binary), `20GB` (decimal).

    Raises ConfigError.
    """
    text = value.strip().lower() if isinstance(value, str) else shown(value)
    match = re.fullmatch(r"(\d{1,19}(?:\.\d{1,19})?)\s*([a-z]*)", text)
    if match is not None and match[2] in _BYTE_UNITS:
        number = float(match[1]) if "." in match[1] else int(match[1])
        if (num_bytes := int(number * _BYTE_UNITS[match[2]])) < 2**64:
            return num_bytes
    raise ConfigError(f"{shown(value)} is not a number of bytes; write it like 1073741824, 512MiB or 1.5GiB")


def format_bytes(num_bytes: int) -> str:
    """A number of bytes for people, in binary units, rounded to four digits: 1610612736 is `1.5GiB`."""
    power = min(4, max(0, num_bytes.bit_length() - 1) // 10)
    number = num_bytes / 1024**power
    digits = max(0, 3 - int(math.log10(number))) if number >= 1 else 0
    return f"{round(number, digits):.10g}{('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def format_number(value: float, digits: int = 3) -> str:
    """A number for people, rounded to `digits` significant digits, without an exponent: 1180, 0.0123."""
    if not value or not math.isfinite(value):
        return f"{value:g}"
    rounded = float(f"{value:.{digits}g}")
    text = f"{rounded:.{max(0, digits - 1 - math.floor(math.log10(abs(rounded))))}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def format_count(number: int, one: str, many: str = "") -> str:
    """A count with its noun: `1 sequence`, `2 sequences`. many: the plural, if it is not `one` and an s."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def collect(
    groups: Sequence[type[SettingsGroup]],
    options: Mapping[str, Any],
    file: Path | None,
    file_groups: Sequence[type[SettingsGroup]],
) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the given values of the settings of `groups`, and the origin of each setting: flag, file or default.

    options      values by key; they override the file
    file         TOML with one table per group, or None
    file_groups  all groups that the file may configure: one file serves the engine and the server
    Raises ConfigError for an unknown key, naming the nearest valid one.
    """
    if not isinstance(options, Mapping):
        raise ConfigError(f"options are settings by key, {{'cache.memory': '1GiB'}}, not {type(options).__name__}")
    mine = [setting.key for group in groups for setting in settings_of(group)]
    everyone = [setting.key for group in file_groups for setting in settings_of(group)]
    in_file = read_toml(file) if file is not None else {}
    sections = [group.key for group in file_groups]
    for key in in_file:
        section, dot, _ = key.partition(".")
        if dot and section not in sections:
            hint = nearest(f"[{section}]", [f"[{each}]" for each in sections])
            raise ConfigError(f"unknown section [{section}] in {file}; {hint}")
        if key in sections:
            raise ConfigError(f"{key!r} in {file} is a section: write [{key}], and its settings below")
        if key not in everyone:
            raise ConfigError(
                f"unknown setting {key!r} in {file}; {setting_hint(key) or nearest(key, everyone, LISTED)}"
            )
    for key in options:
        if key in everyone and key not in mine:
            raise ConfigError(
                f"setting {key!r} does not belong here; valid groups are {', '.join(group.key for group in groups)}"
            )
        if key not in mine:
            raise ConfigError(f"unknown setting {key!r}; {setting_hint(key) or nearest(key, mine, LISTED)}")
    values = {key: value for key, value in {**in_file, **options}.items() if key in mine}
    sources = {key: "flag" if key in options else f"file {file}" if key in in_file else "default" for key in mine}
    return values, sources


def make(group: type[AnyGroup], values: Mapping[str, Any]) -> AnyGroup:
    """A group from values by key. Settings of other groups are ignored."""
    return group(**{setting.name: values[setting.key] for setting in settings_of(group) if setting.key in values})


def read_toml(file: Path) -> dict[str, Any]:
    """The values of a TOML file by key. Raises ConfigError when there is no such file or it is not TOML."""
    try:
        tables = tomllib.loads(read_text(file))
        _check_plain(tables)
    except RecursionError:
        raise ConfigError(f"cannot read the configuration file {file}: it is nested too deeply") from None
    except (OSError, ValueError) as error:  # Python converts up to 4,300 digits, and names a function of its own
        reason = "a number has too many digits" if "set_int_max_str_digits" in str(error) else error
        raise ConfigError(f"cannot read the configuration file {file}: {reason}") from error
    flat: dict[str, Any] = {}
    for name, value in tables.items():
        flat.update(
            {f"{name}.{inner}": each for inner, each in value.items()} if isinstance(value, dict) else {name: value}
        )
    return flat


def _check_plain(tables: dict[str, Any]) -> None:
    """Raises ValueError for values that no setting can have and that a message could not show."""
    left: list[tuple[int, Any]] = [(0, tables)]
    while left:
        depth, value = left.pop()
        if depth > MOST_NESTED:
            raise ValueError("it is nested too deeply")
        if type(value) is int and abs(value) > MOST_WHOLE:
            raise ValueError("a whole number has more than 64 bits")
        if isinstance(value, (dict, list)):
            left += [(depth + 1, each) for each in (value.values() if isinstance(value, dict) else value)]


LISTED = "docs/reference/settings.md and --print-config list all settings"

LEAST_LIKENESS = 0.7
"""Ratio of equal characters from which a name is proposed for a mistyped one. Guesses below it were wrong: `--mlock`
has 0.6 in common with `--retain.local`, and `launch` 0.6 with `plan`.
"""


def nearest(key: str, valid: Iterable[str], otherwise: str = "") -> str:
    """A hint for a mistyped name: `did you mean cache.memory?`.

    otherwise  the hint if no valid name is near; empty: all valid names
    """
    names, key = list(valid), key[:COMPARED_CHARS]
    likely = max(names, key=lambda name: _likeness(key, name))
    if _likeness(key, likely) < LEAST_LIKENESS:
        return otherwise or f"valid are {', '.join(names)}"
    return f"did you mean {likely}?"


def _likeness(typed: str, name: str) -> float:
    """The likeness of two names, 0 to 1: the larger of whole names and of names without their groups. Two names of one
    group are compared only without it.
    """

    def ratio(one: str, other: str) -> float:
        return difflib.SequenceMatcher(None, one, other).ratio()

    typed, name = (each.lstrip("-").replace("_", "-").lower() for each in (typed, name))
    (group, dot, last), (its_group, _, its_last) = typed.rpartition("."), name.rpartition(".")
    if dot and group == its_group:
        return ratio(last, its_last)
    if len(last) >= LEAST_BEGINNING and its_last.startswith(last):
        return 1.0
    return max(ratio(typed, name), ratio(last, its_last))


LEAST_BEGINNING = 3
"""Characters from which the beginning of a name counts as the name."""


def add_flags(
    parser: Arguments,
    groups: Sequence[type[SettingsGroup]],
    common: Sequence[str] = (),
    left_out: Collection[str] = (),
) -> None:
    """Adds one flag a setting, with help from its docstring. Flags not given leave no trace in the namespace.

    common    keys of settings that come first in help, if they are in the groups
    left_out  keys of settings that get no flag
    """
    pairs = [(group, setting) for group in groups for setting in settings_of(group)]
    by_key = {setting.key: (group, setting) for group, setting in pairs if setting.key not in left_out}
    first = [key for key in common if key in by_key]
    titles = dict.fromkeys(first, "common settings") | {
        key: f"{group.key} settings" for key, (group, _) in by_key.items() if key not in first
    }
    sections: dict[str, Arguments] = {}
    for key, title in titles.items():
        group, setting = by_key[key]
        if title not in sections:
            sections[title] = parser.add_argument_group(title)
        _add_flag(sections[title], setting, has_bare_flag=group.bare_flags)


def _add_flag(section: Arguments, setting: Setting, *, has_bare_flag: bool) -> None:
    bare = [f"--{setting.name.replace('_', '-')}"] if has_bare_flag else []
    # The truth value is optional, so that `--allow-public` alone works.
    optional: dict[str, Any] = {"nargs": "?", "const": "true"} if setting.hint is bool else {}
    section.add_argument(
        *bare,
        f"--{setting.key}",
        dest=setting.key,
        default=argparse.SUPPRESS,
        metavar="|".join(setting.terms(in_words=False)),
        help=f"{setting.doc} (default: {setting.show(setting.default)})".replace("%", "%%"),
        **optional,
    )


def options_from(namespace: argparse.Namespace, groups: Sequence[type[SettingsGroup]]) -> dict[str, Any]:
    """The settings of these groups that are given as flags, by key."""
    keys = {setting.key for group in groups for setting in settings_of(group)}
    return {key: value for key, value in vars(namespace).items() if key in keys}


def describe(groups: Iterable[SettingsGroup], sources: Mapping[str, str]) -> str:
    """The groups as a TOML file, with the origin of each value as a comment."""
    lines: list[str] = []
    for group in groups:
        lines += ["", f"[{group.key}]"]
        for setting in settings_of(type(group)):
            value = getattr(group, setting.name)
            text = setting.show(value)
            is_bare = isinstance(value, (bool, int, float)) and text == str(value).lower()
            line = f"{setting.name} = {text if is_bare else json.dumps(text, ensure_ascii=False)}"
            lines.append(f"{line:<40}  # {sources.get(setting.key, 'default')}")
    return "\n".join(lines[1:]) + "\n"


def _field_docs(group: type[SettingsGroup]) -> dict[str, str]:
    """The string below each field of the class, as one line."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(group))).body[0]
    assert isinstance(tree, ast.ClassDef)
    docs = {}
    for field, below in zip(tree.body, tree.body[1:], strict=False):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                docs[name] = " ".join(text.split())
    return docs


def _alternatives(hint: Any) -> tuple[Any, ...]:
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if is_union else (hint,)


def _words_for_none(alternatives: Collection[Any]) -> tuple[str, ...]:
    """For a text, `auto` may be a value."""
    return ("none",) if str in alternatives else ("auto", "none")


def _convert(hint: Any, value: Any) -> Any:
    alternatives = _alternatives(hint)
    if types.NoneType in alternatives and (value is None or value in _words_for_none(alternatives)):
        return None
    for alternative in alternatives:
        with contextlib.suppress(ValueError):
            return _convert_one(alternative, value)
    raise ValueError(value)


def _convert_one(hint: Any, value: Any) -> Any:
    """Converts the value to one plain, annotated or literal type.

    Converts text. A number is no truth value, and a truth value is no number. Raises ValueError.
    """
    kind, is_text = typing.get_origin(hint) or hint, isinstance(value, str)
    if kind is Literal and value in typing.get_args(hint):
        return value
    if hint == Bytes and (is_text or type(value) is int):
        return parse_bytes(value)
    if kind is Annotated and hint != Bytes:
        plain, (mark,) = _convert_one(hint.__origin__, value), hint.__metadata__
        if plain in mark.words if isinstance(mark, OneOf) else plain >= mark.least:
            return plain
    if kind is bool and (type(value) is bool or (is_text and value.lower() in _BOOLS)):
        return value if type(value) is bool else _BOOLS[value.lower()]
    if kind is str and isinstance(value, (str, Path)):
        return str(value)
    if kind is int and (is_text or type(value) is int) and abs(int(value)) <= MOST_WHOLE:
        return int(value)
    if kind is float and (is_text or type(value) is float or (type(value) is int and abs(value) <= MOST_WHOLE)):
        number = float(value)
        if math.isfinite(number):
            return number
    raise ValueError(value)


def _terms(hint: Any, in_words: bool, word_for_none: str) -> list[str]:
    """The valid values of a type: short names for a usage line, or words for an error message."""
    terms: list[str] = []
    for kind in _alternatives(hint):
        if typing.get_origin(kind) is Literal:
            terms += typing.get_args(kind)
        elif kind == Bytes:
            terms.append("a size such as 512MiB or 1.5GiB" if in_words else "SIZE")
        elif typing.get_origin(kind) is Annotated and isinstance(kind.__metadata__[0], OneOf):
            terms += kind.__metadata__[0].words
        elif typing.get_origin(kind) is Annotated:
            terms.append(
                _terms(kind.__origin__, in_words, word_for_none)[0]
                + (f" of at least {kind.__metadata__[0].least:g}" if in_words else "")
            )
        elif kind is types.NoneType:
            terms.append(word_for_none)
        elif kind is bool:
            terms += ["true", "false"]
        else:
            terms.append(
                {int: "a whole number", float: "a number", str: "text"}[kind]
                if in_words
                else {int: "N", float: "X", str: "TEXT"}[kind]
            )
    return terms
