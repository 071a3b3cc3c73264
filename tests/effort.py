"""The effort of a test run: one setting, `QUIRE_EFFORT`, for random examples, matrices and slow tests.

    short  what `make test` runs: few examples of every property, every value of a matrix, no slow tests
    quick  what continuous integration runs: some examples of every property, every pair of values in a matrix
    full   what `make test-full` runs: several times as many examples, whole matrices, slow tests
    night  many times as many examples

A test states the number of examples of a quick run; the effort multiplies it. No test sets a number of examples in
any other way (tests/scripts/test_effort.py).
"""

from __future__ import annotations

import itertools
import math
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

FACTORS = {"short": 0.3, "quick": 1, "full": 5, "night": 50}
EFFORT = os.environ.get("QUIRE_EFFORT", "short")
if EFFORT not in FACTORS:
    raise pytest.UsageError(f"QUIRE_EFFORT is {EFFORT!r}; it must be one of {', '.join(FACTORS)}")

IS_FULL = EFFORT in ("full", "night")
"""Whether tests do what takes too long for continuous integration."""


def tries(quick: int) -> int:
    """How many random cases to try where a quick run tries `quick`."""
    return math.ceil(quick * FACTORS[EFFORT])


def examples(quick: int, **more: Any) -> Any:
    """Hypothesis settings with `tries(quick)` examples; `more` are further settings."""
    from hypothesis import settings

    return settings(max_examples=tries(quick), **more)


def full_only(reason: str) -> Any:
    """Marks a test that a quick run leaves out: it is slow, or says what faster tests say on fewer cases."""
    return pytest.mark.skipif(not IS_FULL, reason=f"left to QUIRE_EFFORT=full: {reason}")


def whole(values: Sequence[Any], quick: int) -> Sequence[Any]:
    """All values, in a quick run the first `quick`, in a short run half as many: put those first that tell most."""
    return values if IS_FULL else values[: -(-quick // 2)] if EFFORT == "short" else values[:quick]


def combine(strength: int = 2, **axes: Sequence[Any]) -> Any:
    """Parametrizes a test over the product of its axes, in a quick run over rows that hold every pair of values.

    Most defects of a combination need two of its values. With a strength of 1, as in a short run, every value stands in
    some row. The first values of all axes are the first row.
    """
    rows = list(itertools.product(*axes.values()))
    if not IS_FULL:
        rows = covering(rows, 1 if EFFORT == "short" else strength)
    return pytest.mark.parametrize(",".join(axes), [row[0] if len(axes) == 1 else row for row in rows], ids=_name)


def covering(rows: Sequence[tuple[Any, ...]], strength: int) -> list[tuple[Any, ...]]:
    """A few of the rows in which all values of `strength` columns stand together that do in any.

    Greedy. Of rows that add as much, the one whose values stand in fewest of those before, then the first.
    """
    numbers: dict[tuple[Any, ...], int] = {}  # of each value of a column, and of each combination of them
    values = [
        [numbers.setdefault((column, repr(value)), len(numbers)) for column, value in enumerate(row)] for row in rows
    ]
    numbers.clear()
    parts = [
        {numbers.setdefault(part, len(numbers)) for part in itertools.combinations(row, min(strength, len(row)))}
        for row in values
    ]
    wanted, used, chosen = set(range(len(numbers))), Counter[int](), list[int]()
    while wanted:
        left = set(range(len(rows))).difference(chosen)
        best = max(left, key=lambda each: (len(parts[each] & wanted), -sum(map(used.__getitem__, values[each])), -each))
        chosen.append(best)
        wanted -= parts[best]
        used.update(values[best])
    return [rows[each] for each in chosen]


def _name(value: Any) -> str | None:
    """What a case is called: plain values as pytest calls them, others by their text."""
    if isinstance(value, (str, int, float, bool, type(None), list, tuple)):
        return None
    text = str(value)
    return text if len(text) <= 40 else type(value).__name__
