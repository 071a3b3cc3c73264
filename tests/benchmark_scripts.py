"""Imports scripts of the folder `benchmarks`, which import each other by their bare names."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def benchmark(name: str) -> ModuleType:
    """A script by its name without `.py`."""
    with pytest.MonkeyPatch.context() as patch:
        folders = (BENCHMARKS, BENCHMARKS / "retention_quality", BENCHMARKS / "peers")
        patch.setattr(sys, "path", [*map(str, folders), *sys.path])
        return importlib.import_module(name)
