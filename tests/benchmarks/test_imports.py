"""Benchmarks and scripts import only what the package has: most of them run too long for a test of their own."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted([*ROOT.glob("benchmarks/**/*.py"), *ROOT.glob("scripts/**/*.py")])


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_what_a_script_imports_of_the_package_is_there(file: Path) -> None:
    for found in ast.walk(ast.parse(file.read_text())):
        if isinstance(found, ast.ImportFrom) and (found.module or "").split(".")[0] == "quire":
            module = importlib.import_module(str(found.module))
            for name in found.names:
                if not hasattr(module, name.name):
                    importlib.import_module(f"{found.module}.{name.name}")
