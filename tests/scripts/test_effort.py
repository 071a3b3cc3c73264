"""The effort setting: what it multiplies and leaves out. No test bypasses it."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path

import pytest

from tests import effort

TESTS = Path(__file__).parents[1]


def test_no_test_sets_its_number_of_examples_past_the_dial() -> None:
    found = {
        path.relative_to(TESTS).as_posix()
        for path in TESTS.rglob("*.py")
        if re.search(r"max_examples|[^\w.]settings\(", path.read_text()) and path != Path(__file__)
    }
    assert found == {"conftest.py", "effort.py"}


@pytest.mark.parametrize("name, factor", effort.FACTORS.items())
def test_the_dial_multiplies_examples(name: str, factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(effort, "EFFORT", name)
    assert effort.tries(7) == math.ceil(7 * factor) == effort.examples(7).max_examples
    assert effort.examples(7, stateful_step_count=3).stateful_step_count == 3


def test_a_pair_of_values_is_in_a_quick_matrix_if_it_is_in_the_whole_one() -> None:
    axes = ["abc", [1, 2, 3, 4], [None, 0.5], [True, False]]
    rows = list(itertools.product(*axes))
    chosen = effort.covering(rows, 2)
    for first, second in itertools.combinations(range(len(axes)), 2):
        assert {(row[first], row[second]) for row in chosen} == set(itertools.product(axes[first], axes[second]))
    # Twelve pairs of the two longest axes need as many rows; greedy takes few more.
    assert 12 <= len(chosen) <= 14 and len(rows) == 48
    assert chosen[0] == rows[0] and set(chosen) <= set(rows)


def test_pairs_that_no_row_has_are_not_wanted() -> None:
    rows = [("a", 1, "x"), ("a", 2, "x"), ("b", 2, "y"), ("b", 2, "x")]
    assert set(effort.covering(rows, 2)) == set(rows)
    assert effort.covering([("a",), ("b",)], 2) == [("a",), ("b",)]


def test_a_strength_of_one_covers_values_alone() -> None:
    rows = list(itertools.product("abc", [1, 2, 3, 4]))
    assert effort.covering(rows, 1) == [("a", 1), ("b", 2), ("c", 3), ("a", 4)]


def test_the_values_of_a_short_axis_take_turns_along_a_long_one() -> None:
    """Else all but the first head sizes would be tried in one type."""
    rows = list(itertools.product(range(7), "abc"))
    assert effort.covering(rows, 1) == list(zip(range(7), "abcabca", strict=True))
