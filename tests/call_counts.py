"""Counts calls of functions and methods."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from quire.engine import admission
from quire.engine.admission import RequestLimits
from quire.structured.grammar_compiler import GrammarCompiler


def count_admission(monkeypatch: pytest.MonkeyPatch, *, compiles: bool = False) -> Counter[str]:
    """Counts from now on how often requests are read and checked, and their grammars asked for.

    compiles  whether calls of the compiler count, too
    """
    calls: Counter[str] = Counter()
    wanted: list[tuple[Any, str]] = [(admission, "tokenized"), (RequestLimits, "check"), (GrammarCompiler, "prepare")]
    for owner, name in wanted + [(GrammarCompiler, "compile")] * compiles:
        _count(monkeypatch, calls, owner, name)
    return calls


def _count(monkeypatch: pytest.MonkeyPatch, calls: Counter[str], owner: Any, name: str) -> None:
    call = getattr(owner, name)

    def counting(*given: Any, **named: Any) -> Any:
        calls[name] += 1
        return call(*given, **named)

    monkeypatch.setattr(owner, name, counting)
