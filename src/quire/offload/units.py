"""Shares and placements, and their two notations. A share is a fraction of 1; only texts for people have percent."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NewType

from quire.errors import ConfigError

Share = NewType("Share", float)
"""A fraction of a whole, 0 to 1."""

NONE, ALL = Share(0.0), Share(1.0)

TIERS = ("gpu", "cpu", "disk")
"""Tiers from the fastest to the slowest. A machine without a GPU has the last two."""

TOLERANCE = 1e-6
"""Largest deviation of a sum of shares from 1."""


def percent(share: Share) -> str:
    """A share for people: 0.25 is `25 %`."""
    return f"{100 * share:.4g} %"


@dataclass(frozen=True)
class Split:
    """The share of each tier, fastest first. The shares add up to 1.

    Raises ConfigError otherwise, and if a share is not within 0 to 1.
    """

    shares: tuple[Share, ...]

    def __post_init__(self) -> None:
        total = math.fsum(self.shares)
        in_range = all(-TOLERANCE <= share <= 1 + TOLERANCE for share in self.shares)
        if not in_range or not abs(total - 1) <= TOLERANCE:
            listed = ", ".join(f"{share:g}" for share in self.shares)
            raise ConfigError(f"shares {listed} add up to {total:g}; they must be within 0 to 1 and add up to 1")

    @staticmethod
    def read(values: Mapping[str, Any], tiers: Sequence[str], what: str) -> Split:
        """A split from a JSON object of shares by tier; tiers that are not named have 0. Raises ConfigError."""
        unknown = [name for name in values if name not in tiers]
        if unknown:
            raise ConfigError(f"{what}: there is no tier {unknown[0]!r} (tiers: {', '.join(tiers)})")
        shares = [values.get(name, 0.0) for name in tiers]
        if not all(isinstance(share, int | float) and not isinstance(share, bool) for share in shares):
            raise ConfigError(f"{what}: shares are numbers from 0 to 1")
        try:
            return Split(tuple(Share(float(share)) for share in shares))
        except ConfigError as error:
            raise ConfigError(f"{what}: {error}") from None

    def named(self, tiers: Sequence[str]) -> dict[str, float]:
        """Shares by tier, as `read` takes them."""
        return dict(zip(tiers, self.shares, strict=True))

    def beyond(self, tier: int) -> Share:
        """The share on slower tiers than this one."""
        return Share(math.fsum(self.shares[tier + 1 :]))
