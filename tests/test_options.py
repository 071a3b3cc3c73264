"""Options of the configuration: how values are shown and documented."""

from __future__ import annotations

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config import ALL_GROUPS, CacheConfig, EngineConfig, ServeConfig
from quire.options import SettingsGroup, format_count, format_number, settings_of
from tests.test_config import PAGE


@given(st.integers(0, 2**63))
def test_a_shown_setting_reads_back_exactly(num_bytes):
    (setting,) = (each for each in settings_of(CacheConfig) if each.name == "memory")
    assert setting.convert(setting.show(num_bytes)) == num_bytes


def test_every_setting_is_documented_and_its_default_is_valid():
    page = PAGE.read_text(encoding="utf-8")
    for group in (ServeConfig, *(field.default_factory for field in dataclasses.fields(EngineConfig))):
        for setting in settings_of(group):
            assert setting.convert(setting.show(setting.default)) == setting.default
            assert setting.doc.endswith(".")
            assert f"| `{setting.key}` |" in page
            assert setting.doc in page


@pytest.mark.parametrize("group", ALL_GROUPS, ids=lambda group: group.key)
def test_the_documented_word_for_no_value_is_taken_and_shown(group: type[SettingsGroup]) -> None:
    for setting in settings_of(group):
        if setting.default is None:
            words = re.findall(r"\b(none|auto):", setting.text)
            assert words in ([], [setting.word_for_none]), setting.key
            assert setting.show(None) == setting.word_for_none
            assert setting.convert(setting.word_for_none) is None


@pytest.mark.parametrize(
    "value, digits, text",
    [
        (1182.4, 3, "1180"),
        (1.0, 3, "1"),
        (0.01234, 3, "0.0123"),
        (254.62, 4, "254.6"),
        (0.0, 3, "0"),
        (12345678, 4, "12350000"),
        (99999, 3, "100000"),
        (0.00001234, 3, "0.0000123"),
        (float("inf"), 3, "inf"),
        (-1500.0, 2, "-1500"),
    ],
)
def test_numbers_are_rounded_without_an_exponent(value: float, digits: int, text: str) -> None:
    assert format_number(value, digits) == text


def test_one_thing_is_one() -> None:
    assert [format_count(number, "sequence") for number in (0, 1, 1000)] == [
        "0 sequences",
        "1 sequence",
        "1,000 sequences",
    ]
    assert format_count(2, "batch", "batches") == "2 batches"
