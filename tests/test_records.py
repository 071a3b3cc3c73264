"""Records of JSON files: infinite numbers that JSON can write are found, and unknown fields below others."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from quire.errors import ConfigError
from quire.records import formatted, made, read_record
from quire.safe_io import parse_json


@dataclass(frozen=True)
class Part:
    size: float = 1.0


@dataclass(frozen=True)
class Whole:
    name: str
    parts: tuple[Part, ...] = ()
    sizes: dict[str, float] = field(default_factory=dict)
    places: dict[str, Part] = field(default_factory=dict)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"name": "a", "parts": [{"size": 1e999}]}', r"parts\[0\]\.size is inf; it must be a finite number"),
        ('{"name": "a", "sizes": {"b": -1e999}}', r"sizes\.b is -inf"),
        ('{"name": "a", "parts": [{}, {"colour": 1}]}', r"unknown field 'parts\[1\]\.colour'"),
        ('{"name": "a", "sizes": {"b": 1, "c": "2"}}', r"^sizes\.c: Expected `float`, got `str`"),
        ('{"name": "a", "places": {"d": {"size": 1}, "e": {"size": []}}}', r"^places\.e\.size: Expected `float`"),
        ('{"name": "a", "parts": [{"size": true}]}', r"parts\[0\]\.size: Expected `float`, got `bool`"),
        ('{"name": 3}', "name: Expected `str`, got `int`"),
        ('{"parts": []}', "^name is missing"),
        ("[]", "Expected `object`, got `array`"),
    ],
)
def test_what_is_wrong_is_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made(Whole, parse_json(text))


@pytest.mark.parametrize("text", ["{", '{"name": NaN}', "\xff"])
def test_what_is_no_json_is_refused_with_the_file(text: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match="record .*/file: not a file that can be read"):
        read_record(tmp_path / "file", "record", partial(made, Whole))
    with pytest.raises(ConfigError, match="record .*/none: not a file that can be read"):
        read_record(tmp_path / "none", "record", partial(made, Whole))


def test_what_is_wrong_in_a_file_is_named_with_the_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text('{"parts": []}')
    with pytest.raises(ConfigError, match="^record .*/file: name is missing$"):
        read_record(tmp_path / "file", "record", partial(made, Whole))


@pytest.mark.parametrize("fields", [3, [], {"name": "a"}, {"format": 2, "name": "a"}])
def test_another_format_is_refused(fields: object) -> None:
    with pytest.raises(ConfigError, match=r"^not a whole of format 1$"):
        formatted(Whole, fields, 1, "a whole of format 1")
