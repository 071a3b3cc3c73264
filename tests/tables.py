"""What tests ask chunk tables."""

from __future__ import annotations

import itertools
from typing import Any

from quire.cache.counts import ChunkCounts


def available(table: ChunkCounts, codec: Any) -> int:
    """How many chunks of a codec fit now."""
    cost = table.cost(codec)
    return next(count for count in itertools.count() if not table.fits(cost * (count + 1)))
