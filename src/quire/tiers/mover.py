"""The mover: bytes near before attention needs them. With one tier they always are."""

from __future__ import annotations

from collections.abc import Sequence

from quire.cache.segment import Path, Segment
from quire.tiers.tier import ArenaTier


class Mover:
    """Keeps the paths of each step in the arena. This one has the arena alone, so there is nowhere to move to."""

    def __init__(self, arena: ArenaTier) -> None:
        self.arena = arena

    def prepare(self, paths: Sequence[Path]) -> None:
        """Returns when every chunk of the paths is in the arena."""

    def demote(self, segment: Segment) -> bool:
        """Moves a cached segment to a farther tier; False if there is none, and the segment must be evicted instead."""
        return False
