"""Imports scripts of the folder `benchmarks`, which import each other by their bare names."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def benchmark(name: str) -> ModuleType:
    """A script, or a module of a script's folder, by its name without `.py`."""
    with pytest.MonkeyPatch.context() as patch:
        folders = (BENCHMARKS / name for name in ("", "compose", "retention_quality", "peers"))
        patch.setattr(sys, "path", [*map(str, folders), *sys.path])
        return importlib.import_module(name)
