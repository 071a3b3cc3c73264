"""Bounds of numbers that llguidance 1.9.1 does not hold."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

NEAR_ZERO = 1e-30
"""Stands for the smallest number above 0. llguidance's expressions for much smaller ones are nested too deep."""


def separate_bounds(schemas: Iterable[dict[str, Any]]) -> None:
    """Replaces exclusive bounds that are integers where another bound is less than 1 away: llguidance would allow the
    integer itself (1 for 1 < x <= 1.5). The next double becomes an inclusive bound. The other bound may stand in any
    of the schemas, because llguidance combines them.
    """
    every = list(schemas)
    _separate(every, "minimum", "maximum", math.inf)
    _separate(every, "maximum", "minimum", -math.inf)


def _separate(schemas: list[dict[str, Any]], side: str, other: str, toward: float) -> None:
    exclusive = {"minimum": "exclusiveMinimum", "maximum": "exclusiveMaximum"}
    is_lower = side == "minimum"
    bounds = [own.get(word) for own in schemas for word in (other, exclusive[other])]
    fractions = [each for each in bounds if isinstance(each, float) and math.isfinite(each) and each % 1]
    near = set(map(math.floor if is_lower else math.ceil, fractions))
    for own in schemas:
        inclusive, bound = own.get(side), own.get(exclusive[side])
        if bound is True:  # as draft 4 writes it
            inclusive, bound = None, inclusive
        if isinstance(bound, bool) or not isinstance(bound, int | float) or bound not in near:
            continue
        del own[exclusive[side]]
        own[side] = math.nextafter(bound, toward) if bound else math.copysign(NEAR_ZERO, toward)
        if isinstance(inclusive, int | float):
            own[side] = max(own[side], inclusive) if is_lower else min(own[side], inclusive)
