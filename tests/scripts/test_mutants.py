"""The mutants of scripts/mutants.py apply to the current sources, and there are enough of each kind."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def scripts() -> ModuleType:
    """The script as a module, with its own folder to import from."""
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        specification = importlib.util.spec_from_file_location("mutants", ROOT / "scripts" / "mutants.py")
        assert specification is not None and specification.loader is not None
        module = importlib.util.module_from_spec(specification)
        sys.modules["mutants"] = module
        specification.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(ROOT / "scripts"))


def test_every_mutant_changes_the_sources_in_one_place(scripts: ModuleType) -> None:
    sources = ROOT / scripts.SOURCES
    for mutant in scripts.read_mutants():
        before = (sources / mutant.file).read_text()
        assert mutant.planted(before) != before
        assert scripts.changed_lines(before, mutant.planted(before)), mutant.name
        for place in mutant.through:
            file, _, function = place.partition(":")
            assert scripts.body_of((sources / file).read_text(), function), f"{mutant.name!r}: there is no {place}"
        assert mutant.through or not mutant.is_native, f"{mutant.name!r}: coverage sees no lines of {mutant.file}"


def test_there_are_enough_mutants_of_each_kind(scripts: ModuleType) -> None:
    mutants = scripts.read_mutants()
    assert len(mutants) >= 40
    assert sum(mutant.is_native for mutant in mutants) >= 12
    assert sum("attention/kernels/" in mutant.file for mutant in mutants) >= 5
    assert sum(mutant.area == "unseen" for mutant in mutants) == 10


def test_a_mutant_that_the_sources_have_left_behind_is_named(scripts: ModuleType) -> None:
    mutant = scripts.Mutant("cache", "a lock is lost", "cache/tree.py", "at.locks += 1", "pass")
    with pytest.raises(scripts.MutantError, match="'a lock is lost': its old text occurs 0 times"):
        mutant.planted("locks = 1\n")
    with pytest.raises(scripts.MutantError, match="occurs 2 times"):
        mutant.planted("at.locks += 1\nat.locks += 1\n")
    broken = scripts.Mutant("cache", "a lock is lost", "cache/tree.py", "pass", "(")
    with pytest.raises(scripts.MutantError, match="is no Python"):
        broken.planted("pass\n")


SOURCE = """\
LIMIT = 3


def both(a, b):
    if a > LIMIT:
        return sum(
            [a,
             b]
        )
    return a


class Kept:
    def put(
        self, x=LIMIT
    ):
        self.x = x
"""


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        pytest.param({7}, {6, 7, 8, 9}, id="a part of a statement: all of it"),
        pytest.param({5}, {5}, id="a condition: not what follows it"),
        pytest.param({15}, {17}, id="a function's head: its body"),
        pytest.param({1}, {5, 6, 7, 8, 9, 10, 17}, id="what runs on import: every function"),
    ],
)
def test_the_lines_that_tell_who_runs_a_change(scripts: ModuleType, changed: set[int], expected: set[int]) -> None:
    assert scripts.run_lines(SOURCE, changed) == expected


def test_changed_lines_are_those_that_differ(scripts: ModuleType) -> None:
    assert scripts.changed_lines("a\nb\nc\n", "a\nx\nc\n") == {2}
    assert scripts.changed_lines("a\nb\nc\n", "a\nc\n") == {2}
    assert scripts.changed_lines("a\nb\n", "a\nx\nb\n") == {1, 2}, "between two lines"


def test_tests_of_every_file_have_their_turn_before_one_file_has_two(scripts: ModuleType) -> None:
    slow = [scripts.Test(f"slow.py::{n}", 1.5, 5) for n in range(4)]
    quick = [scripts.Test(f"quick.py::{n}", 0.1 * n, 2) for n in range(3)]
    wide = [scripts.Test("wide.py::all", 0.1, 90)]
    order = [test.name for test in scripts.in_order([*wide, *slow, *reversed(quick)])]
    assert order[:3] == ["quick.py::0", "quick.py::1", "quick.py::2"], "what touches little, the quickest first"
    assert order[3:] == ["slow.py::0", "slow.py::1", "wide.py::all", "slow.py::2", "slow.py::3"]
    assert len(scripts.in_order([scripts.Test(f"a.py::{n}", 100.0, 1) for n in range(9)])) == 2, "as far as time goes"


def test_the_table_goes_between_the_marks_of_a_document(scripts: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{scripts.BEGIN}\nold\n{scripts.END}\nafter\n")
    mutant = scripts.Mutant("cache", "a lock is lost", "cache/tree.py", "a", "b")
    scripts.write_table(
        page, scripts.table([scripts.Outcome(mutant, "caught", "tests/t.py::test_x[1]", "assert", 1.0, 2, 3)])
    )
    assert page.read_text().startswith(f"before\n{scripts.BEGIN}\n| area")
    assert "| cache | a lock is lost | `cache/tree.py` | `t.py`: `test_x` |" in page.read_text()
    assert page.read_text().endswith(f"{scripts.END}\nafter\n") and "old" not in page.read_text()
    page.write_text("bare")
    with pytest.raises(scripts.MutantError, match="no place for the table"):
        scripts.write_table(page, "x")
