"""Rewrites bounds of numbers that llguidance 1.9.1 does not enforce."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

NEAR_ZERO = 1e-30
"""Replaces the smallest number above 0. llguidance's expressions for much smaller numbers are nested too deep."""

NUM_DIGITS = 15
"""Significant digits of the smallest number above an integer, fewer than a double has: llguidance rounds some numbers
with more digits, and accepts 2.00 as at most 1.9999999999999998.
"""


def separate_bounds(schemas: Iterable[dict[str, Any]]) -> None:
    """Replaces exclusive bounds that are integers where another bound is farther from 0 and less than 1 away.

    llguidance would allow the integer itself (1 for 1 < x <= 1.5, -0 for -0.5 <= x < 0). The next number with
    NUM_DIGITS digits becomes an inclusive bound. The other bound may be in any of the schemas, because llguidance
    combines them.
    """
    every = list(schemas)
    _separate(every, "minimum", "maximum")
    _separate(every, "maximum", "minimum")


def _separate(schemas: list[dict[str, Any]], side: str, other: str) -> None:
    exclusive = {"minimum": "exclusiveMinimum", "maximum": "exclusiveMaximum"}
    is_lower = side == "minimum"
    sign = 1 if is_lower else -1
    bounds = [own.get(word) for own in schemas for word in (other, exclusive[other])]
    fractions = [each for each in bounds if isinstance(each, float) and math.isfinite(each) and each % 1]
    near = set(map(math.floor if is_lower else math.ceil, fractions))
    for own in schemas:
        inclusive, bound = own.get(side), own.get(exclusive[side])
        if bound is True:  # the form of draft 4
            inclusive, bound = None, inclusive
        if (
            isinstance(inclusive, bool)
            or isinstance(bound, bool)
            or not isinstance(bound, int | float)
            or bound not in near
            or bound * sign < 0
        ):
            continue
        del own[exclusive[side]]
        own[side] = bound + sign * 10.0 ** (len(str(abs(int(bound)))) - NUM_DIGITS) if bound else sign * NEAR_ZERO
        if isinstance(inclusive, int | float):
            own[side] = max(own[side], inclusive) if is_lower else min(own[side], inclusive)
