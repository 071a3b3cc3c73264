"""Differences of two recordings. Numbers with a fraction may differ by 1e-4."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

TOLERANCE = 1e-4
MOST_SHOWN = 6
"""Differences of one answer that are printed."""

MOST_CHARS = 240
"""Characters of a text that are printed, from shortly before the first difference."""

MISSING = "(missing)"


@dataclass(frozen=True)
class Difference:
    """Two texts at one place of an answer."""

    place: str
    before: str
    now: str

    def __str__(self) -> str:
        at = next((at for at, (old, new) in enumerate(zip(self.before, self.now, strict=False)) if old != new), 0)
        begin = max(0, at - MOST_CHARS // 3)
        shown = [("…" if begin else "") + text[begin : begin + MOST_CHARS] for text in (self.before, self.now)]
        shown = [
            text + "…" * (begin + MOST_CHARS < len(all_))
            for text, all_ in zip(shown, (self.before, self.now), strict=True)
        ]
        return f"    {self.place}\n      - {shown[0]}\n      + {shown[1]}"


def differences(before: Any, now: Any, place: str = "") -> Iterator[Difference]:
    """The places at which two JSON values differ."""
    match before, now:
        case dict(), dict():
            for name in sorted({*before, *now}):
                inner = f"{place}.{name}".lstrip(".")
                if name in before and name in now:
                    yield from differences(before[name], now[name], inner)
                else:
                    yield Difference(
                        inner, *(_shown(each[name]) if name in each else MISSING for each in (before, now))
                    )
        case list(), list():
            if len(before) != len(now):
                yield Difference(f"{place}[]", _shown(before), _shown(now))
                return
            for index, pair in enumerate(zip(before, now, strict=True)):
                yield from differences(*pair, f"{place}[{index}]")
        case _:
            if not _is_equal(before, now):
                yield Difference(place, _shown(before), _shown(now))


def _is_equal(before: Any, now: Any) -> bool:
    numbers = all(isinstance(each, int | float) and not isinstance(each, bool) for each in (before, now))
    if numbers and (isinstance(before, float) or isinstance(now, float)):
        return math.isclose(before, now, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return type(before) is type(now) and bool(before == now)


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def failures(answers: Mapping[str, Any]) -> dict[str, str]:
    """Why answers did not come or could not be read, by the names of their requests."""
    return {name: answer["failed"] for name, answer in answers.items() if answer is not None and "failed" in answer}


def report(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A paragraph for each name whose answers differ, in the order of the recording."""
    told = []
    for name in [*before, *(each for each in now if each not in before)]:
        if name in before and name in now:
            found = list(differences(before[name], now[name]))
        else:
            found = [Difference("", *(_shown(each[name]) if name in each else MISSING for each in (before, now)))]
        if found:
            more = [f"    and {len(found) - MOST_SHOWN} more"] * (len(found) > MOST_SHOWN)
            told.append("\n".join([name, *map(str, found[:MOST_SHOWN]), *more]))
    return told
