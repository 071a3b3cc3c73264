"""The files that a group of tests touches, read from what scripts/touching.py has measured."""

from __future__ import annotations

import importlib.util
import json
import sqlite3
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]

SOURCES = {
    "used.py": "LIMIT = 3\n\n\ndef limit():\n    return LIMIT\n",
    "imported.py": "LIMIT = 3\n\n\ndef limit():\n    return LIMIT\n",
    "constants.py": "LIMIT = 3\n",
    "unknown.py": "LIMIT = 3\n",
}

RUN = [
    ("tests/group/test_a.py::test_it", "used.py", {5}),
    ("tests/group/test_a.py::test_it", "imported.py", {1, 4}),
    ("tests/group/test_b.py::test_it[1]", "constants.py", {1}),
    ("tests/group/test_b.py::test_it[1]", "used.py", {1, 4}),
    ("tests/group_2/test_c.py::test_it", "imported.py", {5}),
    ("tests/group_2/test_c.py::test_it", "unknown.py", {1}),
]
"""Context, file and lines."""


@pytest.fixture(scope="module")
def touching() -> ModuleType:
    specification = importlib.util.spec_from_file_location("touching", ROOT / "scripts" / "touching.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["touching"] = module
    specification.loader.exec_module(module)
    return module


def bits(lines: set[int]) -> bytes:
    """Line numbers as coverage stores them."""
    found = bytearray(max(lines) // 8 + 1)
    for line in lines:
        found[line // 8] |= 1 << line % 8
    return bytes(found)


@pytest.fixture
def measured(touching: ModuleType, tmp_path: Path) -> Path:
    """A tree, and what its tests have run, in coverage's format."""
    sources = tmp_path / touching.SOURCES
    sources.mkdir(parents=True)
    for name, text in SOURCES.items():
        (sources / name).write_text(text)
    (tmp_path / "source").write_text("/measured")
    (tmp_path / "results.json").write_text(json.dumps({context: ("passed", 1.0, "") for context, _, _ in RUN}))
    data = sqlite3.connect(tmp_path / "coverage")
    data.execute("create table context (id integer primary key, context text)")
    data.execute("create table file (id integer primary key, path text)")
    data.execute("create table line_bits (file_id integer, context_id integer, numbits blob)")
    contexts, files = sorted({context for context, _, _ in RUN}), sorted(SOURCES)
    data.executemany("insert into context values (?, ?)", enumerate(contexts))
    data.executemany(
        "insert into file values (?, ?)", ((number, f"/measured/{name}") for number, name in enumerate(files))
    )
    for context, name, lines in RUN:
        data.execute(
            "insert into line_bits values (?, ?, ?)", (files.index(name), contexts.index(context), bits(lines))
        )
    data.commit()
    data.close()
    return tmp_path


def test_a_file_counts_if_a_function_of_it_runs_or_it_has_none(touching: ModuleType, measured: Path) -> None:
    known = touching.Touching(measured)
    found = known.sources_of(measured, ["tests/group", "tests/absent"])
    assert found == {f"{touching.SOURCES}/used.py", f"{touching.SOURCES}/constants.py"}
    assert known.sources_of(measured, ["tests/group/test_a.py"]) == {f"{touching.SOURCES}/used.py"}
    assert known.sources_of(measured, ["tests/group_2"]) == {
        f"{touching.SOURCES}/imported.py",
        f"{touching.SOURCES}/unknown.py",
    }
